//! The API server goes away while an image is pulled, or before.

use std::time::Duration;

use k8s_cri::v1::PullImageRequest;
use kruise_api::node_image::ImagePullPhase;
use serde_json::json;
use testbed::cluster::ControlPlane;

use crate::daemon::Daemon;
use crate::faults::Bed;
use crate::secrets::{IMAGE, NAMESPACE};
use crate::world::{Node, install, tag};
use support::fault_cri::FaultCri;

/// Starts the API server again.
async fn with_api_server(mut plane: ControlPlane) -> ControlPlane {
    tokio::task::spawn_blocking(move || {
        plane.apiserver.start().unwrap();
        plane
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn what_ends_while_the_api_server_is_down_is_told_when_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut plane = tokio::task::spawn_blocking(install).await.unwrap();
    let node = Node::on(&plane, "outage").await;
    let cri = FaultCri::start(&dir.path().join("cri.sock"));
    cri.state().pull_takes = Duration::from_secs(8);
    let daemon = Daemon::start(&node, &dir.path().join("cri.sock"), dir.path(), &[]);
    node.ask(json!({"r.test/a": {"tags": [tag("1", json!({}))]}}))
        .await;
    node.until("r.test/a", "1", "begun", |t| t.start_time.is_some())
        .await;

    plane.apiserver.kill().unwrap();
    cri.until("the pull has ended", |s| !s.images.is_empty() && s.pulling == 0)
        .await;
    assert_eq!(
        daemon.get("/healthz").await.0,
        200,
        "a broken neighbour is no reason to be restarted"
    );
    let refused = |text: &str| {
        let mut lines = text
            .lines()
            .filter(|l| l.starts_with("kruise_api_writes_total{") && l.contains("NodeImage"));
        lines.any(|l| l.contains("result=\"unreachable\"") || l.contains("result=\"timeout\""))
    };
    daemon.until("/metrics", |_, text| refused(text)).await;

    let plane = with_api_server(plane).await;
    let over = node.until_over("r.test/a", "1").await;
    assert_eq!(
        (over.phase, cri.calls("PullImage")),
        (ImagePullPhase::Succeeded, 1)
    );
    drop(plane);
}

#[tokio::test]
async fn a_pull_secret_that_cannot_be_read_while_the_api_server_is_down_fails_no_attempt() {
    let dir = tempfile::tempdir().unwrap();
    let mut plane = tokio::task::spawn_blocking(install).await.unwrap();
    let node = Node::on(&plane, "unread").await;
    let cri = FaultCri::start(&dir.path().join("cri.sock"));
    let mut bed = Bed { dir, node, cri };
    bed.lock();
    bed.login("login", "p", None).await;
    bed.cri.state().pull_takes = Duration::from_secs(600);
    let _daemon = bed.daemon(&["--max-workers-for-pull-image", "1"]);
    bed.node
        .ask(json!({"r.test/first": {"tags": [tag("1", json!({}))]}}))
        .await;
    bed.cri.until("the slot is taken", |s| s.pulling == 1).await;
    let once = tag("1", json!({"pullPolicy": {"backoffLimit": 0}}));
    let refs = json!([{"namespace": NAMESPACE, "name": "login"}]);
    bed.node
        .change(json!({IMAGE: {"pullSecrets": refs, "tags": [once]}}))
        .await;
    bed.node
        .until(IMAGE, "1", "it waits for the slot", |t| t.message.is_some())
        .await;

    plane.apiserver.kill().unwrap();
    bed.cri.state().pull_takes = Duration::ZERO;
    bed.cri.kill().await;
    bed.cri.listen();
    let name = format!("{IMAGE}:1");
    let tried = |pull: &PullImageRequest| pull.image.as_ref().is_some_and(|image| image.image == name);
    bed.cri
        .until("it is pulled without credentials", |s| s.pulls.iter().any(tried))
        .await;

    let plane = with_api_server(plane).await;
    let over = bed.node.until_over(IMAGE, "1").await;
    assert_eq!(over.phase, ImagePullPhase::Succeeded, "{over:?}");
    drop(plane);
}
