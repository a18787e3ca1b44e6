//! One tenant has much to say in the NodeImage that all tenants of the node share.

use std::collections::VecDeque;

use kruise_api::go_json;
use kruise_api::node_image::{ImagePullPhase, MOST_STATUS, NodeImageStatus};
use serde_json::{Value, json};

use crate::faults::Bed;
use crate::world::tag;

/// Tags of the talkative tenant: with all their words the NodeImage is larger than the 1.5 MiB that etcd takes.
const TAGS: usize = 440;

/// A tag that is pulled once for a job of that namespace.
fn once(name: &str, namespace: &str) -> Value {
    let owner = json!([{"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "namespace": namespace,
        "name": name, "uid": format!("uid-of-{name}")}]);
    tag(
        name,
        json!({"pullPolicy": {"backoffLimit": 0}, "ownerReferences": owner}),
    )
}

/// Has the runtime refuse an image.
fn refuse(bed: &Bed, image: &str, words: String) {
    let answers = VecDeque::from([(tonic::Code::Unknown, words)]);
    bed.cri.state().pull_failures.insert(image.to_owned(), answers);
}

/// The images of the talkative tenant. etcd has each `<` as six bytes.
fn evil(bed: &Bed) -> Value {
    let names: Vec<_> = (0..TAGS).map(|n| format!("t{n}")).collect();
    for name in &names {
        refuse(bed, &format!("r.test/evil:{name}"), "<".repeat(2000));
    }
    let tags: Vec<_> = names.iter().map(|name| once(name, "evil")).collect();
    json!({"r.test/evil": {"tags": tags}})
}

async fn until_failed(bed: &Bed, tags: usize) -> NodeImageStatus {
    let failed = i32::try_from(tags).unwrap();
    let seen = bed.node.until_node("all failed", |n| {
        n.status.as_ref().is_some_and(|s| s.failed == failed)
    });
    seen.await.status.unwrap()
}

#[tokio::test]
async fn a_tenant_with_much_to_say_keeps_no_other_from_being_told() {
    let bed = Bed::make("large").await;
    let _daemon = bed.daemon(&[]);
    bed.node.ask(evil(&bed)).await;
    until_failed(&bed, TAGS).await;
    let words = "no such host ".repeat(40);
    refuse(&bed, "r.test/good:1", words.clone());
    bed.node
        .change(json!({"r.test/good": {"tags": [once("1", "good")]}}))
        .await;
    let told = bed.node.until_over("r.test/good", "1").await;
    let message = told.message.unwrap();
    assert!(message.contains(words.trim()), "{message}");

    let status = until_failed(&bed, TAGS + 1).await;
    let bytes = go_json::length(&serde_json::to_string(&status).unwrap());
    assert!(bytes <= MOST_STATUS, "{bytes}");
    for told in &status.image_statuses["r.test/evil"].tags {
        let message = told.message.as_deref().unwrap();
        assert!(
            message.ends_with("<…") && told.completion_time.is_some(),
            "{message}"
        );
    }
}

#[tokio::test]
async fn a_status_that_is_refused_as_too_large_is_written_without_messages() {
    let bed = Bed::make("refused").await;
    let daemon = bed.daemon(&[]);
    // More than the manager allows, as somebody else may write it.
    let filler: serde_json::Map<_, _> = (0..16)
        .map(|n| (n.to_string(), json!("x".repeat(65_000))))
        .collect();
    bed.node
        .ask(json!({"r.test/filler": {"tags": [], "sandboxConfig": {"annotations": filler}}}))
        .await;
    bed.node.change(evil(&bed)).await;
    let status = until_failed(&bed, TAGS).await;
    let tags = &status.image_statuses["r.test/evil"].tags;
    assert!(
        tags.iter()
            .all(|t| t.message.is_none() && t.completion_time.is_some())
    );
    bed.node
        .change(json!({"r.test/good": {"tags": [once("1", "good")]}}))
        .await;
    let told = bed.node.until_over("r.test/good", "1").await;
    assert_eq!((told.phase, told.message), (ImagePullPhase::Succeeded, None));
    let log = daemon.log();
    let warned = log
        .lines()
        .filter(|line| line.contains("it is written without messages"));
    assert_eq!(warned.count(), 1, "{log}");
}
