//! A Pod that ends with its main container, and whose programs are replaced while that runs.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use testbed::cluster::NODE_NAME;

use crate::interop_cluster::{InteropCluster, create};

/// Creates the Pod, and waits until both of its containers run.
pub async fn start_pod(cluster: &InteropCluster, name: &str) {
    let container = |name: &str, env: Value| json!({ "name": name, "image": "kruise-test/term:1", "imagePullPolicy": "IfNotPresent", "env": env });
    let containers = [
        container("main", json!([])),
        container(
            "sidecar",
            json!([{ "name": "KRUISE_TERMINATE_SIDECAR_WHEN_JOB_EXIT", "value": "true" }]),
        ),
    ];
    let spec = json!({ "nodeName": NODE_NAME, "restartPolicy": "Never", "containers": containers });
    let pods = cluster.api::<Pod>();
    create(&pods, json!({ "metadata": { "name": name }, "spec": spec })).await;
    let running = |pod: &Pod| {
        ["main", "sidecar"]
            .iter()
            .all(|name| running_id(pod, name).is_some())
    };
    cluster
        .wait_until(pods, name, "both containers run", running)
        .await;
}

/// The ID without scheme of a container that runs.
pub fn running_id(pod: &Pod, container: &str) -> Option<String> {
    let mut statuses = pod.status.as_ref()?.container_statuses.iter().flatten();
    let status = statuses.find(|status| status.name == container)?;
    status.state.as_ref()?.running.as_ref()?;
    let id = status.container_id.as_ref()?;
    Some(id.strip_prefix("containerd://")?.to_owned())
}

/// Ends the main container: the sidecar is stopped, and the Pod has succeeded.
pub async fn finish_pod(cluster: &InteropCluster, name: &str) {
    let pods = cluster.api::<Pod>();
    let id = running_id(&pods.get(name).await.unwrap(), "main").unwrap();
    let kill = ["tasks", "kill", "--signal=SIGTERM", &id];
    cluster.node.runtime.ctr(&kill).unwrap();
    cluster
        .wait_until(pods, name, "succeeded", |pod| {
            let status = pod.status.as_ref();
            status.and_then(|status| status.phase.as_deref()) == Some("Succeeded")
                && running_id(pod, "sidecar").is_none()
        })
        .await;
}
