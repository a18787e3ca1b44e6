//! On real containerd: byte progress in the status, and crashes of either side during a pull.

use std::time::Duration;

use kruise_api::node_image::ImagePullPhase;
use serde_json::json;
use testbed::cluster::Runtime;

use crate::daemon::Daemon;
use crate::pull_node::{PullNode, tag};
use support::fake_registry::FakeRegistry;
use support::waits;

const MIB: usize = 1 << 20;

/// A runtime of that series, with a registry that the test controls.
async fn runtime_with_registry(suite: &'static str) -> (Runtime, FakeRegistry) {
    let runtime = tokio::task::spawn_blocking(move || Runtime::start(suite))
        .await
        .unwrap()
        .unwrap();
    let registry = FakeRegistry::start().await;
    let url = format!("http://{}:{}", runtime.host_address(), registry.port());
    runtime.registry.add_registry_host("fake.test", &url).unwrap();
    (runtime, registry)
}

#[tokio::test]
async fn pull_reports_progress_and_survives_crashes() {
    let dir = tempfile::tempdir().unwrap();
    let node = PullNode::on_shared_plane("real").await;
    let (mut runtime, registry) = runtime_with_registry("trixie").await;
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

/// Waits until that image is pinned, or is not.
async fn wait_for_pinned(runtime: &Runtime, image: &str, expected: bool) {
    let what = format!("{image} pinned: {expected}");
    let poll = || async {
        let filter = format!("name=={image}");
        let list = runtime.ctr(&["images", "list", &filter]).unwrap();
        assert!(list.contains(image), "{list}");
        (list.contains("cri-containerd.pinned=pinned") == expected).then_some(())
    };
    waits::poll_until(&what, &String::new, poll).await;
}

#[tokio::test]
async fn pinned_image_is_released_at_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let node = PullNode::on_shared_plane("pins").await;
    let (runtime, registry) = runtime_with_registry("trixie").await;
    let daemon = Daemon::start(&node, &runtime.socket(), dir.path(), &[]);
    let pin = |seconds: u32| json!({ "pullPolicy": { "pinSeconds": seconds } });
    let names = ["hour", "joined", "short", "next"];
    let images = names.map(|name| registry.image(name, "1", 512, "amd64"));
    // A second job joins the pull, and its pin counts.
    node.create_node_image(json!({ "fake.test/joined": { "tags": [tag("1", json!({}))] } }))
        .await;
    node.wait_tag("fake.test/joined", "1", "begins", |tag| {
        tag.phase == ImagePullPhase::Pulling
    })
    .await;
    node.patch_images(json!({
        "fake.test/joined": { "tags": [tag("1", pin(3600))] },
        "fake.test/hour": { "tags": [tag("1", pin(3600))] },
        "fake.test/short": { "tags": [tag("1", pin(1))] },
    }))
    .await;
    node.wait_tag("fake.test/short", "1", "begins", |tag| {
        tag.phase == ImagePullPhase::Pulling
    })
    .await;
    for image in &images {
        image.allow(usize::MAX);
    }
    for name in ["hour", "joined", "short"] {
        let ended = node.wait_tag_complete(&format!("fake.test/{name}"), "1").await;
        assert_eq!((ended.phase, ended.message), (ImagePullPhase::Succeeded, None));
    }
    wait_for_pinned(&runtime, "fake.test/short:1", false).await;
    for name in ["hour", "joined"] {
        wait_for_pinned(&runtime, &format!("fake.test/{name}:1"), true).await;
    }
    // The next daemon ends the pins of the one before.
    node.patch_images(json!({ "fake.test/next": { "tags": [tag("1", pin(5))] } }))
        .await;
    node.wait_tag_complete("fake.test/next", "1").await;
    daemon.kill().await;
    let daemon = Daemon::start(&node, &runtime.socket(), dir.path(), &[]);
    wait_for_pinned(&runtime, "fake.test/next:1", false).await;
    wait_for_pinned(&runtime, "fake.test/hour:1", true).await;
    daemon.stop().await;
}

/// containerd 1.6 stores the label and does not heed it.
#[tokio::test]
async fn runtime_that_pins_nothing_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let node = PullNode::on_shared_plane("old-runtime").await;
    let (runtime, registry) = runtime_with_registry("bookworm").await;
    let daemon = Daemon::start(&node, &runtime.socket(), dir.path(), &[]);
    registry.image("old", "1", 512, "amd64").allow(usize::MAX);
    let policy = json!({ "pullPolicy": { "pinSeconds": 60 } });
    node.create_node_image(json!({ "fake.test/old": { "tags": [tag("1", policy)] } }))
        .await;
    let ended = node.wait_tag_complete("fake.test/old", "1").await;
    assert_eq!(ended.phase, ImagePullPhase::Succeeded);
    assert_eq!(
        ended.message.unwrap(),
        "the image is not pinned: the runtime does not report it as pinned"
    );
    daemon.stop().await;
}
