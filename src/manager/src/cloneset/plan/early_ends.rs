//! Pods that ended soon after their creation. Their replacements wait: a node or a policy that ends every new Pod would
//! otherwise get hundreds of them in a second.

use jiff::{SignedDuration, Timestamp};

use super::create::is_terminal;
use super::view::PlanView;
use kruise_workload::in_place::Pod;

/// A Pod that ends within this time of its creation delays its replacement.
const EARLY: SignedDuration = SignedDuration::from_secs(60);
/// The delay counts from the creation of the newest such Pod, in seconds. It doubles with each of them, up to 32.
const INITIAL_DELAY: i64 = 1;
const MAX_DOUBLINGS: usize = 5;

/// Pods that are not replaced yet.
#[derive(Debug)]
pub(super) struct EarlyEnds<'a> {
    pub(super) pods: Vec<&'a Pod>,
    /// Until when.
    pub(super) until: Timestamp,
}

/// The Pods that are not replaced yet, if there are any.
pub(super) fn early_ends<'a>(view: &PlanView<'a>) -> Option<EarlyEnds<'a>> {
    let ended = view.observed.pods.iter().filter(|pod| is_terminal(view, pod));
    let early: Vec<(Timestamp, &Pod)> = ended
        .filter_map(|pod| Some((pod.created?, &**pod)))
        // One created later than now is from before the API server's clock was set back: nothing waits until then.
        .filter(|(created, _)| view.now.duration_since(*created).abs() < EARLY)
        .collect();
    let newest = early.iter().map(|(created, _)| *created).max()?;
    let delay = SignedDuration::from_secs(INITIAL_DELAY << early.len().min(MAX_DOUBLINGS));
    let until = newest.checked_add(delay).unwrap_or(view.now);
    let pods = early.into_iter().map(|(_, pod)| pod).collect();
    (until > view.now).then_some(EarlyEnds { pods, until })
}
