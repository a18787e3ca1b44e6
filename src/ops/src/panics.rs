//! A panic ends only the piece of work in which it happens: not the process, and no other work.
//!
//! Work by key or by request runs in [`catch_panic`]; the caller treats [`Panicked`] as a failure of that key or
//! request alone, with its usual back-off.

use std::any::Any;
use std::fmt::Display;
use std::panic::AssertUnwindSafe;

use futures::FutureExt;

use super::metrics::metrics;

/// A piece of work panicked; it contains the panic message, cut to 200 characters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("panic: {0}")]
pub struct Panicked(pub String);

/// Longest panic message that is kept, in characters: it may quote external input.
const MAX_MESSAGE_CHARS: usize = 200;

/// Runs `work` and turns a panic in it into an error, logged with the object and counted by `task`.
///
/// # Errors
/// [`Panicked`] when `work` panicked. Shared state may be half-written then, and poisoned locks are used as they are:
/// keep changes under a lock short and free of code that can panic.
pub async fn catch_panic<T>(
    task: &'static str,
    object: impl Display,
    work: impl Future<Output = T>,
) -> Result<T, Panicked> {
    #[cfg(any(test, feature = "testing"))]
    let work = injected::panicking(injected::should_panic(task, &object), work);
    let result = AssertUnwindSafe(work).catch_unwind().await;
    result.map_err(|panic| record_panic(task, &object, &*panic))
}

/// The same for synchronous work.
///
/// # Errors
/// [`Panicked`] when `work` panicked.
pub fn catch_panic_sync<T>(
    task: &'static str,
    object: impl Display,
    work: impl FnOnce() -> T,
) -> Result<T, Panicked> {
    #[cfg(any(test, feature = "testing"))]
    let inject = injected::should_panic(task, &object);
    let work = || {
        #[cfg(any(test, feature = "testing"))]
        injected::panic_if(inject);
        work()
    };
    std::panic::catch_unwind(AssertUnwindSafe(work)).map_err(|panic| record_panic(task, &object, &*panic))
}

fn record_panic(task: &'static str, object: &impl Display, panic: &(dyn Any + Send)) -> Panicked {
    let message = panic_message(panic);
    metrics().panics.get_or_create(&[("task", task.to_owned())]).inc();
    tracing::error!(task, %object, panic = message, "recovered from a panic");
    Panicked(message)
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    text.chars().take(MAX_MESSAGE_CHARS).collect()
}

/// Logs the location of each panic, in the format of all other log lines, instead of Rust's own text.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|info| {
        let location = info.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(location, panic = panic_message(info.payload()), "panic");
    }));
}

/// Panics injected by tests, to show that work in [`catch_panic`] survives them.
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::panic)]
pub mod injected {
    use std::fmt::Display;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex, PoisonError};
    use std::thread::{self, ThreadId};

    static INJECTED: Mutex<Vec<Arc<Injected>>> = Mutex::new(Vec::new());

    struct Injected {
        task: &'static str,
        object: String,
        /// Of the test: others run beside it, with the same tasks.
        thread: ThreadId,
        count: AtomicUsize,
    }

    /// Work of `task` on `object` panics until the result is dropped, on this thread.
    pub fn inject_panic(task: &'static str, object: &str) -> InjectedPanic {
        let times = AtomicUsize::new(0);
        let object = object.to_owned();
        let injected = Arc::new(Injected {
            task,
            object,
            thread: thread::current().id(),
            count: times,
        });
        lock().push(Arc::clone(&injected));
        InjectedPanic(injected)
    }

    /// Ends the panics when it is dropped.
    pub struct InjectedPanic(Arc<Injected>);

    impl InjectedPanic {
        /// How often it panicked.
        pub fn times(&self) -> usize {
            self.0.count.load(Ordering::SeqCst)
        }

        /// Waits until it has panicked that often.
        pub async fn wait_for(&self, times: usize) {
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

    impl Drop for InjectedPanic {
        fn drop(&mut self) {
            lock().retain(|injected| !Arc::ptr_eq(injected, &self.0));
        }
    }

    fn lock() -> std::sync::MutexGuard<'static, Vec<Arc<Injected>>> {
        INJECTED.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn should_panic(task: &str, object: &impl Display) -> bool {
        let injected = lock();
        let thread = thread::current().id();
        let matches = |injected: &&Arc<Injected>| {
            (injected.task, injected.thread) == (task, thread) && injected.object == object.to_string()
        };
        let found = injected.iter().find(matches);
        found.inspect(|injected| _ = injected.count.fetch_add(1, Ordering::SeqCst));
        found.is_some()
    }

    pub(super) fn panic_if(inject: bool) {
        assert!(!inject, "injected");
    }

    pub(super) async fn panicking<T>(inject: bool, work: impl Future<Output = T>) -> T {
        panic_if(inject);
        work.await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    #[tokio::test]
    async fn panic_is_an_error_of_that_work_only() {
        let bad = catch_panic("a panic test", "ns/bad", async { panic!("index {}", 7) });
        let good = catch_panic("a panic test", "ns/good", async { 1 });
        let (bad, good): (Result<(), _>, _) = (bad.await, good.await);
        assert_eq!(bad, Err(Panicked("index 7".to_owned())));
        assert_eq!(good, Ok(1));
        let long: Result<(), _> = catch_panic_sync("a panic test", "x", || panic!("{}", "é".repeat(1000)));
        assert_eq!(long.unwrap_err().0.chars().count(), MAX_MESSAGE_CHARS);
        let counted = metrics()
            .panics
            .get_or_create(&[("task", "a panic test".to_owned())])
            .get();
        assert_eq!(counted, 2);
    }
}
