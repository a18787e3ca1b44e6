//! Conditions that change with time alone.

use kruise_api::cloneset::{CloneSet, CloneSetCondition};
use serde_json::{Value, json};

use crate::fake_kubelet::{NO_NODE, bind_pod};
use crate::fixture::Fixture;
use crate::test_cluster::{shared_cluster, wait_until};

fn progressing(set: &CloneSet) -> CloneSetCondition {
    let mut conditions = set.status.iter().flat_map(|s| &s.conditions);
    conditions
        .find(|c| c.type_ == "Progressing")
        .cloned()
        .unwrap_or_default()
}

/// Whether the message of condition Waiting ends with `suffix`.
fn waiting_ends_with(set: &CloneSet, suffix: &str) -> bool {
    let mut conditions = set.status.iter().flat_map(|s| &s.conditions);
    conditions.any(|c| c.type_ == "Waiting" && c.message.ends_with(suffix))
}

fn deadline_exceeded(set: &CloneSet) -> bool {
    let condition = progressing(set);
    condition.status == "False" && condition.reason == "ProgressDeadlineExceeded"
}

fn resource_versions(pods: &[Value]) -> Vec<Value> {
    let version = |pod: &Value| pod["metadata"]["resourceVersion"].clone();
    pods.iter().map(version).collect()
}

#[tokio::test]
async fn progress_deadline_exceeded_until_min_ready_seconds_pass() {
    let fixture = Fixture::new(shared_cluster(), "times").await;
    let template = json!({ "spec": { "nodeSelector": { (NO_NODE): "true" } } });
    let spec =
        json!({ "replicas": 1, "minReadySeconds": 20, "progressDeadlineSeconds": 21, "template": template });
    fixture.create_cloneset("web", spec).await;
    let timed_out = wait_until(&fixture.sets(), "web", "too late", deadline_exceeded).await;
    let message = progressing(&timed_out).message;
    let update = timed_out.status.unwrap().update_revision;
    let expected = format!("CloneSet revision {update} has timed out progressing");
    assert_eq!(message, expected);
    wait_until(&fixture.sets(), "web", "waits for a node", |set: &CloneSet| {
        waiting_ends_with(set, " (a node)")
    })
    .await;

    let name = fixture.pods_of("web").await[0]["metadata"]["name"].clone();
    let name = name.as_str().unwrap();
    bind_pod(&fixture.pods(), name, "node").await.unwrap();
    let ready_not_available = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        (status.ready_replicas, status.available_replicas) == (1, 0)
    };
    let set = fixture
        .wait_status("web", "ready, and not yet available", ready_not_available)
        .await;
    assert!(deadline_exceeded(&set), "as long as it is not over");
    assert!(
        waiting_ends_with(&set, "(to be ready for 20 s, minReadySeconds)"),
        "{:?}",
        set.status
    );
    let before = resource_versions(&fixture.pods_of("web").await);
    let set = fixture.wait_settled("web").await;
    let after = resource_versions(&fixture.pods_of("web").await);
    assert_eq!(before, after, "nothing has happened to the Pod");
    let condition = progressing(&set);
    let progress = [condition.status.as_str(), &condition.reason, &condition.message];
    assert_eq!(progress, ["True", "CloneSetAvailable", "CloneSet is available"]);
}
