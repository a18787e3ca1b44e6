//! Durations that must be right even if a clock is not.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp, Unit};

use super::steps::ContainerStep;
use super::types::{Clocks, RecreateRequest};
use crate::pods::PodContainerStatus;
use kruise_api::backoff::Backoff;
use kruise_api::container_recreate_request::ContainerRecreateRequestPhase as Phase;

pub use crate::pods::bounded_seconds;

/// A time that is never reached: half the range, so that sums do not overflow.
const NEVER: Duration = Duration::from_secs(u64::MAX / 4);

/// Half the time after which kruise-manager ends a request that no daemon has started.
const LATE_AFTER: Duration = Duration::from_secs(30);

/// The time between two timestamps of one clock; zero if they are in the wrong order.
fn saturating_between(earlier: Timestamp, later: Timestamp) -> Duration {
    Duration::try_from(later.duration_since(earlier)).unwrap_or_default()
}

/// When the request ends, done or not, by the API server's clock.
pub fn deadline(request: &RecreateRequest) -> Option<Timestamp> {
    let after = SignedDuration::from_secs(request.deadline_seconds?.max(0));
    request.created_at.checked_add(after).ok()
}

/// Whether the request was not started for so long that kruise-manager may be about to end it.
pub fn is_late(request: &RecreateRequest, now: Clocks) -> bool {
    matches!(request.status.phase, Phase::Other(_))
        && saturating_between(request.created_at, now.api) >= LATE_AFTER
}

/// Converts a time of the API server's clock to the daemon's monotonic time.
pub fn to_mono(at: Timestamp, now: Clocks) -> Duration {
    (now.mono + saturating_between(now.api, at)).min(NEVER)
}

/// How long a container has been running that kubelet started at `started_at`.
///
/// Kubelet's timestamp, which is truncated to seconds, and the node's clock give that, unless the clock was set in
/// between. So the result is used only if it lies between two durations that no clock can change: since the daemon first
/// saw the container run, and since the previous one was stopped or, if this process did not stop it, since the request
/// was created. Otherwise the first of these is used, which errs on the side of waiting.
pub fn running_for(
    started_at: Option<Timestamp>,
    running_since: Option<Duration>,
    request: &RecreateRequest,
    stopped: Option<Duration>,
    now: Clocks,
) -> Duration {
    let min_age = running_since.map_or(Duration::ZERO, |since| now.mono.saturating_sub(since));
    let max_age = match stopped {
        Some(stopped) => now.mono.saturating_sub(stopped),
        None => saturating_between(request.created_at, now.api) + Duration::from_secs(1),
    };
    match started_at.and_then(|at| at.checked_add(SignedDuration::from_secs(1)).ok()) {
        Some(started) if started <= now.wall => {
            let age = saturating_between(started, now.wall);
            if age <= max_age { age.max(min_age) } else { min_age }
        }
        _ => min_age,
    }
}

/// How long the Pod has been not ready for the request.
///
/// The timestamp is truncated to seconds and comes from another machine, so it counts from a second later, and only if
/// it is newer than the request; the time since the daemon first observed it is always valid.
pub fn unready_for(
    since: Timestamp,
    observed_at: Option<Duration>,
    request: &RecreateRequest,
    now: Clocks,
) -> Duration {
    let observed = observed_at.map_or(Duration::ZERO, |at| now.mono.saturating_sub(at));
    let later = since.checked_add(SignedDuration::from_secs(1));
    if later.is_ok_and(|later| later < request.created_at) {
        return observed;
    }
    observed.max(saturating_between(since, now.api).saturating_sub(Duration::from_secs(1)))
}

/// The end of kubelet's back-off of a container, by the API server's clock: its message contains the duration
/// (`back-off 10s restarting …`), which counts from the end of the previous container, by the node's clock.
pub fn back_off_until(message: &str, ended: Option<Timestamp>, now: Clocks) -> Option<Timestamp> {
    let span = go_duration(message.strip_prefix("back-off ")?.split(' ').next()?)?;
    Some(back_off_end(span, ended.unwrap_or(now.wall), now)?.0)
}

/// The restart back-off of a container that has just ended, and its remaining time. Kubelet does not report it before
/// its next sync of the Pod, which is about when it is over, so this follows kubelet's own rule: none at the first
/// restart, then 10 s, doubling up to 5 min, counted from the end; reset after 10 min without a restart.
pub fn expected_back_off(status: &PodContainerStatus, now: Clocks) -> Option<(ContainerStep, Duration)> {
    let doublings = u32::try_from(status.restart_count).ok()?.checked_sub(1)?;
    let ended = status.last_termination.filter(|_| !status.running)?;
    let finished = ended.finished_at?;
    if saturating_between(ended.started_at?, finished) > BACK_OFF_RESET {
        return None;
    }
    let span = KUBELET_BACK_OFF.delay(doublings);
    let (until, left) = back_off_end(span, finished, now).filter(|(_, left)| !left.is_zero())?;
    Some((ContainerStep::BackOffExpected { until, span }, left))
}

/// The end of a back-off that counts from `ended`, by the API server's clock, and its remaining time; none if it is
/// over.
fn back_off_end(span: Duration, ended: Timestamp, now: Clocks) -> Option<(Timestamp, Duration)> {
    let left = span.checked_sub(saturating_between(ended, now.wall))?;
    // Whole seconds, so that the same time always has the same text.
    let until = now.api.checked_add(left).ok()?.round(Unit::Second).ok()?;
    Some((until, left))
}

/// Kubelet's restart back-off, and the time after which it is reset.
const KUBELET_BACK_OFF: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(300));
const BACK_OFF_RESET: Duration = Duration::from_secs(600);

/// Parses a duration as Go prints it, such as `1m20s`.
fn go_duration(text: &str) -> Option<Duration> {
    Duration::try_from(text.parse::<SignedDuration>().ok()?).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use crate::pods::Termination;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + second).unwrap()
    }

    fn now(api: i64, wall: i64, mono: u64) -> Clocks {
        Clocks {
            api: at(api),
            wall: at(wall),
            mono: Duration::from_secs(mono),
        }
    }

    #[test]
    fn restart_back_off_ends_when_kubelet_says() {
        let text = "back-off 1m20s restarting failed container=a pod=b";
        // The node's clock is an hour ahead, which must not affect the result.
        let until = back_off_until(text, Some(at(3600)), now(5, 3605, 0));
        assert_eq!(until, Some(at(80)));
        assert_eq!(
            back_off_until("back-off 10s x", Some(at(0)), now(11, 11, 0)),
            None,
            "it is over"
        );
        assert_eq!(back_off_until("no such image", None, now(0, 0, 0)), None);
        for (text, millis) in [
            ("0s", 0),
            ("300ms", 300),
            ("1.5s", 1_500),
            ("10s", 10_000),
            ("1m20s", 80_000),
            ("5m0s", 300_000),
            ("2h30m0s", 9_000_000),
            ("1h0m0.25s", 3_600_250),
        ] {
            assert_eq!(go_duration(text), Some(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!(go_duration("1.5µs"), Some(Duration::from_nanos(1_500)));
        assert_eq!(go_duration("5"), None);
    }

    #[test]
    fn restart_back_off_is_expected_from_second_restart() {
        let status = |restart_count, started, finished| PodContainerStatus {
            restart_count,
            last_termination: Some(Termination {
                code: 0,
                started_at: Some(at(started)),
                finished_at: Some(at(finished)),
            }),
            ..PodContainerStatus::default()
        };
        // The node's clock is an hour ahead, which must not affect the result.
        let expected_until = |status: &PodContainerStatus| {
            expected_back_off(status, now(50, 3650, 0)).map(|(step, _)| match step {
                ContainerStep::BackOffExpected { until, .. } => until,
                other => panic!("{other:?}"),
            })
        };
        assert_eq!(
            expected_until(&status(0, 3600, 3649)),
            None,
            "the first restart comes at once"
        );
        assert_eq!(expected_until(&status(1, 3600, 3649)), Some(at(59)));
        assert_eq!(expected_until(&status(3, 3600, 3649)), Some(at(89)));
        assert_eq!(expected_until(&status(60, 3600, 3649)), Some(at(349)));
        assert_eq!(expected_until(&status(1, 3600, 3640)), None, "it has ended");
        assert_eq!(
            expected_until(&status(1, 3000, 3649)),
            None,
            "it ran long enough to be forgiven"
        );
    }

    #[test]
    fn wall_clock_skew_makes_no_container_older() {
        let request = RecreateRequest {
            created_at: at(0),
            ..RecreateRequest::default()
        };
        let running_for = |request: &RecreateRequest, stopped, wall| {
            let since = Some(Duration::from_secs(97));
            running_for(Some(at(3)), since, request, stopped, now(9, wall, 100))
        };
        let right = running_for(&request, None, 9);
        assert_eq!(
            right,
            Duration::from_secs(5),
            "kubelet's stamp, of some time in its second"
        );
        for wall in [9 + 3600, 9 - 3600] {
            let wrong = running_for(&request, None, wall);
            assert_eq!(wrong, Duration::from_secs(3), "since first seen, clock at {wall}");
        }
        let old = RecreateRequest {
            created_at: at(-86_400),
            ..RecreateRequest::default()
        };
        let stopped = Some(Duration::from_secs(94));
        assert_eq!(
            running_for(&old, stopped, 9 + 3600),
            Duration::from_secs(3),
            "an old request does not make it believable"
        );
    }

    #[test]
    fn unready_grace_period_is_never_short() {
        let request = RecreateRequest {
            created_at: at(0),
            ..RecreateRequest::default()
        };
        let fresh = unready_for(at(2), Some(Duration::from_secs(50)), &request, now(2, 0, 50));
        assert_eq!(fresh, Duration::ZERO);
        let restarted = unready_for(at(2), Some(Duration::from_secs(50)), &request, now(30, 0, 50));
        assert_eq!(
            restarted,
            Duration::from_secs(27),
            "counts across a restart of the daemon"
        );
        let skewed = unready_for(at(-3600), Some(Duration::from_secs(50)), &request, now(30, 0, 51));
        assert_eq!(
            skewed,
            Duration::from_secs(1),
            "a stamp from before the request is no stamp"
        );
    }
}
