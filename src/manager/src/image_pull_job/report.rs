//! Writes the status of jobs: the end of a job at once, its progress at most a few times per second.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Api;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::name::NAME;
use super::plan::index::JobIndex;
use super::plan::job::{PullJob, Uid};
use super::plan::status::{StatusUpdate, is_past_deadline, is_same, job_status};
use crate::Context;
use crate::status_pacer::{MAX_STATUS_DELAY, StatusPacer};
use kruise_api::backoff::Backoff;
use kruise_api::image_pull_job::{ImagePullJob, ImagePullJobStatus};
use kruise_cluster::clock::duration_until;
use kruise_cluster::{Cluster, Error, EventType, write};
use kruise_ops::Progress;
use kruise_ops::panics::{catch_panic, catch_panic_sync};
use kruise_ops::traces::Span;
use kruise_workload::job_conditions::{known_conditions, merge_conditions};

/// Fields of the status that may be absent.
const OPTIONAL_STATUS_FIELDS: [&str; 6] = [
    "startTime",
    "completionTime",
    "message",
    "failedNodes",
    "conditions",
    "progress",
];

/// After failed writes.
const RETRY: Backoff = Backoff::new(MAX_STATUS_DELAY, Duration::from_secs(30));
/// After refused writes: they succeed only after a change of a role or a policy.
const REFUSED_RETRY: Backoff = Backoff::new(MAX_STATUS_DELAY, Duration::from_secs(300));

/// State of the status writes of one job.
struct StatusState {
    /// Until the watch shows it; from then on, what the watch shows counts, also if others have changed it.
    last_written: Option<ImagePullJobStatus>,
    /// When the job is checked again; the same time is in [`StatusWriter::scheduled`].
    scheduled_at: Option<Instant>,
    pace: StatusPacer,
    /// A write is in flight; later changes are checked after it.
    in_flight: bool,
    changed: bool,
    /// A failed write is not repeated earlier.
    not_before: Instant,
    /// Number of failed writes since the last success.
    failures: u32,
}

/// The result of one write.
pub struct FinishedStatusWrite {
    job: Arc<PullJob>,
    /// Whether it is the first write of the job.
    is_first: bool,
    uid: Uid,
    result: Result<ImagePullJobStatus, Error>,
}

/// Writes statuses.
pub struct StatusWriter {
    cluster: Cluster,
    progress: Progress,
    states: HashMap<Uid, StatusState>,
    /// The jobs to check, ordered by time: the cost of a change does not grow with their number.
    scheduled: BTreeSet<(Instant, Uid)>,
    writes: JoinSet<FinishedStatusWrite>,
}

impl StatusWriter {
    /// A writer without any written status.
    pub fn new(ctx: &Context) -> Self {
        Self {
            cluster: ctx.cluster.clone(),
            progress: ctx.progress.clone(),
            states: HashMap::new(),
            scheduled: BTreeSet::new(),
            writes: JoinSet::new(),
        }
    }

    /// Starts the writes that are due.
    pub fn start_writes(&mut self, index: &mut JobIndex, now: Timestamp) {
        let at = Instant::now();
        for uid in index.take_removed() {
            self.remove(&uid);
        }
        for uid in index.take_dirty() {
            let state = self
                .states
                .entry(Arc::clone(&uid))
                .or_insert_with(|| StatusState {
                    last_written: None,
                    scheduled_at: None,
                    pace: StatusPacer::default(),
                    in_flight: false,
                    changed: false,
                    not_before: at,
                    failures: 0,
                });
            state.changed = true;
            let wait = state.pace.delay_of_change(at.into_std(), false);
            let due = if index.is_finished(&uid) { at } else { at + wait };
            self.schedule(&uid, due);
        }
        while let Some((due, _)) = self.scheduled.first()
            && *due <= at
        {
            if let Some((_, uid)) = self.scheduled.pop_first() {
                if let Some(state) = self.states.get_mut(&uid) {
                    state.scheduled_at = None;
                }
                self.reconcile_status(index, &uid, now);
            }
        }
    }

    /// Checks a job at that time, or earlier if that is scheduled.
    fn schedule(&mut self, uid: &Uid, due: Instant) {
        let Some(state) = self.states.get_mut(uid) else {
            return;
        };
        let due = due.max(state.not_before);
        if state.in_flight || state.scheduled_at.is_some_and(|at| at <= due) {
            return;
        }
        if let Some(at) = state.scheduled_at.replace(due) {
            self.scheduled.remove(&(at, Arc::clone(uid)));
        }
        self.scheduled.insert((due, Arc::clone(uid)));
    }

    fn remove(&mut self, uid: &Uid) {
        if let Some(at) = self.states.remove(uid).and_then(|state| state.scheduled_at) {
            self.scheduled.remove(&(at, Arc::clone(uid)));
        }
    }

    fn reconcile_status(&mut self, index: &JobIndex, uid: &Uid, now: Timestamp) {
        let (Some(job), Some(state)) = (index.job(uid), self.states.get_mut(uid)) else {
            return;
        };
        state.changed = false;
        if state
            .last_written
            .as_ref()
            .is_some_and(|s| s.completion_time.is_some())
        {
            return;
        }
        let update = catch_panic_sync(NAME, &job.key, || {
            let counters = index.counters(uid, is_past_deadline(&job, now), now)?;
            Some(job_status(&job, &counters, now))
        });
        let update = match update {
            Ok(Some(update)) => update,
            Ok(None) => return state.pace.unchanged(),
            Err(_) => {
                state.pace.unchanged();
                return self.schedule(uid, Instant::now() + RETRY.max_delay());
            }
        };
        let StatusUpdate {
            mut status,
            requeue_at,
            warning,
        } = update;
        let written = state.last_written.as_ref();
        if written.is_some_and(|written| is_same(written, &job.status)) {
            state.last_written = None;
        }
        let current = state.last_written.as_ref().unwrap_or(&job.status);
        let known = known_conditions(&current.conditions, &job.status.conditions);
        status.conditions = merge_conditions(&known, status.conditions);
        if is_same(current, &status) {
            state.pace.unchanged();
            if let Some(at) = requeue_at {
                self.schedule(uid, Instant::now() + duration_until(at, now));
            }
            return;
        }
        state.pace.record_write(Instant::now().into_std());
        state.in_flight = true;
        if let Some(warning) = warning {
            self.cluster.events.publish(
                super::plan::entry::owner_reference(&job),
                EventType::Warning,
                warning.reason,
                "Report",
                warning.message,
            );
        }
        let api = api(&self.cluster, &job);
        let uid = Arc::clone(uid);
        let is_first = state.last_written.is_none() && job.status.message.is_none();
        let what = format!("writing the status of job {}", job.key);
        let step = self.progress.begin(NAME, what, write::REQUEST_TIMEOUT);
        self.writes.spawn(async move {
            let _step = step;
            let body = write::status_patch(&job.uid, &status, OPTIONAL_STATUS_FIELDS);
            let write = write::patch_status_merge(&api, &job.key.name, &body);
            let written = catch_panic(NAME, &job.key, write).await;
            let written = written.unwrap_or_else(|panicked| Err(panicked.into()));
            FinishedStatusWrite {
                job,
                is_first,
                uid,
                result: written.map(|_| status),
            }
        });
    }

    /// Time until the next job is to be checked.
    pub fn next_requeue(&self) -> Option<Duration> {
        let (at, _) = self.scheduled.first()?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    /// The next finished write; `None` while none runs.
    pub async fn next_finished(&mut self) -> Option<FinishedStatusWrite> {
        match self.writes.join_next().await? {
            Ok(done) => Some(done),
            Err(error) => {
                tracing::error!(%error, "the task that writes a job's status failed");
                None
            }
        }
    }

    /// Processes the result of a write; a failed write is repeated, and so is one with unknown result after a panic.
    pub fn on_write_finished(&mut self, index: &JobIndex, finished: FinishedStatusWrite) {
        let uid = Arc::clone(&finished.uid);
        let label = format!("outcome of the status of {}", finished.job.key);
        if catch_panic_sync(NAME, label, || self.handle_result(index, finished)).is_err() {
            if let Some(state) = self.states.get_mut(&uid) {
                state.in_flight = false;
            }
            self.schedule(&uid, Instant::now() + RETRY.max_delay());
        }
    }

    fn handle_result(&mut self, index: &JobIndex, finished: FinishedStatusWrite) {
        if let Ok(status) = &finished.result {
            log_transition(&finished.job, status, finished.is_first);
        }
        let Some(state) = self.states.get_mut(&finished.uid) else {
            return;
        };
        state.in_flight = false;
        let at = Instant::now();
        let next = match finished.result {
            Ok(status) => {
                state.failures = 0;
                state.last_written = Some(status);
                // Also without a change, because of the deadline.
                let changed_again = state.changed && !index.is_finished(&finished.uid);
                if changed_again {
                    at + state.pace.delay_of_change(at.into_std(), false)
                } else {
                    at
                }
            }
            Err(error) if error.not_found() || error.conflict() => {
                // The job was deleted; the watch will show it.
                tracing::debug!(uid = %finished.uid, %error, "job has gone");
                at + MAX_STATUS_DELAY
            }
            Err(error) => {
                let pause = if error.retryable() { RETRY } else { REFUSED_RETRY }.delay(state.failures);
                state.failures = state.failures.saturating_add(1);
                if state.failures == 1 {
                    tracing::warn!(uid = %finished.uid, %error, "status of an ImagePullJob not written; will retry");
                }
                state.not_before = at + error.retry_after().unwrap_or(pause);
                state.not_before
            }
        };
        self.schedule(&finished.uid, next);
    }
}

fn api(cluster: &Cluster, job: &PullJob) -> Api<ImagePullJob> {
    let namespace = job.key.namespace.as_deref().unwrap_or_default();
    Api::namespaced(cluster.client.clone(), namespace)
}

/// Ends the root of a job's trace, which began with the request that created the job.
fn end_trace(job: &PullJob, status: &ImagePullJobStatus) {
    let Some(created) = job.created else { return };
    let mut span = Span::of_object("ImagePullJob", &job.uid, created.into())
        .with(
            "k8s.namespace.name",
            job.key.namespace.as_deref().unwrap_or_default(),
        )
        .with("k8s.imagepulljob.name", &job.key.name)
        .with("container.image.name", &job.spec.image)
        .with_number("nodes.desired", i64::from(status.desired))
        .with_number("nodes.succeeded", i64::from(status.succeeded))
        .with_number("nodes.failed", i64::from(status.failed));
    if status.failed > 0 {
        let condition = status.conditions.last();
        span.fail(condition.map_or("nodes failed", |condition| condition.message.as_str()));
    }
    span.end();
}

/// Logs the start and the end of a job.
fn log_transition(job: &PullJob, status: &ImagePullJobStatus, is_first: bool) {
    let (key, image, nodes) = (&job.key, &job.spec.image, status.desired);
    if is_first {
        tracing::info!(job = %key, image, nodes, "ImagePullJob started");
    }
    if status.completion_time.is_some() {
        let (succeeded, failed) = (status.succeeded, status.failed);
        let message = status
            .conditions
            .last()
            .map(|condition| condition.message.as_str());
        tracing::info!(job = %key, image, succeeded, failed, message, "ImagePullJob ended");
        end_trace(job, status);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use jiff::SignedDuration;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::sync::mpsc;

    use super::super::plan::registry_limit::RegistryLimit;
    use super::*;

    /// The statuses that are written within some seconds.
    async fn written(
        writer: &mut StatusWriter,
        index: &mut JobIndex,
        sent: &mut mpsc::UnboundedReceiver<Value>,
    ) -> Vec<Value> {
        let end = Instant::now() + Duration::from_secs(5);
        while Instant::now() < end {
            writer.start_writes(index, Timestamp::UNIX_EPOCH);
            tokio::select! {
                Some(done) = writer.next_finished() => writer.on_write_finished(index, done),
                () = tokio::time::sleep(Duration::from_millis(50)) => {}
            }
        }
        std::iter::from_fn(|| sent.try_recv().ok()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn changes_by_others_are_seen() {
        let (sent_tx, mut sent) = mpsc::unbounded_channel();
        let mut object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
            "metadata": { "name": "j", "namespace": "team", "uid": "u" },
            "spec": { "image": "nginx:1", "completionPolicy": {} } });
        let stored = object.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (sent_tx, mut stored) = (sent_tx.clone(), stored.clone());
            async move {
                let body = request.into_body().collect_bytes().await.unwrap_or_default();
                let patch: Value = serde_json::from_slice(&body).unwrap();
                json_patch::merge(&mut stored, &patch);
                let _ = sent_tx.send(patch);
                http::Response::builder().body(Body::from(stored.to_string().into_bytes()))
            }
        });
        let mut writer = StatusWriter::new(&Context::for_test(kube::Client::new(service, "default")));
        let mut index = JobIndex::new(SignedDuration::ZERO, RegistryLimit::default());
        let put = |index: &mut JobIndex, object: &Value| {
            let job: ImagePullJob = serde_json::from_value(object.clone()).unwrap();
            index.upsert_job(PullJob::from_object(&job), Timestamp::UNIX_EPOCH);
        };
        put(&mut index, &object);
        let first = written(&mut writer, &mut index, &mut sent).await;
        assert_eq!(first.len(), 1, "{first:?}");

        let foreign = json!({ "type": "example.com/Seen", "status": "True", "reason": "Seen", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z" });
        json_patch::merge(&mut object, &first[0]);
        json_patch::merge(&mut object, &json!({ "status": { "conditions": [foreign] } }));
        put(&mut index, &object);
        assert_eq!(
            written(&mut writer, &mut index, &mut sent).await,
            [] as [Value; 0]
        );

        json_patch::merge(&mut object, &json!({ "status": { "message": "overwritten" } }));
        put(&mut index, &object);
        let last = written(&mut writer, &mut index, &mut sent).await;
        assert_eq!(last.len(), 1, "{last:?}");
        assert_eq!(last[0]["status"]["message"], first[0]["status"]["message"]);
        assert_eq!(last[0]["status"]["conditions"], json!([foreign]));
    }
}
