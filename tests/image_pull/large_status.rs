//! One tenant has long messages in the NodeImage that all tenants of the node share.

use std::collections::VecDeque;

use kruise_api::go_json;
use kruise_api::node_image::{ImagePullPhase, MAX_STATUS_BYTES, NodeImageStatus};
use serde_json::{Value, json};

use crate::faults::DaemonFixture;
use crate::pull_node::tag;

/// Tags of the noisy tenant: with all their messages the NodeImage exceeds etcd's limit of 1.5 MiB.
const NOISY_TAGS: usize = 440;

/// A tag for a job of that namespace, with a single pull attempt.
fn single_attempt_tag(name: &str, namespace: &str) -> Value {
    let owner = json!([{"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "namespace": namespace,
        "name": name, "uid": format!("uid-of-{name}")}]);
    tag(
        name,
        json!({"pullPolicy": {"backoffLimit": 0}, "ownerReferences": owner}),
    )
}

/// Makes the runtime fail an image with this message.
fn fail_pull(fixture: &DaemonFixture, image: &str, message: String) {
    let failures = VecDeque::from([(tonic::Code::Unknown, message)]);
    fixture
        .cri
        .state()
        .pull_failures
        .insert(image.to_owned(), failures);
}

/// The images of the noisy tenant. etcd stores each `<` in six bytes.
fn noisy_images(fixture: &DaemonFixture) -> Value {
    let names: Vec<_> = (0..NOISY_TAGS).map(|n| format!("t{n}")).collect();
    for name in &names {
        fail_pull(fixture, &format!("r.test/evil:{name}"), "<".repeat(2000));
    }
    let tags: Vec<_> = names
        .iter()
        .map(|name| single_attempt_tag(name, "evil"))
        .collect();
    json!({"r.test/evil": {"tags": tags}})
}

async fn wait_failed(fixture: &DaemonFixture, tags: usize) -> NodeImageStatus {
    let failed = i32::try_from(tags).unwrap();
    let all_failed = fixture.node.wait_node_image("all failed", |n| {
        n.status.as_ref().is_some_and(|s| s.failed == failed)
    });
    all_failed.await.status.unwrap()
}

#[tokio::test]
async fn large_messages_of_one_tenant_are_truncated() {
    let fixture = DaemonFixture::start("large").await;
    let _daemon = fixture.start_daemon(&[]);
    fixture.node.create_node_image(noisy_images(&fixture)).await;
    wait_failed(&fixture, NOISY_TAGS).await;
    let long_message = "no such host ".repeat(40);
    fail_pull(&fixture, "r.test/good:1", long_message.clone());
    fixture
        .node
        .patch_images(json!({"r.test/good": {"tags": [single_attempt_tag("1", "good")]}}))
        .await;
    let good_status = fixture.node.wait_tag_complete("r.test/good", "1").await;
    let message = good_status.message.unwrap();
    assert!(message.contains(long_message.trim()), "{message}");

    let status = wait_failed(&fixture, NOISY_TAGS + 1).await;
    let bytes = go_json::encoded_length(&serde_json::to_string(&status).unwrap());
    assert!(bytes <= MAX_STATUS_BYTES, "{bytes}");
    for told in &status.image_statuses["r.test/evil"].tags {
        let message = told.message.as_deref().unwrap();
        assert!(
            message.ends_with("<…") && told.completion_time.is_some(),
            "{message}"
        );
    }
}

#[tokio::test]
async fn too_large_status_is_written_without_messages() {
    let fixture = DaemonFixture::start("refused").await;
    let daemon = fixture.start_daemon(&[]);
    // More than the manager allows, as another writer may do.
    let filler: serde_json::Map<_, _> = (0..16)
        .map(|n| (n.to_string(), json!("x".repeat(65_000))))
        .collect();
    fixture
        .node
        .create_node_image(json!({"r.test/filler": {"tags": [], "sandboxConfig": {"annotations": filler}}}))
        .await;
    fixture.node.patch_images(noisy_images(&fixture)).await;
    let status = wait_failed(&fixture, NOISY_TAGS).await;
    let tags = &status.image_statuses["r.test/evil"].tags;
    assert!(
        tags.iter()
            .all(|t| t.message.is_none() && t.completion_time.is_some())
    );
    fixture
        .node
        .patch_images(json!({"r.test/good": {"tags": [single_attempt_tag("1", "good")]}}))
        .await;
    let good_status = fixture.node.wait_tag_complete("r.test/good", "1").await;
    assert_eq!(
        (good_status.phase, good_status.message),
        (ImagePullPhase::Succeeded, None)
    );
    let log = daemon.log();
    let warnings = log
        .lines()
        .filter(|line| line.contains("it is written without messages"));
    assert_eq!(warnings.count(), 1, "{log}");
}
