//! Both versions through the real conversion webhook.

use kruise_api::{keys, v1alpha1};
use kube::Api;
use serde_json::{Value, json};

use crate::webhook_cluster::{create, dynamic_api, get, merge, merge_status, running_status, shared_cluster};

const ALPHA: &str = "apps.kruise.io/v1alpha1";
const BETA: &str = "apps.kruise.io/v1beta1";

fn without_server_fields(mut object: Value) -> Value {
    for field in ["resourceVersion", "managedFields", "generation"] {
        object["metadata"].as_object_mut().unwrap().remove(field);
    }
    object
}

#[tokio::test]
async fn recreate_request_survives_v1alpha1_update() {
    let cluster = shared_cluster();
    let admin = cluster.admin().await;
    cluster
        .create_pod("conversion", Some("n1"), running_status())
        .await;
    let (alpha, beta) = (
        dynamic_api(&admin, ALPHA, "ContainerRecreateRequest", Some("default")),
        dynamic_api(&admin, BETA, "ContainerRecreateRequest", Some("default")),
    );
    let request = json!({
        "apiVersion": ALPHA, "kind": "ContainerRecreateRequest", "metadata": { "name": "conversion" },
        "spec": { "podName": "conversion", "containers": [{ "name": "app" }], "ttlSecondsAfterFinished": 600 },
    });
    create(&alpha, request).await.unwrap();
    let status = json!({ "status": {
        "phase": "Recreating",
        "containerStatusSnapshot": [{ "name": "app", "ready": true, "restartCount": 3, "containerID": "containerd://2" }],
        "conditions": [
            { "type": "PreRecreateGrace", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z",
              "reason": "PreRecreateGrace", "message": keys::PRE_RECREATE_GRACE_MESSAGE },
            { "type": "Other", "status": "False", "lastTransitionTime": "2026-01-02T03:04:06Z",
              "reason": "Because", "message": "" },
        ],
    } });
    let stored = merge_status(&beta, "conversion", status).await.unwrap();

    let old = get(&alpha, "conversion").await;
    let annotations = &old["metadata"]["annotations"];
    assert_eq!(annotations[keys::CRR_UNREADY_ACQUIRED], "2026-01-02T03:04:05Z");
    assert!(
        annotations[keys::CRR_SYNC_CONTAINER_STATUSES]
            .as_str()
            .unwrap()
            .contains("containerd://2")
    );
    let reader: Api<v1alpha1::ContainerRecreateRequest> = Api::namespaced(admin.client.clone(), "default");
    assert_eq!(
        reader.get("conversion").await.unwrap().spec.0.pod_name,
        "conversion"
    );

    let note = json!({ "metadata": { "annotations": { "note": "by a client that knows v1alpha1 only" } } });
    merge(&alpha, "conversion", note).await.unwrap();
    let after = get(&beta, "conversion").await;
    assert_eq!(after["status"], stored["status"]);
    assert_eq!(after["spec"], stored["spec"]);
    assert!(after["metadata"]["annotations"]["note"].is_string());
    assert!(after["metadata"]["annotations"][keys::CRR_CONDITIONS].is_null());
}

/// What a manager that only knows v1alpha1 writes: the snapshot as an annotation.
#[tokio::test]
async fn v1alpha1_annotations_convert_to_status() {
    let cluster = shared_cluster();
    let admin = cluster.admin().await;
    cluster
        .create_pod("old-manager", Some("n1"), running_status())
        .await;
    let alpha = dynamic_api(&admin, ALPHA, "ContainerRecreateRequest", Some("default"));
    let request = json!({
        "apiVersion": ALPHA, "kind": "ContainerRecreateRequest", "metadata": { "name": "old-manager" },
        "spec": { "podName": "old-manager", "containers": [{ "name": "app" }] },
    });
    create(&alpha, request).await.unwrap();
    merge_status(
        &alpha,
        "old-manager",
        json!({ "status": { "phase": "Recreating" } }),
    )
    .await
    .unwrap();
    let snapshot = r#"[{"name":"app","ready":true,"restartCount":3,"containerID":"containerd://2"}]"#;
    let patch = json!({ "metadata": { "annotations": {
        keys::CRR_SYNC_CONTAINER_STATUSES: snapshot, keys::CRR_UNREADY_ACQUIRED: "2026-01-02T03:04:05Z",
    } } });
    merge(&alpha, "old-manager", patch).await.unwrap();
    let beta = dynamic_api(&admin, BETA, "ContainerRecreateRequest", Some("default"));
    let status = get(&beta, "old-manager").await["status"].clone();
    assert_eq!(status["phase"], "Recreating");
    assert_eq!(
        status["containerStatusSnapshot"],
        serde_json::from_str::<Value>(snapshot).unwrap()
    );
    assert_eq!(
        status["conditions"][0]["lastTransitionTime"],
        "2026-01-02T03:04:05Z"
    );
}

#[tokio::test]
async fn node_image_keeps_pull_secret_modes() {
    let admin = shared_cluster().admin().await;
    let (alpha, beta) = (
        dynamic_api(&admin, ALPHA, "NodeImage", None),
        dynamic_api(&admin, BETA, "NodeImage", None),
    );
    let image = json!({
        "apiVersion": BETA, "kind": "NodeImage", "metadata": { "name": "modes" },
        "spec": { "images": { "nginx": {
            "pullSecrets": [{ "namespace": "a", "name": "b", "mode": "batch" }],
            "tags": [{ "tag": "1", "pullPolicy": { "ttlSecondsAfterFinished": 1 } }],
        } } },
    });
    create(&beta, image).await.unwrap();
    let before = get(&beta, "modes").await;
    let old = get(&alpha, "modes").await;
    assert!(old["spec"]["images"]["nginx"]["pullSecrets"][0]["mode"].is_null());
    assert!(old["metadata"]["annotations"][keys::NODE_IMAGE_SECRET_MODES].is_string());
    let change = json!({ "metadata": { "labels": { "changed": "yes" } } });
    merge(&alpha, "modes", change).await.unwrap();
    let mut after = without_server_fields(get(&beta, "modes").await);
    assert_eq!(
        after["metadata"]["labels"]
            .as_object_mut()
            .unwrap()
            .remove("changed"),
        Some(json!("yes"))
    );
    after["metadata"].as_object_mut().unwrap().remove("labels");
    assert_eq!(after, without_server_fields(before));
}
