//! Condition Progressing: how far a rollout is, and what it waits for.

use jiff::{Timestamp, ToSpan};

use super::status::{progressing, set};
use super::view::{Draft, View};
use super::waits::waits;
use crate::api::cloneset::CloneSetStatus;

/// The condition's type.
pub const PROGRESSING: &str = "Progressing";
const AVAILABLE: &str = "CloneSetAvailable";
const PAUSED: &str = "CloneSetPaused";
const PARTITION: &str = "ProgressPartitionAvailable";
const EXCEEDED: &str = "ProgressDeadlineExceeded";
const UPDATED: &str = "CloneSetUpdated";

/// Sets the condition.
///
/// It is there also without a deadline. The deadline counts from the beginning of a rollout, of its going on after
/// a pause or a partition, and not from what was before; another revision begins another rollout.
pub(super) fn set_condition(view: &View<'_>, status: &mut CloneSetStatus, draft: &mut Draft) {
    let (holds, reason, message) = match resting(view, status) {
        Some((reason, message)) => (true, reason, format!("{message}{}", waits(view, draft))),
        None => moving(view, status, draft),
    };
    let another = view
        .observed
        .set
        .status
        .as_ref()
        .is_some_and(|s| s.update_revision != status.update_revision);
    if another && reason == UPDATED {
        status.conditions.retain(|c| c.type_ != PROGRESSING);
    }
    let holds = if holds { "True" } else { "False" };
    set(
        &mut status.conditions,
        PROGRESSING,
        holds,
        reason,
        &message,
        view.now,
    );
}

/// Why the rollout does not go on, if so. Pods may be waited for all the same.
fn resting(view: &View<'_>, status: &CloneSetStatus) -> Option<(&'static str, &'static str)> {
    let all = |number: i32| i64::from(number) == view.limits.replicas;
    let available = status.updated_available_replicas.unwrap_or_default();
    let expected = status.expected_updated_replicas.unwrap_or_default();
    if status.current_revision == status.update_revision
        && all(status.replicas)
        && all(status.updated_replicas)
        && all(available)
    {
        return Some((AVAILABLE, "CloneSet is available"));
    }
    if view.spec.rolling_update().is_some_and(|r| r.paused) {
        return Some((PAUSED, "CloneSet is paused"));
    }
    let partitioned = i64::from(expected) < view.limits.replicas && expected <= available;
    partitioned.then_some((PARTITION, "CloneSet has been paused due to partition ready"))
}

/// What a rollout that goes on waits for, and whether it has been at it for too long.
fn moving(view: &View<'_>, status: &CloneSetStatus, draft: &mut Draft) -> (bool, &'static str, String) {
    let waits = waits(view, draft);
    let deadline = view.spec.progress_deadline_seconds.filter(|d| *d != i32::MAX);
    let before = progressing(status).filter(|c| [UPDATED, EXCEEDED].contains(&c.reason.as_str()));
    let same = view
        .observed
        .set
        .status
        .as_ref()
        .is_none_or(|s| s.update_revision == status.update_revision);
    if let Some(deadline) = deadline {
        let before = before.filter(|_| same);
        let began = before
            .and_then(|c| c.last_update_time.as_ref())
            .map_or(view.now, |t| t.0);
        let end = began
            .checked_add(i64::from(deadline).seconds())
            .unwrap_or(Timestamp::MAX);
        if before.is_some_and(|c| c.reason == EXCEEDED) || end < view.now {
            let revision = &status.update_revision;
            return (
                false,
                EXCEEDED,
                format!("CloneSet revision {revision} has timed out progressing{waits}"),
            );
        }
        draft.wake_at(end.checked_add(1.second()).unwrap_or(end));
    }
    (true, UPDATED, format!("CloneSet is progressing{waits}"))
}
