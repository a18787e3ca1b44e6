//! What a job's status says, and when the job ends.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::job::{Job, after};
use crate::api::image_pull_job::ImagePullJobStatus;
use crate::manager::names::first_of;

/// How many names of failed nodes a status holds at most. The counter counts all of them; ten thousand long
/// names would not fit into an object.
pub const FAILED_NODES: usize = 1000;
/// How many names of unknown nodes a message holds at most.
const NAMES_IN_MESSAGE: usize = 10;

/// Seconds for which a job that finds no node, or not all that it names, goes on looking.
const DOUBT: i64 = 1;

/// How far the nodes of a job are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Nodes that the job is for.
    pub desired: usize,
    /// Nodes that were asked and have not answered.
    pub active: usize,
    /// Nodes that have the image.
    pub succeeded: usize,
    /// Nodes that gave up, sorted.
    pub failed: BTreeSet<Arc<str>>,
    /// Nodes that have not answered, asked or not, sorted; filled in only at the deadline.
    pub unfinished: BTreeSet<Arc<str>>,
    /// Names in the selector that no NodeImage has, sorted.
    pub unknown: Vec<String>,
    /// Nodes of the job that are about to get their NodeImage, sorted.
    pub awaited: BTreeSet<Arc<str>>,
    /// When the first of these is not waited for any more.
    pub awaited_until: Option<Timestamp>,
    /// Why no node is asked, where something is in the way.
    pub hindrance: Option<String>,
}

impl Tally {
    fn over(&self) -> bool {
        self.answered() && self.awaited.is_empty()
    }

    /// Whether every node that can be asked has an outcome.
    fn answered(&self) -> bool {
        self.desired == self.succeeded + self.failed.len()
    }
}

/// What to write, and when to look again.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The status as it should be.
    pub status: ImagePullJobStatus,
    /// When it changes by time alone.
    pub wake: Option<Timestamp>,
    /// Something that the user should be told beyond the status.
    pub warning: Option<Warning>,
}

/// An event: its reason and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The reason, in one word.
    pub reason: &'static str,
    /// The text.
    pub note: String,
}

/// Whether the tally's unfinished nodes are needed, because the deadline has passed.
#[must_use]
pub fn late(job: &Job, now: Timestamp) -> bool {
    let started = job.status.start_time.as_ref().map(|t| t.0);
    started
        .and_then(|s| job.deadline(s))
        .is_some_and(|deadline| now >= deadline)
}

/// The status of a job that is not over yet.
#[must_use]
pub fn judge(job: &Job, tally: &Tally, now: Timestamp) -> Verdict {
    let started = job.status.start_time.as_ref().map_or(now, |t| t.0);
    let deadline = job.deadline(started);
    if let Some(mistake) = mistake(job) {
        return wrong(job, tally, started, mistake, now);
    }
    // A NodeImage that was made just before the job may come to our knowledge after it.
    let doubtful = tally.desired == 0 || !tally.unknown.is_empty();
    let sure = after(started, DOUBT);
    if !job.never_ends() && tally.over() && (!doubtful || now >= sure) {
        let (message, warning) = completed(job, tally);
        let status = status(tally, started, message, Some(now));
        return Verdict {
            status,
            wake: None,
            warning,
        };
    }
    if deadline.is_some_and(|d| now >= d) {
        let mut tally = tally.clone();
        tally.failed.append(&mut tally.unfinished.clone());
        tally.active = 0;
        let message = "job exceeds activeDeadlineSeconds".to_owned();
        return Verdict {
            status: status(&tally, started, message, Some(now)),
            wake: None,
            warning: None,
        };
    }
    Verdict {
        status: status(tally, started, running(tally), None),
        wake: deadline
            .into_iter()
            .chain((doubtful && now < sure).then_some(sure))
            .chain(tally.awaited_until)
            .min(),
        warning: None,
    }
}

fn mistake(job: &Job) -> Option<&str> {
    let image = job.image.as_ref().err();
    image.or(job.parallelism.as_ref().err()).map(String::as_str)
}

/// A job that cannot be carried out ends at once, unless it never ends: then it waits for being mended.
fn wrong(job: &Job, tally: &Tally, started: Timestamp, mistake: &str, now: Timestamp) -> Verdict {
    let ended = (!job.never_ends()).then_some(now);
    Verdict {
        status: status(tally, started, mistake.to_owned(), ended),
        wake: None,
        warning: Some(Warning {
            reason: "InvalidSpec",
            note: mistake.to_owned(),
        }),
    }
}

fn completed(job: &Job, tally: &Tally) -> (String, Option<Warning>) {
    let words = "job has completed";
    let (reason, why) = if !tally.unknown.is_empty() {
        let names = first_of(NAMES_IN_MESSAGE, tally.unknown.iter().map(String::as_str));
        ("UnknownNode", format!("no NodeImage of name {names}"))
    } else if tally.desired == 0 {
        let which = if job.spec.pod_selector.is_some() {
            "spec.podSelector matches no running Pod"
        } else if job.spec.selector.is_some() {
            "spec.selector matches no node"
        } else {
            "there is no NodeImage"
        };
        ("NoNode", which.to_owned())
    } else {
        return (words.to_owned(), None);
    };
    let message = format!("{words}; {why}");
    (message, Some(Warning { reason, note: why }))
}

fn running(tally: &Tally) -> String {
    if let Some(hindrance) = &tally.hindrance {
        return hindrance.clone();
    }
    if tally.answered() && !tally.awaited.is_empty() {
        let names = first_of(NAMES_IN_MESSAGE, tally.awaited.iter().map(AsRef::as_ref));
        return format!("job waits for the NodeImage of {names}");
    }
    if tally.desired == 0 {
        return "job is running, no progress".to_owned();
    }
    // In tenths of a per cent, to the nearest.
    let done = tally.succeeded + tally.failed.len();
    let tenths = (done * 2000 + tally.desired) / (tally.desired * 2);
    format!("job is running, progress {}.{}%", tenths / 10, tenths % 10)
}

fn status(
    tally: &Tally,
    started: Timestamp,
    message: String,
    ended: Option<Timestamp>,
) -> ImagePullJobStatus {
    let number = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    ImagePullJobStatus {
        start_time: Some(Time(started)),
        completion_time: ended.map(Time),
        desired: number(tally.desired),
        active: number(tally.active),
        succeeded: number(tally.succeeded),
        failed: number(tally.failed.len()),
        message: Some(message),
        failed_nodes: tally
            .failed
            .iter()
            .take(FAILED_NODES)
            .map(ToString::to_string)
            .collect(),
    }
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
