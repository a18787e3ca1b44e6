//! Times in the API.

use jiff::{SignedDuration, Timestamp};

/// A recorded time that is further ahead than this is from before the API server's clock was set back: each of its
/// answers makes that clock better known, and several API servers may differ a little, but both move it by less.
pub const MAX_CLOCK_CORRECTION: SignedDuration = SignedDuration::from_secs(5);

/// Times in the API have whole seconds: other clients drop fractions, and the API server stores none.
#[must_use]
pub fn truncate_to_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

/// `at` plus `seconds`, at most the maximum timestamp.
#[must_use]
pub fn add_seconds(at: Timestamp, seconds: i64) -> Timestamp {
    at.checked_add(SignedDuration::from_secs(seconds))
        .unwrap_or(Timestamp::MAX)
}

/// Whether `span` has passed since `at`, or the API server's clock was set back by as much: what comes later must not
/// wait until it is there again.
#[must_use]
pub fn is_over(at: Timestamp, span: SignedDuration, now: Timestamp) -> bool {
    now.duration_since(at).abs() >= span
}
