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

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

pub use evaluate::strip_scheme;
pub use steps::{ContainerStep, WaitReason};
pub use time::{deadline, to_mono};
pub use types::{
    Clocks, ContainerKey, ContainerResult, Observed, ObservedContainer, Plan, PodObservation, PreStopHook,
    RecreateRequest, RecreateState, RequestProgress, RequestedContainer, RunState, RuntimeObservation,
    StatusWrite, StopAction, StopAttempt, StopParams, StopStage, Urgency,
};

use crate::pods::NodePod;
use evaluate::{ContainerCheck, ContainerDecision};
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
                wait_request(
                    &mut plan,
                    request,
                    WaitReason::Queued {
                        behind: first.clone(),
                    },
                    None,
                );
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
    let turn_of = |uid: &str| {
        turns
            .iter()
            .find(|(request, _)| request.uid == uid)
            .map(|(_, turn)| turn)
    };
    let pod_terminating = match &observed.pod {
        PodObservation::NotFound => true,
        PodObservation::Present(pod) => pod.terminating,
        PodObservation::Unknown(_) => false,
    };
    let done: BTreeSet<&ContainerKey> = plan.results.iter().map(|(key, _)| key).collect();
    let is_needless = |key: &ContainerKey, attempt: &StopAttempt| match turn_of(&key.request_uid) {
        Some(RequestTurn::Next) => false,
        Some(RequestTurn::Over(EndReason::PodDeleted | EndReason::NoRuntime(_))) => true,
        _ => pod_terminating || attempt.stage == StopStage::Queued,
    };
    let in_progress = observed
        .state
        .attempts
        .iter()
        .filter(|(_, attempt)| attempt.in_progress);
    plan.cancel = in_progress
        .filter(|(key, attempt)| done.contains(key) || is_needless(key, attempt))
        .map(|(key, _)| key.clone())
        .collect();
}

/// A request that has ended while a container was still being stopped.
fn finish_stops(plan: &mut Plan, observed: &Observed, request: &RecreateRequest) {
    if request.status.completion_time.is_none() && !request.terminating {
        return;
    }
    let attempts = observed.state.attempts.iter();
    let own = attempts.filter(|(key, attempt)| key.request_uid == request.uid && attempt.in_progress);
    let containers: Vec<_> = own
        .map(|(key, attempt)| {
            let step = if attempt.stage == StopStage::Hook {
                ContainerStep::Hook
            } else {
                ContainerStep::Stopping
            };
            (key.container.clone(), step)
        })
        .collect();
    if !containers.is_empty() {
        plan.progress.push(RequestProgress {
            request_uid: request.uid.clone(),
            wait_reason: None,
            containers,
        });
    }
    plan.writes.extend(status::finished(request, observed));
}

/// The request that has its turn.
fn run_request(plan: &mut Plan, observed: &Observed, request: &Arc<RecreateRequest>, now: Clocks) {
    let pod = match &observed.pod {
        PodObservation::Present(pod) => Arc::clone(pod),
        // `queue` has ended the request of a deleted Pod.
        PodObservation::NotFound => return,
        PodObservation::Unknown(why) => {
            return wait_request(
                plan,
                request,
                WaitReason::PodUnknown(why.clone()),
                Some(now.mono + RECHECK_INTERVAL),
            );
        }
    };
    if let Some((wait_reason, at)) = queue::unready_wait(request, &observed.state, now) {
        return wait_request(plan, request, wait_reason, at);
    }
    let evaluation = RequestEvaluation::new(observed, request, &pod, now, false);
    for (key, settled) in evaluation.new_results(observed) {
        plan.results.push((key, settled));
    }
    if evaluation.complete() {
        plan.writes
            .extend(status::completed(request, observed, &pod, &evaluation, now));
        plan.progress.push(evaluation.progress(None));
        return;
    }
    let wait = match &observed.runtime {
        RuntimeObservation::Unknown(why) => Some(WaitReason::RuntimeUnknown(why.clone())),
        _ => None,
    };
    plan.writes.extend(status::running(
        request,
        observed,
        &pod,
        &evaluation,
        wait.as_ref(),
    ));
    plan.progress.push(evaluation.progress(wait));
    requeue_by(plan, now.mono + RECHECK_INTERVAL);
    for at in evaluation.rechecks {
        requeue_by(plan, at);
    }
    plan.stops.extend(evaluation.stops);
}

/// A request that only waits for now.
fn wait_request(
    plan: &mut Plan,
    request: &Arc<RecreateRequest>,
    reason: WaitReason,
    requeue_at: Option<Duration>,
) {
    plan.writes.extend(status::waiting(request, &reason));
    let containers = request
        .containers
        .iter()
        .map(|container| (container.name.clone(), ContainerStep::Waiting))
        .collect();
    if let Some(at) = requeue_at {
        requeue_by(plan, at);
    }
    plan.progress.push(RequestProgress {
        request_uid: request.uid.clone(),
        wait_reason: Some(reason),
        containers,
    });
}

/// A request that ends before its containers do.
fn end_request(
    plan: &mut Plan,
    observed: &Observed,
    request: &Arc<RecreateRequest>,
    reason: &EndReason,
    now: Clocks,
) {
    let steps = match &observed.pod {
        PodObservation::Present(pod) => RequestEvaluation::new(observed, request, pod, now, true).steps,
        _ => Vec::new(),
    };
    plan.writes
        .extend(status::ended(request, observed, &steps, reason, now));
}

fn requeue_by(plan: &mut Plan, at: Duration) {
    plan.requeue = Some(plan.requeue.map_or(at, |current| current.min(at)));
}

/// A container to be replaced, which must be recorded first.
struct TargetRecord {
    container: String,
    /// Its ID, with scheme.
    id: String,
    /// Whether it will be stopped.
    kill: bool,
}

/// One evaluation of a request's containers.
pub(crate) struct RequestEvaluation {
    request: Arc<RecreateRequest>,
    /// The step of each container, in the request's order.
    steps: Vec<(String, ContainerStep)>,
    /// Stops that may start now.
    stops: Vec<StopAction>,
    /// Targets that must be written before their stop starts.
    records: Vec<TargetRecord>,
    /// When the step of a container may change without an event.
    rechecks: Vec<Duration>,
    /// The first failed container, if it ends the request.
    failed_container: Option<String>,
    /// Whether a container is started and not done.
    in_progress: bool,
}

impl RequestEvaluation {
    fn new(
        observed: &Observed,
        request: &Arc<RecreateRequest>,
        pod: &NodePod,
        now: Clocks,
        ending: bool,
    ) -> Self {
        let mut evaluation = Self {
            request: Arc::clone(request),
            steps: Vec::new(),
            stops: Vec::new(),
            records: Vec::new(),
            rechecks: Vec::new(),
            failed_container: None,
            in_progress: false,
        };
        let mut blocked = false;
        for container in &request.containers {
            let check = ContainerCheck {
                request,
                container,
                pod,
                observed,
                now,
                ending,
            };
            let decision = check.evaluate();
            let done = matches!(decision, ContainerDecision::Done(_));
            let step = evaluation.add(&check, decision, blocked);
            evaluation.steps.push((container.name.clone(), step));
            blocked |= request.ordered && !done;
        }
        evaluation
    }

    /// Adds one container; `blocked` if a previous one must be done first.
    fn add(
        &mut self,
        check: &ContainerCheck<'_>,
        decision: ContainerDecision,
        blocked: bool,
    ) -> ContainerStep {
        let has_started =
            check.attempt().is_some() || check.stored_state().is_some_and(|state| state.is_killed);
        let may_begin = has_started || (!blocked && self.failed_container.is_none());
        match decision {
            ContainerDecision::Done(ContainerResult { failed: None }) => ContainerStep::Succeeded,
            ContainerDecision::Done(ContainerResult { failed: Some(why) }) => {
                if !self.request.ignore_failures && self.failed_container.is_none() {
                    self.failed_container = Some(check.container.name.clone());
                }
                ContainerStep::Failed(why)
            }
            _ if !may_begin => ContainerStep::Waiting,
            ContainerDecision::Record { .. } if check.ending => ContainerStep::Waiting,
            ContainerDecision::Ready { .. } if check.ending => check.final_step(),
            ContainerDecision::Record { id, kill } => {
                self.in_progress = true;
                self.records.push(TargetRecord {
                    container: check.container.name.clone(),
                    id,
                    kill,
                });
                ContainerStep::Recording
            }
            ContainerDecision::Ready { target, params: act } => self.begin_stop(check, target, *act),
            ContainerDecision::InProgress {
                step,
                recheck_at: again,
            } => {
                self.in_progress = true;
                self.rechecks.extend(again);
                step
            }
        }
    }

    fn begin_stop(
        &mut self,
        check: &ContainerCheck<'_>,
        target: String,
        params: StopParams,
    ) -> ContainerStep {
        self.in_progress = true;
        let step = if params.hook.is_some() {
            ContainerStep::Hook
        } else {
            ContainerStep::Stopping
        };
        let deadline = time::deadline(check.request);
        self.stops.push(StopAction {
            key: check.key(),
            request_name: check.request.name.clone(),
            target,
            first_attempt: check.attempt().is_none_or(|attempt| attempt.started_at.is_none()),
            deadline: deadline.map(|at| time::to_mono(at, check.now)),
            params,
        });
        step
    }

    /// Whether nothing is left to do or to wait for.
    fn complete(&self) -> bool {
        !self.in_progress && (self.failed_container.is_some() || self.unfinished().next().is_none())
    }

    fn unfinished(&self) -> impl Iterator<Item = &(String, ContainerStep)> {
        self.steps
            .iter()
            .filter(|(_, step)| !matches!(step, ContainerStep::Succeeded | ContainerStep::Failed(_)))
    }

    /// Results that are neither in our state nor stored in the status.
    fn new_results(&self, observed: &Observed) -> Vec<(ContainerKey, ContainerResult)> {
        let mut results = Vec::new();
        for (name, step) in &self.steps {
            let failed = match step {
                ContainerStep::Succeeded => None,
                ContainerStep::Failed(why) => Some(why.clone()),
                _ => continue,
            };
            let key = self.request.container_key(name);
            if !observed.state.results.contains_key(&key) {
                results.push((key, ContainerResult { failed }));
            }
        }
        results
    }

    fn progress(&self, wait: Option<WaitReason>) -> RequestProgress {
        RequestProgress {
            request_uid: self.request.uid.clone(),
            wait_reason: wait,
            containers: self.steps.clone(),
        }
    }
}
