//! When the first attempt of a pull may start, so that not all nodes of a job start at once.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::task::{MAX_START_JITTER, PullSpec, TagKey};

/// The jitter of one node.
#[derive(Debug, Clone, Default)]
pub struct StartJitter {
    max: SignedDuration,
    node: String,
}

impl StartJitter {
    /// At most `max` on this node; zero for none.
    pub fn new(max: Duration, node: &str) -> Self {
        Self {
            max: SignedDuration::try_from(max.min(MAX_START_JITTER)).unwrap_or_default(),
            node: node.to_owned(),
        }
    }

    /// When the first attempt of a tag may start, if it is delayed: after the same time whenever it is computed, and
    /// before half of its deadline has passed since the request.
    pub fn starts_at(&self, key: &TagKey, spec: &PullSpec) -> Option<Timestamp> {
        let half_of_deadline = spec.active_deadline.map(|deadline| deadline / 2);
        let max = half_of_deadline.map_or(self.max, |half| half.min(self.max));
        let max = u64::try_from(max.as_millis()).ok().filter(|max| *max > 0)?;
        let mut hasher = DefaultHasher::new();
        (&self.node, key).hash(&mut hasher);
        let delay = i64::try_from(hasher.finish() % max).ok()?;
        let delay = SignedDuration::from_millis(delay);
        spec.requested_at?.checked_add(delay).ok()
    }
}
