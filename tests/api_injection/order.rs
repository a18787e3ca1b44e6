//! The API server runs policies in an order that changes; their result does not.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use crate::cluster::InjectionCluster;
use crate::stored::{Stored, compile_all, inject_all};

fn set(name: &str, mut spec: Value) -> Stored {
    spec["selector"] = json!({ "matchLabels": { "app": "ordered" } });
    // The order of volumes shows the order of the policies.
    spec["volumes"] = json!([{ "name": format!("volume-{name}"), "emptyDir": {} }]);
    spec["imagePullSecrets"] = json!([{ "name": "all" }, { "name": name }]);
    for list in ["containers", "initContainers"] {
        for container in spec[list].as_array_mut().into_iter().flatten() {
            container["image"] = json!("i");
            container["volumeMounts"] = json!([{ "name": format!("volume-{name}"), "mountPath": "/own" }]);
            container["shareVolumePolicy"] = json!({ "type": "enabled" });
        }
    }
    Stored::with_policy(&json!({ "metadata": { "name": name }, "spec": spec }))
}

/// Sets that would all like to be first, that write the same annotation, and that read what the others write.
fn sets() -> Vec<Stored> {
    let annotations = |retained: &str, overwritten: &str| {
        json!([
            { "annotations": { "retained": retained, "both": retained }, "patchPolicy": "Retain" },
            { "annotations": { "overwritten": overwritten }, "patchPolicy": "Overwrite" },
        ])
    };
    let before = "BeforeAppContainer";
    let behind = "AfterAppContainer";
    let from = |key: &str| {
        let field = json!({ "fieldRef": { "fieldPath": format!("metadata.annotations['{key}']") } });
        json!([{ "sourceContainerNameFrom": field, "envNames": ["A", "SHARED"] }])
    };
    let resources = json!({
        "targetContainersMode": "sum",
        "targetContainersNameRegex": ".*",
        "resourcesExpr": { "requests": { "cpu": "cpu*50%" } },
    });
    let hot = json!({ "upgradeType": "HotUpgrade", "hotUpgradeEmptyImage": "e" });
    let alpha = json!({
        "patchPodMetadata": annotations("main", "main"),
        "containers": [
            { "name": "z", "podInjectPolicy": before },
            { "name": "b", "podInjectPolicy": before, "resourcesPolicy": resources },
            { "name": "y", "podInjectPolicy": behind, "env": [{ "name": "SHARED", "value": "no" }] },
        ],
        "initContainers": [{ "name": "i3", "podInjectPolicy": before, "restartPolicy": "Always" }],
    });
    let beta = json!({
        "patchPodMetadata": annotations("other", "other"),
        "containers": [
            { "name": "x", "podInjectPolicy": before, "transferEnv": from("retained") },
            { "name": "a", "podInjectPolicy": behind, "transferEnv": from("overwritten") },
        ],
        "initContainers": [
            { "name": "i2", "podInjectPolicy": behind },
            { "name": "i4", "podInjectPolicy": behind },
        ],
    });
    let gamma = json!({
        // Comes first because it names its namespace.
        "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": "default" } },
        "patchPodMetadata": [{ "annotations": { "both": "overwritten" }, "patchPolicy": "Overwrite" }],
        "containers": [
            { "name": "hot", "podInjectPolicy": before, "upgradeStrategy": hot },
            { "name": "w", "podInjectPolicy": behind, "resourcesPolicy": resources },
        ],
        "initContainers": [{ "name": "i1", "podInjectPolicy": behind, "restartPolicy": "Always" }],
    });
    vec![set("alpha", alpha), set("beta", beta), set("gamma", gamma)]
}

fn pods() -> [Value; 2] {
    let env = json!([{ "name": "A", "value": "1" }, { "name": "SHARED", "value": "yes" }]);
    let main = json!({
        "name": "main",
        "image": "i",
        "env": env,
        "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
        "resources": { "requests": { "cpu": "200m" } },
    });
    let other =
        json!({ "name": "other", "image": "i", "env": env, "resources": { "requests": { "cpu": "1" } } });
    let pod = json!({
        "metadata": { "name": "p", "namespace": "default", "labels": { "app": "ordered" } },
        "spec": { "volumes": [{ "name": "data", "emptyDir": {} }], "containers": [main, other] },
    });
    let mut with_init = pod.clone();
    with_init["spec"]["initContainers"] = json!([{ "name": "i0", "image": "i" }]);
    [pod, with_init]
}

#[tokio::test]
async fn result_does_not_depend_on_the_order_of_policies() {
    let Some(cluster) = InjectionCluster::start_with_policies().await else {
        return;
    };
    let (sets, pods) = (sets(), pods());
    let mut expected = Vec::new();
    for pod in &pods {
        let stored = cluster.create_pod(pod).await.unwrap();
        let pod = inject_all(&sets, &stored);
        let metadata = json!({ "name": "p", "annotations": pod["metadata"]["annotations"] });
        let request = json!({ "metadata": metadata, "spec": pod["spec"] });
        expected.push(cluster.create_pod(&request).await.unwrap());
    }
    let mut policies = compile_all(&sets);
    // Among few policies the API server only rotates one order.
    for at in 0..12 {
        let name = format!("other-{at}");
        let mut others = policies[..2].to_vec();
        for object in &mut others {
            object["metadata"]["name"] = json!(name);
        }
        others[0]["spec"]["matchConstraints"]["objectSelector"] = json!({ "matchLabels": { "app": "none" } });
        others[1]["spec"]["policyName"] = json!(name);
        policies.extend(others);
    }
    cluster.install(policies).await;

    let mut orders = BTreeSet::new();
    for time in 0..100 {
        for (pod, expected) in pods.iter().zip(&expected) {
            let actual = cluster.create_pod(pod).await.unwrap();
            for list in ["containers", "initContainers"] {
                assert_eq!(actual["spec"][list], expected["spec"][list], "{list}");
            }
            let expected = expected["metadata"]["annotations"].to_string();
            let expected = expected.replace(r#"\"1970-01-01T00:00:00Z\""#, "null");
            assert_eq!(actual["metadata"]["annotations"].to_string(), expected);
            for list in ["volumes", "imagePullSecrets"] {
                assert_eq!(names(&actual["spec"][list]).len(), 4, "{list}");
            }
            orders.insert(names(&actual["spec"]["volumes"]));
        }
        if orders.len() >= 5 {
            return;
        }
        cluster.touch("other-0", time).await;
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    panic!("too few orders of policies: {orders:?}");
}

fn names(list: &Value) -> Vec<String> {
    let items = list.as_array().unwrap().iter();
    items
        .map(|item| item["name"].as_str().unwrap().to_owned())
        .collect()
}
