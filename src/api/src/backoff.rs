//! Pauses between failed attempts.

use std::time::Duration;

/// Pauses that double with each consecutive failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
}

impl Backoff {
    /// From `first` to `longest`.
    #[must_use]
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest }
    }

    /// The pause after a failure, with `failures` consecutive ones before it.
    #[must_use]
    pub fn delay(self, failures: u32) -> Duration {
        let factor = 1_u32.checked_shl(failures).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.longest)
    }

    /// The longest pause.
    #[must_use]
    pub const fn max_delay(self) -> Duration {
        self.longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_its_maximum() {
        let seconds = Duration::from_secs;
        let backoff = Backoff::new(seconds(1), seconds(30));
        let pauses = [0, 1, 2, 4, 5, 31, 32, u32::MAX].map(|before| backoff.delay(before).as_secs());
        assert_eq!(pauses, [1, 2, 4, 16, 30, 30, 30, 30]);
        assert_eq!(
            Backoff::new(Duration::ZERO, seconds(1)).delay(u32::MAX),
            Duration::ZERO
        );
    }
}
