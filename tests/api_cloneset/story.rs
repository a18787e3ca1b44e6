//! What `kubectl describe` shows of a CloneSet's life.

use serde_json::json;

use crate::field::Field;
use crate::kubelet::NO_IMAGE;
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
    let waits = |set: &kruise::api::cloneset::CloneSet| {
        let mut conditions = set.status.iter().flat_map(|s| &s.conditions);
        conditions
            .any(|c| c.message.contains("ImagePullBackOff") && c.message.contains("maxUnavailable is 1"))
    };
    until(&field.sets(), "web", "stuck at an image", waits).await;
    field.edit("web", json!({ "spec": { "replicas": 2 } })).await;
    field.event("SuccessfulDelete", "web").await;
    let namespace = format!("--namespace={}", field.namespace);
    let text = field
        .world
        .plane
        .kubectl(&["describe", "clone/web", &namespace])
        .unwrap();
    println!("{text}");
    let mut rest = text.as_str();
    for chapter in [
        "Events:",
        "SuccessfulCreate",
        "created Pods of web-",
        "updating Pods in place to web-",
        "SuccessfulDelete",
        "deleted Pods web-",
    ] {
        let at = rest
            .find(chapter)
            .unwrap_or_else(|| panic!("{chapter:?} is not, or not in its place, in {text}"));
        rest = &rest[at + chapter.len()..];
    }
}
