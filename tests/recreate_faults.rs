//! Recreate requests while the container runtime misbehaves: the daemon as it is built, a real API server, and a
//! runtime made of faults. Each test is a node of its own; the test itself says what kubelet would say.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kruise::api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase, ContainerRecreateRequestStatus,
};
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use support::fault_cri::{FakeContainer, Fault, FaultCri};
use xtask::cluster::{ControlPlane, wait};

/// Longer than anything here takes on a slow machine.
const LONG: Duration = Duration::from_secs(60);

static PLANE: LazyLock<ControlPlane> = LazyLock::new(|| {
    let plane = ControlPlane::start().unwrap();
    let crds = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/crds");
    plane.kubectl(&["apply", "-k", crds]).unwrap();
    plane.kubectl(&["create", "serviceaccount", "default"]).unwrap();
    wait::until("the CRD is served", LONG, || {
        Ok(plane
            .kubectl(&["get", "containerrecreaterequests.v1beta1.apps.kruise.io"])
            .ok())
    })
    .unwrap();
    plane
});

/// A node: its runtime and its daemon, which end with it.
struct Node {
    name: &'static str,
    runtime: FaultCri,
    daemon: Child,
    client: kube::Client,
    dir: tempfile::TempDir,
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Node {
    async fn start(name: &'static str) -> Self {
        let kubeconfig = PLANE.kubeconfig().to_owned();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("containerd.sock");
        let runtime = FaultCri::start(&socket);
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let daemon = Command::new(env!("CARGO_BIN_EXE_kruise-daemon"))
            .args(["--node-name", name, "--addr", "127.0.0.1:0"])
            .arg("--kubeconfig")
            .arg(&kubeconfig)
            .arg("--socket-file")
            .arg(&socket)
            .arg("--control-socket")
            .arg(dir.path().join("control.sock"))
            .env("RUST_LOG", "kruise=debug")
            .stdout(Stdio::from(log.try_clone().unwrap()))
            .stderr(Stdio::from(log))
            .spawn()
            .unwrap();
        let file = kube::config::Kubeconfig::read_from(&kubeconfig).unwrap();
        let config = kube::Config::from_custom_kubeconfig(file, &Default::default())
            .await
            .unwrap();
        let client = kube::Client::try_from(config).unwrap();
        Self {
            name,
            runtime,
            daemon,
            client,
            dir,
        }
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    fn requests(&self) -> Api<ContainerRecreateRequest> {
        Api::namespaced(self.client.clone(), "default")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// What kubelet says of the Pod's one container; the runtime has it too.
    async fn runs(&self, pod: &Pod, id: &str, restarts: u32) {
        let uid = pod.metadata.uid.clone().unwrap();
        let container = FakeContainer {
            pod_uid: uid,
            name: "main".into(),
            running: true,
            created_at: i64::from(restarts) + 1,
            restart_count: restarts,
            ..FakeContainer::default()
        };
        self.runtime.state().containers.insert(id.to_owned(), container);
        let status = json!({"status": {"phase": "Running", "containerStatuses": [{
            "name": "main", "image": "i", "imageID": "", "ready": true, "restartCount": restarts,
            "containerID": format!("containerd://{id}"), "state": {"running": {}},
        }]}});
        let name = pod.metadata.name.as_deref().unwrap();
        self.pods()
            .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
            .await
            .unwrap();
    }

    async fn pod(&self, name: &str) -> Pod {
        let pod = json!({"metadata": {"name": name}, "spec": {"nodeName": self.name,
            "containers": [{"name": "main", "image": "i"}]}});
        self.pods()
            .create(&PostParams::default(), &serde_json::from_value(pod).unwrap())
            .await
            .unwrap()
    }

    async fn request(&self, name: &str, pod: &Pod, id: &str, spec: Value) {
        let mut object = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
            "metadata": {"name": name, "labels": {
                "crr.apps.kruise.io/active": "true",
                "crr.apps.kruise.io/node-name": self.name,
                "crr.apps.kruise.io/pod-uid": pod.metadata.uid,
            }},
            "spec": {"podName": pod.metadata.name, "containers": [
                {"name": "main", "statusContext": {"containerID": id, "restartCount": 0}},
            ]},
        });
        json_patch::merge(&mut object["spec"], &spec);
        self.requests()
            .create(&PostParams::default(), &serde_json::from_value(object).unwrap())
            .await
            .unwrap();
    }

    /// The request's status as soon as it is as wanted.
    async fn status(
        &self,
        name: &str,
        what: &str,
        wanted: impl Fn(&ContainerRecreateRequestStatus) -> bool,
    ) -> ContainerRecreateRequestStatus {
        let start = Instant::now();
        loop {
            let status = self
                .requests()
                .get(name)
                .await
                .unwrap()
                .status
                .unwrap_or_default();
            if wanted(&status) {
                return status;
            }
            assert!(
                start.elapsed() < LONG,
                "{name}: {what} not after {LONG:?}: {status:#?}\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn completed(&self, name: &str) -> ContainerRecreateRequestStatus {
        self.status(name, "completed", |status| status.completion_time.is_some())
            .await
    }

    /// The daemon lives on and does a plain request.
    async fn still_works(&self) {
        let name = format!("{}-after", self.name);
        let pod = self.pod(&name).await;
        self.runs(&pod, &format!("{name}-old"), 0).await;
        self.request(&name, &pod, &format!("containerd://{name}-old"), json!({}))
            .await;
        self.runtime
            .until("the stop", |state| {
                !state.containers[&format!("{name}-old")].running
            })
            .await;
        self.runs(&pod, &format!("{name}-new"), 1).await;
        assert_eq!(
            self.completed(&name).await.container_recreate_states[0].phase,
            Phase::Succeeded
        );
    }
}

fn message(status: &ContainerRecreateRequestStatus) -> String {
    status.container_recreate_states[0]
        .message
        .clone()
        .unwrap_or_default()
}

/// Seconds from the first to the last moment of a request.
async fn lived(node: &Node, name: &str) -> i64 {
    let request = node.requests().get(name).await.unwrap();
    let end = request.status.unwrap().completion_time.unwrap().0;
    end.duration_since(request.metadata.creation_timestamp.unwrap().0)
        .as_secs()
}

#[tokio::test]
async fn a_stop_that_hangs_is_broken_off_at_the_deadline() {
    let node = Node::start("hang-stop").await;
    let pod = node.pod("hang-stop").await;
    node.runs(&pod, "hs", 0).await;
    node.runtime.fault("StopContainer", Fault::Hang);
    node.request(
        "hang-stop",
        &pod,
        "containerd://hs",
        json!({"activeDeadlineSeconds": 3}),
    )
    .await;
    let status = node.completed("hang-stop").await;
    assert!(
        message(&status).contains("TERM had been sent; the stop was broken off"),
        "{status:#?}"
    );
    assert!((3..=5).contains(&lived(&node, "hang-stop").await));
    node.runtime.heal("StopContainer");
    node.still_works().await;
}

#[tokio::test]
async fn a_runtime_that_hangs_does_not_delay_the_deadline() {
    let node = Node::start("hang-list").await;
    let pod = node.pod("hang-list").await;
    node.runs(&pod, "hl", 0).await;
    node.runtime.fault("ListContainers", Fault::Hang);
    node.request(
        "hang-list",
        &pod,
        "containerd://hl",
        json!({"activeDeadlineSeconds": 4}),
    )
    .await;
    let status = node.completed("hang-list").await;
    assert_eq!(status.container_recreate_states[0].phase, Phase::Failed);
    assert!(message(&status).contains("runtime did not answer"), "{status:#?}");
    assert!((4..=6).contains(&lived(&node, "hang-list").await));
    assert_eq!(node.runtime.calls("StopContainer"), 0);
    node.runtime.heal("ListContainers");
    node.still_works().await;
}

#[tokio::test]
async fn a_runtime_that_dies_in_mid_stop_is_asked_again_when_it_is_back() {
    let mut node = Node::start("die").await;
    let pod = node.pod("die").await;
    node.runs(&pod, "d0", 0).await;
    node.runtime.fault("StopContainer", Fault::Hang);
    node.request("die", &pod, "containerd://d0", json!({})).await;
    node.runtime
        .until("the stop", |state| state.calls.contains_key("StopContainer"))
        .await;
    node.runtime.kill().await;
    node.status("die", "it says that the runtime is away", |status| {
        message_or_none(status).contains("tried again")
            || status.message.as_deref().unwrap_or_default().contains("runtime")
    })
    .await;
    node.runtime.heal("StopContainer");
    node.runtime.listen();
    node.runtime
        .until("the second stop", |state| !state.containers["d0"].running)
        .await;
    node.runs(&pod, "d1", 1).await;
    assert_eq!(
        node.completed("die").await.container_recreate_states[0].phase,
        Phase::Succeeded
    );
}

fn message_or_none(status: &ContainerRecreateRequestStatus) -> String {
    status
        .container_recreate_states
        .first()
        .and_then(|state| state.message.clone())
        .unwrap_or_default()
}

#[tokio::test]
async fn a_runtime_that_refuses_fails_the_container_in_words() {
    let node = Node::start("refuse").await;
    let pod = node.pod("refuse").await;
    node.runs(&pod, "r0", 0).await;
    node.runtime.fault("StopContainer", Fault::Unimplemented);
    node.request("refuse", &pod, "containerd://r0", json!({})).await;
    let status = node.completed("refuse").await;
    assert!(
        message(&status).starts_with("kill container error: "),
        "{status:#?}"
    );
    assert!(
        message(&status).contains("does not implement StopContainer"),
        "{status:#?}"
    );
    assert_eq!(
        status.message.as_deref(),
        Some("container \"main\" was not recreated")
    );
    node.runtime.heal("StopContainer");
    node.runtime.fault("ListContainers", Fault::Garbage);
    node.runs(&pod, "r1", 1).await;
    node.request("garbage", &pod, "containerd://r1", json!({})).await;
    let said = node
        .status("garbage", "it says what is wrong", |status| {
            status.message.is_some()
        })
        .await;
    assert!(
        said.message.unwrap().contains("cannot be used"),
        "the runtime's answer is named"
    );
    node.runtime.heal("ListContainers");
    node.runtime
        .until("the stop", |state| !state.containers["r1"].running)
        .await;
    node.runs(&pod, "r2", 2).await;
    assert_eq!(
        node.completed("garbage").await.container_recreate_states[0].phase,
        Phase::Succeeded
    );
}

#[tokio::test]
async fn a_container_that_is_gone_already_counts_as_stopped() {
    let node = Node::start("gone").await;
    let pod = node.pod("gone").await;
    node.runs(&pod, "g0", 0).await;
    node.runtime.state().containers.remove("g0");
    node.request("gone", &pod, "containerd://g0", json!({})).await;
    let status = node
        .status("gone", "it waits for kubelet", |status| {
            message_or_none(status).contains("waiting for kubelet")
        })
        .await;
    assert!(
        !status.container_recreate_states[0].is_killed,
        "nothing was stopped: {status:#?}"
    );
    node.runs(&pod, "g1", 1).await;
    let status = node.completed("gone").await;
    assert_eq!(status.container_recreate_states[0].phase, Phase::Succeeded);
    assert_eq!(node.runtime.calls("StopContainer"), 0);
}

#[tokio::test]
async fn a_runtime_that_nobody_has_ends_the_request() {
    let node = Node::start("docker").await;
    let pod = node.pod("docker").await;
    node.runs(&pod, "x0", 0).await;
    let status = json!({"status": {"containerStatuses": [{"name": "main", "image": "i", "imageID": "",
        "ready": true, "restartCount": 0, "containerID": "docker://x0", "state": {"running": {}}}]}});
    node.pods()
        .patch_status("docker", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    node.request("docker", &pod, "docker://x0", json!({})).await;
    let status = node.completed("docker").await;
    let words = status.message.unwrap();
    assert!(words.starts_with("failed to find runtime service: "), "{words}");
    assert!(words.contains("named \"docker\"; there is containerd"), "{words}");
}

/// More Pods than may be stopped at once: the others wait in words, and every one of them ends.
#[tokio::test]
async fn a_crowd_of_requests_is_bounded_and_all_end() {
    const PODS: usize = kruise::node::recreate::SLOTS + 20;
    let node = Node::start("crowd").await;
    let mut pods = Vec::new();
    for number in 0..PODS {
        let pod = node.pod(&format!("crowd-{number}")).await;
        node.runs(&pod, &format!("c{number}-0"), 0).await;
        pods.push(pod);
    }
    node.runtime.fault("StopContainer", Fault::Hang);
    for (number, pod) in pods.iter().enumerate() {
        let spec = json!({"activeDeadlineSeconds": 40});
        node.request(
            &format!("crowd-{number}"),
            pod,
            &format!("containerd://c{number}-0"),
            spec,
        )
        .await;
    }
    let limit = kruise::node::recreate::SLOTS;
    node.runtime
        .until("all slots taken", |state| {
            state.calls.get("StopContainer") >= Some(&limit)
        })
        .await;
    let waits = |status: &ContainerRecreateRequestStatus| {
        message_or_none(status).contains("other stops on this node")
    };
    let last = format!("crowd-{}", PODS - 1);
    node.status(&last, "it says that it waits for a slot", waits)
        .await;
    assert_eq!(
        node.runtime.calls("StopContainer"),
        limit,
        "no more than the slots at once"
    );
    for number in 0..PODS {
        let status = node.completed(&format!("crowd-{number}")).await;
        assert_eq!(status.container_recreate_states[0].phase, Phase::Failed);
    }
}
