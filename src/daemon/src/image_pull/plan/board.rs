//! The pull tasks and their state transitions.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::start_jitter::StartJitter;
use super::task::{
    ATTEMPT_BACKOFF, AttemptResult, AttemptRetry, PullOwner, PullProgress, PullSpec, PullStage, PullStep,
    PullTask, TagKey, UNREADABLE_ENTRY, pull_owners,
};
use kruise_api::byte_size::percent;
use kruise_api::node_image::{ImagePullPhase, ImageTagStatus, PulledBytes};
use kruise_api::time::truncate_to_second;

/// Maximum of consecutive [uncounted](AttemptRetry::Uncounted) attempts. After more of them the image itself may be
/// what crashes the runtime, and a starting API server would have loaded by now who may read a Secret.
const MAX_UNCOUNTED_ATTEMPTS: u32 = 3;
/// Maximum of uncounted attempts [without a Secret](AttemptRetry::SecretError): with the pauses between them, an hour.
const MAX_SECRET_ERRORS: u32 = 124;

/// One task per tag of the NodeImage.
#[derive(Debug, Clone, Default)]
pub struct TaskBoard {
    start_jitter: StartJitter,
    tasks: BTreeMap<TagKey, PullTask>,
    next_seq: u64,
    slot_order_by_owner: BTreeMap<PullOwner, u64>,
    slot_order_by_namespace: BTreeMap<String, u64>,
    /// By registry and namespace.
    slot_order_at_registry: BTreeMap<(String, String), u64>,
}

/// The outcome of an attempt's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptOutcome {
    /// The attempt is no longer the current one.
    Stale,
    /// The tag waits for a new attempt.
    WillRetry,
    /// The tag is finished.
    Finished,
}

impl TaskBoard {
    /// An empty board, whose pulls start with this jitter.
    pub fn with_start_jitter(start_jitter: StartJitter) -> Self {
        Self {
            start_jitter,
            ..Self::default()
        }
    }

    /// All tasks, by name and tag.
    pub fn tasks(&self) -> &BTreeMap<TagKey, PullTask> {
        &self.tasks
    }

    /// The task of one tag.
    pub fn get(&self, key: &TagKey) -> Option<&PullTask> {
        self.tasks.get(key)
    }

    /// When the owner's namespace, and the owner, last got a slot, as a sequence number. A namespace that never got one
    /// has the number of its arrival, so that arriving and leaving namespaces overtake no waiting one; an owner then
    /// has 0.
    pub(super) fn last_slot_order(&self, owner: &PullOwner) -> (u64, u64) {
        let namespace = self.slot_order_by_namespace.get(&owner.namespace);
        let owner_order = self.slot_order_by_owner.get(owner);
        (namespace.copied().unwrap_or(0), owner_order.copied().unwrap_or(0))
    }

    /// When the namespace last got a slot for an image of that registry. One that never got any has the number of its
    /// arrival, as for the node.
    pub(super) fn last_slot_order_at(&self, registry: &str, namespace: &str) -> u64 {
        let key = (registry.to_owned(), namespace.to_owned());
        self.slot_order_at_registry.get(&key).copied().unwrap_or(0)
    }

    /// Tags with their images, which were pulled, and which these specs pin longer than the pull did: a job joined after
    /// its end, and before its report.
    pub fn late_pins(&self, specs: &BTreeMap<TagKey, PullSpec>) -> Vec<(TagKey, String)> {
        let late = specs.iter().filter_map(|(key, spec)| {
            let task = self.tasks.get(key)?;
            let is_late =
                task.has_succeeded() && spec.version == task.spec.version && spec.pin > task.spec.pin;
            is_late.then(|| Some((key.clone(), spec.image.clone().ok()?)))?
        });
        late.collect()
    }

    /// Applies the spec and the stored status of the NodeImage. Returns the tags whose attempts must be stopped: they
    /// are no longer in the spec, have a different version, or their status is completed by another writer.
    pub fn sync_spec(
        &mut self,
        specs: &BTreeMap<TagKey, PullSpec>,
        stored: &BTreeMap<TagKey, ImageTagStatus>,
    ) -> Vec<TagKey> {
        let mut to_stop = Vec::new();
        self.tasks.retain(|key, task| {
            let unchanged = specs.get(key).is_some_and(|spec| {
                let was_repaired =
                    matches!(&task.stage, PullStage::Done(status) if is_outdated(status, spec));
                spec.version == task.spec.version && !was_repaired
            });
            if !unchanged && matches!(task.stage, PullStage::Running { .. }) {
                to_stop.push(key.clone());
            }
            unchanged
        });
        for (key, spec) in specs {
            let reported = stored
                .get(key)
                .filter(|s| s.version == spec.version && !is_outdated(s, spec));
            let seq = self.next_seq;
            self.next_seq += 1;
            let task = self.tasks.entry(key.clone()).or_insert_with(|| {
                let starts_at = self.start_jitter.starts_at(key, spec);
                PullTask::new(spec.clone(), seq, reported, starts_at)
            });
            task.spec = spec.clone();
            if let Some(reported) = reported.filter(|s| s.completion_time.is_some() && !task.is_done()) {
                if matches!(task.stage, PullStage::Running { .. }) {
                    to_stop.push(key.clone());
                }
                task.stage = PullStage::Done(Box::new(reported.clone()));
            }
        }
        let owners: BTreeSet<PullOwner> = self.tasks.values().flat_map(|t| pull_owners(&t.spec)).collect();
        self.slot_order_by_owner.retain(|owner, _| owners.contains(owner));
        let at_registries: BTreeSet<(String, String)> = self
            .tasks
            .values()
            .flat_map(|task| {
                let registry = task.spec.registry();
                let owners = pull_owners(&task.spec).into_iter();
                owners.map(move |owner| (registry.to_owned(), owner.namespace))
            })
            .collect();
        let mut next_arrival = || {
            self.next_seq += 1;
            self.next_seq - 1
        };
        for owner in &owners {
            let arrival = self.slot_order_by_namespace.entry(owner.namespace.clone());
            arrival.or_insert_with(&mut next_arrival);
        }
        for at_registry in &at_registries {
            let arrival = self.slot_order_at_registry.entry(at_registry.clone());
            arrival.or_insert_with(&mut next_arrival);
        }
        let namespaces: BTreeSet<&str> = owners.iter().map(|o| o.namespace.as_str()).collect();
        self.slot_order_by_namespace
            .retain(|namespace, _| namespaces.contains(namespace.as_str()));
        self.slot_order_at_registry
            .retain(|at_registry, _| at_registries.contains(at_registry));
        to_stop
    }

    /// A board with only this task.
    pub fn single(&self, key: &TagKey) -> Self {
        let task = self.tasks.get(key).map(|task| (key.clone(), task.clone()));
        Self {
            tasks: task.into_iter().collect(),
            ..Self::default()
        }
    }

    /// Clears the board, as for a new NodeImage of the same name. Returns the tags whose attempts must be stopped.
    pub fn clear(&mut self) -> Vec<TagKey> {
        self.sync_spec(&BTreeMap::new(), &BTreeMap::new())
    }

    /// Applies a step. Returns the run number of an attempt that starts.
    pub fn apply(&mut self, step: &PullStep, now: Timestamp) -> Option<u64> {
        match step {
            PullStep::Start { key, owner, .. } => {
                let run = self.next_seq;
                self.next_seq += 1;
                let task = self.tasks.get_mut(key)?;
                task.started_at.get_or_insert(now);
                task.attempts = task.attempts.saturating_add(1);
                task.progress = None;
                task.attempt_started_at = now;
                task.progressed_at = now;
                task.owner = owner.clone();
                task.stage = PullStage::Running { run };
                self.slot_order_by_owner.insert(owner.clone(), run);
                self.slot_order_by_namespace.insert(owner.namespace.clone(), run);
                let at_registry = (task.spec.registry().to_owned(), owner.namespace.clone());
                self.slot_order_at_registry.insert(at_registry, run);
                Some(run)
            }
            PullStep::GiveUp { key, message } => {
                self.tasks.get_mut(key)?.finish(key, Err(message.clone()), now);
                None
            }
        }
    }

    /// Ends the pauses that are over, of tags that still do not start.
    pub fn end_pauses(&mut self, now: Timestamp) {
        for task in self.tasks.values_mut().filter(|task| !task.stage.is_pause(now)) {
            match task.stage {
                PullStage::Delayed { .. } => task.stage = PullStage::Waiting,
                PullStage::BackOff { .. } => task.stage = PullStage::Due,
                PullStage::Waiting | PullStage::Running { .. } | PullStage::Due | PullStage::Done(_) => {}
            }
        }
    }

    /// Records the progress of an attempt.
    pub fn set_progress(&mut self, key: &TagKey, run: u64, progress: PullProgress, now: Timestamp) {
        if let Some(task) = self.tasks.get_mut(key)
            && task.stage == (PullStage::Running { run })
        {
            if task.progress != Some(progress) {
                task.progressed_at = now;
            }
            task.progress = Some(progress);
        }
    }

    /// Records a panic in the work on a tag. It counts as a failed attempt, whatever the stage of the tag.
    pub fn on_panic(&mut self, key: &TagKey, message: String, now: Timestamp) -> AttemptOutcome {
        let Some(task) = self.tasks.get_mut(key).filter(|t| !t.is_done()) else {
            return AttemptOutcome::Stale;
        };
        if !matches!(task.stage, PullStage::Running { .. }) {
            task.attempts = task.attempts.saturating_add(1);
        }
        let run = self.next_seq;
        self.next_seq += 1;
        task.stage = PullStage::Running { run };
        let retry = AttemptRetry::Counted;
        self.on_attempt_ended(key, run, AttemptResult::Failed { message, retry }, now)
    }

    /// Records the end of an attempt.
    pub fn on_attempt_ended(
        &mut self,
        key: &TagKey,
        run: u64,
        result: AttemptResult,
        now: Timestamp,
    ) -> AttemptOutcome {
        let Some(task) = self
            .tasks
            .get_mut(key)
            .filter(|t| t.stage == (PullStage::Running { run }))
        else {
            return AttemptOutcome::Stale;
        };
        let (message, retry) = match result {
            AttemptResult::Pulled { image_id, note } => {
                task.finish(key, Ok((image_id, note)), now);
                return AttemptOutcome::Finished;
            }
            AttemptResult::Failed { message, retry } => (message, retry),
        };
        if let Some(failures) = task.uncount_attempt(retry) {
            task.back_off(message, failures, now);
            return AttemptOutcome::WillRetry;
        }
        if retry == AttemptRetry::Never || task.attempts > task.spec.retries {
            task.finish(key, Err(message), now);
            return AttemptOutcome::Finished;
        }
        task.prevented = 0;
        if retry == AttemptRetry::Counted {
            task.uncounted = 0;
            task.secret_errors = 0;
        }
        task.back_off(message, task.attempts, now);
        AttemptOutcome::WillRetry
    }
}

/// Whether this is the status of an entry that could not be read before, and can be now.
fn is_outdated(status: &ImageTagStatus, spec: &PullSpec) -> bool {
    let message = status.message.as_deref().unwrap_or_default();
    status.phase == ImagePullPhase::Failed && message.starts_with(UNREADABLE_ENTRY) && spec.image.is_ok()
}

impl PullTask {
    fn new(
        spec: PullSpec,
        seq: u64,
        reported: Option<&ImageTagStatus>,
        starts_at: Option<Timestamp>,
    ) -> Self {
        // After a restart of the daemon the tag's deadline still counts from its first start.
        let started_at = reported.and_then(|s| s.start_time.as_ref()).map(|t| t.0);
        let delayed_until = starts_at.filter(|_| started_at.is_none());
        Self {
            spec,
            seq,
            stage: delayed_until.map_or(PullStage::Waiting, |until| PullStage::Delayed { until }),
            attempts: 0,
            uncounted: 0,
            secret_errors: 0,
            prevented: 0,
            started_at,
            progress: None,
            attempt_started_at: Timestamp::MIN,
            progressed_at: Timestamp::MIN,
            owner: PullOwner::default(),
            last_error: None,
        }
    }

    /// Takes back a failed attempt that does not count; returns the number of its kind, and `None` if it counts.
    fn uncount_attempt(&mut self, retry: AttemptRetry) -> Option<u32> {
        let (count, max) = match retry {
            AttemptRetry::Never | AttemptRetry::Counted => return None,
            AttemptRetry::Uncounted => (&mut self.uncounted, MAX_UNCOUNTED_ATTEMPTS),
            AttemptRetry::SecretError => (&mut self.secret_errors, MAX_SECRET_ERRORS),
            AttemptRetry::Prevented => (&mut self.prevented, u32::MAX),
        };
        if *count >= max {
            return None;
        }
        *count += 1;
        let failures = *count;
        if retry != AttemptRetry::Prevented {
            self.prevented = 0;
        }
        self.attempts = self.attempts.saturating_sub(1);
        Some(failures)
    }

    fn back_off(&mut self, message: String, failures: u32, now: Timestamp) {
        self.last_error = Some(message);
        self.progress = None;
        let until = now
            .checked_add(ATTEMPT_BACKOFF.delay(failures.saturating_sub(1)))
            .unwrap_or(Timestamp::MAX);
        self.stage = PullStage::BackOff { until };
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
            Err(message) => (ImagePullPhase::Failed, progress, None, Some(message)),
        };
        self.stage = PullStage::Done(Box::new(ImageTagStatus {
            tag: key.tag.clone(),
            phase,
            progress,
            start_time: Some(Time(truncate_to_second(started))),
            completion_time: Some(Time(truncate_to_second(now))),
            version: self.spec.version,
            image_id,
            message,
            bytes: None,
        }));
    }

    /// Per cent of the current attempt's bytes; 100 is reserved for the end.
    pub fn percent(&self) -> i32 {
        let PullProgress { done, total } = self.progress.unwrap_or_default();
        percent(done, total).map_or(0, |percent| percent.min(99))
    }

    /// Bytes of the current attempt, if they are known.
    pub fn bytes(&self) -> Option<PulledBytes> {
        let PullProgress { done, total } = self.progress.filter(|progress| progress.total > 0)?;
        Some(PulledBytes::new(done, total))
    }
}
