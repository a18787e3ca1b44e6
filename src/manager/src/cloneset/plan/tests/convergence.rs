//! Convergence: after a random history the cluster is quiet, a goal is requested, and the cluster must reach it.

use std::collections::BTreeMap;

use jiff::ToSpan;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use super::invariants::{assert_no_leftover_claims, assert_pods_complete};
use super::random_histories::{checked_reconcile, clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::{condition, settle};
use crate::cloneset::plan::limits::Limits;
use crate::cloneset::plan::{Action, Observed};
use kruise_api::cloneset::CloneSetStatus;
use kruise_api::keys;
use kruise_workload::in_place::{Options, Pod, RevisionData, spec as engine};
use kruise_workload::pods;

/// The goal of the last phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    /// Updated Pods, in place or not.
    Updated,
    /// Pods updated in place only.
    InPlace,
    /// The right number of Pods, which only users replace by deleting them.
    OnDelete,
    /// The right number of Pods while the update is paused.
    Paused,
}

pub(super) fn goal() -> impl Strategy<Value = Goal> {
    prop_oneof![4 => Just(Goal::Updated), 2 => Just(Goal::InPlace), 1 => Just(Goal::OnDelete), 1 => Just(Goal::Paused)]
}

/// The Pods at one time.
pub(super) struct PodSnapshot {
    /// The revision label of each of our Pods that is not marked for deletion, by UID.
    labels: BTreeMap<String, Option<String>>,
    /// Number of orphans that may be adopted.
    orphans: usize,
}

/// The cluster is quiet, and everyone does what they should. Returns the Pods at the beginning.
pub(super) fn converge(cluster: &mut FakeCluster, goal: Goal) -> PodSnapshot {
    cluster.sync_watches();
    request(cluster, goal);
    let initial = snapshot(&cluster.observe());
    let mut last = Vec::new();
    for _ in 0..600 {
        let planned = checked_reconcile(cluster);
        let names: Vec<String> = cluster.pods.keys().cloned().collect();
        let before = (cluster.pods.clone(), cluster.claims.clone());
        for name in &names {
            cluster.run_kubelet(name);
            cluster.run_daemon(name);
            cluster.run_hook_user(name);
        }
        let same = before == (cluster.pods.clone(), cluster.claims.clone());
        let idle = same && planned.actions.is_empty() && planned.status.is_none();
        if idle && planned.requeue_at.is_none() {
            return initial;
        }
        last = planned.actions;
        let soon = cluster.now.checked_add(3.seconds()).unwrap();
        // Nothing happens until the requeue.
        let wake = planned.requeue_at.filter(|wake| idle && *wake > soon);
        cluster.now = wake.unwrap_or(soon);
    }
    panic!("does not converge: {last:?}\n{:#}", cluster.set);
}

fn image_of(template: &Value) -> &Value {
    &template["spec"]["containers"][0]["image"]
}

/// Requests a valid spec and `goal`.
fn request(cluster: &mut FakeCluster, goal: Goal) {
    cluster.set_templates_refused(false);
    if image_of(&cluster.set["spec"]["template"]) == "app:bad" {
        edit_container(cluster, "image", json!("app:4"));
    }
    let bad = |data: &Value| image_of(&data["spec"]["template"]) == "app:bad";
    let bad: Vec<String> = cluster
        .revisions
        .iter()
        .filter(|r| bad(&r.data))
        .map(|r| r.name.clone())
        .collect();
    // A partition would keep Pods with an image that cannot be pulled; these are never available.
    if !bad.is_empty() {
        edit_rolling_update(cluster, json!({ "partition": 0 }));
    }
    edit_rolling_update(cluster, json!({ "paused": goal == Goal::Paused }));
    match goal {
        // With InPlaceOnly, changes that are impossible in place would wait forever.
        Goal::Updated if policy(cluster) == "InPlaceOnly" => {
            edit_rolling_update(cluster, json!({ "podUpdatePolicy": "InPlaceIfPossible" }));
        }
        // Surge Pods would not help, and are refused at admission.
        Goal::InPlace => edit_rolling_update(
            cluster,
            json!({ "podUpdatePolicy": "InPlaceOnly", "maxSurge": 0 }),
        ),
        _ => {}
    }
    let type_ = if goal == Goal::OnDelete {
        "OnDelete"
    } else {
        "RollingUpdate"
    };
    cluster.edit(&json!({ "updateStrategy": { "type": type_ } }));
    let spec = cluster.observe().set.spec.clone();
    let limits = Limits::from_spec(&spec, &cluster.features);
    if limits.max_unavailable == 0 && limits.max_surge == 0 {
        edit_rolling_update(cluster, json!({ "maxUnavailable": 1 }));
    }
    if goal != Goal::Updated {
        // Only a new Pod fixes these, and a user must request that.
        for pod in &cluster.observe().pods {
            if bad.iter().any(|revision| pods::has_revision(pod, revision)) {
                cluster.delete_pod(&pod.name);
            }
        }
    }
}

fn policy(cluster: &FakeCluster) -> &Value {
    &cluster.set["spec"]["updateStrategy"]["rollingUpdate"]["podUpdatePolicy"]
}

fn ours(pod: &Pod) -> bool {
    pod.active() && super::fake_cluster::is_controlled(pod) && pod.labels["app"] == "x"
}

/// Whether a user or the update requested its deletion.
fn is_marked(observed: &Observed, pod: &Pod) -> bool {
    let strategy = observed.set.spec.scale_strategy.iter();
    let mut named = strategy.flat_map(|s| &s.pods_to_delete);
    pod.labels.contains_key(keys::SPECIFIED_DELETE) || named.any(|name| *name == pod.name)
}

fn snapshot(observed: &Observed) -> PodSnapshot {
    let label = |pod: &Pod| pod.labels.get(keys::CONTROLLER_REVISION_HASH).cloned();
    let is_kept = |pod: &&Pod| {
        let preparing = pods::lifecycle_state(pod).as_str() == "PreparingDelete";
        ours(pod) && !preparing && !is_marked(observed, pod)
    };
    let all = || observed.pods.iter().map(AsRef::as_ref);
    let labels = all().filter(is_kept).map(|pod| (pod.uid.clone(), label(pod)));
    PodSnapshot {
        labels: labels.collect(),
        orphans: all().filter(|pod| pod.controller.is_none()).count(),
    }
}

/// Asserts that the goal is reached.
pub(super) fn assert_goal(cluster: &FakeCluster, goal: Goal, initial: &PodSnapshot) {
    let observed = cluster.observe();
    let limits = Limits::from_spec(&observed.set.spec, &observed.features);
    let status = observed.set.status.clone().unwrap();
    let context = format!("{goal:?}: {:#}\n{status:#?}", cluster.set["spec"]);
    match goal {
        Goal::Paused => assert_paused(&observed, &limits, &status, &context),
        _ => {
            let surplus = match goal {
                Goal::OnDelete => surge_pods_allowed(&observed, &limits, &status),
                _ => 0,
            };
            let existing = i64::from(status.replicas);
            assert!(
                (limits.replicas..=limits.replicas + surplus).contains(&existing),
                "{context}"
            );
            assert_eq!(status.available_replicas, status.replicas, "{context}");
            let marked = observed
                .pods
                .iter()
                .find(|pod| ours(pod) && is_marked(&observed, pod));
            assert_eq!(marked, None, "Pod marked for deletion still exists: {context}");
        }
    }
    let not_updated = pods_to_update(&observed, &limits, &status);
    match goal {
        Goal::Updated => assert_eq!(not_updated, 0, "{context}"),
        Goal::InPlace => assert_stuck(cluster, &observed, not_updated, &context),
        Goal::OnDelete | Goal::Paused => {}
    }
    if goal != Goal::Updated {
        assert_no_pod_replaced(&observed, &limits, goal, initial, &context);
    }
    if observed.current_revision == observed.update_revision {
        assert_eq!(
            cluster.jobs,
            Vec::<String>::new(),
            "jobs remain after the rollout"
        );
    }
    assert_pods_complete(cluster, goal);
    assert_no_leftover_claims(cluster, &observed);
}

/// How many surge Pods may remain that were created for Pods which a user should delete.
fn surge_pods_allowed(observed: &Observed, limits: &Limits, status: &CloneSetStatus) -> i64 {
    let missing = pods_to_update(observed, limits, status);
    let too_old = i64::from(status.replicas - status.updated_replicas) - limits.partition;
    match (missing, too_old) {
        (1.., 1..) | (..=-1, ..=-1) => missing.abs().min(too_old.abs()).min(limits.max_surge),
        _ => 0,
    }
}

/// Pods prepared for an update may wait while it is paused; meanwhile the limits may not allow more.
fn assert_paused(observed: &Observed, limits: &Limits, status: &CloneSetStatus, context: &str) {
    let (existing, available) = (i64::from(status.replicas), i64::from(status.available_replicas));
    let ours = || observed.pods.iter().filter(|pod| ours(pod));
    let prepared = |pod: &&std::sync::Arc<Pod>| pods::lifecycle_state(pod).as_str() == "PreparingUpdate";
    let prepared = i64::try_from(ours().filter(prepared).count()).unwrap();
    assert_eq!(available, existing - prepared, "{context}");
    let at_limit = available <= limits.replicas - limits.max_unavailable;
    let marked = ours().find(|pod| is_marked(observed, pod));
    assert!(
        at_limit || marked.is_none(),
        "{marked:?} is marked for deletion: {context}"
    );
    assert!(at_limit || existing <= limits.replicas, "{context}");
    let none_made = prepared >= limits.scale_max_unavailable;
    assert!(none_made || existing >= limits.replicas, "{context}");
}

/// How many Pods must still be updated; if below 0, rolled back.
fn pods_to_update(observed: &Observed, limits: &Limits, status: &CloneSetStatus) -> i64 {
    let missing = limits.replicas - limits.partition - i64::from(status.updated_replicas);
    // Without rollbacks, a higher partition leaves more updated Pods.
    let rollback = limits.partition_rollback && observed.current_revision != observed.update_revision;
    if rollback { missing } else { missing.max(0) }
}

/// Only Pods that cannot be updated or rolled back in place are missing, and the status reports that.
fn assert_stuck(cluster: &FakeCluster, observed: &Observed, missing: i64, context: &str) {
    let target = match missing {
        0 => return,
        1.. => &observed.update_revision,
        _ => &observed.current_revision,
    };
    let on = |pod: &&std::sync::Arc<Pod>| {
        ours(pod) && pods::has_revision(pod, &observed.update_revision) == (missing < 0)
    };
    let not_in_place = observed
        .pods
        .iter()
        .filter(on)
        .filter(|pod| !can_update_in_place(observed, pod, target));
    let not_in_place = i64::try_from(not_in_place.count()).unwrap();
    assert!(
        missing.abs() <= not_in_place,
        "{missing} Pods are not updated, but only {not_in_place} cannot be: {context}"
    );
    for type_ in ["FailedUpdate", "Waiting"] {
        let message = condition(cluster, type_).map(|c| c.message).unwrap_or_default();
        assert!(message.contains("policy is InPlaceOnly"), "{type_}: {message:?}");
    }
}

/// Whether the engine can update a Pod in place to a revision.
fn can_update_in_place(observed: &Observed, pod: &Pod, to: &str) -> bool {
    let options = Options {
        recreate_for_claims: false,
        ..observed.features.in_place_options()
    };
    let find = |which: &dyn Fn(&str) -> bool| {
        let found = observed.revisions.iter().find(|r| which(&r.name));
        found.map(|r| RevisionData {
            name: &r.name,
            data: &r.data,
            claim_hash: r.claim_hash.as_deref(),
        })
    };
    let (old, new) = (
        find(&|name| pods::has_revision(pod, name)),
        find(&|name| name == to),
    );
    old.zip(new)
        .is_some_and(|(old, new)| engine::calculate_spec(&old, &new, &options).is_ok())
}

/// No Pod was replaced, except by an adopted orphan, and no Pod changed that should not.
fn assert_no_pod_replaced(
    observed: &Observed,
    limits: &Limits,
    goal: Goal,
    initial: &PodSnapshot,
    context: &str,
) {
    let (before, now) = (&initial.labels, snapshot(observed).labels);
    let removed = before.keys().filter(|uid| !now.contains_key(*uid)).count();
    let desired = usize::try_from(limits.replicas).unwrap();
    assert!(
        removed <= before.len().saturating_sub(desired) + initial.orphans,
        "{removed} of {} Pods were deleted: {context}",
        before.len()
    );
    let mut both = now
        .iter()
        .filter_map(|(uid, label)| Some((label, before.get(uid)?)));
    let changed = both.find(|(now, before)| now != before);
    assert!(
        goal == Goal::InPlace || changed.is_none(),
        "{changed:?} was updated: {context}"
    );
}

fn replica_counts(cluster: &FakeCluster) -> [i64; 2] {
    let status = &cluster.set["status"];
    [&status["replicas"], &status["updatedReplicas"]].map(|n| n.as_i64().unwrap())
}

/// A user should delete the old Pods, and may never do it.
#[test]
fn on_delete_creates_no_surge_pods() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    edit_rolling_update(&mut cluster, json!({ "maxSurge": 2, "maxUnavailable": 0 }));
    cluster.edit(&json!({ "updateStrategy": { "type": "OnDelete" } }));
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    settle(&mut cluster);
    assert_eq!(replica_counts(&cluster), [5, 0]);
    // A Pod that a user wants to delete still gets its replacement first.
    let name = cluster.pods.keys().next().unwrap().clone();
    cluster.edit(&json!({ "scaleStrategy": { "podsToDelete": [name] } }));
    let (_, plan) = cluster.reconcile();
    assert!(
        matches!(plan.actions[..], [Action::CreatePod { .. }]),
        "{:?}",
        plan.actions
    );
    settle(&mut cluster);
    assert!(!cluster.pods.contains_key(&name));
    assert_eq!(replica_counts(&cluster), [5, 1]);
    // Scaling down works, also if some Pods are new.
    for replicas in [4, 3] {
        cluster.edit(&json!({ "replicas": replicas, "scaleStrategy": { "podsToDelete": [] } }));
        edit_rolling_update(&mut cluster, json!({ "maxSurge": 0, "maxUnavailable": 1 }));
        settle(&mut cluster);
        assert_eq!(replica_counts(&cluster), [replicas, 1]);
    }
}

/// OpenKruise creates surge Pods also with OnDelete: a manager that takes over keeps both.
#[test]
fn on_delete_keeps_surge_pods_of_openkruise() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    edit_rolling_update(&mut cluster, json!({ "maxSurge": 2, "maxUnavailable": 0 }));
    settle(&mut cluster);
    let old: Vec<String> = cluster.pods.keys().cloned().collect();
    edit_rolling_update(&mut cluster, json!({ "podUpdatePolicy": "ReCreate" }));
    edit_container(&mut cluster, "image", json!("app:2"));
    let (_, plan) = cluster.reconcile();
    assert!(
        matches!(
            plan.actions[..],
            [Action::CreatePod { .. }, Action::CreatePod { .. }, ..]
        ),
        "{:?}",
        plan.actions
    );
    cluster.edit(&json!({ "updateStrategy": { "type": "OnDelete" } }));
    settle(&mut cluster);
    assert_eq!(replica_counts(&cluster), [7, 2]);
    assert!(old.iter().all(|name| cluster.pods.contains_key(name)));
    // Deleted Pods are not replaced while there are more than `replicas`.
    for (deleted, counts) in [(2, [5, 2]), (5, [5, 5])] {
        cluster.edit(&json!({ "scaleStrategy": { "podsToDelete": &old[..deleted] } }));
        settle(&mut cluster);
        let remaining = old.iter().filter(|name| cluster.pods.contains_key(*name));
        assert_eq!(
            (replica_counts(&cluster), remaining.count()),
            (counts, old.len() - deleted)
        );
    }
}

/// Its name must be kept in the list while the Pod is an orphan.
#[test]
fn adopted_orphan_in_pods_to_delete_is_deleted() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    let container = json!({ "name": "app", "image": "app:1" });
    let orphan = json!({
        "metadata": { "labels": { "app": "x" }, "ownerReferences": [] }, "spec": { "containers": [container] },
    });
    cluster.create_pod("stray", orphan);
    let existing: Vec<String> = cluster.pods.keys().cloned().collect();
    cluster.edit(&json!({ "scaleStrategy": { "podsToDelete": ["stray"] } }));
    cluster.set["status"] = Value::Null;
    settle(&mut cluster);
    let remaining: Vec<&String> = cluster.pods.keys().collect();
    assert_eq!(
        remaining,
        existing
            .iter()
            .filter(|name| *name != "stray")
            .collect::<Vec<_>>()
    );
    assert_eq!(cluster.set["spec"]["scaleStrategy"]["podsToDelete"], Value::Null);
}
