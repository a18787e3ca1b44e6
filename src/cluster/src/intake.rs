//! Takes in what watches say, whatever becomes of a single change.

use std::collections::HashMap;
use std::fmt::Display;
use std::future::pending;

use tokio::time::{Instant, sleep_until};

use super::later;
use super::queue::RETRY;
use kruise_ops::panics::isolated_now;

/// Changes that panicked when they were taken in, by what they are about. Each is taken in again after a pause that doubles
/// from 0.2 s to 30 s, or before the next change of the same object.
pub struct Intake<C> {
    task: &'static str,
    failed: HashMap<String, Failed<C>>,
}

struct Failed<C> {
    times: u32,
    at: Instant,
    /// None while it is with the caller of [`Intake::again`].
    change: Option<C>,
}

impl<C: Display> Intake<C> {
    /// Nothing has panicked yet.
    pub fn new(task: &'static str) -> Self {
        let failed = HashMap::new();
        Self { task, failed }
    }

    /// Takes in a change by `work`.
    pub fn take(&mut self, change: C, mut work: impl FnMut(&C)) {
        let mut work = |change: &C| isolated_now(self.task, change, || work(change));
        let mut times = 0;
        // As a rule nothing has panicked, and no change is worth its name as a text.
        if !self.failed.is_empty()
            && let Some(before) = self.failed.remove(&change.to_string())
        {
            times = before.times;
            // What came first goes first; where it panics again, the newer one says more.
            before.change.inspect(|before| drop(work(before)));
        }
        if work(&change).is_err() {
            let about = change.to_string();
            let failed = Failed {
                times: times.saturating_add(1),
                at: later(Instant::now(), RETRY.pause(times)),
                change: Some(change),
            };
            self.failed.insert(about, failed);
        }
    }

    /// Whether there is a change to take in again.
    pub fn waits(&self) -> bool {
        self.failed.values().any(|failed| failed.change.is_some())
    }

    /// The next change to take in again; waits for ever where there is none.
    pub async fn again(&mut self) -> C {
        let waiting = self.failed.values_mut().filter(|failed| failed.change.is_some());
        let Some(first) = waiting.min_by_key(|failed| failed.at) else {
            return pending().await;
        };
        sleep_until(first.at).await;
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

    /// Changes of an object, by number; `bad` ones panic.
    struct Numbered(&'static str, u32);

    impl Display for Numbered {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_panics_is_taken_in_again_after_growing_pauses_and_before_what_comes_later() {
        let mut intake = Intake::new("an intake test");
        let mut taken = Vec::new();
        let mut take = |intake: &mut Intake<_>, change, bad: &[u32]| {
            intake.take(change, |Numbered(name, number)| {
                assert!(!bad.contains(number), "index out of bounds");
                taken.push((*name, *number));
            });
        };
        let begun = Instant::now();
        take(&mut intake, Numbered("a", 1), &[1]);
        take(&mut intake, Numbered("b", 2), &[]);
        for pause in [200, 600, 1400] {
            let again = intake.again().await;
            assert_eq!(begun.elapsed(), Duration::from_millis(pause));
            take(&mut intake, again, &[1]);
        }
        take(&mut intake, Numbered("a", 3), &[]);
        take(&mut intake, Numbered("c", 4), &[4]);
        take(&mut intake, Numbered("c", 5), &[4, 5]);
        let again = intake.again().await;
        take(&mut intake, again, &[]);
        assert_eq!(taken, [("b", 2), ("a", 1), ("a", 3), ("c", 5)]);
        let none = tokio::time::timeout(Duration::from_secs(3600), intake.again());
        assert!(none.await.is_err());
    }
}
