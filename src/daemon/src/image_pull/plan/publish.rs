//! When the status is worth a write.
//!
//! A tag that is over is told at once. Other transitions wait a moment for their like, so that one write tells them
//! together. Bytes alone are worth one write in ten seconds, at a moment of the node's own, so that a fleet does not
//! write in step.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value, json};
use std::time::Duration;

use super::fit::bare;
use super::status::by_tag;
use kruise_api::backoff::Backoff;
use kruise_api::json::set;
use kruise_api::node_image::NodeImageStatus;

/// How long a transition waits for others.
const TOGETHER: SignedDuration = SignedDuration::from_millis(100);
/// The least time between two writes that tell of bytes only.
const PROGRESS: SignedDuration = SignedDuration::from_secs(10);
/// The first pause after a failed write.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// After failed writes, as long as that of watches. Each pause lasts up to twice as long on some nodes: 3,000 of them ask
/// an API server that is unwell some 70 times a second.
const FAILED: Backoff = Backoff::new(FIRST_PAUSE, Duration::from_secs(30));
/// Where the API server would refuse the same again: the last pause, and how long messages are left out after it.
const REFUSED_LAST: SignedDuration = SignedDuration::from_secs(300);
const REFUSED: Backoff = Backoff::new(FIRST_PAUSE, REFUSED_LAST.unsigned_abs());

/// When to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// There is nothing to tell.
    Never,
    /// Not before then.
    At(Timestamp),
    /// At once.
    Now,
}

/// What was told so far.
#[derive(Debug, Clone, Default)]
pub struct Publisher {
    /// What the API server has, as far as we know.
    pub stored: NodeImageStatus,
    /// What spreads nodes, in thousandths: 0 to 999.
    pub spread: i64,
    waiting_since: Option<Timestamp>,
    wrote_at: Option<Timestamp>,
    failures: u32,
    not_before: Option<Timestamp>,
    /// The same where the API server is known to answer: what it asked for itself, or all of it where it refuses.
    in_any_case: Option<Timestamp>,
    bare_until: Option<Timestamp>,
}

impl Publisher {
    /// A publisher whose progress writes fall at a moment of the node's own.
    pub fn new(spread: i64) -> Self {
        Self {
            spread: spread.rem_euclid(1000),
            ..Self::default()
        }
    }

    /// What is to be told of `current`: no messages for a while after a status was refused.
    #[must_use]
    pub fn told(&self, current: NodeImageStatus, now: Timestamp) -> NodeImageStatus {
        match self.bare_until {
            Some(until) if now < until => bare(current),
            _ => current,
        }
    }

    /// When to tell `current`, which is as [`Self::told`] has it.
    pub fn when(&mut self, current: &NodeImageStatus, now: Timestamp) -> When {
        let news = News::of(&self.stored, current);
        let due = match news {
            News::None => {
                self.waiting_since = None;
                self.bare_until = self.bare_until.filter(|until| now < *until);
                return self.bare_until.map_or(When::Never, When::At);
            }
            News::Terminal => now,
            News::Transition => later(*self.waiting_since.get_or_insert(now), TOGETHER),
            News::Progress => match self.wrote_at {
                Some(at) => later(at, PROGRESS + SignedDuration::from_millis(self.spread * 2)),
                None => now,
            },
        };
        let due = self.not_before.map_or(due, |t| t.max(due));
        if due <= now { When::Now } else { When::At(due) }
    }

    /// The API server sent other wishes, so that it answers: what it did not take before is not kept back for longer than it
    /// wants.
    pub fn heard(&mut self) {
        self.not_before = self.in_any_case;
    }

    /// The write was accepted and this is what is stored now.
    pub fn wrote(&mut self, stored: NodeImageStatus, now: Timestamp) {
        self.stored = stored;
        self.wrote_at = Some(now);
        self.waiting_since = None;
        self.failures = 0;
        (self.not_before, self.in_any_case) = (None, None);
        self.bare_until = self.bare_until.filter(|until| now < *until);
    }

    /// The write failed; `after` is what the API server asked for, if it did.
    pub fn failed(&mut self, after: Option<SignedDuration>, now: Timestamp) {
        let pause = self.pause(FAILED);
        let spread = pause.saturating_mul(self.spread.try_into().unwrap_or(0)) / 1000;
        let again = later(now, pause.saturating_add(spread));
        self.failures = self.failures.saturating_add(1);
        self.in_any_case = after.map(|asked| self.spread_out(later(now, asked)));
        self.not_before = self.in_any_case.max(Some(again));
    }

    /// The API server refused the status, and would refuse it again: what comes next is without messages. Whether this is
    /// the first time since a status with messages was taken.
    pub fn refused(&mut self, now: Timestamp) -> bool {
        let first = self.bare_until.is_none();
        if first {
            self.failures = 0;
        }
        let again = self.spread_out(later(now, self.pause(REFUSED)));
        self.failures = self.failures.saturating_add(1);
        (self.not_before, self.in_any_case) = (Some(again), Some(again));
        self.bare_until = Some(later(again, REFUSED_LAST));
        first
    }

    /// The pause after a failure.
    fn pause(&self, backoff: Backoff) -> SignedDuration {
        backoff
            .pause(self.failures)
            .try_into()
            .unwrap_or(SignedDuration::MAX)
    }

    /// Nodes that were turned away together do not come back together.
    fn spread_out(&self, at: Timestamp) -> Timestamp {
        later(at, SignedDuration::from_millis(self.spread))
    }
}

fn later(t: Timestamp, by: SignedDuration) -> Timestamp {
    t.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// What is new, the most urgent of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum News {
    None,
    Progress,
    Transition,
    Terminal,
}

impl News {
    fn of(stored: &NodeImageStatus, current: &NodeImageStatus) -> Self {
        let (old, new) = (by_tag(stored), by_tag(current));
        let of_tags = new.iter().map(|(key, tag)| match old.get(key) {
            Some(told) if told == tag => Self::None,
            _ if tag.completion_time.is_some() => Self::Terminal,
            Some(told)
                if told.phase == tag.phase && told.version == tag.version && told.message == tag.message =>
            {
                Self::Progress
            }
            _ => Self::Transition,
        });
        let gone = old.keys().any(|key| !new.contains_key(key));
        let counts = |s: &NodeImageStatus| [s.desired, s.succeeded, s.failed, s.pulling, s.waiting];
        let whole = if gone || counts(stored) != counts(current) {
            Self::Transition
        } else {
            Self::None
        };
        of_tags.max().unwrap_or(Self::None).max(whole)
    }
}

/// The merge patch that turns `stored` into `current`: all counters, and only the images that differ.
pub fn patch(stored: &NodeImageStatus, current: &NodeImageStatus) -> Value {
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
