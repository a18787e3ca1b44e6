//! When the status of an object is written.

use std::time::{Duration, Instant};

/// Changes within this time are written together.
const BATCH_WINDOW: Duration = Duration::from_millis(100);
/// Maximum delay of a status while changes continue.
pub const MAX_STATUS_DELAY: Duration = Duration::from_secs(1);

/// A status with only a new message is written this long after the last write.
const MESSAGE_ONLY_DELAY: Duration = Duration::from_secs(5);

/// Paces the writes of a status: changes within 0.1 s are written together, and longer intervals while changes
/// continue.
#[derive(Default)]
pub struct StatusPacer {
    /// Since when the status differs from the written one.
    changed_since: Option<Instant>,
    last_write: Option<Instant>,
    pause: Duration,
}

impl StatusPacer {
    /// The status equals the written one.
    pub fn unchanged(&mut self) {
        self.changed_since = None;
    }

    /// The status has changed, perhaps only in its message: how long to wait before it is written.
    pub fn delay_of_change(&mut self, now: Instant, message_only: bool) -> Duration {
        let since = *self.changed_since.get_or_insert(now);
        let pause = if message_only {
            MESSAGE_ONLY_DELAY
        } else {
            self.pause
        };
        let next = self.last_write.map_or(since, |wrote| wrote + pause);
        (since + BATCH_WINDOW).max(next).saturating_duration_since(now)
    }

    /// The same; `None` if it is written now, which is recorded: after that time, or `at_once`.
    pub fn begin_write(&mut self, now: Instant, message_only: bool, at_once: bool) -> Option<Duration> {
        let delay = self.delay_of_change(now, message_only);
        if !delay.is_zero() && !at_once {
            return Some(delay);
        }
        self.record_write(now);
        None
    }

    /// The status is being written.
    pub fn record_write(&mut self, now: Instant) {
        let busy = self
            .last_write
            .is_some_and(|wrote| now.duration_since(wrote) < self.pause * 2);
        self.pause = if busy {
            (self.pause * 2).min(MAX_STATUS_DELAY)
        } else {
            BATCH_WINDOW
        };
        self.last_write = Some(now);
        self.changed_since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_within_the_window_are_batched() {
        let (mut pace, start) = (StatusPacer::default(), Instant::now());
        assert_eq!(pace.delay_of_change(start, false), BATCH_WINDOW);
        assert_eq!(
            pace.delay_of_change(start + BATCH_WINDOW / 2, false),
            BATCH_WINDOW / 2
        );
        assert_eq!(pace.delay_of_change(start + BATCH_WINDOW, false), Duration::ZERO);
        let mut now = start + BATCH_WINDOW;
        let mut pauses = Vec::new();
        for _ in 0..6 {
            pace.record_write(now);
            let wait = pace.delay_of_change(now, false);
            pauses.push(wait.as_millis());
            now += wait;
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1000, 1000]);
        pace.record_write(now + Duration::from_secs(60));
        assert_eq!(
            pace.delay_of_change(now + Duration::from_secs(120), false),
            BATCH_WINDOW
        );
    }

    #[test]
    fn message_only_changes_wait_five_seconds() {
        let (mut pace, now) = (StatusPacer::default(), Instant::now());
        assert_eq!(pace.delay_of_change(now, true), BATCH_WINDOW);
        pace.record_write(now);
        let soon = now + Duration::from_secs(1);
        assert_eq!(pace.delay_of_change(soon, true), Duration::from_secs(4));
        assert_eq!(
            pace.delay_of_change(soon, false),
            BATCH_WINDOW,
            "another count is written at once"
        );
        assert_eq!(
            pace.delay_of_change(now + MESSAGE_ONLY_DELAY, true),
            Duration::ZERO
        );
    }
}
