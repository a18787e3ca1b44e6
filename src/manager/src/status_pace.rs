//! When the status of an object is written.

use std::time::{Duration, Instant};

/// Statuses within this time go together.
const TOGETHER: Duration = Duration::from_millis(100);
/// The longest that a status waits for the next while changes do not end.
pub const LONGEST: Duration = Duration::from_secs(1);

/// A status that says the same in other words waits for so long after the last.
const WORDS: Duration = Duration::from_secs(5);

/// When a status is written: changes within 0.1 s go together, and more of them while there is no end of changes.
#[derive(Default)]
pub struct StatusPace {
    /// Since when it is known that the status is another.
    since: Option<Instant>,
    wrote: Option<Instant>,
    pause: Duration,
}

impl StatusPace {
    /// The status is as it was told.
    pub fn same(&mut self) {
        self.since = None;
    }

    /// The status is another, if only in `words`: how long to wait before it is written.
    pub fn another(&mut self, now: Instant, words: bool) -> Duration {
        let since = *self.since.get_or_insert(now);
        let pause = if words { WORDS } else { self.pause };
        let next = self.wrote.map_or(since, |wrote| wrote + pause);
        (since + TOGETHER).max(next).saturating_duration_since(now)
    }

    /// It is being written.
    pub fn written(&mut self, now: Instant) {
        let busy = self
            .wrote
            .is_some_and(|wrote| now.duration_since(wrote) < self.pause * 2);
        self.pause = if busy {
            (self.pause * 2).min(LONGEST)
        } else {
            TOGETHER
        };
        self.wrote = Some(now);
        self.since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_within_a_tenth_of_a_second_go_together() {
        let (mut pace, start) = (StatusPace::default(), Instant::now());
        assert_eq!(pace.another(start, false), TOGETHER);
        assert_eq!(pace.another(start + TOGETHER / 2, false), TOGETHER / 2);
        assert_eq!(pace.another(start + TOGETHER, false), Duration::ZERO);
        let mut now = start + TOGETHER;
        let mut pauses = Vec::new();
        for _ in 0..6 {
            pace.written(now);
            let wait = pace.another(now, false);
            pauses.push(wait.as_millis());
            now += wait;
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1000, 1000]);
        pace.written(now + Duration::from_secs(60));
        assert_eq!(pace.another(now + Duration::from_secs(120), false), TOGETHER);
    }

    #[test]
    fn a_status_in_other_words_is_written_every_five_seconds_at_most() {
        let (mut pace, now) = (StatusPace::default(), Instant::now());
        assert_eq!(pace.another(now, true), TOGETHER);
        pace.written(now);
        let soon = now + Duration::from_secs(1);
        assert_eq!(pace.another(soon, true), Duration::from_secs(4));
        assert_eq!(
            pace.another(soon, false),
            TOGETHER,
            "another count is written at once"
        );
        assert_eq!(pace.another(now + WORDS, true), Duration::ZERO);
    }
}
