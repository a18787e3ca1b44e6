//! Input and output of the plan.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::steps::{ContainerStep, WaitReason};
use crate::pods::{MIN_GRACE_PERIOD, NodePod};
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestPhase as Phase, ContainerRecreateRequestStatus as Status,
    ContainerRecreateRequestStrategy as Strategy,
};
use kruise_cluster::Key;

/// The same moment on three clocks. Times of different clocks are never compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clocks {
    /// The API server's time, for deadlines and grace periods of objects.
    pub api: Timestamp,
    /// The node's wall clock, for timestamps of the runtime and kubelet. It may be wrong.
    pub wall: Timestamp,
    /// Time since the daemon started; monotonic.
    pub mono: Duration,
}

/// A ContainerRecreateRequest, reduced to the input of decisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecreateRequest {
    /// UID of the request.
    pub uid: String,
    /// Namespace of the request and its Pod.
    pub namespace: String,
    /// Name of the request.
    pub name: String,
    /// The version that `status` was read at; a write on top of a different one is a conflict.
    pub resource_version: String,
    /// When it was created.
    pub created_at: Timestamp,
    /// Whether it has a deletionTimestamp.
    pub terminating: bool,
    /// The Pod's name.
    pub pod_name: String,
    /// The Pod's UID as recorded by admission; none if admission was down.
    pub pod_uid: Option<String>,
    /// Containers to recreate, in order.
    pub containers: Vec<RequestedContainer>,
    /// How the containers are recreated.
    pub strategy: Strategy,
    /// Seconds from its creation to its end, done or not.
    pub deadline_seconds: Option<i64>,
    /// Status of the request.
    pub status: Status,
}

impl RecreateRequest {
    /// The key of its Pod.
    #[must_use]
    pub fn pod_key(&self) -> Key {
        Key::namespaced(&self.namespace, &self.pod_name)
    }

    /// Whether it has ended, or is being deleted.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        let status = &self.status;
        self.terminating || status.completion_time.is_some() || status.phase == Phase::Completed
    }

    /// The key of one of its containers.
    #[must_use]
    pub fn container_key(&self, name: &str) -> ContainerKey {
        ContainerKey {
            request_uid: self.uid.clone(),
            container: name.to_owned(),
        }
    }
}

/// One container of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestedContainer {
    /// Its name.
    pub name: String,
    /// ID (with scheme) that ran when the request was created; none if admission was down.
    pub recorded_id: Option<String>,
}

/// The observation of the Pod.
#[derive(Clone, Debug, PartialEq)]
pub enum PodObservation {
    /// The Pod exists on this node.
    Present(Arc<NodePod>),
    /// The API server has no such Pod on this node.
    NotFound,
    /// The Pod could not be read for now, with the reason.
    Unknown(String),
}

/// The observation of the Pod's containers.
#[derive(Clone, Debug, PartialEq)]
pub enum RuntimeObservation {
    /// The newest container of each name.
    Listed {
        /// Scheme of the container IDs.
        scheme: String,
        /// Newest containers by name.
        containers: Vec<ObservedContainer>,
    },
    /// The containers could not be read for now, with the reason.
    Unknown(String),
    /// The containers can never be read, with the reason.
    Unavailable(String),
}

/// The newest container of one name in the runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedContainer {
    /// ID without scheme.
    pub id: String,
    /// Its name.
    pub name: String,
    /// State in the runtime.
    pub state: RunState,
    /// When the daemon first saw it running.
    pub running_since: Option<Duration>,
    /// Whether the daemon is restarting it for its environment.
    pub restarting: bool,
    /// Whether its preStop hook has ended in such a restart, which then failed.
    pub hook_done: bool,
}

/// State of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RunState {
    /// Created, not started.
    Created,
    /// Its process runs, or the runtime cannot exclude that.
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

/// The progress of stopping one container; lost when the daemon restarts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopAttempt {
    /// Name of the request.
    pub request_name: String,
    /// When its preStop hook or its stop first started; none while it waits for a slot.
    pub started_at: Option<Duration>,
    /// Whether its preStop hook, if any, has ended; it runs again if the runtime disconnected during it.
    pub hook_done: bool,
    /// Used part of the grace period: by the hook, and by stops that the runtime tried without success.
    pub grace_spent: Duration,
    /// How often the stop has failed.
    pub failures: u32,
    /// Stage of the stop.
    pub stage: StopStage,
    /// Whether it is running right now. If not, the stage is its result.
    pub in_progress: bool,
}

/// A step of stopping a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopStage {
    /// Waits for a stop slot of this node.
    Queued,
    /// The preStop hook runs.
    Hook,
    /// The runtime was called to stop it.
    Stopping,
    /// The runtime reported it as stopped, at this time.
    Stopped(Duration),
    /// The runtime failed to stop it; the stop is retried.
    Retry {
        /// Time of the retry.
        retry_at: Duration,
        /// Error of the runtime.
        error: String,
    },
    /// The runtime permanently refuses to stop it.
    Refused(String),
}

/// The daemon's state of a Pod between two reconciles.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecreateState {
    /// Started stops.
    pub attempts: BTreeMap<ContainerKey, StopAttempt>,
    /// Target IDs (with scheme) that were written to the API server; it may have dropped them.
    pub targets: BTreeMap<ContainerKey, String>,
    /// When a request's condition `PreRecreateGrace` was first observed as true, by request UID.
    pub unready_observed_at: BTreeMap<String, Duration>,
}

impl RecreateState {
    /// The stop of a container for a request.
    #[must_use]
    pub fn attempt(&self, request: &RecreateRequest, container: &str) -> Option<&StopAttempt> {
        self.attempts.get(&request.container_key(container))
    }

    /// Whether a stop was started for the request with that UID.
    #[must_use]
    pub fn has_attempt(&self, uid: &str) -> bool {
        self.attempts.keys().any(|key| key.request_uid == uid)
    }
}

/// Everything that is observed about one Pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// Requests for the Pod that are not completed, or whose stops still run.
    pub requests: Vec<Arc<RecreateRequest>>,
    /// The Pod.
    pub pod: PodObservation,
    /// The Pod's containers.
    pub runtime: RuntimeObservation,
    /// The daemon's own state of the Pod.
    pub state: RecreateState,
}

impl Observed {
    /// The Pod, unless another one than the request's has its name now.
    #[must_use]
    pub fn pod_of(&self, request: &RecreateRequest) -> Option<&NodePod> {
        let PodObservation::Present(pod) = &self.pod else {
            return None;
        };
        let intended = request.pod_uid.as_ref();
        intended.is_none_or(|uid| *uid == pod.uid).then_some(&**pod)
    }

    /// Whether the Pod of the request is deleted or terminating.
    #[must_use]
    pub fn is_pod_deleted(&self, request: &RecreateRequest) -> bool {
        let is_known = !matches!(self.pod, PodObservation::Unknown(_));
        is_known && self.pod_of(request).is_none_or(|pod| pod.terminating)
    }
}

/// What to do about one Pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Hooks and stops in progress to cancel.
    pub cancel: Vec<ContainerKey>,
    /// Hooks and stops to start now.
    pub stops: Vec<StopAction>,
    /// Statuses to write.
    pub writes: Vec<StatusWrite>,
    /// When to requeue at the latest, as monotonic time.
    pub requeue: Option<Duration>,
    /// Progress of the requests, by UID.
    pub progress: BTreeMap<String, RequestProgress>,
}

/// The stop of one container: its preStop hook if it has not run yet, then TERM, then KILL.
#[derive(Clone, Debug, PartialEq)]
pub struct StopAction {
    /// The container and its request.
    pub key: ContainerKey,
    /// Name of the request, for the event.
    pub request_name: String,
    /// ID (without scheme) of the container.
    pub target: String,
    /// Whether this is the first action on the container, which publishes an event.
    pub first_attempt: bool,
    /// The request's deadline, as monotonic time: a stop without a slot by then is not started.
    pub deadline: Option<Duration>,
    /// Whether the container's preStop hook runs before TERM.
    pub run_hook: bool,
    /// The rest of the grace period, for hook and stop together.
    pub grace_period: Duration,
}

impl StopAction {
    /// The time between TERM and KILL after a hook that took `hook_time`; only its whole seconds count.
    #[must_use]
    pub fn termination_grace(&self, hook_time: Duration) -> Duration {
        grace_left(self.grace_period, hook_time).max(MIN_GRACE_PERIOD)
    }
}

/// The rest of a grace period; only whole seconds of the spent time count, as in kubelet.
pub fn grace_left(grace: Duration, spent: Duration) -> Duration {
    grace.saturating_sub(Duration::from_secs(spent.as_secs()))
}

/// A status to write.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusWrite {
    /// The request, in the version that the status was decided on.
    pub request: Arc<RecreateRequest>,
    /// The complete desired status without its conditions, which are derived from it when it is written.
    pub status: Status,
    /// The reason of condition `Waiting`, if the request waits.
    pub waiting_reason: Option<&'static str>,
    /// When to write it.
    pub urgency: Urgency,
}

/// How soon a status must be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// At once: an action or a client waits for it.
    Now,
    /// Within a tenth of a second, together with other changes.
    Soon,
    /// Only if it stays the same for some seconds.
    IfUnchanged,
}

impl Urgency {
    /// How long the write waits for other changes.
    #[must_use]
    pub fn delay(self) -> Duration {
        match self {
            Self::Now => Duration::ZERO,
            Self::Soon => Duration::from_millis(100),
            Self::IfUnchanged => Duration::from_secs(3),
        }
    }
}

/// The progress of one request, for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestProgress {
    /// Why the request as a whole waits.
    pub wait_reason: Option<WaitReason>,
    /// The step of each container.
    pub containers: Vec<(String, ContainerStep)>,
}
