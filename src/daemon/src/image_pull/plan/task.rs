//! One tag: the desired pull, its stage, and the steps that lead to the next one.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;

use kruise_api::backoff::Backoff;
use kruise_api::node_image::{ImagePullPhase, ImageTagStatus, ServiceAccountReference};

/// Backoff between attempts.
pub(super) const ATTEMPT_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// Maximum of the start jitter: the manager may count a daemon that has reported nothing for ten minutes as dead.
pub const MAX_START_JITTER: Duration = Duration::from_secs(300);
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

impl PullStage {
    /// Whether this is a pause whose end is to come. One that is further away than any began before the API server's
    /// clock was set back, and ends.
    pub(super) fn is_pause(&self, now: Timestamp) -> bool {
        let (until, longest) = match self {
            Self::Delayed { until } => (until, MAX_START_JITTER),
            Self::BackOff { until } => (until, ATTEMPT_BACKOFF.max_delay()),
            Self::Waiting | Self::Running { .. } | Self::Due | Self::Done(_) => return false,
        };
        let left = until.duration_since(now);
        left > SignedDuration::ZERO && left.unsigned_abs() <= longest
    }
}

impl PullTask {
    /// When the tag is given up; none before its start, or without a deadline.
    pub fn deadline(&self) -> Option<Timestamp> {
        self.started_at?.checked_add(self.spec.active_deadline?).ok()
    }

    /// When the current attempt counts as stalled; never once all bytes are there and the runtime unpacks them.
    pub(super) fn stalls_at(&self) -> Option<Timestamp> {
        let unpacking = self.progress.is_some_and(|p| p.total > 0 && p.done >= p.total);
        let stalls_at = self
            .progressed_at
            .checked_add(STALL_TIMEOUT)
            .unwrap_or(Timestamp::MAX);
        Some(if unpacking { Timestamp::MAX } else { stalls_at })
    }

    /// When the current attempt counts as long.
    pub(super) fn long_running_at(&self) -> Option<Timestamp> {
        self.attempt_started_at.checked_add(LONG_ATTEMPT).ok()
    }

    /// Whether the task is finished.
    pub fn is_done(&self) -> bool {
        matches!(self.stage, PullStage::Done(_))
    }

    /// Whether the image is on the node.
    pub(super) fn has_succeeded(&self) -> bool {
        matches!(&self.stage, PullStage::Done(status) if status.phase == ImagePullPhase::Succeeded)
    }
}

/// The owners that a tag may be pulled for; at least one.
pub(super) fn pull_owners(spec: &PullSpec) -> Vec<PullOwner> {
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
