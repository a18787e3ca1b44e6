//! Every decision about pulls: what begins, what waits and for what, what is given up.
//!
//! The board holds one task per tag. [`plan`] looks at it and says what to do; [`Board::apply`] carries a step out on
//! the board, and `act` carries it out in the world. Times are the API server's.

pub mod board;
pub mod fit;
pub mod keyring;
pub mod publish;
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

pub use board::Board;

/// Pauses between attempts.
const ATTEMPTS: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// An attempt without new bytes for so long does not keep its slot from the images of other namespaces.
const STALLED: SignedDuration = SignedDuration::from_secs(600);
/// An attempt that lasts longer, which is upstream's limit where a tag names none, does not keep its slot from a namespace
/// that has none, whatever its registry sends.
const LASTING: SignedDuration = SignedDuration::from_secs(600);

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
pub struct Ask {
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
pub struct Progress {
    /// Bytes that are on the node.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
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
        words: String,
        /// Whether and how to go on.
        again: Again,
    },
}

/// Whether a failed attempt is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Again {
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
pub struct Task {
    /// What is asked.
    pub ask: Ask,
    /// Order of arrival.
    pub seq: u64,
    /// What it is doing.
    pub stage: Stage,
    /// Attempts begun that count.
    pub attempts: u32,
    /// Attempts that ended so that they do not count, since the last that did.
    pub uncounted: u32,
    /// Attempts that were prevented, since the last that was not.
    pub prevented: u32,
    /// When the first attempt began.
    pub started_at: Option<Timestamp>,
    /// Bytes of the present attempt.
    pub progress: Option<Progress>,
    /// When the present attempt began.
    pub begun_at: Timestamp,
    /// When the present attempt began, or its bytes last changed.
    pub moved_at: Timestamp,
    /// For whom the present attempt began.
    pub owner: Owner,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
}

/// What a task is doing.
#[derive(Debug, Clone, PartialEq)]
pub enum Stage {
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
pub struct Owner {
    /// Its namespace; empty where it has none.
    pub namespace: String,
    /// Its UID, or its name where it has none.
    pub id: String,
}

/// What bounds the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Attempts at once, at least 1.
    pub max_parallel: usize,
    /// Attempts at once on behalf of one namespace, at least 1.
    pub max_per_namespace: usize,
    /// Whether a runtime is there to pull with.
    pub runtime: bool,
}

impl Limits {
    /// Those of a node: one slot is in reserve, so that a namespace whose images come from a registry that never
    /// answers does not have them all.
    pub fn of_node(max_parallel: usize, runtime: bool) -> Self {
        Self {
            max_parallel,
            max_per_namespace: max_parallel.saturating_sub(1).max(1),
            runtime,
        }
    }
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Begin an attempt, and end it after `timeout`.
    Start {
        /// Which tag.
        key: TagKey,
        /// Until the attempt's own limit or the tag's deadline, whichever is sooner.
        timeout: SignedDuration,
        /// For whom.
        owner: Owner,
    },
    /// End the tag as failed, stopping its attempt if there is one.
    GiveUp {
        /// Which tag.
        key: TagKey,
        /// Why.
        words: String,
    },
}

/// What to do now, and when to look again even if nothing happens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// In this order.
    pub steps: Vec<Step>,
    /// The next deadline or end of a pause.
    pub wake: Option<Timestamp>,
}

/// What to do at `now`.
pub fn plan(board: &Board, limits: &Limits, now: Timestamp) -> Plan {
    let mut plan = Plan::default();
    let mut shares = Shares::default();
    let mut next_lent = None;
    let mut ready: Vec<(&TagKey, &Task)> = Vec::new();
    for (key, task) in board.tasks() {
        match verdict(task, now) {
            Verdict::Over => {}
            Verdict::GiveUp(words) => plan.steps.push(Step::GiveUp {
                key: key.clone(),
                words,
            }),
            Verdict::Running(deadline) => {
                let stalls = task.stalls_at().filter(|at| now < *at);
                let lasts = task.lasts_at().filter(|at| now < *at);
                shares.add(&task.owner, stalls.is_some(), lasts.is_some());
                next_lent = earliest(next_lent, earliest(stalls, lasts));
                plan.wake = earliest(plan.wake, deadline);
            }
            Verdict::Pause(until) => plan.wake = earliest(plan.wake, Some(until)),
            Verdict::Ready(deadline) => {
                ready.push((key, task));
                plan.wake = earliest(plan.wake, deadline);
            }
        }
    }
    while limits.runtime && shares.young < limits.max_parallel {
        let free = shares.slots < limits.max_parallel;
        let candidates = ready.iter().enumerate().flat_map(|(index, (_, task))| {
            let owners = owners(&task.ask);
            owners.into_iter().map(move |owner| (index, owner, task.seq))
        });
        let next = candidates
            .filter(|(_, owner, _)| {
                let most = if free { limits.max_per_namespace } else { 1 };
                shares.of_namespace(&owner.namespace) < most
            })
            .min_by_key(|(_, owner, seq)| {
                let (namespace, id) = board.last_served(owner);
                let in_namespace = (shares.of_namespace(&owner.namespace), namespace);
                (in_namespace, shares.of(owner), id, *seq)
            });
        let Some((index, owner, _)) = next else { break };
        let (key, task) = ready.swap_remove(index);
        shares.add(&owner, true, true);
        plan.steps.push(Step::Start {
            key: key.clone(),
            timeout: attempt_timeout(task, now),
            owner,
        });
    }
    if !ready.is_empty() {
        plan.wake = earliest(plan.wake, next_lent);
    }
    plan
}

/// What one task wants at `now`.
enum Verdict {
    Over,
    GiveUp(String),
    /// Busy until it ends, or until its deadline.
    Running(Option<Timestamp>),
    Pause(Timestamp),
    /// Wants a slot; gives up at its deadline, if it has begun before.
    Ready(Option<Timestamp>),
}

fn verdict(task: &Task, now: Timestamp) -> Verdict {
    let deadline = task.deadline();
    let no_time = task
        .ask
        .active_deadline
        .is_some_and(|d| d <= SignedDuration::ZERO);
    match &task.stage {
        Stage::Done(_) => Verdict::Over,
        _ if task.ask.image.is_err() => Verdict::GiveUp(task.ask.image.clone().err().unwrap_or_default()),
        _ if no_time || deadline.is_some_and(|d| now >= d) => {
            Verdict::GiveUp(keys::DEADLINE_EXCEEDED.to_owned())
        }
        Stage::Running { .. } => Verdict::Running(deadline),
        Stage::BackOff { until } if now < *until => {
            Verdict::Pause(deadline.map_or(*until, |d| d.min(*until)))
        }
        Stage::BackOff { .. } | Stage::Waiting => Verdict::Ready(deadline),
    }
}

fn attempt_timeout(task: &Task, now: Timestamp) -> SignedDuration {
    let to_deadline = match (task.deadline(), task.ask.active_deadline) {
        (Some(deadline), _) => Some(deadline.duration_since(now)),
        (None, whole) => whole,
    };
    to_deadline.map_or(task.ask.timeout, |left| left.min(task.ask.timeout))
}

impl Task {
    /// When the tag is given up; none before its start, or without a limit.
    pub fn deadline(&self) -> Option<Timestamp> {
        self.started_at?.checked_add(self.ask.active_deadline?).ok()
    }

    /// When the present attempt counts as stalled; never where all bytes are there and the runtime unpacks them.
    fn stalls_at(&self) -> Option<Timestamp> {
        let unpacks = self.progress.is_some_and(|p| p.total > 0 && p.done >= p.total);
        let at = self.moved_at.checked_add(STALLED).unwrap_or(Timestamp::MAX);
        Some(if unpacks { Timestamp::MAX } else { at })
    }

    /// When the present attempt counts as one that lasts.
    fn lasts_at(&self) -> Option<Timestamp> {
        self.begun_at.checked_add(LASTING).ok()
    }

    /// Whether it is over.
    pub fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done(_))
    }
}

/// On whose behalf a tag may be pulled; at least one.
fn owners(ask: &Ask) -> Vec<Owner> {
    let mut owners: Vec<Owner> = ask.owners.iter().map(Owner::of).collect();
    if owners.is_empty() {
        owners.push(Owner::default());
    }
    owners
}

impl Owner {
    fn of(reference: &ObjectReference) -> Self {
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
struct Shares {
    /// Those that no other may take the slot of.
    slots: usize,
    /// Those of them that a namespace without any may not take the slot of either.
    young: usize,
    by_owner: BTreeMap<Owner, usize>,
    by_namespace: BTreeMap<String, usize>,
}

impl Shares {
    fn add(&mut self, owner: &Owner, keeps_slot: bool, young: bool) {
        self.slots += usize::from(keeps_slot);
        self.young += usize::from(keeps_slot && young);
        *self.by_owner.entry(owner.clone()).or_default() += 1;
        *self.by_namespace.entry(owner.namespace.clone()).or_default() += 1;
    }

    fn of(&self, owner: &Owner) -> usize {
        self.by_owner.get(owner).copied().unwrap_or(0)
    }

    fn of_namespace(&self, namespace: &str) -> usize {
        self.by_namespace.get(namespace).copied().unwrap_or(0)
    }
}
