//! Writes the status of jobs: the end of a job at once, its progress some times a second at most.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Api;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::plan::index::{Index, Uid};
use super::plan::job::Job;
use super::plan::status::{Verdict, conditions, judge, late};
use crate::Context;
use crate::status_pace::{LONGEST, StatusPace};
use kruise_api::backoff::Backoff;
use kruise_api::image_pull_job::{ImagePullJob, ImagePullJobStatus};
use kruise_cluster::{Cluster, Error, EventType, write};
use kruise_ops::Progress;
use kruise_ops::panics::{isolated, isolated_now};

/// After failed writes.
const RETRY: Backoff = Backoff::new(LONGEST, Duration::from_secs(30));
/// After writes that are refused: they succeed only when somebody changes a role or a policy.
const REFUSED: Backoff = Backoff::new(LONGEST, Duration::from_secs(300));

/// What was written of one job.
struct Told {
    last: Option<ImagePullJobStatus>,
    /// When it is looked at again; the same moment is in [`Reporter::agenda`].
    at: Option<Instant>,
    pace: StatusPace,
    /// A write is under way; what changes meanwhile is looked at after it.
    writing: bool,
    changed: bool,
    /// A failed write is not repeated before that moment.
    not_before: Instant,
    /// How many writes have failed since the last good one.
    failures: u32,
}

/// The end of one write.
pub struct Done {
    job: Arc<Job>,
    /// Whether it is the first write of the job.
    begins: bool,
    uid: Uid,
    result: Result<ImagePullJobStatus, Error>,
}

/// Writes statuses.
pub struct Reporter {
    cluster: Cluster,
    progress: Progress,
    told: HashMap<Uid, Told>,
    /// The jobs to look at, in the order of their time: the cost of a change does not grow with their number.
    agenda: BTreeSet<(Instant, Uid)>,
    running: JoinSet<Done>,
}

impl Reporter {
    /// A reporter that has told nothing.
    pub fn new(ctx: &Context) -> Self {
        Self {
            cluster: ctx.cluster.clone(),
            progress: ctx.progress.clone(),
            told: HashMap::new(),
            agenda: BTreeSet::new(),
            running: JoinSet::new(),
        }
    }

    /// Starts the writes that are due.
    pub fn flush(&mut self, index: &mut Index, now: Timestamp) {
        let at = Instant::now();
        for uid in index.take_dropped() {
            self.forget(&uid);
        }
        for uid in index.take_dirty() {
            let told = self.told.entry(Arc::clone(&uid)).or_insert_with(|| Told {
                last: None,
                at: None,
                pace: StatusPace::default(),
                writing: false,
                changed: false,
                not_before: at,
                failures: 0,
            });
            told.changed = true;
            let wait = told.pace.another(at.into_std(), false);
            let due = if index.over(&uid) { at } else { at + wait };
            self.schedule(&uid, due);
        }
        while let Some((due, _)) = self.agenda.first()
            && *due <= at
        {
            if let Some((_, uid)) = self.agenda.pop_first() {
                if let Some(told) = self.told.get_mut(&uid) {
                    told.at = None;
                }
                self.tell(index, &uid, now);
            }
        }
    }

    /// Looks at a job at that moment, or earlier if that was planned.
    fn schedule(&mut self, uid: &Uid, due: Instant) {
        let Some(told) = self.told.get_mut(uid) else {
            return;
        };
        let due = due.max(told.not_before);
        if told.writing || told.at.is_some_and(|at| at <= due) {
            return;
        }
        if let Some(at) = told.at.replace(due) {
            self.agenda.remove(&(at, Arc::clone(uid)));
        }
        self.agenda.insert((due, Arc::clone(uid)));
    }

    fn forget(&mut self, uid: &Uid) {
        if let Some(at) = self.told.remove(uid).and_then(|told| told.at) {
            self.agenda.remove(&(at, Arc::clone(uid)));
        }
    }

    fn tell(&mut self, index: &Index, uid: &Uid, now: Timestamp) {
        let (Some(job), Some(told)) = (index.job(uid), self.told.get_mut(uid)) else {
            return;
        };
        told.changed = false;
        if told.last.as_ref().is_some_and(|s| s.completion_time.is_some()) {
            return;
        }
        let judged = isolated_now(super::NAME, &job.key, || {
            let tally = index.tally(uid, late(&job, now), now)?;
            Some(judge(&job, &tally, now))
        });
        let verdict = match judged {
            Ok(Some(verdict)) => verdict,
            Ok(None) => return told.pace.same(),
            Err(_) => {
                told.pace.same();
                return self.schedule(uid, Instant::now() + RETRY.longest());
            }
        };
        let Verdict {
            mut status,
            wake,
            warning,
        } = verdict;
        let before = told.last.as_ref().unwrap_or(&job.status);
        status.conditions = conditions(&before.conditions, status.conditions);
        if *before == status {
            told.pace.same();
            if let Some(wake) = wake {
                self.schedule(uid, Instant::now() + super::until(wake, now));
            }
            return;
        }
        told.pace.written(Instant::now().into_std());
        told.writing = true;
        if let Some(warning) = warning {
            self.cluster.events.publish(
                super::plan::entry::owner(&job),
                EventType::Warning,
                warning.reason,
                "Report",
                warning.note,
            );
        }
        let api = api(&self.cluster, &job);
        let uid = Arc::clone(uid);
        let begins = told.last.is_none() && job.status.message.is_none();
        let what = format!("writing the status of job {}", job.key);
        let step = self.progress.begin(super::NAME, what, write::DEADLINE);
        self.running.spawn(async move {
            let _step = step;
            let body = body(&job.uid, &status);
            let write = write::patch_status_merge(&api, &job.key.name, &body);
            let written = isolated(super::NAME, &job.key, write).await;
            let written = written.unwrap_or_else(|panicked| Err(panicked.into()));
            Done {
                job,
                begins,
                uid,
                result: written.map(|_| status),
            }
        });
    }

    /// How long until a job is to be looked at.
    pub fn wake(&self) -> Option<Duration> {
        let (at, _) = self.agenda.first()?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    /// The next write that has ended; `None` while none runs.
    pub async fn done(&mut self) -> Option<Done> {
        match self.running.join_next().await? {
            Ok(done) => Some(done),
            Err(error) => {
                tracing::error!(%error, "the task that writes a job's status failed");
                None
            }
        }
    }

    /// Takes note of the end of a write; a failed one is repeated, and one whose end nobody knows after a panic.
    pub fn finished(&mut self, index: &Index, done: Done) {
        let uid = Arc::clone(&done.uid);
        let about = format!("outcome of the status of {}", done.job.key);
        if isolated_now(super::NAME, about, || self.ended(index, done)).is_err() {
            if let Some(told) = self.told.get_mut(&uid) {
                told.writing = false;
            }
            self.schedule(&uid, Instant::now() + RETRY.longest());
        }
    }

    fn ended(&mut self, index: &Index, done: Done) {
        if let Ok(status) = &done.result {
            log(&done.job, status, done.begins);
        }
        let Some(told) = self.told.get_mut(&done.uid) else {
            return;
        };
        told.writing = false;
        let at = Instant::now();
        let next = match done.result {
            Ok(status) => {
                told.failures = 0;
                told.last = Some(status);
                // Also without a change, for the deadline's sake.
                let more = told.changed && !index.over(&done.uid);
                if more {
                    at + told.pace.another(at.into_std(), false)
                } else {
                    at
                }
            }
            Err(error) if error.not_found() || error.conflict() => {
                // The job has gone; the watch will say so.
                tracing::debug!(uid = %done.uid, %error, "job has gone");
                at + LONGEST
            }
            Err(error) => {
                let pause = if error.retryable() { RETRY } else { REFUSED }.pause(told.failures);
                told.failures = told.failures.saturating_add(1);
                if told.failures == 1 {
                    tracing::warn!(uid = %done.uid, %error, "status of an ImagePullJob not written; will retry");
                }
                told.not_before = at + error.retry_after().unwrap_or(pause);
                told.not_before
            }
        };
        self.schedule(&done.uid, next);
    }
}

fn api(cluster: &Cluster, job: &Job) -> Api<ImagePullJob> {
    let namespace = job.key.namespace.as_deref().unwrap_or_default();
    Api::namespaced(cluster.client.clone(), namespace)
}

/// One line for the begin of a job, and one for its end.
fn log(job: &Job, status: &ImagePullJobStatus, begins: bool) {
    let (key, image, nodes) = (&job.key, &job.spec.image, status.desired);
    if begins {
        tracing::info!(job = %key, image, nodes, "ImagePullJob started");
    }
    if status.completion_time.is_some() {
        let (succeeded, failed) = (status.succeeded, status.failed);
        let message = status
            .conditions
            .last()
            .map(|condition| condition.message.as_str());
        tracing::info!(job = %key, image, succeeded, failed, message, "ImagePullJob ended");
    }
}

/// The whole status; what is empty is named as absent, for a merge patch keeps what it does not name.
fn body(uid: &str, status: &ImagePullJobStatus) -> Value {
    let absent = [
        "startTime",
        "completionTime",
        "message",
        "failedNodes",
        "conditions",
    ];
    let mut fields: BTreeMap<String, Value> = absent.map(|field| (field.to_owned(), Value::Null)).into();
    if let Value::Object(map) = json!(status) {
        fields.extend(map);
    }
    json!({ "metadata": { "uid": uid }, "status": fields })
}
