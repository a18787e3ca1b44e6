//! Every decision about pulls: what begins, what waits and for what, what is given up.
//!
//! The board holds one task per tag. [`plan`] looks at it and says what to do; [`TaskBoard::apply`] carries a step out on
//! the board, and `act` carries it out in the world. Times are the API server's.

pub mod board;
pub mod keyring;
pub mod publish;
pub mod size_limit;
pub mod status;
#[cfg(test)]
pub(super) mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;

use kruise_api::backoff::Backoff;
use kruise_api::keys;
use kruise_api::node_image::ImageTagStatus;

pub use board::TaskBoard;

/// Pauses between attempts.
const ATTEMPT_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// An attempt without new bytes for so long does not keep its slot from the images of other namespaces.
const STALL_TIMEOUT: SignedDuration = SignedDuration::from_secs(600);
/// An attempt that lasts longer, which is upstream's limit where a tag names none, does not keep its slot from a namespace
/// that has none, whatever its registry sends.
const LONG_ATTEMPT: SignedDuration = SignedDuration::from_secs(600);

/// Names a task: the image as the NodeImage has it, and its tag or digest.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TagKey {
    /// Key in `spec.images`.
    pub name: String,
    /// Tag or digest.
    pub tag: String,
}

/// What is asked for one tag.
#[derive(Debug, Clone, PartialEq)]
pub struct PullSpec {
    /// Another version is another pull.
    pub version: i64,
    /// The reference for the runtime, or why there can be none.
    pub image: Result<String, String>,
    /// Pull although the image is present.
    pub always: bool,
    /// The most that one attempt may take.
    pub timeout: SignedDuration,
    /// How often a failed attempt is repeated.
    pub retries: u32,
    /// The most that all may take, from the start of the first attempt.
    pub active_deadline: Option<SignedDuration>,
    /// On whose behalf.
    pub owners: Vec<ObjectReference>,
    /// Secrets to try, as (namespace, name), in order.
    pub secrets: Vec<(String, String)>,
    /// Labels for the runtime's sandbox configuration.
    pub labels: BTreeMap<String, String>,
    /// Annotations for the same.
    pub annotations: BTreeMap<String, String>,
}

/// Bytes of a pull in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PullProgress {
    /// Bytes that are on the node.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttemptResult {
    /// The image is on the node.
    Pulled {
        /// `NAME@ID` as the runtime knows it, where it said so.
        image_id: Option<String>,
        /// What the user should know all the same.
        note: Option<String>,
    },
    /// It is not.
    Failed {
        /// Why.
        message: String,
        /// Whether and how to go on.
        retry: AttemptRetry,
    },
}

/// Whether a failed attempt is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptRetry {
    /// It cannot succeed.
    Never,
    /// It may, and it counts.
    Counted,
    /// It may, and three of them in a row do not count: it may not be the image's doing that the runtime went away while
    /// it pulled, nor the Secret's that the API server lets nobody read it.
    Uncounted,
    /// It may, and it never counts: what it takes to pull at all was not there, so that nothing was learnt of the image.
    Prevented,
}

/// One tag and how far it is.
#[derive(Debug, Clone, PartialEq)]
pub struct PullTask {
    /// What is asked.
    pub spec: PullSpec,
    /// Order of arrival.
    pub seq: u64,
    /// What it is doing.
    pub stage: PullStage,
    /// Attempts begun that count.
    pub attempts: u32,
    /// Attempts that ended so that they do not count, since the last that did.
    pub uncounted: u32,
    /// Attempts that were prevented, since the last that was not.
    pub prevented: u32,
    /// When the first attempt began.
    pub started_at: Option<Timestamp>,
    /// Bytes of the present attempt.
    pub progress: Option<PullProgress>,
    /// When the present attempt began.
    pub attempt_started_at: Timestamp,
    /// When the present attempt began, or its bytes last changed.
    pub progressed_at: Timestamp,
    /// For whom the present attempt began.
    pub owner: PullOwner,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
}

/// What a task is doing.
#[derive(Debug, Clone, PartialEq)]
pub enum PullStage {
    /// It waits for a slot, or for the runtime.
    Waiting,
    /// An attempt is under way.
    Running {
        /// Tells this attempt from a former one whose end comes late.
        run: u64,
    },
    /// It waits for its next attempt.
    BackOff {
        /// When that is.
        until: Timestamp,
    },
    /// It is over; this is what the status says of it from now on.
    Done(Box<ImageTagStatus>),
}

/// On whose behalf an attempt has its slot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct PullOwner {
    /// Its namespace; empty where it has none.
    pub namespace: String,
    /// Its UID, or its name where it has none.
    pub id: String,
}

/// What bounds the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PullLimits {
    /// Attempts at once, at least 1.
    pub max_parallel: usize,
    /// Attempts at once on behalf of one namespace, at least 1.
    pub max_per_namespace: usize,
    /// Whether a runtime is there to pull with.
    pub runtime_ready: bool,
}

impl PullLimits {
    /// Those of a node: one slot is in reserve, so that a namespace whose images come from a registry that never
    /// answers does not have them all.
    pub fn for_node(max_parallel: usize, runtime_ready: bool) -> Self {
        Self {
            max_parallel,
            max_per_namespace: max_parallel.saturating_sub(1).max(1),
            runtime_ready,
        }
    }
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullStep {
    /// Begin an attempt, and end it after `timeout`.
    Start {
        /// Which tag.
        key: TagKey,
        /// Until the attempt's own limit or the tag's deadline, whichever is sooner.
        timeout: SignedDuration,
        /// For whom.
        owner: PullOwner,
    },
    /// End the tag as failed, stopping its attempt if there is one.
    GiveUp {
        /// Which tag.
        key: TagKey,
        /// Why.
        message: String,
    },
}

/// What to do now, and when to look again even if nothing happens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// In this order.
    pub steps: Vec<PullStep>,
    /// The next deadline or end of a pause.
    pub requeue_at: Option<Timestamp>,
}

/// What to do at `now`.
pub fn plan(board: &TaskBoard, limits: &PullLimits, now: Timestamp) -> Plan {
    let mut plan = Plan::default();
    let mut slot_usage = SlotUsage::default();
    let mut next_preemption = None;
    let mut ready: Vec<(&TagKey, &PullTask)> = Vec::new();
    for (key, task) in board.tasks() {
        match task_state(task, now) {
            TaskState::Finished => {}
            TaskState::GiveUp(words) => plan.steps.push(PullStep::GiveUp {
                key: key.clone(),
                message: words,
            }),
            TaskState::Running(deadline) => {
                let stalls_at = task.stalls_at().filter(|at| now < *at);
                let long_at = task.long_running_at().filter(|at| now < *at);
                slot_usage.add(&task.owner, stalls_at.is_some(), long_at.is_some());
                next_preemption = earliest(next_preemption, earliest(stalls_at, long_at));
                plan.requeue_at = earliest(plan.requeue_at, deadline);
            }
            TaskState::BackOff(until) => plan.requeue_at = earliest(plan.requeue_at, Some(until)),
            TaskState::Ready(deadline) => {
                ready.push((key, task));
                plan.requeue_at = earliest(plan.requeue_at, deadline);
            }
        }
    }
    while limits.runtime_ready && slot_usage.protected_slots < limits.max_parallel {
        let slot_free = slot_usage.kept_slots < limits.max_parallel;
        let candidates = ready.iter().enumerate().flat_map(|(index, (_, task))| {
            let owners = pull_owners(&task.spec);
            owners.into_iter().map(move |owner| (index, owner, task.seq))
        });
        let next = candidates
            .filter(|(_, owner, _)| {
                let max_slots = if slot_free { limits.max_per_namespace } else { 1 };
                slot_usage.namespace_slots(&owner.namespace) < max_slots
            })
            .min_by_key(|(_, owner, seq)| {
                let (namespace, id) = board.last_slot_order(owner);
                let in_namespace = (slot_usage.namespace_slots(&owner.namespace), namespace);
                (in_namespace, slot_usage.owner_slots(owner), id, *seq)
            });
        let Some((index, owner, _)) = next else { break };
        let (key, task) = ready.swap_remove(index);
        slot_usage.add(&owner, true, true);
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

/// What one task wants at `now`.
enum TaskState {
    Finished,
    GiveUp(String),
    /// Busy until it ends, or until its deadline.
    Running(Option<Timestamp>),
    BackOff(Timestamp),
    /// Wants a slot; gives up at its deadline, if it has begun before.
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
        PullStage::BackOff { until } if now < *until => {
            TaskState::BackOff(deadline.map_or(*until, |d| d.min(*until)))
        }
        PullStage::BackOff { .. } | PullStage::Waiting => TaskState::Ready(deadline),
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
    /// When the tag is given up; none before its start, or without a limit.
    pub fn deadline(&self) -> Option<Timestamp> {
        self.started_at?.checked_add(self.spec.active_deadline?).ok()
    }

    /// When the present attempt counts as stalled; never where all bytes are there and the runtime unpacks them.
    fn stalls_at(&self) -> Option<Timestamp> {
        let unpacking = self.progress.is_some_and(|p| p.total > 0 && p.done >= p.total);
        let stalls_at = self
            .progressed_at
            .checked_add(STALL_TIMEOUT)
            .unwrap_or(Timestamp::MAX);
        Some(if unpacking { Timestamp::MAX } else { stalls_at })
    }

    /// When the present attempt counts as one that lasts.
    fn long_running_at(&self) -> Option<Timestamp> {
        self.attempt_started_at.checked_add(LONG_ATTEMPT).ok()
    }

    /// Whether it is over.
    pub fn is_done(&self) -> bool {
        matches!(self.stage, PullStage::Done(_))
    }
}

/// On whose behalf a tag may be pulled; at least one.
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

/// Attempts under way.
#[derive(Default)]
struct SlotUsage {
    /// Those that no other may take the slot of.
    kept_slots: usize,
    /// Those of them that a namespace without any may not take the slot of either.
    protected_slots: usize,
    by_owner: BTreeMap<PullOwner, usize>,
    by_namespace: BTreeMap<String, usize>,
}

impl SlotUsage {
    fn add(&mut self, owner: &PullOwner, keeps_slot: bool, protected: bool) {
        self.kept_slots += usize::from(keeps_slot);
        self.protected_slots += usize::from(keeps_slot && protected);
        *self.by_owner.entry(owner.clone()).or_default() += 1;
        *self.by_namespace.entry(owner.namespace.clone()).or_default() += 1;
    }

    fn owner_slots(&self, owner: &PullOwner) -> usize {
        self.by_owner.get(owner).copied().unwrap_or(0)
    }

    fn namespace_slots(&self, namespace: &str) -> usize {
        self.by_namespace.get(namespace).copied().unwrap_or(0)
    }
}
