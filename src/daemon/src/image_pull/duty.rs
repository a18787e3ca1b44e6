//! The loop: takes in what happened, asks [`super::plan`], acts, tells.

use std::collections::{BTreeMap, HashMap};
use std::future::pending;
use std::sync::Arc;
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
use crate::Context;
use kruise_api::image_reference::{Reference, join};
use kruise_api::json::set;
use kruise_api::node_image::NodeImage;
use kruise_cluster::write::Stored;
use kruise_cluster::{self as cluster, Change, write};
use kruise_cri::Runtimes;
use kruise_ops::panics::{Panicked, isolated, isolated_now};

/// The API server's clock may be corrected while we sleep.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);
/// What shutdown may take to write a last status.
const LAST_WORDS: Duration = Duration::from_millis(1500);

/// The duty's name in `/healthz`.
const NAME: &str = "image pull";
/// The pause after a pass in which something panicked.
const AFTER_PANIC: Duration = Duration::from_secs(5);

type Bytes = (TagKey, u64, Progress);
type Attempt = (TagKey, u64, Ended);
type Written = Result<NodeImage, cluster::Error>;

/// What has happened.
enum News {
    Ended(Result<Attempt, JoinError>),
    Bytes(Bytes),
    Wrote(Option<Box<Written>>),
    /// There is something to take in, a runtime has come or gone, or time has passed.
    Look,
}

pub(super) struct Duty {
    ctx: Context,
    changes: UnboundedReceiver<Change<Seen>>,
    seen: Option<Arc<Seen>>,
    /// What the watch said last, as long as no pass has taken it in.
    unseen: Option<Option<Arc<Seen>>>,
    board: Board,
    attempts: JoinSet<Attempt>,
    running: HashMap<TagKey, (u64, AbortHandle)>,
    bytes_tx: UnboundedSender<Bytes>,
    bytes: UnboundedReceiver<Bytes>,
    speeds: report::Speeds,
    publisher: Publisher,
    writes: JoinSet<Written>,
    written_version: u64,
    /// Work on a tag has panicked in this pass.
    panicked: bool,
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
            unseen: None,
            board: Board::default(),
            attempts: JoinSet::new(),
            running: HashMap::new(),
            bytes_tx,
            bytes,
            speeds: report::Speeds::default(),
            publisher: Publisher::new(spread),
            writes: JoinSet::new(),
            written_version: 0,
            panicked: false,
        }
    }

    /// Works until shutdown.
    pub(super) async fn run(mut self) {
        let shutdown = self.ctx.shutdown.clone();
        let mut runtimes = self.ctx.runtimes.subscribe();
        let step = self.ctx.health.progress.waiting(NAME);
        let mut news = News::Look;
        loop {
            let passed = isolated_now(NAME, "pass", || self.pass(news)).flatten();
            let wake = passed.as_ref().map_or(Some(AFTER_PANIC), |wake| *wake);
            step.idle(wake);
            // What happens meanwhile waits: it may be what the pass panics at.
            if passed.is_err() && shutdown.run_until_cancelled(sleep(AFTER_PANIC)).await.is_none() {
                break;
            }
            news = tokio::select! {
                Some(change) = self.changes.recv() => {
                    self.unseen = Some(change.new);
                    News::Look
                }
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

    /// Takes in what has happened, plans and acts. Returns how long to sleep if nothing happens; none is for ever. What
    /// panics at one tag concerns that alone; an error is a panic that belongs to none.
    fn pass(&mut self, news: News) -> Result<Option<Duration>, Panicked> {
        let (now, limits) = (self.ctx.cluster.clock.now(), self.limits());
        match news {
            News::Ended(Ok((key, run, ended))) => {
                self.of_tag(&key, now, |duty| duty.ended(&key, run, ended));
            }
            // Only what was stopped ends without a result.
            News::Ended(Err(_)) | News::Look => {}
            News::Bytes((key, run, progress)) => {
                self.of_tag(&key, now, |duty| duty.advanced(&key, run, progress));
            }
            News::Wrote(written) => self.wrote(written.map(|written| *written)),
        }
        // One that panics stays for the next pass; what was known before is worked on.
        if let Some(seen) = self.unseen.clone() {
            match isolated_now(NAME, "NodeImage", || self.observe(seen)) {
                Ok(()) => self.unseen = None,
                Err(_) => self.panicked = true,
            }
        }
        let plan = self.look(now, |board, _| plan::plan(board, &limits, now))?;
        for step in &plan.steps {
            tracing::debug!(?step, "next step");
            let (Step::Start { key, .. } | Step::GiveUp { key, .. }) = step;
            self.of_tag(key, now, |duty| duty.act(step, now));
        }
        let live = self.look(now, |board, speeds| report::live(board, &limits, speeds));
        let shown = live.map(|new| {
            self.ctx.live.pulls.send_if_modified(|shown| {
                let changed = *shown != new;
                *shown = new;
                changed
            })
        });
        let publish = self.publish(&limits, now)?;
        shown?;
        let until = |t: Timestamp| Duration::try_from(t.duration_since(now)).unwrap_or_default();
        let wake = plan.wake.into_iter().chain(publish).min();
        let wake = wake.map(|t| until(t).min(LONGEST_SLEEP));
        let again = std::mem::take(&mut self.panicked).then_some(AFTER_PANIC);
        Ok(wake.into_iter().chain(again).min())
    }

    /// Looks at all tags; see [`looked`].
    fn look<T>(
        &mut self,
        now: Timestamp,
        look: impl Fn(&Board, &report::Speeds) -> T,
    ) -> Result<T, Panicked> {
        let (seen, failed) = looked(&mut self.board, now, |board| look(board, &self.speeds));
        for (key, outcome) in failed {
            self.failed(&key, outcome, now);
        }
        seen
    }

    /// Works on one tag. A panic fails that tag's attempt.
    fn of_tag(&mut self, key: &TagKey, now: Timestamp, work: impl FnOnce(&mut Self)) {
        if let Err(panicked) = isolated_now(NAME, image(key), || work(self)) {
            let outcome = self.board.panicked(key, panicked.to_string(), now);
            self.failed(key, outcome, now);
        }
    }

    /// Work on a tag has panicked, with that outcome.
    fn failed(&mut self, key: &TagKey, outcome: Outcome, now: Timestamp) {
        self.panicked = true;
        self.stop(key);
        let _ = isolated_now(NAME, image(key), || self.conclude(key, outcome, now));
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

    fn observe(&mut self, seen: Option<Arc<Seen>>) {
        let (before, now) = (self.seen.as_ref(), seen.as_ref());
        // The echo of a write of ours is no news: its answer may be what was lost.
        if before.map(|seen| &seen.asks) != now.map(|seen| &seen.asks) {
            self.publisher.heard();
        }
        let old_uid = self.seen.as_ref().map(|s| s.uid.clone());
        let other = seen.as_ref().map(|s| s.uid.clone()) != old_uid;
        if other {
            for key in self.board.clear() {
                self.stop(&key);
            }
            self.publisher = Publisher::new(self.publisher.spread);
            self.publisher.stored = seen.as_ref().map(|s| s.status.clone()).unwrap_or_default();
            self.written_version = 0;
        }
        if let Some(seen) = &seen {
            // While a write of ours is under way, and until its echo, the watch is behind what we know.
            if self.writes.is_empty() && seen.version >= self.written_version {
                self.publisher.stored = seen.status.clone();
            }
            let stored = status::by_tag(&seen.status);
            for key in self.board.desire(&seen.asks, &stored) {
                self.stop(&key);
            }
        }
        self.seen = seen;
    }

    fn ended(&mut self, key: &TagKey, run: u64, ended: Ended) {
        if self.running.get(key).is_some_and(|(current, _)| *current == run) {
            self.running.remove(key);
            self.speeds.forget(key);
        }
        let now = self.ctx.cluster.clock.now();
        let outcome = self.board.ended(key, run, ended, now);
        self.conclude(key, outcome, now);
    }

    /// Tells what came of an attempt.
    fn conclude(&self, key: &TagKey, outcome: Outcome, now: Timestamp) {
        match outcome {
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
    fn publish(&mut self, limits: &Limits, now: Timestamp) -> Result<Option<Timestamp>, Panicked> {
        if self.seen.is_none() || !self.writes.is_empty() {
            return Ok(None);
        }
        let current = self.look(now, |board, _| status::compose(board, limits))?;
        let current = self.publisher.told(current, now);
        Ok(match self.publisher.when(&current, now) {
            When::Never => None,
            When::At(t) => Some(t),
            When::Now => {
                self.write(&current);
                None
            }
        })
    }

    fn write(&mut self, current: &kruise_api::node_image::NodeImageStatus) {
        let Some(seen) = &self.seen else { return };
        let mut patch = publish::patch(&self.publisher.stored, current);
        // Refused if the NodeImage was made anew meanwhile.
        set(&mut patch, &["metadata", "uid"], serde_json::json!(seen.uid));
        let (client, name) = (self.ctx.cluster.client.clone(), self.ctx.node_name.clone());
        let what = "writing the NodeImage's status";
        let step = self.ctx.health.progress.begin(NAME, what, write::DEADLINE);
        self.writes.spawn(async move {
            let _step = step;
            let api = Api::all(client);
            let written = isolated(NAME, what, write::patch_status_merge(&api, &name, &patch)).await;
            written
                .unwrap_or_else(|panicked| Err(panicked.into()))
                .and_then(Stored::object)
        });
    }

    fn wrote(&mut self, written: Option<Written>) {
        let now = self.ctx.cluster.clock.now();
        match written {
            Some(Ok(object)) => {
                self.written_version = observe::version(&object.metadata);
                self.publisher.wrote(object.status.unwrap_or_default(), now);
            }
            Some(Err(error)) if error.lasting() => {
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

/// What `look` says of all tags. Where it panics, each is looked at by itself: where that panics too, an attempt of the tag
/// has failed, and where that does not help, the tag is given up. Returns what came of these, too.
fn looked<T>(
    board: &mut Board,
    now: Timestamp,
    look: impl Fn(&Board) -> T,
) -> (Result<T, Panicked>, Vec<(TagKey, Outcome)>) {
    let all = |board: &Board| isolated_now(NAME, "all tags", || look(board));
    let seen = all(board);
    if seen.is_ok() {
        return (seen, Vec::new());
    }
    let mut failed = Vec::new();
    for key in board.tasks().keys().cloned().collect::<Vec<_>>() {
        let alone = |board: &Board| isolated_now(NAME, image(&key), || drop(look(&board.only(&key))));
        let Err(panicked) = alone(board) else { continue };
        let mut outcome = board.panicked(&key, panicked.to_string(), now);
        if outcome == Outcome::Continues && alone(board).is_err() {
            let (key, words) = (key.clone(), panicked.to_string());
            board.apply(&Step::GiveUp { key, words }, now);
            outcome = Outcome::Over;
        }
        failed.push((key, outcome));
    }
    (all(board), failed)
}

/// A tag in words.
fn image(key: &TagKey) -> String {
    join(&key.name, &key.tag)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::collections::BTreeSet;

    use kube::client::Body;
    use serde_json::Value;

    use super::super::plan::tests::{LIMITS, ask_in, at, go, key};
    use super::super::plan::{Stage, Task};
    use super::*;
    use kruise_api::node_image::ImagePullPhase;
    use kruise_cluster::Key;
    use kruise_ops::logs::lines_of;
    use kruise_ops::metrics::metrics;
    use kruise_ops::panics::injected::panic_at;

    fn board() -> Board {
        let tags = ["bad", "good", "plain"].map(|tag| (key(tag), ask_in(tag, tag)));
        let mut board = Board::default();
        board.desire(&tags.into(), &BTreeMap::new());
        board
    }

    /// What is to begin, where a look panics at `bad` in these stages.
    fn plan_of(
        board: &mut Board,
        now: i64,
        panics: impl Fn(&Task) -> bool,
    ) -> (BTreeSet<String>, Vec<(TagKey, Outcome)>) {
        let (plan, failed) = looked(board, at(now), |board| {
            assert!(
                !board.get(&key("bad")).is_some_and(&panics),
                "index out of bounds"
            );
            plan::plan(board, &LIMITS, at(now))
        });
        let begin = plan.unwrap().steps.into_iter().filter_map(|step| match step {
            Step::Start { key, .. } => Some(key.tag),
            Step::GiveUp { .. } => None,
        });
        (begin.collect(), failed)
    }

    #[test]
    fn a_tag_that_panics_is_backed_off_and_the_others_go_on() {
        let mut board = board();
        let counted = || metrics().panics.get_or_create(&[("task", NAME.to_owned())]).get();
        let (before, goods) = (counted(), ["good", "plain"].map(str::to_owned).into());
        let waits = |task: &Task| task.stage == Stage::Waiting;
        let lines = lines_of(|| {
            let expected = (goods, vec![(key("bad"), Outcome::Continues)]);
            assert_eq!(plan_of(&mut board, 0, waits), expected);
        });
        assert!(lines.iter().any(|line| line.contains("nginx:bad")), "{lines:?}");
        assert!(counted() > before);
        let task = board.get(&key("bad")).unwrap();
        assert_eq!(
            (&task.stage, task.last_error.as_deref()),
            (
                &Stage::BackOff { until: at(1) },
                Some("panic: index out of bounds")
            )
        );
        assert_eq!(go(&mut board, &LIMITS, at(0)).len(), 2);
    }

    #[test]
    fn a_tag_that_panics_whatever_it_does_is_given_up() {
        let mut board = board();
        let (begin, failed) = plan_of(&mut board, 0, |task| !task.is_done());
        assert_eq!((begin.len(), failed), (2, vec![(key("bad"), Outcome::Over)]));
        let status = status::by_tag(&status::compose(&board, &LIMITS)).remove(&key("bad"));
        let status = status.unwrap();
        assert_eq!(
            (status.phase, status.message.as_deref()),
            (ImagePullPhase::Failed, Some("panic: index out of bounds"))
        );
    }

    #[test]
    fn a_panic_ends_the_attempt_that_runs() {
        let mut board = board();
        let begun = go(&mut board, &LIMITS, at(0));
        let (_, run) = begun.into_iter().find(|(k, _)| *k == key("bad")).unwrap();
        let words = "panic: no".to_owned();
        assert_eq!(
            board.panicked(&key("bad"), words.clone(), at(1)),
            Outcome::Continues
        );
        let late = board.ended(&key("bad"), run, super::super::plan::tests::pulled(), at(2));
        assert_eq!(late, Outcome::Stale);
        assert_eq!(board.get(&key("bad")).unwrap().attempts, 1);
        for now in [3, 4] {
            board.panicked(&key("bad"), words.clone(), at(now));
        }
        assert!(board.get(&key("bad")).unwrap().is_done());
        assert_eq!(board.panicked(&key("bad"), words, at(5)), Outcome::Stale);
    }

    /// A duty that works on these asks, the messages of their tags as they are written, and what ends it.
    fn working(asks: BTreeMap<TagKey, Ask>) -> (UnboundedReceiver<Vec<String>>, tokio_util::sync::DropGuard) {
        let (written, messages) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let written = written.clone();
            async move {
                let patch =
                    request.method() == http::Method::PATCH && request.uri().path().ends_with("/status");
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut answer = serde_json::json!({ "metadata": { "name": "n", "uid": "n" }, "spec": {} });
                if patch {
                    let status = serde_json::from_slice::<Value>(&body).unwrap()["status"].take();
                    let messages = messages_of(&status);
                    answer["status"] = status;
                    let _ = written.send(messages);
                }
                http::Response::builder().body(Body::from(answer.to_string().into_bytes()))
            }
        });
        let ctx = Context::of(kube::Client::new(service, "default"));
        let shutdown = ctx.shutdown.clone().drop_guard();
        let (changes_tx, changes) = mpsc::unbounded_channel();
        let seen = Seen {
            uid: "n".to_owned(),
            asks,
            ..Seen::default()
        };
        changes_tx
            .send(Change {
                key: Key::cluster("n"),
                old: None,
                new: Some(Arc::new(seen)),
            })
            .unwrap();
        tokio::spawn(async move {
            Duty::new(ctx, changes).run().await;
            drop(changes_tx);
        });
        (messages, shutdown)
    }

    fn messages_of(status: &Value) -> Vec<String> {
        let status: kruise_api::node_image::NodeImageStatus = serde_json::from_value(status.clone()).unwrap();
        let tags = status::by_tag(&status).into_values();
        tags.filter_map(|tag| tag.message).collect()
    }

    async fn within<T>(what: &str, limit: u64, work: impl Future<Output = T>) -> T {
        let Ok(done) = timeout(Duration::from_secs(limit), work).await else {
            panic!("{what}: not within {limit} s");
        };
        done
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_while_the_status_is_written_is_a_write_that_failed() {
        let panics = panic_at(NAME, "writing the NodeImage's status");
        let (mut written, _shutdown) = working([(key("unwritten"), ask_in("unwritten", "a"))].into());
        let begun = tokio::time::Instant::now();
        panics.happened(3).await;
        assert!(
            begun.elapsed() >= Duration::from_millis(300),
            "{:?}",
            begun.elapsed()
        );
        assert!(written.try_recv().is_err());
        drop(panics);
        within("the status", 600, written.recv()).await.unwrap();
    }

    /// Whether the whole pass panics or what the NodeImage says.
    #[tokio::test(start_paused = true)]
    async fn what_panics_in_a_pass_is_done_again_after_a_pause() {
        for object in ["pass", "NodeImage"] {
            let panics = panic_at(NAME, object);
            let begun = tokio::time::Instant::now();
            let (mut written, _shutdown) = working([(key("again"), ask_in("again", "a"))].into());
            panics.happened(3).await;
            assert!(
                begun.elapsed() >= AFTER_PANIC * 2,
                "{object}: {:?}",
                begun.elapsed()
            );
            drop(panics);
            within("the status", 600, written.recv()).await.unwrap();
        }
    }

    /// Whatever is done about a tag panics: its tries are used up without a pull, and other tags are pulled.
    #[tokio::test(start_paused = true)]
    async fn a_tag_whose_steps_panic_fails_alone() {
        let (bad, good) = (key("steps"), key("beside"));
        let panics = panic_at(NAME, &image(&bad));
        let asks = [&bad, &good].map(|key| (key.clone(), ask_in(&key.tag, "a")));
        let (mut written, _shutdown) = working(asks.into());
        let mut last = Vec::new();
        within("the end of both", 3600, async {
            while last.len() < 2 || !last.iter().any(|message: &String| message == "panic: injected") {
                last = written.recv().await.unwrap();
            }
        })
        .await;
        assert!(panics.times() > 0);
    }

    /// The runtime panics at each pull: its tries are used up, and the status says why.
    #[tokio::test(start_paused = true)]
    async fn a_pull_that_panics_is_a_try_that_failed() {
        let (mut written, _shutdown) = working([(key("panicking"), ask_in("panicking", "a"))].into());
        let mut told = Vec::new();
        within("the end of the pull", 3600, async {
            while told.last().is_none_or(|last| *last != ["panic: image_status"]) {
                told.push(written.recv().await.unwrap());
            }
        })
        .await;
        let tries = "attempt 2 of 3; the last one failed: panic: image_status";
        assert!(
            told.iter().flatten().any(|message| message.ends_with(tries)),
            "{told:?}"
        );
    }
}
