//! What to tell the API server about a request: one write per transition, none where nothing changed.

use super::judge::bare;
use super::queue::End;
use super::types::{Now, Observed, Request, Stage, Urgency, Write};
use super::words::{Step, Wait};
use super::{Key, Walk};
use crate::pods::PodView;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestContainerRecreateState as State, ContainerRecreateRequestPhase as Phase,
    ContainerRecreateRequestStatus as Status, ContainerRecreateRequestSyncContainerStatus as Snapshot,
};

/// The status of a request that does nothing for now.
pub fn waiting(request: &Request, why: &Wait) -> Option<Write> {
    let phase = match (why, &request.status.phase) {
        (Wait::Queued { .. }, _) => Phase::Pending,
        // The manager of either make acts on a request only once it is Recreating.
        (Wait::Unready | Wait::UnreadyGrace { .. }, _) => Phase::Recreating,
        (_, Phase::Other(_)) => Phase::Pending,
        (_, phase) => phase.clone(),
    };
    let states = request
        .containers
        .iter()
        .map(|wanted| stored(request, &wanted.name));
    let status = Status {
        phase,
        message: Some(why.to_string()),
        container_recreate_states: states.collect(),
        ..request.status.clone()
    };
    write(request, status, why.reason())
}

/// The status of the request in turn.
pub fn running(request: &Request, pod: &PodView, walk: &Walk, wait: Option<&Wait>) -> Option<Write> {
    let steps = walk.steps.iter();
    let states: Vec<State> = steps
        .map(|(name, step)| state(request, walk, name, step))
        .collect();
    let status = Status {
        phase: Phase::Recreating,
        message: wait.map(ToString::to_string),
        container_status_snapshot: snapshot(request, pod, &states),
        container_recreate_states: states,
        ..request.status.clone()
    };
    let waits = wait.and_then(Wait::reason);
    if walk.record.is_empty() {
        return write(request, status, waits);
    }
    // The stop waits for it, even where the API server says the same already but for what it dropped.
    Some(Write {
        request: request.uid.clone(),
        status,
        waits,
        urgency: Urgency::Now,
    })
}

/// The status of a request whose containers are done.
pub fn completed(request: &Request, pod: &PodView, walk: &Walk, now: Now) -> Option<Write> {
    let halted = walk.halted.as_deref();
    let states: Vec<State> = walk
        .steps
        .iter()
        .map(|(name, step)| match (step, halted) {
            (Step::Succeeded | Step::Failed(_), _) | (_, None) => state(request, walk, name, step),
            (_, Some(halted)) => State {
                phase: Phase::Failed,
                message: Some(format!(
                    "not started, because container {halted:?} failed and failurePolicy is Fail"
                )),
                ..stored(request, name)
            },
        })
        .collect();
    let snapshot = snapshot(request, pod, &states);
    // A message would say that it was broken off; a container that failed is a usual end.
    write(request, over(request, None, states, snapshot, now), None)
}

/// The status of a request that ends before its containers do.
pub fn ended(
    request: &Request,
    seen: &Observed,
    steps: &[(String, Step)],
    why: &End,
    now: Now,
) -> Option<Write> {
    let states = request
        .containers
        .iter()
        .map(|wanted| {
            let step = steps
                .iter()
                .find(|(name, _)| *name == wanted.name)
                .map(|(_, step)| step);
            let begun = step.map(|step| state_of(request, seen, &wanted.name, step));
            unfinished(begun.unwrap_or_else(|| stored(request, &wanted.name)), step, why)
        })
        .collect();
    let snapshot = request.status.container_status_snapshot.clone();
    write(
        request,
        over(request, Some(why.message()), states, snapshot, now),
        None,
    )
}

/// The status of a request that is over, once a stop that ran at its deadline has ended.
pub fn finished(request: &Request, seen: &Observed) -> Option<Write> {
    request.status.completion_time.as_ref()?;
    let ran = [
        Step::Hook.at_deadline(),
        Step::Stopping.at_deadline(),
        End::Deadline.message(),
    ];
    let ran = |state: &State| {
        state
            .message
            .as_ref()
            .is_some_and(|message| ran.contains(message))
    };
    let mut status = request.status.clone();
    for state in status
        .container_recreate_states
        .iter_mut()
        .filter(|state| ran(state))
    {
        let key = Key {
            request: request.uid.clone(),
            container: state.name.clone(),
        };
        let ended = seen.memory.attempts.get(&key).filter(|attempt| !attempt.live);
        match ended.map(|attempt| &attempt.stage) {
            Some(Stage::Stopped(_)) => state.message = Some(Step::after_deadline(None)),
            Some(Stage::Retry { error, .. } | Stage::Refused(error)) => {
                state.message = Some(Step::after_deadline(Some(error)));
            }
            _ => {}
        }
    }
    (status != request.status).then(|| Write {
        request: request.uid.clone(),
        status,
        waits: None,
        urgency: Urgency::Now,
    })
}

/// A state at the end of its request: failed, unless it was done.
fn unfinished(state: State, step: Option<&Step>, why: &End) -> State {
    if state.phase.settled() {
        return state;
    }
    let message = match (why, step) {
        (End::Deadline, step) => step.unwrap_or(&Step::Waiting).at_deadline(),
        (End::PodGone, Some(step)) => format!("the Pod is being deleted; {}", step.so_far()),
        (_, Some(step)) => format!("{}; {}", why.message(), step.so_far()),
        (_, None) => why.message(),
    };
    State {
        phase: Phase::Failed,
        message: Some(message),
        ..state
    }
}

fn over(
    request: &Request,
    message: Option<String>,
    states: Vec<State>,
    snapshot: Vec<Snapshot>,
    now: Now,
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

/// The write of `wanted`, unless the API server has it already.
fn write(request: &Request, wanted: Status, waits: Option<&'static str>) -> Option<Write> {
    let urgency = urgency(&request.status, &wanted)?;
    Some(Write {
        request: request.uid.clone(),
        status: wanted,
        waits,
        urgency,
    })
}

fn urgency(have: &Status, want: &Status) -> Option<Urgency> {
    let begins = want.phase == Phase::Recreating && have.phase != Phase::Recreating;
    if want.completion_time.is_some() || (begins && want.message.is_some()) {
        return Some(Urgency::Now);
    }
    let facts = |status: &Status| -> Vec<(String, Phase, bool, bool)> {
        let states = status.container_recreate_states.iter();
        let held = |state: &State| {
            state
                .message
                .as_ref()
                .is_some_and(|message| message.starts_with(HELD))
        };
        let facts = states.map(|state| {
            (
                state.name.clone(),
                state.phase.clone(),
                state.is_killed,
                held(state),
            )
        });
        facts.collect()
    };
    if have.phase != want.phase || facts(have) != facts(want) {
        return Some(Urgency::Soon);
    }
    let messages = |status: &Status| -> Vec<Option<String>> {
        let states = status.container_recreate_states.iter();
        states.map(|state| state.message.clone()).collect()
    };
    let said = have.message != want.message || messages(have) != messages(want);
    said.then_some(Urgency::IfItLasts)
}

/// How messages begin that cannot wait: kubelet will not go on for some time.
const HELD: &str = "kubelet ";

fn state(request: &Request, walk: &Walk, name: &str, step: &Step) -> State {
    let mut state = step_state(request, name, step, walk.touched.contains(name));
    if let Some(record) = walk.record.iter().find(|record| record.container == name) {
        state.container_id = Some(record.id.clone());
        state.is_killed |= record.kill;
    }
    state
}

fn state_of(request: &Request, seen: &Observed, name: &str, step: &Step) -> State {
    let key = Key {
        request: request.uid.clone(),
        container: name.to_owned(),
    };
    let touched = seen
        .memory
        .attempts
        .get(&key)
        .is_some_and(|attempt| attempt.begun.is_some());
    step_state(request, name, step, touched)
}

fn step_state(request: &Request, name: &str, step: &Step, killed: bool) -> State {
    let old = stored(request, name);
    let (phase, message) = match step {
        Step::Waiting => (Phase::Pending, None),
        Step::Succeeded => (Phase::Succeeded, None),
        Step::Failed(why) => (Phase::Failed, Some(why.clone()).filter(|why| !why.is_empty())),
        // Not known whether it has begun: what was said stands.
        Step::Blind => (old.phase.clone(), old.message.clone()),
        step => (Phase::Recreating, Some(step.to_string())),
    };
    let target = || known_target(request, name).filter(|_| phase != Phase::Pending);
    State {
        container_id: old.container_id.clone().or_else(target),
        is_killed: old.is_killed || killed,
        phase,
        message,
        ..old
    }
}

/// What the request itself says is to be replaced. It is repeated in the state: people see it there, and the
/// manager sees that this daemon needs no help with the snapshot.
fn known_target(request: &Request, name: &str) -> Option<String> {
    let wanted = request.containers.iter().find(|wanted| wanted.name == name)?;
    wanted.recorded.clone().filter(|_| !request.force)
}

/// The state that the status has; of a container that it has none of, that nothing has begun.
fn stored(request: &Request, name: &str) -> State {
    request.status.state(name).cloned().unwrap_or_else(|| State {
        name: name.to_owned(),
        phase: Phase::Pending,
        message: None,
        is_killed: false,
        container_id: None,
    })
}

/// What kubelet says of the new containers; what was said before where there is none yet.
fn snapshot(request: &Request, pod: &PodView, states: &[State]) -> Vec<Snapshot> {
    let new: Vec<Snapshot> = request
        .containers
        .iter()
        .filter_map(|wanted| {
            let status = pod.container(&wanted.name)?.status.as_ref()?;
            let state = states.iter().find(|state| state.name == wanted.name);
            let target = state.and_then(|state| state.container_id.as_deref());
            let old = target.or(wanted.recorded.as_deref())?;
            (status.running && bare(&status.container_id) != bare(old)).then(|| Snapshot {
                name: wanted.name.clone(),
                ready: status.ready,
                restart_count: status.restart_count,
                container_id: Some(status.container_id.clone()).filter(|id| !id.is_empty()),
            })
        })
        .collect();
    if new.is_empty() {
        request.status.container_status_snapshot.clone()
    } else {
        new
    }
}
