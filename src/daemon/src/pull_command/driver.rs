//! Executes the daemon's plan with one runtime until every image is finished.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::outcome::PullOutcome;
use super::output::{self, ProgressView};
use super::plan::ImageToPull;
use super::signals::StopSignal;
use crate::image_pull::act;
use crate::image_pull::plan::keyring::Keyring;
use crate::image_pull::plan::{
    self, AttemptResult, AttemptRetry, PullLimits, PullProgress, PullSpec, PullStage, PullStep, PullTask,
    TagKey, TaskBoard,
};
use kruise_api::image_reference::ImageReference;
use kruise_api::node_image::ImagePullPhase;
use kruise_cri::Runtime;

type PullResult = std::result::Result<act::PulledImage, act::PullFailure>;
type ProgressUpdate = (TagKey, u64, PullProgress);

struct PullDriver {
    runtime: Arc<dyn Runtime>,
    keyring: Keyring,
    board: TaskBoard,
    limits: PullLimits,
    display_names: HashMap<TagKey, String>,
    attempts: JoinSet<(TagKey, u64, PullResult)>,
    progress_tx: UnboundedSender<ProgressUpdate>,
    outcomes: HashMap<TagKey, PullOutcome>,
    view: ProgressView,
}

/// Pulls all `images`, at most `parallel` at once. Results are in the order of `images`.
pub(super) async fn pull_all(
    runtime: Arc<dyn Runtime>,
    images: Vec<ImageToPull>,
    keyring: Keyring,
    parallel: usize,
    view: ProgressView,
    stop: StopSignal,
) -> Vec<PullOutcome> {
    let order: Vec<TagKey> = images.iter().map(|w| w.key.clone()).collect();
    let (bytes_tx, progress_rx) = mpsc::unbounded_channel();
    let mut driver = PullDriver {
        runtime,
        keyring,
        board: TaskBoard::default(),
        limits: PullLimits {
            max_parallel: parallel,
            max_per_namespace: parallel,
            max_per_registry: parallel,
            runtime_ready: true,
        },
        display_names: images
            .iter()
            .map(|w| (w.key.clone(), w.original.clone()))
            .collect(),
        attempts: JoinSet::new(),
        progress_tx: bytes_tx,
        outcomes: HashMap::new(),
        view,
    };
    // Added one after the other, so that pulls start in the given order.
    let mut specs: BTreeMap<TagKey, PullSpec> = BTreeMap::new();
    for w in images {
        specs.insert(w.key, w.spec);
        driver.board.sync_spec(&specs, &BTreeMap::new());
    }
    driver.run(order.len(), progress_rx, stop).await;
    driver.view.clear();
    order
        .iter()
        .filter_map(|key| driver.outcomes.remove(key))
        .collect()
}

impl PullDriver {
    /// Runs until `total` images are finished, or the user stops the command.
    async fn run(
        &mut self,
        total: usize,
        mut progress_rx: UnboundedReceiver<ProgressUpdate>,
        mut stop: StopSignal,
    ) {
        loop {
            let sleep_for = self.reconcile();
            if self.outcomes.len() == total {
                return;
            }
            tokio::select! {
                Some(Ok((key, run, result))) = self.attempts.join_next() => self.on_attempt_ended(&key, run, result),
                Some((key, run, progress)) = progress_rx.recv() => {
                    self.board.set_progress(&key, run, progress, Timestamp::now());
                    self.view.progress(&key, progress);
                }
                () = sleep(sleep_for) => {}
                () = stop.received() => return self.cancel_remaining(),
            }
        }
    }

    /// Plans and acts. Returns the delay until the next reconcile without an event.
    fn reconcile(&mut self) -> Duration {
        let now = Timestamp::now();
        let plan = plan::plan(&self.board, &self.limits, now);
        for step in &plan.steps {
            let run = self.board.apply(step, now);
            match step {
                PullStep::Start { key, timeout, .. } => {
                    if let Some(run) = run {
                        self.start_attempt(key, run, *timeout);
                    }
                }
                PullStep::GiveUp { key, .. } => self.finish(key, false),
            }
        }
        let max_sleep = Duration::from_secs(3600);
        plan.requeue_at
            .and_then(|t| Duration::try_from(t.duration_since(now)).ok())
            .unwrap_or(max_sleep)
    }

    fn start_attempt(&mut self, key: &TagKey, run: u64, timeout: SignedDuration) {
        let Some(task) = self.board.get(key) else { return };
        let image = task.spec.image.clone().unwrap_or_default();
        let repository = ImageReference::parse(&image)
            .map(|r| r.repository())
            .unwrap_or_default();
        let credentials = self.keyring.lookup(&repository).into_iter();
        let attempt = act::PullAttempt {
            credentials: credentials.map(act::SourcedCredentials::of_node).collect(),
            anonymous: false,
            image,
            always: task.spec.always,
            timeout: Duration::try_from(timeout).unwrap_or_default(),
            labels: task.spec.labels.clone(),
            annotations: task.spec.annotations.clone(),
            check_disk: true,
            span: None,
        };
        let display_name = self.display_name(key);
        self.view.attempt_started(key, &display_name);
        let (key, runtime, bytes) = (key.clone(), Arc::clone(&self.runtime), self.progress_tx.clone());
        self.attempts.spawn(async move {
            let on_progress = |progress| drop(bytes.send((key.clone(), run, progress)));
            let result = act::run_attempt(runtime.as_ref(), &attempt, || true, on_progress).await;
            (key, run, result)
        });
    }

    fn on_attempt_ended(&mut self, key: &TagKey, run: u64, result: PullResult) {
        let present = result.as_ref().is_ok_and(|pulled| pulled.already_present);
        let mut outcome = act::attempt_result(result, &act::PullSecrets::default());
        // A user waits for the command to end.
        if let AttemptResult::Failed { retry: again, .. } = &mut outcome
            && *again == AttemptRetry::Prevented
        {
            *again = AttemptRetry::Counted;
        }
        self.board.on_attempt_ended(key, run, outcome, Timestamp::now());
        match self.board.get(key) {
            Some(task) if task.is_done() => self.finish(key, present),
            Some(PullTask {
                stage: PullStage::BackOff { .. },
                last_error: Some(error),
                ..
            }) => {
                self.view.retrying(key, &self.display_name(key), error);
            }
            _ => {}
        }
    }

    fn finish(&mut self, key: &TagKey, present: bool) {
        let now = Timestamp::now();
        let Some(task) = self.board.get(key) else { return };
        let PullStage::Done(status) = &task.stage else {
            return;
        };
        let outcome = PullOutcome {
            image: self.display_name(key),
            succeeded: status.phase == ImagePullPhase::Succeeded,
            already_present: present,
            image_id: status.image_id.clone(),
            message: status.message.clone(),
            attempts: task.attempts,
            seconds: now.duration_since(task.started_at.unwrap_or(now)).as_secs_f64(),
        };
        self.view.finished(key, &output::result_line(&outcome));
        self.outcomes.insert(key.clone(), outcome);
    }

    /// Gives up the unfinished images.
    fn cancel_remaining(&mut self) {
        self.attempts.abort_all();
        let now = Timestamp::now();
        let unfinished: Vec<TagKey> = self
            .board
            .tasks()
            .iter()
            .filter(|(_, t)| !t.is_done())
            .map(|(k, _)| k.clone())
            .collect();
        for key in unfinished {
            self.board.apply(
                &PullStep::GiveUp {
                    key: key.clone(),
                    message: "interrupted".to_owned(),
                },
                now,
            );
            self.finish(&key, false);
        }
    }

    fn display_name(&self, key: &TagKey) -> String {
        self.display_names.get(key).unwrap_or(&key.name).clone()
    }
}
