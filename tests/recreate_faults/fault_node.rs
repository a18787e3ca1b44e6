//! A test's own node: a fault-injecting runtime, the daemon's real binary, and kubelet's status updates.

use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

use k8s_openapi::api::core::v1::Pod;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase, ContainerRecreateRequestStatus,
};
use kruise_api::node_pod_probe::NodePodProbe;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::watcher::Config;
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, wait};

use support::connect::connect;
use support::fault_cri::{FakeContainer, FaultCri};
use support::waits::{self, WAIT_TIMEOUT, by_name, log_tails};

static PLANE: LazyLock<ControlPlane> = LazyLock::new(|| {
    let plane = ControlPlane::start().unwrap();
    let crds = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/crds");
    plane.kubectl(&["apply", "-k", crds]).unwrap();
    for namespace in ["default", "kube-public"] {
        let account = ["create", "serviceaccount", "default", "-n", namespace];
        plane.kubectl(&account).unwrap();
    }
    wait::until("the CRD is served", WAIT_TIMEOUT, || {
        Ok(plane
            .kubectl(&["get", "containerrecreaterequests.v1beta1.apps.kruise.io"])
            .ok())
    })
    .unwrap();
    plane
});

/// A node: its runtime and its daemon, which end with it.
pub struct FaultNode {
    pub name: &'static str,
    /// Namespace of the Pods and requests.
    pub namespace: &'static str,
    pub runtime: FaultCri,
    daemon: Child,
    client: kube::Client,
    dir: tempfile::TempDir,
}

impl Drop for FaultNode {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl FaultNode {
    pub async fn start(name: &'static str) -> Self {
        let kubeconfig = PLANE.kubeconfig().to_owned();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("containerd.sock");
        let runtime = FaultCri::start(&socket);
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let daemon = Command::new(support::binaries::daemon())
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
        let client = connect(&kubeconfig).await.client;
        Self {
            name,
            namespace: "default",
            runtime,
            daemon,
            client,
            dir,
        }
    }

    /// Waits until lines at level INFO of the daemon's log begin with this text and name the object; returns their
    /// number.
    pub async fn wait_for_log(&self, text: &str, object: &str) -> usize {
        waits::wait_for_log(&self.dir.path().join("log"), text, object).await
    }

    /// Waits for an event with that reason on a request; returns its message.
    pub async fn wait_request_event(&self, name: &str, reason: &str) -> String {
        let events: Api<k8s_openapi::api::core::v1::Event> =
            Api::namespaced(self.client.clone(), self.namespace);
        let fields = format!(
            "involvedObject.kind=ContainerRecreateRequest,involvedObject.name={name},reason={reason}"
        );
        let params = kube::api::ListParams::default().fields(&fields);
        let poll = || async { events.list(&params).await.unwrap().items.pop() };
        let event = waits::poll_until(&format!("event {reason} on {name}"), &|| self.log_tail(), poll).await;
        event.message.unwrap_or_default()
    }

    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), self.namespace)
    }

    pub fn node_pod_probes(&self) -> Api<NodePodProbe> {
        Api::all(self.client.clone())
    }

    fn requests(&self) -> Api<ContainerRecreateRequest> {
        Api::namespaced(self.client.clone(), self.namespace)
    }

    /// The last lines of the daemon's log.
    pub fn log_tail(&self) -> String {
        log_tails([self.dir.path().join("log")])
    }

    /// Sets kubelet's status of the Pod's one container; the runtime has it too.
    pub async fn set_running(&self, pod: &Pod, id: &str, restarts: u32) {
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

    /// Sets kubelet's status after the Pod's one container has exited.
    pub async fn set_terminated(&self, pod: &Pod, id: &str) {
        let status = json!({"status": {"containerStatuses": [{
            "name": "main", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
            "containerID": format!("containerd://{id}"), "state": {"terminated": {"exitCode": 0}},
        }]}});
        let name = pod.metadata.name.as_deref().unwrap();
        self.pods()
            .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
            .await
            .unwrap();
    }

    pub async fn create_pod(&self, name: &str) -> Pod {
        self.create_pod_with(name, json!({})).await
    }

    /// A Pod of one container, with this in its spec.
    pub async fn create_pod_with(&self, name: &str, spec: Value) -> Pod {
        let mut pod = json!({"metadata": {"name": name}, "spec": {"nodeName": self.name,
            "containers": [{"name": "main", "image": "i"}]}});
        json_patch::merge(&mut pod["spec"], &spec);
        self.pods()
            .create(&PostParams::default(), &serde_json::from_value(pod).unwrap())
            .await
            .unwrap()
    }

    pub async fn create_request(&self, name: &str, pod: &Pod, id: &str, spec: Value) {
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

    pub async fn delete_request(&self, name: &str) {
        self.requests().delete(name, &Default::default()).await.unwrap();
    }

    /// Returns the request's status once `predicate` holds.
    pub async fn wait_status(
        &self,
        name: &str,
        what: &str,
        predicate: impl Fn(&ContainerRecreateRequestStatus) -> bool,
    ) -> ContainerRecreateRequestStatus {
        self.watch_requests(&format!("{name}: {what}"), by_name(name), predicate)
            .await
            .remove(0)
    }

    /// Waits until `predicate` holds for one of all requests.
    pub async fn wait_any_status(
        &self,
        what: &str,
        predicate: impl Fn(&ContainerRecreateRequestStatus) -> bool,
    ) {
        self.watch_requests(what, Config::default(), predicate).await;
    }

    async fn watch_requests(
        &self,
        what: &str,
        config: Config,
        predicate: impl Fn(&ContainerRecreateRequestStatus) -> bool,
    ) -> Vec<ContainerRecreateRequestStatus> {
        let read = |request: ContainerRecreateRequest| request.status.unwrap_or_default();
        let predicate =
            |found: &[&ContainerRecreateRequestStatus]| found.iter().any(|status| predicate(status));
        waits::watch_until(
            what,
            &|| self.log_tail(),
            self.requests(),
            config,
            read,
            predicate,
        )
        .await
    }

    pub async fn wait_completed(&self, name: &str) -> ContainerRecreateRequestStatus {
        self.wait_status(name, "completed", |status| status.completion_time.is_some())
            .await
    }

    /// Waits for the end of a request, which must have succeeded.
    pub async fn wait_succeeded(&self, name: &str) {
        let status = self.wait_completed(name).await;
        let states = &status.container_recreate_states;
        assert_eq!(states[0].phase, Phase::Succeeded, "{status:#?}");
        let [complete] = status.conditions.as_slice() else {
            panic!("{status:#?}");
        };
        assert_eq!(
            (complete.type_.as_str(), complete.status.as_str()),
            ("Complete", "True")
        );
    }

    /// Seconds from the creation to the completion of a request.
    pub async fn lifetime_seconds(&self, name: &str) -> i64 {
        let request = self.requests().get(name).await.unwrap();
        let end = request.status.unwrap().completion_time.unwrap().0;
        end.duration_since(request.metadata.creation_timestamp.unwrap().0)
            .as_secs()
    }

    /// The daemon still runs and completes a simple request.
    pub async fn assert_still_works(&self) {
        let name = format!("{}-after", self.name);
        let pod = self.create_pod(&name).await;
        self.set_running(&pod, &format!("{name}-old"), 0).await;
        self.create_request(&name, &pod, &format!("containerd://{name}-old"), json!({}))
            .await;
        self.runtime
            .wait_until("the stop", |state| {
                !state.containers[&format!("{name}-old")].running
            })
            .await;
        self.set_running(&pod, &format!("{name}-new"), 1).await;
        self.wait_succeeded(&name).await;
    }
}

/// The message of the request's container, if any.
pub fn container_message(status: &ContainerRecreateRequestStatus) -> String {
    status
        .container_recreate_states
        .first()
        .and_then(|state| state.message.clone())
        .unwrap_or_default()
}
