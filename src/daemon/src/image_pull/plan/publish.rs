//! When the status is worth a write.
//!
//! A tag that is over is told at once. Other transitions wait a moment for their like, so that one write tells them
//! together. Bytes alone are worth one write in ten seconds, at a moment of the node's own, so that a fleet does not
//! write in step.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value, json};
use std::time::Duration;

use super::size_limit::without_messages;
use super::status::by_tag;
use kruise_api::backoff::Backoff;
use kruise_api::json::set;
use kruise_api::node_image::NodeImageStatus;

/// How long a transition waits for others.
const COALESCE_DELAY: SignedDuration = SignedDuration::from_millis(100);
/// The least time between two writes that tell of bytes only.
const PROGRESS_INTERVAL: SignedDuration = SignedDuration::from_secs(10);
/// The first pause after a failed write.
const INITIAL_BACKOFF: Duration = Duration::from_millis(500);
/// After failed writes, as long as that of watches. Each pause lasts up to twice as long on some nodes: 3,000 of them ask
/// an API server that is unwell some 70 times a second.
const FAILURE_BACKOFF: Backoff = Backoff::new(INITIAL_BACKOFF, Duration::from_secs(30));
/// Where the API server would refuse the same again: the last pause, and how long messages are left out after it.
const MAX_REJECTED_BACKOFF: SignedDuration = SignedDuration::from_secs(300);
const REJECTED_BACKOFF: Backoff = Backoff::new(INITIAL_BACKOFF, MAX_REJECTED_BACKOFF.unsigned_abs());

/// When to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteTime {
    /// There is nothing to tell.
    Never,
    /// Not before then.
    At(Timestamp),
    /// At once.
    Now,
}

/// What was told so far.
#[derive(Debug, Clone, Default)]
pub struct StatusPublisher {
    /// What the API server has, as far as we know.
    pub stored: NodeImageStatus,
    /// What spreads nodes, in thousandths: 0 to 999.
    pub jitter: i64,
    waiting_since: Option<Timestamp>,
    written_at: Option<Timestamp>,
    failures: u32,
    retry_at: Option<Timestamp>,
    /// The same where the API server is known to answer: what it asked for itself, or all of it where it refuses.
    server_retry_at: Option<Timestamp>,
    without_messages_until: Option<Timestamp>,
}

impl StatusPublisher {
    /// A publisher whose progress writes fall at a moment of the node's own.
    pub fn new(jitter: i64) -> Self {
        Self {
            jitter: jitter.rem_euclid(1000),
            ..Self::default()
        }
    }

    /// What is to be told of `current`: no messages for a while after a status was refused.
    #[must_use]
    pub fn publishable(&self, current: NodeImageStatus, now: Timestamp) -> NodeImageStatus {
        match self.without_messages_until {
            Some(until) if now < until => without_messages(current),
            _ => current,
        }
    }

    /// When to write `current`, which is as [`Self::publishable`] has it.
    pub fn next_write(&mut self, current: &NodeImageStatus, now: Timestamp) -> WriteTime {
        let change = StatusChange::between(&self.stored, current);
        let due = match change {
            StatusChange::None => {
                self.waiting_since = None;
                self.without_messages_until = self.without_messages_until.filter(|until| now < *until);
                return self
                    .without_messages_until
                    .map_or(WriteTime::Never, WriteTime::At);
            }
            StatusChange::Terminal => now,
            StatusChange::Transition => {
                saturating_add(*self.waiting_since.get_or_insert(now), COALESCE_DELAY)
            }
            StatusChange::Progress => match self.written_at {
                Some(at) => saturating_add(
                    at,
                    PROGRESS_INTERVAL + SignedDuration::from_millis(self.jitter * 2),
                ),
                None => now,
            },
        };
        let due = self.retry_at.map_or(due, |t| t.max(due));
        if due <= now {
            WriteTime::Now
        } else {
            WriteTime::At(due)
        }
    }

    /// The API server sent other wishes, so that it answers: what it did not take before is not kept back for longer than it
    /// wants.
    pub fn on_server_contact(&mut self) {
        self.retry_at = self.server_retry_at;
    }

    /// The write was accepted and this is what is stored now.
    pub fn on_written(&mut self, stored: NodeImageStatus, now: Timestamp) {
        self.stored = stored;
        self.written_at = Some(now);
        self.waiting_since = None;
        self.failures = 0;
        (self.retry_at, self.server_retry_at) = (None, None);
        self.without_messages_until = self.without_messages_until.filter(|until| now < *until);
    }

    /// The write failed; `after` is what the API server asked for, if it did.
    pub fn on_failed(&mut self, retry_after: Option<SignedDuration>, now: Timestamp) {
        let pause = self.backoff_delay(FAILURE_BACKOFF);
        let jitter = pause.saturating_mul(self.jitter.try_into().unwrap_or(0)) / 1000;
        let retry_at = saturating_add(now, pause.saturating_add(jitter));
        self.failures = self.failures.saturating_add(1);
        self.server_retry_at = retry_after.map(|delay| self.with_jitter(saturating_add(now, delay)));
        self.retry_at = self.server_retry_at.max(Some(retry_at));
    }

    /// The API server refused the status, and would refuse it again: what comes next is without messages. Whether this is
    /// the first time since a status with messages was taken.
    pub fn on_rejected(&mut self, now: Timestamp) -> bool {
        let first = self.without_messages_until.is_none();
        if first {
            self.failures = 0;
        }
        let retry_at = self.with_jitter(saturating_add(now, self.backoff_delay(REJECTED_BACKOFF)));
        self.failures = self.failures.saturating_add(1);
        (self.retry_at, self.server_retry_at) = (Some(retry_at), Some(retry_at));
        self.without_messages_until = Some(saturating_add(retry_at, MAX_REJECTED_BACKOFF));
        first
    }

    /// The pause after a failure.
    fn backoff_delay(&self, backoff: Backoff) -> SignedDuration {
        backoff
            .delay(self.failures)
            .try_into()
            .unwrap_or(SignedDuration::MAX)
    }

    /// Nodes that were turned away together do not come back together.
    fn with_jitter(&self, at: Timestamp) -> Timestamp {
        saturating_add(at, SignedDuration::from_millis(self.jitter))
    }
}

fn saturating_add(t: Timestamp, by: SignedDuration) -> Timestamp {
    t.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// What is new, the most urgent of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum StatusChange {
    None,
    Progress,
    Transition,
    Terminal,
}

impl StatusChange {
    fn between(stored: &NodeImageStatus, current: &NodeImageStatus) -> Self {
        let (old, new) = (by_tag(stored), by_tag(current));
        let tag_changes = new.iter().map(|(key, tag)| match old.get(key) {
            Some(published) if published == tag => Self::None,
            _ if tag.completion_time.is_some() => Self::Terminal,
            Some(published)
                if published.phase == tag.phase
                    && published.version == tag.version
                    && published.message == tag.message =>
            {
                Self::Progress
            }
            _ => Self::Transition,
        });
        let removed = old.keys().any(|key| !new.contains_key(key));
        let counts = |s: &NodeImageStatus| [s.desired, s.succeeded, s.failed, s.pulling, s.waiting];
        let summary_change = if removed || counts(stored) != counts(current) {
            Self::Transition
        } else {
            Self::None
        };
        tag_changes.max().unwrap_or(Self::None).max(summary_change)
    }
}

/// The merge patch that turns `stored` into `current`: all counters, and only the images that differ.
pub fn status_patch(stored: &NodeImageStatus, current: &NodeImageStatus) -> Value {
    let mut images = Map::new();
    for name in stored
        .image_statuses
        .keys()
        .filter(|n| !current.image_statuses.contains_key(*n))
    {
        images.insert(name.clone(), Value::Null);
    }
    for (name, image) in &current.image_statuses {
        if stored.image_statuses.get(name) != Some(image) {
            images.insert(name.clone(), json!(image));
        }
    }
    let mut status = json!({
        "desired": current.desired,
        "succeeded": current.succeeded,
        "failed": current.failed,
        "pulling": current.pulling,
        "waiting": current.waiting,
    });
    if !images.is_empty() {
        set(&mut status, &["imageStatuses"], Value::Object(images));
    }
    json!({ "status": status })
}
