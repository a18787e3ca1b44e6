//! The steps that the process is running.
//!
//! A controller marks each piece of work that must end: every call in it has a deadline, so the longest duration of the whole
//! is known. A step that runs long after that hangs, which is a defect that only a restart repairs. Waiting for an
//! event is not such a step, unless the end of the wait is known.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a step may exceed its limit: a starved or stopped machine is late, too.
pub const HANG_MARGIN: Duration = Duration::from_secs(60);

/// All steps of the process; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    inner: Arc<Mutex<StepTable>>,
}

#[derive(Debug, Default)]
struct StepTable {
    next_id: u64,
    steps: BTreeMap<u64, InFlight>,
}

#[derive(Debug)]
struct InFlight {
    controller: &'static str,
    what: String,
    since: Instant,
    /// `None` while it waits for an event that may never happen.
    limit: Option<Duration>,
}

impl InFlight {
    /// The message for a step that is long overdue.
    fn overdue_message(&self, now: Instant) -> Option<String> {
        let limit = self.limit?;
        let age = now.saturating_duration_since(self.since);
        (age > limit.saturating_add(HANG_MARGIN)).then(|| {
            let Self { controller, what, .. } = self;
            format!(
                "{controller}: {what} has been running for {} s (limit {} s)",
                age.as_secs(),
                limit.as_secs_f64().ceil()
            )
        })
    }
}

/// A running step; dropping it ends the step.
#[derive(Debug)]
pub struct ProgressStep {
    progress: Progress,
    id: u64,
}

impl Progress {
    /// Marks that `controller` begins `what`, which takes at most `limit`.
    #[must_use]
    pub fn begin(&self, controller: &'static str, what: impl Into<String>, limit: Duration) -> ProgressStep {
        self.insert(controller, what.into(), Some(limit), Instant::now())
    }

    /// Marks that `controller` waits; for a loop, which then reports its activity with the step's methods.
    #[must_use]
    pub fn begin_idle(&self, controller: &'static str) -> ProgressStep {
        self.insert(controller, String::new(), None, Instant::now())
    }

    /// One line for each step that is long overdue.
    #[must_use]
    pub fn overdue(&self) -> String {
        self.overdue_at(Instant::now())
    }

    /// A step that began some time ago.
    #[cfg(any(test, feature = "testing"))]
    pub fn begin_ago(
        &self,
        controller: &'static str,
        what: &str,
        limit: Duration,
        ago: Duration,
    ) -> ProgressStep {
        let since = Instant::now().checked_sub(ago).unwrap_or_else(Instant::now);
        self.insert(controller, what.to_owned(), Some(limit), since)
    }

    fn insert(
        &self,
        controller: &'static str,
        what: String,
        limit: Option<Duration>,
        since: Instant,
    ) -> ProgressStep {
        let mut table = self.lock();
        let id = table.next_id;
        table.next_id += 1;
        let in_flight = InFlight {
            controller,
            what,
            since,
            limit,
        };
        table.steps.insert(id, in_flight);
        ProgressStep {
            progress: self.clone(),
            id,
        }
    }

    /// The overdue steps at `now`.
    #[must_use]
    pub fn overdue_at(&self, now: Instant) -> String {
        let mut text = String::new();
        for line in self
            .lock()
            .steps
            .values()
            .filter_map(|step| step.overdue_message(now))
        {
            // Writing into a String cannot fail.
            let _ = writeln!(text, "{line}");
        }
        text
    }

    fn lock(&self) -> MutexGuard<'_, StepTable> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProgressStep {
    /// The controller continues with `what`, which takes at most `limit`.
    pub fn set_activity(&self, what: impl Into<String>, limit: Duration) {
        self.update(what.into(), Some(limit), Instant::now());
    }

    /// The controller waits for an event, for `at_most` at the longest if that is set.
    pub fn set_idle(&self, at_most: Option<Duration>) {
        self.update("waiting for its next turn".to_owned(), at_most, Instant::now());
    }

    fn update(&self, what: String, limit: Option<Duration>, since: Instant) {
        if let Some(in_flight) = self.progress.lock().steps.get_mut(&self.id) {
            in_flight.what = what;
            in_flight.limit = limit;
            in_flight.since = since;
        }
    }
}

impl Drop for ProgressStep {
    fn drop(&mut self) {
        self.progress.lock().steps.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Op {
        Begin(u64),
        Now(usize, u64),
        Idle(usize, Option<u64>),
        End(usize),
        Pass(u64),
    }

    fn any_op() -> impl Strategy<Value = Op> {
        let limit = 0_u64..200;
        prop_oneof![
            limit.clone().prop_map(Op::Begin),
            (0_usize..4, limit.clone()).prop_map(|(n, l)| Op::Now(n, l)),
            (0_usize..4, prop::option::of(limit)).prop_map(|(n, l)| Op::Idle(n, l)),
            (0_usize..4).prop_map(Op::End),
            (0_u64..150).prop_map(Op::Pass),
        ]
    }

    proptest! {
        /// A step is overdue exactly if it is older than its limit and the margin, after any sequence of operations.
        #[test]
        fn overdue_is_past_timeout_and_margin(ops in prop::collection::vec(any_op(), 0..60)) {
            let progress = Progress::default();
            let start = Instant::now();
            let at = |second: u64| start + Duration::from_secs(second);
            let (mut now, mut steps, mut model) = (0_u64, Vec::new(), Vec::new());
            for op in ops {
                match op {
                    Op::Begin(limit) => {
                        let limit = Some(Duration::from_secs(limit));
                        steps.push(progress.insert("d", "w".to_owned(), limit, at(now)));
                        model.push((now, limit));
                    }
                    Op::Now(n, limit) => if let Some(step) = steps.get(n) {
                        step.update("n".to_owned(), Some(Duration::from_secs(limit)), at(now));
                        model[n] = (now, Some(Duration::from_secs(limit)));
                    },
                    Op::Idle(n, limit) => if let Some(step) = steps.get(n) {
                        let limit = limit.map(Duration::from_secs);
                        step.update("i".to_owned(), limit, at(now));
                        model[n] = (now, limit);
                    },
                    Op::End(n) => if n < steps.len() {
                        steps.remove(n);
                        model.remove(n);
                    },
                    Op::Pass(seconds) => now += seconds,
                }
                let late = model.iter().filter(|(since, limit)| {
                    limit.is_some_and(|l| now - since > l.as_secs() + HANG_MARGIN.as_secs())
                });
                prop_assert_eq!(progress.overdue_at(at(now)).lines().count(), late.count());
            }
            drop(steps);
            prop_assert!(progress.lock().steps.is_empty());
        }
    }

    #[test]
    fn overdue_step_is_reported_with_its_age() {
        let progress = Progress::default();
        let step = progress.begin("image pull", "pulling nginx:1", Duration::from_secs(600));
        let later = |s| Instant::now() + Duration::from_secs(s);
        assert_eq!(progress.overdue_at(later(655)), "");
        assert_eq!(
            progress.overdue_at(later(700)),
            "image pull: pulling nginx:1 has been running for 700 s (limit 600 s)\n"
        );
        step.set_idle(None);
        assert_eq!(progress.overdue_at(later(1_000_000)), "");
    }
}
