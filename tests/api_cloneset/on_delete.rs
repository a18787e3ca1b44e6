//! Type `OnDelete`: a Pod is updated when a user deletes it.

use kruise_api::cloneset::CloneSet;
use kube::api::Patch;
use serde_json::{Value, json};

use crate::fixture::{Fixture, identities};
use crate::pods::{name, revision, spec_image};
use crate::test_cluster::{shared_cluster, wait_until};

const OLD_IMAGE: &str = "example.com/app:1";
const NEW_IMAGE: &str = "example.com/app:2";

fn has_condition(set: &CloneSet, type_: &str, reason: &str, text: &str) -> bool {
    let mut all = set.status.iter().flat_map(|s| &s.conditions);
    all.any(|c| c.type_ == type_ && c.reason == reason && c.message.contains(text))
}

fn updated_replicas(set: &CloneSet) -> i32 {
    set.status.as_ref().map_or(0, |s| s.updated_replicas)
}

/// Waits until all Pods are unchanged except for `count` new ones of the update revision.
async fn wait_for_replaced(fixture: &Fixture, before: &[Value], count: usize) {
    let what = format!("{count} of 4 replaced");
    let set = fixture
        .wait_status("web", &what, |set| {
            let status = set.status.as_ref().unwrap();
            (updated_replicas(set), status.available_replicas) == (i32::try_from(count).unwrap(), 4)
        })
        .await;
    let update = set.status.unwrap().update_revision;
    let old = identities(before);
    let pods = fixture.pods_of("web").await;
    let (kept, new): (Vec<&Value>, Vec<&Value>) = pods
        .iter()
        .partition(|pod| old.contains(&identities(&[(*pod).clone()])[0]));
    assert_eq!((kept.len(), new.len()), (4 - count, count));
    assert!(
        kept.iter()
            .all(|pod| spec_image(pod, 0) == OLD_IMAGE && revision(pod) != update)
    );
    assert!(
        new.iter()
            .all(|pod| spec_image(pod, 0) == NEW_IMAGE && revision(pod) == update)
    );
}

/// The Pods are not changed, and the status says so.
async fn check_pods_are_unchanged(fixture: &Fixture, before: &[Value]) {
    let writes = fixture.pod_writes();
    fixture.set_image("web", NEW_IMAGE).await;
    let text = "(to be deleted: updateStrategy type is OnDelete)";
    wait_until(
        &fixture.sets(),
        "web",
        "says whom it waits for",
        |set: &CloneSet| has_condition(set, "Waiting", "OnDelete", text) && updated_replicas(set) == 0,
    )
    .await;
    // When this later CloneSet is reconciled, so are the earlier changes.
    fixture.create_cloneset("other", json!({ "replicas": 1 })).await;
    fixture.wait_settled("other").await;
    let of_web = |all: Vec<(String, String, String)>| all.into_iter().filter(|w| !w.2.starts_with("other"));
    assert!(of_web(fixture.pod_writes()).eq(of_web(writes)));
    wait_for_replaced(fixture, before, 0).await;
}

#[tokio::test]
async fn on_delete_updates_pods_only_when_deleted() {
    let fixture = Fixture::new(shared_cluster(), "on-delete").await;
    let strategy = json!({ "type": "OnDelete", "rollingUpdate": null });
    let spec = json!({ "replicas": 4, "updateStrategy": strategy, "progressDeadlineSeconds": 600 });
    let set = json!(fixture.create_cloneset("web", spec).await);
    let max_unavailable = &set["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"];
    assert_eq!(*max_unavailable, "20%", "what the API server fills in");
    fixture.wait_settled("web").await;
    let before = fixture.pods_of("web").await;
    let names: Vec<String> = before.iter().map(name).collect();
    check_pods_are_unchanged(&fixture, &before).await;

    fixture
        .pods()
        .delete(&names[0], &Default::default())
        .await
        .unwrap();
    wait_for_replaced(&fixture, &before, 1).await;
    // One in five, rounded up, may be unavailable, so these are deleted although they are ready.
    let label = json!({ "metadata": { "labels": { "apps.kruise.io/specified-delete": "true" } } });
    fixture
        .pods()
        .patch(&names[1], &Default::default(), &Patch::Merge(label))
        .await
        .unwrap();
    wait_for_replaced(&fixture, &before, 2).await;
    let list = json!({ "spec": { "scaleStrategy": { "podsToDelete": [names[2]] } } });
    fixture.patch_set("web", list).await;
    wait_for_replaced(&fixture, &before, 3).await;
    fixture
        .pods()
        .delete(&names[3], &Default::default())
        .await
        .unwrap();
    wait_for_replaced(&fixture, &before, 4).await;
    wait_until(&fixture.sets(), "web", "at its end", |set: &CloneSet| {
        has_condition(set, "Progressing", "CloneSetAvailable", "CloneSet is available")
    })
    .await;
}
