//! A rollout to half of the Pods, back, and to its end.

use std::collections::BTreeMap;
use std::ops::Deref;

use kruise_api::cloneset::CloneSetStatus;
use serde_json::{Value, json};

use crate::pods::{container_status, revision, runs_image, uid, uids_by_name};
use crate::workloads::{NodeNamespace, ObservedPods, TestCluster, shared_cluster};

const OLD_IMAGE: &str = "kruise-test/term:1";
const NEW_IMAGE: &str = "kruise-test/term:2";

fn update_policy(policy: &str) -> Value {
    json!({ "podUpdatePolicy": policy, "maxUnavailable": 1 })
}

fn partition(value: Value) -> Value {
    json!({ "updateStrategy": { "rollingUpdate": { "partition": value } } })
}

/// Whether all Pods are available, and `updated` of them updated.
fn is_updated_to(status: &CloneSetStatus, updated: i32) -> bool {
    let counts = [status.replicas, status.ready_replicas, status.available_replicas];
    let new = [status.updated_replicas, status.updated_ready_replicas];
    counts == [4; 3] && new == [updated; 2] && status.updated_available_replicas == Some(updated)
}

/// Number of Pods of each revision.
fn pods_per_revision(pods: &BTreeMap<String, Value>) -> BTreeMap<String, usize> {
    let mut count = BTreeMap::new();
    for pod in pods.values() {
        *count.entry(revision(pod)).or_default() += 1;
    }
    count
}

/// Container IDs, by Pod.
fn container_ids(pods: &BTreeMap<String, Value>) -> BTreeMap<String, String> {
    pods.iter()
        .map(|(name, pod)| (name.clone(), container_status(pod, "app").id))
        .collect()
}

fn assert_within_budget(observed: &ObservedPods) {
    assert!(
        observed.min_serving >= 3 && observed.max_pods <= 4,
        "one may be unavailable, and none is to be beyond four: {observed:#?}"
    );
}

/// Asserts that two of the Pods run the new image, and the others were not touched.
async fn assert_half_updated(
    ns: &NodeNamespace<impl Deref<Target = TestCluster>>,
    half: &CloneSetStatus,
    before: &BTreeMap<String, Value>,
) {
    let pods = ns.pods_of("web").await;
    assert_eq!(uids_by_name(pods.values()), uids_by_name(before.values()));
    let expected = BTreeMap::from([
        (half.current_revision.clone(), 2),
        (half.update_revision.clone(), 2),
    ]);
    assert_eq!(pods_per_revision(&pods), expected);
    for (name, pod) in &pods {
        let updated = revision(pod) == half.update_revision;
        assert!(
            runs_image(pod, if updated { NEW_IMAGE } else { OLD_IMAGE }),
            "{pod}"
        );
        let now = container_status(pod, "app");
        assert_eq!(now.restarts, i64::from(updated));
        assert_eq!(
            now.id == container_status(&before[name], "app").id,
            !updated,
            "{name}"
        );
    }
}

#[tokio::test]
async fn in_place_partition_rollout_and_rollback() {
    let ns = shared_cluster().await;
    let set =
        json!({ "replicas": 4, "updateStrategy": { "rollingUpdate": update_policy("InPlaceIfPossible") } });
    ns.create_set("web", set).await;
    let first = ns.wait_settled("web").await;
    let before = ns.pods_of("web").await;
    let monitor = ns.monitor_pods("web").await;

    ns.set_image_and_spec("web", NEW_IMAGE, partition(json!("50%")))
        .await;
    let half = ns
        .wait_status("web", "half updated", |s| is_updated_to(s, 2))
        .await;
    assert_eq!(half.expected_updated_replicas, Some(2));
    assert_eq!(half.current_revision, first.update_revision);
    assert_ne!(half.update_revision, first.update_revision);
    assert_half_updated(&ns, &half, &before).await;

    // Rollback by the partition: the two return to the image that they had.
    ns.patch_set("web", json!({ "spec": partition(json!("100%")) }))
        .await;
    let rolled_back = ns
        .wait_status("web", "none updated", |s| is_updated_to(s, 0))
        .await;
    assert_eq!(
        (
            rolled_back.expected_updated_replicas,
            &rolled_back.update_revision
        ),
        (Some(0), &half.update_revision)
    );
    let pods = ns.pods_of("web").await;
    assert_eq!(uids_by_name(pods.values()), uids_by_name(before.values()));
    assert!(pods.values().all(|pod| runs_image(pod, OLD_IMAGE)), "{pods:#?}");

    // Rollback by the template as well: its revision is the first one again, and nothing restarts.
    let ids = container_ids(&pods);
    ns.set_image_and_spec("web", OLD_IMAGE, partition(json!(0))).await;
    let restored = ns.wait_settled("web").await;
    assert_eq!(restored.update_revision, first.update_revision);
    assert_eq!(container_ids(&ns.pods_of("web").await), ids);

    ns.set_image("web", NEW_IMAGE).await;
    let completed = ns.wait_settled("web").await;
    assert_eq!(
        (&completed.update_revision, &completed.current_revision),
        (&half.update_revision, &half.update_revision)
    );
    let pods = ns.pods_of("web").await;
    assert_eq!(uids_by_name(pods.values()), uids_by_name(before.values()));
    assert!(pods.values().all(|pod| runs_image(pod, NEW_IMAGE)), "{pods:#?}");
    let revision_list = ns
        .api("apps", "v1", "ControllerRevision")
        .list(&Default::default())
        .await
        .unwrap();
    assert_eq!(
        revision_list.items.len(),
        2,
        "two templates, whatever came and went"
    );
    assert_within_budget(&monitor.observed());
}

/// Asserts that the Pod is either new and updated, or one of the old ones and unchanged.
fn assert_new_or_untouched(pod: &Value, half: &CloneSetStatus, before: &BTreeMap<String, String>) {
    let updated = revision(pod) == half.update_revision;
    assert!(
        runs_image(pod, if updated { NEW_IMAGE } else { OLD_IMAGE }),
        "{pod}"
    );
    assert_eq!(updated, !before.values().any(|u| *u == uid(pod)));
    assert_eq!(container_status(pod, "app").restarts, 0);
}

#[tokio::test]
async fn recreate_partition_rollout_and_rollback() {
    let ns = shared_cluster().await;
    let set = json!({ "replicas": 4, "updateStrategy": { "rollingUpdate": update_policy("ReCreate") } });
    ns.create_set("web", set).await;
    let first = ns.wait_settled("web").await;
    let before = ns.pod_uids("web").await;
    let monitor = ns.monitor_pods("web").await;
    let count_untouched = |pods: &BTreeMap<String, Value>| {
        pods.values()
            .filter(|p| before.values().any(|u| *u == uid(p)))
            .count()
    };

    ns.set_image_and_spec("web", NEW_IMAGE, partition(json!("50%")))
        .await;
    let half = ns
        .wait_status("web", "half updated", |s| is_updated_to(s, 2))
        .await;
    assert_eq!(
        (half.expected_updated_replicas, &half.current_revision),
        (Some(2), &first.update_revision)
    );
    let pods = ns
        .wait_pods("web", "four, and none on its way out", |pods| pods.len() == 4)
        .await;
    let pods: BTreeMap<String, Value> = pods.into_iter().map(|p| (crate::pods::name(&p), p)).collect();
    assert_eq!(count_untouched(&pods), 2);
    pods.values()
        .for_each(|pod| assert_new_or_untouched(pod, &half, &before));

    ns.patch_set("web", json!({ "spec": partition(json!("100%")) }))
        .await;
    let rolled_back = ns
        .wait_status("web", "none updated", |s| is_updated_to(s, 0))
        .await;
    assert_eq!(rolled_back.update_revision, half.update_revision);
    let pods = ns.pods_of("web").await;
    assert_eq!(count_untouched(&pods), 2, "the two that were never touched");

    ns.patch_set("web", json!({ "spec": partition(json!(0)) })).await;
    let completed = ns.wait_settled("web").await;
    assert_eq!(completed.current_revision, half.update_revision);
    let pods = ns
        .wait_pods("web", "four, and none on its way out", |pods| pods.len() == 4)
        .await;
    assert!(pods.iter().all(|pod| runs_image(pod, NEW_IMAGE)), "{pods:#?}");
    let observed = monitor.observed();
    assert_within_budget(&observed);
    assert_eq!(
        observed.all_uids.len(),
        4 + 2 + 2 + 4,
        "a new Pod for each that was replaced: {observed:#?}"
    );
}
