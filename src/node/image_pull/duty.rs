//! The loop: takes in what happened, asks [`super::plan`], acts, tells.

use std::collections::{BTreeMap, HashMap};
use std::future::pending;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use kube::Api;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::observe::{self, Seen};
use super::plan::board::Outcome;
use super::plan::publish::{self, Publisher, When};
use super::plan::{self, Board, Ended, Limits, Progress, Step, TagKey, status};
use super::{act, report};
use crate::api::node_image::NodeImage;
use crate::cluster::{self, Change, write};
use crate::node::Context;

/// The API server's clock may be corrected while we sleep.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);
/// What shutdown may take to write a last status.
const LAST_WORDS: Duration = Duration::from_millis(1500);

/// The duty's name in `/healthz`.
const NAME: &str = "image pull";

type Bytes = (TagKey, u64, Progress);
type Written = Result<NodeImage, cluster::Error>;

pub(super) struct Duty {
    ctx: Context,
    changes: UnboundedReceiver<Change<Seen>>,
    seen: Option<std::sync::Arc<Seen>>,
    board: Board,
    attempts: JoinSet<(TagKey, u64, Ended)>,
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
        loop {
            let wake = self.turn();
            step.idle(wake);
            tokio::select! {
                Some(change) = self.changes.recv() => self.observe(change),
                Some(ended) = self.attempts.join_next_with_id() => match ended {
                    Ok((_, (key, run, ended))) => self.ended(&key, run, ended),
                    Err(error) => self.broke(&error),
                },
                Some((key, run, progress)) = self.bytes.recv() => self.advanced(&key, run, progress),
                Some(written) = self.writes.join_next() => self.wrote(written.ok()),
                Ok(()) = runtimes.changed() => {}
                () = nap(wake) => {}
                () = shutdown.cancelled() => break,
            }
        }
        self.last_words().await;
    }

    fn limits(&self) -> Limits {
        let runtime = self.ctx.runtimes.health().iter().any(|s| s.healthy);
        Limits {
            max_parallel: self.ctx.options.max_pulls(),
            runtime,
        }
    }

    /// Plans and acts. Returns how long to sleep if nothing happens; none is for ever.
    fn turn(&mut self) -> Option<Duration> {
        let (now, limits) = (self.ctx.cluster.clock.now(), self.limits());
        let plan = plan::plan(&self.board, &limits, now);
        for step in &plan.steps {
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
            Step::Start { key, timeout } => {
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
        let (ask, key, bytes) = (task.ask.clone(), key.clone(), self.bytes_tx.clone());
        let (client, runtimes) = (self.ctx.cluster.client.clone(), self.ctx.runtimes.clone());
        let name = key.clone();
        let timeout = Duration::try_from(timeout).unwrap_or_default();
        let secrets = u32::try_from(ask.secrets.len()).unwrap_or(u32::MAX);
        let step = self.ctx.health.progress.begin(
            NAME,
            format!("pulling {}", ask.image.as_deref().unwrap_or_default()),
            timeout.saturating_add(write::DEADLINE.saturating_mul(secrets)),
        );
        let handle = self.attempts.spawn(async move {
            let _step = step;
            let (keyring, problems) = act::keyring(&client, &ask.secrets, &ask.owners).await;
            let image = ask.image.unwrap_or_default();
            let Some(runtime) = runtimes.first() else {
                let words = "the container runtime has gone".to_owned();
                return (
                    key,
                    run,
                    Ended::Failed {
                        words,
                        again: plan::Again::Uncounted,
                    },
                );
            };
            let repository = crate::cri::Reference::parse(&image)
                .map(|r| r.repository())
                .unwrap_or_default();
            let attempt = act::Attempt {
                credentials: keyring.lookup(&repository),
                image,
                always: ask.always,
                timeout,
                labels: ask.labels,
                annotations: ask.annotations,
            };
            let tell = |progress| drop(bytes.send((key.clone(), run, progress)));
            let result = act::attempt(runtime.as_ref(), &attempt, tell).await;
            let ended = act::ended(result, &problems);
            (key, run, ended)
        });
        self.running.insert(name, (run, handle));
    }

    /// Stops an attempt; the runtime drops the pull when its caller does.
    fn stop(&mut self, key: &TagKey) {
        self.speeds.forget(key);
        if let Some((_, handle)) = self.running.remove(key) {
            handle.abort();
        }
    }

    fn observe(&mut self, change: Change<Seen>) {
        let old_uid = self.seen.as_ref().map(|s| s.uid.clone());
        let other = change.new.as_ref().map(|s| s.uid.clone()) != old_uid;
        if other {
            for key in self.board.clear() {
                self.stop(&key);
            }
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
        if self.board.ended(key, run, ended, now) == Outcome::Over {
            self.tell_end(key, now);
        }
    }

    /// Bytes have come; those of an attempt that was stopped meanwhile do not count.
    fn advanced(&mut self, key: &TagKey, run: u64, progress: Progress) {
        if self.running.get(key).is_some_and(|(current, _)| *current == run) {
            self.speeds.sample(key, progress.done, Instant::now());
            self.board.advance(key, run, progress);
        }
    }

    /// An attempt ended without a result: it was stopped, or it is a defect of ours.
    fn broke(&mut self, error: &tokio::task::JoinError) {
        let of = self
            .running
            .iter()
            .find(|(_, (_, handle))| handle.id() == error.id());
        let Some((key, run)) = of.map(|(key, (run, _))| (key.clone(), *run)) else {
            return;
        };
        let words = format!("the attempt broke: {error}");
        self.ended(
            &key,
            run,
            Ended::Failed {
                words,
                again: plan::Again::Counted,
            },
        );
    }

    fn tell_end(&self, key: &TagKey, now: Timestamp) {
        let (Some(seen), Some(task)) = (&self.seen, self.board.get(key)) else {
            return;
        };
        let node = report::reference(&self.ctx.node_name, &seen.uid);
        let took = now.duration_since(task.started_at.unwrap_or(now));
        report::ended(
            &self.ctx.cluster.events,
            &node,
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
        let current = status::compose(&self.board, limits);
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
        patch["metadata"] = serde_json::json!({ "uid": seen.uid });
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
                self.written_version = observe::version(&object);
                self.publisher.wrote(object.status.unwrap_or_default(), now);
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
            let current = status::compose(&self.board, &self.limits());
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
                "the last NodeImage status could not be written in time; it is told after the next start"
            );
        }
    }
}

async fn nap(time: Option<Duration>) {
    match time {
        Some(time) => sleep(time).await,
        None => pending().await,
    }
}
