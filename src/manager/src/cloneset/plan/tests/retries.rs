//! Half-done actions are retried, and leave nothing behind.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use super::faults::Fault;
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::{condition, settle};
use crate::cloneset::plan::{Action, ActionFailure, ActionPurpose, FailureSubject, PatchReason, Plan};
use kruise_api::keys;

/// A CloneSet of two with claims that are not reused; the next action fails with `fault`.
fn two_replicas_with_fault(fault: Fault) -> FakeCluster {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    cluster.edit(&json!({ "replicas": 2, "scaleStrategy": { "enablePVCReuse": false } }));
    (cluster.failures_left, cluster.fault) = (1, fault);
    cluster
}

fn reconcile_later(cluster: &mut FakeCluster) -> Plan {
    cluster.now = cluster.now.checked_add(6.seconds()).unwrap();
    cluster.reconcile().1
}

/// Asserts that everything settles once failures may be retried.
fn assert_settles(cluster: &mut FakeCluster) {
    reconcile_later(cluster);
    settle(cluster);
}

/// Names of the Pods that a plan creates, and the number of claims created with each.
fn created_pods(plan: &Plan) -> Vec<(String, usize)> {
    let pods = plan.actions.iter().filter_map(|action| match action {
        Action::CreatePod { name, claims, .. } => Some((name.clone(), claims.len())),
        _ => None,
    });
    pods.collect()
}

#[test]
fn claims_of_rejected_pod_are_kept_for_retry() {
    let mut cluster = two_replicas_with_fault(Fault::Refused);
    cluster.failures_left = 2;
    let (_, plan) = cluster.reconcile();
    let names = created_pods(&plan);
    assert_eq!(names.len(), 2);
    let claims: Vec<String> = cluster.claims.keys().cloned().collect();
    for _ in 0..5 {
        cluster.failures_left = 2;
        let plan = reconcile_later(&mut cluster);
        let again: Vec<_> = names.iter().map(|(name, _)| (name.clone(), 0)).collect();
        assert_eq!(created_pods(&plan), again);
        assert_eq!(plan.actions.len(), 2, "only the Pods are written: {plan:?}");
    }
    // One Pod is still needed, so the claim of the other is deleted.
    cluster.edit(&json!({ "replicas": 1 }));
    assert_settles(&mut cluster);
    let remaining: Vec<&String> = cluster.claims.keys().collect();
    assert_eq!(remaining, [&claims[0]]);
    assert_eq!(cluster.pods.keys().collect::<Vec<_>>(), [&names[0].0]);
}

#[test]
fn claims_of_unneeded_pods_are_deleted() {
    let mut cluster = two_replicas_with_fault(Fault::Refused);
    cluster.failures_left = 2;
    cluster.reconcile();
    assert_eq!(cluster.claims.len(), 2);
    cluster.edit(&json!({ "replicas": 0 }));
    settle(&mut cluster);
    assert_eq!(cluster.claims.len(), 0);
}

#[test]
fn possibly_created_pod_is_not_created_twice() {
    let mut cluster = two_replicas_with_fault(Fault::ResponseLost);
    let (_, plan) = cluster.reconcile();
    let names = created_pods(&plan);
    assert_eq!(cluster.pods.len(), 2);
    assert_eq!(cluster.observe().pods.len(), 1, "the watch has not shown it");
    let plan = reconcile_later(&mut cluster);
    let unknown = names.iter().filter(|(name, _)| created_pods(&plan)[0].0 == *name);
    assert_eq!((unknown.count(), created_pods(&plan).len()), (1, 1), "{plan:?}");
    settle(&mut cluster);
    assert_eq!(cluster.pods.len(), 2);
    assert!(cluster.unfinished.pods.is_empty());
}

#[test]
fn claims_of_possibly_created_pod_are_kept() {
    let mut cluster = two_replicas_with_fault(Fault::ResponseLost);
    cluster.edit(&json!({ "replicas": 1 }));
    cluster.reconcile();
    cluster.edit(&json!({ "replicas": 0 }));
    let plan = reconcile_later(&mut cluster);
    assert_eq!(plan.actions, []);
    assert!(
        plan.requeue_at.is_some(),
        "no requeue when the unknown outcome expires"
    );
    cluster.pods.clear();
    for _ in 0..5 {
        reconcile_later(&mut cluster);
    }
    assert_eq!(cluster.claims.len(), 0);
}

/// Two Pods; the deletion of one failed after its claim was transferred to it.
fn half_deleted_pods(reuse: bool) -> FakeCluster {
    let mut cluster = two_replicas_with_fault(Fault::FirstWriteOnly);
    cluster.failures_left = 0;
    cluster.edit(&json!({ "scaleStrategy": { "enablePVCReuse": reuse } }));
    settle(&mut cluster);
    cluster.edit(&json!({ "replicas": 1 }));
    cluster.failures_left = 1;
    cluster.reconcile();
    assert_eq!((cluster.pods.len(), cluster.claims.len()), (2, 2));
    assert_eq!(cluster.observe().claims_owned_by_pod.len(), 1);
    cluster
}

#[test]
fn claim_is_deleted_with_its_pod_after_faults() {
    for (reuse, restarts) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut cluster = half_deleted_pods(reuse);
        let before: Vec<String> = cluster.claims.keys().cloned().collect();
        if restarts {
            cluster.restart_manager();
        }
        assert_settles(&mut cluster);
        assert_eq!(
            (cluster.pods.len(), cluster.claims.len()),
            (1, 1),
            "reuse {reuse}"
        );
        cluster.edit(&json!({ "replicas": 2 }));
        settle(&mut cluster);
        let remaining = before.iter().filter(|claim| cluster.claims.contains_key(*claim));
        assert_eq!(remaining.count(), 1, "a new Pod must not get another Pod's data");
    }
}

#[test]
fn claim_of_kept_pod_is_reclaimed() {
    for restarts in [false, true] {
        let mut cluster = half_deleted_pods(true);
        cluster.edit(&json!({ "replicas": 2 }));
        if restarts {
            cluster.restart_manager();
        }
        let (pods, claims) = (cluster.pods.clone(), cluster.claims.len());
        assert_settles(&mut cluster);
        assert_eq!(
            pods.keys().collect::<Vec<_>>(),
            cluster.pods.keys().collect::<Vec<_>>()
        );
        assert!(cluster.observe().claims_owned_by_pod.is_empty());
        let deleted = pods.keys().next().unwrap();
        cluster.delete_pod(deleted);
        settle(&mut cluster);
        assert!(cluster.pods.contains_key(deleted), "a new Pod reuses the ID");
        assert_eq!(cluster.claims.len(), claims);
    }
}

/// Its volumes are those of the ID in its name, whatever its label says and the templates are now.
#[test]
fn claim_of_kept_pod_is_reclaimed_after_edits() {
    for (label, templates) in [("other", None), ("other", Some(json!([]))), ("", Some(json!([])))] {
        let mut cluster = half_deleted_pods(true);
        let uid = cluster.observe().claims_owned_by_pod.into_keys().next().unwrap();
        let kept = cluster
            .pods
            .values_mut()
            .find(|pod| pod["metadata"]["uid"] == uid);
        let metadata = &mut kept.unwrap()["metadata"];
        let name = metadata["name"].as_str().unwrap().to_owned();
        if !label.is_empty() {
            metadata["labels"][keys::CLONESET_INSTANCE_ID] = json!(label);
        }
        cluster.edit(&json!({ "replicas": 2 }));
        if let Some(templates) = templates {
            cluster.edit(&json!({ "volumeClaimTemplates": templates }));
        }
        let claims: Vec<String> = cluster.claims.keys().cloned().collect();
        assert_settles(&mut cluster);
        assert!(cluster.observe().claims_owned_by_pod.is_empty());
        cluster.delete_pod(&name);
        settle(&mut cluster);
        assert!(cluster.pods.contains_key(&name), "a new Pod reuses the ID");
        assert_eq!(
            cluster.claims.keys().collect::<Vec<_>>(),
            claims.iter().collect::<Vec<_>>()
        );
    }
}

#[test]
fn name_of_foreign_pod_is_not_retried() {
    let mut cluster = two_replicas_with_fault(Fault::Refused);
    let (_, plan) = cluster.reconcile();
    let refused = created_pods(&plan)[0].0.clone();
    let foreign: Value = json!({ "metadata": { "name": refused, "uid": "f", "labels": { "app": "x" },
        "ownerReferences": [{ "uid": "another", "controller": true }] }, "spec": {}, "status": {} });
    cluster.pods.insert(refused.clone(), foreign);
    reconcile_later(&mut cluster);
    assert_settles(&mut cluster);
    let ours = cluster.observe().pods;
    assert_eq!(ours.len(), 2);
    assert!(ours.iter().all(|pod| pod.name != refused));
}

/// Its node may be dead. Unused claims need not wait for it; its own claims are for its replacement.
#[test]
fn stuck_terminating_pod_does_not_block_unused_claims() {
    let mut cluster = two_replicas_with_fault(Fault::Refused);
    cluster.failures_left = 0;
    cluster.edit(&json!({ "scaleStrategy": { "enablePVCReuse": true } }));
    settle(&mut cluster);
    let names: Vec<String> = cluster.pods.keys().cloned().collect();
    cluster.edit(&json!({ "replicas": 1 }));
    cluster.delete_pod(&names[0]);
    settle(&mut cluster);
    assert_eq!((cluster.pods.len(), cluster.claims.len()), (1, 2));
    cluster.pods.get_mut(&names[1]).unwrap()["metadata"]["finalizers"] = json!(["example.io/dead"]);
    cluster.delete_pod(&names[1]);
    let (_, plan) = cluster.reconcile();
    assert_eq!(created_pods(&plan), [(names[0].clone(), 0)]);

    cluster.edit(&json!({ "replicas": 2 }));
    settle(&mut cluster);
    assert_eq!(cluster.pods.len(), 2, "one of them is terminating");
    let waits = condition(&cluster, "Waiting").unwrap().message;
    assert!(
        waits.contains("to terminate, so that its PVCs can be reused"),
        "{waits}"
    );
    cluster.pods.remove(&names[1]);
    settle(&mut cluster);
    assert_eq!(
        cluster.pods.keys().collect::<Vec<_>>(),
        names.iter().collect::<Vec<_>>()
    );
    assert_eq!(cluster.claims.len(), 2);
}

/// An orphan with the labels of a Pod, such as a copy for debugging, that is terminating: it neither gets the Pod's claim,
/// which would be deleted with it, nor keeps a Pod from being created.
#[test]
fn orphan_with_copied_labels_gets_no_claim() {
    for reuse in [false, true] {
        let mut cluster = FakeCluster::new(clone_set_spec(false, true));
        cluster.edit(&json!({ "replicas": 2, "scaleStrategy": { "enablePVCReuse": reuse } }));
        settle(&mut cluster);
        let claims = cluster.claims.clone();
        let mut copy = cluster.pods.values().next().unwrap().clone();
        for (pointer, value) in [
            ("name", json!("a-debug-copy")),
            ("uid", json!("copy")),
            ("ownerReferences", json!([])),
            ("finalizers", json!(["example.io/dead"])),
            ("deletionTimestamp", json!("2026-01-01T00:00:00Z")),
        ] {
            copy["metadata"][pointer] = value;
        }
        // Behind its original in the order of names, and before it.
        for name in ["zz-copy", "a-copy"] {
            copy["metadata"]["name"] = json!(name);
            cluster.pods.insert(name.to_owned(), copy.clone());
            settle(&mut cluster);
            assert_eq!(cluster.claims, claims, "{name}");
            cluster.edit(&json!({ "replicas": 3 }));
            let (_, plan) = cluster.reconcile();
            assert_eq!(created_pods(&plan).len(), 1, "{name}");
            cluster.edit(&json!({ "replicas": 2 }));
            settle(&mut cluster);
            cluster.pods.remove(name);
            cluster.claims.clone_from(&claims);
        }
    }
}

fn edit_images(cluster: &mut FakeCluster, [app, side]: [&str; 2]) {
    let containers = json!([{ "name": "app", "image": app }, { "name": "side", "image": side }]);
    cluster.edit(&json!({ "template": { "spec": { "containers": containers } } }));
}

/// The plan for two Pods whose update to `app:2` waited for a grace period of a minute, which is over; the template now
/// has these images. `rejections` are the seconds until the next update may begin, if the change was refused.
fn patches_after_grace_period(desired_images: [&str; 2], rejections: &[i64]) -> Vec<(PatchReason, String)> {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    cluster.edit(&json!({ "replicas": 2 }));
    let grace = json!({ "gracePeriodSeconds": 60 });
    edit_rolling_update(
        &mut cluster,
        json!({ "maxUnavailable": 2, "inPlaceUpdateStrategy": grace }),
    );
    edit_images(&mut cluster, ["app:1", "side:1"]);
    settle(&mut cluster);
    edit_images(&mut cluster, ["app:2", "side:1"]);
    cluster.reconcile();
    for pod in cluster.pods.values() {
        assert!(pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_GRACE].is_string());
    }
    cluster.now = cluster.now.checked_add(61.seconds()).unwrap();
    edit_images(&mut cluster, desired_images);
    let mut observed = cluster.observe();
    let failure = |seconds: i64| ActionFailure {
        purpose: ActionPurpose::Update,
        permanent: true,
        resize_rejected: false,
        answered: true,
        retry_at: cluster.now.checked_add(seconds.seconds()).unwrap(),
        message: "no".to_owned(),
    };
    for updates in rejections {
        observed
            .failures
            .insert(FailureSubject::InPlaceUpdates, failure(*updates));
        let uids = cluster
            .pods
            .values()
            .map(|pod| pod["metadata"]["uid"].as_str().unwrap());
        let failures = uids.map(|uid| (FailureSubject::Pod(uid.to_owned()), failure(0)));
        observed.failures.extend(failures);
    }
    let planned = crate::cloneset::plan::plan(&observed, cluster.now);
    let patches = planned.actions.iter().filter_map(|action| match action {
        Action::PatchPod {
            reason: why, writes, ..
        } => {
            let last = writes.last().unwrap();
            Some((*why, last.dry_run.as_deref().unwrap_or(&last.patch).to_string()))
        }
        _ => None,
    });
    patches.collect()
}

#[test]
fn new_revision_replaces_rejected_grace_update() {
    let continued = patches_after_grace_period(["app:2", "side:2"], &[]);
    assert!(
        continued.len() == 2
            && continued
                .iter()
                .all(|(why, _)| *why == PatchReason::ContinueUpdate),
        "{continued:?}"
    );
    let reverted = patches_after_grace_period(["app:2", "side:1"], &[0]);
    assert!(
        reverted.len() == 2
            && reverted
                .iter()
                .all(|(why, _)| *why == PatchReason::ContinueUpdate),
        "{reverted:?}"
    );
    assert_eq!(patches_after_grace_period(["app:2", "side:2"], &[5]), []);
    let next = patches_after_grace_period(["app:2", "side:2"], &[0]);
    assert_eq!(next.len(), 1, "one is tried while updates are refused");
    for (why, trial) in next {
        assert_eq!(why, PatchReason::UpdateInPlace);
        assert!(trial.contains("app:2") && trial.contains("side:2"), "{trial}");
    }
}

/// A policy that locks one Pod stops neither the canary nor the deletion of others.
#[test]
fn pod_whose_change_is_refused_leaves_its_place_to_others() {
    let settled = |policy: &str, partition: u32| {
        let mut cluster = FakeCluster::new(clone_set_spec(false, false));
        edit_rolling_update(
            &mut cluster,
            json!({ "podUpdatePolicy": policy, "maxUnavailable": 1, "maxSurge": null, "partition": partition }),
        );
        settle(&mut cluster);
        cluster
    };
    let is_updated = |pod: &Value| pod["spec"]["containers"][0]["image"] == "app:2";

    // The only Pod that the partition lets go first is locked.
    let mut cluster = settled("InPlaceIfPossible", 4);
    edit_container(&mut cluster, "image", json!("app:2"));
    let (_, plan) = cluster.clone().reconcile();
    let locked = patched_pod(&plan);
    refuse_changes(&mut cluster, &locked);
    cluster.reconcile();
    let updated: Vec<_> = cluster.pods.iter().filter(|(_, pod)| is_updated(pod)).collect();
    assert_eq!(updated.len(), 1);
    assert_ne!(*updated[0].0, locked);

    // Two Pods are specified for deletion, and the first cannot be deleted.
    let mut cluster = settled("ReCreate", 5);
    let names: Vec<String> = cluster.pods.keys().take(2).cloned().collect();
    cluster.edit(&json!({ "scaleStrategy": { "podsToDelete": names } }));
    for _ in 0..5 {
        refuse_changes(&mut cluster, &names[0]);
        cluster.reconcile();
        cluster.collect_garbage();
    }
    let left: Vec<bool> = names.iter().map(|name| cluster.pods.contains_key(name)).collect();
    assert_eq!(left, [true, false]);
}

/// The API server refused a change of the Pod a moment ago.
fn refuse_changes(cluster: &mut FakeCluster, pod: &str) {
    let uid = cluster.pods[pod]["metadata"]["uid"].as_str().unwrap().to_owned();
    let failure = ActionFailure {
        purpose: ActionPurpose::Update,
        retry_at: cluster.now.checked_add(5.seconds()).unwrap(),
        permanent: true,
        resize_rejected: false,
        answered: true,
        message: "this Pod is locked".to_owned(),
    };
    cluster.failures.insert(FailureSubject::Pod(uid), failure);
}

/// The name of the only Pod that a plan patches.
fn patched_pod(plan: &Plan) -> String {
    let names = plan.actions.iter().filter_map(|action| match action {
        Action::PatchPod { name, .. } => Some(name.clone()),
        _ => None,
    });
    let names: Vec<String> = names.collect();
    assert_eq!(names.len(), 1, "{plan:?}");
    names[0].clone()
}
