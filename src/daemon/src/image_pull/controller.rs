//! The reconcile loop: receives events, calls [`super::plan`], acts and reports.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use kube::Api;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::{sleep, timeout};

use super::node_credentials::service_accounts::ServiceAccounts;
use super::node_credentials::{LOOKUP_TIMEOUT, NodeCredentials, shown_account_problems};
use super::observe::{self, ObservedNodeImage};
use super::pins::{PIN_TIMEOUT, PinRequests, sleep_or_pend};
use super::plan::board::AttemptOutcome;
use super::plan::publish::{self, StatusPublisher, WriteTime};
use super::plan::service_accounts::tag_accounts;
use super::plan::start_jitter::StartJitter;
use super::plan::{
    self, AttemptResult, PullLimits, PullProgress, PullSpec, PullStep, TagKey, TaskBoard, status,
};
use super::{act, report};
use crate::Context;
use kruise_api::image_reference::{ImageReference, join_name_and_tag};
use kruise_api::json::set;
use kruise_api::node_image::{NodeImage, NodeImageStatus};
use kruise_api::unconfirmed::CONFIRM_TIMEOUT;
use kruise_cluster::clock::duration_until;
use kruise_cluster::write::Stored;
use kruise_cluster::{self as cluster, Change, write};
use kruise_cri::Runtimes;
use kruise_ops::panics::{Panicked, catch_panic, catch_panic_sync};
use kruise_ops::traces::{Span, SpanContext};

/// The API server's clock may be corrected while we sleep.
const MAX_SLEEP: Duration = Duration::from_secs(30);
/// Timeout for the last status write at shutdown.
const SHUTDOWN_FLUSH_TIMEOUT: Duration = Duration::from_millis(1500);

/// The controller's name in `/healthz`.
const NAME: &str = "image pull";
/// Delay after a reconcile in which something panicked.
const PANIC_BACKOFF: Duration = Duration::from_secs(5);

type TagProgress = (TagKey, u64, PullProgress);
type EndedAttempt = (TagKey, u64, AttemptResult);
type WriteResult = Result<NodeImage, cluster::Error>;

/// What triggers a reconcile.
enum PullEvent {
    AttemptEnded(Result<EndedAttempt, JoinError>),
    Progress(TagProgress),
    StatusWritten(Option<Box<WriteResult>>),
    /// The NodeImage changed, a runtime appeared or disappeared, or a timer fired.
    Wake,
}

pub(super) struct ImagePullController {
    ctx: Context,
    credentials: CredentialSources,
    pins: Arc<PinRequests>,
    changes: UnboundedReceiver<Change<ObservedNodeImage>>,
    observed: Option<Arc<ObservedNodeImage>>,
    /// The last change from the watch, until a reconcile has handled it.
    pending_change: Option<Option<Arc<ObservedNodeImage>>>,
    board: TaskBoard,
    attempts: JoinSet<EndedAttempt>,
    running_attempts: HashMap<TagKey, (u64, AbortHandle)>,
    progress_tx: UnboundedSender<TagProgress>,
    progress_rx: UnboundedReceiver<TagProgress>,
    transfer_rates: report::TransferRates,
    publisher: StatusPublisher,
    status_writes: JoinSet<WriteResult>,
    /// The resource version of our last write, until the watch has had time to show it.
    written: Option<(u64, tokio::time::Instant)>,
    /// Work on a tag has panicked in this reconcile.
    panicked: bool,
}

impl ImagePullController {
    pub(super) fn new(
        ctx: Context,
        changes: UnboundedReceiver<Change<ObservedNodeImage>>,
        node_credentials: NodeCredentials,
        pins: Arc<PinRequests>,
    ) -> Self {
        let (bytes_tx, progress_rx) = mpsc::unbounded_channel();
        let jitter = ctx
            .node_name
            .bytes()
            .fold(7_i64, |h, b| h.wrapping_mul(31).wrapping_add(i64::from(b)));
        let credentials = CredentialSources {
            client: ctx.cluster.client.clone(),
            node: Arc::new(node_credentials),
            accounts: Arc::new(ServiceAccounts::new(ctx.cluster.client.clone(), &ctx.node_name)),
            check_disk: ctx.options.check_image_disk,
        };
        let start_jitter = StartJitter::new(ctx.options.image_pull_start_jitter, &ctx.node_name);
        Self {
            ctx,
            credentials,
            pins,
            changes,
            observed: None,
            pending_change: None,
            board: TaskBoard::with_start_jitter(start_jitter),
            attempts: JoinSet::new(),
            running_attempts: HashMap::new(),
            progress_tx: bytes_tx,
            progress_rx,
            transfer_rates: report::TransferRates::default(),
            publisher: StatusPublisher::new(jitter),
            status_writes: JoinSet::new(),
            written: None,
            panicked: false,
        }
    }

    /// Runs until shutdown.
    pub(super) async fn run(mut self) {
        let shutdown = self.ctx.shutdown.clone();
        let mut runtimes = self.ctx.runtimes.subscribe();
        let step = self.ctx.health.progress.begin_idle(NAME);
        let mut event = PullEvent::Wake;
        loop {
            let result = catch_panic_sync(NAME, "reconcile", || self.reconcile(event)).flatten();
            let requeue_after = result.as_ref().map_or(Some(PANIC_BACKOFF), |wake| *wake);
            step.set_idle(requeue_after);
            // New events wait: one of them may cause the panic.
            if result.is_err() && shutdown.run_until_cancelled(sleep(PANIC_BACKOFF)).await.is_none() {
                break;
            }
            event = tokio::select! {
                Some(change) = self.changes.recv() => {
                    self.pending_change = Some(change.new);
                    PullEvent::Wake
                }
                Some(ended) = self.attempts.join_next() => PullEvent::AttemptEnded(ended),
                Some(bytes) = self.progress_rx.recv() => PullEvent::Progress(bytes),
                Some(written) = self.status_writes.join_next() => PullEvent::StatusWritten(written.ok().map(Box::new)),
                Ok(()) = runtimes.changed() => PullEvent::Wake,
                () = sleep_or_pend(requeue_after) => PullEvent::Wake,
                () = shutdown.cancelled() => break,
            };
        }
        self.flush_status().await;
    }

    fn limits(&self) -> PullLimits {
        let runtime = self.ctx.runtimes.health().iter().any(|s| s.healthy);
        PullLimits {
            max_per_registry: self.ctx.options.max_pulls_per_registry(),
            ..PullLimits::for_node(self.ctx.options.max_pulls(), runtime)
        }
    }

    /// Handles the event, plans and acts. Returns the delay until the next reconcile without an event; `None` means no
    /// timer. A panic in the work on one tag affects only that tag; an error is a panic that belongs to no tag.
    fn reconcile(&mut self, event: PullEvent) -> Result<Option<Duration>, Panicked> {
        let (now, limits) = (self.ctx.cluster.clock.now(), self.limits());
        match event {
            PullEvent::AttemptEnded(Ok((key, run, ended))) => {
                self.with_tag(&key, now, |duty| duty.on_attempt_ended(&key, run, ended));
            }
            // Only a cancelled attempt ends without a result.
            PullEvent::AttemptEnded(Err(_)) | PullEvent::Wake => {}
            PullEvent::Progress((key, run, progress)) => {
                self.with_tag(&key, now, |duty| duty.on_progress(&key, run, progress));
            }
            PullEvent::StatusWritten(written) => self.on_status_written(written.map(|written| *written)),
        }
        // A change that panics is kept for the next reconcile; until then the previous NodeImage is used.
        if let Some(change) = self.pending_change.clone() {
            match catch_panic_sync(NAME, "NodeImage", || self.on_node_image(change)) {
                Ok(()) => self.pending_change = None,
                Err(_) => self.panicked = true,
            }
        }
        let plan = self.evaluate(now, |board, _| plan::plan(board, &limits, now))?;
        for step in &plan.steps {
            tracing::debug!(?step, "next step");
            let (PullStep::Start { key, .. } | PullStep::GiveUp { key, .. }) = step;
            self.with_tag(key, now, |duty| duty.apply_step(step, now));
        }
        self.board.end_pauses(now);
        let live_pulls = self.evaluate(now, |board, speeds| report::live_pulls(board, &limits, speeds));
        let shown_result = live_pulls.map(|new| {
            self.ctx.live.pulls.send_if_modified(|shown| {
                let changed = *shown != new;
                *shown = new;
                changed
            })
        });
        let publish = self.publish_status(&limits, now)?;
        shown_result?;
        let requeue_at = plan.requeue_at.into_iter().chain(publish).min();
        let requeue_after = requeue_at.map(|at| duration_until(at, now).min(MAX_SLEEP));
        let retry_after = std::mem::take(&mut self.panicked).then_some(PANIC_BACKOFF);
        Ok(requeue_after.into_iter().chain(retry_after).min())
    }

    /// Evaluates all tags; see [`evaluate_tags`].
    fn evaluate<T>(
        &mut self,
        now: Timestamp,
        evaluate: impl Fn(&TaskBoard, &report::TransferRates) -> T,
    ) -> Result<T, Panicked> {
        let (result, failed) = evaluate_tags(&mut self.board, now, |board| {
            evaluate(board, &self.transfer_rates)
        });
        for (key, outcome) in failed {
            self.on_tag_panic(&key, outcome, now);
        }
        result
    }

    /// Works on one tag. A panic fails that tag's attempt.
    fn with_tag(&mut self, key: &TagKey, now: Timestamp, work: impl FnOnce(&mut Self)) {
        if let Err(panicked) = catch_panic_sync(NAME, image_name(key), || work(self)) {
            let outcome = self.board.on_panic(key, panicked.to_string(), now);
            self.on_tag_panic(key, outcome, now);
        }
    }

    /// Handles the outcome of a panic in the work on a tag.
    fn on_tag_panic(&mut self, key: &TagKey, outcome: AttemptOutcome, now: Timestamp) {
        self.panicked = true;
        self.stop_attempt(key);
        let _ = catch_panic_sync(NAME, image_name(key), || self.report_outcome(key, outcome, now));
    }

    fn apply_step(&mut self, step: &PullStep, now: Timestamp) {
        let run = self.board.apply(step, now);
        match step {
            PullStep::Start { key, timeout, .. } => {
                if let Some(run) = run {
                    self.start_attempt(key, run, *timeout);
                }
            }
            PullStep::GiveUp { key, .. } => {
                self.stop_attempt(key);
                self.report_end(key, now);
            }
        }
    }

    fn start_attempt(&mut self, key: &TagKey, run: u64, timeout: SignedDuration) {
        let Some(task) = self.board.get(key) else { return };
        report::attempt_started(key, task);
        let (spec, name) = (task.spec.clone(), report::image_reference(key, task));
        let (credentials, runtimes) = (self.credentials.clone(), self.ctx.runtimes.clone());
        let (pulls, progress_tx) = (self.ctx.live.pulls.clone(), self.progress_tx.clone());
        let (pins, clock) = (Arc::clone(&self.pins), self.ctx.cluster.clock.clone());
        let timeout = Duration::try_from(timeout).unwrap_or_default();
        let step = self.ctx.health.progress.begin(
            NAME,
            format!("pulling {name}"),
            timeout
                .saturating_add(act::SECRETS_TIMEOUT)
                .saturating_add(LOOKUP_TIMEOUT * 2)
                .saturating_add(PIN_TIMEOUT)
                .saturating_add(write::REQUEST_TIMEOUT),
        );
        let task_key = key.clone();
        let spans = report::attempt_spans(&name, &self.ctx.node_name, task);
        let scope = AttemptScope {
            namespace: task.owner.namespace.clone(),
            timeout,
            span: spans.first().and_then(Span::context),
        };
        let handle = self.attempts.spawn(async move {
            let _step = step;
            let on_progress = |progress| drop(progress_tx.send((task_key.clone(), run, progress)));
            let watched = || pulls.receiver_count() > 0;
            let image = spec.image.clone().unwrap_or_default();
            let attempt = async {
                let pull = pull_tag(credentials, runtimes.clone(), spec, scope, watched, on_progress);
                pins.after_pull(pull.await, &task_key, &image, &runtimes, &clock)
                    .await
            };
            let result = catch_panic(NAME, &name, attempt)
                .await
                .unwrap_or_else(|panicked| AttemptResult::Failed {
                    message: panicked.to_string(),
                    retry: plan::AttemptRetry::Counted,
                });
            report::end_spans(spans, &result);
            (task_key, run, result)
        });
        self.running_attempts.insert(key.clone(), (run, handle));
    }

    /// Cancels an attempt; the runtime cancels the pull when its caller disconnects.
    fn stop_attempt(&mut self, key: &TagKey) {
        self.transfer_rates.forget(key);
        if let Some((_, handle)) = self.running_attempts.remove(key) {
            handle.abort();
            report::attempt_cancelled(key);
        }
    }

    fn on_node_image(&mut self, observed: Option<Arc<ObservedNodeImage>>) {
        let (previous, current) = (self.observed.as_ref(), observed.as_ref());
        // The watch event of our own write does not count as contact: its response may be what was lost.
        if previous.map(|observed| &observed.specs) != current.map(|observed| &observed.specs) {
            self.publisher.on_server_contact();
        }
        let old_uid = self.observed.as_ref().map(|s| s.uid.clone());
        let replaced = observed.as_ref().map(|s| s.uid.clone()) != old_uid;
        if replaced {
            for key in self.board.clear() {
                self.stop_attempt(&key);
            }
            self.publisher = StatusPublisher::new(self.publisher.jitter);
            self.publisher.stored = observed.as_ref().map(|s| s.status.clone()).unwrap_or_default();
            self.written = None;
        }
        if let Some(observed) = &observed {
            // During a write of ours, and until the watch shows it, the watch is behind our status.
            let is_behind = self.written.is_some_and(|(version, at)| {
                observed.resource_version < version && at.elapsed() < CONFIRM_TIMEOUT
            });
            if self.status_writes.is_empty() && !is_behind {
                self.publisher.stored = observed.status.clone();
            }
            let stored = status::by_tag(&observed.status);
            self.pins.sync(&observed.specs);
            for (key, image) in self.board.late_pins(&observed.specs) {
                self.pins.add_late(key, image);
            }
            for key in self.board.sync_spec(&observed.specs, &stored) {
                self.stop_attempt(&key);
            }
        }
        self.observed = observed;
    }

    fn on_attempt_ended(&mut self, key: &TagKey, run: u64, result: AttemptResult) {
        if self
            .running_attempts
            .get(key)
            .is_some_and(|(current, _)| *current == run)
        {
            self.running_attempts.remove(key);
            self.transfer_rates.forget(key);
        }
        let now = self.ctx.cluster.clock.now();
        let outcome = self.board.on_attempt_ended(key, run, result, now);
        self.report_outcome(key, outcome, now);
    }

    /// Reports the outcome of an attempt.
    fn report_outcome(&self, key: &TagKey, outcome: AttemptOutcome, now: Timestamp) {
        match outcome {
            AttemptOutcome::Finished => self.report_end(key, now),
            AttemptOutcome::WillRetry => report::attempt_failed(key, &self.board),
            AttemptOutcome::Stale => {}
        }
    }

    /// Handles new progress; that of a cancelled attempt is ignored.
    fn on_progress(&mut self, key: &TagKey, run: u64, progress: PullProgress) {
        if self
            .running_attempts
            .get(key)
            .is_some_and(|(current, _)| *current == run)
        {
            self.transfer_rates.sample(key, progress.done, Instant::now());
            self.board
                .set_progress(key, run, progress, self.ctx.cluster.clock.now());
        }
    }

    fn report_end(&self, key: &TagKey, now: Timestamp) {
        let (Some(observed), Some(task)) = (&self.observed, self.board.get(key)) else {
            return;
        };
        let took = now.duration_since(task.started_at.unwrap_or(now));
        report::publish_end(
            &self.ctx.cluster.events,
            (&self.ctx.node_name, &observed.uid),
            key,
            task,
            Duration::try_from(took).unwrap_or_default(),
        );
    }

    /// Writes the status if it is due. Returns when it is due next.
    fn publish_status(&mut self, limits: &PullLimits, now: Timestamp) -> Result<Option<Timestamp>, Panicked> {
        if self.observed.is_none() || !self.status_writes.is_empty() {
            return Ok(None);
        }
        let current = self.evaluate(now, |board, _| status::compose(board, limits))?;
        let current = self.publishable(current, now);
        Ok(match self.publisher.next_write(&current, now) {
            WriteTime::Never => None,
            WriteTime::At(t) => Some(t),
            WriteTime::Now => {
                self.write_status(&current);
                None
            }
        })
    }

    /// What to publish of a composed status.
    fn publishable(&self, composed: NodeImageStatus, now: Timestamp) -> NodeImageStatus {
        let runtime = observe::runtime_state(&self.ctx.runtimes.health());
        self.publisher.publishable(composed, &runtime, now)
    }

    fn write_status(&mut self, current: &NodeImageStatus) {
        let Some(observed) = &self.observed else { return };
        let mut patch = publish::status_patch(&self.publisher.stored, current);
        // Rejected if the NodeImage was deleted and created again meanwhile.
        set(&mut patch, &["metadata", "uid"], serde_json::json!(observed.uid));
        let (client, name) = (self.ctx.cluster.client.clone(), self.ctx.node_name.clone());
        let what = "writing the NodeImage's status";
        let step = self.ctx.health.progress.begin(NAME, what, write::REQUEST_TIMEOUT);
        self.status_writes.spawn(async move {
            let _step = step;
            let api = Api::all(client);
            let written = catch_panic(NAME, what, write::patch_status_merge(&api, &name, &patch)).await;
            written
                .unwrap_or_else(|panicked| Err(panicked.into()))
                .and_then(Stored::object)
        });
    }

    fn on_status_written(&mut self, written: Option<WriteResult>) {
        let now = self.ctx.cluster.clock.now();
        match written {
            Some(Ok(object)) => {
                let version = observe::resource_version(&object.metadata);
                self.written = Some((version, tokio::time::Instant::now()));
                self.publisher.on_written(object.status.unwrap_or_default(), now);
            }
            Some(Err(error)) if error.permanent() => {
                let category = error.category();
                let next = if self.publisher.on_rejected(now) {
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
                let retry_after = error.retry_after().and_then(|d| SignedDuration::try_from(d).ok());
                self.publisher.on_failed(retry_after, now);
            }
            None => self.publisher.on_failed(None, now),
        }
    }

    /// At shutdown: writes the ends of tags that are not written yet.
    async fn flush_status(mut self) {
        self.attempts.abort_all();
        let flush = async {
            while let Some(written) = self.status_writes.join_next().await {
                self.on_status_written(written.ok());
            }
            let now = self.ctx.cluster.clock.now();
            let current = self.publishable(status::compose(&self.board, &self.limits()), now);
            let stored = status::by_tag(&self.publisher.stored);
            let composed: BTreeMap<_, _> = status::by_tag(&current);
            let has_unwritten_end = composed
                .iter()
                .any(|(key, tag)| tag.completion_time.is_some() && stored.get(key) != Some(tag));
            if has_unwritten_end {
                self.write_status(&current);
                while let Some(written) = self.status_writes.join_next().await {
                    self.on_status_written(written.ok());
                }
            }
        };
        if timeout(SHUTDOWN_FLUSH_TIMEOUT, flush).await.is_err() {
            tracing::warn!(
                "could not write the last NodeImage status before shutdown; it will be written after the restart"
            );
        }
    }
}

/// The result of `evaluate` for all tags. If it panics, each tag is evaluated alone: if that panics too, the tag's
/// attempt counts as failed, and if that does not help, the tag is given up. Also returns the outcomes of these tags.
fn evaluate_tags<T>(
    board: &mut TaskBoard,
    now: Timestamp,
    evaluate: impl Fn(&TaskBoard) -> T,
) -> (Result<T, Panicked>, Vec<(TagKey, AttemptOutcome)>) {
    let all = |board: &TaskBoard| catch_panic_sync(NAME, "all tags", || evaluate(board));
    let result = all(board);
    if result.is_ok() {
        return (result, Vec::new());
    }
    let mut failed = Vec::new();
    for key in board.tasks().keys().cloned().collect::<Vec<_>>() {
        let evaluate_alone = |board: &TaskBoard| {
            catch_panic_sync(NAME, image_name(&key), || drop(evaluate(&board.single(&key))))
        };
        let Err(panicked) = evaluate_alone(board) else {
            continue;
        };
        let mut outcome = board.on_panic(&key, panicked.to_string(), now);
        if outcome == AttemptOutcome::WillRetry && evaluate_alone(board).is_err() {
            let (key, message) = (key.clone(), panicked.to_string());
            board.apply(&PullStep::GiveUp { key, message }, now);
            outcome = AttemptOutcome::Finished;
        }
        failed.push((key, outcome));
    }
    (all(board), failed)
}

/// The image of a tag, for messages.
fn image_name(key: &TagKey) -> String {
    join_name_and_tag(&key.name, &key.tag)
}

/// Where credentials come from.
#[derive(Clone)]
struct CredentialSources {
    /// For pull secrets.
    client: kube::Client,
    node: Arc<NodeCredentials>,
    accounts: Arc<ServiceAccounts>,
    check_disk: bool,
}

/// For whom an attempt is, and how long it may take.
struct AttemptScope {
    namespace: String,
    timeout: Duration,
    span: Option<SpanContext>,
}

/// One attempt: reads the credentials, then pulls.
async fn pull_tag(
    sources: CredentialSources,
    runtimes: Runtimes,
    spec: PullSpec,
    scope: AttemptScope,
    watched: impl Fn() -> bool + Send,
    on_progress: impl FnMut(PullProgress) + Send,
) -> AttemptResult {
    let image = spec.image.unwrap_or_default();
    let Some(runtime) = runtimes.preferred() else {
        return AttemptResult::Failed {
            message: "the container runtime has gone".to_owned(),
            retry: plan::AttemptRetry::Prevented,
        };
    };
    // It needs no credentials, and whatever provides these may hang.
    if !spec.always
        && let Some(present) = act::present_image(runtime.as_ref(), &image, scope.timeout).await
    {
        return act::attempt_result(Ok(present), &act::PullSecrets::default());
    }
    let mut secrets = act::read_secrets(&sources.client, &spec.secrets, &spec.owners).await;
    let repository = ImageReference::parse(&image)
        .map(|r| r.repository())
        .unwrap_or_default();
    let accounts = tag_accounts(&spec.service_accounts, &spec.owners, &scope.namespace);
    let of_accounts = sources
        .node
        .lookup_accounts(&repository, &accounts.references, &sources.accounts);
    let of_accounts = Box::pin(of_accounts).await;
    for (namespace, credentials) in of_accounts.credentials {
        secrets.add_account_credentials(namespace, credentials);
    }
    secrets.unread_retry = secrets.unread_retry.max(of_accounts.unread_retry);
    let mut credentials = secrets.credentials(&repository, &scope.namespace);
    let node = sources.node.lookup(&repository, accounts.without_account).await;
    let of_node = node.credentials.into_iter().map(act::SourcedCredentials::of_node);
    credentials.extend(of_node);
    secrets.node_problems = shown_account_problems(of_accounts.problems, &repository, &spec.owners);
    secrets.node_problems.extend(node.problems);
    let attempt = act::PullAttempt {
        credentials,
        anonymous: secrets.is_public_for(&repository, &spec.owners),
        image,
        always: spec.always,
        timeout: scope.timeout,
        labels: spec.labels,
        annotations: spec.annotations,
        check_disk: sources.check_disk,
        span: scope.span,
    };
    act::attempt_result(
        act::run_attempt(runtime.as_ref(), &attempt, watched, on_progress).await,
        &secrets,
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::collections::BTreeSet;

    use kube::client::Body;
    use serde_json::Value;

    use super::super::plan::tests::{LIMITS, at, key, spec_in, start_planned};
    use super::super::plan::{PullStage, PullTask};
    use super::*;
    use kruise_api::node_image::ImagePullPhase;
    use kruise_cluster::Key;
    use kruise_cri::DiscoveryOptions;
    use kruise_ops::logs::captured_lines;
    use kruise_ops::metrics::metrics;
    use kruise_ops::panics::injected::inject_panic;

    fn board() -> TaskBoard {
        let tags = ["bad", "good", "plain"].map(|tag| (key(tag), spec_in(tag, tag)));
        let mut board = TaskBoard::default();
        board.sync_spec(&tags.into(), &BTreeMap::new());
        board
    }

    /// The tags whose pull starts, if evaluating `bad` panics in these stages.
    fn plan_with_panics(
        board: &mut TaskBoard,
        now: i64,
        panics: impl Fn(&PullTask) -> bool,
    ) -> (BTreeSet<String>, Vec<(TagKey, AttemptOutcome)>) {
        let (plan, outcomes) = evaluate_tags(board, at(now), |board| {
            assert!(
                !board.get(&key("bad")).is_some_and(&panics),
                "index out of bounds"
            );
            plan::plan(board, &LIMITS, at(now))
        });
        let begin = plan.unwrap().steps.into_iter().filter_map(|step| match step {
            PullStep::Start { key, .. } => Some(key.tag),
            PullStep::GiveUp { .. } => None,
        });
        (begin.collect(), outcomes)
    }

    #[test]
    fn panicking_tag_backs_off_and_others_continue() {
        let mut board = board();
        let panic_count = || metrics().panics.get_or_create(&[("task", NAME.to_owned())]).get();
        let (before, goods) = (panic_count(), ["good", "plain"].map(str::to_owned).into());
        let is_waiting = |task: &PullTask| task.stage == PullStage::Waiting;
        let lines = captured_lines(|| {
            let expected = (goods, vec![(key("bad"), AttemptOutcome::WillRetry)]);
            assert_eq!(plan_with_panics(&mut board, 0, is_waiting), expected);
        });
        assert!(lines.iter().any(|line| line.contains("nginx:bad")), "{lines:?}");
        assert!(panic_count() > before);
        let task = board.get(&key("bad")).unwrap();
        assert_eq!(
            (&task.stage, task.last_error.as_deref()),
            (
                &PullStage::BackOff { until: at(1) },
                Some("panic: index out of bounds")
            )
        );
        assert_eq!(start_planned(&mut board, &LIMITS, at(0)).len(), 2);
    }

    #[test]
    fn always_panicking_tag_is_given_up() {
        let mut board = board();
        let (begin, failed) = plan_with_panics(&mut board, 0, |task| !task.is_done());
        assert_eq!(
            (begin.len(), failed),
            (2, vec![(key("bad"), AttemptOutcome::Finished)])
        );
        let status = status::by_tag(&status::compose(&board, &LIMITS)).remove(&key("bad"));
        let status = status.unwrap();
        assert_eq!(
            (status.phase, status.message.as_deref()),
            (ImagePullPhase::Failed, Some("panic: index out of bounds"))
        );
    }

    #[test]
    fn panic_ends_the_running_attempt() {
        let mut board = board();
        let started = start_planned(&mut board, &LIMITS, at(0));
        let (_, run) = started.into_iter().find(|(k, _)| *k == key("bad")).unwrap();
        let message = "panic: no".to_owned();
        assert_eq!(
            board.on_panic(&key("bad"), message.clone(), at(1)),
            AttemptOutcome::WillRetry
        );
        let late = board.on_attempt_ended(
            &key("bad"),
            run,
            super::super::plan::tests::pulled_result(),
            at(2),
        );
        assert_eq!(late, AttemptOutcome::Stale);
        assert_eq!(board.get(&key("bad")).unwrap().attempts, 1);
        for now in [3, 4] {
            board.on_panic(&key("bad"), message.clone(), at(now));
        }
        assert!(board.get(&key("bad")).unwrap().is_done());
        assert_eq!(board.on_panic(&key("bad"), message, at(5)), AttemptOutcome::Stale);
    }

    /// A running controller with these specs; returns each status that it writes, and the guard that stops it.
    fn running_controller(
        specs: BTreeMap<TagKey, PullSpec>,
    ) -> (UnboundedReceiver<Value>, tokio_util::sync::DropGuard) {
        running_controller_with(specs, &Value::Null, None)
    }

    /// The same with a stored status, and with other runtimes than the one that panics.
    fn running_controller_with(
        specs: BTreeMap<TagKey, PullSpec>,
        stored: &Value,
        runtimes: Option<Runtimes>,
    ) -> (UnboundedReceiver<Value>, tokio_util::sync::DropGuard) {
        let (written_tx, written) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let written_tx = written_tx.clone();
            async move {
                let patch =
                    request.method() == http::Method::PATCH && request.uri().path().ends_with("/status");
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut response = serde_json::json!({ "metadata": { "name": "n", "uid": "n" }, "spec": {} });
                if patch {
                    let status = serde_json::from_slice::<Value>(&body).unwrap()["status"].take();
                    response["status"] = status.clone();
                    let _ = written_tx.send(status);
                }
                http::Response::builder().body(Body::from(response.to_string().into_bytes()))
            }
        });
        let mut ctx = Context::for_test(kube::Client::new(service, "default"));
        ctx.runtimes = runtimes.unwrap_or(ctx.runtimes);
        let shutdown = ctx.shutdown.clone().drop_guard();
        let (changes_tx, changes) = mpsc::unbounded_channel();
        let observed = ObservedNodeImage {
            uid: "n".to_owned(),
            specs,
            status: serde_json::from_value(stored.clone()).unwrap(),
            ..ObservedNodeImage::default()
        };
        changes_tx
            .send(Change {
                key: Key::cluster_scoped("n"),
                old: None,
                new: Some(Arc::new(observed)),
            })
            .unwrap();
        tokio::spawn(async move {
            let pins = Arc::new(PinRequests::new(0));
            ImagePullController::new(ctx, changes, NodeCredentials::default(), pins)
                .run()
                .await;
            drop(changes_tx);
        });
        (written, shutdown)
    }

    /// After a restore of etcd, resource versions start from an earlier one.
    #[tokio::test(start_paused = true)]
    async fn watch_with_old_versions_is_believed_after_a_while() {
        let service = tower::service_fn(|_: http::Request<Body>| {
            std::future::ready(http::Response::builder().status(500).body(Body::empty()))
        });
        let ctx = Context::for_test(kube::Client::new(service, "default"));
        let (_changes_tx, changes) = mpsc::unbounded_channel();
        let pins = Arc::new(PinRequests::new(0));
        let mut controller = ImagePullController::new(ctx, changes, NodeCredentials::default(), pins);
        let written = |version: &str, desired: i32| {
            let object = serde_json::json!({
                "metadata": { "name": "n", "uid": "n", "resourceVersion": version },
                "spec": {},
                "status": { "desired": desired, "succeeded": 0, "failed": 0, "pulling": 0 },
            });
            serde_json::from_value::<NodeImage>(object).unwrap()
        };
        let watched =
            |version: &str, desired: i32| Some(Arc::new(observe::observe(written(version, desired))));
        controller.on_node_image(watched("8", 1));
        controller.on_status_written(Some(Ok(written("9", 2))));
        controller.on_node_image(watched("5", 3));
        assert_eq!(controller.publisher.stored.desired, 2);
        sleep(CONFIRM_TIMEOUT).await;
        controller.on_node_image(watched("6", 4));
        assert_eq!(controller.publisher.stored.desired, 4);
    }

    fn messages_of(status: &Value) -> Vec<String> {
        let status: NodeImageStatus = serde_json::from_value(status.clone()).unwrap();
        let tags = status::by_tag(&status).into_values();
        tags.filter_map(|tag| tag.message).collect()
    }

    async fn with_timeout<T>(what: &str, timeout_seconds: u64, future: impl Future<Output = T>) -> T {
        let Ok(output) = timeout(Duration::from_secs(timeout_seconds), future).await else {
            panic!("{what}: not within {timeout_seconds} s");
        };
        output
    }

    #[tokio::test(start_paused = true)]
    async fn panicking_node_image_status_write_is_retried() {
        let panics = inject_panic(NAME, "writing the NodeImage's status");
        let (mut written, _shutdown) =
            running_controller([(key("unwritten"), spec_in("unwritten", "a"))].into());
        let started = tokio::time::Instant::now();
        panics.wait_for(3).await;
        assert!(
            started.elapsed() >= Duration::from_millis(300),
            "{:?}",
            started.elapsed()
        );
        assert!(written.try_recv().is_err());
        drop(panics);
        with_timeout("the status", 600, written.recv()).await.unwrap();
    }

    /// Whether the whole reconcile panics, or only the handling of the NodeImage.
    #[tokio::test(start_paused = true)]
    async fn panicking_pull_reconcile_is_retried_after_backoff() {
        for object in ["reconcile", "NodeImage"] {
            let panics = inject_panic(NAME, object);
            let started = tokio::time::Instant::now();
            let (mut written, _shutdown) = running_controller([(key("again"), spec_in("again", "a"))].into());
            panics.wait_for(3).await;
            assert!(
                started.elapsed() >= PANIC_BACKOFF * 2,
                "{object}: {:?}",
                started.elapsed()
            );
            drop(panics);
            with_timeout("the status", 600, written.recv()).await.unwrap();
        }
    }

    /// All work on a tag panics: its attempts are used up without a pull, and other tags are pulled.
    #[tokio::test(start_paused = true)]
    async fn tag_with_panicking_steps_fails_alone() {
        let (bad, good) = (key("steps"), key("beside"));
        let panics = inject_panic(NAME, &image_name(&bad));
        let specs = [&bad, &good].map(|key| (key.clone(), spec_in(&key.tag, "a")));
        let (mut written, _shutdown) = running_controller(specs.into());
        let mut last = Vec::new();
        with_timeout("the end of both", 3600, async {
            while last.len() < 2 || !last.iter().any(|message: &String| message == "panic: injected") {
                last = messages_of(&written.recv().await.unwrap());
            }
        })
        .await;
        assert!(panics.times() > 0);
    }

    /// No further status is written.
    async fn assert_no_write(written: &mut UnboundedReceiver<Value>) {
        let next = timeout(Duration::from_secs(3600), written.recv()).await;
        assert!(next.is_err(), "{next:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn missing_runtime_is_reported_once() {
        let runtimes = Runtimes::new(&DiscoveryOptions {
            root: "/nonexistent".into(),
            socket_file: Some("cri.sock".into()),
        });
        runtimes.probe_all().await;
        let (mut written, _shutdown) =
            running_controller_with(BTreeMap::new(), &Value::Null, Some(runtimes.clone()));
        let mut status = with_timeout("the condition", 60, written.recv()).await.unwrap();
        let mut condition = status["conditions"][0].take();
        assert!(condition["lastTransitionTime"].take().is_string());
        let expected = serde_json::json!({
            "type": "RuntimeReady", "status": "False", "reason": "NoRuntime", "lastTransitionTime": null,
            "message": "container runtime is down: no socket at /nonexistent/cri.sock",
        });
        assert_eq!(condition, expected);
        runtimes.probe_all().await;
        assert_no_write(&mut written).await;
    }

    /// A fleet that is upgraded writes nothing where nothing is wrong.
    #[tokio::test(start_paused = true)]
    async fn answering_runtime_is_reported_only_after_a_missing_one() {
        let (mut written, _shutdown) = running_controller(BTreeMap::new());
        assert_no_write(&mut written).await;
        let stored = serde_json::json!({ "desired": 0, "conditions": [{
            "type": "RuntimeReady", "status": "False", "reason": "NoRuntime", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }] });
        let (mut written, _shutdown) = running_controller_with(BTreeMap::new(), &stored, None);
        let status = with_timeout("the condition", 60, written.recv()).await.unwrap();
        let condition = &status["conditions"][0];
        assert_eq!(condition["status"], "True");
        assert_eq!(condition["reason"], "RuntimeReady");
        assert_ne!(condition["lastTransitionTime"], "2026-01-01T00:00:00Z");
        assert_no_write(&mut written).await;
    }

    /// The runtime panics at each pull: the tag's attempts are used up, and the status contains the reason.
    #[tokio::test(start_paused = true)]
    async fn panicking_pull_is_a_failed_attempt() {
        let (mut written, _shutdown) =
            running_controller([(key("panicking"), spec_in("panicking", "a"))].into());
        let mut messages = Vec::new();
        with_timeout("the end of the pull", 3600, async {
            while messages
                .last()
                .is_none_or(|last| *last != ["panic: image_status"])
            {
                messages.push(messages_of(&written.recv().await.unwrap()));
            }
        })
        .await;
        let expected = "attempt 2 of 3; the last one failed: panic: image_status";
        assert!(
            messages
                .iter()
                .flatten()
                .any(|message| message.ends_with(expected)),
            "{messages:?}"
        );
    }
}
