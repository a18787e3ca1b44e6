//! On real containerd: byte progress in the status, and crashes of either side during a pull.

use std::time::Duration;

use kruise_api::node_image::ImagePullPhase;
use serde_json::json;
use testbed::cluster::Runtime;

use crate::daemon::Daemon;
use crate::pull_node::{PullNode, tag};
use support::fake_registry::FakeRegistry;

const MIB: usize = 1 << 20;

#[tokio::test]
async fn pull_reports_progress_and_survives_crashes() {
    let dir = tempfile::tempdir().unwrap();
    let node = PullNode::on_shared_plane("real").await;
    let mut runtime = tokio::task::spawn_blocking(|| Runtime::start("trixie"))
        .await
        .unwrap()
        .unwrap();
    let registry = FakeRegistry::start().await;
    runtime
        .registry
        .add_registry_host(
            "fake.test",
            &format!("http://{}:{}", runtime.host_address(), registry.port()),
        )
        .unwrap();
    let daemon = Daemon::start(&node, &runtime.socket(), dir.path(), &[]);

    let image = registry.image("large", "1", 16 * MIB, "amd64");
    image.allow(8 * MIB);
    node.create_node_image(
        json!({"fake.test/large": {"tags": [tag("1", json!({"pullPolicy": {"backoffLimit": 0}}))]}}),
    )
    .await;
    let half_way = node
        .wait_tag("fake.test/large", "1", "half way", |t| {
            (40..=50).contains(&t.progress)
        })
        .await;
    assert_eq!(half_way.phase, ImagePullPhase::Pulling);
    // The start, and byte progress every ten seconds.
    daemon.wait_for_status_writes(2..=4).await;

    runtime.containerd.kill().unwrap();
    daemon
        .wait_for_response("/readyz", |status, _| status != 200)
        .await;
    runtime.containerd.start().unwrap();
    daemon
        .wait_for_response("/readyz", |status, _| status == 200)
        .await;
    daemon.kill().await;

    let daemon = Daemon::start(&node, &runtime.socket(), dir.path(), &[]);
    image.allow(usize::MAX);
    let finished = node.wait_tag_complete("fake.test/large", "1").await;
    assert_eq!(
        (finished.phase, finished.progress),
        (ImagePullPhase::Succeeded, 100),
        "{:?}",
        finished.message
    );
    assert!(finished.image_id.unwrap().starts_with("fake.test/large@sha256:"));
    assert!(daemon.stop().await < Duration::from_secs(5));
}
