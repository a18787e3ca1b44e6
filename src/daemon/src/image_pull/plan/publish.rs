//! When the status is written.
//!
//! The end of a tag is written at once. Other transitions wait a moment for more transitions, so that one write
//! contains them all. A change of a percentage alone is written once in ten seconds, at a time of its own for each node,
//! so that the nodes of a large cluster do not write in step. A change of conditions alone waits as long: a runtime that
//! only restarts causes no write. Bytes are only written with something else.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value, json};

use super::TagKey;
use super::conditions::{RuntimeState, next_conditions};
use super::size_limit::without_messages;
use super::status::by_tag;
use kruise_api::backoff::Backoff;
use kruise_api::json::set;
use kruise_api::node_image::{ImageTagStatus, NodeImageStatus};
use kruise_api::time::MAX_CLOCK_CORRECTION;

/// How long a transition waits for more transitions.
const COALESCE_DELAY: SignedDuration = SignedDuration::from_millis(100);
/// The minimum time between two writes that contain only progress, and how long a change of conditions alone must last.
const PROGRESS_INTERVAL: SignedDuration = SignedDuration::from_secs(10);
/// The first backoff after a failed write.
const INITIAL_BACKOFF: Duration = Duration::from_millis(500);
/// Backoff after failed writes, as long as that of watches. Jitter makes each delay up to twice as long on some nodes:
/// 3,000 nodes call an unhealthy API server some 70 times a second.
const FAILURE_BACKOFF: Backoff = Backoff::new(INITIAL_BACKOFF, Duration::from_secs(30));
/// When the API server would reject the same status again: the maximum backoff, and how long messages are left out
/// after it.
const MAX_REJECTED_BACKOFF: SignedDuration = SignedDuration::from_secs(300);
const REJECTED_BACKOFF: Backoff = Backoff::new(INITIAL_BACKOFF, MAX_REJECTED_BACKOFF.unsigned_abs());

/// When to write the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteTime {
    /// There is nothing to write.
    Never,
    /// Not before this time.
    At(Timestamp),
    /// At once.
    Now,
}

/// What was written so far.
#[derive(Debug, Clone, Default)]
pub struct StatusPublisher {
    /// The last stored status that we observed.
    pub stored: NodeImageStatus,
    /// Spreads nodes, in thousandths: 0 to 999.
    pub jitter: i64,
    waiting_since: Option<Timestamp>,
    written_at: Option<Timestamp>,
    failures: u32,
    /// When the last write failed.
    failed_at: Option<Timestamp>,
    retry_at: Option<Timestamp>,
    /// The part of `retry_at` that applies even if the API server is known to answer: the delay that it requested
    /// itself, or the whole delay if it rejects the status.
    server_retry_at: Option<Timestamp>,
    without_messages_until: Option<Timestamp>,
    /// Whether the last write changes conditions to others.
    sends_conditions: bool,
    /// Whether the API server has dropped them, because the CRD does not have the field: they are not written again.
    drops_conditions: bool,
}

impl StatusPublisher {
    /// A publisher whose progress writes have an offset of the node's own.
    pub fn new(jitter: i64) -> Self {
        Self {
            jitter: jitter.rem_euclid(1000),
            ..Self::default()
        }
    }

    /// What to publish: the `composed` status with the conditions, and without messages of tags for a while after a
    /// status was rejected.
    #[must_use]
    pub fn publishable(
        &self,
        composed: NodeImageStatus,
        runtime: &RuntimeState,
        now: Timestamp,
    ) -> NodeImageStatus {
        let stored = &self.stored.conditions;
        let conditions = if self.drops_conditions && stored.is_empty() {
            Vec::new()
        } else {
            next_conditions(stored, runtime, now)
        };
        let current = NodeImageStatus {
            conditions,
            ..composed
        };
        match self.without_messages_until {
            Some(until) if now < until => without_messages(current),
            _ => current,
        }
    }

    /// When to write `current`, which must come from [`Self::publishable`].
    pub fn next_write(&mut self, current: &NodeImageStatus, now: Timestamp) -> WriteTime {
        self.forget_times_ahead(now);
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
                Some(at) => saturating_add(at, self.progress_interval()),
                None => now,
            },
            StatusChange::Conditions => {
                let interval = self.progress_interval();
                saturating_add(*self.waiting_since.get_or_insert(now), interval)
            }
        };
        let due = self.retry_at.map_or(due, |t| t.max(due));
        if due <= now {
            self.sends_conditions =
                !current.conditions.is_empty() && current.conditions != self.stored.conditions;
            WriteTime::Now
        } else {
            WriteTime::At(due)
        }
    }

    fn progress_interval(&self) -> SignedDuration {
        PROGRESS_INTERVAL + SignedDuration::from_millis(self.jitter * 2)
    }

    /// Forgets times from before the API server's clock was set back: a write would wait for as long as it was ahead.
    fn forget_times_ahead(&mut self, now: Timestamp) {
        let latest = saturating_add(now, MAX_CLOCK_CORRECTION);
        self.waiting_since = self.waiting_since.filter(|at| *at <= latest);
        self.written_at = self.written_at.filter(|at| *at <= latest);
        if self.failed_at.is_some_and(|at| latest < at) {
            self.failed_at = None;
            (self.retry_at, self.server_retry_at) = (None, None);
            self.without_messages_until = None;
        }
    }

    /// The API server sent a new spec, so it answers: what it did not accept before is not delayed for longer than it
    /// requested.
    pub fn on_server_contact(&mut self) {
        self.retry_at = self.server_retry_at;
    }

    /// The write was accepted; `stored` is the new stored status.
    pub fn on_written(&mut self, stored: NodeImageStatus, now: Timestamp) {
        self.drops_conditions |= self.sends_conditions && stored.conditions.is_empty();
        self.stored = stored;
        self.written_at = Some(now);
        self.waiting_since = None;
        self.failures = 0;
        (self.retry_at, self.server_retry_at) = (None, None);
        self.without_messages_until = self.without_messages_until.filter(|until| now < *until);
    }

    /// The write failed; `retry_after` is the delay that the API server requested, if any.
    pub fn on_failed(&mut self, retry_after: Option<SignedDuration>, now: Timestamp) {
        let pause = self.backoff_delay(FAILURE_BACKOFF);
        let jitter = pause.saturating_mul(self.jitter.try_into().unwrap_or(0)) / 1000;
        let retry_at = saturating_add(now, pause.saturating_add(jitter));
        self.failures = self.failures.saturating_add(1);
        self.failed_at = Some(now);
        self.server_retry_at = retry_after.map(|delay| self.with_jitter(saturating_add(now, delay)));
        self.retry_at = self.server_retry_at.max(Some(retry_at));
    }

    /// The API server rejected the status, and would reject it again: the next status has no messages. Returns whether
    /// this is the first time since it accepted a status with messages.
    pub fn on_rejected(&mut self, now: Timestamp) -> bool {
        let first = self.without_messages_until.is_none();
        if first {
            self.failures = 0;
        }
        let retry_at = self.with_jitter(saturating_add(now, self.backoff_delay(REJECTED_BACKOFF)));
        self.failures = self.failures.saturating_add(1);
        self.failed_at = Some(now);
        (self.retry_at, self.server_retry_at) = (Some(retry_at), Some(retry_at));
        self.without_messages_until = Some(saturating_add(retry_at, MAX_REJECTED_BACKOFF));
        first
    }

    /// The delay after a failure.
    fn backoff_delay(&self, backoff: Backoff) -> SignedDuration {
        backoff
            .delay(self.failures)
            .try_into()
            .unwrap_or(SignedDuration::MAX)
    }

    /// Nodes that were rejected together do not retry together.
    fn with_jitter(&self, at: Timestamp) -> Timestamp {
        saturating_add(at, SignedDuration::from_millis(self.jitter))
    }
}

fn saturating_add(t: Timestamp, by: SignedDuration) -> Timestamp {
    t.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// The most urgent change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum StatusChange {
    None,
    /// Of conditions alone.
    Conditions,
    Progress,
    Transition,
    Terminal,
}

impl StatusChange {
    fn between(stored: &NodeImageStatus, current: &NodeImageStatus) -> Self {
        let (old, new) = (without_bytes(stored), without_bytes(current));
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
        } else if stored.conditions != current.conditions {
            Self::Conditions
        } else {
            Self::None
        };
        tag_changes.max().unwrap_or(Self::None).max(summary_change)
    }
}

/// The tags without their bytes, which cause no write.
fn without_bytes(status: &NodeImageStatus) -> BTreeMap<TagKey, ImageTagStatus> {
    let mut tags = by_tag(status);
    tags.values_mut().for_each(|tag| tag.bytes = None);
    tags
}

/// The merge patch from `stored` to `current`: all counters, only the images that differ, and the conditions and the
/// progress if they differ.
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
    if stored.conditions != current.conditions {
        set(&mut status, &["conditions"], json!(current.conditions));
    }
    if stored.progress != current.progress {
        set(&mut status, &["progress"], json!(current.progress));
    }
    json!({ "status": status })
}
