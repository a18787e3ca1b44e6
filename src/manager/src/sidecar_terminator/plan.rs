//! Which sidecars of a Pod are terminated next, and which phase the Pod gets.
//!
//! Once all main containers have ended, a ContainerRecreateRequest stops the sidecars whose exit code counts. Where
//! kubelet would not let the Pod end after that, its phase is set, and kubelet stops what is left:
//!
//! * a sidecar whose exit code is to be ignored has not ended;
//! * a sidecar was stopped and kubelet restarts it (`OnFailure`), could not be stopped, or never started.

use jiff::{SignedDuration, Timestamp};

use crate::view::{JobContainer, JobContainerState, JobPod, PodView};
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::time::MAX_CLOCK_CORRECTION;

/// How long kubelet may take to report that a container was stopped.
const STATUS_DELAY: SignedDuration = SignedDuration::from_secs(10);
/// Time that a request gets in addition to the grace period of the Pod, in seconds.
const REQUEST_SECONDS: i64 = 60;
/// The longest grace period, in seconds: a day.
const MAX_GRACE_SECONDS: i64 = 86_400;

/// The request that stops the sidecars of a Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// There is none.
    Missing,
    /// It has not ended.
    Active,
    /// It ended at this time.
    Ended(Timestamp),
}

impl From<&ContainerRecreateRequest> for Request {
    fn from(request: &ContainerRecreateRequest) -> Self {
        let completion = request
            .status
            .as_ref()
            .and_then(|status| status.completion_time.as_ref());
        completion.map_or(Self::Active, |time| Self::Ended(time.0))
    }
}

/// Phase of a Pod that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndPhase {
    /// All main containers ended with exit code 0.
    Succeeded,
    /// Some did not.
    Failed,
}

/// The next step for a Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing to do until the Pod or a request changes.
    Wait,
    /// Nothing to do before this time.
    WaitUntil(Timestamp),
    /// Stop these containers with a request.
    Stop(Vec<Box<str>>),
    /// Give the Pod this phase.
    SetPhase(EndPhase),
}

/// The Pod if its main containers have ended and it is not being deleted.
#[must_use]
pub fn ending_job(pod: &PodView) -> Option<&JobPod> {
    let job = pod.job.as_deref().filter(|_| !pod.terminating)?;
    end_phase(&job.mains).map(|_| job)
}

/// Plans the next step for a Pod.
#[must_use]
pub fn plan(pod: &JobPod, terminal: bool, request: Request, now: Timestamp) -> Step {
    let Some(phase) = end_phase(&pod.mains).filter(|_| !terminal) else {
        return Step::Wait;
    };
    let counted = running(pod, |sidecar| !sidecar.ignore_exit_code);
    match request {
        Request::Active if !counted.is_empty() => return Step::Wait,
        Request::Missing if !counted.is_empty() => return Step::Stop(counted),
        Request::Ended(time) if !counted.is_empty() => {
            let reported = time.saturating_add(STATUS_DELAY).unwrap_or(time);
            // A time far ahead is OpenKruise's, by the node's clock, or the API server's clock was set back.
            let is_current = time.duration_since(now) <= MAX_CLOCK_CORRECTION;
            if is_current && now < reported {
                return Step::WaitUntil(reported);
            }
        }
        // The request of OpenKruise's daemon does not end under `Never`.
        Request::Active | Request::Missing | Request::Ended(_) => {}
    }
    let ended = |sidecar: &JobContainer| matches!(sidecar.state, JobContainerState::Ended(_));
    if pod.sidecars.iter().all(ended) {
        return Step::Wait;
    }
    Step::SetPhase(phase)
}

/// The phase that the main containers result in, if all have ended. Without any, the Pod is no job.
#[must_use]
pub fn end_phase(mains: &[JobContainer]) -> Option<EndPhase> {
    let codes = mains.iter().map(|main| match main.state {
        JobContainerState::Ended(code) => Some(code),
        JobContainerState::Waiting | JobContainerState::Running => None,
    });
    let codes = codes
        .collect::<Option<Vec<_>>>()
        .filter(|codes| !codes.is_empty())?;
    Some(if codes.iter().all(|code| *code == 0) {
        EndPhase::Succeeded
    } else {
        EndPhase::Failed
    })
}

/// The running sidecars that are selected.
#[must_use]
pub fn running(pod: &JobPod, is_selected: impl Fn(&JobContainer) -> bool) -> Vec<Box<str>> {
    let sidecars = pod.sidecars.iter();
    let running =
        sidecars.filter(|sidecar| sidecar.state == JobContainerState::Running && is_selected(sidecar));
    running.map(|sidecar| sidecar.name.clone()).collect()
}

/// Deadline of a request, in seconds: a node that is gone must not hold it open for ever.
#[must_use]
pub fn request_deadline(pod: &JobPod) -> i64 {
    pod.grace_period_seconds.clamp(0, MAX_GRACE_SECONDS) + REQUEST_SECONDS
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ENDED: JobContainerState = JobContainerState::Ended(0);
    const FAILED: JobContainerState = JobContainerState::Ended(1);
    const RUNNING: JobContainerState = JobContainerState::Running;
    const WAITING: JobContainerState = JobContainerState::Waiting;

    fn at(second: i64) -> Timestamp {
        Timestamp::UNIX_EPOCH + SignedDuration::from_secs(second)
    }

    fn pod(mains: &[JobContainerState], sidecars: &[(&str, bool, JobContainerState)]) -> JobPod {
        let main = |state: &JobContainerState| JobContainer {
            state: *state,
            ..JobContainer::default()
        };
        let sidecar = |(name, ignore_exit_code, state): &(&str, bool, JobContainerState)| JobContainer {
            name: (*name).into(),
            ignore_exit_code: *ignore_exit_code,
            state: *state,
        };
        JobPod {
            mains: mains.iter().map(main).collect(),
            sidecars: sidecars.iter().map(sidecar).collect(),
            ..JobPod::default()
        }
    }

    fn stop(names: &[&str]) -> Step {
        Step::Stop(names.iter().map(|name| (*name).into()).collect())
    }

    #[test]
    fn sidecars_stop_after_the_main_containers() {
        let log = [("log", false, RUNNING), ("mesh", true, RUNNING)];
        let (missing, ended, now) = (Request::Missing, Request::Ended(at(100)), at(200));
        type Case<'a> = (
            &'a [JobContainerState],
            &'a [(&'a str, bool, JobContainerState)],
            Request,
            Step,
        );
        let cases: [Case<'_>; 15] = [
            (&[RUNNING, ENDED], &log, missing, Step::Wait),
            (&[WAITING], &log, missing, Step::Wait),
            (&[], &log, missing, Step::Wait),
            (&[ENDED, FAILED], &log, missing, stop(&["log"])),
            (&[ENDED], &log, Request::Active, Step::Wait),
            (&[ENDED], &log, Request::Ended(at(195)), Step::WaitUntil(at(205))),
            (
                &[ENDED],
                &log,
                Request::Ended(at(4000)),
                Step::SetPhase(EndPhase::Succeeded),
            ),
            // It was restarted, or could not be stopped.
            (&[ENDED], &log, ended, Step::SetPhase(EndPhase::Succeeded)),
            (
                &[ENDED],
                &[("log", false, FAILED), ("mesh", true, RUNNING)],
                ended,
                Step::SetPhase(EndPhase::Succeeded),
            ),
            (
                &[ENDED, FAILED],
                &[("mesh", true, RUNNING)],
                missing,
                Step::SetPhase(EndPhase::Failed),
            ),
            // Kubelet ends these Pods.
            (&[ENDED], &[("log", false, FAILED)], ended, Step::Wait),
            (
                &[ENDED],
                &[("log", false, ENDED), ("mesh", true, FAILED)],
                missing,
                Step::Wait,
            ),
            // It never started, or kubelet restarts it.
            (
                &[ENDED],
                &[("log", false, WAITING)],
                missing,
                Step::SetPhase(EndPhase::Succeeded),
            ),
            (
                &[ENDED],
                &[("log", false, WAITING), ("b", false, RUNNING)],
                missing,
                stop(&["b"]),
            ),
            (
                &[ENDED],
                &[("mesh", true, WAITING)],
                missing,
                Step::SetPhase(EndPhase::Succeeded),
            ),
        ];
        for (mains, sidecars, request, expected) in cases {
            let step = plan(&pod(mains, sidecars), false, request, now);
            assert_eq!(step, expected, "{mains:?} {sidecars:?} {request:?}");
            assert_eq!(
                plan(&pod(mains, sidecars), true, request, now),
                Step::Wait,
                "kubelet ends it"
            );
        }
    }

    #[test]
    fn deadline_of_a_request_is_bounded() {
        for (grace, expected) in [(30, 90), (-1, 60), (i64::MAX, 86_460)] {
            let pod = JobPod {
                grace_period_seconds: grace,
                ..JobPod::default()
            };
            assert_eq!(request_deadline(&pod), expected);
        }
    }

    fn any_state() -> impl Strategy<Value = JobContainerState> {
        prop_oneof![
            Just(WAITING),
            Just(RUNNING),
            (-1i32..3).prop_map(JobContainerState::Ended)
        ]
    }

    /// Kubelet: what is stopped ends with this code, or is restarted.
    fn kubelet_stops(sidecar: &mut JobContainer, code: i32, restarts: bool) {
        let restarted = restarts && code != 0;
        sidecar.state = if restarted {
            RUNNING
        } else {
            JobContainerState::Ended(code)
        };
    }

    proptest! {
        /// Whatever the sidecars do, the Pod ends, after at most one request, and no main container is stopped.
        #[test]
        fn every_job_ends(
            mains in prop::collection::vec(0i32..3, 1..3),
            sidecars in prop::collection::vec((any::<bool>(), any_state(), 0i32..3, any::<bool>()), 1..4),
            restarts in any::<bool>(),
        ) {
            let mains: Vec<_> = mains.into_iter().map(JobContainerState::Ended).collect();
            let names = ["a", "b", "c"];
            let listed: Vec<_> =
                names.iter().zip(&sidecars).map(|(name, (ignored, state, ..))| (*name, *ignored, *state)).collect();
            let mut pod = pod(&mains, &listed);
            let (mut now, mut terminal, mut request) = (at(0), false, Request::Missing);
            for _ in 0..10 {
                match plan(&pod, terminal, request, now) {
                    Step::Wait => break,
                    Step::WaitUntil(time) => {
                        prop_assert!(time > now);
                        now = time;
                    }
                    Step::Stop(stopped) => {
                        prop_assert_eq!(request, Request::Missing);
                        request = Request::Ended(now);
                        for (sidecar, (_, _, code, stops)) in pod.sidecars.iter_mut().zip(&sidecars) {
                            if stopped.contains(&sidecar.name) && *stops {
                                kubelet_stops(sidecar, *code, restarts);
                            }
                        }
                    }
                    Step::SetPhase(phase) => {
                        prop_assert!(!terminal);
                        prop_assert_eq!(Some(phase), end_phase(&pod.mains));
                        terminal = true;
                    }
                }
            }
            let all_ended = pod.sidecars.iter().all(|one| matches!(one.state, JobContainerState::Ended(_)));
            prop_assert!(terminal || all_ended, "{:?}", pod);
        }
    }
}
