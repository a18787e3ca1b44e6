//! One container of one request: its step, and which actions are allowed.

use std::time::Duration;

use super::steps::ContainerStep;
use super::time;
use super::types::{
    Clocks, ContainerKey, Observed, ObservedContainer, RecreateRequest, RequestedContainer, RunState,
    RuntimeObservation, StopAction, StopAttempt, StopStage, grace_left,
};
use crate::pods::{ContainerRole, NodePod, PodContainer, PodContainerStatus, Termination};
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestContainerRecreateState as State, ContainerRecreateRequestPhase as Phase,
    NOT_STARTED_AGAIN,
};

/// How long a stopped container may still be listed as running.
const LIST_LAG: Duration = Duration::from_secs(1);

/// What to do about one container.
pub struct ContainerEvaluation {
    /// Its step, also if that begins only now.
    pub step: ContainerStep,
    /// When the step may change without an event.
    pub recheck_at: Option<Duration>,
    /// The stop to start now.
    pub stop: Option<StopAction>,
    /// The ID (with scheme) that must be in the status before anything is done to the container.
    pub record: Option<String>,
    /// Whether the container with that ID runs, so that it will be stopped.
    pub will_stop: bool,
}

impl From<ContainerStep> for ContainerEvaluation {
    fn from(step: ContainerStep) -> Self {
        Self {
            step,
            recheck_at: None,
            stop: None,
            record: None,
            will_stop: false,
        }
    }
}

impl ContainerEvaluation {
    fn until(step: ContainerStep, recheck_at: Duration) -> Self {
        Self {
            recheck_at: Some(recheck_at),
            ..step.into()
        }
    }
}

/// Everything that a decision depends on.
pub struct ContainerCheck<'a> {
    pub request: &'a RecreateRequest,
    pub container: &'a RequestedContainer,
    pub pod: &'a NodePod,
    pub observed: &'a Observed,
    pub now: Clocks,
    /// Whether the request ends now, so that nothing more is started.
    pub ending: bool,
}

/// Strips the scheme of an ID.
pub fn strip_scheme(id: &str) -> &str {
    id.split_once("://").map_or(id, |(_, bare)| bare)
}

impl ContainerCheck<'_> {
    fn key(&self) -> ContainerKey {
        self.request.container_key(&self.container.name)
    }

    fn stored_state(&self) -> Option<&State> {
        self.request.status.state(&self.container.name)
    }

    fn attempt(&self) -> Option<&StopAttempt> {
        self.observed.state.attempt(self.request, &self.container.name)
    }

    /// Evaluates the container, which is not started if it is `blocked` by an earlier one.
    pub fn evaluate(&self, blocked: bool) -> ContainerEvaluation {
        if let Some(step) = self.result() {
            return step.into();
        }
        let evaluation = self.evaluate_unfinished();
        let has_started = self.attempt().is_some() || self.is_killed();
        if blocked && !has_started && !evaluation.step.is_final() {
            return ContainerStep::Waiting.into();
        }
        evaluation
    }

    fn evaluate_unfinished(&self) -> ContainerEvaluation {
        let container = match self.pod_container() {
            Ok(view) => view,
            Err(why) => return ContainerStep::Failed(why).into(),
        };
        let (scheme, newest) = match &self.observed.runtime {
            RuntimeObservation::Listed { scheme, containers } => (
                scheme,
                containers
                    .iter()
                    .find(|listed| listed.name == self.container.name),
            ),
            RuntimeObservation::Unknown(_) | RuntimeObservation::Unavailable(_) => {
                return self
                    .in_flight()
                    .unwrap_or_else(|| ContainerStep::RuntimeUnavailable.into());
            }
        };
        let Some(target) = self.target() else {
            let id = newest
                .map(|listed| format!("{scheme}://{}", listed.id))
                .or_else(|| last_container_id(container));
            let kill = newest.is_some_and(|listed| listed.state == RunState::Running);
            return id.map_or_else(|| ContainerStep::Starting.into(), |id| self.record(id, kill));
        };
        match newest {
            Some(listed) if listed.id != strip_scheme(target) => self.evaluate_replacement(listed, container),
            Some(listed) if listed.state == RunState::Running => self.evaluate_running(listed, container),
            Some(listed) if listed.state == RunState::Created => {
                self.in_flight().unwrap_or_else(|| ContainerStep::Starting.into())
            }
            // Kubelet's status may be slightly older than the list, or the list is not from kubelet's runtime.
            None if container.status.as_ref().is_some_and(|status| {
                status.running && strip_scheme(&status.container_id) == strip_scheme(target)
            }) =>
            {
                ContainerStep::Unlisted.into()
            }
            _ => self.evaluate_stopped(container),
        }
    }

    /// The final step, if it is stored in the status.
    fn result(&self) -> Option<ContainerStep> {
        let stored = self.stored_state()?;
        match stored.phase {
            Phase::Succeeded => Some(ContainerStep::Succeeded),
            Phase::Failed => Some(ContainerStep::Failed(stored.message.clone().unwrap_or_default())),
            _ => None,
        }
    }

    /// Whether a stop was intended, perhaps by a daemon that has ended.
    fn is_killed(&self) -> bool {
        self.stored_state().is_some_and(|state| state.is_killed)
    }

    /// Lets the ID be written before anything is done to the container.
    fn record(&self, id: String, will_stop: bool) -> ContainerEvaluation {
        if self.ending {
            return ContainerStep::Waiting.into();
        }
        ContainerEvaluation {
            record: Some(id),
            will_stop,
            ..ContainerStep::Recording.into()
        }
    }

    fn pod_container(&self) -> Result<&PodContainer, String> {
        let name = &self.container.name;
        match self.pod.container(name) {
            None => {
                let names: Vec<_> = self.pod.containers.iter().map(|c| c.name.as_str()).collect();
                Err(format!(
                    "the Pod has no container {name:?}; it has {}",
                    names.join(", ")
                ))
            }
            Some(view) if view.role == ContainerRole::Init => Err(format!(
                "{name:?} is an init container that runs once and cannot be recreated"
            )),
            Some(view) => Ok(view),
        }
    }

    /// ID of the container to be replaced, once it is certain: that in the status, otherwise that in the request,
    /// unless the request also replaces newer containers.
    fn target(&self) -> Option<&str> {
        if let Some(target) = self
            .stored_state()
            .and_then(|state| state.container_id.as_deref())
        {
            return Some(target);
        }
        // A cluster with OpenKruise's own CRDs drops our field. Then our state has it, and after a restart `isKilled`
        // shows that a stop was intended.
        if let Some(target) = self.observed.state.targets.get(&self.key()) {
            return Some(target);
        }
        let recorded = self.container.recorded_id.as_deref();
        recorded.filter(|_| !self.request.strategy.force_recreate || self.is_killed())
    }

    /// The old container runs: starts its stop, or continues it.
    fn evaluate_running(
        &self,
        observed: &ObservedContainer,
        container: &PodContainer,
    ) -> ContainerEvaluation {
        if let Some(decision) = self.in_flight() {
            return decision;
        }
        if observed.restarting {
            return ContainerStep::Restarting.into();
        }
        let attempt = self.attempt();
        // Kruise-manager may be ending the request because no daemon started it: only one of the two writes is stored.
        if let (None, true, Some(id)) = (attempt, time::is_late(self.request, self.now), self.target()) {
            return self.record(id.to_owned(), true);
        }
        if self.ending {
            return self.final_step().into();
        }
        let grace = self.request.strategy.termination_grace_period_seconds;
        let grace = time::bounded_seconds(grace.unwrap_or(self.pod.grace_period_seconds));
        let hook_done =
            grace.is_zero() || observed.hook_done || attempt.is_some_and(|attempt| attempt.hook_done);
        let run_hook = container.pre_stop.is_some() && !hook_done;
        let spent = attempt.map_or(Duration::ZERO, |attempt| attempt.grace_spent);
        let step = if run_hook {
            ContainerStep::Hook
        } else {
            ContainerStep::Stopping
        };
        ContainerEvaluation {
            stop: Some(StopAction {
                key: self.key(),
                request_name: self.request.name.clone(),
                target: observed.id.clone(),
                first_attempt: attempt.is_none_or(|attempt| attempt.started_at.is_none()),
                deadline: time::deadline(self.request).map(|at| time::to_mono(at, self.now)),
                run_hook,
                grace_period: grace_left(grace, spent),
            }),
            ..step.into()
        }
    }

    /// The last step of a container that could be stopped, if its request ends now.
    fn final_step(&self) -> ContainerStep {
        match self.attempt().map(|attempt| &attempt.stage) {
            Some(StopStage::Retry { error, .. }) => ContainerStep::Retry(error.clone()),
            Some(_) => ContainerStep::Interrupted,
            None if self.is_killed() => ContainerStep::Interrupted,
            None => ContainerStep::Waiting,
        }
    }

    /// The stop in progress, if any.
    fn in_flight(&self) -> Option<ContainerEvaluation> {
        let attempt = self.attempt()?;
        let step = match &attempt.stage {
            StopStage::Queued | StopStage::Hook | StopStage::Stopping
                if !attempt.in_progress && !self.ending =>
            {
                return None;
            }
            StopStage::Queued => ContainerStep::WaitingForSlot,
            StopStage::Hook => ContainerStep::Hook,
            StopStage::Stopping => ContainerStep::Stopping,
            StopStage::Refused(error) => ContainerStep::Failed(format!("kill container error: {error}")),
            StopStage::Retry { retry_at, error } if self.now.mono < *retry_at => {
                let step = ContainerStep::Retry(error.clone());
                return Some(ContainerEvaluation::until(step, *retry_at));
            }
            // The list of containers may be older than the response to the stop.
            StopStage::Stopped(at) if self.now.mono < *at + LIST_LAG => {
                let step = ContainerStep::Stopping;
                return Some(ContainerEvaluation::until(step, *at + LIST_LAG));
            }
            StopStage::Stopped(_) | StopStage::Retry { .. } => return None,
        };
        Some(step.into())
    }

    /// The old container has ended and has no successor.
    fn evaluate_stopped(&self, container: &PodContainer) -> ContainerEvaluation {
        if let Some(why) = self.not_restarted_reason(container) {
            return ContainerStep::Failed(why).into();
        }
        let Some(status) = container.status.as_ref() else {
            return ContainerStep::Stopped.into();
        };
        match &status.waiting {
            Some((reason, message)) if reason == "CrashLoopBackOff" => {
                let ended = status.last_termination.and_then(|ended| ended.finished_at);
                let until = time::back_off_until(message, ended, self.now);
                let message = match status.last_termination {
                    Some(Termination { code, .. }) => format!("{message}; it ended with exit code {code}"),
                    None => message.clone(),
                };
                ContainerStep::BackOff { until, message }.into()
            }
            Some((reason, message)) if reason != "ContainerCreating" && reason != "PodInitializing" => {
                let (reason, message) = (reason.clone(), message.clone());
                ContainerStep::StartFailed { reason, message }.into()
            }
            _ => match time::expected_back_off(status, self.now) {
                Some((step, left)) => ContainerEvaluation::until(step, self.now.mono + left),
                None => ContainerStep::Stopped.into(),
            },
        }
    }

    /// Why kubelet will not restart the container, if it will not.
    fn not_restarted_reason(&self, container: &PodContainer) -> Option<String> {
        if self.pod.terminal {
            return Some(format!("the Pod has ended, so {NOT_STARTED_AGAIN}"));
        }
        let code = container
            .status
            .as_ref()
            .and_then(PodContainerStatus::exit_code)?;
        if self.pod.will_restart(container, code)
            || self.pod.restarts_all_containers()
            || self.may_restart_all_containers()
        {
            return None;
        }
        let policy = self.pod.restart_policy(container);
        let rules = if container.restart_rules.is_empty() {
            ""
        } else {
            ", and no rule of restartPolicyRules is for that exit code"
        };
        Some(format!(
            "it ended with exit code {code} and {NOT_STARTED_AGAIN}: restartPolicy is {policy}{rules}"
        ))
    }

    /// Whether another container of the request is being stopped, whose end may make kubelet restart all containers of
    /// the Pod.
    fn may_restart_all_containers(&self) -> bool {
        self.pod.containers.iter().any(|other| {
            let running = other.status.as_ref().is_some_and(|status| status.running);
            let attempt = self.observed.state.attempt(self.request, &other.name);
            let stored = self.request.status.state(&other.name);
            other.name != self.container.name
                && other.may_restart_all_containers()
                && attempt.is_some_and(|attempt| attempt.in_progress || running)
                && stored.is_none_or(|state| !state.phase.is_finished())
        })
    }

    /// A new container has replaced the old one.
    fn evaluate_replacement(
        &self,
        observed: &ObservedContainer,
        container: &PodContainer,
    ) -> ContainerEvaluation {
        match observed.state {
            RunState::Created => return ContainerStep::Starting.into(),
            RunState::Exited => return self.evaluate_stopped(container),
            RunState::Running => {}
        }
        let is_ready =
            |status: &&PodContainerStatus| status.ready && strip_scheme(&status.container_id) == observed.id;
        let Some(status) = container.status.as_ref().filter(is_ready) else {
            return ContainerStep::NotReady.into();
        };
        let min_started = time::bounded_seconds(i64::from(self.request.strategy.min_started_seconds));
        let stopped = self.attempt().and_then(|attempt| attempt.started_at);
        let (started_at, running_since) = (status.started_at, observed.running_since);
        let age = time::running_for(started_at, running_since, self.request, stopped, self.now);
        match min_started.checked_sub(age) {
            Some(left) if !left.is_zero() => {
                let step = ContainerStep::WaitingMinStarted { left };
                ContainerEvaluation::until(step, self.now.mono + left)
            }
            _ => ContainerStep::Succeeded.into(),
        }
    }
}

/// The last ID (with scheme) of the container in kubelet's status.
fn last_container_id(container: &PodContainer) -> Option<String> {
    let id = &container.status.as_ref()?.container_id;
    (!id.is_empty()).then(|| id.clone())
}
