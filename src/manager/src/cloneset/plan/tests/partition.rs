//! Every reconcile respects the partition, whether Pods are updated in place, recreated, rolled back, created or
//! deleted.
//!
//! A user may name or delete a Pod that the partition keeps, and the number of replicas may change; then one side has
//! too few Pods for a while. The controller must not take needed Pods, and must create the missing side first. A broken
//! Pod may replace a terminating one, but must wait for it.

use jiff::Timestamp;

use crate::cloneset::plan::limits::Limits;
use crate::cloneset::plan::{Action, Observed, PatchReason, Plan};
use kruise_api::keys;
use kruise_api::lifecycle::LifecycleStateType as State;
use kruise_workload::in_place::Pod;
use kruise_workload::pods;

pub(super) fn assert_partition(
    observed: &Observed,
    planned: &Plan,
    limits: &Limits,
    active: &[&Pod],
    now: Timestamp,
) {
    let check = PartitionCheck {
        observed,
        planned,
        limits,
        active,
        now,
    };
    check.assert_updates(true, limits.partition);
    check.assert_updates(false, limits.replicas - limits.partition);
    if observed.current_revision != observed.update_revision {
        check.assert_created();
        check.assert_deleted();
    }
}

struct PartitionCheck<'a> {
    observed: &'a Observed,
    planned: &'a Plan,
    limits: &'a Limits,
    active: &'a [&'a Pod],
    now: Timestamp,
}

fn count<T>(some: impl Iterator<Item = T>) -> i64 {
    i64::try_from(some.count()).unwrap()
}

fn preparing(pod: &Pod) -> bool {
    pods::lifecycle_state(pod) == State::PreparingDelete
}

impl PartitionCheck<'_> {
    /// Whether a user or the update requested its deletion.
    fn is_marked(&self, pod: &Pod) -> bool {
        let strategy = self.observed.set.spec.scale_strategy.iter();
        let mut named = strategy.flat_map(|s| &s.pods_to_delete);
        pod.labels.contains_key(keys::SPECIFIED_DELETE) || named.any(|name| *name == pod.name)
    }

    fn is_old(&self, pod: &Pod) -> bool {
        !pods::has_revision(pod, &self.observed.update_revision)
    }

    /// The same for creating and deleting Pods.
    fn counts_as_old(&self, pod: &Pod) -> bool {
        let prepared = self.observed.features.preparing_update_as_update;
        self.is_old(pod) && !(prepared && pods::lifecycle_state(pod) == State::PreparingUpdate)
    }

    /// Whether an update of this Pod or its preparation is planned.
    fn is_updating(&self, pod: &Pod) -> bool {
        self.planned.actions.iter().any(|action| match action {
            Action::PatchPod { uid, reason: why, .. } => {
                let update = matches!(
                    why,
                    PatchReason::UpdateInPlace | PatchReason::PrepareUpdate | PatchReason::UpdateReCreate
                );
                update && *uid == pod.uid
            }
            _ => false,
        })
    }

    fn available(&self, pod: &Pod) -> bool {
        let seconds = self.observed.set.spec.min_ready_seconds.unwrap_or_default();
        pods::available(pod, seconds, self.now)
    }

    /// Updates leave at least `min_kept` Pods on a side. Before an available one is updated, those marked for deletion
    /// must change.
    fn assert_updates(&self, forward: bool, min_kept: i64) {
        let side = || {
            self.active
                .iter()
                .filter(|p| self.is_old(p) == forward && !preparing(p))
        };
        let leaving = || side().filter(|p| self.is_updating(p) && !self.is_marked(p));
        let mut staying = count(side()) - count(leaving());
        if leaving().any(|p| self.available(p)) {
            staying -= count(side().filter(|p| self.is_marked(p)));
        }
        let side_name = if forward { "old" } else { "new" };
        let within_limit = leaving().next().is_none() || staying >= min_kept;
        assert!(
            within_limit,
            "{staying} {side_name} Pods are kept, expected {min_kept}"
        );
    }

    /// New Pods have the update revision only if the other side is complete.
    fn assert_created(&self) {
        let created = |old: bool| {
            count(self.planned.actions.iter().filter(|action| match action {
                Action::CreatePod { pod, .. } => {
                    let label = pod["metadata"]["labels"][keys::CONTROLLER_REVISION_HASH].as_str();
                    kruise_workload::revision::same_revision(label.unwrap(), &self.observed.update_revision)
                        != old
                }
                _ => false,
            }))
        };
        let counts = |p: &&&Pod| !(self.limits.exclude_preparing_delete && preparing(p));
        let existing = count(
            self.active
                .iter()
                .filter(counts)
                .filter(|p| self.counts_as_old(p)),
        );
        let old = existing + created(true);
        let (least, most) = (
            self.limits.partition,
            self.limits.partition + self.limits.max_surge,
        );
        assert!(created(false) == 0 || old >= least, "{old} of {least} old Pods");
        assert!(
            created(true) == 0 || old <= most,
            "{old} old Pods, {most} are allowed"
        );
    }

    /// Only surplus Pods of their own side are deleted.
    fn assert_deleted(&self) {
        let is_deleted = |pod: &Pod| {
            let deletes = |action: &Action| match action {
                Action::DeletePod { uid, .. } => *uid == pod.uid,
                Action::PatchPod { uid, reason: why, .. } => {
                    *why == PatchReason::PrepareDelete && *uid == pod.uid
                }
                _ => false,
            };
            self.planned.actions.iter().any(deletes)
        };
        let (partition, replicas) = (self.limits.partition, self.limits.replicas);
        for (old, least) in [(true, partition), (false, replicas - partition)] {
            let counts = |p: &&&Pod| !self.is_marked(p) && !preparing(p) && self.counts_as_old(p) == old;
            let side = || self.active.iter().filter(counts);
            let staying = count(side().filter(|p| !is_deleted(p)));
            let side_name = if old { "old" } else { "new" };
            assert!(
                !side().any(|p| is_deleted(p)) || staying >= least,
                "{staying} {side_name} Pods are kept, expected {least}"
            );
        }
    }
}
