//! Sets and Pods as large as the API server takes them, and larger.

use serde_json::{Value, json};

use crate::fixture::{SharedCluster, names, record, shared_cluster};

/// Bytes of one environment variable; the API server has no limit but that of the whole object.
const VARIABLE: usize = 100_000;

/// A container with so many large variables.
fn container(name: &str, variables: usize) -> Value {
    let env: Vec<Value> = (0..variables)
        .map(|at| json!({ "name": format!("LARGE_{at}"), "value": "x".repeat(VARIABLE) }))
        .collect();
    json!({ "name": name, "image": "i:1", "env": env })
}

/// Of 1.4 of the 1.5 MiB that etcd stores.
fn large_pod() -> Value {
    json!({ "spec": { "containers": [container("app", 14)] } })
}

#[tokio::test]
async fn set_that_is_too_large_for_a_policy_is_injected_by_the_webhook() {
    let SharedCluster { cluster, .. } = shared_cluster().await;
    let containers = |variables| json!({ "containers": [container("side-bulky", variables)] });
    cluster.create_set("bulky", containers(1));
    if cluster.serves_policies() {
        let condition = cluster.wait_injected_by("bulky", "False", "Unsupported");
        assert_eq!(
            condition["message"],
            "new Pods are injected by a webhook: a policy cannot express the SidecarSet: spec is too large for an expression of a policy"
        );
    }
    cluster.wait_dry_run("bulky", "injected", |pod| names(pod) == ["side-bulky", "app"]);

    // A set that fits, fits with its status and as a revision; a larger one is refused by etcd.
    let apply = |variables| {
        let selector = json!({ "matchLabels": { "app": "bulky" } });
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet", "metadata": { "name": "bulky" },
            "spec": { "selector": selector, "containers": [container("side-bulky", variables)] } });
        cluster
            .plane
            .apply(&object.to_string())
            .map_err(|why| format!("{why:#}"))
    };
    apply(15).unwrap();
    cluster.wait_set("bulky", "its revision", |set| {
        set["status"]["observedGeneration"] == set["metadata"]["generation"]
    });
    let refused = apply(16).unwrap_err();
    assert!(refused.contains("etcdserver: request is too large"), "{refused}");
}

/// A Pod that fits without a set is injected as long as the result fits. Else the failure policy decides, unless a policy
/// injects: then the API server refuses the result.
#[tokio::test]
async fn pod_near_the_size_limit_is_injected_while_it_fits() {
    let SharedCluster { cluster, .. } = shared_cluster().await;
    let create = |app: &str, patch: &Value| {
        let mut pod = json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": format!("large-{app}"), "namespace": "default", "labels": { "app": app } },
            "spec": { "automountServiceAccountToken": false } });
        json_patch::merge(&mut pod, patch);
        cluster
            .plane
            .apply(&pod.to_string())
            .map_err(|why| format!("{why:#}"))
    };
    create("alone", &large_pod()).unwrap();
    let shared = json!([{ "name": "side", "image": "i:1", "shareVolumePolicy": { "type": "enabled" },
        "transferEnv": [{ "sourceContainerName": "app", "envName": "SMALL" }] }]);
    cluster.create_set("small", json!({ "containers": shared }));
    cluster.create_set(
        "large",
        json!({ "containers": [container("one", 1), container("two", 1)] }),
    );
    for app in ["small", "large"] {
        cluster.wait_dry_run(app, "injected", |pod| names(pod).len() > 1);
    }
    create("small", &large_pod()).unwrap();
    let stored = cluster.get("pod", "large-small").unwrap();
    assert_eq!(names(&stored), ["side", "app"]);
    create("large", &large_pod()).unwrap();
    let stored = cluster.get("pod", "large-large").unwrap();
    assert_eq!(names(&stored), ["app"]);
    let fail =
        json!({ "metadata": { "annotations": { "apps.kruise.io/sidecarset-failure-policy": "Fail" } } });
    cluster.patch_set("large", &fail);
    let text = "etcd stores 1572864";
    cluster.wait_until(text, || match cluster.try_dry_run_with("large", &large_pod()) {
        Err(why) if why.contains(text) => Ok(()),
        other => Err(format!("{:?}", other.map(drop))),
    });

    // All annotations of a Pod together have 256 KiB.
    let note = "x".repeat((256 << 10) - 100);
    let annotated = json!({ "metadata": { "annotations": { "example.com/note": note } },
        "spec": { "containers": [container("app", 0)] } });
    let app = |name: &str| json!({ "metadata": { "name": name } });
    let with_name = |name: &str| {
        let mut pod = annotated.clone();
        json_patch::merge(&mut pod, &app(name));
        pod
    };
    create("alone", &with_name("annotated")).unwrap();
    if cluster.serves_policies() {
        cluster.wait_dry_run("small", "injected by the policy", |pod| {
            names(pod).len() > 1 && record(pod, "small")["updateTimestamp"].is_null()
        });
    }
    let created = create("small", &with_name("annotated-small"));
    if cluster.serves_policies() {
        let refused = created.unwrap_err();
        assert!(
            refused.contains("metadata.annotations: Too long: may not be more than 262144 bytes"),
            "{refused}"
        );
    } else {
        created.unwrap();
        let stored = cluster.get("pod", "annotated-small").unwrap();
        assert_eq!(names(&stored), ["app"]);
    }
}
