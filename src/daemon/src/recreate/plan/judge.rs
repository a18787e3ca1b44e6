//! One container of one request: where it is, and what may be done to it.

use std::time::Duration;

use k8s_openapi::api::core::v1::LifecycleHandler;

use super::time;
use super::types::{
    Act, Attempt, Hook, Key, Now, Observed, Request, RunState, RuntimeSight, Seen, Settled, Stage, Wanted,
    left,
};
use super::words::Step;
use crate::pods::{ContainerView, Ended, PodView, Role, StatusView};
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestContainerRecreateState as State, ContainerRecreateRequestPhase as Phase,
};

/// How long a container that was stopped may still be listed as running.
const LISTED_LATE: Duration = Duration::from_secs(1);

/// What is to be said of one container.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// It is done.
    Settled(Settled),
    /// Before anything is done to it, its ID must be in the status.
    Record {
        /// The ID, with scheme.
        id: String,
        /// Whether it runs, so that it will be stopped.
        kill: bool,
    },
    /// This may be begun.
    Ready {
        /// The container to act on, ID without scheme.
        target: String,
        /// What to do.
        act: Box<Act>,
    },
    /// It is on its way.
    Busy {
        /// Where it is.
        step: Step,
        /// When that can be expected to change without an event.
        again: Option<Duration>,
    },
}

/// All that a verdict looks at.
pub struct Case<'a> {
    pub request: &'a Request,
    pub wanted: &'a Wanted,
    pub pod: &'a PodView,
    pub seen: &'a Observed,
    pub now: Now,
    /// Whether the request ends now, so that nothing more is begun.
    pub over: bool,
}

/// An ID without its scheme.
pub fn bare(id: &str) -> &str {
    id.split_once("://").map_or(id, |(_, bare)| bare)
}

impl Case<'_> {
    pub fn key(&self) -> Key {
        Key {
            request: self.request.uid.clone(),
            container: self.wanted.name.clone(),
        }
    }

    pub fn stored(&self) -> Option<&State> {
        self.request.status.state(&self.wanted.name)
    }

    pub fn attempt(&self) -> Option<&Attempt> {
        self.seen.memory.attempts.get(&self.key())
    }

    /// Where the container is.
    pub fn judge(&self) -> Verdict {
        if let Some(settled) = self.settled() {
            return Verdict::Settled(settled);
        }
        let view = match self.view() {
            Ok(view) => view,
            Err(why) => return failed(why),
        };
        let (scheme, newest) = match &self.seen.runtime {
            RuntimeSight::Seen { scheme, containers } => (
                scheme,
                containers.iter().find(|seen| seen.name == self.wanted.name),
            ),
            RuntimeSight::Unknown(_) | RuntimeSight::Impossible(_) => {
                return self.in_flight().unwrap_or(busy(Step::Blind));
            }
        };
        let Some(target) = self.target() else {
            let id = newest
                .map(|seen| format!("{scheme}://{}", seen.id))
                .or_else(|| last_id(view));
            let kill = newest.is_some_and(|seen| seen.state == RunState::Running);
            return id.map_or(busy(Step::Starting), |id| Verdict::Record { id, kill });
        };
        match newest {
            Some(seen) if seen.id != bare(target) => self.replaced(seen, view),
            Some(seen) if seen.state == RunState::Running => self.running(seen, view),
            Some(seen) if seen.state == RunState::Created => {
                self.in_flight().unwrap_or_else(|| busy(Step::Starting))
            }
            // Kubelet's word may be a moment older than the list, or the list is not that of kubelet's runtime.
            None if view
                .status
                .as_ref()
                .is_some_and(|status| status.running && bare(&status.container_id) == bare(target)) =>
            {
                busy(Step::Unlisted)
            }
            _ => self.stopped(view),
        }
    }

    /// The end that is known already, here or at the API server.
    fn settled(&self) -> Option<Settled> {
        if let Some(settled) = self.seen.memory.settled.get(&self.key()) {
            return Some(settled.clone());
        }
        let stored = self.stored()?;
        match stored.phase {
            Phase::Succeeded => Some(Settled { failed: None }),
            Phase::Failed => Some(Settled {
                failed: Some(stored.message.clone().unwrap_or_default()),
            }),
            _ => None,
        }
    }

    fn view(&self) -> Result<&ContainerView, String> {
        let name = &self.wanted.name;
        match self.pod.container(name) {
            None => {
                let names: Vec<_> = self.pod.containers.iter().map(|c| c.name.as_str()).collect();
                Err(format!(
                    "the Pod has no container {name:?}; it has {}",
                    names.join(", ")
                ))
            }
            Some(view) if view.role == Role::Init => Err(format!(
                "{name:?} is an init container that runs once and cannot be recreated"
            )),
            Some(view) => Ok(view),
        }
    }

    /// ID of the container to be replaced, once that is certain: what the status says, else what the
    /// request says, unless it wants even a newer container replaced.
    fn target(&self) -> Option<&str> {
        let stored = self.stored();
        if let Some(target) = stored.and_then(|state| state.container_id.as_deref()) {
            return Some(target);
        }
        // A cluster with OpenKruise's own CRDs drops our field. Then our memory has it, and after a restart
        // `isKilled` says that something was about to be stopped.
        if let Some(target) = self.seen.memory.targets.get(&self.key()) {
            return Some(target);
        }
        let intended = stored.is_some_and(|state| state.is_killed);
        let recorded = self.wanted.recorded.as_deref();
        recorded.filter(|_| !self.request.force || intended)
    }

    /// The old container runs: begin to stop it, or go on.
    fn running(&self, seen: &Seen, view: &ContainerView) -> Verdict {
        if let Some(verdict) = self.in_flight() {
            return verdict;
        }
        if seen.restarting {
            return busy(Step::Restarting);
        }
        // Kruise-manager may be ending the request because no daemon took it up: only one of the two is stored.
        if let (None, true, Some(id)) = (self.attempt(), time::late(self.request, self.now), self.target()) {
            return Verdict::Record {
                id: id.to_owned(),
                kill: true,
            };
        }
        let grace = time::seconds(self.request.grace_seconds.unwrap_or(self.pod.grace_seconds));
        let attempt = self.attempt();
        let hooked = grace.is_zero() || attempt.is_some_and(|attempt| attempt.hooked);
        let act = Act {
            hook: view
                .pre_stop
                .as_ref()
                .filter(|_| !hooked)
                .map(|hook| self.hook(hook, view)),
            grace: left(grace, attempt.map_or(Duration::ZERO, |attempt| attempt.spent)),
        };
        Verdict::Ready {
            target: seen.id.clone(),
            act: Box::new(act),
        }
    }

    fn hook(&self, handler: &LifecycleHandler, view: &ContainerView) -> Hook {
        Hook {
            handler: handler.clone(),
            ports: view.ports.clone(),
            host: self.pod.ips.first().cloned(),
        }
    }

    /// What a request that ends now had come to with a container that could be acted upon.
    pub fn left_at(&self) -> Step {
        match self.attempt().map(|attempt| &attempt.stage) {
            Some(Stage::Retry { error, .. }) => Step::Retry(error.clone()),
            Some(_) => Step::Interrupted,
            None if self.stored().is_some_and(|state| state.is_killed) => Step::Interrupted,
            None => Step::Waiting,
        }
    }

    /// What the daemon itself is doing to the container, if it is at something.
    fn in_flight(&self) -> Option<Verdict> {
        let attempt = self.attempt()?;
        let step = match &attempt.stage {
            Stage::Queued | Stage::Hook | Stage::Stopping if !attempt.live && !self.over => return None,
            Stage::Queued => Step::Slot,
            Stage::Hook => Step::Hook,
            Stage::Stopping => Step::Stopping,
            Stage::Refused(error) => return Some(failed(format!("kill container error: {error}"))),
            Stage::Retry { at, error } if self.now.mono < *at => {
                return Some(Verdict::Busy {
                    step: Step::Retry(error.clone()),
                    again: Some(*at),
                });
            }
            // The list of containers may be older than the answer to the stop.
            Stage::Stopped(at) if self.now.mono < *at + LISTED_LATE => {
                return Some(Verdict::Busy {
                    step: Step::Stopping,
                    again: Some(*at + LISTED_LATE),
                });
            }
            Stage::Stopped(_) | Stage::Retry { .. } => return None,
        };
        Some(busy(step))
    }

    /// The old container has ended and there is no other.
    fn stopped(&self, view: &ContainerView) -> Verdict {
        if let Some(why) = self.never_again(view) {
            return failed(why);
        }
        let Some(status) = view.status.as_ref() else {
            return busy(Step::Stopped);
        };
        match &status.waiting {
            Some((reason, message)) if reason == "CrashLoopBackOff" => {
                let ended = status.ended.and_then(|ended| ended.finished);
                let until = time::back_off_until(message, ended, self.now);
                let message = match status.ended {
                    Some(Ended { code, .. }) => format!("{message}; it ended with exit code {code}"),
                    None => message.clone(),
                };
                busy(Step::BackOff { until, message })
            }
            Some((reason, message)) if reason != "ContainerCreating" && reason != "PodInitializing" => {
                busy(Step::Held {
                    reason: reason.clone(),
                    message: message.clone(),
                })
            }
            _ => match time::expected_back_off(status, self.now) {
                Some(hold) => Verdict::Busy {
                    step: Step::Expected {
                        until: hold.until,
                        span: hold.span,
                    },
                    again: Some(self.now.mono + hold.left),
                },
                None => busy(Step::Stopped),
            },
        }
    }

    /// Why kubelet will not start the container again, if it will not.
    fn never_again(&self, view: &ContainerView) -> Option<String> {
        if self.pod.ended {
            return Some("the Pod has ended, kubelet starts none of its containers again".to_owned());
        }
        let code = view.status.as_ref().and_then(StatusView::exit_code)?;
        if self.pod.starts_again(view, code) || self.pod.restarts_all() || self.may_restart_all() {
            return None;
        }
        let policy = self.pod.policy(view);
        let rules = if view.rules.is_empty() {
            ""
        } else {
            ", and no rule of restartPolicyRules is for that exit code"
        };
        Some(format!(
            "it ended with exit code {code} and kubelet does not start it again: restartPolicy is {policy}{rules}"
        ))
    }

    /// Whether another container of the request is being stopped, whose end may have kubelet start all of the Pod's again.
    fn may_restart_all(&self) -> bool {
        self.pod.containers.iter().any(|other| {
            let key = Key {
                container: other.name.clone(),
                ..self.key()
            };
            let runs = other.status.as_ref().is_some_and(|status| status.running);
            let attempt = self.seen.memory.attempts.get(&key);
            other.name != self.wanted.name
                && other.may_restart_all()
                && attempt.is_some_and(|attempt| attempt.live || runs)
                && !self.seen.memory.settled.contains_key(&key)
        })
    }

    /// Another container has taken the place of the old one.
    fn replaced(&self, seen: &Seen, view: &ContainerView) -> Verdict {
        match seen.state {
            RunState::Created => return busy(Step::Starting),
            RunState::Exited => return self.stopped(view),
            RunState::Running => {}
        }
        let ready = view
            .status
            .as_ref()
            .is_some_and(|status| status.ready && bare(&status.container_id) == seen.id);
        if !ready {
            return busy(Step::NotReady);
        }
        let least = time::seconds(self.request.min_started_seconds);
        let stopped = self.attempt().and_then(|attempt| attempt.begun);
        let age = time::running_for(seen, self.request, stopped, self.now);
        match least.checked_sub(age) {
            Some(left) if !left.is_zero() => Verdict::Busy {
                step: Step::Young { left },
                again: Some(self.now.mono + left),
            },
            _ => Verdict::Settled(Settled { failed: None }),
        }
    }
}

/// The ID (with scheme) that kubelet says the container has or had.
fn last_id(view: &ContainerView) -> Option<String> {
    let id = &view.status.as_ref()?.container_id;
    (!id.is_empty()).then(|| id.clone())
}

fn busy(step: Step) -> Verdict {
    Verdict::Busy { step, again: None }
}

fn failed(why: String) -> Verdict {
    Verdict::Settled(Settled { failed: Some(why) })
}
