//! Conditions of a CloneSet. Progressing is exactly OpenKruise's.

use jiff::{Timestamp, ToSpan};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::builder::PlanBuilder;
use super::view::PlanView;
use kruise_api::cloneset::{CloneSetCondition, CloneSetStatus};

/// Sets a condition. Its times change only with status and reason; the message may change meanwhile.
pub(super) fn upsert_condition(
    conditions: &mut Vec<CloneSetCondition>,
    type_: &str,
    status: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) {
    let now = Time(Timestamp::from_second(now.as_second()).unwrap_or(now));
    let mut new = CloneSetCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        last_update_time: Some(now.clone()),
        last_transition_time: Some(now),
        reason: reason.to_owned(),
        message: message.to_owned(),
    };
    let Some(current) = conditions.iter_mut().find(|c| c.type_ == type_) else {
        conditions.push(new);
        return;
    };
    if current.status == status {
        new.last_transition_time = current.last_transition_time.take().or(new.last_transition_time);
        if current.reason == reason {
            new.last_update_time = current.last_update_time.take().or(new.last_update_time);
        }
    }
    *current = new;
}

fn progressing(status: &CloneSetStatus) -> Option<&CloneSetCondition> {
    status.conditions.iter().find(|c| c.type_ == PROGRESSING)
}

const PROGRESSING: &str = "Progressing";
const AVAILABLE: &str = "CloneSetAvailable";
pub(super) const PAUSED: &str = "CloneSetPaused";
pub(super) const PARTITION: &str = "ProgressPartitionAvailable";
const EXCEEDED: &str = "ProgressDeadlineExceeded";
const UPDATED: &str = "CloneSetUpdated";

/// Sets condition Progressing if the spec has a deadline.
///
/// As in OpenKruise, the deadline counts from the condition's last update, whatever its reason: a rollout that begins
/// or resumes later than that exceeds the deadline immediately.
pub(super) fn set_progressing(view: &PlanView<'_>, status: &mut CloneSetStatus, builder: &mut PlanBuilder) {
    let deadline = view.spec.progress_deadline_seconds;
    let Some(deadline) = deadline.filter(|seconds| *seconds != i32::MAX) else {
        status.conditions.retain(|c| c.type_ != PROGRESSING);
        return;
    };
    let (is_true, reason, message) = match stopped_reason(view, status) {
        Some((reason, message)) => (true, reason, message.to_owned()),
        None => in_progress(view, status, deadline, builder),
    };
    let status_text = if is_true { "True" } else { "False" };
    let same = |c: &CloneSetCondition| c.status == status_text && c.reason == reason;
    if !progressing(status).is_some_and(same) {
        upsert_condition(
            &mut status.conditions,
            PROGRESSING,
            status_text,
            reason,
            &message,
            view.now,
        );
    }
}

/// Why the rollout is complete or paused, if so. The CloneSet may still wait for Pods.
pub(super) fn stopped_reason(
    view: &PlanView<'_>,
    status: &CloneSetStatus,
) -> Option<(&'static str, &'static str)> {
    let is_replicas = |number: i32| i64::from(number) == view.limits.replicas;
    let available = status.updated_available_replicas.unwrap_or_default();
    let expected = status.expected_updated_replicas.unwrap_or_default();
    if status.current_revision == status.update_revision
        && is_replicas(status.replicas)
        && is_replicas(status.updated_replicas)
        && is_replicas(available)
    {
        return Some((AVAILABLE, "CloneSet is available"));
    }
    if view.spec.rolling_update().is_some_and(|r| r.paused) {
        return Some((PAUSED, "CloneSet is paused"));
    }
    let partitioned = i64::from(expected) < view.limits.replicas && expected <= available;
    partitioned.then_some((PARTITION, "CloneSet has been paused due to partition ready"))
}

/// The status, reason and message of a rollout in progress.
fn in_progress(
    view: &PlanView<'_>,
    status: &CloneSetStatus,
    deadline: i32,
    builder: &mut PlanBuilder,
) -> (bool, &'static str, String) {
    let before = progressing(status);
    let updated = |c: &CloneSetCondition| c.last_update_time.as_ref().map_or(Timestamp::MIN, |t| t.0);
    let end = before
        .map_or(view.now, updated)
        .checked_add(i64::from(deadline).seconds())
        .unwrap_or(Timestamp::MAX);
    if before.is_some_and(|c| c.reason == EXCEEDED) || end < view.now {
        let revision = &status.update_revision;
        let message = format!("CloneSet revision {revision} has timed out progressing");
        return (false, EXCEEDED, message);
    }
    builder.requeue_at(end.checked_add(1.second()).unwrap_or(end));
    (true, UPDATED, "CloneSet is progressing".to_owned())
}
