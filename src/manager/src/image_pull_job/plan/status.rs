//! The status of a job, and its end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::job::{NodeTargets, PullJob};
use super::registry_limit::RegistryFull;
use kruise_api::image_pull_job::{COMPLETE, FAILED, ImagePullJobStatus, WAITING};
use kruise_api::node_image::PulledBytes;
use kruise_api::time::add_seconds;
use kruise_workload::job_conditions::is_own;
use kruise_workload::names::join_first;

/// Maximum number of failed nodes in a status. The counter includes all of them; ten thousand long names would not fit
/// into an object.
pub const MAX_FAILED_NODES: usize = 1000;
/// Maximum number of node names in a message.
const MAX_NAMES_IN_MESSAGE: usize = 10;
/// Maximum number of causes in a message, and of characters of each.
const MAX_CAUSES_IN_MESSAGE: usize = 3;
const MAX_CAUSE_CHARS: usize = 300;

/// Seconds for which a job that finds no node, or not all named ones, waits for more.
const DISCOVERY_SECONDS: i64 = 1;

/// Progress of the nodes of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobCounters {
    /// Nodes that the job selects.
    pub desired: usize,
    /// Requested nodes without an outcome.
    pub active: usize,
    /// Nodes that have the image.
    pub succeeded: usize,
    /// Nodes whose pull failed, sorted.
    pub failed: BTreeSet<Arc<str>>,
    /// Bytes of the image that the nodes have together, if they are known.
    pub pulled: Option<PulledBytes>,
    /// Nodes without an outcome, requested or not, sorted; set only at the deadline.
    pub unfinished: BTreeSet<Arc<str>>,
    /// Names in the selector without a NodeImage, sorted.
    pub unknown_nodes: Vec<String>,
    /// Nodes of the job that are about to get their NodeImage, sorted.
    pub pending_nodes: BTreeSet<Arc<str>>,
    /// The first time at which the wait for one of these ends.
    pub pending_until: Option<Timestamp>,
    /// Why no node is requested, if the job is blocked.
    pub blocked_reason: Option<String>,
    /// Why no node may pull from its registry, if the job waits for others there.
    pub registry_full: Option<RegistryFull>,
    /// Why nodes failed, or cannot be requested; for some of them.
    pub node_messages: BTreeMap<Arc<str>, String>,
    /// Nodes that wait for a pull that others requested before, sorted.
    pub awaiting_pull: BTreeSet<Arc<str>>,
    /// Ready nodes whose daemons have reported nothing for a while after the request.
    pub unresponsive: BTreeSet<Arc<str>>,
    /// Nodes that are not ready, and otherwise the same.
    pub not_ready: BTreeSet<Arc<str>>,
    /// Past the deadline: nodes that are not ready and were not requested, because all others come first.
    pub put_aside: BTreeSet<Arc<str>>,
    /// When the next node counts as unresponsive if its daemon reports nothing.
    pub next_unresponsive_at: Option<Timestamp>,
}

impl JobCounters {
    fn is_finished(&self) -> bool {
        self.all_answered() && self.pending_nodes.is_empty()
    }

    /// Whether every node that can be requested has an outcome.
    fn all_answered(&self) -> bool {
        self.desired == self.succeeded + self.failed.len()
    }
}

/// What to write, and when to check again.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusUpdate {
    /// The desired status.
    pub status: ImagePullJobStatus,
    /// When it changes without an event.
    pub requeue_at: Option<Timestamp>,
    /// Something to report to the user in addition to the status.
    pub warning: Option<Warning>,
}

/// The reason and message of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The reason, in CamelCase.
    pub reason: &'static str,
    /// The message.
    pub message: String,
}

/// Whether the unfinished nodes are needed, because the deadline has passed.
#[must_use]
pub fn is_past_deadline(job: &PullJob, now: Timestamp) -> bool {
    let started = job.status.start_time.as_ref().map(|t| t.0);
    started
        .and_then(|s| job.deadline(s))
        .is_some_and(|deadline| now >= deadline)
}

/// The status of a job that is not finished.
#[must_use]
pub fn job_status(job: &PullJob, counters: &JobCounters, now: Timestamp) -> StatusUpdate {
    let started = job.status.start_time.as_ref().map_or(now, |t| t.0);
    let deadline = job.deadline(started);
    if let Some(mistake) = spec_error(job) {
        return invalid_spec_status(job, counters, started, mistake, now);
    }
    // The watch may show a NodeImage that was created just before the job after the job.
    let may_miss_nodes = counters.desired == 0 || !counters.unknown_nodes.is_empty();
    let discovery_end = add_seconds(started, DISCOVERY_SECONDS);
    if !job.never_ends() && counters.is_finished() && (!may_miss_nodes || now >= discovery_end) {
        let no_node = no_node_warning(job, counters);
        let outcome = final_condition(job, counters, no_node.as_ref());
        return StatusUpdate {
            status: build_status(
                counters,
                started,
                "job has completed".to_owned(),
                Some(now),
                Some(outcome),
                now,
            ),
            requeue_at: None,
            warning: no_node,
        };
    }
    if deadline.is_some_and(|d| now >= d) {
        let message = "job exceeds activeDeadlineSeconds".to_owned();
        let waiting_message = waiting_condition(job, counters)
            .map(|outcome| outcome.message)
            .or_else(|| put_aside_message(counters));
        let mut counters = counters.clone();
        counters.failed.append(&mut counters.unfinished.clone());
        counters.active = 0;
        let messages = [
            Some(message.clone()),
            waiting_message,
            Some(failure_message(&counters)),
        ];
        let outcome = JobCondition {
            type_: FAILED,
            reason: "DeadlineExceeded",
            message: messages.into_iter().flatten().collect::<Vec<_>>().join("; "),
        };
        return StatusUpdate {
            status: build_status(&counters, started, message, Some(now), Some(outcome), now),
            requeue_at: None,
            warning: None,
        };
    }
    // For a job that ends, the final condition reports it.
    let no_node = || {
        let finished = job.never_ends() && counters.is_finished() && now >= discovery_end;
        no_node_warning(job, counters)
            .filter(|_| finished)
            .map(JobCondition::from)
    };
    let waiting = waiting_condition(job, counters).or_else(no_node);
    StatusUpdate {
        status: build_status(counters, started, progress_message(counters), None, waiting, now),
        requeue_at: deadline
            .into_iter()
            .chain((may_miss_nodes && now < discovery_end).then_some(discovery_end))
            .chain(counters.pending_until)
            .chain(counters.next_unresponsive_at)
            .min(),
        warning: None,
    }
}

fn spec_error(job: &PullJob) -> Option<&str> {
    let image = job.image.as_ref().err();
    let parallelism = job.parallelism.as_ref().err();
    image
        .or(parallelism)
        .or(job.schedule.as_ref().err())
        .map(String::as_str)
}

/// A job with an invalid spec ends at once, except under completion policy `Never`: then it waits for a change.
fn invalid_spec_status(
    job: &PullJob,
    counters: &JobCounters,
    started: Timestamp,
    spec_error: &str,
    now: Timestamp,
) -> StatusUpdate {
    let ended = (!job.never_ends()).then_some(now);
    let warning = Warning {
        reason: "InvalidSpec",
        message: spec_error.to_owned(),
    };
    let outcome = JobCondition {
        type_: if ended.is_some() { FAILED } else { WAITING },
        reason: warning.reason,
        message: spec_error.to_owned(),
    };
    StatusUpdate {
        status: build_status(
            counters,
            started,
            spec_error.to_owned(),
            ended,
            Some(outcome),
            now,
        ),
        requeue_at: None,
        warning: Some(warning),
    }
}

/// A condition that is true.
struct JobCondition {
    type_: &'static str,
    reason: &'static str,
    message: String,
}

impl From<Warning> for JobCondition {
    fn from(
        Warning {
            reason,
            message: note,
        }: Warning,
    ) -> Self {
        Self {
            type_: WAITING,
            reason,
            message: note,
        }
    }
}

/// What blocks a running job.
fn waiting_condition(job: &PullJob, counters: &JobCounters) -> Option<JobCondition> {
    let first_delayed = || {
        counters
            .node_messages
            .iter()
            .find(|(node, _)| !counters.failed.contains(*node))
    };
    let (reason, message) = if counters.all_answered() {
        if counters.pending_nodes.is_empty() {
            return None;
        }
        let names = names(&counters.pending_nodes);
        ("NoNodeImage", format!("waiting for the NodeImage of {names}"))
    } else if job
        .parallelism
        .as_ref()
        .is_ok_and(|parallelism| parallelism.is_zero())
    {
        ("Paused", "paused: spec.parallelism is 0".to_owned())
    } else if let Some(hindrance) = &counters.blocked_reason {
        ("PullSecretsNotCopied", hindrance.clone())
    } else if let Some(full) = counters.registry_full {
        let registry = job.registry.as_deref().unwrap_or_default();
        let why = match full {
            RegistryFull::Total { limit } => {
                format!("{limit} nodes pull from {registry}, which is the limit")
            }
            RegistryFull::NamespaceShare { mine, limit } => format!(
                "{mine} nodes pull from {registry} for this namespace, and the rest of {limit} is kept for other namespaces"
            ),
        };
        (
            "RegistryLimit",
            format!("waiting for other jobs: {why} (--max-pulls-per-registry)"),
        )
    } else if let Some((node, why)) = first_delayed() {
        ("NodeImageNotWritten", format!("{node}: {}", truncate(why)))
    } else if !counters.awaiting_pull.is_empty() {
        let names = names(&counters.awaiting_pull);
        (
            "PullInProgress",
            format!(
                "imagePullPolicy is Always: waiting for the end of a pull of the image that was requested before, on {names}"
            ),
        )
    } else if !counters.unresponsive.is_empty() {
        let have = has_or_have(&counters.unresponsive);
        (
            "NoDaemon",
            format!("{have} not started the pull: is kruise-daemon running there?"),
        )
    } else if !counters.not_ready.is_empty() {
        let have = has_or_have(&counters.not_ready);
        let are = if counters.not_ready.len() == 1 {
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
    Some(JobCondition {
        type_: WAITING,
        reason,
        message,
    })
}

/// Which nodes were left for the end. They do not keep a job from its work: it always pulls on others then.
fn put_aside_message(counters: &JobCounters) -> Option<String> {
    let nodes = &counters.put_aside;
    (!nodes.is_empty()).then(|| {
        format!(
            "{} nodes were not ready, and others came first ({})",
            nodes.len(),
            names(nodes)
        )
    })
}

fn names(nodes: &BTreeSet<Arc<str>>) -> String {
    join_first(MAX_NAMES_IN_MESSAGE, nodes.iter().map(AsRef::as_ref))
}

fn has_or_have(nodes: &BTreeSet<Arc<str>>) -> String {
    let verb = if nodes.len() == 1 { "has" } else { "have" };
    format!("{} {verb}", names(nodes))
}

/// How many nodes failed, and the first causes.
fn failure_message(counters: &JobCounters) -> String {
    let (failed, desired) = (counters.failed.len(), counters.desired);
    let mut text = format!("failed on {failed} of {desired} nodes");
    let with_message = counters
        .failed
        .iter()
        .filter_map(|node| Some((node, counters.node_messages.get(node)?)));
    for (node, why) in with_message.take(MAX_CAUSES_IN_MESSAGE) {
        text = format!("{text}; {node}: {}", truncate(why));
    }
    text
}

fn truncate(text: &str) -> String {
    if text.chars().nth(MAX_CAUSE_CHARS).is_none() {
        return text.to_owned();
    }
    text.chars().take(MAX_CAUSE_CHARS).chain(['…']).collect()
}

/// Why no node is requested, or not all named ones.
fn no_node_warning(job: &PullJob, counters: &JobCounters) -> Option<Warning> {
    let (reason, note) = if !counters.unknown_nodes.is_empty() {
        let names = join_first(
            MAX_NAMES_IN_MESSAGE,
            counters.unknown_nodes.iter().map(String::as_str),
        );
        (
            "UnknownNode",
            format!("no NodeImage named {names}: no such node, or it has none yet"),
        )
    } else if counters.desired == 0 {
        let which = match job.targets {
            NodeTargets::Pods(_) => "no running Pod matches spec.podSelector",
            NodeTargets::Names(_) | NodeTargets::Labels(_) => "no node matches spec.selector",
            NodeTargets::All => "there is no NodeImage",
        };
        ("NoNode", which.to_owned())
    } else {
        return None;
    };
    Some(Warning {
        reason,
        message: note,
    })
}

/// The final condition of a job whose nodes all have an outcome.
fn final_condition(job: &PullJob, counters: &JobCounters, no_node: Option<&Warning>) -> JobCondition {
    let (type_, reason, mut message) = if counters.desired == 0 {
        (COMPLETE, "NoNode", "there was no node to pull on".to_owned())
    } else if counters.failed.is_empty() {
        let image = &job.spec.image;
        let text = format!(
            "{image} is on {} of {} nodes",
            counters.succeeded, counters.desired
        );
        (COMPLETE, "Completed", text)
    } else {
        (FAILED, "NodesFailed", failure_message(counters))
    };
    if let Some(no_node) = no_node {
        message = format!("{message}; {}", no_node.message);
    }
    JobCondition {
        type_,
        reason,
        message,
    }
}

/// Whether two statuses are the same, but for conditions of others, and for bytes, which cause no write.
#[must_use]
pub fn is_same(one: &ImagePullJobStatus, other: &ImagePullJobStatus) -> bool {
    let ImagePullJobStatus {
        start_time,
        completion_time,
        desired,
        active,
        succeeded,
        failed,
        message,
        failed_nodes,
        conditions,
        progress: _,
    } = one;
    let counts = (desired, active, succeeded, failed);
    let own = conditions.iter().filter(|condition| is_own(condition));
    let own_of_other = other.conditions.iter().filter(|condition| is_own(condition));
    *start_time == other.start_time
        && *completion_time == other.completion_time
        && counts == (&other.desired, &other.active, &other.succeeded, &other.failed)
        && *message == other.message
        && *failed_nodes == other.failed_nodes
        && own.eq(own_of_other)
}

fn progress_message(counters: &JobCounters) -> String {
    if counters.desired == 0 {
        return "job is running, no progress".to_owned();
    }
    // In tenths of a percent, rounded to nearest.
    let finished = counters.succeeded + counters.failed.len();
    let tenths = (finished * 2000 + counters.desired) / (counters.desired * 2);
    format!("job is running, progress {}.{}%", tenths / 10, tenths % 10)
}

fn build_status(
    counters: &JobCounters,
    started: Timestamp,
    message: String,
    ended: Option<Timestamp>,
    outcome: Option<JobCondition>,
    now: Timestamp,
) -> ImagePullJobStatus {
    // As it is stored: what was written is compared with what the watch shows.
    let whole_second = |at: Timestamp| Time(Timestamp::from_second(at.as_second()).unwrap_or(at));
    let condition = |outcome: JobCondition| Condition {
        type_: outcome.type_.to_owned(),
        status: "True".to_owned(),
        reason: outcome.reason.to_owned(),
        message: outcome.message,
        last_transition_time: whole_second(now),
        observed_generation: None,
    };
    let number = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let max_percent = if counters.active > 0 { 99 } else { 100 };
    ImagePullJobStatus {
        start_time: Some(Time(started)),
        completion_time: ended.map(whole_second),
        desired: number(counters.desired),
        active: number(counters.active),
        succeeded: number(counters.succeeded),
        failed: number(counters.failed.len()),
        message: Some(message),
        failed_nodes: counters
            .failed
            .iter()
            .take(MAX_FAILED_NODES)
            .map(ToString::to_string)
            .collect(),
        conditions: outcome.map(condition).into_iter().collect(),
        progress: counters
            .pulled
            .filter(|_| ended.is_none())
            .and_then(|bytes| bytes.in_words(max_percent)),
    }
}

#[cfg(test)]
mod tests;
