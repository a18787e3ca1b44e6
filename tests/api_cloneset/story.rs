//! What `kubectl describe` shows of a CloneSet's life.

use serde_json::json;

use crate::errors::{quota, says};
use crate::field::Field;
use crate::kubelet::NO_IMAGE;
use crate::pods::name;
use crate::world::{until, world};

#[tokio::test]
async fn a_description_reads_as_a_story() {
    let field = Field::new(world(), "story").await;
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 });
    let spec = json!({ "progressDeadlineSeconds": 600, "updateStrategy": { "rollingUpdate": rolling } });
    field.set("web", spec).await;
    field.settled("web").await;
    field.image("web", "example.com/app:2").await;
    field.settled("web").await;
    field.image("web", NO_IMAGE).await;
    let waits = |set: &kruise_api::cloneset::CloneSet| {
        let mut conditions = set.status.iter().flat_map(|s| &s.conditions);
        conditions
            .any(|c| c.message.contains("ImagePullBackOff") && c.message.contains("maxUnavailable is 1"))
    };
    until(&field.sets(), "web", "stuck at an image", waits).await;
    field.edit("web", json!({ "spec": { "replicas": 2 } })).await;
    field.event("SuccessfulDelete", "web").await;
    let two = |set: &kruise_api::cloneset::CloneSet| set.status.as_ref().is_some_and(|s| s.replicas == 2);
    until(&field.sets(), "web", "of two Pods", two).await;
    let text = field.described("web");
    println!("{text}");
    let mut rest = text.as_str();
    for chapter in [
        "Events:",
        "SuccessfulCreate",
        "succeed to create pod web-",
        "successfully update pod web-",
        "in-place(revision web-",
        "SuccessfulDelete",
        "succeed to delete pod web-",
    ] {
        let at = rest
            .find(chapter)
            .unwrap_or_else(|| panic!("{chapter:?} is not, or not in its place, in {text}"));
        rest = &rest[at + chapter.len()..];
    }
}

/// Names of the claims that are there.
async fn claims(field: &Field) -> Vec<String> {
    field.claims().await.iter().map(name).collect()
}

#[tokio::test]
async fn a_pod_that_is_refused_is_told_and_made_under_its_name_when_it_may() {
    let field = Field::new(world(), "no-room").await;
    quota(&field, "pods", 2).await;
    let templates = json!([{ "metadata": { "name": "data" }, "spec": { "accessModes": ["ReadWriteOnce"],
        "resources": { "requests": { "storage": "1Gi" } } } }]);
    field
        .set("web", json!({ "volumeClaimTemplates": templates }))
        .await;
    says(&field, "FailedScale", "exceeded quota: few").await;
    field.event("FailedCreate", "web").await;
    // The two that were made are waited for until they are ready.
    let alone = |set: &kruise_api::cloneset::CloneSet| {
        let mut conditions = set.status.iter().flat_map(|s| &s.conditions);
        conditions.any(|c| c.type_ == "Waiting" && c.message.starts_with("failed: "))
    };
    until(&field.sets(), "web", "short of one Pod only", alone).await;
    let text = field.described("web");
    println!("{text}");
    let words =
        "pods \"web-*\" is forbidden: exceeded quota: few, requested: pods=1, used: pods=2, limited: pods=2";
    for (place, before) in [
        ("failed: ", "failed: "),
        ("FailedCreate ", "failed to create pod: "),
    ] {
        let line = text.lines().find(|line| line.contains(place));
        let words = format!("{before}{words}");
        assert!(line.is_some_and(|line| line.contains(&words)), "{place}: {text}");
    }
    let mut messages = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Message:"));
    assert!(messages.any(|message| message.trim() == words), "{text}");
    let waiting = claims(&field).await;
    assert_eq!(waiting.len(), 3, "the third waits for its Pod");

    quota(&field, "pods", 3).await;
    field.settled("web").await;
    let pods = field.pods_of("web").await;
    let names: Vec<String> = pods.iter().map(|pod| format!("data-{}", name(pod))).collect();
    assert_eq!(names, waiting);
    assert_eq!(claims(&field).await, waiting);
}
