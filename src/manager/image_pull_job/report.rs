//! Writes the status of jobs: the end of a job at once, its progress some times a second at most.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Api;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::index::{Index, Uid};
use super::job::Job;
use super::plan::{Verdict, judge, late};
use crate::api::image_pull_job::{ImagePullJob, ImagePullJobStatus};
use crate::cluster::{Cluster, Error, EventType, write};
use crate::manager::Context;

/// Changes within this time go together.
const TOGETHER: Duration = Duration::from_millis(100);
/// The longest pause between two writes of a job that changes all the time.
const LONGEST: Duration = Duration::from_secs(1);

/// What was written of one job.
struct Told {
    last: Option<ImagePullJobStatus>,
    /// A change waits to be written, not before that moment.
    due: Option<Instant>,
    /// The pause after the next write; doubles while changes do not stop.
    pause: Duration,
    wrote: Instant,
    writing: bool,
    /// A failed write is not repeated before that moment.
    not_before: Instant,
    deadline: Option<Timestamp>,
}

/// The end of one write.
pub struct Done {
    uid: Uid,
    result: Result<ImagePullJobStatus, Error>,
}

/// Writes statuses.
pub struct Reporter {
    cluster: Cluster,
    told: HashMap<Uid, Told>,
    running: JoinSet<Done>,
}

impl Reporter {
    /// A reporter that has told nothing.
    pub fn new(ctx: &Context) -> Self {
        Self {
            cluster: ctx.cluster.clone(),
            told: HashMap::new(),
            running: JoinSet::new(),
        }
    }

    /// Starts the writes that are due.
    pub fn flush(&mut self, index: &mut Index, now: Timestamp) {
        let at = Instant::now();
        for uid in index.take_dirty() {
            let told = self.told.entry(uid).or_insert_with(|| Told {
                last: None,
                due: None,
                pause: TOGETHER,
                wrote: at,
                writing: false,
                not_before: at,
                deadline: None,
            });
            told.due
                .get_or_insert_with(|| (at + TOGETHER).max(told.wrote + told.pause));
        }
        self.told
            .retain(|uid, told| told.writing || index.job(uid).is_some());
        let due: Vec<Uid> = self
            .told
            .iter()
            .filter(|(uid, told)| {
                let late = told.deadline.is_some_and(|d| now >= d);
                let changed = told.due.is_some_and(|due| due <= at || index.over(uid));
                !told.writing && told.not_before <= at && (late || changed)
            })
            .map(|(uid, _)| Arc::clone(uid))
            .collect();
        for uid in due {
            self.tell(index, &uid, now);
        }
    }

    fn tell(&mut self, index: &Index, uid: &Uid, now: Timestamp) {
        let (Some(job), Some(told)) = (index.job(uid), self.told.get_mut(uid)) else {
            return;
        };
        let Some(tally) = index.tally(uid, late(&job, now)) else {
            return;
        };
        let ended = |s: &ImagePullJobStatus| s.completion_time.is_some();
        told.due = None;
        told.deadline = None;
        if told.last.as_ref().is_some_and(ended) {
            return;
        }
        let Verdict {
            status,
            wake,
            warning,
        } = judge(&job, &tally, now);
        told.deadline = wake;
        if told.last.as_ref().unwrap_or(&job.status) == &status {
            return;
        }
        let at = Instant::now();
        let busy = at.duration_since(told.wrote) < told.pause * 2;
        told.pause = if busy {
            (told.pause * 2).min(LONGEST)
        } else {
            TOGETHER
        };
        told.wrote = at;
        told.writing = true;
        if let Some(warning) = warning {
            self.cluster.events.publish(
                super::entry::owner(&job),
                EventType::Warning,
                warning.reason,
                "Report",
                warning.note,
            );
        }
        let api = api(&self.cluster, &job);
        let uid = Arc::clone(uid);
        self.running.spawn(async move {
            let body = body(&job.uid, &status);
            let written = write::patch_status_merge(&api, &job.key.name, &body).await;
            Done {
                uid,
                result: written.map(|_| status),
            }
        });
    }

    /// How long until a write is due.
    pub fn wake(&self, now: Timestamp) -> Option<Duration> {
        let at = Instant::now();
        let waits = self.told.values().filter(|t| !t.writing).filter_map(|told| {
            let due = told.due.map(|due| due.saturating_duration_since(at));
            let deadline = told.deadline.map(|d| super::until(d, now));
            let first = due.into_iter().chain(deadline).min()?;
            Some(first.max(told.not_before.saturating_duration_since(at)))
        });
        waits.min()
    }

    /// The next write that has ended; `None` while none runs.
    pub async fn done(&mut self) -> Option<Done> {
        match self.running.join_next().await? {
            Ok(done) => Some(done),
            Err(error) => {
                tracing::error!(%error, "a write of a job's status ended badly");
                None
            }
        }
    }

    /// Takes note of the end of a write; a failed one is repeated.
    pub fn settle(&mut self, done: Done) {
        let Some(told) = self.told.get_mut(&done.uid) else {
            return;
        };
        told.writing = false;
        match done.result {
            Ok(status) => told.last = Some(status),
            Err(error) if error.not_found() || error.conflict() => {
                // The job has gone; the watch will say so.
                tracing::debug!(uid = %done.uid, %error, "job has gone");
            }
            Err(error) => {
                tracing::warn!(uid = %done.uid, %error, "status of a job not written");
                let pause = error.retry_after().unwrap_or(LONGEST);
                told.not_before = Instant::now() + pause;
                told.due = Some(told.not_before);
            }
        }
    }
}

fn api(cluster: &Cluster, job: &Job) -> Api<ImagePullJob> {
    let namespace = job.key.namespace.as_deref().unwrap_or_default();
    Api::namespaced(cluster.client.clone(), namespace)
}

/// The whole status; what is empty is named as absent, for a merge patch keeps what it does not name.
fn body(uid: &str, status: &ImagePullJobStatus) -> Value {
    let absent = ["startTime", "completionTime", "message", "failedNodes"];
    let mut fields: BTreeMap<String, Value> = absent.map(|field| (field.to_owned(), Value::Null)).into();
    if let Value::Object(map) = json!(status) {
        fields.extend(map);
    }
    json!({ "metadata": { "uid": uid }, "status": fields })
}
