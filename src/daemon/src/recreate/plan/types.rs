//! What the plan is told and what it answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::LifecycleHandler;

use super::steps::{ContainerStep, WaitReason};
use crate::pods::{NodePod, Port};
use kruise_api::container_recreate_request::ContainerRecreateRequestStatus as Status;

/// The three clocks of one moment. Nothing is ever compared across two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clocks {
    /// The API server's time: deadlines and grace periods of objects count on it.
    pub api: Timestamp,
    /// The node's wall clock: the runtime's and kubelet's time stamps count on it. It may be wrong.
    pub wall: Timestamp,
    /// Time since the daemon started; never steps.
    pub mono: Duration,
}

/// A ContainerRecreateRequest, reduced to what is decided on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecreateRequest {
    /// Its UID: who it is.
    pub uid: String,
    /// Its namespace, which is also its Pod's.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The version that `status` was read at; a write on top of another one is a conflict.
    pub resource_version: String,
    /// When it was created.
    pub created_at: Timestamp,
    /// Whether its deletion has been asked for.
    pub terminating: bool,
    /// The Pod's name.
    pub pod_name: String,
    /// The Pod's UID as admission recorded it; none where admission was down.
    pub pod_uid: Option<String>,
    /// What to recreate, in order.
    pub containers: Vec<RequestedContainer>,
    /// Whether a container's failure leaves the others alone.
    pub ignore_failures: bool,
    /// One container after the other.
    pub ordered: bool,
    /// Stop containers even where they were replaced since the request was made.
    pub force: bool,
    /// Seconds that a container gets to stop; the Pod's own where none.
    pub grace_seconds: Option<i64>,
    /// Seconds that the Pod is not ready before anything is stopped.
    pub unready_grace_seconds: Option<i64>,
    /// Seconds that a new container must have been running.
    pub min_started_seconds: i64,
    /// Seconds from its creation to its end, done or not.
    pub deadline_seconds: Option<i64>,
    /// Its status.
    pub status: Status,
}

/// One container of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestedContainer {
    /// Its name.
    pub name: String,
    /// ID (with scheme) that ran when the request was made; none where admission was down.
    pub recorded_id: Option<String>,
}

/// What is known about the Pod.
#[derive(Clone, Debug, PartialEq)]
pub enum PodObservation {
    /// It is here.
    Present(Arc<NodePod>),
    /// The API server has no such Pod on this node.
    NotFound,
    /// Not known for now, and why.
    Unknown(String),
}

/// What is known about the Pod's containers.
#[derive(Clone, Debug, PartialEq)]
pub enum RuntimeObservation {
    /// The newest container of each name.
    Listed {
        /// The scheme of container IDs.
        scheme: String,
        /// The containers.
        containers: Vec<ObservedContainer>,
    },
    /// Not known for now, and why.
    Unknown(String),
    /// It cannot be known, and why.
    Unavailable(String),
}

/// The newest container of one name, as the runtime says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedContainer {
    /// ID without scheme.
    pub id: String,
    /// Its name.
    pub name: String,
    /// What it is doing.
    pub state: RunState,
    /// When it was started, by the node's clock.
    pub started_at: Option<Timestamp>,
    /// When the daemon first saw it running.
    pub running_since: Option<Duration>,
    /// Whether the daemon is restarting it for its environment.
    pub restarting: bool,
}

/// What a container is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RunState {
    /// Made, not started.
    Created,
    /// Its process runs, or the runtime cannot say that it does not.
    #[default]
    Running,
    /// Its process has ended.
    Exited,
}

/// One container of one request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerKey {
    /// UID of the request.
    pub request_uid: String,
    /// Name of the container.
    pub container: String,
}

/// How far the daemon is with stopping one container; forgotten when it restarts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopAttempt {
    /// Name of the request.
    pub request_name: String,
    /// ID (without scheme) of the container to be stopped.
    pub target: String,
    /// When its preStop hook or its stop was begun first; none while it waits for a slot.
    pub begun_at: Option<Duration>,
    /// Whether its preStop hook is over, if it has one; where the runtime went away meanwhile it runs again.
    pub hook_done: bool,
    /// How much of the grace period is used up: by the hook, and by stops that the runtime carried out without success.
    pub grace_spent: Duration,
    /// How far it is.
    pub stage: StopStage,
    /// Whether it is in progress right now. Where it is not, the stage says how it ended.
    pub in_progress: bool,
}

/// A step of stopping a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopStage {
    /// Waits for a slot among the stops of this node.
    Queued,
    /// The preStop hook runs.
    Hook,
    /// The runtime has been asked to stop it.
    Stopping,
    /// The runtime says that it is stopped, since then.
    Stopped(Duration),
    /// The runtime could not; it is asked again.
    Retry {
        /// When.
        retry_at: Duration,
        /// What it said.
        error: String,
    },
    /// The runtime will not.
    Refused(String),
}

/// What the daemon remembers about a Pod between two looks at it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecreateState {
    /// Stops begun.
    pub attempts: BTreeMap<ContainerKey, StopAttempt>,
    /// IDs (with scheme) that the API server was told are to be replaced; it may have dropped them.
    pub targets: BTreeMap<ContainerKey, String>,
    /// Containers that are done, though the API server may not know it yet.
    pub results: BTreeMap<ContainerKey, ContainerResult>,
    /// When a request's condition `PreRecreateGrace` was first seen true, by request UID.
    pub unready_observed_at: BTreeMap<String, Duration>,
}

/// The end of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerResult {
    /// Succeeded, or failed with this message.
    pub failed: Option<String>,
}

/// Everything that is known about one Pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// The requests for the Pod that are not over.
    pub requests: Vec<Arc<RecreateRequest>>,
    /// The Pod.
    pub pod: PodObservation,
    /// Its containers.
    pub runtime: RuntimeObservation,
    /// What we did so far.
    pub state: RecreateState,
}

/// What to do about one Pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Hooks and stops in progress to break off.
    pub cancel: Vec<ContainerKey>,
    /// Hooks and stops to begin now.
    pub stops: Vec<StopAction>,
    /// Statuses to write.
    pub writes: Vec<StatusWrite>,
    /// Containers found done in this look.
    pub results: Vec<(ContainerKey, ContainerResult)>,
    /// When to look again at the latest, and why.
    pub requeue: Option<Requeue>,
    /// What each request is at.
    pub progress: Vec<RequestProgress>,
}

/// One act of stopping a container.
#[derive(Clone, Debug, PartialEq)]
pub struct StopAction {
    /// Which container of which request.
    pub key: ContainerKey,
    /// Name of the request, for the event.
    pub request_name: String,
    /// ID (without scheme) of the container.
    pub target: String,
    /// Whether this is the first act on the container, which is when an event is due.
    pub first_attempt: bool,
    /// The request's deadline, by the daemon's own count: what has no slot by then is not begun.
    pub deadline: Option<Duration>,
    /// What to do.
    pub params: StopParams,
}

/// How a container is stopped: its preStop hook where it is still to be run, then TERM, then KILL.
#[derive(Clone, Debug, PartialEq)]
pub struct StopParams {
    /// The hook.
    pub hook: Option<PreStopHook>,
    /// What is left of the grace period, for hook and stop together.
    pub grace_period: Duration,
}

/// The least that a container gets between TERM and KILL, as kubelet has it.
pub const MIN_GRACE_PERIOD: Duration = Duration::from_secs(2);

impl StopParams {
    /// The time between TERM and KILL after a hook that has taken `hook`; of that only whole seconds count.
    #[must_use]
    pub fn termination_grace(&self, hook_time: Duration) -> Duration {
        grace_left(self.grace_period, hook_time).max(MIN_GRACE_PERIOD)
    }
}

/// What is left of a grace period; of the time spent only whole seconds count, as kubelet has it.
pub fn grace_left(grace: Duration, spent: Duration) -> Duration {
    grace.saturating_sub(Duration::from_secs(spent.as_secs()))
}

/// A preStop hook, from the Pod's own spec.
#[derive(Clone, Debug, PartialEq)]
pub struct PreStopHook {
    /// What to run.
    pub handler: LifecycleHandler,
    /// Ports of the container, for a hook that names one.
    pub ports: Vec<Port>,
    /// The Pod's address, for a hook that names no host.
    pub host: Option<String>,
}

/// A status to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusWrite {
    /// UID of the request.
    pub request_uid: String,
    /// The whole status that the daemon wants, but for its conditions: those follow from the rest when it is written.
    pub status: Status,
    /// What kind of thing the message says that the request waits for, if it waits.
    pub waiting_reason: Option<&'static str>,
    /// How soon.
    pub urgency: Urgency,
}

/// How soon a status must be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// At once: somebody waits for it.
    Now,
    /// Within a tenth of a second, together with what changes meanwhile.
    Soon,
    /// Only if it stays like this for some seconds.
    IfUnchanged,
}

/// When to look again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requeue {
    /// The moment, by the daemon's own count.
    pub at: Duration,
    /// What is expected then.
    pub reason: WaitReason,
}

/// What one request is at, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestProgress {
    /// UID of the request.
    pub request_uid: String,
    /// Why the request as a whole waits.
    pub wait_reason: Option<WaitReason>,
    /// Where each container is.
    pub containers: Vec<(String, ContainerStep)>,
}
