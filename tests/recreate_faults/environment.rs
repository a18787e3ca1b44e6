//! What is told of containers by runtimes that say little, nothing, or something else.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::container_hash::{env_hash, plain_hash};
use kruise_api::in_place::{RuntimeContainerMeta, RuntimeContainerMetaSet};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tonic::Code;

use crate::node::Node;
use support::fault_cri::{FakeContainer, Fault};
use support::waits::{self, named};

const META: &str = "apps.kruise.io/runtime-containers-meta";

/// A Pod whose containers take `V` from label `v`.
async fn pod(node: &Node, name: &str, containers: &[&str]) -> Pod {
    let from = json!({"name": "V", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['v']"}}});
    let containers = containers
        .iter()
        .map(|name| json!({"name": name, "image": "i", "env": [from]}));
    let pod = json!({
        "metadata": {"name": name, "labels": {"v": "1"}, "annotations": {"kruise.io/sidecarset-hash": "{}"}},
        "spec": {"nodeName": node.name, "containers": containers.collect::<Vec<_>>()},
    });
    let pod = serde_json::from_value(pod).unwrap();
    node.pods().create(&PostParams::default(), &pod).await.unwrap()
}

/// A container in the runtime, of which verbose answers say `V`, or nothing.
fn holds(node: &Node, pod_uid: &str, name: &str, id: &str, value: Option<&str>) {
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

/// What kubelet says: name and ID of each container. With `updating`, a workload is at it.
async fn says(node: &Node, pod: &str, ids: &[(&str, &str)], updating: bool) {
    let statuses = ids.iter().map(|(name, id)| {
        json!({"name": name, "image": "i", "imageID": "", "ready": true, "restartCount": 0,
            "containerID": format!("containerd://{id}"), "state": {"running": {}}})
    });
    let ready = if updating { "False" } else { "True" };
    let status = json!({"status": {"phase": "Running", "containerStatuses": statuses.collect::<Vec<_>>(),
        "conditions": [{"type": "InPlaceUpdateReady", "status": ready}]}});
    patch(node, pod, status, true).await;
}

async fn patch(node: &Node, pod: &str, patch: Value, status: bool) {
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    let pods = node.pods();
    if status {
        pods.patch_status(pod, &params, &patch).await.unwrap();
    } else {
        pods.patch(pod, &params, &patch).await.unwrap();
    }
}

/// The entries, as soon as there are any and they are as wanted.
async fn told(
    node: &Node,
    pod: &str,
    wanted: impl Fn(&[RuntimeContainerMeta]) -> bool,
) -> Vec<RuntimeContainerMeta> {
    let entries = |pod: &Pod| {
        let text = pod.annotations().get(META)?;
        Some(
            serde_json::from_str::<RuntimeContainerMetaSet>(text)
                .unwrap()
                .containers,
        )
    };
    let is_so = |pods: &[&Pod]| {
        pods.iter()
            .any(|pod| entries(pod).is_some_and(|found| wanted(&found)))
    };
    let what = format!("{pod}: told of as wanted");
    let logs = || node.tail();
    let seen = waits::follow(&what, &logs, node.pods(), named(pod), |pod| pod, is_so).await;
    entries(&seen[0]).unwrap()
}

fn env(entries: &[RuntimeContainerMeta]) -> u64 {
    entries[0].hashes.extracted_env_from_metadata_hash
}

#[tokio::test]
async fn where_the_runtime_says_nothing_the_container_is_asked() {
    let node = Node::start("says-nothing").await;
    let failed = (127, String::new());
    let endless = format!("V=1\0{}", "x".repeat(15 << 20));
    let answers = [
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
            vec![(failed.0, failed.1.as_str()), (failed.0, failed.1.as_str())],
            0,
        ),
        ("endless", vec![(0, endless.as_str())], 0),
    ];
    for (name, prints, want) in answers {
        let made = pod(&node, name, &["main"]).await;
        holds(&node, &made.uid().unwrap(), "main", name, None);
        let prints = prints
            .into_iter()
            .map(|(code, text)| (code, text.to_owned()))
            .collect();
        node.runtime.state().containers.get_mut(name).unwrap().prints = prints;
        says(&node, name, &[("main", name)], false).await;
        let entries = told(&node, name, |_| true).await;
        assert_eq!(
            (env(&entries), entries[0].hashes.plain_hash),
            (want, plain_hash("main", "i")),
            "{name}"
        );
    }
}

/// Nobody is asked again, and nothing is restarted for what is not known.
#[tokio::test]
async fn an_image_without_the_program_is_asked_once() {
    let node = Node::start("no-program").await;
    node.runtime.fault(
        "ExecSync",
        Fault::Status(Code::Unknown, "executable file not found".into()),
    );
    let made = pod(&node, "bare", &["main"]).await;
    holds(&node, &made.uid().unwrap(), "main", "bare", None);
    let before = node.runtime.calls("ExecSync");
    says(&node, "bare", &[("main", "bare")], true).await;
    assert_eq!(env(&told(&node, "bare", |_| true).await), 0);
    patch(&node, "bare", json!({"metadata": {"labels": {"v": "2"}}}), false).await;
    // Another Pod, told of later, shows that the change has been looked at.
    let made = pod(&node, "after", &["main"]).await;
    holds(&node, &made.uid().unwrap(), "main", "after", Some("1"));
    says(&node, "after", &[("main", "after")], false).await;
    told(&node, "after", |_| true).await;
    assert_eq!(
        (
            node.runtime.calls("ExecSync") - before,
            node.runtime.calls("StopContainer")
        ),
        (1, 0)
    );
}

#[tokio::test]
async fn a_runtime_that_hangs_or_restarts_is_asked_again() {
    let mut node = Node::start("hangs-meta").await;
    let made = pod(&node, "hangs", &["main"]).await;
    holds(&node, &made.uid().unwrap(), "main", "h0", Some("1"));
    node.runtime.fault("ContainerStatus", Fault::Hang);
    says(&node, "hangs", &[("main", "h0")], false).await;
    let asked = |state: &support::fault_cri::State| state.calls.contains_key("ContainerStatus");
    node.runtime.until("the question", asked).await;
    node.runtime.kill().await;
    node.runtime.heal("ContainerStatus");
    node.runtime.listen();
    assert_eq!(env(&told(&node, "hangs", |_| true).await), env_hash([("V", "1")]));

    // A stop that fails is tried again.
    node.runtime
        .fault("StopContainer", Fault::Status(Code::Internal, "not now".into()));
    says(&node, "hangs", &[("main", "h0")], true).await;
    patch(&node, "hangs", json!({"metadata": {"labels": {"v": "2"}}}), false).await;
    let tried = |state: &support::fault_cri::State| state.calls.contains_key("StopContainer");
    node.runtime.until("the stop", tried).await;
    node.runtime.heal("StopContainer");
    let stopped = |state: &support::fault_cri::State| !state.containers["h0"].running;
    node.runtime.until("the stop that works", stopped).await;
    holds(&node, &made.uid().unwrap(), "main", "h1", Some("2"));
    says(&node, "hangs", &[("main", "h1")], true).await;
    let entries = told(&node, "hangs", |entries| {
        entries[0].container_id == "containerd://h1"
    })
    .await;
    assert_eq!(env(&entries), env_hash([("V", "2")]));
    node.logged("restarting container for its new environment", "h0")
        .await;
    assert_eq!(node.logged("stopped container", "h0").await, 1);
}

/// Others than kubelet may be allowed to write a Pod's status; no container of another Pod is stopped by that.
#[tokio::test]
async fn a_status_that_names_a_foreign_container_stops_nothing() {
    let node = Node::start("foreign").await;
    let made = pod(&node, "thief", &["main", "other"]).await;
    let uid = made.uid().unwrap();
    holds(&node, "somebody-else", "main", "victim", Some("0"));
    holds(&node, &uid, "other", "own", Some("1"));
    says(&node, "thief", &[("main", "victim"), ("other", "own")], true).await;
    let entries = told(&node, "thief", |_| true).await;
    let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(names, ["other"], "nothing is told of it");
    // Told of by somebody else, as wrong: the runtime is asked once more before anything is stopped.
    let lie = json!({"containers": [{"name": "main", "containerID": "containerd://victim", "restartCount": 0,
        "hashes": {"plainHash": plain_hash("main", "i"), "extractedEnvFromMetadataHash": 1}}, entries[0]]});
    let asked = node.runtime.calls("ContainerStatus");
    patch(
        &node,
        "thief",
        json!({"metadata": {"annotations": {META: lie.to_string()}}}),
        false,
    )
    .await;
    let again = |state: &support::fault_cri::State| state.calls["ContainerStatus"] > asked;
    node.runtime.until("the question whose it is", again).await;
    // The Pod's own container is restarted; the other one would have been, too.
    patch(&node, "thief", json!({"metadata": {"labels": {"v": "2"}}}), false).await;
    let stopped = |state: &support::fault_cri::State| !state.containers["own"].running;
    node.runtime.until("the stop of its own", stopped).await;
    assert!(node.runtime.state().containers["victim"].running);
}
