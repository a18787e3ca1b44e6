//! Every decision about the containers of one Pod, as a function of the observed state and the time.
//!
//! * `types`: input and output.
//! * `queue`: which request has its turn, which ones end.
//! * `evaluate`: the step of one container.
//! * `status`: what to write to the API server.
//! * `time`: durations that are correct although clocks are not.
//! * `steps`: steps and wait reasons, and their messages.

mod evaluate;
mod queue;
mod status;
mod steps;
mod time;
mod types;

#[cfg(test)]
mod cases;
#[cfg(test)]
mod fake_node;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

pub use evaluate::strip_scheme;
pub use steps::{ContainerStep, WaitReason};
pub use time::deadline;
pub use types::{
    Clocks, ContainerKey, Observed, ObservedContainer, Plan, PodObservation, RecreateRequest, RecreateState,
    RequestProgress, RequestedContainer, RunState, RuntimeObservation, StatusWrite, StopAction, StopAttempt,
    StopStage, Urgency,
};

use crate::pods::NodePod;
use evaluate::{ContainerCheck, ContainerEvaluation};
use kruise_api::container_recreate_request::ContainerRecreateRequestFailurePolicyType as FailurePolicy;
use queue::{EndReason, RequestTurn};

/// How long the plan relies on events alone before the runtime is observed again.
const RECHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Decides what to do about one Pod, given what is observed at `now`.
#[must_use]
pub fn plan(observed: &Observed, now: Clocks) -> Plan {
    let mut plan = Plan::default();
    let turns = queue::request_turns(observed, now);
    for (request, turn) in &turns {
        match turn {
            RequestTurn::Over(why) => end_request(&mut plan, observed, request, why, now),
            RequestTurn::Behind(first) => {
                let behind = first.clone();
                wait_request(&mut plan, request, WaitReason::Queued { behind }, None);
            }
            RequestTurn::Next => run_request(&mut plan, observed, request, now),
        }
        if let Some(at) = time::deadline(request).filter(|at| *at > now.api) {
            requeue_by(&mut plan, time::to_mono(at, now));
        }
    }
    for request in &observed.requests {
        finish_stops(&mut plan, observed, request);
    }
    plan_cancellations(&mut plan, observed, &turns);
    plan
}

/// A started stop is finished, even if its request has ended. Cancelled are only stops that still wait for a slot,
/// those that a container no longer needs, and all stops in a Pod that kubelet ends.
fn plan_cancellations(plan: &mut Plan, observed: &Observed, turns: &[(Arc<RecreateRequest>, RequestTurn)]) {
    let pod_ends = |key: &ContainerKey| {
        let mut requests = observed.requests.iter();
        let request = requests.find(|request| request.uid == key.request_uid);
        request.is_some_and(|request| observed.is_pod_deleted(request))
    };
    let is_done = |key: &ContainerKey| {
        let progress = plan.progress.get(&key.request_uid);
        let mut containers = progress.into_iter().flat_map(|progress| &progress.containers);
        containers.any(|(name, step)| *name == key.container && step.is_final())
    };
    let is_needless = |(key, attempt): &(&ContainerKey, &StopAttempt)| {
        let turn = turns.iter().find(|(request, _)| request.uid == key.request_uid);
        match turn.map(|(_, turn)| turn) {
            Some(RequestTurn::Next) => is_done(key),
            Some(RequestTurn::Over(EndReason::NoRuntime(_))) => true,
            _ => pod_ends(key) || attempt.stage == StopStage::Queued,
        }
    };
    let attempts = observed.state.attempts.iter();
    let running = attempts.filter(|(_, attempt)| attempt.in_progress);
    plan.cancel = running.filter(is_needless).map(|(key, _)| key.clone()).collect();
}

/// A request that has ended while a container was still being stopped.
fn finish_stops(plan: &mut Plan, observed: &Observed, request: &Arc<RecreateRequest>) {
    if !request.is_finished() {
        return;
    }
    let attempts = observed.state.attempts.iter();
    let own = attempts.filter(|(key, attempt)| key.request_uid == request.uid && attempt.in_progress);
    let containers: Vec<_> = own
        .map(|(key, attempt)| match attempt.stage {
            StopStage::Hook => (key.container.clone(), ContainerStep::Hook),
            _ => (key.container.clone(), ContainerStep::Stopping),
        })
        .collect();
    if !containers.is_empty() {
        let progress = RequestProgress {
            wait_reason: None,
            containers,
        };
        plan.progress.insert(request.uid.clone(), progress);
    }
    plan.writes.extend(status::finished(request, observed));
}

/// The request that has its turn.
fn run_request(plan: &mut Plan, observed: &Observed, request: &Arc<RecreateRequest>, now: Clocks) {
    let pod = match &observed.pod {
        PodObservation::Present(pod) => pod,
        // `queue` has ended the request of a deleted Pod.
        PodObservation::NotFound => return,
        PodObservation::Unknown(why) => {
            let (reason, at) = (WaitReason::PodUnknown(why.clone()), now.mono + RECHECK_INTERVAL);
            return wait_request(plan, request, reason, Some(at));
        }
    };
    if let Some((wait_reason, at)) = queue::unready_wait(request, &observed.state, now) {
        return wait_request(plan, request, wait_reason, at);
    }
    let containers = evaluate(observed, request, pod, now, false);
    // If none is in progress, those that wait are not started because one has failed.
    let is_over = |step: &ContainerStep| step.is_final() || *step == ContainerStep::Waiting;
    if containers.iter().all(|container| is_over(&container.step)) {
        plan.writes
            .extend(status::ended(request, observed, &containers, None, now));
        return push_progress(plan, request, None, containers.into_iter().map(|one| one.step));
    }
    let wait = match &observed.runtime {
        RuntimeObservation::Unknown(why) => Some(WaitReason::RuntimeUnknown(why.clone())),
        _ => None,
    };
    plan.writes
        .extend(status::running(request, observed, &containers, wait.as_ref()));
    requeue_by(plan, now.mono + RECHECK_INTERVAL);
    let mut steps = Vec::new();
    for container in containers {
        if let Some(at) = container.recheck_at {
            requeue_by(plan, at);
        }
        plan.stops.extend(container.stop);
        steps.push(container.step);
    }
    push_progress(plan, request, wait, steps);
}

/// The evaluation of each container, in the request's order. A container is not started after a failure, and in an
/// ordered request while an earlier one is not done.
fn evaluate(
    observed: &Observed,
    request: &RecreateRequest,
    pod: &NodePod,
    now: Clocks,
    ending: bool,
) -> Vec<ContainerEvaluation> {
    let strategy = &request.strategy;
    let mut blocked = false;
    let evaluations = request.containers.iter().map(|container| {
        let check = ContainerCheck {
            request,
            container,
            pod,
            observed,
            now,
            ending,
        };
        let evaluation = check.evaluate(blocked);
        blocked |= match evaluation.step {
            ContainerStep::Succeeded => false,
            ContainerStep::Failed(_) => strategy.failure_policy != Some(FailurePolicy::Ignore),
            _ => strategy.ordered_recreate,
        };
        evaluation
    });
    evaluations.collect()
}

fn push_progress(
    plan: &mut Plan,
    request: &RecreateRequest,
    wait_reason: Option<WaitReason>,
    steps: impl IntoIterator<Item = ContainerStep>,
) {
    let names = request.containers.iter().map(|container| container.name.clone());
    let progress = RequestProgress {
        wait_reason,
        containers: names.zip(steps).collect(),
    };
    plan.progress.insert(request.uid.clone(), progress);
}

/// A request that only waits for now.
fn wait_request(
    plan: &mut Plan,
    request: &Arc<RecreateRequest>,
    reason: WaitReason,
    requeue_at: Option<Duration>,
) {
    plan.writes.extend(status::waiting(request, &reason));
    if let Some(at) = requeue_at {
        requeue_by(plan, at);
    }
    push_progress(
        plan,
        request,
        Some(reason),
        std::iter::repeat(ContainerStep::Waiting),
    );
}

/// A request that ends before its containers do.
fn end_request(
    plan: &mut Plan,
    observed: &Observed,
    request: &Arc<RecreateRequest>,
    reason: &EndReason,
    now: Clocks,
) {
    let pod = observed.pod_of(request);
    let containers = pod.map_or_else(Vec::new, |pod| evaluate(observed, request, pod, now, true));
    plan.writes
        .extend(status::ended(request, observed, &containers, Some(reason), now));
}

fn requeue_by(plan: &mut Plan, at: Duration) {
    plan.requeue = Some(plan.requeue.map_or(at, |current| current.min(at)));
}
