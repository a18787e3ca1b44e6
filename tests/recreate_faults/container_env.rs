//! Container metadata with runtimes that report little, nothing, or something wrong.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::container_hash::{env_hash, plain_hash};
use kruise_api::in_place::{RuntimeContainerMeta, RuntimeContainerMetaSet};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tonic::Code;

use crate::fault_node::FaultNode;
use support::fault_cri::{FakeContainer, Fault};
use support::waits::{self, by_name};

const META_ANNOTATION: &str = "apps.kruise.io/runtime-containers-meta";

/// A Pod whose containers take `V` from label `v`.
async fn create_pod(node: &FaultNode, name: &str, containers: &[&str]) -> Pod {
    create_pod_with(node, name, containers, json!({})).await
}

/// The same, with these fields in each container.
async fn create_pod_with(node: &FaultNode, name: &str, containers: &[&str], fields: Value) -> Pod {
    let env_source = json!({"name": "V", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['v']"}}});
    let containers = containers.iter().map(|name| {
        let mut container = json!({"name": name, "image": "i", "env": [env_source]});
        json_patch::merge(&mut container, &fields);
        container
    });
    let pod = json!({
        "metadata": {"name": name, "labels": {"v": "1"}, "annotations": {"kruise.io/sidecarset-hash": "{}"}},
        "spec": {"nodeName": node.name, "containers": containers.collect::<Vec<_>>()},
    });
    let pod = serde_json::from_value(pod).unwrap();
    node.pods().create(&PostParams::default(), &pod).await.unwrap()
}

/// Adds a container to the runtime; its verbose status has `V`, or no environment.
fn add_runtime_container(node: &FaultNode, pod_uid: &str, name: &str, id: &str, value: Option<&str>) {
    let container = FakeContainer {
        pod_uid: pod_uid.to_owned(),
        name: name.to_owned(),
        running: true,
        created_at: 1,
        hash: plain_hash(name, "i"),
        env: value.map(|value| vec![("V".to_owned(), value.to_owned())]),
        ..FakeContainer::default()
    };
    node.runtime.state().containers.insert(id.to_owned(), container);
}

/// Kubelet's status: name and ID of each container. With `updating`, an in-place update is in progress.
async fn set_kubelet_status(node: &FaultNode, pod: &str, ids: &[(&str, &str)], updating: bool) {
    let statuses = ids.iter().map(|(name, id)| {
        json!({"name": name, "image": "i", "imageID": "", "ready": true, "restartCount": 0,
            "containerID": format!("containerd://{id}"), "state": {"running": {}}})
    });
    let ready = if updating { "False" } else { "True" };
    let status = json!({"status": {"phase": "Running", "containerStatuses": statuses.collect::<Vec<_>>(),
        "conditions": [{"type": "InPlaceUpdateReady", "status": ready}]}});
    patch(node, pod, status, true).await;
}

async fn patch(node: &FaultNode, pod: &str, patch: Value, status: bool) {
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    let pods = node.pods();
    if status {
        pods.patch_status(pod, &params, &patch).await.unwrap();
    } else {
        pods.patch(pod, &params, &patch).await.unwrap();
    }
}

/// Returns the entries once there are any and `predicate` holds.
async fn wait_meta(
    node: &FaultNode,
    pod: &str,
    predicate: impl Fn(&[RuntimeContainerMeta]) -> bool,
) -> Vec<RuntimeContainerMeta> {
    let entries = |pod: &Pod| {
        let text = pod.annotations().get(META_ANNOTATION)?;
        Some(
            serde_json::from_str::<RuntimeContainerMetaSet>(text)
                .unwrap()
                .containers,
        )
    };
    let matches = |pods: &[&Pod]| {
        pods.iter()
            .any(|pod| entries(pod).is_some_and(|found| predicate(&found)))
    };
    let what = format!("{pod}: told of as wanted");
    let logs = || node.log_tail();
    let pods = waits::watch_until(&what, &logs, node.pods(), by_name(pod), |pod| pod, matches).await;
    entries(&pods[0]).unwrap()
}

fn env_hash_of(entries: &[RuntimeContainerMeta]) -> u64 {
    entries[0].hashes.extracted_env_from_metadata_hash
}

#[tokio::test]
async fn env_is_read_by_exec_without_verbose_status() {
    let node = FaultNode::start("says-nothing").await;
    let exec_failure = (127, String::new());
    let oversized_output = format!("V=1\0{}", "x".repeat(15 << 20));
    let cases = [
        (
            "zeros",
            vec![(0, "A=x\0V=one\ntwo=2\0")],
            env_hash([("V", "one\ntwo=2")]),
        ),
        (
            "lines",
            vec![(1, "unknown option"), (0, "A=x\nV=1\n")],
            env_hash([("V", "1")]),
        ),
        (
            "neither",
            vec![
                (exec_failure.0, exec_failure.1.as_str()),
                (exec_failure.0, exec_failure.1.as_str()),
            ],
            0,
        ),
        ("endless", vec![(0, oversized_output.as_str())], 0),
    ];
    for (name, prints, want) in cases {
        let created = create_pod(&node, name, &["main"]).await;
        add_runtime_container(&node, &created.uid().unwrap(), "main", name, None);
        let exec_outputs = prints
            .into_iter()
            .map(|(code, text)| (code, text.to_owned()))
            .collect();
        node.runtime
            .state()
            .containers
            .get_mut(name)
            .unwrap()
            .exec_outputs = exec_outputs;
        set_kubelet_status(&node, name, &[("main", name)], false).await;
        let entries = wait_meta(&node, name, |_| true).await;
        assert_eq!(
            (env_hash_of(&entries), entries[0].hashes.plain_hash),
            (want, plain_hash("main", "i")),
            "{name}"
        );
    }
}

/// An `env` that never ends is run a few times in each container, and delays no other Pod.
#[tokio::test]
async fn env_exec_that_hangs_is_given_up() {
    let node = FaultNode::start("hanging-env").await;
    node.runtime.inject_fault("ExecSync", Fault::Hang);
    let names = ["a", "b", "c"];
    let created = create_pod(&node, "hanging-env", &names).await;
    for name in names {
        add_runtime_container(&node, &created.uid().unwrap(), name, name, None);
    }
    let ids = names.map(|name| (name, name));
    set_kubelet_status(&node, "hanging-env", &ids, false).await;
    let entries = wait_meta(&node, "hanging-env", |entries| entries.len() == names.len()).await;
    assert_eq!(env_hash_of(&entries), 0);
    let label = json!({"metadata": {"labels": {"other": "1"}}});
    patch(&node, "hanging-env", label, false).await;
    let created = create_pod(&node, "other-env", &["main"]).await;
    add_runtime_container(&node, &created.uid().unwrap(), "main", "other", Some("1"));
    set_kubelet_status(&node, "other-env", &[("main", "other")], false).await;
    wait_meta(&node, "other-env", |_| true).await;
    assert_eq!(
        node.runtime.calls("ExecSync"),
        3 * names.len(),
        "{}",
        node.log_tail()
    );
}

/// The failed exec is not repeated, and nothing is restarted for an unknown environment.
#[tokio::test]
async fn env_exec_in_image_without_program_is_tried_once() {
    let node = FaultNode::start("no-program").await;
    node.runtime.inject_fault(
        "ExecSync",
        Fault::Status(Code::Unknown, "executable file not found".into()),
    );
    let created = create_pod(&node, "bare", &["main"]).await;
    add_runtime_container(&node, &created.uid().unwrap(), "main", "bare", None);
    let before = node.runtime.calls("ExecSync");
    set_kubelet_status(&node, "bare", &[("main", "bare")], true).await;
    assert_eq!(env_hash_of(&wait_meta(&node, "bare", |_| true).await), 0);
    patch(&node, "bare", json!({"metadata": {"labels": {"v": "2"}}}), false).await;
    // Another Pod, whose metadata is written later, shows that the change has been reconciled.
    let created = create_pod(&node, "after", &["main"]).await;
    add_runtime_container(&node, &created.uid().unwrap(), "main", "after", Some("1"));
    set_kubelet_status(&node, "after", &[("main", "after")], false).await;
    wait_meta(&node, "after", |_| true).await;
    assert_eq!(
        (
            node.runtime.calls("ExecSync") - before,
            node.runtime.calls("StopContainer")
        ),
        (1, 0)
    );
}

#[tokio::test]
async fn env_lookup_is_retried_after_runtime_restart() {
    let mut node = FaultNode::start("hangs-meta").await;
    let hook = json!({"preStop": {"exec": {"command": ["drain"]}}});
    let created = create_pod_with(&node, "hangs", &["main"], json!({"lifecycle": hook})).await;
    add_runtime_container(&node, &created.uid().unwrap(), "main", "h0", Some("1"));
    node.runtime.inject_fault("ContainerStatus", Fault::Hang);
    set_kubelet_status(&node, "hangs", &[("main", "h0")], false).await;
    let status_requested = |state: &support::fault_cri::State| state.calls.contains_key("ContainerStatus");
    node.runtime.wait_until("the question", status_requested).await;
    node.runtime.kill().await;
    node.runtime.clear_fault("ContainerStatus");
    node.runtime.listen();
    assert_eq!(
        env_hash_of(&wait_meta(&node, "hangs", |_| true).await),
        env_hash([("V", "1")])
    );

    // A failed stop is retried, and the hook before it is not.
    node.runtime
        .inject_fault("StopContainer", Fault::Status(Code::Internal, "not now".into()));
    set_kubelet_status(&node, "hangs", &[("main", "h0")], true).await;
    patch(&node, "hangs", json!({"metadata": {"labels": {"v": "2"}}}), false).await;
    let stop_requested = |state: &support::fault_cri::State| state.calls.contains_key("StopContainer");
    node.runtime.wait_until("the stop", stop_requested).await;
    node.runtime.clear_fault("StopContainer");
    let is_stopped = |state: &support::fault_cri::State| !state.containers["h0"].running;
    node.runtime.wait_until("the stop that works", is_stopped).await;
    add_runtime_container(&node, &created.uid().unwrap(), "main", "h1", Some("2"));
    set_kubelet_status(&node, "hangs", &[("main", "h1")], true).await;
    let entries = wait_meta(&node, "hangs", |entries| {
        entries[0].container_id == "containerd://h1"
    })
    .await;
    assert_eq!(env_hash_of(&entries), env_hash([("V", "2")]));
    let restarts = node.wait_for_log("restarting container for its new environment", "h0");
    assert_eq!(restarts.await, 1);
    assert_eq!(node.runtime.calls("ExecSync"), 1, "{}", node.log_tail());
    assert_eq!(node.wait_for_log("stopped container", "h0").await, 1);
}

/// Other writers than kubelet may write a Pod's status; that must not stop a container of another Pod.
#[tokio::test]
async fn foreign_container_in_pod_status_is_not_stopped() {
    let node = FaultNode::start("foreign").await;
    let created = create_pod(&node, "thief", &["main", "other"]).await;
    let uid = created.uid().unwrap();
    add_runtime_container(&node, "somebody-else", "main", "victim", Some("0"));
    add_runtime_container(&node, &uid, "other", "own", Some("1"));
    set_kubelet_status(&node, "thief", &[("main", "victim"), ("other", "own")], true).await;
    let entries = wait_meta(&node, "thief", |_| true).await;
    let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(names, ["other"], "no metadata of a foreign container");
    // Metadata from another writer, with a wrong hash: the runtime is called once more before anything is stopped.
    let forged_meta = json!({"containers": [{"name": "main", "containerID": "containerd://victim", "restartCount": 0,
        "hashes": {"plainHash": plain_hash("main", "i"), "extractedEnvFromMetadataHash": 1}}, entries[0]]});
    let calls_before = node.runtime.calls("ContainerStatus");
    patch(
        &node,
        "thief",
        json!({"metadata": {"annotations": {META_ANNOTATION: forged_meta.to_string()}}}),
        false,
    )
    .await;
    let read_again = |state: &support::fault_cri::State| state.calls["ContainerStatus"] > calls_before;
    node.runtime
        .wait_until("the question whose it is", read_again)
        .await;
    // The Pod's own container is restarted; otherwise the other one would have been, too.
    patch(&node, "thief", json!({"metadata": {"labels": {"v": "2"}}}), false).await;
    let is_stopped = |state: &support::fault_cri::State| !state.containers["own"].running;
    node.runtime.wait_until("the stop of its own", is_stopped).await;
    assert!(node.runtime.state().containers["victim"].running);
}
