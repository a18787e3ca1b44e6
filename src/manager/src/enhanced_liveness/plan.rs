//! Which containers whose liveness probe failed are restarted now, and which wait.
//!
//! A restart takes a Pod out of service, so a workload has a budget of unavailable Pods:
//!
//! * A Pod that is available is restarted only while fewer Pods than the budget are unavailable.
//! * A Pod that is not ready anyway costs the workload nothing; but no more Pods than the budget are restarted at once,
//!   so that a dependency that is down for all of them is not met by the restart of all.
//!
//! Pauses between the restarts of one container are kubelet's: it starts it after its CrashLoopBackOff.

use jiff::Timestamp;

use crate::restarts::is_finished;
use crate::view::PodView;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::keys;
use kruise_cluster::Key;

/// Seconds after its end when a request is deleted. A container that a request could not restart gets another one then,
/// and a Pod that has not become ready until then no longer keeps others from their restart.
pub const REQUEST_TTL_SECONDS: i32 = 300;
/// Restarts that one reconcile requests, one after the other; the next one follows at once. Other workloads need the same
/// workers.
pub const MAX_RESTARTS: usize = 64;
/// The longest pause of kubelet before it starts a container again, and a minute for all else, in seconds.
const RESTART_SECONDS: i64 = 300 + 60;
/// The longest grace period, in seconds: a day.
const MAX_GRACE_SECONDS: i64 = 86_400;

/// The limits of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Desired number of Pods.
    pub replicas: i64,
    /// How many of them may be unavailable, at least one: otherwise a container that hangs would do so for ever.
    pub max_unavailable: i64,
}

/// The request for a Pod that decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastRequest {
    /// It has not replaced its container.
    InProgress,
    /// It has, or it has ended; and it is not deleted yet.
    Ended,
}

/// A failed liveness probe, as a daemon reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Name of the container.
    pub container: String,
    /// ID of the container that failed, `RUNTIME://ID`.
    pub container_id: String,
    /// Since when the probe fails.
    pub since: Option<Timestamp>,
}

/// A Pod of a workload; it has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadPod {
    /// Namespace and name.
    pub key: Key,
    /// Whether it is ready and not being deleted.
    pub available: bool,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// The request for it, if any; one in progress counts.
    pub request: Option<LastRequest>,
    /// Whether a liveness probe of a container that runs fails.
    pub failing: bool,
    /// The first failure that has had no request yet.
    pub failure: Option<Failure>,
}

impl WorkloadPod {
    /// Whether a container of it is being restarted, or was and the Pod is not ready since.
    fn is_restarting(&self) -> bool {
        match self.request {
            Some(LastRequest::InProgress) => true,
            Some(LastRequest::Ended) => !self.available && !self.deleting && !self.failing,
            None => false,
        }
    }

    fn is_in_service(&self) -> bool {
        self.available && self.request != Some(LastRequest::InProgress)
    }

    /// Its failure, if it may be restarted.
    fn candidate(&self) -> Option<&Failure> {
        let may_restart = !self.deleting && self.request != Some(LastRequest::InProgress);
        self.failure.as_ref().filter(|_| may_restart)
    }
}

/// What a restart waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// So many Pods of the workload are unavailable.
    Unavailable(i64),
    /// So many Pods of the workload are being restarted.
    Restarting(i64),
}

/// What to do about the Pods of a workload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Containers to restart now, with their Pods.
    pub restarts: Vec<(Key, Failure)>,
    /// Containers whose restart waits.
    pub waiting: Vec<(Key, Failure, WaitReason)>,
}

/// Plans the restarts of a workload: at most one container of each Pod, and of at most [`MAX_RESTARTS`] Pods. Others that
/// the budget admits are planned when these are requested.
#[must_use]
pub fn plan(pods: &[WorkloadPod], budget: Budget) -> Plan {
    let count = |is_counted: fn(&WorkloadPod) -> bool| {
        let counted = pods.iter().filter(|pod| is_counted(pod)).count();
        i64::try_from(counted).unwrap_or(i64::MAX)
    };
    let mut restarting = count(WorkloadPod::is_restarting);
    let mut unavailable = budget.replicas.saturating_sub(count(WorkloadPod::is_in_service));
    let candidates = pods.iter().filter_map(|pod| Some((pod, pod.candidate()?)));
    let mut candidates: Vec<_> = candidates.collect();
    // Pods that are out of service first, then what has failed for the longest time: each comes round.
    candidates.sort_by_key(|(pod, failure)| (pod.available, failure.since, &pod.key));
    let mut plan = Plan::default();
    for (pod, failure) in candidates {
        let (key, failure) = (pod.key.clone(), failure.clone());
        if restarting >= budget.max_unavailable {
            plan.waiting
                .push((key, failure, WaitReason::Restarting(restarting)));
        } else if pod.available && unavailable >= budget.max_unavailable {
            plan.waiting
                .push((key, failure, WaitReason::Unavailable(unavailable)));
        } else if plan.restarts.len() < MAX_RESTARTS {
            restarting += 1;
            unavailable += i64::from(pod.available);
            plan.restarts.push((key, failure));
        }
    }
    plan
}

/// The failures of containers that run now and have a liveness probe. A failure of an earlier container, which the daemon
/// has not replaced yet, is none of them.
pub fn current_failures<'a>(pod: &'a PodView, failures: &'a [Failure]) -> impl Iterator<Item = &'a Failure> {
    let is_current = |failure: &&Failure| {
        let liveness = pod.liveness.as_ref();
        let mut containers = pod.containers.iter();
        let container = containers.find(|container| container.name == failure.container);
        container.is_some_and(|container| container.running && container.id == failure.container_id)
            && !failure.container_id.is_empty()
            && liveness.is_some_and(|liveness| liveness.probe(&failure.container).is_some())
    };
    failures.iter().filter(is_current)
}

/// Whether the request still has to replace its container. After that it only waits for the new one to be ready, which
/// may never be.
#[must_use]
pub fn is_restart_pending(request: &ContainerRecreateRequest, pod: &PodView) -> bool {
    if is_finished(request) {
        return false;
    }
    let annotations = request.metadata.annotations.as_ref();
    let old = annotations.and_then(|annotations| annotations.get(keys::CRR_CONTAINER_ID));
    let requested = request.spec.containers.first().map(|container| &container.name);
    let mut containers = pod.containers.iter();
    !containers.any(|container| {
        let is_new = container.running && !container.id.is_empty() && Some(&container.id) != old;
        is_new && Some(&container.name) == requested
    })
}

/// Name of the request about a container: two managers create one request for one failure.
#[must_use]
pub fn request_name(pod_uid: &str, container_id: &str) -> String {
    let hash = keys::short_hash(container_id);
    format!("{}{pod_uid}-{hash}", keys::LIVENESS_PREFIX)
}

/// The limit of a workload that states none: a fifth of its Pods, rounded up, as CloneSet's default.
#[must_use]
pub fn default_budget(pods: usize) -> Budget {
    Budget {
        replicas: i64::try_from(pods).unwrap_or(i64::MAX),
        max_unavailable: i64::try_from(pods.div_ceil(5)).unwrap_or(i64::MAX).max(1),
    }
}

/// Deadline of a request, in seconds: a node that is gone must not keep other Pods from their restart for ever.
#[must_use]
pub fn request_deadline(grace_period_seconds: i64) -> i64 {
    grace_period_seconds.clamp(0, MAX_GRACE_SECONDS) + RESTART_SECONDS
}

#[cfg(test)]
mod tests;
