//! One container of one request: its step, and which actions are allowed.

use std::time::Duration;

use k8s_openapi::api::core::v1::LifecycleHandler;

use super::steps::ContainerStep;
use super::time;
use super::types::{
    Clocks, ContainerKey, ContainerResult, Observed, ObservedContainer, PreStopHook, RecreateRequest,
    RequestedContainer, RunState, RuntimeObservation, StopAttempt, StopParams, StopStage, grace_left,
};
use crate::pods::{ContainerRole, NodePod, PodContainer, PodContainerStatus, Termination};
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestContainerRecreateState as State, ContainerRecreateRequestPhase as Phase,
    NOT_STARTED_AGAIN,
};

/// How long a stopped container may still be listed as running.
const LIST_LAG: Duration = Duration::from_secs(1);

/// The decision for one container.
#[derive(Clone, Debug, PartialEq)]
pub enum ContainerDecision {
    /// The container is done.
    Done(ContainerResult),
    /// The container's ID must be in the status before anything is done to it.
    Record {
        /// The ID, with scheme.
        id: String,
        /// Whether it runs, so that it will be stopped.
        kill: bool,
    },
    /// The stop may start.
    Ready {
        /// Container to stop, ID without scheme.
        target: String,
        /// How to stop it.
        params: Box<StopParams>,
    },
    /// The container is in progress.
    InProgress {
        /// The current step.
        step: ContainerStep,
        /// When the step may change without an event.
        recheck_at: Option<Duration>,
    },
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
    pub fn key(&self) -> ContainerKey {
        self.request.container_key(&self.container.name)
    }

    pub fn stored_state(&self) -> Option<&State> {
        self.request.status.state(&self.container.name)
    }

    pub fn attempt(&self) -> Option<&StopAttempt> {
        self.observed.state.attempts.get(&self.key())
    }

    /// Evaluates the container.
    pub fn evaluate(&self) -> ContainerDecision {
        if let Some(settled) = self.result() {
            return ContainerDecision::Done(settled);
        }
        let container = match self.pod_container() {
            Ok(view) => view,
            Err(why) => return failed(why),
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
                    .unwrap_or(in_progress(ContainerStep::RuntimeUnavailable));
            }
        };
        let Some(target) = self.target() else {
            let id = newest
                .map(|listed| format!("{scheme}://{}", listed.id))
                .or_else(|| last_container_id(container));
            let kill = newest.is_some_and(|listed| listed.state == RunState::Running);
            return id.map_or(in_progress(ContainerStep::Starting), |id| {
                ContainerDecision::Record { id, kill }
            });
        };
        match newest {
            Some(listed) if listed.id != strip_scheme(target) => self.evaluate_replacement(listed, container),
            Some(listed) if listed.state == RunState::Running => self.evaluate_running(listed, container),
            Some(listed) if listed.state == RunState::Created => self
                .in_flight()
                .unwrap_or_else(|| in_progress(ContainerStep::Starting)),
            // Kubelet's status may be slightly older than the list, or the list is not from kubelet's runtime.
            None if container.status.as_ref().is_some_and(|status| {
                status.running && strip_scheme(&status.container_id) == strip_scheme(target)
            }) =>
            {
                in_progress(ContainerStep::Unlisted)
            }
            _ => self.evaluate_stopped(container),
        }
    }

    /// The final result, if it is cached here or stored in the status.
    fn result(&self) -> Option<ContainerResult> {
        if let Some(settled) = self.observed.state.results.get(&self.key()) {
            return Some(settled.clone());
        }
        let stored = self.stored_state()?;
        match stored.phase {
            Phase::Succeeded => Some(ContainerResult { failed: None }),
            Phase::Failed => Some(ContainerResult {
                failed: Some(stored.message.clone().unwrap_or_default()),
            }),
            _ => None,
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
        let stored = self.stored_state();
        if let Some(target) = stored.and_then(|state| state.container_id.as_deref()) {
            return Some(target);
        }
        // A cluster with OpenKruise's own CRDs drops our field. Then our state has it, and after a restart `isKilled`
        // shows that a stop was intended.
        if let Some(target) = self.observed.state.targets.get(&self.key()) {
            return Some(target);
        }
        let stop_intended = stored.is_some_and(|state| state.is_killed);
        let recorded = self.container.recorded_id.as_deref();
        recorded.filter(|_| !self.request.force || stop_intended)
    }

    /// The old container runs: starts its stop, or continues it.
    fn evaluate_running(&self, observed: &ObservedContainer, container: &PodContainer) -> ContainerDecision {
        if let Some(decision) = self.in_flight() {
            return decision;
        }
        if observed.restarting {
            return in_progress(ContainerStep::Restarting);
        }
        // Kruise-manager may be ending the request because no daemon started it: only one of the two writes is stored.
        if let (None, true, Some(id)) = (
            self.attempt(),
            time::is_late(self.request, self.now),
            self.target(),
        ) {
            return ContainerDecision::Record {
                id: id.to_owned(),
                kill: true,
            };
        }
        let grace = time::bounded_seconds(
            self.request
                .grace_seconds
                .unwrap_or(self.pod.grace_period_seconds),
        );
        let attempt = self.attempt();
        let hook_done = grace.is_zero() || attempt.is_some_and(|attempt| attempt.hook_done);
        let params = StopParams {
            hook: container
                .pre_stop
                .as_ref()
                .filter(|_| !hook_done)
                .map(|hook| self.pre_stop_hook(hook, container)),
            grace_period: grace_left(
                grace,
                attempt.map_or(Duration::ZERO, |attempt| attempt.grace_spent),
            ),
        };
        ContainerDecision::Ready {
            target: observed.id.clone(),
            params: Box::new(params),
        }
    }

    fn pre_stop_hook(&self, handler: &LifecycleHandler, container: &PodContainer) -> PreStopHook {
        PreStopHook {
            handler: handler.clone(),
            ports: container.ports.clone(),
            host: self.pod.ips.first().cloned(),
        }
    }

    /// The last step of a container that could be stopped, if its request ends now.
    pub fn final_step(&self) -> ContainerStep {
        match self.attempt().map(|attempt| &attempt.stage) {
            Some(StopStage::Retry { error, .. }) => ContainerStep::Retry(error.clone()),
            Some(_) => ContainerStep::Interrupted,
            None if self.stored_state().is_some_and(|state| state.is_killed) => ContainerStep::Interrupted,
            None => ContainerStep::Waiting,
        }
    }

    /// The stop in progress, if any.
    fn in_flight(&self) -> Option<ContainerDecision> {
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
            StopStage::Refused(error) => return Some(failed(format!("kill container error: {error}"))),
            StopStage::Retry { retry_at: at, error } if self.now.mono < *at => {
                return Some(ContainerDecision::InProgress {
                    step: ContainerStep::Retry(error.clone()),
                    recheck_at: Some(*at),
                });
            }
            // The list of containers may be older than the response to the stop.
            StopStage::Stopped(at) if self.now.mono < *at + LIST_LAG => {
                return Some(ContainerDecision::InProgress {
                    step: ContainerStep::Stopping,
                    recheck_at: Some(*at + LIST_LAG),
                });
            }
            StopStage::Stopped(_) | StopStage::Retry { .. } => return None,
        };
        Some(in_progress(step))
    }

    /// The old container has ended and has no successor.
    fn evaluate_stopped(&self, container: &PodContainer) -> ContainerDecision {
        if let Some(why) = self.not_restarted_reason(container) {
            return failed(why);
        }
        let Some(status) = container.status.as_ref() else {
            return in_progress(ContainerStep::Stopped);
        };
        match &status.waiting {
            Some((reason, message)) if reason == "CrashLoopBackOff" => {
                let ended = status.last_termination.and_then(|ended| ended.finished_at);
                let until = time::back_off_until(message, ended, self.now);
                let message = match status.last_termination {
                    Some(Termination { code, .. }) => format!("{message}; it ended with exit code {code}"),
                    None => message.clone(),
                };
                in_progress(ContainerStep::BackOff { until, message })
            }
            Some((reason, message)) if reason != "ContainerCreating" && reason != "PodInitializing" => {
                in_progress(ContainerStep::StartFailed {
                    reason: reason.clone(),
                    message: message.clone(),
                })
            }
            _ => match time::expected_back_off(status, self.now) {
                Some((step, left)) => ContainerDecision::InProgress {
                    step,
                    recheck_at: Some(self.now.mono + left),
                },
                None => in_progress(ContainerStep::Stopped),
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
            let key = self.request.container_key(&other.name);
            let running = other.status.as_ref().is_some_and(|status| status.running);
            let attempt = self.observed.state.attempts.get(&key);
            other.name != self.container.name
                && other.may_restart_all_containers()
                && attempt.is_some_and(|attempt| attempt.in_progress || running)
                && !self.observed.state.results.contains_key(&key)
        })
    }

    /// A new container has replaced the old one.
    fn evaluate_replacement(
        &self,
        observed: &ObservedContainer,
        container: &PodContainer,
    ) -> ContainerDecision {
        match observed.state {
            RunState::Created => return in_progress(ContainerStep::Starting),
            RunState::Exited => return self.evaluate_stopped(container),
            RunState::Running => {}
        }
        let ready = container
            .status
            .as_ref()
            .is_some_and(|status| status.ready && strip_scheme(&status.container_id) == observed.id);
        if !ready {
            return in_progress(ContainerStep::NotReady);
        }
        let min_started = time::bounded_seconds(self.request.min_started_seconds);
        let stopped = self.attempt().and_then(|attempt| attempt.started_at);
        let age = time::running_for(observed, self.request, stopped, self.now);
        match min_started.checked_sub(age) {
            Some(left) if !left.is_zero() => ContainerDecision::InProgress {
                step: ContainerStep::WaitingMinStarted { left },
                recheck_at: Some(self.now.mono + left),
            },
            _ => ContainerDecision::Done(ContainerResult { failed: None }),
        }
    }
}

/// The last ID (with scheme) of the container in kubelet's status.
fn last_container_id(container: &PodContainer) -> Option<String> {
    let id = &container.status.as_ref()?.container_id;
    (!id.is_empty()).then(|| id.clone())
}

fn in_progress(step: ContainerStep) -> ContainerDecision {
    ContainerDecision::InProgress {
        step,
        recheck_at: None,
    }
}

fn failed(why: String) -> ContainerDecision {
    ContainerDecision::Done(ContainerResult { failed: Some(why) })
}
