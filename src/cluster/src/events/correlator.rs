//! Which events are written: the first ones of a reason unchanged, further ones combined, and always at a limited rate.
//!
//! As client-go's recorder does it, with one difference: a reason that keeps coming does not use up the object's budget
//! for other reasons.

use std::borrow::Borrow;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, Hash, RandomState};
use std::time::{Duration, Instant};

use super::key::{EventKey, EventType};

/// Number of different notes of one reason that an object gets within [`SIMILAR_WINDOW`]; later ones are one event with
/// the latest note.
const MAX_SIMILAR: usize = 10;
/// How long notes of one reason are counted together.
const SIMILAR_WINDOW: Duration = Duration::from_secs(600);
/// One more event may be written after each such interval.
const REFILL_INTERVAL: Duration = Duration::from_secs(60);
/// Number of events of one reason that may be written for an object in a burst.
const BURST_PER_REASON: u32 = 10;
/// Number of events that may be written for an object in a burst; failures and others are counted separately.
const BURST_PER_OBJECT: u32 = 25;
/// How many (object, reason) pairs, and how many objects, are remembered.
const MAX_REMEMBERED: usize = 4096;

/// How to write an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Correlation {
    /// Whether it is combined with similar ones.
    pub combined: bool,
    /// Whether it may be written now.
    pub write_now: bool,
}

/// State of recent events.
pub(super) struct EventCorrelator {
    reasons: FifoCache<u64, ReasonState>,
    objects: FifoCache<u64, TokenBucket>,
    hasher: RandomState,
}

/// State of one reason of an object.
#[derive(Default)]
struct ReasonState {
    bucket: TokenBucket,
    since: Option<Instant>,
    notes: HashSet<u64>,
}

/// A token bucket, stored as the time at which it will be full again.
#[derive(Default)]
struct TokenBucket {
    full_at: Option<Instant>,
}

impl TokenBucket {
    fn full_at_or(&self, now: Instant) -> Instant {
        self.full_at.map_or(now, |due| due.max(now))
    }

    fn has_token(&self, burst: u32, now: Instant) -> bool {
        self.full_at_or(now).duration_since(now) <= REFILL_INTERVAL * burst.saturating_sub(1)
    }

    fn take_token(&mut self, now: Instant) {
        self.full_at = Some(self.full_at_or(now) + REFILL_INTERVAL);
    }
}

impl Default for EventCorrelator {
    fn default() -> Self {
        Self {
            reasons: FifoCache::new(MAX_REMEMBERED),
            objects: FifoCache::new(MAX_REMEMBERED),
            hasher: RandomState::new(),
        }
    }
}

impl EventCorrelator {
    /// Records an event, and decides how to write it.
    pub fn correlate(&mut self, event: &EventKey, now: Instant) -> Correlation {
        let EventKey {
            component,
            uid,
            type_,
            reason,
            note,
        } = event;
        let reason_key: (&str, &str, EventType, &str) = (component, uid, *type_, reason);
        let reason_state = self.reasons.entry(self.hasher.hash_one(reason_key));
        // One of OpenKruise's failures is of type Normal.
        let failure = *type_ == EventType::Warning || reason.starts_with("Failed");
        let object_bucket = self.objects.entry(self.hasher.hash_one((uid, failure)));
        if reason_state
            .since
            .is_none_or(|since| now.duration_since(since) > SIMILAR_WINDOW)
        {
            reason_state.since = Some(now);
            reason_state.notes.clear();
        }
        let note_hash = self.hasher.hash_one(note);
        let combined = !reason_state.notes.contains(&note_hash) && reason_state.notes.len() >= MAX_SIMILAR;
        if !combined {
            reason_state.notes.insert(note_hash);
        }
        let allowed = reason_state.bucket.has_token(BURST_PER_REASON, now)
            && object_bucket.has_token(BURST_PER_OBJECT, now);
        if allowed {
            reason_state.bucket.take_token(now);
            object_bucket.take_token(now);
        }
        Correlation {
            combined,
            write_now: allowed,
        }
    }
}

/// Recent entries by key; beyond the capacity the oldest are dropped.
pub(super) struct FifoCache<K, V> {
    entries: HashMap<K, V>,
    order: VecDeque<K>,
    capacity: usize,
}

impl<K: Clone + Eq + Hash, V> FifoCache<K, V> {
    /// Keeps at most `capacity` entries.
    pub fn new(capacity: usize) -> Self {
        Self {
            entries: HashMap::new(),
            order: VecDeque::new(),
            capacity,
        }
    }

    pub fn get_mut<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        self.entries.get_mut(key)
    }

    pub fn insert(&mut self, key: K, value: V) {
        if self.entries.insert(key.clone(), value).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > self.capacity
            && let Some(oldest) = self.order.pop_front()
        {
            self.entries.remove(&oldest);
        }
    }

    fn entry(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        if !self.entries.contains_key(&key) {
            self.insert(key.clone(), V::default());
        }
        self.entries.entry(key).or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn event(uid: &str, type_: EventType, reason: &str, note: String) -> EventKey {
        EventKey {
            component: "test".into(),
            uid: uid.to_owned(),
            type_,
            reason: reason.to_owned(),
            note,
        }
    }

    /// A rollout of one Pod after another: an event every half second, each with a different name in it.
    #[test]
    fn similar_events_are_combined_after_the_first_ten() {
        let (mut correlator, start) = (EventCorrelator::default(), Instant::now());
        let decisions: Vec<Correlation> = (0..1000_u32)
            .map(|at| {
                let event = event("u", EventType::Normal, "Updated", format!("web-{at}"));
                correlator.correlate(&event, start + at * Duration::from_millis(500))
            })
            .collect();
        let first = Correlation {
            combined: false,
            write_now: true,
        };
        assert_eq!(decisions[..MAX_SIMILAR], vec![first; MAX_SIMILAR]);
        assert!(decisions[MAX_SIMILAR..].iter().all(|told| told.combined));
        let later = decisions[MAX_SIMILAR..]
            .iter()
            .filter(|told| told.write_now)
            .count();
        assert!((5..=9).contains(&later), "{later} in 500 s, one a minute");
    }

    #[test]
    fn repeated_event_is_rate_limited_and_not_combined() {
        let (mut correlator, start) = (EventCorrelator::default(), Instant::now());
        let mut written = 0;
        for at in 0..600 {
            let decision = correlator.correlate(
                &event("u", EventType::Warning, "FailedCreate", "quota".to_owned()),
                start + Duration::from_secs(at),
            );
            assert!(!decision.combined);
            written += u32::from(decision.write_now);
        }
        assert!(
            (BURST_PER_REASON..=BURST_PER_REASON + 10).contains(&written),
            "{written}"
        );
        let much_later = start + Duration::from_secs(7200);
        for at in 0..BURST_PER_REASON {
            let event = event("u", EventType::Warning, "FailedCreate", format!("another {at}"));
            let decision = correlator.correlate(&event, much_later);
            assert!(decision.write_now && !decision.combined);
        }
    }

    #[test]
    fn frequent_reason_does_not_block_other_reasons() {
        let (mut correlator, now) = (EventCorrelator::default(), Instant::now());
        let mut many = |reason: &str| {
            let correlate =
                |at| correlator.correlate(&event("u", EventType::Normal, reason, format!("{at}")), now);
            (0..100).map(correlate).filter(|told| told.write_now).count()
        };
        assert_eq!(["a", "b", "c"].map(&mut many), [10, 10, 5], "25 in all");
        let warning = event("u", EventType::Warning, "d", String::new());
        assert!(correlator.correlate(&warning, now).write_now);
        assert!(
            correlator
                .correlate(&event("v", EventType::Normal, "a", String::new()), now)
                .write_now
        );
    }

    proptest! {
        /// However many events of whatever reason there are, few of them are written for an object in ten minutes.
        #[test]
        fn an_object_never_has_many_events(
            all in prop::collection::vec((0_u64..600_000, 0_u8..30, any::<bool>(), any::<u16>()), 0..3000),
        ) {
            let (mut pace, start) = (EventCorrelator::default(), Instant::now());
            let mut all = all;
            all.sort();
            let written = all.iter().filter(|(at, reason, warning, text)| {
                let type_ = if *warning { EventType::Warning } else { EventType::Normal };
                let event = event("u", type_, &reason.to_string(), text.to_string());
                pace.correlate(&event, start + Duration::from_millis(*at)).write_now
            });
            prop_assert!(written.count() <= 2 * (25 + 10));
        }

        #[test]
        fn remembered_events_are_bounded(keys in prop::collection::vec(0_u8..40, 0..200)) {
            let mut recent: FifoCache<u8, u8> = FifoCache::new(16);
            for key in keys {
                *recent.entry(key) = key;
                prop_assert!(recent.entries.len() <= 16 && recent.order.len() == recent.entries.len());
                prop_assert_eq!(recent.get_mut(&key).copied(), Some(key));
            }
        }
    }
}
