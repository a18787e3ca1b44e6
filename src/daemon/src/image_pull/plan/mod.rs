//! Every decision about pulls: what starts, what waits and for what, what is given up.
//!
//! The board holds one task per tag. [`plan`] evaluates it and returns the steps; [`TaskBoard::apply`] applies a step
//! to the board, and `act` executes it. Times are the API server's.

pub mod board;
pub mod conditions;
pub mod keyring;
pub mod publish;
pub mod service_accounts;
pub mod size_limit;
mod slots;
pub mod start_jitter;
pub mod status;
mod task;
#[cfg(test)]
pub(super) mod tests;

use jiff::{SignedDuration, Timestamp};

use kruise_api::keys;

pub use board::TaskBoard;
pub use slots::PullLimits;
use slots::SlotUsage;
pub use task::{
    AttemptResult, AttemptRetry, MAX_START_JITTER, PullOwner, PullProgress, PullSpec, PullStage, PullStep,
    PullTask, TagKey, UNREADABLE_ENTRY,
};

/// What to do now, and when to requeue without an event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// The steps, in this order.
    pub steps: Vec<PullStep>,
    /// The next deadline, start or end of a backoff.
    pub requeue_at: Option<Timestamp>,
}

/// Decides what to do at `now`.
pub fn plan(board: &TaskBoard, limits: &PullLimits, now: Timestamp) -> Plan {
    let mut plan = Plan::default();
    let mut slot_usage = SlotUsage::default();
    let mut next_preemption = None;
    let mut ready: Vec<(&TagKey, &PullTask)> = Vec::new();
    for (key, task) in board.tasks() {
        match task_state(task, now) {
            TaskState::Finished => {}
            TaskState::GiveUp(message) => plan.steps.push(PullStep::GiveUp {
                key: key.clone(),
                message,
            }),
            TaskState::Running(deadline) => {
                let stalls_at = task.stalls_at().filter(|at| now < *at);
                let long_at = task.long_running_at().filter(|at| now < *at);
                let registry = task.spec.registry();
                slot_usage.add(registry, &task.owner, stalls_at.is_some(), long_at.is_some());
                next_preemption = earliest(next_preemption, earliest(stalls_at, long_at));
                plan.requeue_at = earliest(plan.requeue_at, deadline);
            }
            TaskState::Pause(until) => plan.requeue_at = earliest(plan.requeue_at, Some(until)),
            TaskState::Ready(deadline) => {
                ready.push((key, task));
                plan.requeue_at = earliest(plan.requeue_at, deadline);
            }
        }
    }
    while limits.runtime_ready
        && let Some((index, owner)) = slot_usage.next_start(&ready, board, limits)
    {
        let (key, task) = ready.swap_remove(index);
        slot_usage.add(task.spec.registry(), &owner, true, true);
        plan.steps.push(PullStep::Start {
            key: key.clone(),
            timeout: attempt_timeout(task, now),
            owner,
        });
    }
    if !ready.is_empty() {
        plan.requeue_at = earliest(plan.requeue_at, next_preemption);
    }
    plan
}

/// What one task needs at `now`.
enum TaskState {
    Finished,
    GiveUp(String),
    /// Occupies a slot until its end or its deadline.
    Running(Option<Timestamp>),
    /// Needs nothing before that time.
    Pause(Timestamp),
    /// Needs a slot; is given up at its deadline, if it has started before.
    Ready(Option<Timestamp>),
}

fn task_state(task: &PullTask, now: Timestamp) -> TaskState {
    let deadline = task.deadline();
    let deadline_is_zero = task
        .spec
        .active_deadline
        .is_some_and(|d| d <= SignedDuration::ZERO);
    match &task.stage {
        PullStage::Done(_) => TaskState::Finished,
        _ if task.spec.image.is_err() => TaskState::GiveUp(task.spec.image.clone().err().unwrap_or_default()),
        _ if deadline_is_zero || deadline.is_some_and(|d| now >= d) => {
            TaskState::GiveUp(keys::DEADLINE_EXCEEDED.to_owned())
        }
        PullStage::Running { .. } => TaskState::Running(deadline),
        PullStage::Delayed { until } | PullStage::BackOff { until } if task.stage.is_pause(now) => {
            TaskState::Pause(deadline.map_or(*until, |d| d.min(*until)))
        }
        PullStage::Delayed { .. } | PullStage::BackOff { .. } | PullStage::Due | PullStage::Waiting => {
            TaskState::Ready(deadline)
        }
    }
}

fn attempt_timeout(task: &PullTask, now: Timestamp) -> SignedDuration {
    let time_left = match (task.deadline(), task.spec.active_deadline) {
        (Some(deadline), _) => Some(deadline.duration_since(now)),
        (None, whole) => whole,
    };
    time_left.map_or(task.spec.timeout, |left| left.min(task.spec.timeout))
}

fn earliest(a: Option<Timestamp>, b: Option<Timestamp>) -> Option<Timestamp> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}
