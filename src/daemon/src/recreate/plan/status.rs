//! What to tell the API server about a request: one write per transition, none where nothing changed.

use super::judge::bare;
use super::queue::End;
use super::types::{Now, Observed, Phase, Request, Snapshot, Stage, State, Status, Urgency, Write};
use super::words::{Step, Wait};
use super::{Key, Walk};
use crate::pods::PodView;

/// The status of a request that does nothing for now.
pub fn waiting(request: &Request, why: &Wait) -> Option<Write> {
    let phase = match why {
        Wait::Queued { .. } => Phase::Pending,
        // The manager of either make acts on a request only once it is Recreating.
        Wait::Unready | Wait::UnreadyGrace { .. } => Phase::Recreating,
        _ if request.status.phase == Phase::Empty => Phase::Pending,
        _ => request.status.phase,
    };
    let states = request
        .containers
        .iter()
        .map(|wanted| stored(request, &wanted.name).unwrap_or_else(|| pending(&wanted.name)))
        .collect();
    write(
        request,
        Status {
            phase,
            message: why.to_string(),
            waits: why.reason(),
            states,
            ..request.status.clone()
        },
    )
}

/// The status of the request in turn.
pub fn running(request: &Request, pod: &PodView, walk: &Walk, wait: Option<&Wait>) -> Option<Write> {
    let states: Vec<State> = walk
        .steps
        .iter()
        .map(|(name, step)| state(request, walk, name, step))
        .collect();
    let snapshot = snapshot(request, pod, &states);
    let message = wait.map_or_else(String::new, ToString::to_string);
    let status = Status {
        phase: Phase::Recreating,
        message,
        waits: wait.and_then(Wait::reason),
        states,
        snapshot,
        ..request.status.clone()
    };
    if walk.record.is_empty() {
        return write(request, status);
    }
    // The stop waits for it, even where the API server says the same already but for what it dropped.
    Some(Write {
        request: request.uid.clone(),
        status,
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
                message: format!(
                    "not started, because container {halted:?} failed and failurePolicy is Fail"
                ),
                ..stored(request, name).unwrap_or_else(|| pending(name))
            },
        })
        .collect();
    let snapshot = snapshot(request, pod, &states);
    // A message would say that it was broken off; a container that failed is a usual end.
    write(request, over(request, String::new(), states, snapshot, now))
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
            let known = stored(request, &wanted.name).unwrap_or_else(|| pending(&wanted.name));
            unfinished(begun.unwrap_or(known), step, why)
        })
        .collect();
    write(
        request,
        over(
            request,
            why.message(),
            states,
            request.status.snapshot.clone(),
            now,
        ),
    )
}

/// The status of a request that is over, once a stop that ran at its deadline has ended.
pub fn finished(request: &Request, seen: &Observed) -> Option<Write> {
    request.status.completed?;
    let ran = [
        Step::Hook.at_deadline(),
        Step::Stopping.at_deadline(),
        End::Deadline.message(),
    ];
    let mut status = request.status.clone();
    for state in status
        .states
        .iter_mut()
        .filter(|state| ran.contains(&state.message))
    {
        let key = Key {
            request: request.uid.clone(),
            container: state.name.clone(),
        };
        let ended = seen.memory.attempts.get(&key).filter(|attempt| !attempt.live);
        match ended.map(|attempt| &attempt.stage) {
            Some(Stage::Stopped(_)) => state.message = Step::after_deadline(None),
            Some(Stage::Retry { error, .. } | Stage::Refused(error)) => {
                state.message = Step::after_deadline(Some(error));
            }
            _ => {}
        }
    }
    (status != request.status).then(|| Write {
        request: request.uid.clone(),
        status,
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
        message,
        ..state
    }
}

fn over(request: &Request, message: String, states: Vec<State>, snapshot: Vec<Snapshot>, now: Now) -> Status {
    Status {
        phase: Phase::Completed,
        completed: Some(now.api),
        message,
        waits: None,
        states,
        snapshot,
        unready_since: request.status.unready_since,
    }
}

/// The write of `wanted`, unless the API server has it already.
fn write(request: &Request, wanted: Status) -> Option<Write> {
    let urgency = urgency(&request.status, &wanted)?;
    Some(Write {
        request: request.uid.clone(),
        status: wanted,
        urgency,
    })
}

fn urgency(have: &Status, want: &Status) -> Option<Urgency> {
    let Status {
        phase,
        completed,
        message,
        waits: _,
        states,
        snapshot: _,
        unready_since: _,
    } = want;
    let unready = *phase == Phase::Recreating && have.phase != Phase::Recreating && !message.is_empty();
    if completed.is_some() || unready {
        return Some(Urgency::Now);
    }
    let facts = |states: &[State]| -> Vec<(String, Phase, bool, bool)> {
        states
            .iter()
            .map(|s| (s.name.clone(), s.phase, s.killed, s.message.starts_with(HELD)))
            .collect()
    };
    if have.phase != *phase || facts(&have.states) != facts(states) {
        return Some(Urgency::Soon);
    }
    let messages = |states: &[State]| -> Vec<String> { states.iter().map(|s| s.message.clone()).collect() };
    let said = have.message != *message || messages(&have.states) != messages(states);
    said.then_some(Urgency::IfItLasts)
}

/// How messages begin that cannot wait: kubelet will not go on for some time.
const HELD: &str = "kubelet ";

fn state(request: &Request, walk: &Walk, name: &str, step: &Step) -> State {
    let mut state = step_state(request, name, step, walk.touched.contains(name));
    if let Some(record) = walk.record.iter().find(|record| record.container == name) {
        state.target = Some(record.id.clone());
        state.killed |= record.kill;
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
    let old = stored(request, name).unwrap_or_else(|| pending(name));
    let (phase, message) = match step {
        Step::Waiting => (Phase::Pending, String::new()),
        Step::Succeeded => (Phase::Succeeded, String::new()),
        Step::Failed(why) => (Phase::Failed, why.clone()),
        // Not known whether it has begun: what was said stands.
        Step::Blind => (
            if old.phase == Phase::Empty {
                Phase::Pending
            } else {
                old.phase
            },
            old.message.clone(),
        ),
        step => (Phase::Recreating, step.to_string()),
    };
    State {
        name: name.to_owned(),
        phase,
        message,
        killed: old.killed || killed,
        target: old
            .target
            .or_else(|| known_target(request, name).filter(|_| phase != Phase::Pending)),
    }
}

/// What the request itself says is to be replaced. It is repeated in the state: people see it there, and the
/// manager sees that this daemon needs no help with the snapshot.
fn known_target(request: &Request, name: &str) -> Option<String> {
    let wanted = request.containers.iter().find(|wanted| wanted.name == name)?;
    wanted.recorded.clone().filter(|_| !request.force)
}

fn stored(request: &Request, name: &str) -> Option<State> {
    request
        .status
        .states
        .iter()
        .find(|state| state.name == name)
        .cloned()
}

fn pending(name: &str) -> State {
    State {
        name: name.to_owned(),
        phase: Phase::Pending,
        ..State::default()
    }
}

/// What kubelet says of the new containers; what was said before where there is none yet.
fn snapshot(request: &Request, pod: &PodView, states: &[State]) -> Vec<Snapshot> {
    let new: Vec<Snapshot> = request
        .containers
        .iter()
        .filter_map(|wanted| {
            let status = pod.container(&wanted.name)?.status.as_ref()?;
            let target = states
                .iter()
                .find(|state| state.name == wanted.name)
                .and_then(|s| s.target.as_deref());
            let old = target.or(wanted.recorded.as_deref())?;
            (status.running && bare(&status.container_id) != bare(old)).then(|| Snapshot {
                name: wanted.name.clone(),
                ready: status.ready,
                restart_count: status.restart_count,
                container_id: status.container_id.clone(),
            })
        })
        .collect();
    if new.is_empty() {
        request.status.snapshot.clone()
    } else {
        new
    }
}
