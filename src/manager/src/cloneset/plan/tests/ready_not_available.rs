//! Pods that are ready, but not yet for `minReadySeconds`.

use serde_json::json;

use super::fake_cluster::FakeCluster;
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::{run_kubelets, settle};
use crate::cloneset::plan::{Action, ActionFailure, ActionPurpose, FailureSubject, PatchReason};

/// A bad canary that just became ready is not available, so its rollback does not wait for ten minutes.
#[test]
fn rollback_deletes_unavailable_pods_at_once() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    cluster.edit(&json!({ "minReadySeconds": 600 }));
    edit_rolling_update(
        &mut cluster,
        json!({ "podUpdatePolicy": "ReCreate", "partition": 4 }),
    );
    cluster.now = cluster
        .now
        .checked_add(jiff::SignedDuration::from_secs(700))
        .unwrap();
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    for _ in 0..6 {
        cluster.reconcile();
        run_kubelets(&mut cluster);
    }
    let new = |cluster: &FakeCluster| {
        let pods = cluster.pods.iter();
        let mut new = pods.filter(|(_, pod)| pod["spec"]["containers"][0]["image"] == "app:2");
        new.next().map(|(name, _)| name.clone())
    };
    let canary = new(&cluster).expect("one Pod is updated");
    assert_eq!(cluster.set["status"]["readyReplicas"], 5);
    assert_eq!(cluster.set["status"]["availableReplicas"], 4);
    edit_rolling_update(&mut cluster, json!({ "partition": 0 }));
    edit_container(&mut cluster, "image", json!("app:1"));
    cluster.reconcile();
    let (_, plan) = cluster.reconcile();
    let deleted = plan.actions.iter().filter_map(|action| match action {
        Action::DeletePod { name, .. } => Some(name),
        _ => None,
    });
    assert_eq!(deleted.collect::<Vec<_>>(), [&canary]);
}

/// An image policy that refuses the new image refuses it for every Pod.
#[test]
fn rejected_updates_are_tried_one_pod_at_a_time() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    edit_rolling_update(&mut cluster, json!({ "maxUnavailable": "100%" }));
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    let until = cluster
        .now
        .checked_add(jiff::SignedDuration::from_secs(8))
        .unwrap();
    let failure = ActionFailure {
        purpose: ActionPurpose::Update,
        permanent: true,
        resize_rejected: false,
        answered: true,
        retry_at: until,
        message: "image is not allowed".to_owned(),
    };
    let updates = |cluster: &FakeCluster| {
        let mut observed = cluster.observe();
        observed
            .failures
            .insert(FailureSubject::InPlaceUpdates, failure.clone());
        let planned = crate::cloneset::plan::plan(&observed, cluster.now);
        let actions = planned.actions.iter();
        let started = actions.filter(|action| {
            matches!(
                action,
                Action::PatchPod {
                    reason: PatchReason::UpdateInPlace,
                    ..
                }
            )
        });
        (started.count(), planned.requeue_at)
    };
    assert_eq!(updates(&cluster), (0, Some(until)));
    cluster.now = until;
    assert_eq!(updates(&cluster).0, 1);
}
