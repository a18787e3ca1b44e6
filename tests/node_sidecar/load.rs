//! Clients that send requests to a Pod all the time, and count.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use testbed::wait;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// Port of `relay`.
const PORT: u16 = 8080;
/// Half of the clients keep their connection until the server closes it; the others connect for each request.
const CLIENTS: u32 = 40;
/// Each client's time between two requests; together they send 1,000 in a second.
const INTERVAL: Duration = Duration::from_millis(40);
/// Clients whose requests are in work when the server changes.
const SLOW_CLIENTS: u32 = 8;
/// Milliseconds that the server takes for the requests of slow clients.
const SLOW_REQUEST: u32 = 1000;
/// A request that has no answer by then has failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// What the clients counted.
#[derive(Debug, Default)]
pub struct Counts {
    sent: usize,
    /// Version and time of the answers, in their order.
    answers: Vec<(String, Duration)>,
    failures: Vec<String>,
    slowest: Duration,
}

/// Held by the test whose clients run: with those of all tests at once, two cores send less than intended.
static ONE_TEST: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// The right to run clients.
pub type Turn = tokio::sync::MutexGuard<'static, ()>;

/// Waits until no other test runs clients.
pub async fn wait_for_turn() -> Turn {
    ONE_TEST.lock().await
}

/// Clients of one Pod, in a thread of their own.
pub struct Load {
    _turn: Turn,
    start: Instant,
    stop: Arc<AtomicBool>,
    counts: Arc<Mutex<Counts>>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    pub fn start(_turn: Turn, pod_ip: &str) -> Self {
        let address = SocketAddr::new(pod_ip.parse::<IpAddr>().unwrap(), PORT);
        let mut load = Self {
            _turn,
            start: Instant::now(),
            stop: Arc::default(),
            counts: Arc::default(),
            thread: None,
        };
        let client = Client {
            address,
            start: load.start,
            stop: load.stop.clone(),
            counts: load.counts.clone(),
        };
        load.thread = Some(std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(client.run_all());
        }));
        load
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap()
    }

    /// Waits until 1,000 answers one after the other, which arrive from now on, are of this version.
    #[track_caller]
    pub fn wait_answers_of(&self, version: &str) {
        let before = self.counts().answers.len();
        let probe = || {
            let counts = self.counts();
            let new = counts.answers.get(before..).unwrap_or_default();
            let last = new.iter().rev().take(1000);
            let same = last.filter(|(answered, _)| answered == version).count();
            Ok((same == 1000).then_some(()))
        };
        wait::until(&format!("only answers of {version}"), wait::WAIT_TIMEOUT, probe)
            .unwrap_or_else(|why| panic!("{why:#}; {}", self.counts()));
    }

    /// Stops after the requests in work.
    pub fn finish(mut self) -> Counts {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
        std::mem::take(&mut *self.counts())
    }
}

impl Drop for Load {
    /// A failed test does not wait for the clients.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Counts {
    /// Panics unless every request was answered, by these versions.
    #[track_caller]
    pub fn assert_all_answered(&self, versions: &[&str]) {
        println!("{self}");
        assert!(self.failures.is_empty(), "{self}");
        assert_eq!(self.sent, self.answers.len(), "{self}");
        assert!(
            self.rate() > 250.0,
            "a busy machine sends at least a quarter of what is intended: {self}"
        );
        let answered: BTreeSet<&str> = self.answers.iter().map(|(version, _)| version.as_str()).collect();
        assert_eq!(answered, versions.iter().copied().collect(), "{self}");
    }

    /// Number of requests that failed.
    pub fn failed(&self) -> usize {
        self.failures.len()
    }

    fn seconds(&self) -> f64 {
        self.answers.last().map_or(0.0, |(_, at)| at.as_secs_f64())
    }

    fn rate(&self) -> f64 {
        u32::try_from(self.answers.len()).map_or(0.0, f64::from) / self.seconds()
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let times = || self.answers.iter().map(|(_, at)| *at);
        let gaps = times().zip(times().skip(1)).map(|(one, next)| next - one);
        write!(
            f,
            "{} requests sent in {:.1} s, {} answered ({:.0} a second), {} failed; slowest answer {:.0?}, longest time \
             without an answer {:.0?}",
            self.sent,
            self.seconds(),
            self.answers.len(),
            self.rate(),
            self.failures.len(),
            self.slowest,
            gaps.max().unwrap_or_default(),
        )?;
        let mut by_version: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (version, at) in &self.answers {
            by_version.entry(version).or_default().push(at.as_secs_f64());
        }
        for (version, times) in by_version {
            let (first, last) = (times[0], times[times.len() - 1]);
            write!(f, "; {version}: {} from {first:.1} s to {last:.1} s", times.len())?;
        }
        for failure in self.failures.iter().take(5) {
            write!(f, "\n  {failure}")?;
        }
        Ok(())
    }
}

#[derive(Clone)]
struct Client {
    address: SocketAddr,
    start: Instant,
    stop: Arc<AtomicBool>,
    counts: Arc<Mutex<Counts>>,
}

impl Client {
    async fn run_all(self) {
        let mut clients = tokio::task::JoinSet::new();
        for number in 0..CLIENTS {
            let client = self.clone();
            let first = INTERVAL * number / CLIENTS;
            clients.spawn(async move {
                tokio::time::sleep(first).await;
                client.run(INTERVAL, number % 2 == 0, 0).await;
            });
        }
        for _ in 0..SLOW_CLIENTS {
            let client = self.clone();
            clients.spawn(async move { client.run(Duration::from_secs(1), false, SLOW_REQUEST).await });
        }
        while let Some(ended) = clients.join_next().await {
            ended.unwrap();
        }
    }

    /// Sends requests that take this number of milliseconds, until it is stopped.
    async fn run(&self, interval: Duration, keep: bool, milliseconds: u32) {
        let mut ticks = tokio::time::interval(interval);
        let mut kept = None;
        while !self.stop.load(Ordering::Relaxed) {
            ticks.tick().await;
            self.counts.lock().unwrap().sent += 1;
            let begin = Instant::now();
            let request = tokio::time::timeout(REQUEST_TIMEOUT, self.request(&mut kept, milliseconds));
            let result = request.await.unwrap_or_else(|elapsed| Err(elapsed.into()));
            if !keep || result.is_err() {
                kept = None;
            }
            let mut counts = self.counts.lock().unwrap();
            match result {
                Ok(version) => counts.answers.push((version, self.start.elapsed())),
                Err(why) => counts
                    .failures
                    .push(format!("{:.1} s: {why}", self.start.elapsed().as_secs_f64())),
            }
            if milliseconds == 0 {
                counts.slowest = counts.slowest.max(begin.elapsed());
            }
        }
    }

    /// One request; returns the version that answered.
    async fn request(
        &self,
        kept: &mut Option<BufReader<TcpStream>>,
        milliseconds: u32,
    ) -> io::Result<String> {
        let mut stream = match kept.take() {
            Some(stream) => stream,
            None => BufReader::new(TcpStream::connect(self.address).await?),
        };
        stream.write_all(format!("1 {milliseconds}\n").as_bytes()).await?;
        let mut answer = String::new();
        stream.read_line(&mut answer).await?;
        let words: Vec<&str> = answer.split_whitespace().collect();
        let (version, closes) = match words[..] {
            ["1", version] if answer.ends_with('\n') => (version.to_owned(), false),
            ["1", version, "close"] if answer.ends_with('\n') => (version.to_owned(), true),
            _ => return Err(io::Error::other(format!("the answer is {answer:?}"))),
        };
        *kept = (!closes).then_some(stream);
        Ok(version)
    }
}
