//! Whose turn it is: Pods are updated in the order that the strategy asks for.

use kube::api::Patch;
use serde_json::{Value, json};
use testbed::cluster::wait;

use crate::field::{Field, identities};
use crate::world::{PATIENCE, world};

/// Pods that the manager patched after the first `from` writes, each where it was first.
fn patched(field: &Field, from: usize) -> Vec<String> {
    let mut names = Vec::new();
    for (verb, resource, name) in field.pod_writes().into_iter().skip(from) {
        if verb == "patch" && resource == "pods" && !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The ranks of the Pods in the order of their update to this image.
async fn rollout(field: &Field, image: &str, names: &[String]) -> Vec<usize> {
    let from = field.pod_writes().len();
    field.image("web", image).await;
    field.settled("web").await;
    // The audit log comes a moment after the watch.
    let all = wait::until("all Pods in the audit log", PATIENCE, || {
        let all = patched(field, from);
        Ok((all.len() == names.len()).then_some(all))
    });
    let rank = |name: &String| names.iter().position(|n| n == name).unwrap() + 1;
    all.unwrap().iter().map(rank).collect()
}

#[tokio::test]
async fn pods_are_updated_by_priority_and_spread() {
    let field = Field::new(world(), "turns").await;
    let strategy = |scatter: Value| {
        json!({ "updateStrategy": { "rollingUpdate": {
            "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1, "scatterStrategy": scatter,
            "priorityStrategy": { "orderPriority": [{ "orderedKey": "rank" }] },
        }}})
    };
    let mut spec = strategy(json!([]));
    spec["replicas"] = json!(6);
    field.set("web", spec).await;
    field.settled("web").await;
    let names: Vec<String> = identities(&field.pods_of("web").await)
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    for (at, name) in names.iter().enumerate() {
        let kind = if at < 3 { "few" } else { "many" };
        let labels = json!({ "rank": format!("r-{}", at + 1), "kind": kind });
        let patch = Patch::Merge(json!({ "metadata": { "labels": labels } }));
        field
            .pods()
            .patch(name, &Default::default(), &patch)
            .await
            .unwrap();
    }
    // What comes after them has been looked at after them.
    field.set("other", json!({ "replicas": 1 })).await;
    field.settled("other").await;
    let order = rollout(&field, "example.com/app:2", &names).await;
    assert_eq!(order, [6, 5, 4, 3, 2, 1], "the highest number comes first");

    let few = json!([{ "key": "kind", "value": "few" }]);
    field.edit("web", json!({ "spec": strategy(few) })).await;
    let order = rollout(&field, "example.com/app:3", &names).await;
    assert_eq!(
        order,
        [3, 6, 2, 5, 4, 1],
        "the first three are spread over the others"
    );
}
