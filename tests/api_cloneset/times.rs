//! What time alone brings about.

use kruise_api::cloneset::{CloneSet, CloneSetCondition};
use serde_json::{Value, json};

use crate::field::Field;
use crate::kubelet::{NO_NODE, bind};
use crate::world::{until, world};

fn progressing(set: &CloneSet) -> CloneSetCondition {
    let mut conditions = set.status.iter().flat_map(|s| &s.conditions);
    conditions
        .find(|c| c.type_ == "Progressing")
        .cloned()
        .unwrap_or_default()
}

/// Whether condition Waiting ends so.
fn waits(set: &CloneSet, end: &str) -> bool {
    let mut conditions = set.status.iter().flat_map(|s| &s.conditions);
    conditions.any(|c| c.type_ == "Waiting" && c.message.ends_with(end))
}

fn exceeded(set: &CloneSet) -> bool {
    let condition = progressing(set);
    condition.status == "False" && condition.reason == "ProgressDeadlineExceeded"
}

fn versions(pods: &[Value]) -> Vec<Value> {
    let version = |pod: &Value| pod["metadata"]["resourceVersion"].clone();
    pods.iter().map(version).collect()
}

#[tokio::test]
async fn a_rollout_is_too_late_until_its_pods_have_been_ready_for_long_enough() {
    let field = Field::new(world(), "times").await;
    let template = json!({ "spec": { "nodeSelector": { (NO_NODE): "true" } } });
    let spec =
        json!({ "replicas": 1, "minReadySeconds": 20, "progressDeadlineSeconds": 21, "template": template });
    field.set("web", spec).await;
    let late = until(&field.sets(), "web", "too late", exceeded).await;
    let message = progressing(&late).message;
    let update = late.status.unwrap().update_revision;
    let words = format!("CloneSet revision {update} has timed out progressing");
    assert_eq!(message, words);
    until(&field.sets(), "web", "waits for a node", |set: &CloneSet| {
        waits(set, " (a node)")
    })
    .await;

    let name = field.pods_of("web").await[0]["metadata"]["name"].clone();
    let name = name.as_str().unwrap();
    bind(&field.pods(), name, "node").await.unwrap();
    let young = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        (status.ready_replicas, status.available_replicas) == (1, 0)
    };
    let set = field.status("web", "ready, and not yet available", young).await;
    assert!(exceeded(&set), "as long as it is not over");
    assert!(
        waits(&set, "(to be ready for 20 s, minReadySeconds)"),
        "{:?}",
        set.status
    );
    let before = versions(&field.pods_of("web").await);
    let set = field.settled("web").await;
    let after = versions(&field.pods_of("web").await);
    assert_eq!(before, after, "nothing has happened to the Pod");
    let condition = progressing(&set);
    let told = [condition.status.as_str(), &condition.reason, &condition.message];
    assert_eq!(told, ["True", "CloneSetAvailable", "CloneSet is available"]);
}
