//! End to end: a user's job with a pull secret, our manager, our daemon, containerd and a private registry.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_cri::Runtime as _;
use kruise_cri::client::CriClient as Cri;
use kube::api::Api;
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, Runtime};

use crate::daemon::Daemon;
use crate::pull_node::{PullNode, start_control_plane};
use support::manager::Manager;

struct JobFixture {
    plane: ControlPlane,
    node: PullNode,
    runtime: Runtime,
    _dir: tempfile::TempDir,
    _manager: Manager,
    daemon: Daemon,
}

impl JobFixture {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let start_cluster = || (start_control_plane(), Runtime::start("trixie").unwrap());
        let (plane, runtime) = tokio::task::spawn_blocking(start_cluster).await.unwrap();
        let node = PullNode::on_plane(&plane, "n1").await;
        node.set_ready(&plane);
        let mut manager = Manager::on_free_ports(&plane, "kruise-manager");
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

    /// Creates a job for the private image and waits until it is complete.
    async fn run_job(&self, name: &str, secrets: &[&str]) -> ImagePullJob {
        let job: Value = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"image": self.image(), "pullSecrets": secrets, "pullPolicy": {"backoffLimit": 0},
                "completionPolicy": {"type": "Always"}}});
        self.plane.apply(&job.to_string()).unwrap();
        let jobs: Api<ImagePullJob> = Api::namespaced(self.node.client.clone(), "default");
        let is_complete =
            |job: &ImagePullJob| job.status.as_ref().is_some_and(|s| s.completion_time.is_some());
        self.node.wait_object(&jobs, name, "complete", is_complete).await
    }
}

#[tokio::test]
async fn job_with_pull_secret_pulls_private_image() {
    let fixture = JobFixture::start().await;
    fixture
        .node
        .wait_node_image("its NodeImage is made", |_| true)
        .await;
    let login = STANDARD.encode(fixture.runtime.registry.docker_config());
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/dockerconfigjson",
        "metadata": {"name": "login", "namespace": "default"}, "data": {".dockerconfigjson": login}});
    fixture.plane.apply(&secret.to_string()).unwrap();

    let without_secret = fixture.run_job("without", &[]).await;
    let status = without_secret.status.unwrap();
    assert_eq!(
        (status.desired, status.succeeded, status.failed),
        (1, 0, 1),
        "{status:?}"
    );
    assert_eq!(status.failed_nodes, ["n1"]);
    let event_message = fixture
        .node
        .wait_event(without_secret.metadata.uid.as_deref().unwrap(), "PullImageFailed")
        .await;
    assert!(
        event_message.contains("refuses the credentials, or wants some"),
        "{event_message}"
    );

    let with_secret = fixture.run_job("with", &["login"]).await.status.unwrap();
    assert_eq!(
        (with_secret.desired, with_secret.succeeded, with_secret.failed),
        (1, 1, 0),
        "{with_secret:?}"
    );
    let (cri, _) = Cri::connect(&fixture.runtime.socket()).await.unwrap();
    assert!(cri.image_status(&fixture.image()).await.unwrap().is_some());
    assert!(fixture.daemon.stop().await < Duration::from_secs(5));
}
