//! Which of two Pods comes first.

use std::cmp::{Ordering, Reverse};

use jiff::Timestamp;

use crate::in_place::Pod;
use crate::pods;

/// Kubernetes' order of active Pods: the least useful comes first.
pub(super) fn by_activity(a: &Pod, b: &Pod) -> Ordering {
    by_assignment(a, b)
        .then_with(|| a.condition_ready().cmp(&b.condition_ready()))
        .then_with(|| by_age(a, b))
}

pub(super) fn by_assignment(a: &Pod, b: &Pod) -> Ordering {
    let phase = |pod: &Pod| match pod.phase.as_str() {
        "Unknown" => 1,
        "Running" => 2,
        _ => 0,
    };
    a.node
        .is_some()
        .cmp(&b.node.is_some())
        .then(phase(a).cmp(&phase(b)))
}

/// Of two Pods with equal readiness: the one that became ready later, restarted more often, or was created later.
fn by_age(a: &Pod, b: &Pod) -> Ordering {
    let since = |pod: &Pod| pod.condition("Ready").filter(|c| c.is_true).and_then(|c| c.since);
    let by_ready = match a.condition_ready() && b.condition_ready() {
        true => later_first(since(a), since(b)),
        false => Ordering::Equal,
    };
    by_ready
        .then_with(|| Reverse(pods::restarts(a)).cmp(&Reverse(pods::restarts(b))))
        .then_with(|| later_first(a.created, b.created))
        .then_with(|| a.name.cmp(&b.name))
}

/// A missing time comes before any time.
fn later_first(a: Option<Timestamp>, b: Option<Timestamp>) -> Ordering {
    let key = |time: Option<Timestamp>| (time.is_some(), Reverse(time));
    key(a).cmp(&key(b))
}

/// The order of deletion without assignment and availability.
pub(super) fn by_rank((a, rank_a): (&Pod, f64), (b, rank_b): (&Pod, f64)) -> Ordering {
    a.condition_ready()
        .cmp(&b.condition_ready())
        .then_with(|| pods::deletion_cost(a).cmp(&pods::deletion_cost(b)))
        .then_with(|| rank_b.total_cmp(&rank_a))
        .then_with(|| by_age(a, b))
}
