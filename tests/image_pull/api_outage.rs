//! The API server goes down during an image pull, or before it.

use std::time::Duration;

use k8s_cri::v1::PullImageRequest;
use kruise_api::node_image::ImagePullPhase;
use serde_json::json;
use testbed::cluster::ControlPlane;

use crate::daemon::Daemon;
use crate::faults::DaemonFixture;
use crate::pull_node::{PullNode, start_control_plane, tag};
use crate::pull_secrets::{IMAGE, NAMESPACE};
use support::fault_cri::FaultCri;

/// Starts the API server again.
async fn restart_api_server(mut plane: ControlPlane) -> ControlPlane {
    tokio::task::spawn_blocking(move || {
        plane.apiserver.start().unwrap();
        plane
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn pull_finished_during_api_outage_is_reported_later() {
    let dir = tempfile::tempdir().unwrap();
    let mut plane = tokio::task::spawn_blocking(start_control_plane).await.unwrap();
    let node = PullNode::on_plane(&plane, "outage").await;
    let cri = FaultCri::start(&dir.path().join("cri.sock"));
    cri.state().pull_delay = Duration::from_secs(8);
    let daemon = Daemon::start(&node, &dir.path().join("cri.sock"), dir.path(), &[]);
    node.create_node_image(json!({"r.test/a": {"tags": [tag("1", json!({}))]}}))
        .await;
    node.wait_tag("r.test/a", "1", "begun", |t| t.start_time.is_some())
        .await;

    plane.apiserver.kill().unwrap();
    cri.wait_until("the pull has ended", |s| {
        !s.images.is_empty() && s.active_pulls == 0
    })
    .await;
    assert_eq!(
        daemon.http_get("/healthz").await.0,
        200,
        "a broken neighbour is no reason to be restarted"
    );
    let has_failed_write = |text: &str| {
        let mut lines = text
            .lines()
            .filter(|l| l.starts_with("kruise_api_writes_total{") && l.contains("NodeImage"));
        lines.any(|l| l.contains("result=\"unreachable\"") || l.contains("result=\"timeout\""))
    };
    daemon
        .wait_for_response("/metrics", |_, text| has_failed_write(text))
        .await;

    let plane = restart_api_server(plane).await;
    let finished = node.wait_tag_complete("r.test/a", "1").await;
    assert_eq!(
        (finished.phase, cri.calls("PullImage")),
        (ImagePullPhase::Succeeded, 1)
    );
    drop(plane);
}

#[tokio::test]
async fn unreadable_pull_secret_during_api_outage_is_retried() {
    let dir = tempfile::tempdir().unwrap();
    let mut plane = tokio::task::spawn_blocking(start_control_plane).await.unwrap();
    let node = PullNode::on_plane(&plane, "unread").await;
    let cri = FaultCri::start(&dir.path().join("cri.sock"));
    let mut fixture = DaemonFixture { dir, node, cri };
    fixture.require_credentials();
    fixture.create_login_secret("login", "p", None).await;
    fixture.cri.state().pull_delay = Duration::from_secs(600);
    let _daemon = fixture.start_daemon(&["--max-workers-for-pull-image", "1"]);
    fixture
        .node
        .create_node_image(json!({"r.test/first": {"tags": [tag("1", json!({}))]}}))
        .await;
    fixture
        .cri
        .wait_until("the slot is taken", |s| s.active_pulls == 1)
        .await;
    let single_attempt = tag("1", json!({"pullPolicy": {"backoffLimit": 0}}));
    let refs = json!([{"namespace": NAMESPACE, "name": "login"}]);
    fixture
        .node
        .patch_images(json!({IMAGE: {"pullSecrets": refs, "tags": [single_attempt]}}))
        .await;
    fixture
        .node
        .wait_tag(IMAGE, "1", "it waits for the slot", |t| t.message.is_some())
        .await;

    plane.apiserver.kill().unwrap();
    fixture.cri.state().pull_delay = Duration::ZERO;
    fixture.cri.kill().await;
    fixture.cri.listen();
    let name = format!("{IMAGE}:1");
    let is_attempt = |pull: &PullImageRequest| pull.image.as_ref().is_some_and(|image| image.image == name);
    fixture
        .cri
        .wait_until("it is pulled without credentials", |s| {
            s.pulls.iter().any(is_attempt)
        })
        .await;

    let plane = restart_api_server(plane).await;
    let finished = fixture.node.wait_tag_complete(IMAGE, "1").await;
    assert_eq!(finished.phase, ImagePullPhase::Succeeded, "{finished:?}");
    drop(plane);
}
