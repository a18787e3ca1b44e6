//! Which events are written: the first of a kind as they are, further ones together, and never many in a while.
//!
//! As client-go's recorder does it, with one difference: a kind of event that keeps coming does not use up what an
//! object may say of other things.

use std::borrow::Borrow;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, Hash, RandomState};
use std::time::{Duration, Instant};

use super::{EventType, Repeat};

/// So many texts with one reason are told of an object within [`WINDOW`]; what follows is one event with the latest.
const SIMILAR: usize = 10;
/// How long texts with one reason are counted together.
const WINDOW: Duration = Duration::from_secs(600);
/// One more event may be written each time that this has passed.
const EACH: Duration = Duration::from_secs(60);
/// So many events with one reason may be written of an object at a time.
const OF_A_REASON: u32 = 10;
/// So many events may be written of an object at a time; of failures and of others each.
const OF_AN_OBJECT: u32 = 25;
/// How many reasons of objects, and objects, are remembered.
const REMEMBERED: usize = 4096;

/// How an event is to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    /// Whether it goes together with others like it.
    pub combined: bool,
    /// Whether it may be written now.
    pub now: bool,
}

/// What was told lately.
pub(super) struct Pace {
    reasons: Recent<u64, Reason>,
    objects: Recent<u64, Bucket>,
    hasher: RandomState,
}

/// A reason of an object.
#[derive(Default)]
struct Reason {
    bucket: Bucket,
    since: Option<Instant>,
    texts: HashSet<u64>,
}

/// How much may be said: `due` is when it will be as much as ever again.
#[derive(Default)]
struct Bucket {
    due: Option<Instant>,
}

impl Bucket {
    fn after(&self, now: Instant) -> Instant {
        self.due.map_or(now, |due| due.max(now))
    }

    fn has(&self, burst: u32, now: Instant) -> bool {
        self.after(now).duration_since(now) <= EACH * burst.saturating_sub(1)
    }

    fn take(&mut self, now: Instant) {
        self.due = Some(self.after(now) + EACH);
    }
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            reasons: Recent::new(REMEMBERED),
            objects: Recent::new(REMEMBERED),
            hasher: RandomState::new(),
        }
    }
}

impl Pace {
    /// Takes note of an event, and says how it is to be told.
    pub fn say(&mut self, event: &Repeat, now: Instant) -> Told {
        let Repeat {
            component,
            uid,
            type_,
            reason,
            note,
        } = event;
        let one: (&str, &str, EventType, &str) = (component, uid, *type_, reason);
        let of_reason = self.reasons.entry(self.hasher.hash_one(one));
        // One of OpenKruise's failures is of type Normal.
        let failure = *type_ == EventType::Warning || reason.starts_with("Failed");
        let of_object = self.objects.entry(self.hasher.hash_one((uid, failure)));
        if of_reason
            .since
            .is_none_or(|since| now.duration_since(since) > WINDOW)
        {
            of_reason.since = Some(now);
            of_reason.texts.clear();
        }
        let text = self.hasher.hash_one(note);
        let combined = !of_reason.texts.contains(&text) && of_reason.texts.len() >= SIMILAR;
        if !combined {
            of_reason.texts.insert(text);
        }
        let may = of_reason.bucket.has(OF_A_REASON, now) && of_object.has(OF_AN_OBJECT, now);
        if may {
            of_reason.bucket.take(now);
            of_object.take(now);
        }
        Told { combined, now: may }
    }
}

/// What came up lately, by key; of more than so many, the first are forgotten.
pub(super) struct Recent<K, V> {
    known: HashMap<K, V>,
    order: VecDeque<K>,
    most: usize,
}

impl<K: Clone + Eq + Hash, V> Recent<K, V> {
    /// Remembers `most` at most.
    pub fn new(most: usize) -> Self {
        Self {
            known: HashMap::new(),
            order: VecDeque::new(),
            most,
        }
    }

    pub fn get_mut<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        self.known.get_mut(key)
    }

    pub fn insert(&mut self, key: K, value: V) {
        if self.known.insert(key.clone(), value).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > self.most
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    fn entry(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        if !self.known.contains_key(&key) {
            self.insert(key.clone(), V::default());
        }
        self.known.entry(key).or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn event(uid: &str, type_: EventType, reason: &str, note: String) -> Repeat {
        Repeat {
            component: "test".into(),
            uid: uid.to_owned(),
            type_,
            reason: reason.to_owned(),
            note,
        }
    }

    /// A rollout one by one: an event each half second, each with another name in it.
    #[test]
    fn of_many_like_each_other_the_first_are_told_and_then_few_together() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let told: Vec<Told> = (0..1000_u32)
            .map(|at| {
                let event = event("u", EventType::Normal, "Updated", format!("web-{at}"));
                pace.say(&event, start + at * Duration::from_millis(500))
            })
            .collect();
        let first = Told {
            combined: false,
            now: true,
        };
        assert_eq!(told[..SIMILAR], vec![first; SIMILAR]);
        assert!(told[SIMILAR..].iter().all(|told| told.combined));
        let later = told[SIMILAR..].iter().filter(|told| told.now).count();
        assert!((5..=9).contains(&later), "{later} in 500 s, one a minute");
    }

    #[test]
    fn a_text_that_comes_again_is_no_other_and_is_told_at_times() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let mut written = 0;
        for at in 0..600 {
            let told = pace.say(
                &event("u", EventType::Warning, "FailedCreate", "quota".to_owned()),
                start + Duration::from_secs(at),
            );
            assert!(!told.combined);
            written += u32::from(told.now);
        }
        assert!((OF_A_REASON..=OF_A_REASON + 10).contains(&written), "{written}");
        let much_later = start + Duration::from_secs(7200);
        for at in 0..OF_A_REASON {
            let event = event("u", EventType::Warning, "FailedCreate", format!("another {at}"));
            let told = pace.say(&event, much_later);
            assert!(told.now && !told.combined);
        }
    }

    #[test]
    fn what_keeps_coming_is_in_nobody_else_s_way() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        let mut many = |reason: &str| {
            let say = |at| pace.say(&event("u", EventType::Normal, reason, format!("{at}")), now);
            (0..100).map(say).filter(|told| told.now).count()
        };
        assert_eq!(["a", "b", "c"].map(&mut many), [10, 10, 5], "25 in all");
        let warning = event("u", EventType::Warning, "d", String::new());
        assert!(pace.say(&warning, now).now);
        assert!(
            pace.say(&event("v", EventType::Normal, "a", String::new()), now)
                .now
        );
    }

    proptest! {
        /// However many there are of whatever kind, an object has few of them written in ten minutes.
        #[test]
        fn an_object_never_has_many_events(
            all in prop::collection::vec((0_u64..600_000, 0_u8..30, any::<bool>(), any::<u16>()), 0..3000),
        ) {
            let (mut pace, start) = (Pace::default(), Instant::now());
            let mut all = all;
            all.sort();
            let written = all.iter().filter(|(at, reason, warning, text)| {
                let type_ = if *warning { EventType::Warning } else { EventType::Normal };
                let event = event("u", type_, &reason.to_string(), text.to_string());
                pace.say(&event, start + Duration::from_millis(*at)).now
            });
            prop_assert!(written.count() <= 2 * (25 + 10));
        }

        #[test]
        fn what_is_remembered_has_an_end(keys in prop::collection::vec(0_u8..40, 0..200)) {
            let mut recent: Recent<u8, u8> = Recent::new(16);
            for key in keys {
                *recent.entry(key) = key;
                prop_assert!(recent.known.len() <= 16 && recent.order.len() == recent.known.len());
                prop_assert_eq!(recent.get_mut(&key).copied(), Some(key));
            }
        }
    }
}
