//! Which sidecars of a Pod are terminated next, and which phase the Pod gets.
//!
//! Once all main containers have ended, a ContainerRecreateRequest stops the sidecars. Where kubelet would not let the
//! Pod end after that, its phase is set, and what is left is stopped:
//!
//! * a sidecar whose exit code is to be ignored has not ended;
//! * a sidecar was stopped and kubelet restarts it (`OnFailure`), could not be stopped, or never started.

use jiff::{SignedDuration, Timestamp};

use crate::view::{JobContainer, JobContainerState, JobPod, PodView};
use kruise_api::container_recreate_request::ContainerRecreateRequest;

/// Requests for one Pod: before it gets its phase, and after that. What they do not stop, kubelet does.
pub const MAX_REQUESTS: usize = 2;
/// How long kubelet may take to report that a container was stopped, and to see a phase that was set.
const STATUS_DELAY: SignedDuration = SignedDuration::from_secs(10);
/// Time that a request gets in addition to the grace period of the Pod, in seconds.
const REQUEST_SECONDS: i64 = 60;
/// The longest grace period, in seconds: a day.
const MAX_GRACE_SECONDS: i64 = 86_400;

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

/// Plans the next step for a Pod. `requests` are when those that were created for it ended, if they have.
#[must_use]
pub fn plan(pod: &JobPod, terminal: bool, requests: &[Option<Timestamp>], now: Timestamp) -> Step {
    let Some(phase) = end_phase(&pod.mains) else {
        return Step::Wait;
    };
    let Some(completed) = requests.iter().copied().collect::<Option<Vec<_>>>() else {
        return Step::Wait;
    };
    if terminal {
        // Kubelet stops the containers of a Pod that has ended, though up to a minute later than a request does.
        let running = running(pod, |_| true);
        let marked_at = pod
            .marked_at
            .filter(|_| !running.is_empty() && requests.len() < MAX_REQUESTS);
        let Some(marked_at) = marked_at else {
            return Step::Wait;
        };
        // A kubelet that has not seen the phase yet would replace it by one of the exit codes.
        let seen_at = marked_at.saturating_add(STATUS_DELAY).unwrap_or(marked_at);
        return if now < seen_at {
            Step::WaitUntil(seen_at)
        } else {
            Step::Stop(running)
        };
    }
    let counted = running(pod, |sidecar| !sidecar.ignore_exit_code);
    if !counted.is_empty() {
        let Some(last) = completed.into_iter().max() else {
            return Step::Stop(counted);
        };
        let reported = last.saturating_add(STATUS_DELAY).unwrap_or(last);
        if now < reported {
            return Step::WaitUntil(reported);
        }
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

fn running(pod: &JobPod, is_selected: impl Fn(&JobContainer) -> bool) -> Vec<Box<str>> {
    let sidecars = pod.sidecars.iter();
    let running =
        sidecars.filter(|sidecar| sidecar.state == JobContainerState::Running && is_selected(sidecar));
    running.map(|sidecar| sidecar.name.clone()).collect()
}

/// When the request ended, if it has.
#[must_use]
pub fn completion(request: &ContainerRecreateRequest) -> Option<Timestamp> {
    let status = request.status.as_ref()?;
    status.completion_time.as_ref().map(|time| time.0)
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
        let (done, now) = (Some(at(100)), at(200));
        type Case<'a> = (
            &'a [JobContainerState],
            &'a [(&'a str, bool, JobContainerState)],
            &'a [Option<Timestamp>],
            Step,
        );
        let cases: [Case<'_>; 14] = [
            (&[RUNNING, ENDED], &log, &[], Step::Wait),
            (&[WAITING], &log, &[], Step::Wait),
            (&[], &log, &[], Step::Wait),
            (&[ENDED, FAILED], &log, &[], stop(&["log"])),
            (&[ENDED], &log, &[None], Step::Wait),
            (&[ENDED], &log, &[Some(at(195))], Step::WaitUntil(at(205))),
            // It was restarted, or could not be stopped.
            (&[ENDED], &log, &[done], Step::SetPhase(EndPhase::Succeeded)),
            (
                &[ENDED],
                &[("log", false, FAILED), ("mesh", true, RUNNING)],
                &[done],
                Step::SetPhase(EndPhase::Succeeded),
            ),
            (
                &[ENDED, FAILED],
                &[("mesh", true, RUNNING)],
                &[],
                Step::SetPhase(EndPhase::Failed),
            ),
            // Kubelet ends these Pods.
            (&[ENDED], &[("log", false, FAILED)], &[done], Step::Wait),
            (
                &[ENDED],
                &[("log", false, ENDED), ("mesh", true, FAILED)],
                &[],
                Step::Wait,
            ),
            // It never started, or kubelet restarts it.
            (
                &[ENDED],
                &[("log", false, WAITING)],
                &[],
                Step::SetPhase(EndPhase::Succeeded),
            ),
            (
                &[ENDED],
                &[("log", false, WAITING), ("b", false, RUNNING)],
                &[],
                stop(&["b"]),
            ),
            (
                &[ENDED],
                &[("mesh", true, WAITING)],
                &[],
                Step::SetPhase(EndPhase::Succeeded),
            ),
        ];
        for (mains, sidecars, requests, expected) in cases {
            let step = plan(&pod(mains, sidecars), false, requests, now);
            assert_eq!(step, expected, "{mains:?} {sidecars:?} {requests:?}");
        }
    }

    #[test]
    fn what_runs_in_a_marked_pod_is_stopped_once_more() {
        let sidecars = [
            ("log", false, RUNNING),
            ("mesh", true, RUNNING),
            ("x", true, FAILED),
        ];
        let mut pod = pod(&[ENDED], &sidecars);
        let (done, now) = (Some(at(100)), at(111));
        assert_eq!(plan(&pod, true, &[], now), Step::Wait, "kubelet ended it");
        pod.marked_at = Some(at(101));
        assert_eq!(plan(&pod, true, &[], at(110)), Step::WaitUntil(at(111)));
        assert_eq!(plan(&pod, true, &[], now), stop(&["log", "mesh"]));
        assert_eq!(plan(&pod, true, &[done], now), stop(&["log", "mesh"]));
        assert_eq!(plan(&pod, true, &[None], now), Step::Wait);
        assert_eq!(plan(&pod, true, &[done, done], now), Step::Wait);
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
    fn kubelet_stops(sidecar: &mut JobContainer, code: i32, restarts: bool, terminal: bool) {
        let restarted = restarts && code != 0 && !terminal;
        sidecar.state = if restarted {
            RUNNING
        } else {
            JobContainerState::Ended(code)
        };
    }

    proptest! {
        /// Whatever the sidecars do, the Pod ends, after at most two requests, and no main container is stopped.
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
            let (mut now, mut terminal, mut requests) = (at(0), false, Vec::new());
            for _ in 0..10 {
                match plan(&pod, terminal, &requests, now) {
                    Step::Wait => break,
                    Step::WaitUntil(time) => {
                        prop_assert!(time > now);
                        now = time;
                    }
                    Step::Stop(stopped) => {
                        requests.push(Some(now));
                        for (sidecar, (_, _, code, stops)) in pod.sidecars.iter_mut().zip(&sidecars) {
                            if stopped.contains(&sidecar.name) && *stops {
                                kubelet_stops(sidecar, *code, restarts, terminal);
                            }
                        }
                    }
                    Step::SetPhase(phase) => {
                        prop_assert!(!terminal);
                        prop_assert_eq!(Some(phase), end_phase(&pod.mains));
                        (terminal, pod.marked_at) = (true, Some(now));
                    }
                }
            }
            prop_assert!(requests.len() <= MAX_REQUESTS);
            let all_ended = pod.sidecars.iter().all(|one| matches!(one.state, JobContainerState::Ended(_)));
            prop_assert!(terminal || all_ended, "{:?}", pod);
        }
    }
}
