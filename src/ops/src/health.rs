//! Health in words: what a probe, or a person, is told.
//!
//! Liveness is about ourselves: an event loop that turns, and no step of a duty that should have ended long ago.
//! Readiness is about our surroundings: stores that are not filled, a runtime that does not answer. A broken
//! neighbour never restarts us.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Progress, Watches};

/// Name of the check of watches, which time alone may fail: it is done when somebody asks, as kubelet does.
const WATCHES_CHECK: &str = "watches";

/// The health of the process; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// What the duties are in the middle of.
    pub progress: Progress,
    /// When the API server was last heard of about each watched kind.
    pub watches: Watches,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    readiness: BTreeMap<String, Result<String, String>>,
}

/// What is answered to a probe.
#[derive(Debug, PartialEq, Eq)]
pub struct HealthResponse {
    /// Whether all is well.
    pub ok: bool,
    /// One line a check.
    pub text: String,
}

impl Health {
    /// Says that `check` is fine, and how.
    pub fn set_ready(&self, check: &str, how: impl Into<String>) {
        let how = how.into();
        let before = self.lock().readiness.insert(check.to_owned(), Ok(how.clone()));
        if matches!(before, Some(Err(_))) {
            tracing::info!(check, how, "ready again");
        }
    }

    /// Says that `check` is not fine, and why. Kubelet does not show it, so the log does, once for each time.
    pub fn set_not_ready(&self, check: &str, why: impl Into<String>) {
        let why = why.into();
        let before = self.lock().readiness.insert(check.to_owned(), Err(why.clone()));
        match before {
            None => tracing::info!(check, why, "not ready yet"),
            Some(Ok(_)) => tracing::warn!(check, why, "not ready"),
            Some(Err(_)) => {}
        }
    }

    /// The answer to `/healthz`: one line for each step that hangs, else `ok`. That it comes at all says that the
    /// event loop turns, which all work shares.
    #[must_use]
    pub fn liveness(&self) -> HealthResponse {
        let overdue = self.progress.overdue();
        let ok = overdue.is_empty();
        let text = if ok { "ok".to_owned() } else { overdue };
        HealthResponse { ok, text }
    }

    /// The answer to `/readyz`: every check with its words.
    #[must_use]
    pub fn readiness(&self) -> HealthResponse {
        match self.watches.readiness() {
            Some(Ok(how)) => self.set_ready(WATCHES_CHECK, how),
            Some(Err(why)) => self.set_not_ready(WATCHES_CHECK, why),
            None => {}
        }
        let checks = self.lock().readiness.clone();
        let mut text = String::new();
        for (check, state) in &checks {
            let (mark, message) = match state {
                Ok(how) => ("ok ", how),
                Err(why) => ("NOT READY ", why),
            };
            // Writing into a String cannot fail.
            let _ = writeln!(text, "{mark}{check}: {message}");
        }
        let ok = checks.values().all(Result::is_ok);
        HealthResponse { ok, text }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_lists_every_check() {
        let health = Health::default();
        health.set_ready("admission", "has a certificate");
        let watch = health.watches.register("NodeImage");
        health.set_not_ready("runtime", "no socket under /hostvarrun");
        let answer = health.readiness();
        assert!(!answer.ok);
        assert_eq!(
            answer.text,
            "ok admission: has a certificate\nNOT READY runtime: no socket under /hostvarrun\n\
             NOT READY watches: NodeImage is not listed yet\n"
        );
        health.set_ready("runtime", "containerd answers");
        assert!(!health.readiness().ok);
        watch.mark_listed();
        assert!(health.readiness().ok);
    }
}
