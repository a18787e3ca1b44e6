//! A panic ends the piece of work that it is in, and nothing else: not the process, not anybody else's work.
//!
//! What is worked on by key or by request runs in [`isolated`]; the caller treats [`Panicked`] as a failure of that key or
//! request alone, with its usual back-off.

use std::any::Any;
use std::fmt::Display;
use std::panic::AssertUnwindSafe;

use futures::FutureExt;

use super::metrics::metrics;

/// A piece of work ended in a panic; the message of the panic is in it, cut to 200 characters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("panic: {0}")]
pub struct Panicked(pub String);

/// Longest message of a panic that is kept, in characters: it may quote what came from outside.
const LONGEST: usize = 200;

/// Runs `work` and turns a panic in it into an error, logged with what was worked on and counted by `task`.
///
/// # Errors
/// [`Panicked`] when `work` panicked. What it shared with others may be half-written then: locks are taken over as
/// they are, so keep changes under a lock short and free of what can panic.
pub async fn isolated<T>(
    task: &'static str,
    object: impl Display,
    work: impl Future<Output = T>,
) -> Result<T, Panicked> {
    #[cfg(any(test, feature = "testing"))]
    let work = injected::panicking(injected::wanted(task, &object), work);
    let ended = AssertUnwindSafe(work).catch_unwind().await;
    ended.map_err(|panic| count(task, &object, &*panic))
}

/// The same for work that does not wait.
///
/// # Errors
/// [`Panicked`] when `work` panicked.
pub fn isolated_now<T>(
    task: &'static str,
    object: impl Display,
    work: impl FnOnce() -> T,
) -> Result<T, Panicked> {
    #[cfg(any(test, feature = "testing"))]
    let wanted = injected::wanted(task, &object);
    let work = || {
        #[cfg(any(test, feature = "testing"))]
        injected::panic_if(wanted);
        work()
    };
    std::panic::catch_unwind(AssertUnwindSafe(work)).map_err(|panic| count(task, &object, &*panic))
}

fn count(task: &'static str, object: &impl Display, panic: &(dyn Any + Send)) -> Panicked {
    let message = message(panic);
    metrics().panics.get_or_create(&[("task", task.to_owned())]).inc();
    tracing::error!(task, %object, panic = message, "recovered from a panic");
    Panicked(message)
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    text.chars().take(LONGEST).collect()
}

/// Logs where each panic happened, in the format of all other log lines, instead of Rust's own text.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|info| {
        let location = info.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(location, panic = message(info.payload()), "panic");
    }));
}

/// Panics that tests ask for: what is [`isolated`] somewhere is shown to survive them there.
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::panic)]
pub mod injected {
    use std::fmt::Display;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex, PoisonError};

    static WANTED: Mutex<Vec<Arc<Injected>>> = Mutex::new(Vec::new());

    struct Injected {
        task: &'static str,
        object: String,
        times: AtomicUsize,
    }

    /// Work of `task` on `object` panics until what is returned is dropped.
    pub fn panic_at(task: &'static str, object: &str) -> Held {
        let times = AtomicUsize::new(0);
        let object = object.to_owned();
        let injected = Arc::new(Injected { task, object, times });
        lock().push(Arc::clone(&injected));
        Held(injected)
    }

    /// Ends the panics when it is dropped.
    pub struct Held(Arc<Injected>);

    impl Held {
        /// How often it panicked.
        pub fn times(&self) -> usize {
            self.0.times.load(Ordering::SeqCst)
        }

        /// Waits until it has panicked that often.
        pub async fn happened(&self, times: usize) {
            let happened = async {
                while self.times() < times {
                    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                }
            };
            let limit = std::time::Duration::from_secs(600);
            let (task, object) = (self.0.task, &self.0.object);
            tokio::time::timeout(limit, happened)
                .await
                .unwrap_or_else(|_| panic!("{task}, {object}: panicked {} of {times} times", self.times()));
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            lock().retain(|injected| !Arc::ptr_eq(injected, &self.0));
        }
    }

    fn lock() -> std::sync::MutexGuard<'static, Vec<Arc<Injected>>> {
        WANTED.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wanted(task: &str, object: &impl Display) -> bool {
        let wanted = lock();
        let about =
            |injected: &&Arc<Injected>| injected.task == task && injected.object == object.to_string();
        let found = wanted.iter().find(about);
        found.inspect(|injected| _ = injected.times.fetch_add(1, Ordering::SeqCst));
        found.is_some()
    }

    pub(super) fn panic_if(wanted: bool) {
        assert!(!wanted, "injected");
    }

    pub(super) async fn panicking<T>(wanted: bool, work: impl Future<Output = T>) -> T {
        panic_if(wanted);
        work.await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_error_of_that_work_alone() {
        let bad = isolated("a panic test", "ns/bad", async { panic!("index {}", 7) });
        let good = isolated("a panic test", "ns/good", async { 1 });
        let (bad, good): (Result<(), _>, _) = (bad.await, good.await);
        assert_eq!(bad, Err(Panicked("index 7".to_owned())));
        assert_eq!(good, Ok(1));
        let long: Result<(), _> = isolated_now("a panic test", "x", || panic!("{}", "é".repeat(1000)));
        assert_eq!(long.unwrap_err().0.chars().count(), LONGEST);
        let counted = metrics()
            .panics
            .get_or_create(&[("task", "a panic test".to_owned())])
            .get();
        assert_eq!(counted, 2);
    }
}
