//! The order of Pods for updates and deletions.

mod compare;
mod priority;
mod rank;
mod scatter;
#[cfg(test)]
mod tests;

use jiff::Timestamp;

use crate::in_place::Pod;
use crate::pods;
use compare::{by_activity, by_assignment, by_rank};
use kruise_api::lifecycle::LifecycleStateType as State;
use kruise_api::update_priority::{UpdatePriorityStrategy, UpdateScatterTerm};
pub use priority::CompiledPriority;
pub use rank::{TopologySpread, ranks};

/// Sorts `candidates`, which are indexes into `pods`, in update order.
#[must_use]
pub fn update_order(
    pods: &[&Pod],
    mut candidates: Vec<usize>,
    priority: Option<&UpdatePriorityStrategy>,
    scatter: &[UpdateScatterTerm],
) -> Vec<usize> {
    candidates.sort_by(|a, b| by_activity(pods[*a], pods[*b]));
    if let Some(priority) = priority {
        CompiledPriority::from(priority).sort(&mut candidates, |at| &pods[*at].labels);
    }
    scatter::sort(pods, candidates, scatter)
}

/// Moves the Pods to the front that a preUpdate hook holds: their update has begun.
pub fn preparing_first(pods: &[&Pod], candidates: &mut [usize]) {
    candidates.sort_by_key(|at| pods::lifecycle_state(pods[*at]) != State::PreparingUpdate);
}

/// What determines the choice of Pods for deletion.
#[derive(Clone, Copy, Debug)]
pub struct DeletionCriteria<'a> {
    /// Seconds that a Pod must be ready to be available.
    pub min_ready_seconds: i32,
    /// Current time.
    pub now: Timestamp,
    /// How Pods should be spread over nodes.
    pub spread: &'a TopologySpread<'a>,
}

/// The first `count` of `pods` to delete, in order; if there are not more, all of them unsorted.
#[must_use]
pub fn pick_for_deletion<'a>(
    pods: &[&'a Pod],
    count: usize,
    criteria: &DeletionCriteria<'_>,
) -> Vec<&'a Pod> {
    if count >= pods.len() {
        return pods.to_vec();
    }
    let ranks = ranks(pods, criteria.spread);
    let available = |pod: &Pod| pods::available(pod, criteria.min_ready_seconds, criteria.now);
    let mut order: Vec<(&'a Pod, f64)> = pods.iter().copied().zip(ranks).collect();
    order.sort_by(|(a, rank_a), (b, rank_b)| {
        by_assignment(a, b)
            .then_with(|| available(a).cmp(&available(b)))
            .then_with(|| by_rank((a, *rank_a), (b, *rank_b)))
    });
    order.into_iter().take(count).map(|(pod, _)| pod).collect()
}

/// The `total` Pods to delete, of which `from_old` come from `old`; if `from_old` is at least `total`, all of them.
#[must_use]
pub fn pick_for_scale_down<'a>(
    old: &[&'a Pod],
    new: &[&'a Pod],
    total: usize,
    from_old: usize,
    criteria: &DeletionCriteria<'_>,
) -> Vec<&'a Pod> {
    let from_old = from_old.min(total);
    let mut chosen = if from_old > 0 {
        pick_for_deletion(old, from_old, criteria)
    } else {
        Vec::new()
    };
    if total > from_old {
        chosen.extend(pick_for_deletion(new, total - from_old, criteria));
    }
    chosen
}
