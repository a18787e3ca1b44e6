//! A Pod that a PodProbeMarker has marked, and whose programs are replaced.

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kruise_api::node_pod_probe::{NodePodProbe, PodProbe};
use kruise_api::pod_probe_marker::PodProbeMarker;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use testbed::cluster::NODE_NAME;

use crate::interop_cluster::{InteropCluster, create};

const CONDITION: &str = "example.com/idle";

/// A Pod that is marked as idle.
pub struct ProbedPod {
    name: &'static str,
    condition: PodCondition,
    /// What its node probes.
    entry: PodProbe,
}

/// The probes of a PodProbeMarker.
fn probes(command: &str) -> Value {
    json!([{ "name": "idle", "containerName": "app", "podConditionType": CONDITION,
        // A command takes longer than a second on a busy machine.
        "probe": { "exec": { "command": [command] }, "periodSeconds": 1, "timeoutSeconds": 20 },
        "markerPolicy": [
            { "state": "Succeeded", "labels": { "idle": "yes" } },
            { "state": "Failed", "labels": { "busy": "yes" } },
        ] }])
}

fn condition(pod: &Pod) -> Option<&PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == CONDITION)
}

/// Whether the condition has that status, and of the two labels the Pod has only `label`.
fn is_marked(pod: &Pod, status: &str, label: &str) -> bool {
    let labels = ["idle", "busy"].map(|key| pod.labels().contains_key(key));
    condition(pod).is_some_and(|condition| condition.status == status)
        && labels == [label == "idle", label == "busy"]
}

/// What the node probes of the Pod.
fn entry_of<'a>(object: &'a NodePodProbe, pod: &str) -> Option<&'a PodProbe> {
    object.spec.pod_probes.iter().find(|entry| entry.name == pod)
}

/// Creates the Pod and its PodProbeMarker, and waits until the Pod is marked.
pub async fn start_probes(cluster: &InteropCluster, name: &'static str) -> ProbedPod {
    let containers =
        json!([{ "name": "app", "image": "kruise-test/term:1", "imagePullPolicy": "IfNotPresent" }]);
    let metadata = json!({ "name": name, "labels": { "app": name } });
    let pods = cluster.api::<Pod>();
    create(
        &pods,
        json!({ "metadata": metadata, "spec": { "nodeName": NODE_NAME, "containers": containers } }),
    )
    .await;
    let spec = json!({ "selector": { "matchLabels": { "app": name } }, "probes": probes("true") });
    let markers = cluster.api::<PodProbeMarker>();
    create(&markers, json!({ "metadata": { "name": name }, "spec": spec })).await;
    let marked = cluster
        .wait_until(pods, name, "marked as idle", |pod| is_marked(pod, "True", "idle"))
        .await;
    let objects: Api<NodePodProbe> = Api::all(cluster.client.clone());
    let object = objects.get(NODE_NAME).await.unwrap();
    ProbedPod {
        name,
        condition: condition(&marked).unwrap().clone(),
        entry: entry_of(&object, name).unwrap().clone(),
    }
}

/// Asserts that the programs that have taken over mark the Pod no other way, and run the same probe.
pub async fn assert_unchanged(cluster: &InteropCluster, probed: &ProbedPod) {
    let pod = cluster.api::<Pod>().get(probed.name).await.unwrap();
    assert!(is_marked(&pod, "True", "idle"), "{:?}", pod.meta());
    let now = condition(&pod).unwrap();
    // Any other status in between would have changed the time.
    assert_eq!(
        (&now.status, &now.message, &now.last_transition_time),
        (
            &probed.condition.status,
            &probed.condition.message,
            &probed.condition.last_transition_time
        )
    );
    let objects: Api<NodePodProbe> = Api::all(cluster.client.clone());
    let object = objects.get(NODE_NAME).await.unwrap();
    assert_eq!(entry_of(&object, probed.name), Some(&probed.entry));
}

/// Edits the probe so that it fails, and deletes the PodProbeMarker once the Pod is marked accordingly.
pub async fn finish_probes(cluster: &InteropCluster, probed: ProbedPod) {
    let (name, markers) = (probed.name, cluster.api::<PodProbeMarker>());
    let edit = Patch::Merge(json!({ "spec": { "probes": probes("false") } }));
    markers.patch(name, &PatchParams::default(), &edit).await.unwrap();
    cluster
        .wait_until(cluster.api::<Pod>(), name, "marked as busy", |pod| {
            is_marked(pod, "False", "busy")
        })
        .await;
    markers.delete(name, &DeleteParams::default()).await.unwrap();
    let objects: Api<NodePodProbe> = Api::all(cluster.client.clone());
    let logs = || cluster.logs();
    crate::waits::poll_until("the probe is removed", &logs, || async {
        let object = objects.get_opt(NODE_NAME).await.unwrap();
        let probed = object
            .is_some_and(|object| entry_of(&object, name).is_some_and(|entry| !entry.probes.is_empty()));
        let marker = markers.get_opt(name).await.unwrap();
        (!probed && marker.is_none()).then_some(())
    })
    .await;
}
