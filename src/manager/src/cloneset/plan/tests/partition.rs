//! A partition holds in every pass, whether Pods are updated in place, replaced, taken back, made or deleted.
//!
//! Somebody may name or delete a Pod that the partition keeps, and the number of Pods may change; then there are too few
//! of one side for a while. What holds is that the controller takes none that are needed, and that it makes what lacks
//! first. A broken Pod may take the place of one that goes, but that must wait for it.

use jiff::Timestamp;

use crate::cloneset::plan::limits::Limits;
use crate::cloneset::plan::{Act, Observed, Plan, Why};
use kruise_api::keys;
use kruise_api::lifecycle::LifecycleStateType as State;
use kruise_workload::in_place::Pod;
use kruise_workload::pods;

pub(super) fn kept(observed: &Observed, planned: &Plan, limits: &Limits, active: &[&Pod], now: Timestamp) {
    let seen = Seen {
        observed,
        planned,
        limits,
        active,
        now,
    };
    seen.updates(true, limits.partition);
    seen.updates(false, limits.replicas - limits.partition);
    if observed.current != observed.update {
        seen.made();
        seen.deleted();
    }
}

struct Seen<'a> {
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
    pods::state(pod) == State::PreparingDelete
}

impl Seen<'_> {
    /// Whether somebody, or the update itself, asked for its deletion.
    fn marked(&self, pod: &Pod) -> bool {
        let strategy = self.observed.set.spec.scale_strategy.iter();
        let mut named = strategy.flat_map(|s| &s.pods_to_delete);
        pod.labels.contains_key(keys::SPECIFIED_DELETE) || named.any(|name| *name == pod.name)
    }

    fn old(&self, pod: &Pod) -> bool {
        !pods::at(pod, &self.observed.update)
    }

    /// The same, as far as making and deleting Pods goes.
    fn scaled_as_old(&self, pod: &Pod) -> bool {
        let prepared = self.observed.switches.preparing_update_as_update;
        self.old(pod) && !(prepared && pods::state(pod) == State::PreparingUpdate)
    }

    /// Whether an update of this Pod is planned, or what comes before it.
    fn updated(&self, pod: &Pod) -> bool {
        self.planned.acts.iter().any(|act| match act {
            Act::PatchPod { uid, why, .. } => {
                let update = matches!(why, Why::UpdateInPlace | Why::PrepareUpdate | Why::UpdateReCreate);
                update && *uid == pod.uid
            }
            _ => false,
        })
    }

    fn available(&self, pod: &Pod) -> bool {
        let seconds = self.observed.set.spec.min_ready_seconds.unwrap_or_default();
        pods::available(pod, seconds, self.now)
    }

    /// Pods of the one side leave it for the other no further than `least`. Where one does that is available, those
    /// that go anyway do so first.
    fn updates(&self, forward: bool, least: i64) {
        let side = || {
            self.active
                .iter()
                .filter(|p| self.old(p) == forward && !preparing(p))
        };
        let taken = || side().filter(|p| self.updated(p) && !self.marked(p));
        let mut stay = count(side()) - count(taken());
        if taken().any(|p| self.available(p)) {
            stay -= count(side().filter(|p| self.marked(p)));
        }
        let word = if forward { "old" } else { "new" };
        let held = taken().next().is_none() || stay >= least;
        assert!(held, "{stay} {word} Pods stay, {least} are to");
    }

    /// New Pods are of the update revision only where no others lack.
    fn made(&self) {
        let made = |old: bool| {
            count(self.planned.acts.iter().filter(|act| match act {
                Act::CreatePod { pod, .. } => {
                    let label = pod["metadata"]["labels"][keys::CONTROLLER_REVISION_HASH].as_str();
                    kruise_workload::revision::same(label.unwrap(), &self.observed.update) != old
                }
                _ => false,
            }))
        };
        let counts = |p: &&&Pod| !(self.limits.exclude_preparing_delete && preparing(p));
        let there = count(
            self.active
                .iter()
                .filter(counts)
                .filter(|p| self.scaled_as_old(p)),
        );
        let old = there + made(true);
        let (least, most) = (self.limits.partition, self.limits.partition + self.limits.surge);
        assert!(made(false) == 0 || old >= least, "{old} of {least} old Pods");
        assert!(
            made(true) == 0 || old <= most,
            "{old} old Pods, {most} are allowed"
        );
    }

    /// Where there are too many Pods, those go that are too many of their side.
    fn deleted(&self) {
        let goes = |pod: &Pod| {
            let going = |act: &Act| match act {
                Act::DeletePod { uid, .. } => *uid == pod.uid,
                Act::PatchPod { uid, why, .. } => *why == Why::PrepareDelete && *uid == pod.uid,
                _ => false,
            };
            self.planned.acts.iter().any(going)
        };
        let (partition, replicas) = (self.limits.partition, self.limits.replicas);
        for (old, least) in [(true, partition), (false, replicas - partition)] {
            let counts = |p: &&&Pod| !self.marked(p) && !preparing(p) && self.scaled_as_old(p) == old;
            let side = || self.active.iter().filter(counts);
            let stay = count(side().filter(|p| !goes(p)));
            let word = if old { "old" } else { "new" };
            assert!(
                !side().any(|p| goes(p)) || stay >= least,
                "{stay} {word} Pods stay, {least} are to"
            );
        }
    }
}
