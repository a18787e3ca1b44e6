//! Limits that every reconcile must respect, whatever happened before.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::ToSpan;
use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use super::partition;
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::{run_kubelets, settle};
use crate::cloneset::plan::limits::{Limits, on_delete};
use crate::cloneset::plan::view::MAX_PODS_PER_PLAN;
use crate::cloneset::plan::{Action, FailureSubject, Observed, PatchReason, Plan, TemplateStatus};
use kruise_api::cloneset::PodUpdateStrategyType as Policy;
use kruise_api::keys;
use kruise_api::lifecycle::{LifecycleHook, LifecycleStateType as State};
use kruise_workload::in_place::{Pod, PodWrite};
use kruise_workload::pods;

/// Effects of one reconcile on the Pods.
#[derive(Default)]
struct PlannedChanges {
    /// Available Pods that it makes unavailable.
    lost_available: i64,
    /// Pods that it creates.
    created: i64,
}

/// A reconcile with its input.
struct CheckedReconcile<'a> {
    observed: &'a Observed,
    limits: Limits,
    active: Vec<&'a Pod>,
    /// Names of created Pods that the watch has not shown yet.
    not_yet_watched: &'a BTreeSet<String>,
    now: jiff::Timestamp,
}

pub(super) fn check_limits(
    cluster: &FakeCluster,
    observed: &Observed,
    planned: &Plan,
    not_yet_watched: &BTreeSet<String>,
) {
    let ours = |pod: &Pod| super::fake_cluster::is_controlled(pod) && pod.labels["app"] == "x";
    let pass = CheckedReconcile {
        observed,
        limits: Limits::from_spec(&observed.set.spec, &observed.features),
        active: observed
            .pods
            .iter()
            .map(AsRef::as_ref)
            .filter(|p| p.active() && ours(p))
            .collect(),
        not_yet_watched,
        now: cluster.now,
    };
    let mut changes = PlannedChanges::default();
    planned
        .actions
        .iter()
        .for_each(|action| pass.add_action(action, &mut changes));
    pass.assert_limits(&changes);
    partition::assert_partition(observed, planned, &pass.limits, &pass.active, pass.now);
    assert!(
        observed.template_status == TemplateStatus::Accepted || !planned.actions.iter().any(begins_update),
        "a Pod is updated though the template is refused: {:?}",
        planned.actions
    );
    assert_wait_is_reported(observed, planned);
    pass.assert_no_claim_is_idle(planned);
}

/// Whether it is the first step of an update.
fn begins_update(action: &Action) -> bool {
    let begins = [
        PatchReason::UpdateInPlace,
        PatchReason::UpdateReCreate,
        PatchReason::PrepareUpdate,
    ];
    matches!(action, Action::PatchPod { reason, .. } if begins.contains(reason))
}

/// While a rollout is incomplete and nothing is planned, the condition reports what it waits for.
fn assert_wait_is_reported(observed: &Observed, planned: &Plan) {
    let status = planned.status.as_ref().or(observed.set.status.as_ref()).unwrap();
    let find = |type_: &str| status.conditions.iter().find(|c| c.type_ == type_);
    let limits = Limits::from_spec(&observed.set.spec, &observed.features);
    let done = i64::from(status.updated_available_replicas.unwrap_or_default()) == limits.replicas
        && i64::from(status.replicas) == limits.replicas;
    let waiting = find("Waiting");
    let template_known = observed.template_status != TemplateStatus::Unknown;
    assert!(
        done || !template_known
            || !planned.actions.is_empty()
            || waiting.is_some_and(|c| !c.message.is_empty()),
        "no condition reports the wait: {status:?}"
    );
    // Messages are exactly OpenKruise's; the condition exists only with a deadline.
    let deadline = observed.set.spec.progress_deadline_seconds;
    let message = find("Progressing").map(|c| c.message.as_str());
    let messages = [
        "CloneSet is available",
        "CloneSet is paused",
        "CloneSet has been paused due to partition ready",
        "CloneSet is progressing",
    ];
    // It names the revision that exceeded the deadline first.
    let late = |text: &str| {
        let revision = text.strip_prefix("CloneSet revision s-");
        revision.is_some_and(|rest| rest.ends_with(" has timed out progressing"))
    };
    let template_rejected = observed.template_status != TemplateStatus::Accepted;
    assert!(
        template_rejected || message.is_some() == deadline.is_some_and(|d| d != i32::MAX),
        "{status:?}"
    );
    assert!(
        template_rejected || message.is_none_or(|text| messages.contains(&text) || late(text)),
        "{message:?}"
    );
}

fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap()
}

impl CheckedReconcile<'_> {
    fn available(&self, pod: &Pod) -> bool {
        let seconds = self.observed.set.spec.min_ready_seconds.unwrap_or_default();
        pods::available(pod, seconds, self.now)
    }

    fn hook(
        &self,
        of: fn(&kruise_api::lifecycle::Lifecycle) -> Option<&LifecycleHook>,
    ) -> Option<&LifecycleHook> {
        self.observed.set.spec.lifecycle.as_ref().and_then(of)
    }

    /// Whether Pods may be updated at all.
    fn allows_updates(&self) -> bool {
        let spec = &self.observed.set.spec;
        !on_delete(spec) && !spec.rolling_update().is_some_and(|r| r.paused)
    }

    fn pod(&self, uid: &str) -> &Pod {
        self.active.iter().find(|p| p.uid == uid).unwrap()
    }

    /// A Pod of the CloneSet that has ended.
    fn ended_pod(&self, uid: &str) -> Option<&Pod> {
        let pod = self.observed.pods.iter().find(|p| p.uid == uid).unwrap();
        let is_ended = !pod.active() && super::fake_cluster::is_controlled(pod);
        is_ended.then_some(pod)
    }

    fn is_held(&self, pod: &Pod) -> bool {
        pods::is_hooked(self.hook(|l| l.pre_delete.as_ref()), pod)
    }

    /// Counts the effects of an action, which no hook may forbid.
    fn add_action(&self, action: &Action, changes: &mut PlannedChanges) {
        match action {
            Action::CreatePod { name, .. } => {
                changes.created += i64::from(!self.not_yet_watched.contains(name))
            }
            Action::DeletePod { uid, .. } => {
                let pod = self.ended_pod(uid).unwrap_or_else(|| self.pod(uid));
                assert!(!self.is_held(pod), "deleted a Pod that a hook blocks");
                changes.lost_available += i64::from(self.available(pod));
            }
            Action::PatchPod {
                uid,
                reason: PatchReason::PrepareDelete,
                ..
            } if let Some(pod) = self.ended_pod(uid) => assert!(self.is_held(pod), "{pod:?}"),
            Action::PatchPod {
                uid,
                reason: why,
                writes,
                ..
            } if !matches!(why, PatchReason::Adopt | PatchReason::Release) => {
                let pod = self.pod(uid);
                let rolling = self.observed.set.spec.rolling_update();
                let out = matches!(
                    why,
                    PatchReason::UpdateInPlace | PatchReason::PrepareUpdate | PatchReason::PrepareDelete
                );
                let update = matches!(
                    why,
                    PatchReason::UpdateInPlace | PatchReason::PrepareUpdate | PatchReason::UpdateReCreate
                );
                assert!(
                    !update || self.allows_updates(),
                    "{why:?} of a Pod under OnDelete, or while paused"
                );
                let in_place_only =
                    rolling.and_then(|r| r.pod_update_policy.as_ref()) == Some(&Policy::InPlaceOnly);
                let marks = *why == PatchReason::UpdateReCreate;
                assert!(!(marks && in_place_only), "recreates a Pod under InPlaceOnly");
                changes.lost_available += i64::from(out && self.available(pod));
                assert_launch_priority_order(pod, *why, writes);
                if *why == PatchReason::UpdateInPlace {
                    let hooked = pods::is_hooked(self.hook(|l| l.in_place_update.as_ref()), pod);
                    let half_way = pods::lifecycle_state(pod) == State::Updating;
                    assert!(half_way || !hooked, "updated a Pod that a hook blocks");
                }
            }
            _ => {}
        }
    }

    /// Asserts that no limit is exceeded.
    fn assert_limits(&self, changes: &PlannedChanges) {
        let PlannedChanges {
            lost_available: lost,
            created: made,
        } = *changes;
        let limits = &self.limits;
        let available = count(self.active.iter().filter(|p| self.available(p)).count());
        let min_available = limits.replicas - limits.max_unavailable;
        assert!(
            lost == 0 || available - lost >= min_available,
            "{lost} of {available} available Pods become unavailable, {min_available} must remain"
        );
        let waiting = self
            .active
            .iter()
            .filter(|p| pods::lifecycle_state(p) == State::PreparingDelete)
            .count();
        let counted = self.active.len() + self.not_yet_watched.len()
            - if limits.exclude_preparing_delete {
                waiting
            } else {
                0
            };
        let max_pods = limits.replicas + limits.max_surge;
        assert!(
            made == 0 || count(counted) + made <= max_pods,
            "{made} Pods are created, {max_pods} are allowed"
        );
        let (unavailable, max_unavailable) = (self.unavailable_pods(), limits.scale_max_unavailable);
        assert!(
            made == 0 || unavailable + made <= max_unavailable,
            "{made} Pods are created beside {unavailable} unavailable ones, {max_unavailable} are allowed"
        );
    }

    /// Pods that count against the limit of the scale strategy: unavailable ones, except those marked for deletion; all
    /// that are being deleted; and those not watched yet.
    fn unavailable_pods(&self) -> i64 {
        let strategy = self.observed.set.spec.scale_strategy.iter();
        let named: BTreeSet<&String> = strategy.flat_map(|s| &s.pods_to_delete).collect();
        let lacks = |pod: &&&Pod| {
            let marked = pod.labels.contains_key(keys::SPECIFIED_DELETE) || named.contains(&pod.name);
            pods::lifecycle_state(pod) == State::PreparingDelete || (!marked && !self.available(pod))
        };
        count(self.active.iter().filter(lacks).count() + self.not_yet_watched.len())
    }
}

impl CheckedReconcile<'_> {
    /// If missing Pods may be created, unused claims are reused, without waiting for terminating Pods.
    fn assert_no_claim_is_idle(&self, planned: &Plan) {
        let observed = self.observed;
        let first = |action: &Action| match action {
            Action::CreatePod { .. } => true,
            Action::PatchPod { reason: why, .. } => {
                matches!(why, PatchReason::Adopt | PatchReason::CancelDeletion)
            }
            _ => false,
        };
        let scale = observed.set.spec.scale_strategy.as_ref().unwrap();
        let missing = count(self.active.len()) < self.limits.replicas;
        let may =
            scale.max_unavailable.is_none() && !observed.failures.contains_key(&FailureSubject::PodCreation);
        // Scaling waits for an adoption that will be retried.
        let tried = |pod: &Pod| observed.failures.get(&FailureSubject::Pod(pod.uid.clone()));
        let early = observed
            .pods
            .iter()
            .any(|pod| pod.controller.is_none() && tried(pod).is_some_and(|failure| !failure.permanent));
        if !missing || !may || !scale.enable_pvc_reuse || early || planned.actions.iter().any(first) {
            return;
        }
        let of_pod = |id: &str| observed.pods.iter().any(|pod| pod.name == format!("s-{id}"));
        let is_deleting = |id: &str| {
            let mut claims = observed.claims.iter().filter(|claim| claim.instance_id == id);
            claims.any(|claim| claim.terminating)
        };
        let mut ids = observed.claims.iter().map(|claim| claim.instance_id.as_str());
        let idle = ids.find(|id| !of_pod(id) && !is_deleting(id));
        assert_eq!(idle, None, "an unused claim is not reused");
    }
}

/// Containers of one launch priority change at a time; the next ones change when these run the desired image and are
/// ready.
fn assert_launch_priority_order(pod: &Pod, reason: PatchReason, writes: &[PodWrite]) {
    let patched = writes
        .iter()
        .filter_map(|write| write.patch["spec"]["containers"].as_array());
    let names: Vec<&Value> = patched.flatten().map(|container| &container["name"]).collect();
    let now = pod
        .containers
        .iter()
        .filter(|c| names.iter().any(|name| **name == c.name));
    let priorities: BTreeSet<i64> = now.filter_map(|c| c.priority).collect();
    assert!(priorities.len() < 2, "{names:?} change at once");
    let in_grace_period = pod.annotations.contains_key(keys::IN_PLACE_UPDATE_GRACE);
    let Some(priority) = priorities
        .first()
        .filter(|_| reason == PatchReason::ContinueUpdate && !in_grace_period)
    else {
        return;
    };
    for first in pod.containers.iter().filter(|c| c.priority > Some(*priority)) {
        let status = pod.container_status(&first.name).unwrap();
        assert!(
            status.ready && status.image == first.image,
            "{names:?} change before {status:?}"
        );
    }
}

/// A template of a few hundred kilobytes may take megabytes as JSON, for each Pod that a plan creates.
#[test]
fn pass_size_shrinks_with_pod_memory() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    cluster.memory = 4 << 20;
    cluster.edit(&json!({ "replicas": 10 }));
    edit_rolling_update(&mut cluster, json!({ "maxUnavailable": "100%" }));
    let created = |cluster: &mut FakeCluster| {
        let plan = cluster.reconcile().1;
        let create = |action: &&Action| matches!(action, Action::CreatePod { .. });
        plan.actions.iter().filter(create).count()
    };
    assert_eq!(
        [
            created(&mut cluster),
            created(&mut cluster),
            created(&mut cluster)
        ],
        [4, 4, 2]
    );
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    let updating = |cluster: &mut FakeCluster| count_patched(&cluster.reconcile().1);
    assert_eq!(
        [
            updating(&mut cluster),
            updating(&mut cluster),
            updating(&mut cluster)
        ],
        [4, 4, 2]
    );
    settle(&mut cluster);
    assert_eq!(cluster.set["status"]["updatedAvailableReplicas"], 10);
}

/// The nodes of many Pods may be dead: terminating Pods with kept claims do not count against the Pods of a plan.
#[test]
fn stuck_terminating_pods_do_not_limit_new_ones() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    cluster.edit(&json!({ "replicas": 3, "scaleStrategy": { "enablePVCReuse": true } }));
    settle(&mut cluster);
    let dead: Vec<String> = cluster.pods.keys().cloned().collect();
    for name in &dead {
        cluster.pods.get_mut(name).unwrap()["metadata"]["finalizers"] = json!(["example.io/dead"]);
        cluster.delete_pod(name);
    }
    cluster.memory = usize::MAX;
    cluster.edit(&json!({ "replicas": 8 }));
    settle(&mut cluster);
    assert_eq!(cluster.pods.len(), 8, "three of them are terminating");
    let plan = cluster.reconcile().1;
    assert_eq!(plan.actions, [], "no action is planned");
}

/// The next write of an in-place update needs a revision that takes too much memory.
#[test]
fn update_waits_for_an_unread_revision() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    edit_rolling_update(&mut cluster, json!({ "maxUnavailable": "100%" }));
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    cluster.reconcile();
    let mut observed = cluster.observe();
    let read = crate::cloneset::plan::plan(&observed, cluster.now);
    let newest = observed.update_revision.clone();
    observed.revisions.retain(|one| one.name != newest);
    observed.unread_revisions.push(newest);
    let plan = crate::cloneset::plan::plan(&observed, cluster.now);
    assert_eq!(count_patched(&plan), 0, "{plan:?}");
    let status_text = |plan: &Plan| format!("{:?}", plan.status);
    assert!(
        status_text(&plan).contains("which takes too much memory"),
        "{plan:?}"
    );
    assert!(!status_text(&read).contains("which takes too much memory"));
}

/// Users may write the labels of Pods, and create revisions.
#[test]
fn revisions_of_many_pods_are_found_quickly() {
    const COUNT: usize = 10_000;
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    let mut observed = cluster.observe();
    let first = Pod::clone(&observed.pods[0]);
    let pod = |at: usize| {
        let mut pod = first.clone();
        (pod.name, pod.uid, pod.node) = (format!("s-{at}"), format!("u{at}"), None);
        let labels = Arc::make_mut(&mut pod.labels);
        labels.insert(keys::CONTROLLER_REVISION_HASH.to_owned(), format!("s-old{at}"));
        labels.insert(keys::LIFECYCLE_STATE.to_owned(), "PreparingNormal".to_owned());
        Arc::new(pod)
    };
    observed.pods = (0..COUNT).map(pod).collect();
    observed.unread_revisions = (0..COUNT).map(|at| format!("s-old{at}")).collect();
    let begin = std::time::Instant::now();
    let plan = crate::cloneset::plan::plan(&observed, cluster.now);
    assert!(begin.elapsed().as_secs() < 10, "{:?}", begin.elapsed());
    let status = plan.status.expect("the number of Pods has changed");
    assert_eq!(status.replicas, 10_000);
}

/// Number of Pods that a plan patches.
fn count_patched(plan: &Plan) -> usize {
    let patch = |action: &&Action| matches!(action, Action::PatchPod { .. });
    plan.actions.iter().filter(patch).count()
}

#[test]
fn pass_patches_at_most_max_pods() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    cluster.edit(&json!({ "replicas": MAX_PODS_PER_PLAN + 20 }));
    edit_rolling_update(&mut cluster, json!({ "maxUnavailable": "100%" }));
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    let updating = |cluster: &mut FakeCluster| count_patched(&cluster.reconcile().1);
    assert_eq!(
        [updating(&mut cluster), updating(&mut cluster)],
        [MAX_PODS_PER_PLAN, 20]
    );
    run_kubelets(&mut cluster);
    // All must become Normal again; failed ones do not block the others.
    cluster.failures_left = MAX_PODS_PER_PLAN;
    assert_eq!(updating(&mut cluster), MAX_PODS_PER_PLAN);
    assert_eq!(updating(&mut cluster), 20);
    cluster.now = cluster.now.checked_add(10.seconds()).unwrap();
    settle(&mut cluster);
    assert_eq!(
        cluster.set["status"]["updatedAvailableReplicas"],
        MAX_PODS_PER_PLAN + 20
    );
}

/// A rollout to `app:2` that was just requested, where one Pod may be unavailable: an old one that is broken and last
/// in the order.
fn broken_pod_last_in_order(replicas: usize) -> FakeCluster {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    cluster.edit(&json!({ "replicas": replicas }));
    let first = json!({ "weight": 50, "matchSelector": { "matchLabels": { "first": "yes" } } });
    edit_rolling_update(
        &mut cluster,
        json!({ "maxUnavailable": 1, "priorityStrategy": { "weightPriority": [first] } }),
    );
    settle(&mut cluster);
    let names: Vec<String> = cluster.pods.keys().cloned().collect();
    for name in &names[1..] {
        cluster.pods.get_mut(name).unwrap()["metadata"]["labels"]["first"] = json!("yes");
    }
    cluster.pods.get_mut(&names[0]).unwrap()["spec"]["containers"][0]["image"] = json!("app:bad");
    run_kubelets(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    cluster
}

/// Number of Pods with `app:2` in their spec.
fn count_updated(cluster: &FakeCluster) -> usize {
    let new = |pod: &&serde_json::Value| pod["spec"]["containers"][0]["image"] == "app:2";
    cluster.pods.values().filter(new).count()
}

/// Its update costs nothing, and may fix it.
#[test]
fn broken_old_pod_is_updated_out_of_order() {
    let mut cluster = broken_pod_last_in_order(3);
    settle(&mut cluster);
    assert_eq!(count_updated(&cluster), 3);
}

/// With a priority strategy, a Pod that costs nothing does not overtake Pods that the limit blocks.
#[test]
fn broken_old_pod_keeps_to_priority_strategy() {
    let priority = json!({ "weightPriority": [{ "weight": 5, "matchSelector": { "matchLabels": { "first": "yes" } } }] });
    for (strategy, count) in [(json!(null), 2), (priority, 0)] {
        let mut cluster = broken_pod_last_in_order(4);
        edit_rolling_update(
            &mut cluster,
            json!({ "partition": 2, "priorityStrategy": strategy }),
        );
        settle(&mut cluster);
        assert_eq!(count_updated(&cluster), count);
    }
}
