//! The API server's time, learned from the `Date` header of its responses.
//!
//! A node's own clock may be wrong by hours; deadlines and TTLs of objects are measured by the clock that stamped them.
//! The header has whole seconds, so each response bounds the offset to an interval, and the intersection of all
//! intervals narrows it down.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use jiff::fmt::rfc2822;
use tokio::time::Instant;

/// The time until `deadline`; zero if it has passed.
#[must_use]
pub fn duration_until(deadline: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(deadline.duration_since(now)).unwrap_or_default()
}

/// The API server's clock; clones share its offset.
#[derive(Clone, Debug)]
pub struct Clock {
    start: Instant,
    start_wall_ms: i64,
    bounds: Arc<Mutex<Option<Bounds>>>,
}

/// The offset of the API server's clock from ours, in milliseconds, lies between these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bounds {
    low: i64,
    high: i64,
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock {
    /// A clock that agrees with the local one until the first response.
    #[must_use]
    pub fn new() -> Self {
        Self::starting_at(Timestamp::now())
    }

    /// A clock whose local wall time is `wall` now: the start on a machine with a wrong clock.
    #[must_use]
    pub fn starting_at(wall: Timestamp) -> Self {
        Self {
            start: Instant::now(),
            start_wall_ms: wall.as_millisecond(),
            bounds: Arc::default(),
        }
    }

    /// Whether a response has shown the API server's time.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.bounds
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// The API server's time now. Steps of the local wall clock do not affect it.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        let bounds = *self.bounds.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = bounds.map_or(0, Bounds::best_offset);
        let now = self.local_ms(Instant::now()).saturating_add(offset);
        Timestamp::from_millisecond(now).unwrap_or(Timestamp::MAX)
    }

    /// Applies the `Date` header of a response to a request that was sent and answered at these instants. A header that
    /// is not a date is ignored.
    pub fn observe_date(&self, date: &str, sent: Instant, received: Instant) {
        let Some(second) = parse_http_date(date) else {
            return;
        };
        let new = Bounds {
            low: second.saturating_sub(self.local_ms(received)),
            high: second.saturating_add(999).saturating_sub(self.local_ms(sent)),
        };
        let mut bounds = self.bounds.lock().unwrap_or_else(PoisonError::into_inner);
        *bounds = Some(bounds.map_or(new, |old| old.intersect(new)));
    }

    fn local_ms(&self, at: Instant) -> i64 {
        let since = at.saturating_duration_since(self.start).as_millis();
        self.start_wall_ms
            .saturating_add(i64::try_from(since).unwrap_or(i64::MAX))
    }
}

impl Bounds {
    /// The intersection; if it is empty a clock was set, and only the new bounds count.
    fn intersect(self, new: Self) -> Self {
        let both = Self {
            low: self.low.max(new.low),
            high: self.high.min(new.high),
        };
        if both.low <= both.high { both } else { new }
    }

    /// Zero if that is possible, because then the clocks most likely agree; else the middle.
    fn best_offset(self) -> i64 {
        if self.low <= 0 && self.high >= 0 {
            0
        } else {
            i64::midpoint(self.low, self.high)
        }
    }
}

fn parse_http_date(date: &str) -> Option<i64> {
    Some(rfc2822::parse(date).ok()?.timestamp().as_millisecond())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use jiff::SignedDuration;
    use proptest::prelude::*;

    #[test]
    fn http_dates_are_parsed_and_garbage_ignored() {
        assert_eq!(
            parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT"),
            Some(784_111_777_000)
        );
        let clock = Clock::new();
        clock.observe_date("yesterday", Instant::now(), Instant::now());
        assert_eq!(*clock.bounds.lock().unwrap(), None);
    }

    #[test]
    fn slow_local_clock_is_corrected_by_one_answer() {
        let truth = Timestamp::now();
        let clock = Clock::starting_at(truth - SignedDuration::from_hours(1));
        let header = rfc2822::DateTimePrinter::new()
            .timestamp_to_rfc9110_string(&truth)
            .unwrap();
        clock.observe_date(&header, Instant::now(), Instant::now());
        let error = clock.now().duration_since(truth).abs();
        assert!(error < SignedDuration::from_secs(2), "off by {error}");
    }

    proptest! {
        /// With any consistent responses, the true offset stays within the bounds.
        #[test]
        fn bounds_always_hold_the_truth(offset in -10_000_000_i64..10_000_000,
                                        calls in prop::collection::vec((0_i64..3_600_000, 0_i64..5_000, 0_u8..=100), 1..40)) {
            let mut bounds: Option<Bounds> = None;
            for (sent, took, stamped_pct) in calls {
                let stamped = sent + took * i64::from(stamped_pct) / 100 + offset;
                let second = stamped.div_euclid(1000) * 1000;
                let new = Bounds { low: second - (sent + took), high: second + 999 - sent };
                let both = bounds.map_or(new, |b| b.intersect(new));
                bounds = Some(both);
                prop_assert!(both.low <= offset && offset <= both.high, "{both:?} lost {offset}");
            }
        }
    }
}
