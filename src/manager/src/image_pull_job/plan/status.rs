//! What a job's status says, and when the job ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::job::{Job, Targets, after};
use crate::names::first_of;
use kruise_api::image_pull_job::{COMPLETE, FAILED, ImagePullJobStatus, WAITING};

/// How many names of failed nodes a status holds at most. The counter counts all of them; ten thousand long
/// names would not fit into an object.
pub const FAILED_NODES: usize = 1000;
/// How many names of nodes a message holds at most.
const NAMES_IN_MESSAGE: usize = 10;
/// Of how many failed nodes a message tells the cause, and in how many characters of each.
const CAUSES_IN_MESSAGE: usize = 3;
const LONGEST_CAUSE: usize = 300;

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
    /// Why nodes failed, or cannot be asked: of some of them.
    pub notes: BTreeMap<Arc<str>, String>,
    /// Nodes where the end of a pull is waited for that others asked for before, sorted.
    pub awaits: BTreeSet<Arc<str>>,
    /// Nodes that are ready, and whose daemons have not said anything for a while since they were asked.
    pub silent: BTreeSet<Arc<str>>,
    /// The same of nodes that are not ready.
    pub lost: BTreeSet<Arc<str>>,
    /// When the next node is one of these, if its daemon says nothing until then.
    pub silent_from: Option<Timestamp>,
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
        let nowhere = nowhere(job, tally);
        let outcome = outcome(job, tally, nowhere.as_ref());
        return Verdict {
            status: status(
                tally,
                started,
                "job has completed".to_owned(),
                Some(now),
                Some(outcome),
                now,
            ),
            wake: None,
            warning: nowhere,
        };
    }
    if deadline.is_some_and(|d| now >= d) {
        let message = "job exceeds activeDeadlineSeconds".to_owned();
        let waited = waiting(job, tally).map(|outcome| outcome.message);
        let mut tally = tally.clone();
        tally.failed.append(&mut tally.unfinished.clone());
        tally.active = 0;
        let words = [Some(message.clone()), waited, Some(failures(&tally))];
        let outcome = Outcome {
            type_: FAILED,
            reason: "DeadlineExceeded",
            message: words.into_iter().flatten().collect::<Vec<_>>().join("; "),
        };
        return Verdict {
            status: status(&tally, started, message, Some(now), Some(outcome), now),
            wake: None,
            warning: None,
        };
    }
    // Of a job that ends this is said at its end.
    let no_node = || {
        let over = job.never_ends() && tally.over() && now >= sure;
        nowhere(job, tally).filter(|_| over).map(Outcome::from)
    };
    let waiting = waiting(job, tally).or_else(no_node);
    Verdict {
        status: status(tally, started, running(tally), None, waiting, now),
        wake: deadline
            .into_iter()
            .chain((doubtful && now < sure).then_some(sure))
            .chain(tally.awaited_until)
            .chain(tally.silent_from)
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
    let warning = Warning {
        reason: "InvalidSpec",
        note: mistake.to_owned(),
    };
    let outcome = Outcome {
        type_: if ended.is_some() { FAILED } else { WAITING },
        reason: warning.reason,
        message: mistake.to_owned(),
    };
    Verdict {
        status: status(tally, started, mistake.to_owned(), ended, Some(outcome), now),
        wake: None,
        warning: Some(warning),
    }
}

/// What a condition says that is true.
struct Outcome {
    type_: &'static str,
    reason: &'static str,
    message: String,
}

impl From<Warning> for Outcome {
    fn from(Warning { reason, note }: Warning) -> Self {
        Self {
            type_: WAITING,
            reason,
            message: note,
        }
    }
}

/// What is in the way of a job that has not ended.
fn waiting(job: &Job, tally: &Tally) -> Option<Outcome> {
    let delayed = || tally.notes.iter().find(|(node, _)| !tally.failed.contains(*node));
    let (reason, message) = if tally.answered() {
        if tally.awaited.is_empty() {
            return None;
        }
        let names = names(&tally.awaited);
        ("NoNodeImage", format!("waiting for the NodeImage of {names}"))
    } else if job.parallelism == Ok(0) {
        ("Paused", "paused: spec.parallelism is 0".to_owned())
    } else if let Some(hindrance) = &tally.hindrance {
        ("PullSecretsNotCopied", hindrance.clone())
    } else if let Some((node, why)) = delayed() {
        ("NodeImageNotWritten", format!("{node}: {}", cut(why)))
    } else if !tally.awaits.is_empty() {
        let names = names(&tally.awaits);
        (
            "PullInProgress",
            format!(
                "imagePullPolicy is Always: waiting for the end of a pull of the image that was requested before, on {names}"
            ),
        )
    } else if !tally.silent.is_empty() {
        let have = has_or_have(&tally.silent);
        (
            "NoDaemon",
            format!("{have} not started the pull: is kruise-daemon running there?"),
        )
    } else if !tally.lost.is_empty() {
        let have = has_or_have(&tally.lost);
        let are = if tally.lost.len() == 1 {
            "node is"
        } else {
            "nodes are"
        };
        (
            "NodeNotReady",
            format!("{have} not started the pull: the {are} not ready"),
        )
    } else {
        return None;
    };
    Some(Outcome {
        type_: WAITING,
        reason,
        message,
    })
}

fn names(nodes: &BTreeSet<Arc<str>>) -> String {
    first_of(NAMES_IN_MESSAGE, nodes.iter().map(AsRef::as_ref))
}

fn has_or_have(nodes: &BTreeSet<Arc<str>>) -> String {
    let verb = if nodes.len() == 1 { "has" } else { "have" };
    format!("{} {verb}", names(nodes))
}

/// How many nodes failed, and the first causes.
fn failures(tally: &Tally) -> String {
    let (failed, desired) = (tally.failed.len(), tally.desired);
    let mut text = format!("failed on {failed} of {desired} nodes");
    let known = tally
        .failed
        .iter()
        .filter_map(|node| Some((node, tally.notes.get(node)?)));
    for (node, why) in known.take(CAUSES_IN_MESSAGE) {
        text = format!("{text}; {node}: {}", cut(why));
    }
    text
}

fn cut(text: &str) -> String {
    if text.chars().nth(LONGEST_CAUSE).is_none() {
        return text.to_owned();
    }
    text.chars().take(LONGEST_CAUSE).chain(['…']).collect()
}

/// Why there is no node to be asked, or not all that are named, where that is so.
fn nowhere(job: &Job, tally: &Tally) -> Option<Warning> {
    let (reason, note) = if !tally.unknown.is_empty() {
        let names = first_of(NAMES_IN_MESSAGE, tally.unknown.iter().map(String::as_str));
        (
            "UnknownNode",
            format!("no NodeImage named {names}: no such node, or it has none yet"),
        )
    } else if tally.desired == 0 {
        let which = match job.targets {
            Targets::Pods(_) => "no running Pod matches spec.podSelector",
            Targets::Names(_) | Targets::Labels(_) => "no node matches spec.selector",
            Targets::All => "there is no NodeImage",
        };
        ("NoNode", which.to_owned())
    } else {
        return None;
    };
    Some(Warning { reason, note })
}

/// How a job ended whose nodes all have an outcome.
fn outcome(job: &Job, tally: &Tally, nowhere: Option<&Warning>) -> Outcome {
    let (type_, reason, mut message) = if tally.desired == 0 {
        (COMPLETE, "NoNode", "there was no node to pull on".to_owned())
    } else if tally.failed.is_empty() {
        let image = &job.spec.image;
        let text = format!("{image} is on {} of {} nodes", tally.succeeded, tally.desired);
        (COMPLETE, "Completed", text)
    } else {
        (FAILED, "NodesFailed", failures(tally))
    };
    if let Some(nowhere) = nowhere {
        message = format!("{message}; {}", nowhere.note);
    }
    Outcome {
        type_,
        reason,
        message,
    }
}

/// The conditions to write: those that hold since `before` keep their time, and those of others stay.
#[must_use]
pub fn conditions(before: &[Condition], mut now: Vec<Condition>) -> Vec<Condition> {
    for condition in &mut now {
        let same = |old: &&Condition| old.type_ == condition.type_ && old.status == condition.status;
        if let Some(old) = before.iter().find(same) {
            condition.last_transition_time = old.last_transition_time.clone();
        }
    }
    let ours = [COMPLETE, FAILED, WAITING];
    let others = before.iter().filter(|old| !ours.contains(&old.type_.as_str()));
    others.cloned().chain(now).collect()
}

fn running(tally: &Tally) -> String {
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
    outcome: Option<Outcome>,
    now: Timestamp,
) -> ImagePullJobStatus {
    let condition = |outcome: Outcome| Condition {
        type_: outcome.type_.to_owned(),
        status: "True".to_owned(),
        reason: outcome.reason.to_owned(),
        message: outcome.message,
        last_transition_time: Time(now),
        observed_generation: None,
    };
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
        conditions: outcome.map(condition).into_iter().collect(),
    }
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
