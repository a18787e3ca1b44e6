//! A Pod whose containers start one after the other, and whose manager is replaced between them.

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use serde_json::{Value, json};
use testbed::cluster::NODE_NAME;

use crate::interop_cluster::{InteropCluster, create};
use crate::sidecar_termination::running_id;

/// A Pod whose first container is not ready yet.
pub struct PodInBetween {
    name: &'static str,
    barrier_uid: Option<String>,
}

/// Creates the Pod, and waits until its first container runs.
pub async fn start_pod(cluster: &InteropCluster, name: &'static str) -> PodInBetween {
    let container = |name: &str, priority: &str, probe: Value| {
        json!({ "name": name, "image": "kruise-test/term:1", "imagePullPolicy": "IfNotPresent", "readinessProbe": probe,
            "env": [{ "name": "KRUISE_CONTAINER_PRIORITY", "value": priority }] })
    };
    let probe =
        json!({ "exec": { "command": ["test", "-e", "/ready"] }, "periodSeconds": 1, "timeoutSeconds": 20 });
    let containers = [
        container("first", "10", probe),
        container("second", "1", Value::Null),
    ];
    let spec = json!({ "nodeName": NODE_NAME, "containers": containers });
    let pods = cluster.api::<Pod>();
    create(&pods, json!({ "metadata": { "name": name }, "spec": spec })).await;
    let in_between = |pod: &Pod| running_id(pod, "first").is_some() && running_id(pod, "second").is_none();
    let pod = cluster
        .wait_until(pods, name, "the first container runs", in_between)
        .await;
    let second = &pod.spec.as_ref().unwrap().containers[1];
    let barrier = second
        .env
        .iter()
        .flatten()
        .any(|env| env.name == "KRUISE_CONTAINER_BARRIER");
    assert!(barrier, "{second:?}");
    let barrier_uid = barrier_of(cluster, name).await.uid();
    PodInBetween { name, barrier_uid }
}

async fn barrier_of(cluster: &InteropCluster, name: &str) -> ConfigMap {
    let config_maps = cluster.api::<ConfigMap>();
    config_maps.get(&format!("{name}-barrier")).await.unwrap()
}

/// The second container starts once the first is ready.
pub async fn finish_pod(cluster: &InteropCluster, pod: PodInBetween) {
    let PodInBetween { name, barrier_uid } = pod;
    let pods = cluster.api::<Pod>();
    let found = pods.get(name).await.unwrap();
    assert!(running_id(&found, "second").is_none(), "{name}: it did not wait");
    let id = running_id(&found, "first").unwrap();
    let touch = ["tasks", "exec", "--exec-id=ready", &id, "touch", "/ready"];
    cluster.node.runtime.ctr(&touch).unwrap();
    cluster
        .wait_until(pods, name, "both containers run", |pod| {
            running_id(pod, "second").is_some()
        })
        .await;
    assert_eq!(barrier_of(cluster, name).await.uid(), barrier_uid, "{name}");
}
