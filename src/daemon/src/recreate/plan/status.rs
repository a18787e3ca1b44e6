//! The status of a request: one write per transition, none without a change.

use super::evaluate::{ContainerEvaluation, strip_scheme};
use super::queue::EndReason;
use super::steps::{ContainerStep, WaitReason};
use super::types::{Clocks, Observed, RecreateRequest, RequestedContainer, StatusWrite, StopStage, Urgency};
use crate::pods::NodePod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestContainerRecreateState as State, ContainerRecreateRequestPhase as Phase,
    ContainerRecreateRequestStatus as Status, ContainerRecreateRequestSyncContainerStatus as Snapshot,
};

/// The status of a request that only waits for now.
pub fn waiting(request: &RecreateRequest, reason: &WaitReason) -> Option<StatusWrite> {
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
    request: &RecreateRequest,
    observed: &Observed,
    pod: &NodePod,
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
        container_status_snapshot: snapshot(request, pod, &states),
        container_recreate_states: states,
        ..request.status.clone()
    };
    if containers.iter().all(|container| container.record.is_none()) {
        return status_write(request, status, wait);
    }
    // The stop waits for this write, even if the stored status is equal except for dropped fields.
    Some(StatusWrite {
        request_uid: request.uid.clone(),
        status,
        waiting_reason: wait.map(WaitReason::condition_reason),
        urgency: Urgency::Now,
    })
}

/// The status of a request whose containers are done.
pub fn completed(
    request: &RecreateRequest,
    observed: &Observed,
    pod: &NodePod,
    containers: &[ContainerEvaluation],
    now: Clocks,
) -> Option<StatusWrite> {
    let pairs = || request.containers.iter().zip(containers);
    let not_started = || {
        let failed = pairs().find(|(_, container)| matches!(container.step, ContainerStep::Failed(_)));
        let failed = failed
            .map(|(requested, _)| requested.name.as_str())
            .unwrap_or_default();
        format!("not started, because container {failed:?} failed and failurePolicy is Fail")
    };
    let states: Vec<State> = pairs()
        .map(|(requested, container)| {
            let state = container_state(request, observed, requested, &container.step);
            failed_state(state, not_started)
        })
        .collect();
    // A message would mean that it was aborted; a failed container is a normal end.
    let status = Status {
        container_status_snapshot: snapshot(request, pod, &states),
        ..completed_status(request, None, states, now)
    };
    status_write(request, status, None)
}

/// The status of a request that ends before its containers are done.
pub fn ended(
    request: &RecreateRequest,
    observed: &Observed,
    containers: &[ContainerEvaluation],
    reason: &EndReason,
    now: Clocks,
) -> Option<StatusWrite> {
    let mut steps = containers.iter().map(|container| &container.step);
    let states = request.containers.iter().map(|requested| {
        let step = steps.next();
        let state = match step {
            Some(step) => container_state(request, observed, requested, step),
            None => stored_state(request, &requested.name),
        };
        failed_state(state, || match (reason, step) {
            (EndReason::Deadline, step) => step.unwrap_or(&ContainerStep::Waiting).at_deadline(),
            (EndReason::PodDeleted, Some(step)) => {
                format!("the Pod is being deleted; {}", step.progress_text())
            }
            (_, Some(step)) => format!("{}; {}", reason.message(), step.progress_text()),
            (_, None) => reason.message(),
        })
    });
    let status = completed_status(request, Some(reason.message()), states.collect(), now);
    status_write(request, status, None)
}

/// The status of a completed request once a stop that ran at its deadline has ended.
pub fn finished(request: &RecreateRequest, observed: &Observed) -> Option<StatusWrite> {
    request.status.completion_time.as_ref()?;
    let deadline_messages = [
        ContainerStep::Hook.at_deadline(),
        ContainerStep::Stopping.at_deadline(),
        EndReason::Deadline.message(),
    ];
    let mut status = request.status.clone();
    for state in &mut status.container_recreate_states {
        let attempt = observed.state.attempts.get(&request.container_key(&state.name));
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
    (status != request.status).then(|| status_write(request, status, None))?
}

/// The state of a container at the end of its request: failed with that message, unless it was done.
fn failed_state(state: State, message: impl FnOnce() -> String) -> State {
    if state.phase.is_finished() {
        return state;
    }
    State {
        phase: Phase::Failed,
        message: Some(message()),
        ..state
    }
}

fn completed_status(
    request: &RecreateRequest,
    message: Option<String>,
    states: Vec<State>,
    now: Clocks,
) -> Status {
    Status {
        phase: Phase::Completed,
        completion_time: Some(Time(now.api)),
        message,
        container_recreate_states: states,
        ..request.status.clone()
    }
}

/// The write of `desired`, unless the API server has it already.
fn status_write(
    request: &RecreateRequest,
    desired: Status,
    wait: Option<&WaitReason>,
) -> Option<StatusWrite> {
    let urgency = urgency(&request.status, &desired)?;
    Some(StatusWrite {
        request_uid: request.uid.clone(),
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
    let differs = |messages: bool| {
        let visible = |status: &Status| {
            let states = status.container_recreate_states.iter().map(|state| {
                let message = state.message.clone();
                let held_by_kubelet = message
                    .as_ref()
                    .is_some_and(|text| text.starts_with(KUBELET_MESSAGE_PREFIX));
                let message = message.filter(|_| messages);
                (
                    state.name.clone(),
                    state.phase.clone(),
                    state.is_killed,
                    held_by_kubelet,
                    message,
                )
            });
            let message = status.message.clone().filter(|_| messages);
            (status.phase.clone(), message, states.collect::<Vec<_>>())
        };
        visible(stored) != visible(desired)
    };
    if differs(false) {
        return Some(Urgency::Soon);
    }
    differs(true).then_some(Urgency::IfUnchanged)
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
        ContainerStep::Waiting => (Phase::Pending, None),
        ContainerStep::Succeeded => (Phase::Succeeded, None),
        ContainerStep::Failed(why) => (Phase::Failed, Some(why.clone()).filter(|why| !why.is_empty())),
        // Unknown whether it has started: the stored phase and message are kept.
        ContainerStep::RuntimeUnavailable => (stored.phase.clone(), stored.message.clone()),
        step => (Phase::Recreating, Some(step.to_string())),
    };
    // The state repeats the ID in the request: users see it there, and the manager sees that this daemon needs no help
    // with the snapshot.
    let target = requested.recorded_id.clone();
    let target = target.filter(|_| !request.force && phase != Phase::Pending);
    let attempt = observed
        .state
        .attempts
        .get(&request.container_key(&requested.name));
    State {
        container_id: stored.container_id.clone().or(target),
        is_killed: stored.is_killed || attempt.is_some_and(|attempt| attempt.started_at.is_some()),
        phase,
        message,
        ..stored
    }
}

/// The state in the status; if there is none, a state of a container that was not started.
fn stored_state(request: &RecreateRequest, name: &str) -> State {
    request.status.state(name).cloned().unwrap_or_else(|| State {
        name: name.to_owned(),
        phase: Phase::Pending,
        message: None,
        is_killed: false,
        container_id: None,
    })
}

/// Kubelet's status of the new containers; the stored snapshot if there is none yet.
fn snapshot(request: &RecreateRequest, pod: &NodePod, states: &[State]) -> Vec<Snapshot> {
    let snapshots: Vec<Snapshot> = request
        .containers
        .iter()
        .filter_map(|container| {
            let status = pod.container(&container.name)?.status.as_ref()?;
            let state = states.iter().find(|state| state.name == container.name);
            let target = state.and_then(|state| state.container_id.as_deref());
            let old = target.or(container.recorded_id.as_deref())?;
            (status.running && strip_scheme(&status.container_id) != strip_scheme(old)).then(|| Snapshot {
                name: container.name.clone(),
                ready: status.ready,
                restart_count: status.restart_count,
                container_id: Some(status.container_id.clone()).filter(|id| !id.is_empty()),
            })
        })
        .collect();
    if snapshots.is_empty() {
        request.status.container_status_snapshot.clone()
    } else {
        snapshots
    }
}
