//! Health in words: what a probe, or a person, is told.
//!
//! Liveness is about ourselves: a pass of work that does not end. Readiness is about our surroundings:
//! stores that are not filled, a runtime that does not answer. A broken neighbour never restarts us.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The health of the process; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Health {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    readiness: BTreeMap<String, Result<String, String>>,
    passes: BTreeMap<&'static str, (Instant, Duration)>,
}

/// What is answered to a probe.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether all is well.
    pub ok: bool,
    /// One line a check.
    pub text: String,
}

impl Health {
    /// Says that `check` is fine, and how.
    pub fn ready(&self, check: &str, how: impl Into<String>) {
        self.lock().readiness.insert(check.to_owned(), Ok(how.into()));
    }

    /// Says that `check` is not fine, and why.
    pub fn unready(&self, check: &str, why: impl Into<String>) {
        self.lock().readiness.insert(check.to_owned(), Err(why.into()));
    }

    /// Marks that a pass of `task` has begun; the process counts as dead when it takes longer than `limit`.
    /// The pass ends when the result is dropped.
    #[must_use]
    pub fn pass(&self, task: &'static str, limit: Duration) -> Pass {
        self.lock().passes.insert(task, (Instant::now(), limit));
        Pass {
            health: self.clone(),
            task,
        }
    }

    /// The answer to `/healthz`.
    #[must_use]
    pub fn live(&self) -> Answer {
        let inner = self.lock();
        let stuck: Vec<String> = inner
            .passes
            .iter()
            .filter(|(_, (begun, limit))| begun.elapsed() > *limit)
            .map(|(task, (begun, limit))| {
                format!(
                    "{task}: one pass takes {}s already, limit {}s\n",
                    begun.elapsed().as_secs(),
                    limit.as_secs()
                )
            })
            .collect();
        Answer {
            ok: stuck.is_empty(),
            text: if stuck.is_empty() {
                "ok".to_owned()
            } else {
                stuck.concat()
            },
        }
    }

    /// The answer to `/readyz`: every check with its words.
    #[must_use]
    pub fn readiness(&self) -> Answer {
        let inner = self.lock();
        let mut text = String::new();
        for (check, state) in &inner.readiness {
            let (mark, words) = match state {
                Ok(how) => ("ok ", how),
                Err(why) => ("NOT READY ", why),
            };
            // Writing into a String cannot fail.
            let _ = writeln!(text, "{mark}{check}: {words}");
        }
        let ok = inner.readiness.values().all(Result::is_ok);
        Answer { ok, text }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pass of work in progress.
#[derive(Debug)]
pub struct Pass {
    health: Health,
    task: &'static str,
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.health.lock().passes.remove(self.task);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_that_does_not_end_is_named() {
        let health = Health::default();
        assert!(health.live().ok);
        let pass = health.pass("image_pull", Duration::ZERO);
        std::thread::yield_now();
        let answer = health.live();
        assert!(
            !answer.ok && answer.text.starts_with("image_pull: "),
            "{answer:?}"
        );
        drop(pass);
        assert!(health.live().ok);
    }

    #[test]
    fn readiness_says_every_check_in_words() {
        let health = Health::default();
        health.ready("watch NodeImage", "synced");
        health.unready("runtime", "no socket under /hostvarrun");
        let answer = health.readiness();
        assert!(!answer.ok);
        assert_eq!(
            answer.text,
            "NOT READY runtime: no socket under /hostvarrun\nok watch NodeImage: synced\n"
        );
    }
}
