//! Carries the daemon's plan out against one runtime until every image is over.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::outcome::Outcome;
use super::plan::Wanted;
use super::show::{self, View};
use super::stop::Stop;
use crate::image_pull::act;
use crate::image_pull::plan::keyring::Keyring;
use crate::image_pull::plan::{self, Again, Ask, Board, Ended, Limits, Progress, Stage, Step, TagKey, Task};
use kruise_api::image_reference::Reference;
use kruise_api::node_image::ImagePullPhase;
use kruise_cri::Runtime;

type Result = std::result::Result<act::Pulled, act::Failure>;
type Bytes = (TagKey, u64, Progress);

struct Driver {
    runtime: Arc<dyn Runtime>,
    keyring: Keyring,
    board: Board,
    limits: Limits,
    given: HashMap<TagKey, String>,
    attempts: JoinSet<(TagKey, u64, Result)>,
    bytes_tx: UnboundedSender<Bytes>,
    over: HashMap<TagKey, Outcome>,
    view: View,
}

/// Pulls all of `wanted`, at most `parallel` at once. Results are in the order of `wanted`.
pub(super) async fn drive(
    runtime: Arc<dyn Runtime>,
    wanted: Vec<Wanted>,
    keyring: Keyring,
    parallel: usize,
    view: View,
    stop: Stop,
) -> Vec<Outcome> {
    let order: Vec<TagKey> = wanted.iter().map(|w| w.key.clone()).collect();
    let (bytes_tx, bytes) = mpsc::unbounded_channel();
    let mut driver = Driver {
        runtime,
        keyring,
        board: Board::default(),
        limits: Limits {
            max_parallel: parallel,
            max_per_namespace: parallel,
            runtime: true,
        },
        given: wanted.iter().map(|w| (w.key.clone(), w.given.clone())).collect(),
        attempts: JoinSet::new(),
        bytes_tx,
        over: HashMap::new(),
        view,
    };
    // One after another, so that images begin in the order they were given.
    let mut asks: BTreeMap<TagKey, Ask> = BTreeMap::new();
    for w in wanted {
        asks.insert(w.key, w.ask);
        driver.board.desire(&asks, &BTreeMap::new());
    }
    driver.run(order.len(), bytes, stop).await;
    driver.view.end();
    order.iter().filter_map(|key| driver.over.remove(key)).collect()
}

impl Driver {
    /// Works until `all` images are over, or the user has had enough.
    async fn run(&mut self, all: usize, mut bytes: UnboundedReceiver<Bytes>, mut stop: Stop) {
        loop {
            let wake = self.turn();
            if self.over.len() == all {
                return;
            }
            tokio::select! {
                Some(Ok((key, run, result))) = self.attempts.join_next() => self.ended(&key, run, result),
                Some((key, run, progress)) = bytes.recv() => {
                    self.board.advance(&key, run, progress, Timestamp::now());
                    self.view.bytes(&key, progress);
                }
                () = sleep(wake) => {}
                () = stop.asked() => return self.interrupt(),
            }
        }
    }

    /// Plans and acts. Returns how long to sleep if nothing happens.
    fn turn(&mut self) -> Duration {
        let now = Timestamp::now();
        let plan = plan::plan(&self.board, &self.limits, now);
        for step in &plan.steps {
            let run = self.board.apply(step, now);
            match step {
                Step::Start { key, timeout, .. } => {
                    if let Some(run) = run {
                        self.start(key, run, *timeout);
                    }
                }
                Step::GiveUp { key, .. } => self.finish(key, false),
            }
        }
        let longest = Duration::from_secs(3600);
        plan.wake
            .and_then(|t| Duration::try_from(t.duration_since(now)).ok())
            .unwrap_or(longest)
    }

    fn start(&mut self, key: &TagKey, run: u64, timeout: SignedDuration) {
        let Some(task) = self.board.get(key) else { return };
        let image = task.ask.image.clone().unwrap_or_default();
        let repository = Reference::parse(&image)
            .map(|r| r.repository())
            .unwrap_or_default();
        let attempt = act::Attempt {
            credentials: self.keyring.lookup(&repository),
            image,
            always: task.ask.always,
            timeout: Duration::try_from(timeout).unwrap_or_default(),
            labels: task.ask.labels.clone(),
            annotations: task.ask.annotations.clone(),
        };
        let shown = self.shown(key);
        self.view.begin(key, &shown);
        let (key, runtime, bytes) = (key.clone(), Arc::clone(&self.runtime), self.bytes_tx.clone());
        self.attempts.spawn(async move {
            let tell = |progress| drop(bytes.send((key.clone(), run, progress)));
            let result = act::attempt(runtime.as_ref(), &attempt, || true, tell).await;
            (key, run, result)
        });
    }

    fn ended(&mut self, key: &TagKey, run: u64, result: Result) {
        let present = result.as_ref().is_ok_and(|pulled| pulled.present);
        let mut ended = act::ended(result, &act::Secrets::default());
        // Somebody waits for the command to end.
        if let Ended::Failed { again, .. } = &mut ended
            && *again == Again::Prevented
        {
            *again = Again::Counted;
        }
        self.board.ended(key, run, ended, Timestamp::now());
        match self.board.get(key) {
            Some(task) if task.is_done() => self.finish(key, present),
            Some(Task {
                stage: Stage::BackOff { .. },
                last_error: Some(error),
                ..
            }) => {
                self.view.again(key, &self.shown(key), error);
            }
            _ => {}
        }
    }

    fn finish(&mut self, key: &TagKey, present: bool) {
        let now = Timestamp::now();
        let Some(task) = self.board.get(key) else { return };
        let Stage::Done(status) = &task.stage else { return };
        let outcome = Outcome {
            image: self.shown(key),
            succeeded: status.phase == ImagePullPhase::Succeeded,
            present,
            image_id: status.image_id.clone(),
            message: status.message.clone(),
            attempts: task.attempts,
            seconds: now.duration_since(task.started_at.unwrap_or(now)).as_secs_f64(),
        };
        self.view.over(key, &show::line(&outcome));
        self.over.insert(key.clone(), outcome);
    }

    /// What is not over will not be.
    fn interrupt(&mut self) {
        self.attempts.abort_all();
        let now = Timestamp::now();
        let open: Vec<TagKey> = self
            .board
            .tasks()
            .iter()
            .filter(|(_, t)| !t.is_done())
            .map(|(k, _)| k.clone())
            .collect();
        for key in open {
            self.board.apply(
                &Step::GiveUp {
                    key: key.clone(),
                    words: "interrupted".to_owned(),
                },
                now,
            );
            self.finish(&key, false);
        }
    }

    fn shown(&self, key: &TagKey) -> String {
        self.given.get(key).unwrap_or(&key.name).clone()
    }
}
