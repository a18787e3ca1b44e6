//! Work by key: each key at most once at a time, a bounded number of keys at once, and requeues.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt::Display;
use std::hash::Hash;
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Error;
use super::retry::{RETRY_BACKOFF, instant_after};
use kruise_ops::Progress;
use kruise_ops::metrics::metrics;
use kruise_ops::panics::{Panicked, catch_panic, catch_panic_sync};
use kruise_ops::progress::ProgressStep;

/// Longest reconcile of one key: far above the sum of its calls' own deadlines.
const RECONCILE_TIMEOUT: Duration = Duration::from_secs(120);

/// When to reconcile a key again although nothing has changed; `None` if there is no need.
pub type RequeueAfter = Option<Duration>;

/// What the queue needs from a failed reconcile.
#[derive(Debug)]
pub struct ReconcileError {
    message: String,
    /// The pause that the API server requested.
    retry_after: Option<Duration>,
    /// Whether it is normal operation: another writer was faster.
    expected: bool,
}

impl ReconcileError {
    /// A failure that needs attention if it persists.
    #[must_use]
    pub fn new(message: String) -> Self {
        Self {
            message,
            retry_after: None,
            expected: false,
        }
    }
}

impl From<Error> for ReconcileError {
    fn from(error: Error) -> Self {
        Self {
            message: error.to_string(),
            retry_after: error.retry_after(),
            expected: error.conflict() || error.not_found(),
        }
    }
}

impl From<Panicked> for ReconcileError {
    fn from(panicked: Panicked) -> Self {
        Self::new(panicked.to_string())
    }
}

/// A work item, displayed by its name in the log.
pub trait QueueKey: Clone + Eq + Hash + Ord + Display + Send + 'static {}
impl<K: Clone + Eq + Hash + Ord + Display + Send + 'static> QueueKey for K {}

/// One reconcile of a key.
pub trait ReconcileFuture: Future<Output = Result<RequeueAfter, Self::Error>> + Send + 'static {
    /// Why the reconcile failed.
    type Error: Into<ReconcileError> + Send + 'static;
}

impl<F, E> ReconcileFuture for F
where
    F: Future<Output = Result<RequeueAfter, E>> + Send + 'static,
    E: Into<ReconcileError> + Send + 'static,
{
    type Error = E;
}

/// Runs `reconcile` for each key that arrives until shutdown, at most `workers` at once.
///
/// A key that arrives while it is reconciled is reconciled once more afterwards. A key whose reconcile failed is
/// retried after a pause that doubles from 0.2 s to 30 s, or after the pause that the API server requested. A reconcile
/// that does not end within 120 s is cancelled and started again; if that hangs too, `progress` reports it. A panic is
/// a failure of that key alone.
pub async fn run<K, W, F>(
    name: &'static str,
    keys: mpsc::UnboundedReceiver<K>,
    workers: usize,
    progress: &Progress,
    shutdown: CancellationToken,
    reconcile: W,
) where
    K: QueueKey,
    W: Fn(K) -> F,
    F: ReconcileFuture,
{
    let hang_detection = HangDetection {
        name,
        progress: progress.clone(),
        timeout: RECONCILE_TIMEOUT,
    };
    run_workers(keys, workers, &shutdown, hang_detection, reconcile).await;
}

/// A key and the result of its reconcile; `None` if that was cancelled.
type Finished<K> = (K, Option<Result<RequeueAfter, ReconcileError>>);

/// Detection of reconciles that hang.
struct HangDetection {
    name: &'static str,
    progress: Progress,
    /// Longest reconcile of one key.
    timeout: Duration,
}

async fn run_workers<K, W, F>(
    mut keys: mpsc::UnboundedReceiver<K>,
    workers: usize,
    shutdown: &CancellationToken,
    hang_detection: HangDetection,
    reconcile: W,
) where
    K: QueueKey,
    W: Fn(K) -> F,
    F: ReconcileFuture,
{
    let HangDetection {
        name,
        progress,
        timeout,
    } = hang_detection;
    let mut queue: Queue<K> = Queue::default();
    let mut workers_running: JoinSet<Finished<K>> = JoinSet::new();
    // A step lasts until a reconcile of its key has ended without being cancelled, however often it is cancelled.
    let mut steps: HashMap<K, ProgressStep> = HashMap::new();
    let depth = metrics()
        .queue_depth
        .get_or_create_owned(&[("name", name.to_owned())]);
    let _reset_depth = ResetDepthOnDrop(&depth);
    loop {
        while workers_running.len() < workers.max(1) {
            let Some(key) = queue.next(Instant::now()) else {
                break;
            };
            let begin = || progress.begin(name, format!("work on {key}"), timeout * 2);
            steps.entry(key.clone()).or_insert_with(begin);
            let started = catch_panic_sync(name, &key, || reconcile(key.clone()));
            workers_running.spawn(async move {
                let ended = match started {
                    Ok(work) => reconcile_one(name, key.clone(), timeout, work).await,
                    Err(panicked) => Some(Err(panicked.into())),
                };
                (key, ended)
            });
        }
        depth.set(i64::try_from(queue.ready.len()).unwrap_or(i64::MAX));
        let next_due = queue
            .next_due()
            .unwrap_or_else(|| instant_after(Instant::now(), Duration::from_secs(3600)));
        let has_free_worker = workers_running.len() < workers.max(1);
        tokio::select! {
            () = shutdown.cancelled() => return,
            key = keys.recv() => match key {
                Some(key) => queue.add(key),
                None => return,
            },
            Some(ended) = workers_running.join_next() => match ended {
                Ok((key, Some(result))) => {
                    steps.remove(&key);
                    record_result(name, &mut queue, key, result);
                }
                Ok((key, None)) => {
                    tracing::error!(name, %key, after = ?timeout, "reconcile did not finish in time; restarting it");
                    queue.restart(key);
                }
                // Reconciles do not panic and are not aborted; a key that stays marked as running is never reconciled.
                Err(error) => { tracing::error!(name, %error, "controller stopped: a task of it was lost"); return; }
            },
            () = tokio::time::sleep_until(next_due), if has_free_worker => {}
        }
    }
}

/// One reconcile of a key; `None` if it did not end within `timeout`.
async fn reconcile_one<F: ReconcileFuture>(
    name: &'static str,
    key: impl Display,
    timeout: Duration,
    work: F,
) -> Option<Result<RequeueAfter, ReconcileError>> {
    let result = tokio::time::timeout(timeout, catch_panic(name, key, work));
    Some(match result.await.ok()? {
        Ok(result) => result.map_err(Into::into),
        Err(panicked) => Err(panicked.into()),
    })
}

/// A queue that has ended, for any reason, has no waiting keys.
struct ResetDepthOnDrop<'a>(&'a Gauge);

impl Drop for ResetDepthOnDrop<'_> {
    fn drop(&mut self) {
        self.0.set(0);
    }
}

fn record_result<K: QueueKey>(
    name: &str,
    queue: &mut Queue<K>,
    key: K,
    result: Result<RequeueAfter, ReconcileError>,
) {
    let now = Instant::now();
    match result {
        Ok(requeue_after) => queue.done(&key, requeue_after, now),
        Err(error) => {
            let pause = queue.add_rate_limited(&key, error.retry_after, now);
            let retries = &metrics().queue_retries;
            retries.get_or_create(&[("name", name.to_owned())]).inc();
            let message = error.message;
            if error.expected {
                tracing::debug!(name, %key, error = message, ?pause, "not ready yet; will retry");
            } else {
                tracing::warn!(name, %key, error = message, ?pause, "reconcile failed; will retry");
            }
        }
    }
}

/// Keys that are due, being reconciled, or delayed.
struct Queue<K> {
    ready: VecDeque<K>,
    queued: HashSet<K>,
    running: HashSet<K>,
    /// Arrived while running.
    requeue_when_done: HashSet<K>,
    delayed: BTreeSet<(Instant, K)>,
    due_at: HashMap<K, Instant>,
    failures: HashMap<K, u32>,
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Self {
            ready: VecDeque::new(),
            queued: HashSet::new(),
            running: HashSet::new(),
            requeue_when_done: HashSet::new(),
            delayed: BTreeSet::new(),
            due_at: HashMap::new(),
            failures: HashMap::new(),
        }
    }
}

impl<K: Clone + Eq + Hash + Ord> Queue<K> {
    fn add(&mut self, key: K) {
        if self.running.contains(&key) {
            self.requeue_when_done.insert(key);
        } else if self.queued.insert(key.clone()) {
            self.cancel_delayed(&key);
            self.ready.push_back(key);
        }
    }

    fn next(&mut self, now: Instant) -> Option<K> {
        while self.delayed.first().is_some_and(|(at, _)| *at <= now) {
            if let Some((_, key)) = self.delayed.pop_first() {
                self.due_at.remove(&key);
                self.add(key);
            }
        }
        let key = self.ready.pop_front()?;
        self.queued.remove(&key);
        self.running.insert(key.clone());
        Some(key)
    }

    fn next_due(&self) -> Option<Instant> {
        self.delayed.first().map(|(at, _)| *at)
    }

    fn done(&mut self, key: &K, requeue_after: RequeueAfter, now: Instant) {
        self.failures.remove(key);
        self.finish(key, requeue_after.map(|after| instant_after(now, after)));
    }

    fn add_rate_limited(&mut self, key: &K, retry_after: Option<Duration>, now: Instant) -> Duration {
        let count = self.failures.entry(key.clone()).or_default();
        let backoff = RETRY_BACKOFF.delay(*count);
        *count = count.saturating_add(1);
        let pause = backoff.max(retry_after.unwrap_or_default());
        // A key that arrived meanwhile waits as well, or a failing key would loop on its own events.
        self.requeue_when_done.remove(key);
        self.finish(key, Some(instant_after(now, pause)));
        pause
    }

    /// A cancelled key comes next: the time that it waits for a worker would be taken for work.
    fn restart(&mut self, key: K) {
        self.running.remove(&key);
        self.requeue_when_done.remove(&key);
        if self.queued.insert(key.clone()) {
            self.ready.push_front(key);
        }
    }

    fn finish(&mut self, key: &K, requeue_at: Option<Instant>) {
        self.running.remove(key);
        if self.requeue_when_done.remove(key) {
            self.add(key.clone());
        } else if let Some(at) = requeue_at {
            self.cancel_delayed(key);
            self.due_at.insert(key.clone(), at);
            self.delayed.insert((at, key.clone()));
        }
    }

    fn cancel_delayed(&mut self, key: &K) {
        if let Some(at) = self.due_at.remove(key) {
            self.delayed.remove(&(at, key.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::sync::{Arc, Mutex};

    use super::*;
    use proptest::prelude::*;

    /// Runs `work` on these keys until it signals the end; returns the keys that it was called for, in order.
    async fn run_queue<F: ReconcileFuture>(
        keys: &[&str],
        reconcile: impl Fn(String, usize, CancellationToken) -> F,
    ) -> Vec<String> {
        let (keys_tx, keys_rx) = mpsc::unbounded_channel();
        for key in keys {
            keys_tx.send((*key).to_owned()).unwrap();
        }
        let (progress, stop) = (Progress::default(), CancellationToken::new());
        let calls: Arc<Mutex<Vec<String>>> = Arc::default();
        let (shutdown, recorded) = (stop.clone(), Arc::clone(&calls));
        run(
            "queue test",
            keys_rx,
            1,
            &progress,
            shutdown,
            move |key: String| {
                let mut calls = recorded.lock().unwrap();
                calls.push(key.clone());
                let nth = calls.iter().filter(|called| **called == key).count();
                drop(calls);
                reconcile(key, nth, stop.clone())
            },
        )
        .await;
        drop(keys_tx);
        let calls = calls.lock().unwrap();
        calls.clone()
    }

    #[tokio::test(start_paused = true)]
    async fn panic_in_reconcile_retries_only_that_key() {
        let start = Instant::now();
        let calls = run_queue(&["bad", "good"], |key, nth, over| async move {
            match (key.as_str(), nth) {
                ("bad", 1..4) => panic!("index out of bounds"),
                ("bad", _) => over.cancel(),
                _ => {}
            }
            Ok::<_, ReconcileError>(None)
        })
        .await;
        assert_eq!(calls, ["bad", "good", "bad", "bad", "bad"]);
        // 0.2 s, 0.4 s and 0.8 s.
        assert_eq!(
            start.elapsed().as_millis() / 100,
            14,
            "each panic is followed by its pause"
        );
        let counted = metrics()
            .panics
            .get_or_create(&[("task", "queue test".to_owned())])
            .get();
        assert!(counted >= 3, "{counted} panics are counted");
    }

    #[tokio::test(start_paused = true)]
    async fn panic_before_reconcile_retries_only_that_key() {
        let calls = run_queue(&["bad", "good"], |key, nth, over| {
            assert!(key != "bad" || nth > 1, "cannot begin");
            async move {
                if key == "bad" {
                    over.cancel();
                }
                Ok::<_, ReconcileError>(None)
            }
        })
        .await;
        assert_eq!(calls, ["bad", "good", "bad"]);
    }

    #[tokio::test(start_paused = true)]
    async fn requeue_beyond_the_clock_range_is_bounded() {
        let calls = run_queue(&["far", "other"], |key, _, over| async move {
            if key == "other" {
                over.cancel();
            }
            Ok::<_, ReconcileError>(Some(Duration::MAX))
        })
        .await;
        assert_eq!(calls, ["far", "other"]);
    }

    #[tokio::test(start_paused = true)]
    async fn cancelled_reconcile_does_not_wait_behind_other_keys() {
        let calls = run_queue(&["slow", "other", "last"], |key, nth, over| async move {
            match (key.as_str(), nth) {
                ("slow", 1) => std::future::pending().await,
                ("last", _) => over.cancel(),
                _ => {}
            }
            Ok::<_, ReconcileError>(None)
        })
        .await;
        assert_eq!(calls, ["slow", "slow", "other", "last"]);
    }

    #[tokio::test]
    async fn hanging_reconcile_is_restarted_and_reported() {
        let (keys_tx, keys) = mpsc::unbounded_channel();
        let (progress, shutdown) = (Progress::default(), CancellationToken::new());
        let hang_detection = HangDetection {
            name: "controller",
            progress: progress.clone(),
            timeout: Duration::from_millis(10),
        };
        let started = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
        let (counter, end) = (std::sync::Arc::clone(&started), shutdown.clone());
        let reconcile = move |_: String| {
            let (nth, end) = (
                counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst),
                end.clone(),
            );
            async move {
                if nth < 3 {
                    std::future::pending::<()>().await;
                }
                end.cancel();
                Ok::<_, ReconcileError>(None)
            }
        };
        keys_tx.send("stuck".to_owned()).unwrap();
        let drive = run_workers(keys, 1, &shutdown, hang_detection, reconcile);
        let watch = async {
            while started.load(std::sync::atomic::Ordering::SeqCst) < 3 {
                tokio::task::yield_now().await;
            }
            // Cancelled twice, and still the step that began first.
            let hour = std::time::Instant::now() + Duration::from_secs(3600);
            progress.overdue_at(hour)
        };
        let both = async { tokio::join!(drive, watch) };
        let ((), report) = tokio::time::timeout(Duration::from_secs(30), both).await.unwrap();
        assert!(
            report.starts_with("controller: work on stuck has been running for 3600 s"),
            "{report}"
        );
    }

    #[derive(Clone, Debug)]
    enum Op {
        Add(u8),
        Start,
        Done(u8, Option<u64>),
        Fail(u8),
        Pass(u64),
    }

    fn any_op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0_u8..4).prop_map(Op::Add),
            Just(Op::Start),
            (0_u8..4, prop::option::of(0_u64..5)).prop_map(|(k, a)| Op::Done(k, a)),
            (0_u8..4).prop_map(Op::Fail),
            (0_u64..60).prop_map(Op::Pass),
        ]
    }

    proptest! {
        /// A key never runs twice at once, and one that was added is reconciled after that, for any sequence of
        /// operations.
        #[test]
        fn no_key_is_lost_or_doubled(ops in prop::collection::vec(any_op(), 0..80)) {
            let mut queue: Queue<u8> = Queue::default();
            let mut now = Instant::now();
            let mut running: HashSet<u8> = HashSet::new();
            let mut owed: HashSet<u8> = HashSet::new();
            for op in ops {
                match op {
                    Op::Add(k) => { queue.add(k); owed.insert(k); }
                    Op::Start => if let Some(k) = queue.next(now) {
                        prop_assert!(running.insert(k), "{k} runs twice");
                        owed.remove(&k);
                    },
                    Op::Done(k, again) => if running.remove(&k) {
                        queue.done(&k, again.map(Duration::from_secs), now);
                    },
                    Op::Fail(k) => if running.remove(&k) {
                        owed.insert(k);
                        queue.add_rate_limited(&k, None, now);
                    },
                    Op::Pass(s) => now += Duration::from_secs(s),
                }
            }
            for k in running.drain().collect::<Vec<_>>() { queue.done(&k, None, now); }
            now += RETRY_BACKOFF.max_delay();
            while let Some(k) = queue.next(now) { owed.remove(&k); queue.done(&k, None, now); }
            prop_assert!(owed.is_empty(), "never worked on: {owed:?}");
        }
    }
}
