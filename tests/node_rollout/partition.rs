//! A rollout to half of the Pods, back, and to its end.

use std::collections::BTreeMap;
use std::ops::Deref;

use kruise_api::cloneset::CloneSetStatus;
use serde_json::{Value, json};

use crate::pods::{container, identities, revision, runs, uid};
use crate::workloads::{Bed, Seen, Space, shared};

const OLD: &str = "kruise-test/term:1";
const NEW: &str = "kruise-test/term:2";

fn policy(policy: &str) -> Value {
    json!({ "podUpdatePolicy": policy, "maxUnavailable": 1 })
}

fn partition(value: Value) -> Value {
    json!({ "updateStrategy": { "rollingUpdate": { "partition": value } } })
}

/// Whether all are available, and so many of them updated.
fn stands_at(status: &CloneSetStatus, updated: i32) -> bool {
    let counts = [status.replicas, status.ready_replicas, status.available_replicas];
    let new = [status.updated_replicas, status.updated_ready_replicas];
    counts == [4; 3] && new == [updated; 2] && status.updated_available_replicas == Some(updated)
}

/// How many of the Pods have each revision.
fn revisions(pods: &BTreeMap<String, Value>) -> BTreeMap<String, usize> {
    let mut count = BTreeMap::new();
    for pod in pods.values() {
        *count.entry(revision(pod)).or_default() += 1;
    }
    count
}

/// Container IDs, by Pod.
fn containers(pods: &BTreeMap<String, Value>) -> BTreeMap<String, String> {
    pods.iter()
        .map(|(name, pod)| (name.clone(), container(pod, "app").id))
        .collect()
}

fn within_budget(seen: &Seen) {
    assert!(
        seen.least_serving >= 3 && seen.most <= 4,
        "one may be unavailable, and none is to be beyond four: {seen:#?}"
    );
}

/// Whether two of the Pods run the new image, and the others were not touched.
async fn half_is_updated(
    space: &Space<impl Deref<Target = Bed>>,
    half: &CloneSetStatus,
    before: &BTreeMap<String, Value>,
) {
    let pods = space.pods_of("web").await;
    assert_eq!(identities(pods.values()), identities(before.values()));
    let both = BTreeMap::from([
        (half.current_revision.clone(), 2),
        (half.update_revision.clone(), 2),
    ]);
    assert_eq!(revisions(&pods), both);
    for (name, pod) in &pods {
        let updated = revision(pod) == half.update_revision;
        assert!(runs(pod, if updated { NEW } else { OLD }), "{pod}");
        let now = container(pod, "app");
        assert_eq!(now.restarts, i64::from(updated));
        assert_eq!(now.id == container(&before[name], "app").id, !updated, "{name}");
    }
}

#[tokio::test]
async fn in_place_half_of_the_pods_are_updated_and_taken_back() {
    let space = shared().await;
    let set = json!({ "replicas": 4, "updateStrategy": { "rollingUpdate": policy("InPlaceIfPossible") } });
    space.set("web", set).await;
    let first = space.settled("web").await;
    let before = space.pods_of("web").await;
    let witness = space.witness("web").await;

    space.image_and("web", NEW, partition(json!("50%"))).await;
    let half = space.status("web", "half updated", |s| stands_at(s, 2)).await;
    assert_eq!(half.expected_updated_replicas, Some(2));
    assert_eq!(half.current_revision, first.update_revision);
    assert_ne!(half.update_revision, first.update_revision);
    half_is_updated(&space, &half, &before).await;

    // Back by the partition: the two return to the image that they had.
    space
        .edit("web", json!({ "spec": partition(json!("100%")) }))
        .await;
    let back = space.status("web", "none updated", |s| stands_at(s, 0)).await;
    assert_eq!(
        (back.expected_updated_replicas, &back.update_revision),
        (Some(0), &half.update_revision)
    );
    let pods = space.pods_of("web").await;
    assert_eq!(identities(pods.values()), identities(before.values()));
    assert!(pods.values().all(|pod| runs(pod, OLD)), "{pods:#?}");

    // Back by the template as well: its revision is the first one again, and nothing restarts.
    let ids = containers(&pods);
    space.image_and("web", OLD, partition(json!(0))).await;
    let again = space.settled("web").await;
    assert_eq!(again.update_revision, first.update_revision);
    assert_eq!(containers(&space.pods_of("web").await), ids);

    space.image("web", NEW).await;
    let end = space.settled("web").await;
    assert_eq!(
        (&end.update_revision, &end.current_revision),
        (&half.update_revision, &half.update_revision)
    );
    let pods = space.pods_of("web").await;
    assert_eq!(identities(pods.values()), identities(before.values()));
    assert!(pods.values().all(|pod| runs(pod, NEW)), "{pods:#?}");
    let kept = space
        .api("apps", "v1", "ControllerRevision")
        .list(&Default::default())
        .await
        .unwrap();
    assert_eq!(kept.items.len(), 2, "two templates, whatever came and went");
    within_budget(&witness.seen());
}

/// Whether the Pod is new and updated, or of those before and as it was.
fn made_or_kept(pod: &Value, half: &CloneSetStatus, before: &BTreeMap<String, String>) {
    let updated = revision(pod) == half.update_revision;
    assert!(runs(pod, if updated { NEW } else { OLD }), "{pod}");
    assert_eq!(updated, !before.values().any(|u| *u == uid(pod)));
    assert_eq!(container(pod, "app").restarts, 0);
}

#[tokio::test]
async fn by_new_pods_half_of_them_are_updated_and_taken_back() {
    let space = shared().await;
    let set = json!({ "replicas": 4, "updateStrategy": { "rollingUpdate": policy("ReCreate") } });
    space.set("web", set).await;
    let first = space.settled("web").await;
    let before = space.identities("web").await;
    let witness = space.witness("web").await;
    let kept = |pods: &BTreeMap<String, Value>| {
        pods.values()
            .filter(|p| before.values().any(|u| *u == uid(p)))
            .count()
    };

    space.image_and("web", NEW, partition(json!("50%"))).await;
    let half = space.status("web", "half updated", |s| stands_at(s, 2)).await;
    assert_eq!(
        (half.expected_updated_replicas, &half.current_revision),
        (Some(2), &first.update_revision)
    );
    let pods = space
        .until_pods("web", "four, and none on its way out", |pods| pods.len() == 4)
        .await;
    let pods: BTreeMap<String, Value> = pods.into_iter().map(|p| (crate::pods::name(&p), p)).collect();
    assert_eq!(kept(&pods), 2);
    pods.values().for_each(|pod| made_or_kept(pod, &half, &before));

    space
        .edit("web", json!({ "spec": partition(json!("100%")) }))
        .await;
    let back = space.status("web", "none updated", |s| stands_at(s, 0)).await;
    assert_eq!(back.update_revision, half.update_revision);
    let pods = space.pods_of("web").await;
    assert_eq!(kept(&pods), 2, "the two that were never touched");

    space.edit("web", json!({ "spec": partition(json!(0)) })).await;
    let end = space.settled("web").await;
    assert_eq!(end.current_revision, half.update_revision);
    let pods = space
        .until_pods("web", "four, and none on its way out", |pods| pods.len() == 4)
        .await;
    assert!(pods.iter().all(|pod| runs(pod, NEW)), "{pods:#?}");
    let seen = witness.seen();
    within_budget(&seen);
    assert_eq!(
        seen.ever.len(),
        4 + 2 + 2 + 4,
        "a new Pod for each that was replaced: {seen:#?}"
    );
}
