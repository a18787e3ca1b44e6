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
#[cfg(test)]
pub(super) mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;

use kruise_api::backoff::Backoff;
use kruise_api::keys;
use kruise_api::node_image::{ImagePullPhase, ImageTagStatus, ServiceAccountReference};

pub use board::TaskBoard;
use slots::SlotUsage;
use start_jitter::MAX_START_JITTER;

/// Backoff between attempts.
const ATTEMPT_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// An attempt without new bytes for this long does not keep its slot from images of other namespaces.
const STALL_TIMEOUT: SignedDuration = SignedDuration::from_secs(600);
/// An attempt that takes longer than this does not keep its slot from a namespace that has none, whatever its registry
/// sends. Upstream uses the same timeout for tags without one.
const LONG_ATTEMPT: SignedDuration = SignedDuration::from_secs(600);

/// The beginning of the message of a tag whose entry in the NodeImage cannot be read.
pub const UNREADABLE_ENTRY: &str = "the NodeImage's entry for it cannot be read";

/// Key of a task: the image as named in the NodeImage, and its tag or digest.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TagKey {
    /// Key in `spec.images`.
    pub name: String,
    /// Tag or digest.
    pub tag: String,
}

/// The desired pull of one tag.
#[derive(Debug, Clone, PartialEq)]
pub struct PullSpec {
    /// A different version is a new pull.
    pub version: i64,
    /// The reference for the runtime, or why there can be none.
    pub image: Result<String, String>,
    /// Pull although the image is present.
    pub always: bool,
    /// Timeout of one attempt.
    pub timeout: SignedDuration,
    /// How often a failed attempt is retried.
    pub retries: u32,
    /// When the pull was requested, if that is known.
    pub requested_at: Option<Timestamp>,
    /// Timeout of all attempts together, from the start of the first.
    pub active_deadline: Option<SignedDuration>,
    /// The jobs that the image is pulled for.
    pub owners: Vec<ObjectReference>,
    /// Secrets to try in order, as (namespace, name).
    pub secrets: Vec<(String, String)>,
    /// Service accounts of jobs that request tags of the image.
    pub service_accounts: Vec<ServiceAccountReference>,
    /// Labels for the runtime's sandbox configuration.
    pub labels: BTreeMap<String, String>,
    /// Annotations for the same.
    pub annotations: BTreeMap<String, String>,
    /// How long the image is pinned once it is there.
    pub pin: Option<SignedDuration>,
}

impl PullSpec {
    /// Host of the image's registry, with its port if it has one.
    pub fn registry(&self) -> &str {
        let image = self.image.as_deref().unwrap_or_default();
        image.split_once('/').map_or("", |(host, _)| host)
    }
}

/// Bytes of a pull in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PullProgress {
    /// Bytes already on the node.
    pub done: u64,
    /// Total bytes of the image.
    pub total: u64,
}

/// The result of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttemptResult {
    /// The image is on the node.
    Pulled {
        /// `NAME@ID` as the runtime has it, if it reported one.
        image_id: Option<String>,
        /// A note for the user although the pull succeeded.
        note: Option<String>,
    },
    /// The image is not on the node.
    Failed {
        /// Message with the reason.
        message: String,
        /// Whether and how to retry.
        retry: AttemptRetry,
    },
}

/// Whether a failed attempt is retried; ordered by how many such attempts do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AttemptRetry {
    /// A retry cannot succeed.
    Never,
    /// A retry may succeed; the attempt counts.
    Counted,
    /// A retry may succeed, and three such attempts in a row do not count: the image may not be the reason that the
    /// runtime disconnected during the pull, nor the Secret the reason that the API server allows no one to read it.
    Uncounted,
    /// A retry may succeed, and an hour of such attempts does not count: the API server answered with an error for a
    /// Secret. It may be overloaded, or it may never be able to read that Secret.
    SecretError,
    /// A retry may succeed, and the attempt never counts: a prerequisite of any pull was missing, so the attempt gave
    /// no information about the image.
    Prevented,
}

/// One tag and its state.
#[derive(Debug, Clone, PartialEq)]
pub struct PullTask {
    /// The desired pull.
    pub spec: PullSpec,
    /// Order of arrival.
    pub seq: u64,
    /// Current stage.
    pub stage: PullStage,
    /// Started attempts that count.
    pub attempts: u32,
    /// Attempts that ended uncounted since the last one that counted.
    pub uncounted: u32,
    /// Attempts that ended with a [`AttemptRetry::SecretError`] since the last one that counted.
    pub secret_errors: u32,
    /// Prevented attempts since the last one that was not prevented.
    pub prevented: u32,
    /// When the first attempt started.
    pub started_at: Option<Timestamp>,
    /// Progress of the current attempt.
    pub progress: Option<PullProgress>,
    /// When the current attempt started.
    pub attempt_started_at: Timestamp,
    /// When the current attempt started, or its progress last changed.
    pub progressed_at: Timestamp,
    /// The owner that the current attempt started for.
    pub owner: PullOwner,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
}

/// The stage of a task.
#[derive(Debug, Clone, PartialEq)]
pub enum PullStage {
    /// Waits for its start, so that not all nodes start at once.
    Delayed {
        /// When it waits for a slot.
        until: Timestamp,
    },
    /// Waits for a slot, or for the runtime.
    Waiting,
    /// An attempt is running.
    Running {
        /// Distinguishes this attempt from an earlier one whose end arrives late.
        run: u64,
    },
    /// Waits for its next attempt.
    BackOff {
        /// When the next attempt is due.
        until: Timestamp,
    },
    /// Waits for a slot, or for the runtime, for its next attempt, which is due.
    Due,
    /// Finished; this is its status from now on.
    Done(Box<ImageTagStatus>),
}

/// The owner on whose behalf an attempt occupies its slot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct PullOwner {
    /// Its namespace; empty if it has none.
    pub namespace: String,
    /// Its UID, or its name if it has none.
    pub id: String,
}

/// Limits of concurrent pulls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PullLimits {
    /// Maximum concurrent attempts, at least 1.
    pub max_parallel: usize,
    /// Maximum concurrent attempts on behalf of one namespace, at least 1.
    pub max_per_namespace: usize,
    /// Maximum concurrent attempts at one registry, at least 1. It has an effect if it is less than `max_parallel`.
    pub max_per_registry: usize,
    /// Whether a runtime is ready to pull.
    pub runtime_ready: bool,
}

impl PullLimits {
    /// The limits of a node: one slot is reserved, so that a namespace whose registry never answers does not occupy all
    /// slots. Those of a registry are not limited.
    pub fn for_node(max_parallel: usize, runtime_ready: bool) -> Self {
        Self {
            max_parallel,
            max_per_namespace: max_parallel.saturating_sub(1).max(1),
            max_per_registry: max_parallel,
            runtime_ready,
        }
    }

    /// Whether a registry has fewer slots than the node.
    pub fn limits_registries(&self) -> bool {
        self.max_per_registry < self.max_parallel
    }
}

/// One step of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullStep {
    /// Start an attempt, and end it after `timeout`.
    Start {
        /// The tag to pull.
        key: TagKey,
        /// Until the attempt's own timeout or the tag's deadline, whichever is earlier.
        timeout: SignedDuration,
        /// The owner that gets the slot.
        owner: PullOwner,
    },
    /// Finish the tag as failed, stopping its attempt if there is one.
    GiveUp {
        /// The tag to give up.
        key: TagKey,
        /// Message with the reason.
        message: String,
    },
}

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

impl PullStage {
    /// Whether this is a pause whose end is to come. One that is further away than any began before the API server's
    /// clock was set back, and ends.
    fn is_pause(&self, now: Timestamp) -> bool {
        let (until, longest) = match self {
            Self::Delayed { until } => (until, MAX_START_JITTER),
            Self::BackOff { until } => (until, ATTEMPT_BACKOFF.max_delay()),
            Self::Waiting | Self::Running { .. } | Self::Due | Self::Done(_) => return false,
        };
        let left = until.duration_since(now);
        left > SignedDuration::ZERO && left.unsigned_abs() <= longest
    }
}

fn attempt_timeout(task: &PullTask, now: Timestamp) -> SignedDuration {
    let time_left = match (task.deadline(), task.spec.active_deadline) {
        (Some(deadline), _) => Some(deadline.duration_since(now)),
        (None, whole) => whole,
    };
    time_left.map_or(task.spec.timeout, |left| left.min(task.spec.timeout))
}

impl PullTask {
    /// When the tag is given up; none before its start, or without a deadline.
    pub fn deadline(&self) -> Option<Timestamp> {
        self.started_at?.checked_add(self.spec.active_deadline?).ok()
    }

    /// When the current attempt counts as stalled; never once all bytes are there and the runtime unpacks them.
    fn stalls_at(&self) -> Option<Timestamp> {
        let unpacking = self.progress.is_some_and(|p| p.total > 0 && p.done >= p.total);
        let stalls_at = self
            .progressed_at
            .checked_add(STALL_TIMEOUT)
            .unwrap_or(Timestamp::MAX);
        Some(if unpacking { Timestamp::MAX } else { stalls_at })
    }

    /// When the current attempt counts as long.
    fn long_running_at(&self) -> Option<Timestamp> {
        self.attempt_started_at.checked_add(LONG_ATTEMPT).ok()
    }

    /// Whether the task is finished.
    pub fn is_done(&self) -> bool {
        matches!(self.stage, PullStage::Done(_))
    }

    /// Whether the image is on the node.
    fn has_succeeded(&self) -> bool {
        matches!(&self.stage, PullStage::Done(status) if status.phase == ImagePullPhase::Succeeded)
    }
}

/// The owners that a tag may be pulled for; at least one.
fn pull_owners(spec: &PullSpec) -> Vec<PullOwner> {
    let mut owners: Vec<PullOwner> = spec.owners.iter().map(PullOwner::from_reference).collect();
    if owners.is_empty() {
        owners.push(PullOwner::default());
    }
    owners
}

impl PullOwner {
    fn from_reference(reference: &ObjectReference) -> Self {
        let id = reference.uid.as_ref().or(reference.name.as_ref());
        Self {
            namespace: reference.namespace.clone().unwrap_or_default(),
            id: id.cloned().unwrap_or_default(),
        }
    }
}

fn earliest(a: Option<Timestamp>, b: Option<Timestamp>) -> Option<Timestamp> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}
