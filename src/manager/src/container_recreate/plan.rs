//! What the manager does about a ContainerRecreateRequest.
//!
//! The daemon executes requests. The manager sets what admission could not, marks the Pod not ready, completes requests
//! that their daemon does not complete, and cleans up. A daemon gets [`DAEMON_GRACE`] to write what it has done, so that
//! the two do not write the same thing or make each other's writes conflict.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::view::PodView;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase,
    ContainerRecreateRequestStatus as Status, ContainerRecreateRequestSyncContainerStatus as Snapshot,
    DEADLINE_MESSAGE, NO_RESPONSE_MESSAGE, POD_GONE_MESSAGE,
};
use kruise_api::keys;
use kruise_api::owner::{Owner, OwnerKind};

/// Time that a daemon gets to write what it has done.
pub const DAEMON_GRACE: SignedDuration = SignedDuration::from_secs(1);
/// Maximum time until a daemon takes a request.
pub const NO_RESPONSE_TIMEOUT: SignedDuration = SignedDuration::from_mins(1);

/// How long a daemon may take before a condition reports it missing; a running one takes a fraction of a second.
pub const NO_DAEMON_REPORT_DELAY: SignedDuration = SignedDuration::from_secs(5);

/// One write. The request is reconciled again after it.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Set labels that admission did not set.
    SetLabels(BTreeMap<String, String>),
    /// Complete the request with this status.
    Complete(Box<Status>),
    /// Report that no daemon has taken the request, in these conditions.
    ReportNoDaemon(Vec<Condition>),
    /// Set the conditions that a daemon of OpenKruise does not write.
    SetConditions(Vec<Condition>),
    /// Add the finalizer that guards the Pod's not-ready key.
    AddFinalizer,
    /// Mark the Pod not ready, then record it.
    MarkNotReady,
    /// Record the start of the grace period, for a Pod without readiness gate.
    StartGracePeriod,
    /// Write the Pod's status of the new containers.
    WriteSnapshot(Vec<Snapshot>),
    /// Release the Pod, then remove the finalizer and the active label if they exist.
    Finalize {
        /// Whether to release the Pod.
        mark_ready: bool,
    },
    /// Delete the request.
    Delete,
}

/// What to do now, and when to requeue.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// At most one action.
    pub action: Option<Action>,
    /// When to reconcile although nothing has changed.
    pub requeue_at: Option<Timestamp>,
    /// What the plan waits for, and since when; input of the next plan.
    pub waiting: Option<DaemonWait>,
}

/// Something that the daemon gets time for.
#[derive(Clone, Debug, PartialEq)]
pub struct DaemonWait {
    /// What the daemon should do.
    pub task: DaemonTask,
    /// Start of the wait.
    pub since: Timestamp,
}

/// What the daemon gets time for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DaemonTask {
    /// To complete a request whose Pod was deleted.
    EndRequest,
    /// To record the stop, before this snapshot is written for it: OpenKruise's daemon stops the container again if a
    /// write in between makes its own conflict.
    RecordStop(Vec<Snapshot>),
}

impl Plan {
    fn with_action(act: Action) -> Self {
        Self {
            action: Some(act),
            ..Self::default()
        }
    }
    fn wait_until(wake: Option<Timestamp>) -> Self {
        Self {
            requeue_at: wake,
            ..Self::default()
        }
    }
}

/// Plans the next action for one request.
#[must_use]
pub fn plan(
    request: &ContainerRecreateRequest,
    pod: Option<&PodView>,
    previous: Option<&DaemonWait>,
    now: Timestamp,
) -> Plan {
    let status = request.status.clone().unwrap_or_default();
    if request.metadata.deletion_timestamp.is_some() || status.completion_time.is_some() {
        return plan_finished(request, &status, now);
    }
    let Some(pod) = pod.filter(|p| !p.terminating && targets_pod(request, p)) else {
        return plan_pod_deleted(request, &status, previous, now);
    };
    let not_started = status.phase.as_str().is_empty();
    if let Some(message) = timed_out(request, &status, now) {
        let mut status = status;
        if not_started && !status.waits_for_daemon() {
            // The time to report the missing daemon was not reached yet.
            status.set_waiting_for_daemon(node(request), now);
        }
        return Plan::with_action(complete_action(request, status, message, now));
    }
    let deadlines = [no_response_at(request, &status), deadline_at(request)];
    let wake = deadlines.into_iter().flatten().min();
    if let Some(labels) = missing_labels(request, pod) {
        return Plan::with_action(Action::SetLabels(labels));
    }
    if not_started && !status.waits_for_daemon() {
        let due = add(created(request), NO_DAEMON_REPORT_DELAY);
        if now < due {
            return Plan::wait_until(wake.into_iter().chain([due]).min());
        }
        let mut status = status;
        status.set_waiting_for_daemon(node(request), now);
        return Plan::with_action(Action::ReportNoDaemon(status.conditions));
    }
    if !not_started && status.waits_for_daemon() {
        return Plan::with_action(conditions_action(request, status));
    }
    if status.phase != Phase::Recreating {
        return Plan::wait_until(wake);
    }
    if requests_grace_period(request) && status.unready_since().is_none() {
        return plan_grace_period(request, pod);
    }
    let new = new_container_statuses(request, &status, pod);
    // Only our daemon records the container to replace, and its own writes include the snapshot.
    let own_daemon = status
        .container_recreate_states
        .iter()
        .any(|state| state.container_id.is_some());
    if own_daemon || new.is_empty() || new == status.container_status_snapshot {
        return Plan::wait_until(wake);
    }
    let (since, wait_ends) = daemon_wait(&DaemonTask::RecordStop(new.clone()), previous, now);
    if now >= wait_ends {
        return Plan::with_action(Action::WriteSnapshot(new));
    }
    Plan {
        action: None,
        requeue_at: wake.into_iter().chain([wait_ends]).min(),
        waiting: Some(DaemonWait {
            task: DaemonTask::RecordStop(new),
            since,
        }),
    }
}

/// Start and end of the wait for a task.
fn daemon_wait(task: &DaemonTask, previous: Option<&DaemonWait>, now: Timestamp) -> (Timestamp, Timestamp) {
    // The API server's clock may have been set back meanwhile.
    let since = previous
        .filter(|w| w.task == *task)
        .map_or(now, |w| w.since.min(now));
    (since, add(since, DAEMON_GRACE))
}

fn plan_finished(request: &ContainerRecreateRequest, status: &Status, now: Timestamp) -> Plan {
    let guarded = has_finalizer(request);
    let terminating = request.metadata.deletion_timestamp.is_some();
    let finalizing = !terminating && label(request, keys::CRR_ACTIVE).is_some();
    if finalizing && (status.final_condition().is_none() || status.waits_for_daemon()) {
        return Plan::with_action(conditions_action(request, status.clone()));
    }
    if guarded || finalizing {
        return Plan::with_action(Action::Finalize { mark_ready: guarded });
    }
    let ttl = request.spec.ttl_seconds_after_finished.map(i64::from);
    let (false, Some(ttl), Some(completed)) = (terminating, ttl, &status.completion_time) else {
        return Plan::default();
    };
    let expiry = add(completed.0, SignedDuration::from_secs(ttl));
    if now >= expiry {
        Plan::with_action(Action::Delete)
    } else {
        Plan::wait_until(Some(expiry))
    }
}

fn plan_pod_deleted(
    request: &ContainerRecreateRequest,
    status: &Status,
    previous: Option<&DaemonWait>,
    now: Timestamp,
) -> Plan {
    let (since, wait_ends) = daemon_wait(&DaemonTask::EndRequest, previous, now);
    if now >= wait_ends {
        return Plan::with_action(complete_action(request, status.clone(), POD_GONE_MESSAGE, now));
    }
    Plan {
        waiting: Some(DaemonWait {
            task: DaemonTask::EndRequest,
            since,
        }),
        ..Plan::wait_until(Some(wait_ends))
    }
}

fn plan_grace_period(request: &ContainerRecreateRequest, pod: &PodView) -> Plan {
    if !pod.has_readiness_gate {
        return Plan::with_action(Action::StartGracePeriod);
    }
    if !has_finalizer(request) {
        return Plan::with_action(Action::AddFinalizer);
    }
    Plan::with_action(Action::MarkNotReady)
}

/// Whether the Pod is the one that the request was created for.
#[must_use]
pub fn targets_pod(request: &ContainerRecreateRequest, pod: &PodView) -> bool {
    let controller = Owner::controller(&request.metadata);
    label(request, keys::CRR_POD_UID).is_none_or(|uid| uid == pod.uid)
        && controller.is_none_or(|owner| owner.kind != OwnerKind::Pod || owner.uid == pod.uid)
}

fn timed_out(request: &ContainerRecreateRequest, status: &Status, now: Timestamp) -> Option<&'static str> {
    if no_response_at(request, status).is_some_and(|at| now >= at) {
        return Some(NO_RESPONSE_MESSAGE);
    }
    deadline_at(request)
        .is_some_and(|at| now >= at)
        .then_some(DEADLINE_MESSAGE)
}

/// When a request ends that no daemon has taken.
fn no_response_at(request: &ContainerRecreateRequest, status: &Status) -> Option<Timestamp> {
    let silent = status.phase.as_str().is_empty();
    silent.then(|| add(created(request), NO_RESPONSE_TIMEOUT))
}

/// When the manager completes a request with a deadline.
fn deadline_at(request: &ContainerRecreateRequest) -> Option<Timestamp> {
    let seconds = request.spec.active_deadline_seconds?;
    let limit = SignedDuration::from_secs(seconds).saturating_add(DAEMON_GRACE);
    Some(add(created(request), limit))
}

fn created(request: &ContainerRecreateRequest) -> Timestamp {
    request
        .metadata
        .creation_timestamp
        .as_ref()
        .map_or(Timestamp::MAX, |t| t.0)
}

/// The status of a request that the manager completes: unfinished containers have failed.
fn complete_action(
    request: &ContainerRecreateRequest,
    mut status: Status,
    message: &str,
    now: Timestamp,
) -> Action {
    status.phase = Phase::Completed;
    status.completion_time = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now));
    status.message = Some(message.to_owned());
    for state in &mut status.container_recreate_states {
        if !matches!(state.phase, Phase::Succeeded | Phase::Failed) {
            state.phase = Phase::Failed;
            state.message = Some(message.to_owned());
        }
    }
    status.set_final_condition(node(request));
    Action::Complete(Box::new(status))
}

/// The conditions that match the rest of the status.
fn conditions_action(request: &ContainerRecreateRequest, mut status: Status) -> Action {
    status.set_final_condition(node(request));
    Action::SetConditions(status.conditions)
}

/// The node of the request's Pod, if the request has the label.
fn node(request: &ContainerRecreateRequest) -> &str {
    label(request, keys::CRR_NODE_NAME).unwrap_or("the node")
}

/// The missing labels that daemons select requests by. They need the Pod's node.
fn missing_labels(request: &ContainerRecreateRequest, pod: &PodView) -> Option<BTreeMap<String, String>> {
    let node = pod.node.as_deref()?;
    let required = [
        (keys::CRR_ACTIVE, keys::TRUE.to_owned()),
        (keys::CRR_NODE_NAME, keys::node_label(node)),
        (keys::CRR_POD_UID, pod.uid.clone()),
    ];
    let missing: BTreeMap<String, String> = required
        .into_iter()
        .filter(|(key, _)| label(request, key).is_none())
        .map(|(key, value)| (key.to_owned(), value))
        .collect();
    (!missing.is_empty()).then_some(missing)
}

fn requests_grace_period(request: &ContainerRecreateRequest) -> bool {
    let strategy = request.spec.strategy.as_ref();
    strategy.is_some_and(|s| s.unready_grace_period_seconds.is_some())
}

fn has_finalizer(request: &ContainerRecreateRequest) -> bool {
    let finalizers = request.metadata.finalizers.iter().flatten();
    finalizers.into_iter().any(|f| f == keys::CRR_UNREADY_ACQUIRED)
}

/// The value of a label of the request.
#[must_use]
pub fn label<'a>(request: &'a ContainerRecreateRequest, key: &str) -> Option<&'a str> {
    request.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// The Pod's status of running containers that are not those recorded in the request.
fn new_container_statuses(
    request: &ContainerRecreateRequest,
    status: &Status,
    pod: &PodView,
) -> Vec<Snapshot> {
    let force = request.spec.strategy.as_ref().is_some_and(|s| s.force_recreate);
    let is_new = |name: &str, id: &str, restarts: i32| {
        let requested = request.spec.containers.iter().find(|c| c.name == name)?;
        let state = status.state(name);
        let recorded = requested.status_context.as_ref();
        // The daemon recorded the container that it was about to replace; else use the one that admission recorded.
        let changed = match state.and_then(|s| s.container_id.as_ref()) {
            Some(target) => target != id,
            None => recorded.is_some_and(|r| r.container_id != id || restarts > r.restart_count),
        };
        // With `forceRecreate`, the container may have changed before it was stopped.
        let stopped = state.is_some_and(|s| s.is_killed);
        (changed && (!force || stopped)).then_some(())
    };
    let running = pod.containers.iter().filter(|c| c.running && !c.id.is_empty());
    running
        .filter(|c| is_new(&c.name, &c.id, c.restarts).is_some())
        .map(|c| Snapshot {
            name: c.name.clone(),
            ready: c.ready,
            restart_count: c.restarts,
            container_id: Some(c.id.clone()),
        })
        .collect()
}

fn add(at: Timestamp, span: SignedDuration) -> Timestamp {
    at.checked_add(span).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests;
