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
const WATCHES: &str = "watches";

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
pub struct Answer {
    /// Whether all is well.
    pub ok: bool,
    /// One line a check.
    pub text: String,
}

impl Health {
    /// Says that `check` is fine, and how.
    pub fn ready(&self, check: &str, how: impl Into<String>) {
        let how = how.into();
        let before = self.lock().readiness.insert(check.to_owned(), Ok(how.clone()));
        if matches!(before, Some(Err(_))) {
            tracing::info!(check, how, "ready again");
        }
    }

    /// Says that `check` is not fine, and why. Kubelet does not show it, so the log does, once for each time.
    pub fn unready(&self, check: &str, why: impl Into<String>) {
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
    pub fn live(&self) -> Answer {
        let late = self.progress.late();
        let ok = late.is_empty();
        let text = if ok { "ok".to_owned() } else { late };
        Answer { ok, text }
    }

    /// The answer to `/readyz`: every check with its words.
    #[must_use]
    pub fn readiness(&self) -> Answer {
        match self.watches.check() {
            Some(Ok(how)) => self.ready(WATCHES, how),
            Some(Err(why)) => self.unready(WATCHES, why),
            None => {}
        }
        let checks = self.lock().readiness.clone();
        let mut text = String::new();
        for (check, state) in &checks {
            let (mark, words) = match state {
                Ok(how) => ("ok ", how),
                Err(why) => ("NOT READY ", why),
            };
            // Writing into a String cannot fail.
            let _ = writeln!(text, "{mark}{check}: {words}");
        }
        let ok = checks.values().all(Result::is_ok);
        Answer { ok, text }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_says_every_check_in_words() {
        let health = Health::default();
        health.ready("admission", "has a certificate");
        let watch = health.watches.begin("NodeImage");
        health.unready("runtime", "no socket under /hostvarrun");
        let answer = health.readiness();
        assert!(!answer.ok);
        assert_eq!(
            answer.text,
            "ok admission: has a certificate\nNOT READY runtime: no socket under /hostvarrun\n\
             NOT READY watches: NodeImage is not listed yet\n"
        );
        health.ready("runtime", "containerd answers");
        assert!(!health.readiness().ok);
        watch.listed();
        assert!(health.readiness().ok);
    }
}
