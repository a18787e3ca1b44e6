//! All long-lived tasks in one set: when one of them ends, the process ends.
//!
//! A panic in a task also ends the process, after a graceful shutdown: its memory cannot be trusted, and a start
//! rebuilds it within a second. Work by key or request is isolated inside the tasks.

use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::panics::catch_panic;

/// How long tasks may take to end after the signal, unless set otherwise; a process manager sees the exit within two
/// seconds.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(1800);

/// The same for tasks that a task of another supervisor runs: the rest of the time is left for what that task does last.
const NESTED_SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(1200);

/// Why the process ended on its own.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A task that should run forever ended.
    #[error("{task} ended: {why}")]
    TaskEnded {
        /// The task's name.
        task: &'static str,
        /// Its error.
        why: String,
    },
    /// No signal handler could be installed.
    #[error("cannot listen for signals: {0}")]
    Signals(#[from] std::io::Error),
}

/// Runs tasks until a signal arrives or one of them ends.
pub struct Supervisor {
    /// How long tasks may take to end after the signal.
    pub shutdown_timeout: Duration,
    /// Cancelled at SIGTERM or SIGINT, or when a task has ended; every task watches it.
    pub shutdown: CancellationToken,
    tasks: JoinSet<(&'static str, Result<(), String>)>,
}

impl Default for Supervisor {
    fn default() -> Self {
        Self {
            shutdown_timeout: SHUTDOWN_TIMEOUT,
            shutdown: CancellationToken::new(),
            tasks: JoinSet::new(),
        }
    }
}

impl Supervisor {
    /// For a task of another supervisor, which shuts down with `shutdown`. A task that ends here does not look like a
    /// shutdown there.
    #[must_use]
    pub fn nested(shutdown: &CancellationToken) -> Self {
        Self {
            shutdown_timeout: NESTED_SHUTDOWN_TIMEOUT,
            shutdown: shutdown.child_token(),
            ..Self::default()
        }
    }

    /// Starts a task that runs until shutdown.
    pub fn spawn<E: std::fmt::Display>(
        &mut self,
        name: &'static str,
        task: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        self.tasks.spawn(async move {
            let result = catch_panic(name, "the whole task", task).await;
            (
                name,
                result.map_or_else(
                    |panicked| Err(panicked.to_string()),
                    |done| done.map_err(|e| e.to_string()),
                ),
            )
        });
    }

    /// Starts a task that never returns and needs no clean-up: it is dropped at shutdown.
    pub fn spawn_endless(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let shutdown = self.shutdown.clone();
        self.spawn(name, async move {
            let ended = shutdown.run_until_cancelled(task).await;
            ended.map_or(Ok(()), |()| Err("it returned"))
        });
    }

    /// Waits for a signal, then for a short time for the tasks to finish their writes.
    ///
    /// # Errors
    /// When a task ended before a signal arrived.
    pub async fn run(mut self) -> Result<(), Error> {
        let mut term = signal(SignalKind::terminate())?;
        let mut int = signal(SignalKind::interrupt())?;
        let first = tokio::select! {
            _ = term.recv() => None,
            _ = int.recv() => None,
            () = self.shutdown.cancelled() => None,
            ended = self.tasks.join_next() => ended,
        };
        self.shutdown.cancel();
        let result = match first {
            None => Ok(()),
            Some(ended) => Err(task_error(ended)),
        };
        match &result {
            Ok(()) => tracing::info!("shutting down"),
            Err(error) => tracing::error!(%error, "shutting down"),
        }
        self.wait_for_tasks().await;
        result
    }

    async fn wait_for_tasks(&mut self) {
        let deadline = Instant::now() + self.shutdown_timeout;
        while !self.tasks.is_empty() {
            match tokio::time::timeout_at(deadline, self.tasks.join_next()).await {
                Ok(Some(Ok((task, Err(error))))) => tracing::warn!(task, error, "task failed at shutdown"),
                Ok(_) => {}
                Err(_) => {
                    tracing::warn!(left = self.tasks.len(), "tasks did not end in time");
                    self.tasks.abort_all();
                    return;
                }
            }
        }
    }
}

fn task_error(ended: Result<(&'static str, Result<(), String>), tokio::task::JoinError>) -> Error {
    match ended {
        Ok((task, Ok(()))) => Error::TaskEnded {
            task,
            why: "it returned".to_owned(),
        },
        Ok((task, Err(why))) => Error::TaskEnded { task, why },
        Err(error) => Error::TaskEnded {
            task: "a task",
            why: error.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic)]
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[tokio::test]
    async fn panicking_task_ends_the_process_with_its_name() {
        let mut supervisor = Supervisor::default();
        let shutdown = supervisor.shutdown.clone();
        supervisor.spawn_endless("image pull", async { panic!("index out of bounds") });
        let ended = supervisor.run().await.map_err(|e| e.to_string());
        assert_eq!(
            ended,
            Err("image pull ended: panic: index out of bounds".to_owned())
        );
        assert!(shutdown.is_cancelled(), "the others shut down");
    }

    #[tokio::test]
    async fn ended_task_stops_the_others() {
        let mut supervisor = Supervisor::default();
        let shutdown = supervisor.shutdown.clone();
        supervisor.spawn("waits", async move {
            shutdown.cancelled().await;
            Ok::<_, String>(())
        });
        supervisor.spawn("fails", async { Err("no luck") });
        let ended = supervisor.run().await.map_err(|e| e.to_string());
        assert_eq!(ended, Err("fails ended: no luck".to_owned()));
    }

    #[tokio::test(start_paused = true)]
    async fn task_with_its_own_supervisor_has_time_after_tasks_that_do_not_end() {
        let mut outer = Supervisor::default();
        let shutdown = outer.shutdown.clone();
        let released = Arc::new(AtomicBool::new(false));
        let (at_end, outer_shutdown) = (Arc::clone(&released), shutdown.clone());
        outer.spawn("controllers", async move {
            let mut inner = Supervisor::nested(&outer_shutdown);
            inner.spawn("hangs", std::future::pending::<Result<(), String>>());
            let ended = inner.run().await;
            tokio::time::sleep(Duration::from_millis(500)).await;
            at_end.store(true, Ordering::Relaxed);
            ended
        });
        shutdown.cancel();
        assert!(outer.run().await.is_ok());
        assert!(
            released.load(Ordering::Relaxed),
            "the task finished its own clean-up"
        );
    }
}
