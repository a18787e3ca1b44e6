//! On real containerd: bytes in status, and crashes of either side in mid-pull.

use std::time::Duration;

use kruise_api::node_image::ImagePullPhase;
use serde_json::json;
use testbed::cluster::Runtime;

use crate::daemon::Daemon;
use crate::world::{Node, tag};
use support::fake_registry::FakeRegistry;

const MIB: usize = 1 << 20;

#[tokio::test]
async fn a_pull_shows_its_bytes_and_survives_crashes_of_both_sides() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::make("real").await;
    let mut runtime = tokio::task::spawn_blocking(|| Runtime::start("trixie"))
        .await
        .unwrap()
        .unwrap();
    let registry = FakeRegistry::start().await;
    runtime
        .registry
        .serve(
            "fake.test",
            &format!("http://{}:{}", runtime.host_address(), registry.port()),
        )
        .unwrap();
    let daemon = Daemon::start(&node, &runtime.socket(), dir.path(), &[]);

    let image = registry.image("large", "1", 16 * MIB, "amd64");
    image.allow(8 * MIB);
    node.ask(json!({"fake.test/large": {"tags": [tag("1", json!({"pullPolicy": {"backoffLimit": 0}}))]}}))
        .await;
    let half = node
        .until("fake.test/large", "1", "half way", |t| {
            (40..=50).contains(&t.progress)
        })
        .await;
    assert_eq!(half.phase, ImagePullPhase::Pulling);
    // Its start, and a report of bytes in ten seconds.
    daemon.until_writes(2..=4).await;

    runtime.containerd.kill().unwrap();
    daemon.until("/readyz", |status, _| status != 200).await;
    runtime.containerd.start().unwrap();
    daemon.until("/readyz", |status, _| status == 200).await;
    daemon.kill().await;

    let daemon = Daemon::start(&node, &runtime.socket(), dir.path(), &[]);
    image.allow(usize::MAX);
    let over = node.until_over("fake.test/large", "1").await;
    assert_eq!(
        (over.phase, over.progress),
        (ImagePullPhase::Succeeded, 100),
        "{:?}",
        over.message
    );
    assert!(over.image_id.unwrap().starts_with("fake.test/large@sha256:"));
    assert!(daemon.stop().await < Duration::from_secs(5));
}
