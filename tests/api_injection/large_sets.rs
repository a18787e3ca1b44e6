//! Sets and Pods as large as they get: policies have limits of size and of time.

use serde_json::{Map, Value, json};

use crate::cluster::InjectionCluster;
use crate::stored::{Stored, compile_all, inject_all};

fn many<T: FromIterator<Value>>(count: usize, item: impl Fn(usize) -> Value) -> T {
    (0..count).map(item).collect()
}

fn sidecar(at: usize) -> Value {
    let env: Value = many(
        50,
        |n| json!({ "name": format!("OWN_{n}"), "value": "v".repeat(200) }),
    );
    let names: Value = many(50, |n| json!(format!("ENV_{n}")));
    let position = if at.is_multiple_of(2) {
        "BeforeAppContainer"
    } else {
        "AfterAppContainer"
    };
    json!({
        "name": format!("sidecar-{at}"), "image": "i", "env": env, "args": ["x".repeat(20_000)],
        "podInjectPolicy": position,
        "shareVolumePolicy": { "type": "enabled" },
        "shareVolumeDevicePolicy": { "type": "enabled" },
        "transferEnv": [{ "sourceContainerName": "main-1", "envNames": names }],
        "resourcesPolicy": {
            "targetContainersMode": "sum",
            "targetContainersNameRegex": "main",
            "resourcesExpr": { "limits": { "cpu": "max(cpu*50%, 50m)", "memory": "memory/3 + 10Mi" } },
        },
    })
}

fn container(at: usize) -> Value {
    let mount = |n| {
        let path = format!("/data/{at}/{n}");
        json!({ "name": "data", "mountPath": path, "subPathExpr": format!("$(ENV_{n})") })
    };
    json!({
        "name": format!("main-{at}"),
        "image": "i",
        "env": many::<Value>(40, |n| json!({ "name": format!("ENV_{n}"), "value": "v" })),
        "volumeMounts": many::<Value>(16, mount),
        "resources": { "limits": { "cpu": "100m", "memory": "100Mi" } },
    })
}

/// Twenty sidecars with all that they can share, for a Pod with 400 mounts: 9000 copies, of some 15 000 that there
/// is time for.
#[tokio::test]
async fn large_sets_and_pods_are_within_the_limits() {
    let Some(cluster) = InjectionCluster::start_with_policies().await else {
        return;
    };
    let annotations: Map<String, Value> = (0..50)
        .map(|n| (format!("a-{n}"), json!("x".repeat(500))))
        .collect();
    let sets = [Stored::with_policy(
        &json!({ "metadata": { "name": "large" }, "spec": {
        "selector": { "matchLabels": { "app": "large" } },
        "patchPodMetadata": [{ "annotations": annotations }],
        "containers": many::<Value>(20, sidecar),
    } }),
    )];
    let volume = json!({ "name": "data", "emptyDir": {} });
    let pod = json!({
        "metadata": { "name": "p", "namespace": "default", "labels": { "app": "large" } },
        "spec": { "volumes": [volume], "containers": many::<Value>(25, container) },
    });
    let stored = cluster.mutate(&pod).await.unwrap();
    let expected = inject_all(&sets, &stored);
    let policies = compile_all(&sets);
    println!("policy of {} bytes", policies[0].to_string().len());
    cluster.install(policies).await;
    let start = std::time::Instant::now();
    let actual = cluster
        .mutate(&pod)
        .await
        .map_err(|why| why[why.len().saturating_sub(300)..].to_owned())
        .unwrap();
    println!("Pod after {:?}", start.elapsed());
    let shared = |pod: &Value| -> Vec<Value> {
        let containers = pod["spec"]["containers"].as_array().unwrap().iter();
        containers
            .map(|c| {
                json!([
                    c["name"],
                    c["env"],
                    c["volumeMounts"],
                    c["resources"]["limits"]["cpu"]
                ])
            })
            .collect()
    };
    assert_eq!(shared(&actual), shared(&expected));
}
