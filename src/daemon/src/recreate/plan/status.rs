//! The status of a request: one write per transition, none without a change.

use std::sync::Arc;

use super::evaluate::{ContainerEvaluation, strip_scheme};
use super::queue::EndReason;
use super::steps::{ContainerStep, WaitReason};
use super::types::{
    Clocks, Observed, PodObservation, RecreateRequest, RequestedContainer, StatusWrite, StopStage, Urgency,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestContainerRecreateState as State, ContainerRecreateRequestPhase as Phase,
    ContainerRecreateRequestStatus as Status, ContainerRecreateRequestSyncContainerStatus as Snapshot,
};

/// The status of a request that only waits for now.
pub fn waiting(request: &Arc<RecreateRequest>, reason: &WaitReason) -> Option<StatusWrite> {
    let phase = match (reason, &request.status.phase) {
        (WaitReason::Queued { .. }, _) => Phase::Pending,
        // The managers of both projects act on a request only once it is Recreating.
        (WaitReason::Unready | WaitReason::UnreadyGrace { .. }, _) => Phase::Recreating,
        (_, Phase::Other(_)) => Phase::Pending,
        (_, phase) => phase.clone(),
    };
    let containers = request.containers.iter();
    let status = Status {
        phase,
        message: Some(reason.to_string()),
        container_recreate_states: containers
            .map(|container| stored_state(request, &container.name))
            .collect(),
        ..request.status.clone()
    };
    status_write(request, status, Some(reason))
}

/// The status of the request that has its turn.
pub fn running(
    request: &Arc<RecreateRequest>,
    observed: &Observed,
    containers: &[ContainerEvaluation],
    wait: Option<&WaitReason>,
) -> Option<StatusWrite> {
    let mut states = Vec::new();
    for (requested, container) in request.containers.iter().zip(containers) {
        let mut state = container_state(request, observed, requested, &container.step);
        state.container_id = container.record.clone().or(state.container_id);
        state.is_killed |= container.will_stop;
        states.push(state);
    }
    let status = Status {
        phase: Phase::Recreating,
        message: wait.map(ToString::to_string),
        container_status_snapshot: snapshot(request, observed, &states),
        container_recreate_states: states,
        ..request.status.clone()
    };
    if containers.iter().all(|container| container.record.is_none()) {
        return status_write(request, status, wait);
    }
    // The stop waits for this write, even if the stored status is equal except for dropped fields.
    Some(StatusWrite {
        request: Arc::clone(request),
        status,
        waiting_reason: wait.map(WaitReason::condition_reason),
        urgency: Urgency::Now,
    })
}

/// The status of a request that ends: for a reason, or because its containers are done.
pub fn ended(
    request: &Arc<RecreateRequest>,
    observed: &Observed,
    containers: &[ContainerEvaluation],
    reason: Option<&EndReason>,
    now: Clocks,
) -> Option<StatusWrite> {
    let mut pairs = request.containers.iter().zip(containers);
    let failed = pairs.find(|(_, container)| matches!(container.step, ContainerStep::Failed(_)));
    let failed = failed.map_or("", |(requested, _)| requested.name.as_str());
    let mut steps = containers.iter().map(|container| &container.step);
    let states = request.containers.iter().map(|requested| {
        let step = steps.next();
        let state = match step {
            Some(step) => container_state(request, observed, requested, step),
            None => stored_state(request, &requested.name),
        };
        if state.phase.is_finished() {
            return state;
        }
        let message = match (reason, step) {
            (None, _) => {
                format!("not started, because container {failed:?} failed and failurePolicy is Fail")
            }
            (Some(EndReason::Deadline), step) => step.unwrap_or(&ContainerStep::Waiting).at_deadline(),
            (Some(EndReason::PodDeleted), Some(step)) => {
                format!("the Pod is being deleted; {}", step.progress_text())
            }
            (Some(reason), Some(step)) => format!("{}; {}", reason.message(), step.progress_text()),
            (Some(reason), None) => reason.message(),
        };
        State {
            phase: Phase::Failed,
            message: Some(message),
            ..state
        }
    });
    let states: Vec<State> = states.collect();
    let mut status = Status {
        phase: Phase::Completed,
        completion_time: Some(Time(now.api)),
        // A message means that it was aborted; a failed container is a normal end.
        message: reason.map(EndReason::message),
        ..request.status.clone()
    };
    if reason.is_none() {
        status.container_status_snapshot = snapshot(request, observed, &states);
    }
    status.container_recreate_states = states;
    status_write(request, status, None)
}

/// The status of a completed request once a stop that ran at its deadline has ended.
pub fn finished(request: &Arc<RecreateRequest>, observed: &Observed) -> Option<StatusWrite> {
    request.status.completion_time.as_ref()?;
    let deadline_messages = [
        ContainerStep::Hook.at_deadline(),
        ContainerStep::Stopping.at_deadline(),
        EndReason::Deadline.message(),
    ];
    let mut status = request.status.clone();
    for state in &mut status.container_recreate_states {
        let attempt = observed.state.attempt(request, &state.name);
        let error = match attempt
            .filter(|attempt| !attempt.in_progress)
            .map(|attempt| &attempt.stage)
        {
            Some(StopStage::Stopped(_)) => None,
            Some(StopStage::Retry { error, .. } | StopStage::Refused(error)) => Some(error.as_str()),
            _ => continue,
        };
        if state
            .message
            .as_ref()
            .is_some_and(|message| deadline_messages.contains(message))
        {
            state.message = Some(ContainerStep::after_deadline(error));
        }
    }
    if status == request.status {
        return None;
    }
    status_write(request, status, None)
}

/// The write of `desired`, unless the API server has it already.
fn status_write(
    request: &Arc<RecreateRequest>,
    desired: Status,
    wait: Option<&WaitReason>,
) -> Option<StatusWrite> {
    let urgency = urgency(&request.status, &desired)?;
    Some(StatusWrite {
        request: Arc::clone(request),
        status: desired,
        waiting_reason: wait.map(WaitReason::condition_reason),
        urgency,
    })
}

/// How soon the change must be written. A container ID alone is no change: the API server may drop it.
fn urgency(stored: &Status, desired: &Status) -> Option<Urgency> {
    let begins_recreating = desired.phase == Phase::Recreating && stored.phase != Phase::Recreating;
    if desired.completion_time.is_some() || (begins_recreating && desired.message.is_some()) {
        return Some(Urgency::Now);
    }
    if steps(stored) != steps(desired) {
        return Some(Urgency::Soon);
    }
    (messages(stored) != messages(desired)).then_some(Urgency::IfUnchanged)
}

/// What a status says apart from its messages.
fn steps(status: &Status) -> (&Phase, Vec<(&str, &Phase, bool, bool)>) {
    let states = status.container_recreate_states.iter().map(|state| {
        let message = state.message.as_deref().unwrap_or_default();
        let is_held = message.starts_with(KUBELET_MESSAGE_PREFIX);
        (&*state.name, &state.phase, state.is_killed, is_held)
    });
    (&status.phase, states.collect())
}

fn messages(status: &Status) -> Vec<Option<&str>> {
    let states = status.container_recreate_states.iter();
    let messages = states.map(|state| state.message.as_deref());
    messages.chain([status.message.as_deref()]).collect()
}

/// Prefix of messages that are written without delay: kubelet will not continue for some time.
const KUBELET_MESSAGE_PREFIX: &str = "kubelet ";

/// The state of a container in that step.
fn container_state(
    request: &RecreateRequest,
    observed: &Observed,
    requested: &RequestedContainer,
    step: &ContainerStep,
) -> State {
    let stored = stored_state(request, &requested.name);
    let (phase, message) = match step {
        // Unknown whether it has started: the stored phase and message are kept.
        ContainerStep::RuntimeUnavailable => (stored.phase.clone(), stored.message.clone()),
        ContainerStep::Waiting | ContainerStep::Succeeded => (step.phase(), None),
        step => (step.phase(), Some(step.to_string())),
    };
    let message = message.filter(|text| !text.is_empty());
    // The state repeats the ID in the request: users see it there, and the manager sees that this daemon needs no help
    // with the snapshot.
    let target = requested.recorded_id.clone();
    let target = target.filter(|_| !request.strategy.force_recreate && phase != Phase::Pending);
    let attempt = observed.state.attempt(request, &requested.name);
    State {
        container_id: stored.container_id.clone().or(target),
        is_killed: stored.is_killed || attempt.is_some_and(|attempt| attempt.started_at.is_some()),
        phase,
        message,
        ..stored
    }
}

/// The state in the status; if there is none, a state of a container that was not started. In v1alpha1, any user who can
/// write it may have set a phase that v1beta1 does not accept.
fn stored_state(request: &RecreateRequest, name: &str) -> State {
    let stored = request.status.state(name).cloned();
    let mut state = stored.unwrap_or_else(|| State {
        name: name.to_owned(),
        phase: Phase::Pending,
        message: None,
        is_killed: false,
        container_id: None,
    });
    if let Phase::Other(_) = state.phase {
        state.phase = Phase::Pending;
    }
    state
}

/// Kubelet's status of the new containers; the stored snapshot if there is none yet.
fn snapshot(request: &RecreateRequest, observed: &Observed, states: &[State]) -> Vec<Snapshot> {
    let new_container = |(requested, state): (&RequestedContainer, &State)| {
        let PodObservation::Present(pod) = &observed.pod else {
            return None;
        };
        let status = pod.container(&requested.name)?.status.as_ref()?;
        let old = state
            .container_id
            .as_deref()
            .or(requested.recorded_id.as_deref())?;
        (status.running && strip_scheme(&status.container_id) != strip_scheme(old)).then(|| Snapshot {
            name: requested.name.clone(),
            ready: status.ready,
            restart_count: status.restart_count,
            container_id: Some(status.container_id.clone()).filter(|id| !id.is_empty()),
        })
    };
    let snapshots: Vec<Snapshot> = request
        .containers
        .iter()
        .zip(states)
        .filter_map(new_container)
        .collect();
    if snapshots.is_empty() {
        request.status.container_status_snapshot.clone()
    } else {
        snapshots
    }
}
