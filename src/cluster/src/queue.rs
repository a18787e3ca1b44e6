//! Work by key: each key at most once at a time, a bounded number of keys at once, and a reason to look again.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt::Display;
use std::hash::Hash;
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Error, later};
use kruise_api::backoff::Backoff;
use kruise_ops::Progress;
use kruise_ops::metrics::metrics;
use kruise_ops::panics::{Panicked, isolated, isolated_now};
use kruise_ops::progress::Step;

/// After failures.
pub(super) const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(30));
/// Longest pause that the API server may ask for.
const LONGEST_ASKED: Duration = Duration::from_secs(300);
/// Longest time that one key may be worked on: far above the sum of its calls' own deadlines.
const PASS: Duration = Duration::from_secs(120);

/// When to look at a key again although nothing has changed; `None` when there is no need.
pub type Again = Option<Duration>;

/// What the queue needs to know of a pass that failed.
#[derive(Debug)]
pub struct Failure {
    words: String,
    /// How long the other side asked us to wait.
    asked: Option<Duration>,
    /// Whether it is part of ordinary life: somebody else was quicker.
    ordinary: bool,
}

impl Failure {
    /// A failure that somebody should look at if it goes on.
    #[must_use]
    pub fn new(words: String) -> Self {
        Self {
            words,
            asked: None,
            ordinary: false,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self {
            words: error.to_string(),
            asked: error.retry_after(),
            ordinary: error.conflict() || error.not_found(),
        }
    }
}

impl From<Panicked> for Failure {
    fn from(panicked: Panicked) -> Self {
        Self::new(panicked.to_string())
    }
}

/// What can be worked on by the name that it has in the log.
pub trait Named: Clone + Eq + Hash + Ord + Display + Send + 'static {}
impl<K: Clone + Eq + Hash + Ord + Display + Send + 'static> Named for K {}

/// One pass over a key.
pub trait Pass: Future<Output = Result<Again, Self::Error>> + Send + 'static {
    /// Why it failed.
    type Error: Into<Failure> + Send + 'static;
}

impl<F, E> Pass for F
where
    F: Future<Output = Result<Again, E>> + Send + 'static,
    E: Into<Failure> + Send + 'static,
{
    type Error = E;
}

/// Runs `work` for each key that arrives until shutdown, `workers` at once at most.
///
/// A key that arrives while it is worked on is worked on once more afterwards. A key whose work failed is
/// tried again after a pause that doubles from 0.2 s to 30 s, or after what the API server asked for. Work that
/// does not end within 120 s is broken off and begun anew; where that hangs too, `progress` knows it. A panic is a
/// failure of that key alone.
pub async fn run<K, W, F>(
    name: &'static str,
    keys: mpsc::UnboundedReceiver<K>,
    workers: usize,
    progress: &Progress,
    shutdown: CancellationToken,
    work: W,
) where
    K: Named,
    W: Fn(K) -> F,
    F: Pass,
{
    let hangs = Hangs {
        name,
        progress: progress.clone(),
        pass: PASS,
    };
    drive(keys, workers, &shutdown, hangs, work).await;
}

/// A key and what came of the work on it; `None` when it was broken off.
type Ended<K> = (K, Option<Result<Again, Failure>>);

/// What is done about work that hangs.
struct Hangs {
    name: &'static str,
    progress: Progress,
    /// Longest time that one key may be worked on.
    pass: Duration,
}

async fn drive<K, W, F>(
    mut keys: mpsc::UnboundedReceiver<K>,
    workers: usize,
    shutdown: &CancellationToken,
    hangs: Hangs,
    work: W,
) where
    K: Named,
    W: Fn(K) -> F,
    F: Pass,
{
    let Hangs { name, progress, pass } = hangs;
    let mut queue: Queue<K> = Queue::default();
    let mut running: JoinSet<Ended<K>> = JoinSet::new();
    // A step lasts until work on its key has ended by itself, however often it is broken off.
    let mut steps: HashMap<K, Step> = HashMap::new();
    let depth = metrics()
        .queue_depth
        .get_or_create_owned(&[("name", name.to_owned())]);
    let _empty = Empties(&depth);
    loop {
        while running.len() < workers.max(1) {
            let Some(key) = queue.next(Instant::now()) else {
                break;
            };
            let begin = || progress.begin(name, format!("work on {key}"), pass * 2);
            steps.entry(key.clone()).or_insert_with(begin);
            let begun = isolated_now(name, &key, || work(key.clone()));
            running.spawn(async move {
                let ended = match begun {
                    Ok(work) => one(name, key.clone(), pass, work).await,
                    Err(panicked) => Some(Err(panicked.into())),
                };
                (key, ended)
            });
        }
        depth.set(i64::try_from(queue.due.len()).unwrap_or(i64::MAX));
        let wake = queue
            .wake()
            .unwrap_or_else(|| later(Instant::now(), Duration::from_secs(3600)));
        let free = running.len() < workers.max(1);
        tokio::select! {
            () = shutdown.cancelled() => return,
            key = keys.recv() => match key {
                Some(key) => queue.add(key),
                None => return,
            },
            Some(ended) = running.join_next() => match ended {
                Ok((key, Some(result))) => {
                    steps.remove(&key);
                    settle(name, &mut queue, key, result);
                }
                Ok((key, None)) => {
                    tracing::error!(name, %key, after = ?pass, "reconcile did not finish in time; restarting it");
                    queue.done(&key, Some(Duration::ZERO), Instant::now());
                }
                // Passes do not panic and are not aborted; a key that stays marked as running is never reconciled.
                Err(error) => { tracing::error!(name, %error, "controller stopped: a task of it was lost"); return; }
            },
            () = tokio::time::sleep_until(wake), if free => {}
        }
    }
}

/// One pass over a key; `None` when it did not end within `limit`.
async fn one<F: Pass>(
    name: &'static str,
    key: impl Display,
    limit: Duration,
    work: F,
) -> Option<Result<Again, Failure>> {
    let pass = tokio::time::timeout(limit, isolated(name, key, work));
    Some(match pass.await.ok()? {
        Ok(result) => result.map_err(Into::into),
        Err(panicked) => Err(panicked.into()),
    })
}

/// Nothing waits in a queue that has ended, however it ended.
struct Empties<'a>(&'a Gauge);

impl Drop for Empties<'_> {
    fn drop(&mut self) {
        self.0.set(0);
    }
}

fn settle<K: Named>(name: &str, queue: &mut Queue<K>, key: K, result: Result<Again, Failure>) {
    let now = Instant::now();
    match result {
        Ok(again) => queue.done(&key, again, now),
        Err(error) => {
            let pause = queue.failed(&key, error.asked, now);
            let retries = &metrics().queue_retries;
            retries.get_or_create(&[("name", name.to_owned())]).inc();
            let words = error.words;
            if error.ordinary {
                tracing::debug!(name, %key, error = words, ?pause, "not ready yet; will retry");
            } else {
                tracing::warn!(name, %key, error = words, ?pause, "reconcile failed; will retry");
            }
        }
    }
}

/// Which keys are due, which are being worked on, and which come later.
struct Queue<K> {
    due: VecDeque<K>,
    queued: HashSet<K>,
    running: HashSet<K>,
    /// Arrived while running.
    repeat: HashSet<K>,
    later: BTreeSet<(Instant, K)>,
    when: HashMap<K, Instant>,
    failures: HashMap<K, u32>,
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Self {
            due: VecDeque::new(),
            queued: HashSet::new(),
            running: HashSet::new(),
            repeat: HashSet::new(),
            later: BTreeSet::new(),
            when: HashMap::new(),
            failures: HashMap::new(),
        }
    }
}

impl<K: Clone + Eq + Hash + Ord> Queue<K> {
    fn add(&mut self, key: K) {
        if self.running.contains(&key) {
            self.repeat.insert(key);
        } else if self.queued.insert(key.clone()) {
            self.forget_later(&key);
            self.due.push_back(key);
        }
    }

    fn next(&mut self, now: Instant) -> Option<K> {
        while self.later.first().is_some_and(|(at, _)| *at <= now) {
            if let Some((_, key)) = self.later.pop_first() {
                self.when.remove(&key);
                self.add(key);
            }
        }
        let key = self.due.pop_front()?;
        self.queued.remove(&key);
        self.running.insert(key.clone());
        Some(key)
    }

    fn wake(&self) -> Option<Instant> {
        self.later.first().map(|(at, _)| *at)
    }

    fn done(&mut self, key: &K, again: Again, now: Instant) {
        self.failures.remove(key);
        self.stop(key, again.map(|after| later(now, after)));
    }

    fn failed(&mut self, key: &K, asked: Option<Duration>, now: Instant) -> Duration {
        let count = self.failures.entry(key.clone()).or_default();
        let doubled = RETRY.pause(*count);
        *count = count.saturating_add(1);
        let pause = doubled.max(asked.unwrap_or_default().min(LONGEST_ASKED));
        // What arrived meanwhile waits as well, or a failing key would spin with its own events.
        self.repeat.remove(key);
        self.stop(key, Some(later(now, pause)));
        pause
    }

    fn stop(&mut self, key: &K, again: Option<Instant>) {
        self.running.remove(key);
        if self.repeat.remove(key) {
            self.add(key.clone());
        } else if let Some(at) = again {
            self.forget_later(key);
            self.when.insert(key.clone(), at);
            self.later.insert((at, key.clone()));
        }
    }

    fn forget_later(&mut self, key: &K) {
        if let Some(at) = self.when.remove(key) {
            self.later.remove(&(at, key.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::sync::{Arc, Mutex};

    use super::*;
    use proptest::prelude::*;

    /// Runs `work` on these keys until it says that it is over; which keys it was called for, in order.
    async fn worked<F: Pass>(
        keys: &[&str],
        work: impl Fn(String, usize, CancellationToken) -> F,
    ) -> Vec<String> {
        let (keys_tx, keys_rx) = mpsc::unbounded_channel();
        for key in keys {
            keys_tx.send((*key).to_owned()).unwrap();
        }
        let (progress, over) = (Progress::default(), CancellationToken::new());
        let calls: Arc<Mutex<Vec<String>>> = Arc::default();
        let (shutdown, seen) = (over.clone(), Arc::clone(&calls));
        run(
            "queue test",
            keys_rx,
            1,
            &progress,
            shutdown,
            move |key: String| {
                let mut calls = seen.lock().unwrap();
                calls.push(key.clone());
                let nth = calls.iter().filter(|called| **called == key).count();
                drop(calls);
                work(key, nth, over.clone())
            },
        )
        .await;
        drop(keys_tx);
        let calls = calls.lock().unwrap();
        calls.clone()
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_in_a_pass_is_a_failure_of_that_key_alone() {
        let start = Instant::now();
        let calls = worked(&["bad", "good"], |key, nth, over| async move {
            match (key.as_str(), nth) {
                ("bad", 1..4) => panic!("index out of bounds"),
                ("bad", _) => over.cancel(),
                _ => {}
            }
            Ok::<_, Failure>(None)
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
    async fn a_panic_before_a_pass_begins_is_a_failure_of_that_key_alone() {
        let calls = worked(&["bad", "good"], |key, nth, over| {
            assert!(key != "bad" || nth > 1, "cannot begin");
            async move {
                if key == "bad" {
                    over.cancel();
                }
                Ok::<_, Failure>(None)
            }
        })
        .await;
        assert_eq!(calls, ["bad", "good", "bad"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wake_up_beyond_the_end_of_the_clock_is_none() {
        let calls = worked(&["far", "other"], |key, _, over| async move {
            if key == "other" {
                over.cancel();
            }
            Ok::<_, Failure>(Some(Duration::MAX))
        })
        .await;
        assert_eq!(calls, ["far", "other"]);
    }

    #[test]
    fn a_pause_that_the_api_server_asks_for_is_bounded() {
        let mut queue: Queue<u8> = Queue::default();
        queue.add(1);
        let now = Instant::now();
        queue.next(now);
        assert_eq!(queue.failed(&1, Some(Duration::MAX), now), LONGEST_ASKED);
        assert_eq!(queue.wake(), Some(now + LONGEST_ASKED));
    }

    #[tokio::test]
    async fn work_that_hangs_is_begun_anew_and_told_until_it_ends() {
        let (keys_tx, keys) = mpsc::unbounded_channel();
        let (progress, shutdown) = (Progress::default(), CancellationToken::new());
        let hangs = Hangs {
            name: "controller",
            progress: progress.clone(),
            pass: Duration::from_millis(10),
        };
        let begun = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
        let (counter, end) = (std::sync::Arc::clone(&begun), shutdown.clone());
        let work = move |_: String| {
            let (nth, end) = (
                counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst),
                end.clone(),
            );
            async move {
                if nth < 3 {
                    std::future::pending::<()>().await;
                }
                end.cancel();
                Ok::<_, Failure>(None)
            }
        };
        keys_tx.send("stuck".to_owned()).unwrap();
        let drive = drive(keys, 1, &shutdown, hangs, work);
        let watch = async {
            while begun.load(std::sync::atomic::Ordering::SeqCst) < 3 {
                tokio::task::yield_now().await;
            }
            // Broken off twice, and still the step that began first.
            let hour = std::time::Instant::now() + Duration::from_secs(3600);
            progress.late_at(hour)
        };
        let both = async { tokio::join!(drive, watch) };
        let ((), told) = tokio::time::timeout(Duration::from_secs(30), both).await.unwrap();
        assert!(
            told.starts_with("controller: work on stuck has been running for 3600 s"),
            "{told}"
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
        /// A key never runs twice at once, and one that was added is worked on after that, whatever happens.
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
                        queue.failed(&k, None, now);
                    },
                    Op::Pass(s) => now += Duration::from_secs(s),
                }
            }
            for k in running.drain().collect::<Vec<_>>() { queue.done(&k, None, now); }
            now += RETRY.longest();
            while let Some(k) = queue.next(now) { owed.remove(&k); queue.done(&k, None, now); }
            prop_assert!(owed.is_empty(), "never worked on: {owed:?}");
        }
    }
}
