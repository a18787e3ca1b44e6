//! The status of a request: one write per transition, none without a change.

use super::evaluate::strip_scheme;
use super::queue::EndReason;
use super::steps::{ContainerStep, WaitReason};
use super::types::{Clocks, Observed, RecreateRequest, StatusWrite, StopStage, Urgency};
use super::{ContainerKey, RequestEvaluation};
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
    let states = request
        .containers
        .iter()
        .map(|container| stored_state(request, &container.name));
    let status = Status {
        phase,
        message: Some(reason.to_string()),
        container_recreate_states: states.collect(),
        ..request.status.clone()
    };
    status_write(request, status, Some(reason.condition_reason()))
}

/// The status of the request that has its turn.
pub fn running(
    request: &RecreateRequest,
    pod: &NodePod,
    evaluation: &RequestEvaluation,
    wait: Option<&WaitReason>,
) -> Option<StatusWrite> {
    let steps = evaluation.steps.iter();
    let states: Vec<State> = steps
        .map(|(name, step)| container_state(request, evaluation, name, step))
        .collect();
    let status = Status {
        phase: Phase::Recreating,
        message: wait.map(ToString::to_string),
        container_status_snapshot: snapshot(request, pod, &states),
        container_recreate_states: states,
        ..request.status.clone()
    };
    let waits = wait.map(WaitReason::condition_reason);
    if evaluation.records.is_empty() {
        return status_write(request, status, waits);
    }
    // The stop waits for this write, even if the stored status is equal except for dropped fields.
    Some(StatusWrite {
        request_uid: request.uid.clone(),
        status,
        waiting_reason: waits,
        urgency: Urgency::Now,
    })
}

/// The status of a request whose containers are done.
pub fn completed(
    request: &RecreateRequest,
    pod: &NodePod,
    evaluation: &RequestEvaluation,
    now: Clocks,
) -> Option<StatusWrite> {
    let failed_container = evaluation.failed_container.as_deref();
    let states: Vec<State> = evaluation
        .steps
        .iter()
        .map(|(name, step)| match (step, failed_container) {
            (ContainerStep::Succeeded | ContainerStep::Failed(_), _) | (_, None) => {
                container_state(request, evaluation, name, step)
            }
            (_, Some(halted)) => State {
                phase: Phase::Failed,
                message: Some(format!(
                    "not started, because container {halted:?} failed and failurePolicy is Fail"
                )),
                ..stored_state(request, name)
            },
        })
        .collect();
    let snapshot = snapshot(request, pod, &states);
    // A message would mean that it was aborted; a failed container is a normal end.
    status_write(
        request,
        completed_status(request, None, states, snapshot, now),
        None,
    )
}

/// The status of a request that ends before its containers are done.
pub fn ended(
    request: &RecreateRequest,
    observed: &Observed,
    steps: &[(String, ContainerStep)],
    reason: &EndReason,
    now: Clocks,
) -> Option<StatusWrite> {
    let states = request
        .containers
        .iter()
        .map(|container| {
            let step = steps
                .iter()
                .find(|(name, _)| *name == container.name)
                .map(|(_, step)| step);
            let state = step.map(|step| state_from_attempts(request, observed, &container.name, step));
            failed_state(
                state.unwrap_or_else(|| stored_state(request, &container.name)),
                step,
                reason,
            )
        })
        .collect();
    let snapshot = request.status.container_status_snapshot.clone();
    status_write(
        request,
        completed_status(request, Some(reason.message()), states, snapshot, now),
        None,
    )
}

/// The status of a completed request once a stop that ran at its deadline has ended.
pub fn finished(request: &RecreateRequest, observed: &Observed) -> Option<StatusWrite> {
    request.status.completion_time.as_ref()?;
    let deadline_messages = [
        ContainerStep::Hook.at_deadline(),
        ContainerStep::Stopping.at_deadline(),
        EndReason::Deadline.message(),
    ];
    let ran_at_deadline = |state: &State| {
        state
            .message
            .as_ref()
            .is_some_and(|message| deadline_messages.contains(message))
    };
    let mut status = request.status.clone();
    for state in status
        .container_recreate_states
        .iter_mut()
        .filter(|state| ran_at_deadline(state))
    {
        let key = ContainerKey {
            request_uid: request.uid.clone(),
            container: state.name.clone(),
        };
        let ended_attempt = observed
            .state
            .attempts
            .get(&key)
            .filter(|attempt| !attempt.in_progress);
        match ended_attempt.map(|attempt| &attempt.stage) {
            Some(StopStage::Stopped(_)) => state.message = Some(ContainerStep::after_deadline(None)),
            Some(StopStage::Retry { error, .. } | StopStage::Refused(error)) => {
                state.message = Some(ContainerStep::after_deadline(Some(error)));
            }
            _ => {}
        }
    }
    (status != request.status).then(|| StatusWrite {
        request_uid: request.uid.clone(),
        status,
        waiting_reason: None,
        urgency: Urgency::Now,
    })
}

/// The state of a container at the end of its request: failed, unless it was done.
fn failed_state(state: State, step: Option<&ContainerStep>, reason: &EndReason) -> State {
    if state.phase.is_finished() {
        return state;
    }
    let message = match (reason, step) {
        (EndReason::Deadline, step) => step.unwrap_or(&ContainerStep::Waiting).at_deadline(),
        (EndReason::PodDeleted, Some(step)) => format!("the Pod is being deleted; {}", step.progress_text()),
        (_, Some(step)) => format!("{}; {}", reason.message(), step.progress_text()),
        (_, None) => reason.message(),
    };
    State {
        phase: Phase::Failed,
        message: Some(message),
        ..state
    }
}

fn completed_status(
    request: &RecreateRequest,
    message: Option<String>,
    states: Vec<State>,
    snapshot: Vec<Snapshot>,
    now: Clocks,
) -> Status {
    Status {
        phase: Phase::Completed,
        completion_time: Some(Time(now.api)),
        message,
        container_recreate_states: states,
        container_status_snapshot: snapshot,
        conditions: request.status.conditions.clone(),
    }
}

/// The write of `desired`, unless the API server has it already.
fn status_write(
    request: &RecreateRequest,
    desired: Status,
    waiting_reason: Option<&'static str>,
) -> Option<StatusWrite> {
    let urgency = urgency(&request.status, &desired)?;
    Some(StatusWrite {
        request_uid: request.uid.clone(),
        status: desired,
        waiting_reason,
        urgency,
    })
}

fn urgency(stored: &Status, desired: &Status) -> Option<Urgency> {
    let begins_recreating = desired.phase == Phase::Recreating && stored.phase != Phase::Recreating;
    if desired.completion_time.is_some() || (begins_recreating && desired.message.is_some()) {
        return Some(Urgency::Now);
    }
    let visible_fields = |status: &Status| -> Vec<(String, Phase, bool, bool)> {
        let states = status.container_recreate_states.iter();
        let held_by_kubelet = |state: &State| {
            state
                .message
                .as_ref()
                .is_some_and(|message| message.starts_with(KUBELET_MESSAGE_PREFIX))
        };
        let fields = states.map(|state| {
            (
                state.name.clone(),
                state.phase.clone(),
                state.is_killed,
                held_by_kubelet(state),
            )
        });
        fields.collect()
    };
    if stored.phase != desired.phase || visible_fields(stored) != visible_fields(desired) {
        return Some(Urgency::Soon);
    }
    let messages = |status: &Status| -> Vec<Option<String>> {
        let states = status.container_recreate_states.iter();
        states.map(|state| state.message.clone()).collect()
    };
    let messages_differ = stored.message != desired.message || messages(stored) != messages(desired);
    messages_differ.then_some(Urgency::IfUnchanged)
}

/// Prefix of messages that are written without delay: kubelet will not continue for some time.
const KUBELET_MESSAGE_PREFIX: &str = "kubelet ";

fn container_state(
    request: &RecreateRequest,
    evaluation: &RequestEvaluation,
    name: &str,
    step: &ContainerStep,
) -> State {
    let mut state = step_state(request, name, step, evaluation.stop_started.contains(name));
    if let Some(record) = evaluation.records.iter().find(|record| record.container == name) {
        state.container_id = Some(record.id.clone());
        state.is_killed |= record.kill;
    }
    state
}

fn state_from_attempts(
    request: &RecreateRequest,
    observed: &Observed,
    name: &str,
    step: &ContainerStep,
) -> State {
    let key = ContainerKey {
        request_uid: request.uid.clone(),
        container: name.to_owned(),
    };
    let stop_started = observed
        .state
        .attempts
        .get(&key)
        .is_some_and(|attempt| attempt.started_at.is_some());
    step_state(request, name, step, stop_started)
}

fn step_state(request: &RecreateRequest, name: &str, step: &ContainerStep, stop_begun: bool) -> State {
    let stored = stored_state(request, name);
    let (phase, message) = match step {
        ContainerStep::Waiting => (Phase::Pending, None),
        ContainerStep::Succeeded => (Phase::Succeeded, None),
        ContainerStep::Failed(why) => (Phase::Failed, Some(why.clone()).filter(|why| !why.is_empty())),
        // Unknown whether it has started: the stored phase and message are kept.
        ContainerStep::RuntimeUnavailable => (stored.phase.clone(), stored.message.clone()),
        step => (Phase::Recreating, Some(step.to_string())),
    };
    let target = || requested_target(request, name).filter(|_| phase != Phase::Pending);
    State {
        container_id: stored.container_id.clone().or_else(target),
        is_killed: stored.is_killed || stop_begun,
        phase,
        message,
        ..stored
    }
}

/// The container ID in the request that is to be replaced. The state repeats it: users see it there, and the manager
/// sees that this daemon needs no help with the snapshot.
fn requested_target(request: &RecreateRequest, name: &str) -> Option<String> {
    let requested = request.containers.iter().find(|wanted| wanted.name == name)?;
    requested.recorded_id.clone().filter(|_| !request.force)
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
