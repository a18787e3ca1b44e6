//! Handles watch changes; a panic in one affects no other.

use std::collections::HashMap;
use std::fmt::Display;
use std::future::pending;

use tokio::time::{Instant, sleep_until};

use super::retry::{RETRY_BACKOFF, instant_after};
use kruise_ops::panics::catch_panic_sync;

/// Changes whose handler panicked, by object. Each is retried after a pause that doubles from 0.2 s to 30 s, or before
/// the next change of the same object.
pub struct ChangeHandler<C> {
    task: &'static str,
    failed: HashMap<String, FailedChange<C>>,
}

struct FailedChange<C> {
    failures: u32,
    retry_at: Instant,
    /// `None` while it is with the caller of [`ChangeHandler::next_retry`].
    change: Option<C>,
}

impl<C: Display> ChangeHandler<C> {
    /// A handler without failed changes.
    pub fn new(task: &'static str) -> Self {
        let failed = HashMap::new();
        Self { task, failed }
    }

    /// Handles a change with `handler`.
    pub fn handle(&mut self, change: C, mut handler: impl FnMut(&C)) {
        let mut handler = |change: &C| catch_panic_sync(self.task, change, || handler(change));
        let mut times = 0;
        // Usually nothing has panicked, and formatting the change as a string would be wasted.
        if !self.failed.is_empty()
            && let Some(previous) = self.failed.remove(&change.to_string())
        {
            times = previous.failures;
            // The earlier change comes first; if it panics again, the newer one supersedes it.
            previous.change.inspect(|before| drop(handler(before)));
        }
        if handler(&change).is_err() {
            let about = change.to_string();
            let failed = FailedChange {
                failures: times.saturating_add(1),
                retry_at: instant_after(Instant::now(), RETRY_BACKOFF.delay(times)),
                change: Some(change),
            };
            self.failed.insert(about, failed);
        }
    }

    /// Whether there is a change to retry.
    pub fn has_pending(&self) -> bool {
        self.failed.values().any(|failed| failed.change.is_some())
    }

    /// The next change to retry; waits forever if there is none.
    pub async fn next_retry(&mut self) -> C {
        let waiting = self.failed.values_mut().filter(|failed| failed.change.is_some());
        let Some(first) = waiting.min_by_key(|failed| failed.retry_at) else {
            return pending().await;
        };
        sleep_until(first.retry_at).await;
        match first.change.take() {
            Some(change) => change,
            None => pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic)]
    use std::time::Duration;

    use super::*;

    /// Numbered changes of an object; `bad` ones panic.
    struct Numbered(&'static str, u32);

    impl Display for Numbered {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn panicking_change_is_retried_with_backoff_in_order() {
        let mut handler = ChangeHandler::new("a change handler test");
        let mut handled = Vec::new();
        let mut handle = |handler: &mut ChangeHandler<_>, change, bad: &[u32]| {
            handler.handle(change, |Numbered(name, number)| {
                assert!(!bad.contains(number), "index out of bounds");
                handled.push((*name, *number));
            });
        };
        let started_at = Instant::now();
        handle(&mut handler, Numbered("a", 1), &[1]);
        handle(&mut handler, Numbered("b", 2), &[]);
        for pause in [200, 600, 1400] {
            let retry = handler.next_retry().await;
            assert_eq!(started_at.elapsed(), Duration::from_millis(pause));
            handle(&mut handler, retry, &[1]);
        }
        handle(&mut handler, Numbered("a", 3), &[]);
        handle(&mut handler, Numbered("c", 4), &[4]);
        handle(&mut handler, Numbered("c", 5), &[4, 5]);
        let retry = handler.next_retry().await;
        handle(&mut handler, retry, &[]);
        assert_eq!(handled, [("b", 2), ("a", 1), ("a", 3), ("c", 5)]);
        let none = tokio::time::timeout(Duration::from_secs(3600), handler.next_retry());
        assert!(none.await.is_err());
    }
}
