//! Type `OnDelete`: a Pod is updated by somebody's deleting it.

use kruise_api::cloneset::CloneSet;
use kube::api::Patch;
use serde_json::{Value, json};

use crate::field::{Field, identities};
use crate::pods::{name, revision, wanted_image};
use crate::world::{until, world};

const OLD: &str = "example.com/app:1";
const NEW: &str = "example.com/app:2";

fn says(set: &CloneSet, type_: &str, reason: &str, words: &str) -> bool {
    let mut all = set.status.iter().flat_map(|s| &s.conditions);
    all.any(|c| c.type_ == type_ && c.reason == reason && c.message.contains(words))
}

fn updated(set: &CloneSet) -> i32 {
    set.status.as_ref().map_or(0, |s| s.updated_replicas)
}

/// All Pods as they were before, but for so many new ones of the update revision.
async fn replaced(field: &Field, before: &[Value], count: usize) {
    let what = format!("{count} of 4 replaced");
    let set = field
        .status("web", &what, |set| {
            let status = set.status.as_ref().unwrap();
            (updated(set), status.available_replicas) == (i32::try_from(count).unwrap(), 4)
        })
        .await;
    let update = set.status.unwrap().update_revision;
    let old = identities(before);
    let pods = field.pods_of("web").await;
    let (stayed, new): (Vec<&Value>, Vec<&Value>) = pods
        .iter()
        .partition(|pod| old.contains(&identities(&[(*pod).clone()])[0]));
    assert_eq!((stayed.len(), new.len()), (4 - count, count));
    assert!(
        stayed
            .iter()
            .all(|pod| wanted_image(pod, 0) == OLD && revision(pod) != update)
    );
    assert!(
        new.iter()
            .all(|pod| wanted_image(pod, 0) == NEW && revision(pod) == update)
    );
}

/// Nothing is done to the Pods, and that is said.
async fn left_alone(field: &Field, before: &[Value]) {
    let writes = field.pod_writes();
    field.image("web", NEW).await;
    let words = "(to be deleted: updateStrategy type is OnDelete)";
    until(
        &field.sets(),
        "web",
        "says whom it waits for",
        |set: &CloneSet| says(set, "Waiting", "OnDelete", words) && updated(set) == 0,
    )
    .await;
    // What comes after has been looked at after it.
    field.set("other", json!({ "replicas": 1 })).await;
    field.settled("other").await;
    let of_web = |all: Vec<(String, String, String)>| all.into_iter().filter(|w| !w.2.starts_with("other"));
    assert!(of_web(field.pod_writes()).eq(of_web(writes)));
    replaced(field, before, 0).await;
}

#[tokio::test]
async fn pods_are_updated_when_somebody_deletes_them_and_no_sooner() {
    let field = Field::new(world(), "on-delete").await;
    let strategy = json!({ "type": "OnDelete", "rollingUpdate": null });
    let spec = json!({ "replicas": 4, "updateStrategy": strategy, "progressDeadlineSeconds": 600 });
    let set = json!(field.set("web", spec).await);
    let limit = &set["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"];
    assert_eq!(*limit, "20%", "what the API server fills in");
    field.settled("web").await;
    let before = field.pods_of("web").await;
    let names: Vec<String> = before.iter().map(name).collect();
    left_alone(&field, &before).await;

    field.pods().delete(&names[0], &Default::default()).await.unwrap();
    replaced(&field, &before, 1).await;
    // One in five, rounded up, may be unavailable, so that these go though they are ready.
    let label = json!({ "metadata": { "labels": { "apps.kruise.io/specified-delete": "true" } } });
    field
        .pods()
        .patch(&names[1], &Default::default(), &Patch::Merge(label))
        .await
        .unwrap();
    replaced(&field, &before, 2).await;
    let list = json!({ "spec": { "scaleStrategy": { "podsToDelete": [names[2]] } } });
    field.edit("web", list).await;
    replaced(&field, &before, 3).await;
    field.pods().delete(&names[3], &Default::default()).await.unwrap();
    replaced(&field, &before, 4).await;
    until(&field.sets(), "web", "at its end", |set: &CloneSet| {
        says(set, "Progressing", "CloneSetAvailable", "CloneSet is available")
    })
    .await;
}
