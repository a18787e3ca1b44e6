//! Duration of a Lease, and the timing of its renewal.

use std::time::Duration;

/// Duration of a Lease, and the timing of its renewal: client-go's flags, defaults and rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTiming {
    lease_duration: Duration,
    renew_deadline: Duration,
    retry_period: Duration,
}

/// Durations that cannot keep a Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidLeaseTiming {
    /// The holder would still work while another one takes over.
    #[error(
        "--leader-election-lease-duration must be at least a second longer than --leader-election-renew-deadline, \
         in whole seconds up to a day: {0:?} and {1:?}"
    )]
    LeaseDuration(Duration, Duration),
    /// There would be at most one attempt.
    #[error(
        "--leader-election-renew-deadline must be more than 1.2 times --leader-election-retry-period: {0:?} and {1:?}"
    )]
    RenewDeadline(Duration, Duration),
    /// There would be no pause between attempts.
    #[error("--leader-election-retry-period must be at least 100ms: {0:?}")]
    RetryPeriod(Duration),
}

/// Longest duration of a Lease.
const MAX_LEASE_DURATION: Duration = Duration::from_secs(24 * 3600);
/// Shortest pause between two attempts.
const MIN_RETRY_PERIOD: Duration = Duration::from_millis(100);

impl Default for LeaseTiming {
    fn default() -> Self {
        Self {
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
        }
    }
}

impl LeaseTiming {
    /// A Lease that others may acquire after `lease_duration` (whole seconds, rounded down) without a renewal, whose
    /// holder stops after `renew_deadline` without one, and tries every `retry_period`.
    ///
    /// # Errors
    /// When the holder would not stop before others may take over, or could not renew in time.
    pub fn new(
        lease_duration: Duration,
        renew_deadline: Duration,
        retry_period: Duration,
    ) -> Result<Self, InvalidLeaseTiming> {
        // The Lease's field is in whole seconds.
        let whole_seconds = Duration::from_secs(lease_duration.as_secs());
        if whole_seconds < renew_deadline.saturating_add(Duration::from_secs(1))
            || whole_seconds > MAX_LEASE_DURATION
        {
            return Err(InvalidLeaseTiming::LeaseDuration(lease_duration, renew_deadline));
        }
        if renew_deadline <= retry_period.saturating_mul(6) / 5 {
            return Err(InvalidLeaseTiming::RenewDeadline(renew_deadline, retry_period));
        }
        if retry_period < MIN_RETRY_PERIOD {
            return Err(InvalidLeaseTiming::RetryPeriod(retry_period));
        }
        Ok(Self {
            lease_duration: whole_seconds,
            renew_deadline,
            retry_period,
        })
    }

    /// How long others wait without a renewal before they take over, in whole seconds.
    #[must_use]
    pub fn lease_duration(&self) -> Duration {
        self.lease_duration
    }

    /// [`Self::lease_duration`] as the field of the Lease.
    pub(super) fn lease_duration_seconds(&self) -> Option<i32> {
        i32::try_from(self.lease_duration.as_secs()).ok()
    }

    /// How long the holder continues without a successful renewal.
    #[must_use]
    pub fn renew_deadline(&self) -> Duration {
        self.renew_deadline
    }

    /// How often the holder renews, and the pause after a failed attempt.
    #[must_use]
    pub fn retry_period(&self) -> Duration {
        self.retry_period
    }

    /// Timeout of one request: as in client-go's programs, so that there is a second attempt.
    pub(super) fn request_timeout(&self) -> Duration {
        self.renew_deadline / 2
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn lease_timing_is_validated_as_in_client_go() {
        let timing = |lease: f64, deadline: f64, retry: f64| {
            let second = Duration::from_secs_f64;
            LeaseTiming::new(second(lease), second(deadline), second(retry))
        };
        assert_eq!(timing(15.0, 10.0, 2.0), Ok(LeaseTiming::default()));
        // The values of managed clusters.
        timing(137.0, 107.0, 26.0).unwrap();
        assert_eq!(
            timing(60.9, 40.0, 5.0).unwrap().lease_duration(),
            Duration::from_secs(60)
        );
        for (lease, deadline, retry, flag) in [
            (10.0, 10.0, 2.0, "--leader-election-lease-duration"),
            (10.9, 10.0, 2.0, "--leader-election-lease-duration"),
            (0.0, 0.0, 0.0, "--leader-election-lease-duration"),
            (1e9, 10.0, 2.0, "--leader-election-lease-duration"),
            (15.0, 2.4, 2.0, "--leader-election-renew-deadline"),
            (15.0, 0.0, 0.0, "--leader-election-renew-deadline"),
            (15.0, 10.0, 0.0, "--leader-election-retry-period"),
        ] {
            let why = timing(lease, deadline, retry).unwrap_err().to_string();
            assert!(why.starts_with(flag), "{lease} {deadline} {retry}: {why}");
        }
        let longest = LeaseTiming::new(Duration::MAX, Duration::MAX, Duration::MAX);
        assert!(longest.is_err(), "{longest:?}");
    }
}
