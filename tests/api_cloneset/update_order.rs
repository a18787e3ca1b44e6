//! Pods are updated in the order that the strategy gives.

use kube::api::Patch;
use serde_json::{Value, json};
use testbed::cluster::wait;

use crate::fixture::{Fixture, identities};
use crate::test_cluster::{WAIT_TIMEOUT, shared_cluster};

/// Pods that the manager patched after the first `skipped_writes` writes, in the order of their first patch.
fn patched_pods(fixture: &Fixture, skipped_writes: usize) -> Vec<String> {
    let mut names = Vec::new();
    for (verb, resource, name) in fixture.pod_writes().into_iter().skip(skipped_writes) {
        if verb == "patch" && resource == "pods" && !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The ranks of the Pods in the order of their update to this image.
async fn rollout_order(fixture: &Fixture, image: &str, names: &[String]) -> Vec<usize> {
    let writes_before = fixture.pod_writes().len();
    fixture.set_image("web", image).await;
    fixture.wait_settled("web").await;
    // The audit log is a moment behind the watch.
    let all = wait::until("all Pods in the audit log", WAIT_TIMEOUT, || {
        let all = patched_pods(fixture, writes_before);
        Ok((all.len() == names.len()).then_some(all))
    });
    let rank = |name: &String| names.iter().position(|n| n == name).unwrap() + 1;
    all.unwrap().iter().map(rank).collect()
}

#[tokio::test]
async fn pods_are_updated_by_priority_and_scatter() {
    let fixture = Fixture::new(shared_cluster(), "turns").await;
    let strategy = |scatter: Value| {
        json!({ "updateStrategy": { "rollingUpdate": {
            "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1, "scatterStrategy": scatter,
            "priorityStrategy": { "orderPriority": [{ "orderedKey": "rank" }] },
        }}})
    };
    let mut spec = strategy(json!([]));
    spec["replicas"] = json!(6);
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    let names: Vec<String> = identities(&fixture.pods_of("web").await)
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    for (index, name) in names.iter().enumerate() {
        let kind = if index < 3 { "few" } else { "many" };
        let labels = json!({ "rank": format!("r-{}", index + 1), "kind": kind });
        let patch = Patch::Merge(json!({ "metadata": { "labels": labels } }));
        fixture
            .pods()
            .patch(name, &Default::default(), &patch)
            .await
            .unwrap();
    }
    // When this later CloneSet is reconciled, so are the earlier changes.
    fixture.create_cloneset("other", json!({ "replicas": 1 })).await;
    fixture.wait_settled("other").await;
    let order = rollout_order(&fixture, "example.com/app:2", &names).await;
    assert_eq!(order, [6, 5, 4, 3, 2, 1], "the highest number comes first");

    let few = json!([{ "key": "kind", "value": "few" }]);
    fixture.patch_set("web", json!({ "spec": strategy(few) })).await;
    let order = rollout_order(&fixture, "example.com/app:3", &names).await;
    assert_eq!(
        order,
        [3, 6, 2, 5, 4, 1],
        "the first three are spread over the others"
    );
}
