//! The whole way: a user's job with a pull secret, our manager, our daemon, containerd and a private registry.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_cri::Runtime as _;
use kruise_cri::client::Client as Cri;
use kube::api::Api;
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, Runtime};

use crate::daemon::Daemon;
use crate::world::{Node, install};
use support::manager::Manager;

struct Bed {
    plane: ControlPlane,
    node: Node,
    runtime: Runtime,
    _dir: tempfile::TempDir,
    _manager: Manager,
    daemon: Daemon,
}

impl Bed {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let start = || (install(), Runtime::start("trixie").unwrap());
        let (plane, runtime) = tokio::task::spawn_blocking(start).await.unwrap();
        let node = Node::on(&plane, "n1").await;
        let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}});
        plane
            .kubectl(&[
                "patch",
                "node",
                "n1",
                "--subresource=status",
                "--patch",
                &ready.to_string(),
            ])
            .unwrap();
        let mut manager = Manager::somewhere(&plane, "kruise-manager");
        manager.start().unwrap();
        node.logs.lock().unwrap().push(manager.log().to_owned());
        let daemon = Daemon::start(&node, &runtime.socket(), dir.path(), &[]);
        Self {
            plane,
            node,
            runtime,
            _dir: dir,
            _manager: manager,
            daemon,
        }
    }

    fn image(&self) -> String {
        format!("{}/kruise-test/term:1", self.runtime.registry.private_host())
    }

    /// Makes a job for the private image and waits until it is complete.
    async fn run(&self, name: &str, secrets: &[&str]) -> ImagePullJob {
        let job: Value = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"image": self.image(), "pullSecrets": secrets, "pullPolicy": {"backoffLimit": 0},
                "completionPolicy": {"type": "Always"}}});
        self.plane.apply(&job.to_string()).unwrap();
        let jobs: Api<ImagePullJob> = Api::namespaced(self.node.client.clone(), "default");
        let complete = |job: &ImagePullJob| job.status.as_ref().is_some_and(|s| s.completion_time.is_some());
        self.node.until_object(&jobs, name, "complete", complete).await
    }
}

#[tokio::test]
async fn a_job_with_a_pull_secret_brings_a_private_image_to_the_node() {
    let bed = Bed::start().await;
    bed.node.until_node("its NodeImage is made", |_| true).await;
    let login = STANDARD.encode(bed.runtime.registry.docker_config());
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/dockerconfigjson",
        "metadata": {"name": "login", "namespace": "default"}, "data": {".dockerconfigjson": login}});
    bed.plane.apply(&secret.to_string()).unwrap();

    let without = bed.run("without", &[]).await;
    let status = without.status.unwrap();
    assert_eq!(
        (status.desired, status.succeeded, status.failed),
        (1, 0, 1),
        "{status:?}"
    );
    assert_eq!(status.failed_nodes, ["n1"]);
    let note = bed
        .node
        .until_event(without.metadata.uid.as_deref().unwrap(), "PullImageFailed")
        .await;
    assert!(note.contains("refuses the credentials, or wants some"), "{note}");

    let with = bed.run("with", &["login"]).await.status.unwrap();
    assert_eq!((with.desired, with.succeeded, with.failed), (1, 1, 0), "{with:?}");
    let (cri, _) = Cri::connect(&bed.runtime.socket()).await.unwrap();
    assert!(cri.image_status(&bed.image()).await.unwrap().is_some());
    assert!(bed.daemon.stop().await < Duration::from_secs(5));
}
