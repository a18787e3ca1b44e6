//! The tasks, and what changes them.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{ATTEMPTS, Again, Ask, Ended, Owner, Progress, Stage, Step, TagKey, Task, owners};
use kruise_api::node_image::{ImagePullPhase, ImageTagStatus};

/// Attempts in a row that are [uncounted](Again::Uncounted). With more the image itself may be what ends the runtime, and
/// an API server that has just started would know by now who may read a Secret.
const UNCOUNTED: u32 = 3;

/// One task per tag of the NodeImage.
#[derive(Debug, Clone, Default)]
pub struct Board {
    tasks: BTreeMap<TagKey, Task>,
    next: u64,
    served: BTreeMap<Owner, u64>,
    served_namespaces: BTreeMap<String, u64>,
}

/// What came of the end of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The attempt was not awaited any more.
    Stale,
    /// There will be another.
    Continues,
    /// The tag is over.
    Over,
}

impl Board {
    /// All tasks, by name and tag.
    pub fn tasks(&self) -> &BTreeMap<TagKey, Task> {
        &self.tasks
    }

    /// One task.
    pub fn get(&self, key: &TagKey) -> Option<&Task> {
        self.tasks.get(key)
    }

    /// Order in which the owner's namespace, and the owner, were given a slot last. A namespace that never was has that of
    /// its arrival, so that those that come and go pass over none that waits; an owner has 0.
    pub(super) fn last_served(&self, owner: &Owner) -> (u64, u64) {
        let namespace = self.served_namespaces.get(&owner.namespace);
        let own = self.served.get(owner);
        (namespace.copied().unwrap_or(0), own.copied().unwrap_or(0))
    }

    /// Takes in what is asked and what the NodeImage's status says already. Returns the tags whose attempts must be
    /// stopped: they are not asked for any more, or in another version, or somebody declared them over.
    pub fn desire(
        &mut self,
        asks: &BTreeMap<TagKey, Ask>,
        stored: &BTreeMap<TagKey, ImageTagStatus>,
    ) -> Vec<TagKey> {
        let mut stop = Vec::new();
        self.tasks.retain(|key, task| {
            let keep = asks.get(key).is_some_and(|ask| ask.version == task.ask.version);
            if !keep && matches!(task.stage, Stage::Running { .. }) {
                stop.push(key.clone());
            }
            keep
        });
        for (key, ask) in asks {
            let said = stored.get(key).filter(|s| s.version == ask.version);
            let seq = self.next;
            self.next += 1;
            let task = self
                .tasks
                .entry(key.clone())
                .or_insert_with(|| Task::new(ask.clone(), seq, said));
            task.ask = ask.clone();
            if let Some(said) = said.filter(|s| s.completion_time.is_some() && !task.is_done()) {
                if matches!(task.stage, Stage::Running { .. }) {
                    stop.push(key.clone());
                }
                task.stage = Stage::Done(Box::new(said.clone()));
            }
        }
        let wanted: BTreeSet<Owner> = self.tasks.values().flat_map(|t| owners(&t.ask)).collect();
        self.served.retain(|owner, _| wanted.contains(owner));
        for owner in &wanted {
            let arrival = self.served_namespaces.entry(owner.namespace.clone());
            arrival.or_insert_with(|| {
                self.next += 1;
                self.next - 1
            });
        }
        let namespaces: BTreeSet<&str> = wanted.iter().map(|o| o.namespace.as_str()).collect();
        self.served_namespaces
            .retain(|namespace, _| namespaces.contains(namespace.as_str()));
        stop
    }

    /// One task by itself.
    pub fn only(&self, key: &TagKey) -> Self {
        let task = self.tasks.get(key).map(|task| (key.clone(), task.clone()));
        Self {
            tasks: task.into_iter().collect(),
            ..Self::default()
        }
    }

    /// Forgets everything, as for another NodeImage of the same name. Returns the tags whose attempts must be stopped.
    pub fn clear(&mut self) -> Vec<TagKey> {
        self.desire(&BTreeMap::new(), &BTreeMap::new())
    }

    /// Carries a step out. Returns the number of the attempt's run where one begins.
    pub fn apply(&mut self, step: &Step, now: Timestamp) -> Option<u64> {
        match step {
            Step::Start { key, owner, .. } => {
                let run = self.next;
                self.next += 1;
                let task = self.tasks.get_mut(key)?;
                task.started_at.get_or_insert(now);
                task.attempts = task.attempts.saturating_add(1);
                task.progress = None;
                task.begun_at = now;
                task.moved_at = now;
                task.owner = owner.clone();
                task.stage = Stage::Running { run };
                self.served.insert(owner.clone(), run);
                self.served_namespaces.insert(owner.namespace.clone(), run);
                Some(run)
            }
            Step::GiveUp { key, words } => {
                self.tasks.get_mut(key)?.finish(key, Err(words.clone()), now);
                None
            }
        }
    }

    /// Takes in the bytes of an attempt.
    pub fn advance(&mut self, key: &TagKey, run: u64, progress: Progress, now: Timestamp) {
        if let Some(task) = self.tasks.get_mut(key)
            && task.stage == (Stage::Running { run })
        {
            if task.progress != Some(progress) {
                task.moved_at = now;
            }
            task.progress = Some(progress);
        }
    }

    /// Takes in that work on a tag panicked. That is an attempt that failed, whatever the tag was doing.
    pub fn panicked(&mut self, key: &TagKey, words: String, now: Timestamp) -> Outcome {
        let Some(task) = self.tasks.get_mut(key).filter(|t| !t.is_done()) else {
            return Outcome::Stale;
        };
        if !matches!(task.stage, Stage::Running { .. }) {
            task.attempts = task.attempts.saturating_add(1);
        }
        let run = self.next;
        self.next += 1;
        task.stage = Stage::Running { run };
        let again = Again::Counted;
        self.ended(key, run, Ended::Failed { words, again }, now)
    }

    /// Takes in the end of an attempt.
    pub fn ended(&mut self, key: &TagKey, run: u64, ended: Ended, now: Timestamp) -> Outcome {
        let Some(task) = self
            .tasks
            .get_mut(key)
            .filter(|t| t.stage == (Stage::Running { run }))
        else {
            return Outcome::Stale;
        };
        match ended {
            Ended::Pulled { image_id, note } => {
                task.finish(key, Ok((image_id, note)), now);
                Outcome::Over
            }
            Ended::Failed {
                words,
                again: Again::Prevented,
            } => {
                task.attempts = task.attempts.saturating_sub(1);
                task.prevented = task.prevented.saturating_add(1);
                task.pause(words, task.prevented, now);
                Outcome::Continues
            }
            Ended::Failed {
                words,
                again: Again::Uncounted,
            } if task.uncounted < UNCOUNTED => {
                task.attempts = task.attempts.saturating_sub(1);
                task.uncounted += 1;
                task.prevented = 0;
                task.pause(words, task.uncounted, now);
                Outcome::Continues
            }
            Ended::Failed {
                words,
                again: again @ (Again::Counted | Again::Uncounted),
            } if task.attempts <= task.ask.retries => {
                task.prevented = 0;
                if again == Again::Counted {
                    task.uncounted = 0;
                }
                task.pause(words, task.attempts, now);
                Outcome::Continues
            }
            Ended::Failed { words, .. } => {
                task.finish(key, Err(words), now);
                Outcome::Over
            }
        }
    }
}

impl Task {
    fn new(ask: Ask, seq: u64, said: Option<&ImageTagStatus>) -> Self {
        Self {
            ask,
            seq,
            stage: Stage::Waiting,
            attempts: 0,
            uncounted: 0,
            prevented: 0,
            // After a restart of ours the tag's deadline still counts from its first start.
            started_at: said.and_then(|s| s.start_time.as_ref()).map(|t| t.0),
            progress: None,
            begun_at: Timestamp::MIN,
            moved_at: Timestamp::MIN,
            owner: Owner::default(),
            last_error: None,
        }
    }

    fn pause(&mut self, words: String, failures: u32, now: Timestamp) {
        self.last_error = Some(words);
        self.progress = None;
        let until = now
            .checked_add(ATTEMPTS.pause(failures.saturating_sub(1)))
            .unwrap_or(Timestamp::MAX);
        self.stage = Stage::BackOff { until };
    }

    fn finish(
        &mut self,
        key: &TagKey,
        result: Result<(Option<String>, Option<String>), String>,
        now: Timestamp,
    ) {
        let started = self.started_at.unwrap_or(now);
        let progress = self.percent();
        let (phase, progress, image_id, message) = match result {
            Ok((image_id, note)) => (ImagePullPhase::Succeeded, 100, image_id, note),
            Err(words) => (ImagePullPhase::Failed, progress, None, Some(words)),
        };
        self.stage = Stage::Done(Box::new(ImageTagStatus {
            tag: key.tag.clone(),
            phase,
            progress,
            start_time: Some(Time(whole(started))),
            completion_time: Some(Time(whole(now))),
            version: self.ask.version,
            image_id,
            message,
        }));
    }

    /// Per cent of the bytes of the present attempt; 100 is kept for the end.
    pub fn percent(&self) -> i32 {
        match self.progress {
            Some(Progress { done, total }) if total > 0 => {
                i32::try_from(u128::from(done) * 100 / u128::from(total)).map_or(99, |p| p.min(99))
            }
            _ => 0,
        }
    }
}

/// Times in the API have whole seconds.
pub(super) fn whole(t: Timestamp) -> Timestamp {
    Timestamp::from_second(t.as_second()).unwrap_or(t)
}
