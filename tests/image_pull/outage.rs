//! The API server goes away while an image is pulled.

use std::time::Duration;

use kruise::api::node_image::ImagePullPhase;
use serde_json::json;

use crate::daemon::Daemon;
use crate::support::fault_cri::FaultCri;
use crate::world::{Node, install, tag};

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

    let (plane, started) = tokio::task::spawn_blocking(move || {
        let started = plane.apiserver.start();
        (plane, started)
    })
    .await
    .unwrap();
    started.unwrap();
    let over = node.until_over("r.test/a", "1").await;
    assert_eq!(
        (over.phase, cri.calls("PullImage")),
        (ImagePullPhase::Succeeded, 1)
    );
    drop(plane);
}
