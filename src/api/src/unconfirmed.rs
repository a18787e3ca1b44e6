//! Our own last write of an object, which stands for the object until a watch shows it.

use std::time::Duration;

/// How long a watch may take to show a write of ours. After that the watch is believed, or the object read.
pub const CONFIRM_TIMEOUT: Duration = Duration::from_secs(30);

/// What a write of ours returned. Times are those of the process's own clock, since its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unconfirmed<T> {
    written: T,
    expires_at: Duration,
}

impl<T> Unconfirmed<T> {
    /// Of a write that ended `now`.
    #[must_use]
    pub fn new(written: T, now: Duration) -> Self {
        Self {
            written,
            expires_at: now.saturating_add(CONFIRM_TIMEOUT),
        }
    }

    /// What was written, whether or not it has expired.
    pub fn written(&self) -> &T {
        &self.written
    }

    /// When it no longer stands for the object.
    #[must_use]
    pub fn expires_at(&self) -> Duration {
        self.expires_at
    }

    /// Whether it no longer stands for the object.
    #[must_use]
    pub fn has_expired(&self, now: Duration) -> bool {
        now >= self.expires_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_counts_until_the_confirm_timeout() {
        let write = Unconfirmed::new("v2", Duration::from_secs(5));
        assert_eq!(
            (*write.written(), write.expires_at()),
            ("v2", Duration::from_secs(35))
        );
        assert!(!write.has_expired(Duration::from_millis(34_999)));
        assert!(write.has_expired(Duration::from_secs(35)));
        assert!(!Unconfirmed::new((), Duration::MAX).has_expired(Duration::ZERO));
    }
}
