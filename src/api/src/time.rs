//! Times in the API.

use jiff::Timestamp;

/// Times in the API have whole seconds: other clients drop fractions, and the API server stores none.
#[must_use]
pub fn truncate_to_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}
