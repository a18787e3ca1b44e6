//! Health as text for probes and users.
//!
//! Liveness covers the process itself: the event loop runs, and no step of a duty is overdue. Readiness covers its
//! surroundings: stores that are not synced, a runtime that does not answer. A broken dependency never restarts the
//! process.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

use super::metrics::metrics;
use super::{Progress, Watches};

/// Name of the check of watches, which can fail by time alone: it is evaluated on request, when kubelet probes.
const WATCHES_CHECK: &str = "watches";

/// The health of the process; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// The steps that the duties are running.
    pub progress: Progress,
    /// When the API server last answered about each watched kind.
    pub watches: Watches,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    readiness: BTreeMap<String, Result<String, String>>,
}

/// The response to a probe.
#[derive(Debug, PartialEq, Eq)]
pub struct HealthResponse {
    /// Whether all checks pass.
    pub ok: bool,
    /// One line per check.
    pub text: String,
}

impl Health {
    /// Marks `check` as passed, with a message.
    pub fn set_ready(&self, check: &str, how: impl Into<String>) {
        let how = how.into();
        record_check(check, true);
        let before = self.lock().readiness.insert(check.to_owned(), Ok(how.clone()));
        if matches!(before, Some(Err(_))) {
            tracing::info!(check, how, "ready again");
        }
    }

    /// Marks `check` as failed, with the reason. Kubelet does not show it, so each transition is logged.
    pub fn set_not_ready(&self, check: &str, why: impl Into<String>) {
        let why = why.into();
        record_check(check, false);
        let before = self.lock().readiness.insert(check.to_owned(), Err(why.clone()));
        match before {
            None => tracing::info!(check, why, "not ready yet"),
            Some(Ok(_)) => tracing::warn!(check, why, "not ready"),
            Some(Err(_)) => {}
        }
    }

    /// The response to `/healthz`: one line for each step that hangs, else `ok`. The response itself shows that the
    /// event loop runs, which all work shares.
    #[must_use]
    pub fn liveness(&self) -> HealthResponse {
        let overdue = self.progress.overdue();
        let ok = overdue.is_empty();
        let text = if ok { "ok".to_owned() } else { overdue };
        HealthResponse { ok, text }
    }

    /// The response to `/readyz`: every check with its message.
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

fn record_check(check: &str, passes: bool) {
    let labels = [("check", check.to_owned())];
    let gauge = metrics().readiness_checks.get_or_create_owned(&labels);
    gauge.set(i64::from(passes));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_follows_a_check() {
        let health = Health::default();
        let has_metric = |value: &str| {
            let line = format!("kruise_readiness_check{{check=\"a check\"}} {value}\n");
            metrics().render().contains(&line)
        };
        health.set_not_ready("a check", "no answer");
        assert!(has_metric("0"));
        health.set_ready("a check", "answers");
        assert!(has_metric("1"));
    }

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
