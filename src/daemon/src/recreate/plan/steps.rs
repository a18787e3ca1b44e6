//! The states of the state machine and their messages.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;

use kruise_api::container_recreate_request::ContainerRecreateRequestPhase as Phase;

/// Why a request waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// A different request for the Pod is first.
    Queued {
        /// Name of that request; for the next in the queue only.
        behind: Option<String>,
    },
    /// The manager has not removed the Pod from its Services yet.
    Unready,
    /// The Pod is not ready; its clients get time to notice.
    UnreadyGrace {
        /// When the wait ends, by the API server's clock.
        until: Timestamp,
    },
    /// The Pod could not be read.
    PodUnknown(String),
    /// The containers could not be read.
    RuntimeUnknown(String),
}

impl WaitReason {
    /// The reason of condition `Waiting`.
    #[must_use]
    pub fn condition_reason(&self) -> &'static str {
        match self {
            Self::Queued { .. } => "Queued",
            Self::Unready | Self::UnreadyGrace { .. } => "PreparingPod",
            Self::PodUnknown(_) => "PodUnreadable",
            Self::RuntimeUnknown(_) => "RuntimeNotReady",
        }
    }
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Queued { behind: Some(first) } => {
                write!(f, "waiting for ContainerRecreateRequest {first} to end")
            }
            Self::Queued { behind: None } => {
                f.write_str("waiting for earlier ContainerRecreateRequests of the Pod to end")
            }
            // Also true in the seconds after the condition was set, for which no extra write is done.
            Self::Unready => f.write_str(
                "kruise-manager begins the grace period (condition PreRecreateGrace) before containers are stopped",
            ),
            Self::UnreadyGrace { until } => {
                write!(
                    f,
                    "the grace period runs; the containers will be stopped at {until:.0}"
                )
            }
            Self::PodUnknown(why) => write!(f, "waiting to read the Pod: {why}"),
            Self::RuntimeUnknown(why) => write!(f, "waiting for the container runtime: {why}"),
        }
    }
}

/// The step of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerStep {
    /// Not started.
    Waiting,
    /// The ID of the container to replace is being recorded before the stop.
    Recording,
    /// All stop slots of the node are occupied.
    WaitingForSlot,
    /// The preStop hook runs.
    Hook,
    /// TERM was sent.
    Stopping,
    /// Its stop was started by a daemon that has ended since.
    Interrupted,
    /// It is being restarted for its environment, which will replace it.
    Restarting,
    /// Kubelet reports that it runs, but the runtime does not list it.
    Unlisted,
    /// The runtime failed to stop it.
    Retry(String),
    /// It has stopped, and kubelet should start the next one.
    Stopped,
    /// Kubelet delays the next start.
    BackOff {
        /// When it starts, by the API server's clock; none if kubelet does not report it.
        until: Option<Timestamp>,
        /// Kubelet's message.
        message: String,
    },
    /// Kubelet will probably delay the next start, but has not reported it yet.
    BackOffExpected {
        /// When it should start, by the API server's clock.
        until: Timestamp,
        /// Length of the whole delay.
        span: Duration,
    },
    /// Kubelet cannot start the next one.
    StartFailed {
        /// Kubelet's reason.
        reason: String,
        /// Kubelet's message.
        message: String,
    },
    /// The next one exists and does not run yet.
    Starting,
    /// The next one runs and is not ready.
    NotReady,
    /// The next one is ready and must stay ready for some time.
    WaitingMinStarted {
        /// Remaining time.
        left: Duration,
    },
    /// The runtime does not answer.
    RuntimeUnavailable,
    /// Done.
    Succeeded,
    /// Given up, with the reason.
    Failed(String),
}

impl fmt::Display for ContainerStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waiting => f.write_str("not started"),
            Self::Recording => f.write_str("recording which container to replace"),
            Self::WaitingForSlot => f.write_str("waiting for a free slot to stop containers on this node"),
            Self::Hook => f.write_str("preStop hook is running"),
            Self::Stopping => f.write_str("TERM sent, waiting for the container to end"),
            Self::Interrupted => f.write_str("stopping was interrupted by a restart of kruise-daemon"),
            Self::Restarting => f.write_str("it is being restarted for its changed environment"),
            Self::Unlisted => {
                f.write_str("kubelet reports it as running, but the container runtime does not list it")
            }
            Self::Retry(error) => write!(f, "failed to stop; will retry: {error}"),
            Self::Stopped => f.write_str("stopped, waiting for kubelet to start it again"),
            Self::BackOff {
                until: Some(until),
                message,
            } => {
                write!(f, "kubelet holds it back until {until:.0}: {message}")
            }
            Self::BackOff { until: None, message } => write!(f, "kubelet holds it back: {message}"),
            Self::BackOffExpected { until, span } => write!(
                f,
                "kubelet is expected to hold it back until {until:.0}, its restart back-off of {} s",
                span.as_secs()
            ),
            Self::StartFailed { reason, message } if message.is_empty() => {
                write!(f, "kubelet cannot start it: {reason}")
            }
            Self::StartFailed { reason, message } => {
                write!(f, "kubelet cannot start it: {reason}: {message}")
            }
            Self::Starting => f.write_str("starting"),
            Self::NotReady => f.write_str("running, waiting for it to be ready"),
            Self::WaitingMinStarted { .. } => f.write_str("ready, waiting for minStartedSeconds"),
            Self::RuntimeUnavailable => f.write_str("waiting for the container runtime"),
            Self::Succeeded => f.write_str("recreated"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

impl ContainerStep {
    /// Whether nothing follows it.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed(_))
    }

    /// The phase of a container in this step.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self {
            Self::Waiting | Self::RuntimeUnavailable => Phase::Pending,
            Self::Succeeded => Phase::Succeeded,
            Self::Failed(_) => Phase::Failed,
            _ => Phase::Recreating,
        }
    }

    /// The message that replaces [`ContainerStep::at_deadline`] once a stop that ran at the deadline has ended.
    #[must_use]
    pub fn after_deadline(error: Option<&str>) -> String {
        let result = match error {
            None => "it was being stopped, and was stopped after that".to_owned(),
            Some(error) => format!("it was being stopped, which failed after that: {error}"),
        };
        format!("activeDeadlineSeconds passed: {result}")
    }

    /// The message for a container that was in this step at the deadline.
    #[must_use]
    pub fn at_deadline(&self) -> String {
        let suffix = match self {
            Self::Hook => "; the hook continues, then TERM is sent",
            Self::Stopping => "; KILL follows at the end of the grace period",
            _ => "",
        };
        format!("activeDeadlineSeconds passed: {}{suffix}", self.progress_text())
    }

    /// The message about what was done to the container up to this step.
    #[must_use]
    pub fn progress_text(&self) -> String {
        let text = match self {
            Self::Waiting | Self::Recording | Self::WaitingForSlot => "the container had not been touched",
            Self::Hook => "its preStop hook was running",
            Self::Stopping => "TERM had been sent",
            Self::Restarting => "it was being restarted for its changed environment",
            Self::Interrupted => {
                "stopping it was interrupted by a restart of kruise-daemon; TERM may have been sent and is not sent \
                 again"
            }
            Self::Stopped => "it had been stopped and kubelet had not started it again",
            Self::Starting => "it had been stopped and the new container was starting",
            Self::NotReady => "the new container was running but not ready",
            Self::RuntimeUnavailable => "the container runtime did not answer",
            Self::Retry(error) => return format!("stopping it had failed: {error}"),
            Self::BackOff { .. } | Self::BackOffExpected { .. } | Self::StartFailed { .. } => {
                return format!("it had been stopped; {self}");
            }
            Self::WaitingMinStarted { left } => {
                let seconds = left.as_secs() + u64::from(left.subsec_nanos() > 0);
                return format!("the new container was ready, {seconds} s short of minStartedSeconds");
            }
            Self::Unlisted | Self::Succeeded | Self::Failed(_) => return self.to_string(),
        };
        text.to_owned()
    }
}
