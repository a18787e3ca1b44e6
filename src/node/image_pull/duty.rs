//! The loop: takes in what happened, asks [`super::plan`], acts, tells.

use std::collections::{BTreeMap, HashMap};
use std::future::pending;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use kube::Api;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::{sleep, timeout};

use super::observe::{self, Seen};
use super::plan::board::Outcome;
use super::plan::publish::{self, Publisher, When};
use super::plan::{self, Ask, Board, Ended, Limits, Progress, Step, TagKey, status};
use super::{act, report};
use crate::api::json::set;
use crate::api::node_image::NodeImage;
use crate::cluster::{self, Change, write};
use crate::cri::{Reference, Runtimes};
use crate::node::Context;
use crate::ops::panics::{isolated, isolated_now};

/// The API server's clock may be corrected while we sleep.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);
/// What shutdown may take to write a last status.
const LAST_WORDS: Duration = Duration::from_millis(1500);

/// The duty's name in `/healthz`.
const NAME: &str = "image pull";
/// The pause after a pass that ended in a panic.
const AFTER_PANIC: Duration = Duration::from_secs(5);

type Bytes = (TagKey, u64, Progress);
type Attempt = (TagKey, u64, Ended);
type Written = Result<NodeImage, cluster::Error>;

/// What has happened.
enum News {
    Seen(Change<Seen>),
    Ended(Result<Attempt, JoinError>),
    Bytes(Bytes),
    Wrote(Option<Box<Written>>),
    /// Something that no news tells: a runtime has come or gone, or time has passed.
    Look,
}

pub(super) struct Duty {
    ctx: Context,
    changes: UnboundedReceiver<Change<Seen>>,
    seen: Option<std::sync::Arc<Seen>>,
    board: Board,
    attempts: JoinSet<Attempt>,
    running: HashMap<TagKey, (u64, AbortHandle)>,
    bytes_tx: UnboundedSender<Bytes>,
    bytes: UnboundedReceiver<Bytes>,
    speeds: report::Speeds,
    publisher: Publisher,
    writes: JoinSet<Written>,
    written_version: u64,
}

impl Duty {
    pub(super) fn new(ctx: Context, changes: UnboundedReceiver<Change<Seen>>) -> Self {
        let (bytes_tx, bytes) = mpsc::unbounded_channel();
        let spread = ctx
            .node_name
            .bytes()
            .fold(7_i64, |h, b| h.wrapping_mul(31).wrapping_add(i64::from(b)));
        Self {
            ctx,
            changes,
            seen: None,
            board: Board::default(),
            attempts: JoinSet::new(),
            running: HashMap::new(),
            bytes_tx,
            bytes,
            speeds: report::Speeds::default(),
            publisher: Publisher::new(spread),
            writes: JoinSet::new(),
            written_version: 0,
        }
    }

    /// Works until shutdown.
    pub(super) async fn run(mut self) {
        let shutdown = self.ctx.shutdown.clone();
        let mut runtimes = self.ctx.runtimes.subscribe();
        let step = self.ctx.health.progress.waiting(NAME);
        let mut news = News::Look;
        loop {
            let passed = isolated_now(NAME, "pass", || self.pass(news));
            let wake = passed.as_ref().map_or(Some(AFTER_PANIC), |wake| *wake);
            step.idle(wake);
            // What happens meanwhile waits: it may be what the pass panics at.
            if passed.is_err() && shutdown.run_until_cancelled(sleep(AFTER_PANIC)).await.is_none() {
                break;
            }
            news = tokio::select! {
                Some(change) = self.changes.recv() => News::Seen(change),
                Some(ended) = self.attempts.join_next() => News::Ended(ended),
                Some(bytes) = self.bytes.recv() => News::Bytes(bytes),
                Some(written) = self.writes.join_next() => News::Wrote(written.ok().map(Box::new)),
                Ok(()) = runtimes.changed() => News::Look,
                () = nap(wake) => News::Look,
                () = shutdown.cancelled() => break,
            };
        }
        self.last_words().await;
    }

    fn limits(&self) -> Limits {
        let runtime = self.ctx.runtimes.health().iter().any(|s| s.healthy);
        Limits::of_node(self.ctx.options.max_pulls(), runtime)
    }

    /// Takes in what has happened, plans and acts. Returns how long to sleep if nothing happens; none is for ever.
    fn pass(&mut self, news: News) -> Option<Duration> {
        match news {
            News::Seen(change) => self.observe(change),
            News::Ended(Ok((key, run, ended))) => self.ended(&key, run, ended),
            // Only what was stopped ends without a result.
            News::Ended(Err(_)) | News::Look => {}
            News::Bytes((key, run, progress)) => self.advanced(&key, run, progress),
            News::Wrote(written) => self.wrote(written.map(|written| *written)),
        }
        let (now, limits) = (self.ctx.cluster.clock.now(), self.limits());
        let plan = plan::plan(&self.board, &limits, now);
        for step in &plan.steps {
            tracing::debug!(?step, "next step");
            self.act(step, now);
        }
        self.ctx.live.pulls.send_if_modified(|shown| {
            let new = report::live(&self.board, &limits, &self.speeds);
            let changed = *shown != new;
            *shown = new;
            changed
        });
        let publish = self.publish(&limits, now);
        let until = |t: Timestamp| Duration::try_from(t.duration_since(now)).unwrap_or_default();
        plan.wake
            .into_iter()
            .chain(publish)
            .min()
            .map(|t| until(t).min(LONGEST_SLEEP))
    }

    fn act(&mut self, step: &Step, now: Timestamp) {
        let run = self.board.apply(step, now);
        match step {
            Step::Start { key, timeout, .. } => {
                if let Some(run) = run {
                    self.start(key, run, *timeout);
                }
            }
            Step::GiveUp { key, .. } => {
                self.stop(key);
                self.tell_end(key, now);
            }
        }
    }

    fn start(&mut self, key: &TagKey, run: u64, timeout: SignedDuration) {
        let Some(task) = self.board.get(key) else { return };
        report::begun(key, task);
        let (ask, name) = (task.ask.clone(), report::image(key, task));
        let (client, runtimes) = (self.ctx.cluster.client.clone(), self.ctx.runtimes.clone());
        let (pulls, bytes) = (self.ctx.live.pulls.clone(), self.bytes_tx.clone());
        let timeout = Duration::try_from(timeout).unwrap_or_default();
        let step = self.ctx.health.progress.begin(
            NAME,
            format!("pulling {name}"),
            timeout
                .saturating_add(act::SECRETS)
                .saturating_add(write::DEADLINE),
        );
        let (own, namespace) = (key.clone(), task.owner.namespace.clone());
        let handle = self.attempts.spawn(async move {
            let _step = step;
            let tell = |progress| drop(bytes.send((own.clone(), run, progress)));
            let watched = || pulls.receiver_count() > 0;
            let attempt = isolated(
                NAME,
                &name,
                attempt(client, runtimes, ask, namespace, timeout, watched, tell),
            );
            let ended = attempt.await.unwrap_or_else(|panicked| Ended::Failed {
                words: panicked.to_string(),
                again: plan::Again::Counted,
            });
            (own, run, ended)
        });
        self.running.insert(key.clone(), (run, handle));
    }

    /// Stops an attempt; the runtime drops the pull when its caller does.
    fn stop(&mut self, key: &TagKey) {
        self.speeds.forget(key);
        if let Some((_, handle)) = self.running.remove(key) {
            handle.abort();
            report::cancelled(key);
        }
    }

    fn observe(&mut self, change: Change<Seen>) {
        let old_uid = self.seen.as_ref().map(|s| s.uid.clone());
        let other = change.new.as_ref().map(|s| s.uid.clone()) != old_uid;
        if other {
            for key in self.board.clear() {
                self.stop(&key);
            }
            self.publisher = Publisher::new(self.publisher.spread);
            self.publisher.stored = change.new.as_ref().map(|s| s.status.clone()).unwrap_or_default();
            self.written_version = 0;
        }
        if let Some(seen) = &change.new {
            // While a write of ours is under way, and until its echo, the watch is behind what we know.
            if self.writes.is_empty() && seen.version >= self.written_version {
                self.publisher.stored = seen.status.clone();
            }
            let stored = status::by_tag(&seen.status);
            for key in self.board.desire(&seen.asks, &stored) {
                self.stop(&key);
            }
        }
        self.seen = change.new;
    }

    fn ended(&mut self, key: &TagKey, run: u64, ended: Ended) {
        if self.running.get(key).is_some_and(|(current, _)| *current == run) {
            self.running.remove(key);
            self.speeds.forget(key);
        }
        let now = self.ctx.cluster.clock.now();
        match self.board.ended(key, run, ended, now) {
            Outcome::Over => self.tell_end(key, now),
            Outcome::Continues => report::failed_attempt(key, &self.board),
            Outcome::Stale => {}
        }
    }

    /// Bytes have come; those of an attempt that was stopped meanwhile do not count.
    fn advanced(&mut self, key: &TagKey, run: u64, progress: Progress) {
        if self.running.get(key).is_some_and(|(current, _)| *current == run) {
            self.speeds.sample(key, progress.done, Instant::now());
            self.board
                .advance(key, run, progress, self.ctx.cluster.clock.now());
        }
    }

    fn tell_end(&self, key: &TagKey, now: Timestamp) {
        let (Some(seen), Some(task)) = (&self.seen, self.board.get(key)) else {
            return;
        };
        let took = now.duration_since(task.started_at.unwrap_or(now));
        report::ended(
            &self.ctx.cluster.events,
            (&self.ctx.node_name, &seen.uid),
            key,
            task,
            Duration::try_from(took).unwrap_or_default(),
        );
    }

    /// Writes the status if it is time. Returns when it will be.
    fn publish(&mut self, limits: &Limits, now: Timestamp) -> Option<Timestamp> {
        self.seen.as_ref()?;
        if !self.writes.is_empty() {
            return None;
        }
        let current = self.publisher.told(status::compose(&self.board, limits), now);
        match self.publisher.when(&current, now) {
            When::Never => None,
            When::At(t) => Some(t),
            When::Now => {
                self.write(&current);
                None
            }
        }
    }

    fn write(&mut self, current: &crate::api::node_image::NodeImageStatus) {
        let Some(seen) = &self.seen else { return };
        let mut patch = publish::patch(&self.publisher.stored, current);
        // Refused if the NodeImage was made anew meanwhile.
        set(&mut patch, &["metadata", "uid"], serde_json::json!(seen.uid));
        let (client, name) = (self.ctx.cluster.client.clone(), self.ctx.node_name.clone());
        let what = "writing the NodeImage's status";
        let step = self.ctx.health.progress.begin(NAME, what, write::DEADLINE);
        self.writes.spawn(async move {
            let _step = step;
            write::patch_status_merge(&Api::all(client), &name, &patch).await
        });
    }

    fn wrote(&mut self, written: Option<Written>) {
        let now = self.ctx.cluster.clock.now();
        match written {
            Some(Ok(object)) => {
                self.written_version = observe::version(&object.metadata);
                self.publisher.wrote(object.status.unwrap_or_default(), now);
            }
            Some(Err(error)) if lasting(&error) => {
                let category = error.category();
                let next = if self.publisher.refused(now) {
                    "it is written without messages"
                } else {
                    "it had no messages; it is tried again, every 5 minutes in the end"
                };
                tracing::warn!(category, "NodeImage status not written: {error}; {next}");
            }
            Some(Err(error)) => {
                tracing::warn!(
                    category = error.category(),
                    "NodeImage status not written: {error}"
                );
                let after = error.retry_after().and_then(|d| SignedDuration::try_from(d).ok());
                self.publisher.failed(after, now);
            }
            None => self.publisher.failed(None, now),
        }
    }

    /// At shutdown: what has ended and was not told yet is told.
    async fn last_words(mut self) {
        self.attempts.abort_all();
        let tell = async {
            while let Some(written) = self.writes.join_next().await {
                self.wrote(written.ok());
            }
            let now = self.ctx.cluster.clock.now();
            let current = self
                .publisher
                .told(status::compose(&self.board, &self.limits()), now);
            let told = status::by_tag(&self.publisher.stored);
            let ours: BTreeMap<_, _> = status::by_tag(&current);
            let news = ours
                .iter()
                .any(|(key, tag)| tag.completion_time.is_some() && told.get(key) != Some(tag));
            if news {
                self.write(&current);
                while let Some(written) = self.writes.join_next().await {
                    self.wrote(written.ok());
                }
            }
        };
        if timeout(LAST_WORDS, tell).await.is_err() {
            tracing::warn!(
                "could not write the last NodeImage status before shutdown; it will be written after the restart"
            );
        }
    }
}

/// Whether the API server would refuse the same status again. Permissions and the NodeImage itself may be there in a moment.
fn lasting(error: &cluster::Error) -> bool {
    !error.retryable() && !error.forbidden() && !error.not_found()
}

/// One attempt on behalf of that namespace: the credentials, and then the pull.
async fn attempt(
    client: kube::Client,
    runtimes: Runtimes,
    ask: Ask,
    namespace: String,
    timeout: Duration,
    watched: impl Fn() -> bool + Send,
    tell: impl FnMut(Progress) + Send,
) -> Ended {
    let secrets = act::secrets(&client, &ask.secrets, &ask.owners).await;
    let image = ask.image.unwrap_or_default();
    let Some(runtime) = runtimes.first() else {
        return Ended::Failed {
            words: "the container runtime has gone".to_owned(),
            again: plan::Again::Prevented,
        };
    };
    let repository = Reference::parse(&image)
        .map(|r| r.repository())
        .unwrap_or_default();
    let attempt = act::Attempt {
        credentials: secrets.credentials(&repository, &namespace),
        image,
        always: ask.always,
        timeout,
        labels: ask.labels,
        annotations: ask.annotations,
    };
    act::ended(
        act::attempt(runtime.as_ref(), &attempt, watched, tell).await,
        &secrets,
    )
}

async fn nap(time: Option<Duration>) {
    match time {
        Some(time) => sleep(time).await,
        None => pending().await,
    }
}
