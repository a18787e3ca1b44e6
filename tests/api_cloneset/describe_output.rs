//! What `kubectl describe` shows during a CloneSet's life.

use serde_json::json;

use crate::errors::{set_quota, wait_for_condition};
use crate::fake_kubelet::NO_IMAGE;
use crate::fixture::Fixture;
use crate::pods::name;
use crate::test_cluster::{shared_cluster, wait_until};

#[tokio::test]
async fn kubectl_describe_shows_events_in_order() {
    let fixture = Fixture::new(shared_cluster(), "story").await;
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 });
    let spec = json!({ "progressDeadlineSeconds": 600, "updateStrategy": { "rollingUpdate": rolling } });
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    fixture.set_image("web", "example.com/app:2").await;
    fixture.wait_settled("web").await;
    fixture.set_image("web", NO_IMAGE).await;
    let image_pull_backoff = |set: &kruise_api::cloneset::CloneSet| {
        let mut conditions = set.status.iter().flat_map(|s| &s.conditions);
        conditions
            .any(|c| c.message.contains("ImagePullBackOff") && c.message.contains("maxUnavailable is 1"))
    };
    wait_until(&fixture.sets(), "web", "stuck at an image", image_pull_backoff).await;
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 2 } }))
        .await;
    fixture.wait_event("SuccessfulDelete", "web").await;
    let two = |set: &kruise_api::cloneset::CloneSet| set.status.as_ref().is_some_and(|s| s.replicas == 2);
    wait_until(&fixture.sets(), "web", "of two Pods", two).await;
    let text = fixture.describe("web");
    println!("{text}");
    let mut remaining = text.as_str();
    for expected in [
        "Events:",
        "SuccessfulCreate",
        "succeed to create pod web-",
        "successfully update pod web-",
        "in-place(revision web-",
        "SuccessfulDelete",
        "succeed to delete pod web-",
    ] {
        let at = remaining
            .find(expected)
            .unwrap_or_else(|| panic!("{expected:?} is not, or not in its place, in {text}"));
        remaining = &remaining[at + expected.len()..];
    }
}

/// Names of the existing claims.
async fn claim_names(fixture: &Fixture) -> Vec<String> {
    fixture.owned_claims().await.iter().map(name).collect()
}

#[tokio::test]
async fn pod_over_quota_is_reported_and_created_with_its_name() {
    let fixture = Fixture::new(shared_cluster(), "no-room").await;
    set_quota(&fixture, "pods", 2).await;
    let templates = json!([{ "metadata": { "name": "data" }, "spec": { "accessModes": ["ReadWriteOnce"],
        "resources": { "requests": { "storage": "1Gi" } } } }]);
    fixture
        .create_cloneset("web", json!({ "volumeClaimTemplates": templates }))
        .await;
    wait_for_condition(&fixture, "FailedScale", "exceeded quota: few").await;
    fixture.wait_event("FailedCreate", "web").await;
    // Wait until the two created Pods are ready.
    let failure_only = |set: &kruise_api::cloneset::CloneSet| {
        let mut conditions = set.status.iter().flat_map(|s| &s.conditions);
        conditions.any(|c| c.type_ == "Waiting" && c.message.starts_with("failed: "))
    };
    wait_until(&fixture.sets(), "web", "short of one Pod only", failure_only).await;
    let text = fixture.describe("web");
    println!("{text}");
    let failure =
        "pods \"web-*\" is forbidden: exceeded quota: few, requested: pods=1, used: pods=2, limited: pods=2";
    for (section, prefix) in [
        ("failed: ", "failed: "),
        ("FailedCreate ", "failed to create pod: "),
    ] {
        let line = text.lines().find(|line| line.contains(section));
        let failure = format!("{prefix}{failure}");
        assert!(
            line.is_some_and(|line| line.contains(&failure)),
            "{section}: {text}"
        );
    }
    let mut messages = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Message:"));
    assert!(messages.any(|message| message.trim() == failure), "{text}");
    let waiting = claim_names(&fixture).await;
    assert_eq!(waiting.len(), 3, "the third waits for its Pod");

    set_quota(&fixture, "pods", 3).await;
    fixture.wait_settled("web").await;
    let pods = fixture.pods_of("web").await;
    let names: Vec<String> = pods.iter().map(|pod| format!("data-{}", name(pod))).collect();
    assert_eq!(names, waiting);
    assert_eq!(claim_names(&fixture).await, waiting);
}
