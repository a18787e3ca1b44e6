//! Probes while the runtime hangs, and of Pods whose status names what is not theirs.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::node_pod_probe::{ContainerProbeState, NodePodProbe, ProbeState};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use support::fault_cri::{FakeContainer, Fault};
use support::waits::{self, by_name};

use crate::fault_node::FaultNode;

/// Lets the daemon run this probe each second in the Pod.
async fn write_probe(node: &FaultNode, pod: &Pod, probe: Value) {
    let mut each_second = json!({ "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1 });
    json_patch::merge(&mut each_second, &probe);
    let probes = json!([{ "name": "m#p", "containerName": "main", "probe": each_second }]);
    let of_pod = json!({ "namespace": node.namespace, "name": pod.metadata.name, "uid": pod.metadata.uid,
        "IP": "127.0.0.9", "probes": probes });
    let object = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "NodePodProbe",
        "metadata": { "name": node.name }, "spec": { "podProbes": [of_pod] } });
    let params = PatchParams::apply("test").force();
    node.node_pod_probes()
        .patch(node.name, &params, &Patch::Apply(object))
        .await
        .unwrap();
}

/// Waits until the state of the probe is such.
async fn wait_state(
    node: &FaultNode,
    what: &str,
    predicate: impl Fn(&ContainerProbeState) -> bool,
) -> ContainerProbeState {
    let read = |object: NodePodProbe| {
        let mut pods = object.status.unwrap_or_default().pod_probe_statuses.into_iter();
        pods.next().and_then(|mut pod| pod.probe_states.pop())
    };
    let mut found = waits::watch_until(
        what,
        &|| node.log_tail(),
        node.node_pod_probes(),
        by_name(node.name),
        read,
        |found: &[&Option<ContainerProbeState>]| {
            found.iter().any(|state| state.as_ref().is_some_and(&predicate))
        },
    )
    .await;
    found.remove(0).unwrap()
}

fn exec() -> Value {
    json!({ "exec": { "command": ["check"] } })
}

/// Only a command that hangs fails its probe: a hanging runtime says nothing about the container.
#[tokio::test]
async fn hanging_runtime_keeps_the_state_of_a_probe() {
    let node = FaultNode::start("probe-hang").await;
    let pod = node.create_pod("probe-hang").await;
    node.set_running(&pod, "ph", 0).await;
    write_probe(&node, &pod, exec()).await;
    wait_state(&node, "it succeeds", |state| state.state == ProbeState::Succeeded).await;

    for method in ["Version", "ExecSync"] {
        node.runtime.inject_fault(method, Fault::Hang);
    }
    // The second one begins after the first has been judged, and the third after that could have been written.
    let earlier = node.runtime.calls("ExecSync");
    node.runtime
        .wait_until("two have ended", |state| state.calls["ExecSync"] >= earlier + 3)
        .await;
    let state = wait_state(&node, "it is kept", |_| true).await;
    assert_eq!(state.state, ProbeState::Succeeded, "{state:?}");
    node.runtime.clear_fault("Version");
    let state = wait_state(&node, "it fails", |state| state.state == ProbeState::Failed).await;
    assert!(state.message.contains("timed out after 1s"), "{state:?}");
    node.runtime.clear_fault("ExecSync");
    wait_state(&node, "it succeeds again", |state| {
        state.state == ProbeState::Succeeded
    })
    .await;
}

/// What was confirmed for a probe of an address does not hold for a command in a container.
#[tokio::test]
async fn changed_handler_is_not_run_in_the_container_of_another_pod() {
    let node = FaultNode::start("probe-other").await;
    node.runtime.state().pod_ip = Some("127.0.0.9".to_owned());
    let pod = node.create_pod("probe-other").await;
    node.set_running(&pod, "own", 0).await;
    let foreign = FakeContainer {
        pod_uid: "another-pod".into(),
        name: "main".into(),
        running: true,
        ..FakeContainer::default()
    };
    node.runtime
        .state()
        .containers
        .insert("foreign".to_owned(), foreign);
    let status = json!({ "status": { "podIP": "127.0.0.9", "podIPs": [{ "ip": "127.0.0.9" }], "containerStatuses": [{
        "name": "main", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
        "containerID": "containerd://foreign", "state": { "running": {} } }] } });
    node.pods()
        .patch_status("probe-other", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    write_probe(
        &node,
        &pod,
        json!({ "tcpSocket": { "port": 1 }, "timeoutSeconds": 1 }),
    )
    .await;
    let dialled = |state: &ContainerProbeState| state.state == ProbeState::Failed;
    let state = wait_state(&node, "the address is probed", dialled).await;
    assert!(state.message.contains("127.0.0.9:1"), "{state:?}");

    write_probe(&node, &pod, exec()).await;
    let refused = |state: &ContainerProbeState| state.message.contains("is not one of the Pod");
    wait_state(&node, "it is refused", refused).await;
    assert_eq!(node.runtime.calls("ExecSync"), 0);
}
