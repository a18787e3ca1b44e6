//! When a failed call is repeated.

use std::time::Duration;

use kruise_api::backoff::Backoff;
use tokio::time::Instant;

/// Used after failed reconciles and lists, unless the API server requests a longer pause.
pub(crate) const RETRY_BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(30));
/// Longest pause that the API server may request.
pub(crate) const MAX_RETRY_AFTER: Duration = Duration::from_secs(300);

/// `from` plus `by`, but at most ten years later; `from` itself if the clock cannot represent that.
pub(crate) fn instant_after(from: Instant, by: Duration) -> Instant {
    const MAX_DELAY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    from.checked_add(by.min(MAX_DELAY)).unwrap_or(from)
}
