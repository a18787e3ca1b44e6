//! One reconcile of a ContainerRecreateJob: whose containers are restarted next, its status, its end.
//!
//! Each Pod gets at most one request, whose name depends on job and Pod. Pods that were created after the job, and
//! containers that do not run, start later than the job anyway, and so did those that a request of another creator, made
//! after the job, has restarted. What kubelet restarted by itself is restarted again: only the node's clock, which may be
//! wrong by hours, shows when it was started, and kubelet may report another container late.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::restarts::{counts_until, shows_stopped_container, stop_limit};
use crate::view::{ContainerView, PodView};
use kruise_api::container_hash::deep_hash;
use kruise_api::container_recreate_job::{
    COMPLETE, ContainerRecreateJob, ContainerRecreateJobSpec, ContainerRecreateJobStatus, FAILED,
    MAX_FAILED_PODS, WAITING,
};
use kruise_api::container_recreate_request::{
    self as request, ContainerRecreateRequest, ContainerRecreateRequestContainer as RequestedContainer,
    ContainerRecreateRequestSpec,
};
use kruise_api::keys;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_api::selector::CompiledSelector;
use kruise_api::time::{MAX_CLOCK_CORRECTION, add_seconds};
use kruise_api::validation::truncate;
use kruise_workload::job_conditions::merge_conditions;
use kruise_workload::limits::scaled_value;
use kruise_workload::names::join_first;
use kruise_workload::order::CompiledPriority;

/// Requests that one reconcile creates; the next one follows at once.
const MAX_CREATIONS: usize = 64;
/// Maximum number of Pods in a message.
const MAX_NAMES_IN_MESSAGE: usize = 10;
/// Maximum characters of the reason why a Pod failed, or its request cannot be created.
const MAX_REASON_CHARS: usize = 300;
/// Maximum characters of the names of job and Pod in the name of a request.
const MAX_NAME_CHARS: usize = 100;
/// How long the watch of Pods may be behind that of jobs: a job does not end before.
const WATCH_DELAY: SignedDuration = SignedDuration::from_secs(1);

/// A job, its Pods and its requests.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The job.
    pub job: Arc<ContainerRecreateJob>,
    /// What its spec says about Pods.
    pub selectors: Arc<JobSelectors>,
    /// Whether the workload that it names is known.
    pub target: Target,
    /// The Pods that it selects, with their names.
    pub pods: Vec<(String, Arc<PodView>)>,
    /// Names of Pods to restart that the watch has not shown.
    pub unseen: Vec<String>,
    /// The requests that it controls.
    pub requests: Vec<Arc<ContainerRecreateRequest>>,
    /// UIDs of Pods with a request of another creator that has not ended.
    pub restarted_by_others: BTreeSet<String>,
    /// What such requests have restarted since the job was created.
    pub restarted_since: RestartedContainers,
}

/// Names of containers, by the UID of their Pod.
pub type RestartedContainers = BTreeMap<String, BTreeSet<String>>;

/// Whether the workload of a job is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// It is, or the job selects Pods by label.
    Known,
    /// It does not exist.
    NotFound,
    /// It is being deleted, and the job has nothing else to do.
    Terminating,
    /// It cannot be read, for this reason.
    Unreadable(String),
}

/// What is remembered of a job between reconciles.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// By the UID of a Pod that has had a request: how long its stop takes at most. A request that was deleted is not
    /// created again.
    pub requested: BTreeMap<String, SignedDuration>,
    /// By the UID of a Pod whose request this manager has seen: since when the Pod is not ready after it; `None` while the
    /// request has not ended.
    pub not_ready_since: BTreeMap<String, Option<Timestamp>>,
    /// By the UID of a Pod: how its restart ended. That stays, whatever becomes of Pod and request.
    pub ended: BTreeMap<String, Outcome>,
    /// By the UID of a Pod: why its request could not be created.
    pub refused: BTreeMap<String, Refusal>,
    /// Why no request of the job can be created, whatever its Pod.
    pub all_refused: Option<Refusal>,
}

/// How the restart of a Pod ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The Pod was ready after it.
    Restarted,
    /// It failed.
    Failed {
        /// Name of the Pod.
        pod: String,
        /// Why.
        why: String,
    },
    /// The Pod went before it: the one that replaces it is new.
    PodGone,
}

/// Why requests could not be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// As the API server says it.
    pub message: String,
    /// When they are tried again. The API server's clock may be set back meanwhile.
    pub retry_at: Instant,
}

/// What to do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The desired status; `None` if it stays.
    pub status: Option<ContainerRecreateJobStatus>,
    /// Requests to create.
    pub create: Vec<ContainerRecreateRequest>,
    /// Whether the TTL has passed, so that the job is deleted.
    pub expired: bool,
    /// When to reconcile again, if nothing changes before.
    pub requeue_at: Option<Timestamp>,
    /// What to remember, if the job has not ended.
    pub memory: Memory,
}

/// Which Pods a job selects and which of them come first, for many Pods: tenants may list many labels and terms.
#[derive(Debug, Default)]
pub struct JobSelectors {
    pods: PodSelector,
    priority: Option<CompiledPriority>,
}

#[derive(Debug, Default)]
enum PodSelector {
    Labels(CompiledSelector),
    ControlledBy(OwnerKind),
    #[default]
    Nothing,
}

impl From<&ContainerRecreateJobSpec> for JobSelectors {
    fn from(spec: &ContainerRecreateJobSpec) -> Self {
        let pods = match (&spec.selector, &spec.target_ref) {
            (Some(selector), _) => PodSelector::Labels(selector.into()),
            (None, Some(target)) => PodSelector::ControlledBy(controller_kind(&target.kind)),
            (None, None) => PodSelector::Nothing,
        };
        Self {
            pods,
            priority: spec.priority_strategy.as_ref().map(CompiledPriority::from),
        }
    }
}

impl JobSelectors {
    /// Whether a Pod may belong to the job, as far as it shows without the workload.
    #[must_use]
    pub fn may_select(&self, pod: &PodView) -> bool {
        match &self.pods {
            PodSelector::Labels(selector) => selector.matches(&pod.labels),
            PodSelector::ControlledBy(kind) => pod.controller.as_ref().is_some_and(|(of, _)| of == kind),
            PodSelector::Nothing => false,
        }
    }

    /// Whether a Pod that may belong to the job does. `owners` are kind and UID of the controllers that its workload's
    /// Pods have.
    #[must_use]
    pub fn is_owned(&self, owners: &BTreeSet<(OwnerKind, Box<str>)>, pod: &PodView) -> bool {
        let controller = pod.controller.as_ref();
        matches!(self.pods, PodSelector::Labels(_)) || controller.is_some_and(|owner| owners.contains(owner))
    }
}

/// The kind of controller that the Pods of the workload of a job have.
#[must_use]
pub fn controller_kind(workload_kind: &str) -> OwnerKind {
    match workload_kind {
        "CloneSet" => OwnerKind::CloneSet,
        "DaemonSet" => OwnerKind::DaemonSet,
        "Deployment" | "ReplicaSet" => OwnerKind::ReplicaSet,
        "StatefulSet" => OwnerKind::StatefulSet,
        _ => OwnerKind::Other,
    }
}

/// The job that controls a request.
#[must_use]
pub fn job_of(request: &ContainerRecreateRequest) -> Option<Owner> {
    Owner::controller(&request.metadata).filter(|owner| owner.kind == OwnerKind::ContainerRecreateJob)
}

/// Whether the job may still do something other than being deleted.
#[must_use]
pub fn is_unfinished(job: &ContainerRecreateJob) -> bool {
    let status = job.status.as_ref();
    job.metadata.deletion_timestamp.is_none() && status.is_none_or(|status| status.completion_time.is_none())
}

/// When the job was started, or is.
fn started(job: &ContainerRecreateJob, now: Timestamp) -> Timestamp {
    let status = job.status.as_ref();
    let start_time = status.and_then(|status| status.start_time.as_ref());
    start_time.map_or(now, |time| time.0)
}

/// From when on no further Pod is restarted.
pub fn deadline(job: &ContainerRecreateJob, now: Timestamp) -> Option<Timestamp> {
    let seconds = job.spec.active_deadline_seconds?;
    Some(add_seconds(started(job, now), seconds))
}

/// Plans one reconcile.
///
/// A job that has ended, or is being deleted, creates nothing more, whatever changes. `now` is the API server's time at
/// `instant`.
#[must_use]
pub fn plan(observed: &Observed, memory: &Memory, now: Timestamp, instant: Instant) -> Plan {
    let job = &*observed.job;
    if job.metadata.deletion_timestamp.is_some() {
        return Plan::default();
    }
    let previous = job.status.clone().unwrap_or_default();
    if let Some(Time(completed)) = previous.completion_time {
        let ttl = job.spec.ttl_seconds_after_finished;
        let expiry = ttl.map(|ttl| add_seconds(completed, ttl.into()));
        return Plan {
            expired: expiry.is_some_and(|at| now >= at),
            requeue_at: expiry.filter(|at| now < *at),
            ..Plan::default()
        };
    }
    let started = started(job, now);
    let situation = Situation::of(observed, memory, now, instant);
    let budget = situation.budget();
    let chosen = situation.choose(&budget);
    let condition = situation.condition(&chosen, &budget);
    let status = situation.status(&previous, started, condition);
    let wakes = [
        situation.deadline,
        situation.progress.next_deadline,
        situation.settled_at(),
        situation.next_retry(),
    ];
    Plan {
        create: chosen
            .iter()
            .map(|(name, pod)| build_request(job, name, pod, &observed.restarted_since))
            .collect(),
        requeue_at: wakes.into_iter().flatten().filter(|at| *at > now).min(),
        memory: Memory {
            requested: situation.progress.requested.clone(),
            not_ready_since: situation.progress.not_ready_since.clone(),
            ended: situation.progress.ended.clone(),
            refused: situation.refused(),
            all_refused: situation.all_refused().cloned(),
        },
        status: (status != previous).then_some(status),
        expired: false,
    }
}

/// How far the restart of a Pod is that has a request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Restart {
    /// The request has not ended.
    Running,
    /// The request has ended, and the Pod is not ready again.
    NotReady,
    Ended(Outcome),
}

/// The Pods that have requests.
#[derive(Default)]
struct Progress {
    running: Vec<String>,
    not_ready: Vec<String>,
    done: usize,
    /// By name of the Pod, the reason.
    failed: BTreeMap<String, String>,
    /// UIDs of Pods that are unavailable because of their request.
    unavailable: BTreeSet<String>,
    /// The message of a request that no daemon starts.
    no_daemon: Option<String>,
    /// As in [`Memory`].
    requested: BTreeMap<String, SignedDuration>,
    not_ready_since: BTreeMap<String, Option<Timestamp>>,
    ended: BTreeMap<String, Outcome>,
    /// When the next Pod fails that is not ready, or the next stop is over.
    next_deadline: Option<Timestamp>,
}

impl Progress {
    fn of(observed: &Observed, memory: &Memory, now: Timestamp) -> Self {
        let by_uid: BTreeMap<&str, (&String, &PodView)> = observed
            .pods
            .iter()
            .map(|(name, pod)| (pod.uid.as_str(), (name, &**pod)))
            .collect();
        let mut progress = Self {
            requested: memory.requested.clone(),
            ended: memory.ended.clone(),
            ..Self::default()
        };
        let mut found = BTreeSet::new();
        for request in &observed.requests {
            let Some(uid) = pod_uid(request).filter(|_| is_of_job(&observed.job, request)) else {
                continue;
            };
            found.insert(uid);
            progress.requested.insert(uid.to_owned(), stop_limit(request));
            let pod = by_uid.get(uid).map(|(_, pod)| *pod);
            progress.add(observed, request, uid, pod, memory, now);
        }
        let deleted = memory.requested.iter();
        for (uid, limit) in deleted.filter(|(uid, _)| !found.contains(uid.as_str())) {
            let pod = by_uid.get(uid.as_str()).filter(|(_, pod)| pod.active());
            let limit = SignedDuration::from_secs(observed.job.spec.pod_deadline()).max(*limit);
            progress.add_deleted(uid, pod.map(|(name, _)| *name), limit, memory, now);
        }
        for outcome in progress.ended.values() {
            match outcome {
                Outcome::Restarted => progress.done += 1,
                Outcome::Failed { pod, why } => {
                    progress.failed.insert(pod.clone(), why.clone());
                }
                Outcome::PodGone => {}
            }
        }
        progress
    }

    fn add(
        &mut self,
        observed: &Observed,
        request: &ContainerRecreateRequest,
        uid: &str,
        pod: Option<&PodView>,
        memory: &Memory,
        now: Timestamp,
    ) {
        let restart = match memory.ended.get(uid) {
            Some(outcome) => Restart::Ended(outcome.clone()),
            None => self.restart(observed, request, uid, pod, memory, now),
        };
        let is_unavailable = match restart {
            Restart::Running | Restart::NotReady => true,
            // What the daemon has begun to stop is stopped until then, or not at all.
            Restart::Ended(_) => {
                let pod = pod.filter(|pod| pod.active());
                let end = pod.and_then(|pod| counts_until(request, pod));
                let end = end.filter(|end| now < *end);
                self.wake_at(end);
                end.is_some()
            }
        };
        if is_unavailable {
            self.unavailable.insert(uid.to_owned());
        }
        match restart {
            Restart::Running => {
                self.running.push(request.spec.pod_name.clone());
                let conditions = request.status.iter().flat_map(|status| &status.conditions);
                let waits = |one: &&Condition| {
                    one.type_ == request::WAITING && one.reason == request::NO_DAEMON_REASON
                };
                let message = conditions.clone().find(waits).map(|one| one.message.clone());
                self.no_daemon = self.no_daemon.take().or(message);
            }
            Restart::NotReady => self.not_ready.push(request.spec.pod_name.clone()),
            // The Pod may be there: it does not show whose it is.
            Restart::Ended(Outcome::PodGone) if is_unreadable(observed) => {}
            Restart::Ended(outcome) => {
                self.ended.insert(uid.to_owned(), outcome);
            }
        }
    }

    /// A Pod whose request was deleted, with its name if it still runs. What the daemon has begun to stop is stopped
    /// within `limit`, which the Pod may show only later.
    fn add_deleted(
        &mut self,
        uid: &str,
        pod: Option<&String>,
        limit: SignedDuration,
        memory: &Memory,
        now: Timestamp,
    ) {
        let Some(pod) = pod.filter(|_| memory.ended.get(uid) != Some(&Outcome::Restarted)) else {
            return;
        };
        if self.may_become_ready(uid, limit, memory, now) {
            self.unavailable.insert(uid.to_owned());
        }
        let failed = || Outcome::Failed {
            pod: pod.clone(),
            why: "its request was deleted".to_owned(),
        };
        self.ended.entry(uid.to_owned()).or_insert_with(failed);
    }

    /// Whether a Pod that is not ready after its restart has more time; it is remembered since when it is not.
    fn may_become_ready(
        &mut self,
        uid: &str,
        limit: SignedDuration,
        memory: &Memory,
        now: Timestamp,
    ) -> bool {
        let known = memory.not_ready_since.get(uid);
        // The API server's clock may have been set back meanwhile.
        let since = known.copied().flatten().map_or(now, |since| since.min(now));
        self.not_ready_since.insert(uid.to_owned(), Some(since));
        let deadline = since.saturating_add(limit).unwrap_or(Timestamp::MAX);
        let has_time = now < deadline;
        self.wake_at(has_time.then_some(deadline));
        has_time
    }

    fn wake_at(&mut self, at: Option<Timestamp>) {
        self.next_deadline = self.next_deadline.into_iter().chain(at).min();
    }

    /// How far the restart of a Pod is.
    fn restart(
        &mut self,
        observed: &Observed,
        request: &ContainerRecreateRequest,
        uid: &str,
        pod: Option<&PodView>,
        memory: &Memory,
        now: Timestamp,
    ) -> Restart {
        let (job, name) = (&*observed.job, &request.spec.pod_name);
        let failed = |why: String| {
            let pod = name.clone();
            Restart::Ended(Outcome::Failed { pod, why })
        };
        match result(request) {
            None => {
                self.not_ready_since.insert(uid.to_owned(), None);
                return Restart::Running;
            }
            Some(Err(_)) if is_pod_gone(request) && has_stopped_container(request) => {
                return failed("the Pod was deleted during its restart".to_owned());
            }
            Some(Err(_)) if is_pod_gone(request) => return Restart::Ended(Outcome::PodGone),
            Some(Err(why)) => return failed(why),
            Some(Ok(())) => {}
        }
        let is_known = memory.not_ready_since.contains_key(uid);
        let mut failed_before = job.status.iter().flat_map(|status| &status.failed_pods);
        if !is_known && failed_before.any(|pod| pod == name) {
            return failed("the Pod was not ready in time after its restart".to_owned());
        }
        if pod.is_some_and(|pod| pod.ready && !shows_stopped_container(request, pod)) {
            return Restart::Ended(Outcome::Restarted);
        }
        if pod.is_some_and(PodView::active) || (is_known && is_unreadable(observed)) {
            let seconds = job.spec.pod_deadline();
            let limit = SignedDuration::from_secs(seconds);
            if self.may_become_ready(uid, limit, memory, now) {
                return Restart::NotReady;
            }
            return failed(format!(
                "the Pod was not ready within {seconds} s after its restart"
            ));
        }
        if is_known {
            // A Pod that the restart broke may be deleted because it is not ready: the next one must not follow it.
            return failed(
                "the Pod was deleted, or no longer selected, before it was ready after its restart"
                    .to_owned(),
            );
        }
        // Another manager may have seen it ready.
        Restart::Ended(Outcome::PodGone)
    }

    fn active(&self) -> usize {
        self.running.len() + self.not_ready.len()
    }
}

fn is_unreadable(observed: &Observed) -> bool {
    matches!(observed.target, Target::Unreadable(_))
}

/// Whether a request has ended because its Pod did.
fn is_pod_gone(request: &ContainerRecreateRequest) -> bool {
    let message = request.status.as_ref().and_then(|status| status.message.as_ref());
    message.is_some_and(|message| message == request::POD_GONE_MESSAGE)
}

/// Whether the daemon has begun to stop a container.
fn has_stopped_container(request: &ContainerRecreateRequest) -> bool {
    let mut states = request
        .status
        .iter()
        .flat_map(|status| &status.container_recreate_states);
    states.any(|state| state.is_killed)
}

/// The result of a request that has ended.
fn result(request: &ContainerRecreateRequest) -> Option<Result<(), String>> {
    let mut status = request.status.clone()?;
    status.completion_time.as_ref()?;
    if status.final_condition().is_none() {
        // A daemon of OpenKruise writes none.
        let labels = request.metadata.labels.as_ref();
        let node = labels.and_then(|labels| labels.get(keys::CRR_NODE_NAME));
        status.set_final_condition(node.map_or("the node", String::as_str));
    }
    let mut conditions = status.conditions.into_iter();
    let failed = conditions.find(|condition| condition.type_ == request::FAILED);
    Some(match failed {
        Some(failed) => Err(failed.message),
        None => Ok(()),
    })
}

/// Everything that a decision is based on.
struct Situation<'a> {
    observed: &'a Observed,
    memory: &'a Memory,
    progress: Progress,
    /// Pods without a request.
    remaining: Vec<(&'a String, &'a PodView)>,
    deadline: Option<Timestamp>,
    now: Timestamp,
    instant: Instant,
}

/// How many Pods may become unavailable.
struct Budget<'a> {
    max_unavailable: usize,
    unavailable: BTreeSet<&'a str>,
}

impl Budget<'_> {
    fn free(&self) -> usize {
        self.max_unavailable.saturating_sub(self.unavailable.len())
    }

    /// Whether the Pod is unavailable anyway.
    fn costs_nothing(&self, pod: &PodView) -> bool {
        self.unavailable.contains(pod.uid.as_str())
    }
}

impl<'a> Situation<'a> {
    fn of(observed: &'a Observed, memory: &'a Memory, now: Timestamp, instant: Instant) -> Self {
        let progress = Progress::of(observed, memory, now);
        Self {
            observed,
            remaining: remaining(observed, &progress.requested),
            deadline: deadline(&observed.job, now),
            memory,
            progress,
            now,
            instant,
        }
    }

    fn job(&self) -> &'a ContainerRecreateJob {
        &self.observed.job
    }

    fn desired(&self) -> usize {
        let progress = &self.progress;
        progress.active() + progress.done + progress.failed.len() + self.remaining.len()
    }

    fn budget(&self) -> Budget<'_> {
        let existing = || self.observed.pods.iter().filter(|(_, pod)| !pod.terminal);
        let is_unavailable = |pod: &PodView| pod.terminating || !pod.ready;
        let mut unavailable: BTreeSet<&str> = existing()
            .filter(|(_, pod)| is_unavailable(pod))
            .map(|(_, pod)| pod.uid.as_str())
            .collect();
        unavailable.extend(self.progress.unavailable.iter().map(String::as_str));
        let others = &self.observed.restarted_by_others;
        let of_job = existing().filter(|(_, pod)| others.contains(&pod.uid));
        unavailable.extend(of_job.map(|(_, pod)| pod.uid.as_str()));
        let max = self.job().spec.max_unavailable.as_ref();
        let max = scaled(max, existing().count(), 1, f64::floor);
        Budget {
            max_unavailable: max.max(1),
            unavailable,
        }
    }

    /// Number of Pods that `partition` keeps.
    fn kept(&self) -> usize {
        let kept = scaled(self.job().spec.partition.as_ref(), self.desired(), 0, f64::ceil);
        kept.min(self.remaining.len())
    }

    /// Why no further Pod is restarted, so that the job fails.
    fn failure(&self) -> Option<(&'static str, String)> {
        let target = self.job().spec.target_ref.as_ref();
        if let (Target::NotFound, Some(target)) = (&self.observed.target, target) {
            let message = format!("{} {} was not found", target.kind, target.name);
            return Some(("TargetNotFound", message));
        }
        let is_over = self.deadline.is_some_and(|deadline| self.now >= deadline);
        if is_over && is_unreadable(self.observed) {
            let message = "the workload could not be read within activeDeadlineSeconds".to_owned();
            return Some(("DeadlineExceeded", message));
        }
        if self.remaining.is_empty() {
            return self.failure_of_pods();
        }
        let rest = || {
            format!(
                "{} of {} were not restarted",
                self.remaining.len(),
                pods_text(self.desired())
            )
        };
        let max = self.job().spec.max_failures.unwrap_or(0);
        let (_, failed) = self.failure_of_pods().unwrap_or_default();
        if self.progress.failed.len() > usize::try_from(max).unwrap_or(0) {
            let message = format!("{}, because maxFailures is {max}; {failed}", rest());
            return Some(("TooManyFailures", message));
        }
        is_over.then(|| {
            let mut message = format!("{} within activeDeadlineSeconds", rest());
            if !failed.is_empty() {
                message = format!("{message}; {failed}");
            }
            ("DeadlineExceeded", message)
        })
    }

    fn failure_of_pods(&self) -> Option<(&'static str, String)> {
        let failed = &self.progress.failed;
        if failed.is_empty() {
            return self.missing_container();
        }
        let causes = failed
            .iter()
            .map(|(name, why)| format!("{name}: {}", truncate(why, MAX_REASON_CHARS)));
        let message = format!(
            "{} of {} failed: {}",
            failed.len(),
            pods_text(self.desired()),
            join_first(MAX_NAMES_IN_MESSAGE, causes.collect::<Vec<_>>().iter())
        );
        Some(("PodsFailed", message))
    }

    /// A job whose containers exist in no Pod is a mistake.
    fn missing_container(&self) -> Option<(&'static str, String)> {
        let job = self.job();
        let started = || {
            let pods = self.observed.pods.iter();
            pods.filter(|(_, pod)| existed(job, pod) && !pod.containers.is_empty())
        };
        let is_named =
            |container: &ContainerView| job.spec.containers.iter().any(|one| one.name == container.name);
        let has_named = |pod: &PodView| pod.containers.iter().any(is_named);
        if self.desired() > 0 || started().count() == 0 || started().any(|(_, pod)| has_named(pod)) {
            return None;
        }
        let message = format!(
            "no container of {} is named {}",
            pods_text(started().count()),
            self.containers_text()
        );
        Some(("ContainerNotFound", message))
    }

    /// Refusals of Pods that still need a request.
    fn refused(&self) -> BTreeMap<String, Refusal> {
        let refused = |pod: &PodView| self.memory.refused.get_key_value(&pod.uid);
        let refused = self.remaining.iter().filter_map(|(_, pod)| refused(pod));
        refused
            .map(|(uid, refusal)| (uid.clone(), refusal.clone()))
            .collect()
    }

    /// The refusal of all requests, if one is still needed.
    fn all_refused(&self) -> Option<&'a Refusal> {
        let refusal = self.memory.all_refused.as_ref();
        refusal.filter(|_| !self.remaining.is_empty())
    }

    fn next_retry(&self) -> Option<Timestamp> {
        let refusals = self.memory.refused.values().chain(&self.memory.all_refused);
        let retries = refusals.map(|refusal| refusal.retry_at);
        let next = retries.filter(|at| self.instant < *at).min()?;
        let left = next.saturating_duration_since(self.instant);
        Some(self.now.saturating_add(left).unwrap_or(Timestamp::MAX))
    }

    fn may_try(&self, refusal: Option<&Refusal>) -> bool {
        refusal.is_none_or(|refusal| self.instant >= refusal.retry_at)
    }

    /// Number of Pods that are not tried now.
    fn current_refusals(&self) -> usize {
        let refusals = self.memory.refused.values();
        refusals.filter(|one| !self.may_try(Some(one))).count()
    }

    /// Whether a Pod's containers may be restarted now, so that the order of the Pods matters.
    fn may_choose(&self, budget: &Budget<'_>) -> bool {
        let is_stopped = self.job().spec.paused || self.observed.target != Target::Known;
        let admits_any = || {
            let mut remaining = self.remaining.iter();
            budget.free() > 0 || remaining.any(|(_, pod)| budget.costs_nothing(pod))
        };
        !is_stopped
            && self.may_try(self.all_refused())
            && self.current_refusals() < MAX_CREATIONS
            && self.kept() < self.remaining.len()
            && admits_any()
            && self.failure().is_none()
    }

    /// The Pods without a request, in the order of the job.
    fn in_order(&self) -> Vec<(&'a String, &'a PodView)> {
        let mut pods = self.remaining.clone();
        pods.sort_by_cached_key(|(name, _)| (Reverse(number_at_end(name)), (*name).clone()));
        if let Some(priority) = &self.observed.selectors.priority {
            priority.sort(&mut pods, |(_, pod)| &pod.labels);
        }
        pods
    }

    /// The Pods whose containers are restarted now.
    fn choose(&self, budget: &Budget<'_>) -> Vec<(&'a String, &'a PodView)> {
        if !self.may_choose(budget) {
            return Vec::new();
        }
        let mut free = budget.free();
        let allowed = self.remaining.len() - self.kept();
        let mut allowed: Vec<_> = self.in_order().into_iter().take(allowed).collect();
        // Many of them may be refused: each comes round.
        allowed.sort_by_key(|(_, pod)| Some(self.memory.refused.get(&pod.uid)?.retry_at));
        let allowed = allowed.into_iter();
        let allowed = allowed.filter(|(_, pod)| self.may_try(self.memory.refused.get(&pod.uid)));
        let chosen = allowed.filter(|(_, pod)| {
            let costs_nothing = budget.costs_nothing(pod);
            let fits = costs_nothing || free > 0;
            if fits && !costs_nothing {
                free -= 1;
            }
            fits
        });
        chosen.take(MAX_CREATIONS).collect()
    }

    /// When the job may end, if it may not yet; the API server's clock may have been set back since its creation.
    fn settled_at(&self) -> Option<Timestamp> {
        let created = created(self.job())?;
        let is_current = created.duration_since(self.now) <= MAX_CLOCK_CORRECTION;
        let settled = created.saturating_add(WATCH_DELAY).ok();
        settled.filter(|at| is_current && self.now < *at)
    }

    /// Type, reason and message of the condition.
    fn condition(
        &self,
        chosen: &[(&String, &PodView)],
        budget: &Budget<'_>,
    ) -> Option<(&'static str, &'static str, String)> {
        let is_idle = self.progress.active() == 0 && chosen.is_empty() && self.settled_at().is_none();
        if is_idle && let Some((reason, message)) = self.failure() {
            return Some((FAILED, reason, message));
        }
        let is_done = self.remaining.is_empty() && self.observed.unseen.is_empty();
        if is_idle && self.observed.target == Target::Known && is_done {
            return Some(self.completion());
        }
        let (reason, message) = self.wait(chosen, budget)?;
        Some((WAITING, reason, message))
    }

    fn completion(&self) -> (&'static str, &'static str, String) {
        let containers = self.containers_text();
        match self.desired() {
            0 => {
                let message =
                    format!("no selected Pod has run {containers} since before the job was created");
                (COMPLETE, "NoPods", message)
            }
            number => {
                let message = format!("restarted {containers} in {}", pods_text(number));
                (COMPLETE, "PodsRestarted", message)
            }
        }
    }

    /// Reason and message of what the job waits for.
    fn wait(&self, chosen: &[(&String, &PodView)], budget: &Budget<'_>) -> Option<(&'static str, String)> {
        if let Target::Unreadable(why) = &self.observed.target {
            return Some(("TargetUnreadable", truncate(why, MAX_REASON_CHARS).into_owned()));
        }
        if let (Target::Terminating, Some(target)) = (&self.observed.target, &self.job().spec.target_ref) {
            let message = format!("{} {} is being deleted", target.kind, target.name);
            return Some(("TargetTerminating", message));
        }
        if !self.observed.unseen.is_empty() {
            let names = join_first(MAX_NAMES_IN_MESSAGE, self.observed.unseen.iter());
            let message = format!("the watch of Pods is delayed, and has not shown: {names}");
            return Some(("WatchDelayed", message));
        }
        let (remaining, desired) = (self.remaining.len(), pods_text(self.desired()));
        if self.job().spec.paused && remaining > 0 {
            let message = format!("spec.paused is true; {remaining} of {desired} have not been restarted");
            return Some(("Paused", message));
        }
        if let Some(message) = &self.progress.no_daemon {
            return Some((request::NO_DAEMON_REASON, message.clone()));
        }
        let is_retry =
            |pod: &PodView| self.all_refused().is_some() || self.memory.refused.contains_key(&pod.uid);
        if !self.progress.running.is_empty() || chosen.iter().any(|(_, pod)| !is_retry(pod)) {
            return None;
        }
        if let Some(message) = self.refusal(!chosen.is_empty()) {
            return Some(("RequestRefused", message));
        }
        if !self.progress.not_ready.is_empty() {
            let names = join_first(MAX_NAMES_IN_MESSAGE, self.progress.not_ready.iter());
            return Some(("PodsNotReady", format!("restarted, and not ready again: {names}")));
        }
        let kept = self.kept();
        if kept < remaining {
            let names = self.observed.pods.iter();
            let names = names.filter(|(_, pod)| budget.unavailable.contains(pod.uid.as_str()));
            let names: Vec<_> = names.map(|(name, _)| name).collect();
            let message = format!(
                "maxUnavailable is {}, and unavailable are: {}",
                budget.max_unavailable,
                join_first(MAX_NAMES_IN_MESSAGE, names.iter())
            );
            return Some(("MaxUnavailable", message));
        }
        (kept > 0).then(|| ("Partition", format!("spec.partition keeps {kept} of {desired}")))
    }

    /// Why requests cannot be created; if they are tried again, why they could not before, until they can.
    fn refusal(&self, is_retrying: bool) -> Option<String> {
        let is_current = |refusal: &&Refusal| is_retrying || self.instant < refusal.retry_at;
        if let Some(refusal) = self.all_refused().filter(is_current) {
            let why = truncate(&refusal.message, MAX_REASON_CHARS);
            return Some(format!("requests cannot be created; {why}"));
        }
        let mut refused = self.remaining.iter().filter_map(|(name, pod)| {
            let refusal = self.memory.refused.get(&pod.uid).filter(is_current)?;
            Some(format!(
                "{name}: {}",
                truncate(&refusal.message, MAX_REASON_CHARS)
            ))
        });
        let first = refused.next()?;
        let pods = pods_text(refused.count() + 1);
        Some(format!("requests for {pods} cannot be created; {first}"))
    }

    fn containers_text(&self) -> String {
        let containers = self.job().spec.containers.iter();
        join_first(MAX_NAMES_IN_MESSAGE, containers.map(|container| &container.name))
    }

    fn status(
        &self,
        previous: &ContainerRecreateJobStatus,
        started: Timestamp,
        condition: Option<(&'static str, &'static str, String)>,
    ) -> ContainerRecreateJobStatus {
        let job = self.job();
        let ended = condition.as_ref().is_some_and(|(type_, ..)| *type_ != WAITING);
        let condition = condition.map(|(type_, reason, message)| Condition {
            type_: type_.to_owned(),
            status: "True".to_owned(),
            reason: reason.to_owned(),
            message,
            last_transition_time: Time(self.now),
            observed_generation: job.metadata.generation,
        });
        let failed_pods = self.progress.failed.keys().take(MAX_FAILED_PODS);
        ContainerRecreateJobStatus {
            observed_generation: job.metadata.generation.unwrap_or_default(),
            start_time: Some(Time(started)),
            completion_time: ended.then_some(Time(self.now)),
            desired: to_count(self.desired()),
            active: to_count(self.progress.active()),
            restarted: to_count(self.progress.done),
            failed: to_count(self.progress.failed.len()),
            failed_pods: failed_pods.cloned().collect(),
            conditions: merge_conditions(&previous.conditions, condition.into_iter().collect()),
        }
    }
}

/// The Pods whose containers have to be restarted and that have no request.
fn remaining<'a>(
    observed: &'a Observed,
    requested: &BTreeMap<String, SignedDuration>,
) -> Vec<(&'a String, &'a PodView)> {
    let pods = observed.pods.iter().map(|(name, pod)| (name, &**pod));
    pods.filter(|(_, pod)| is_due(&observed.job, pod, requested, &observed.restarted_since))
        .collect()
}

/// Whether the job has to restart containers of the Pod, and has not requested it.
pub fn is_due(
    job: &ContainerRecreateJob,
    pod: &PodView,
    requested: &BTreeMap<String, SignedDuration>,
    restarted: &RestartedContainers,
) -> bool {
    let mut containers = containers_to_restart(job, pod, restarted);
    existed(job, pod) && !requested.contains_key(&pod.uid) && containers.next().is_some()
}

/// Whether the Pod runs, and was created before the job.
fn existed(job: &ContainerRecreateJob, pod: &PodView) -> bool {
    pod.active() && pod.node.is_some() && pod.created <= created(job)
}

fn created(job: &ContainerRecreateJob) -> Option<Timestamp> {
    job.metadata.creation_timestamp.as_ref().map(|time| time.0)
}

/// Names of the job's containers that run in the Pod, and may have been started before the job was created.
fn containers_to_restart<'a>(
    job: &'a ContainerRecreateJob,
    pod: &'a PodView,
    restarted: &'a RestartedContainers,
) -> impl Iterator<Item = &'a String> {
    let restarted = restarted.get(&pod.uid);
    let names = job.spec.containers.iter().map(|container| &container.name);
    names.filter(move |name| {
        let mut containers = pod.containers.iter();
        containers.any(|container| container.name == **name && container.running && !container.id.is_empty())
            && !restarted.is_some_and(|restarted| restarted.contains(*name))
    })
}

/// Names of the containers that a request has restarted since the job was created: both times are the API server's, and
/// the daemon stopped the earlier container after that of the request. Times have whole seconds. Like a request, a job
/// with `forceRecreate` restarts them all the same.
pub fn restarted_since<'a>(
    job: &ContainerRecreateJob,
    request: &'a ContainerRecreateRequest,
) -> impl Iterator<Item = &'a String> + use<'a> {
    let requested = request.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let strategy = job.spec.strategy.as_ref();
    let counts = requested > created(job) && !strategy.is_some_and(|strategy| strategy.force_recreate);
    let restarted = request.stopped_containers().map(|(state, _)| state);
    let restarted = restarted
        .filter(move |state| counts && state.phase == request::ContainerRecreateRequestPhase::Succeeded);
    restarted.map(|state| &state.name)
}

/// The ordinal of a StatefulSet's Pod.
fn number_at_end(name: &str) -> u64 {
    let letters = name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    name.get(letters..)
        .and_then(|digits| digits.parse().ok())
        .unwrap_or_default()
}

fn build_request(
    job: &ContainerRecreateJob,
    name: &str,
    pod: &PodView,
    restarted: &RestartedContainers,
) -> ContainerRecreateRequest {
    let containers = containers_to_restart(job, pod, restarted).map(|name| RequestedContainer {
        name: name.clone(),
        ..RequestedContainer::default()
    });
    let spec = ContainerRecreateRequestSpec {
        pod_name: name.to_owned(),
        containers: containers.collect(),
        strategy: job.spec.strategy.clone(),
        active_deadline_seconds: Some(job.spec.pod_deadline()),
        // It is deleted with the job.
        ttl_seconds_after_finished: None,
    };
    ContainerRecreateRequest {
        metadata: ObjectMeta {
            name: Some(request_name(job, name, &pod.uid)),
            namespace: job.metadata.namespace.clone(),
            owner_references: Some(vec![job.controller_reference()]),
            // Admission refuses the request if another Pod has the name now.
            labels: Some(BTreeMap::from([(keys::CRR_POD_UID.to_owned(), pod.uid.clone())])),
            ..ObjectMeta::default()
        },
        spec,
        status: None,
    }
}

/// The name of the request of a job for a Pod: the same one at each attempt.
fn request_name(job: &ContainerRecreateJob, pod: &str, pod_uid: &str) -> String {
    let uid = job.metadata.uid.as_deref().unwrap_or_default();
    let job = job.metadata.name.as_deref().unwrap_or_default();
    let cut = |name: &str| {
        let name: String = name.chars().take(MAX_NAME_CHARS).collect();
        name.trim_end_matches(['-', '.']).to_owned()
    };
    let hash = deep_hash(&format!("{uid}/{pod}/{pod_uid}"));
    format!("{}-{}-{hash:08x}", cut(job), cut(pod))
}

/// UID of the request's Pod, as admission has recorded it.
pub fn pod_uid(request: &ContainerRecreateRequest) -> Option<&str> {
    let labels = request.metadata.labels.as_ref()?;
    labels.get(keys::CRR_POD_UID).map(String::as_str)
}

/// Whether the job has created the request: others may name it as their controller.
pub fn is_of_job(job: &ContainerRecreateJob, request: &ContainerRecreateRequest) -> bool {
    let name = pod_uid(request).map(|uid| request_name(job, &request.spec.pod_name, uid));
    name.is_some() && request.metadata.name == name
}

/// A number of Pods, or a percentage of `total`.
fn scaled(value: Option<&IntOrString>, total: usize, default: usize, round: fn(f64) -> f64) -> usize {
    let total = i64::try_from(total).unwrap_or(i64::MAX);
    let scaled = |value| usize::try_from(scaled_value(value, total, round)).unwrap_or(0);
    value.map_or(default, scaled)
}

fn to_count(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

fn pods_text(number: usize) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} Pod{plural}")
}

#[cfg(test)]
mod tests;
