#![allow(clippy::unwrap_used)]
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::view::RawPod;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn failure(since: i64) -> Failure {
    Failure {
        container: "app".to_owned(),
        container_id: "containerd://1".to_owned(),
        since: Some(at(since)),
    }
}

fn pod(name: &str, available: bool, request: Option<LastRequest>, failed_at: Option<i64>) -> WorkloadPod {
    WorkloadPod {
        key: Key::namespaced("n", name),
        available,
        deleting: false,
        request,
        failing: failed_at.is_some(),
        failure: failed_at.map(failure),
    }
}

/// Names of the Pods that are restarted, and of those that wait, with the reason.
fn planned(
    pods: &[WorkloadPod],
    replicas: i64,
    max_unavailable: i64,
) -> (Vec<String>, Vec<(String, WaitReason)>) {
    let budget = Budget {
        replicas,
        max_unavailable,
    };
    let Plan { restarts, waiting } = plan(pods, budget);
    (
        restarts.into_iter().map(|(key, _)| key.name).collect(),
        waiting
            .into_iter()
            .map(|(key, _, reason)| (key.name, reason))
            .collect(),
    )
}

/// Each request takes a while, and other workloads wait for the worker.
#[test]
fn one_reconcile_restarts_a_limited_number_of_pods() {
    let pods: Vec<_> = (0..100)
        .map(|n| pod(&format!("p{n:02}"), true, None, Some(n)))
        .collect();
    let (restarts, waiting) = planned(&pods, 100, 100);
    assert_eq!((restarts.len(), waiting.len()), (MAX_RESTARTS, 0));
    assert_eq!(restarts.first().map(String::as_str), Some("p00"));
    let (restarts, waiting) = planned(&pods, 100, 60);
    assert_eq!((restarts.len(), waiting.len()), (60, 40));
}

#[test]
fn available_pods_are_restarted_one_after_the_other() {
    let all = [
        pod("a", true, None, Some(3)),
        pod("b", true, None, Some(1)),
        pod("c", true, None, Some(2)),
    ];
    let (restarts, waiting) = planned(&all, 3, 1);
    assert_eq!(restarts, ["b"], "the first that failed");
    let reason = WaitReason::Restarting(1);
    assert_eq!(waiting, [("c".to_owned(), reason), ("a".to_owned(), reason)]);
    assert_eq!(planned(&all, 3, 2).0, ["b", "c"]);
    assert_eq!(planned(&all, 3, 100).0, ["b", "c", "a"]);
}

#[test]
fn restart_waits_while_other_pods_are_unavailable() {
    let failed = pod("a", true, None, Some(1));
    let unavailable = vec![("a".to_owned(), WaitReason::Unavailable(1))];
    let restarting = vec![("a".to_owned(), WaitReason::Restarting(1))];
    let other = |available, request| pod("b", available, request, None);
    let deleting = WorkloadPod {
        deleting: true,
        ..other(false, None)
    };
    let cases = [
        (vec![other(true, None)], vec![]),
        (vec![other(false, None)], unavailable.clone()),
        (vec![deleting], unavailable.clone()),
        (vec![], unavailable),
        (
            vec![other(true, Some(LastRequest::InProgress))],
            restarting.clone(),
        ),
        (vec![other(false, Some(LastRequest::Ended))], restarting),
        (vec![other(true, Some(LastRequest::Ended))], vec![]),
        // One more than are desired, as during an update with maxSurge.
        (vec![other(true, None), pod("c", false, None, None)], vec![]),
    ];
    for (others, expected) in cases {
        let pods = [vec![failed.clone()], others].concat();
        assert_eq!(planned(&pods, 2, 1).1, expected, "{pods:?}");
    }
}

#[test]
fn pod_that_is_not_ready_is_restarted_although_others_are_not_ready() {
    let all = [
        pod("a", false, None, Some(1)),
        pod("b", false, None, Some(2)),
        pod("c", true, None, Some(0)),
    ];
    let (restarts, waiting) = planned(&all, 3, 1);
    assert_eq!(restarts, ["a"]);
    assert_eq!(waiting.len(), 2);
    // It is not ready since; when it fails again, others are next.
    let mut restarted = all.clone();
    restarted[0] = pod("a", false, Some(LastRequest::Ended), None);
    assert!(planned(&restarted, 3, 1).0.is_empty());
    restarted[0] = pod("a", false, Some(LastRequest::Ended), Some(9));
    assert_eq!(planned(&restarted, 3, 1).0, ["b"]);
    // A request that could not restart it holds up no other Pod.
    restarted[0].failure = None;
    assert_eq!(planned(&restarted, 3, 1).0, ["b"]);
}

#[test]
fn pods_that_are_being_deleted_or_restarted_are_left_alone() {
    let mut deleting = pod("a", false, None, Some(1));
    deleting.deleting = true;
    let restarting = pod("b", true, Some(LastRequest::InProgress), Some(1));
    assert_eq!(
        plan(&[deleting, restarting], default_budget(100)),
        Plan::default()
    );
}

/// A Pod as the watch has it: container `app` has a liveness probe, `log` has none.
fn view(id: &str, running: bool) -> PodView {
    let context = json!([{ "name": "app", "livenessProbe": { "tcpSocket": { "port": 1 } } }]);
    let state = if running {
        json!({ "running": {} })
    } else {
        json!({ "terminated": {} })
    };
    let owner = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "w", "uid": "w", "controller": true });
    let status = |name: &str| json!({ "name": name, "containerID": id, "state": state });
    PodView::from(&RawPod::from(json!({
        "metadata": { "uid": "u", "ownerReferences": [owner],
            "annotations": { keys::CONTAINER_PROBE_CONTEXT: context.to_string() } },
        "spec": { "containers": [{ "name": "app" }, { "name": "log" }] },
        "status": { "containerStatuses": [status("app"), status("log")] },
    })))
}

#[test]
fn failure_counts_only_for_the_container_that_runs() {
    let failed = |container: &str, id: &str| Failure {
        container: container.to_owned(),
        container_id: id.to_owned(),
        since: None,
    };
    let cases = [
        (
            view("containerd://1", true),
            failed("app", "containerd://1"),
            true,
        ),
        (
            view("containerd://2", true),
            failed("app", "containerd://1"),
            false,
        ),
        (
            view("containerd://1", false),
            failed("app", "containerd://1"),
            false,
        ),
        (view("", true), failed("app", ""), false),
        (
            view("containerd://1", true),
            failed("log", "containerd://1"),
            false,
        ),
        (
            view("containerd://1", true),
            failed("other", "containerd://1"),
            false,
        ),
    ];
    for (pod, failure, expected) in cases {
        let failures = [failure];
        assert_eq!(
            current_failures(&pod, &failures).count(),
            usize::from(expected),
            "{failures:?}"
        );
    }
    let mut other = view("containerd://1", true);
    other.liveness = None;
    assert_eq!(
        current_failures(&other, &[failed("app", "containerd://1")]).count(),
        0
    );
}

#[test]
fn request_that_waits_for_readiness_is_no_restart_in_progress() {
    let request = |finished: bool| -> ContainerRecreateRequest {
        let status =
            finished.then(|| json!({ "phase": "Completed", "completionTime": "2026-01-01T00:00:00Z" }));
        serde_json::from_value(
            json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
            "metadata": { "name": "r", "annotations": { keys::CRR_CONTAINER_ID: "containerd://1" } },
            "spec": { "podName": "p", "containers": [{ "name": "app" }] }, "status": status }),
        )
        .unwrap()
    };
    for (id, running, expected) in [
        ("containerd://1", true, true),
        ("containerd://1", false, true),
        ("containerd://2", false, true),
        ("", true, true),
        ("containerd://2", true, false),
    ] {
        let pod = view(id, running);
        assert_eq!(
            is_restart_pending(&request(false), &pod),
            expected,
            "{id} {running}"
        );
        assert!(!is_restart_pending(&request(true), &pod));
    }
}

#[test]
fn one_failure_has_one_name() {
    let name = request_name("u", "containerd://1");
    assert_eq!(name, request_name("u", "containerd://1"));
    assert!(name.starts_with("liveness-u-") && name.len() == "liveness-u-".len() + 16);
    assert_ne!(name, request_name("u", "containerd://2"));
    assert_ne!(name, request_name("v", "containerd://1"));
    let odd = request_name("u", "x://\u{0}é/../#?");
    assert!(
        odd.bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
    );
}

#[test]
fn limits_are_bounded() {
    let default = |pods| default_budget(pods).max_unavailable;
    assert_eq!([0, 1, 5, 6, 100].map(default), [1, 1, 1, 2, 20]);
    assert_eq!([30, -1, i64::MAX].map(request_deadline), [390, 360, 86_760]);
}

/// What a simulated Pod does.
#[derive(Clone, Debug)]
struct FakePod {
    ready: bool,
    failed_at: Option<i64>,
    /// Since when its request is in progress.
    requested_at: Option<i64>,
    /// Its request has ended and is not deleted.
    has_ended_request: bool,
    /// Its request ended without a restart.
    is_exhausted: bool,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The probe of a Pod fails; whether its readiness probe does, too.
    Fail(usize, bool),
    /// The probe succeeds again.
    Mend(usize),
    /// The request of a Pod ends; whether the container was restarted, and whether the Pod is ready then.
    End(usize, bool, bool),
    /// The request of a Pod is deleted.
    Expire(usize),
    /// A Pod becomes ready, or not, for another reason.
    Ready(usize, bool),
}

fn any_event() -> impl Strategy<Value = Event> {
    let index = 0..6_usize;
    prop_oneof![
        (index.clone(), any::<bool>()).prop_map(|(index, ready)| Event::Fail(index, ready)),
        index.clone().prop_map(Event::Mend),
        (index.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(index, ok, ready)| Event::End(index, ok, ready)),
        index.clone().prop_map(Event::Expire),
        (index, any::<bool>()).prop_map(|(index, ready)| Event::Ready(index, ready)),
    ]
}

fn apply(pod: &mut FakePod, event: Event, now: i64) {
    match event {
        Event::Fail(_, ready) if pod.requested_at.is_none() && pod.failed_at.is_none() => {
            pod.failed_at = Some(now);
            pod.ready &= ready;
        }
        Event::Mend(_) if pod.requested_at.is_none() => (pod.failed_at, pod.is_exhausted) = (None, false),
        Event::End(_, restarted, ready) if pod.requested_at.is_some() => {
            (pod.requested_at, pod.has_ended_request, pod.is_exhausted) = (None, true, !restarted);
            if restarted {
                (pod.failed_at, pod.ready) = (None, ready);
            }
        }
        Event::Expire(_) => (pod.has_ended_request, pod.is_exhausted) = (false, false),
        Event::Ready(_, ready) => pod.ready = ready,
        Event::Fail(..) | Event::Mend(_) | Event::End(..) => {}
    }
}

fn observed(index: usize, pod: &FakePod) -> WorkloadPod {
    let request = match (pod.requested_at, pod.has_ended_request) {
        (Some(_), _) => Some(LastRequest::InProgress),
        (None, true) => Some(LastRequest::Ended),
        (None, false) => None,
    };
    WorkloadPod {
        key: Key::namespaced("n", index.to_string()),
        available: pod.ready,
        deleting: false,
        request,
        failing: pod.failed_at.is_some(),
        failure: pod.failed_at.filter(|_| !pod.is_exhausted).map(failure),
    }
}

proptest! {
    /// Whatever fails, and however restarts end: no more Pods than the budget are being restarted, none that is available
    /// is restarted while as many are unavailable, and a failure is not left alone while the budget has room.
    #[test]
    fn budget_is_never_exceeded(
        events in prop::collection::vec(any_event(), 1..80),
        max_unavailable in 1_i64..4,
    ) {
        let fresh = FakePod { ready: true, failed_at: None, requested_at: None, has_ended_request: false, is_exhausted: false };
        let mut pods = vec![fresh; 6];
        let budget = Budget { replicas: 6, max_unavailable };
        for (now, event) in (1..).zip(events) {
            let (Event::Fail(index, _) | Event::Mend(index) | Event::End(index, ..) | Event::Expire(index)
                | Event::Ready(index, _)) = event;
            if let Some(pod) = pods.get_mut(index) {
                apply(pod, event, now);
            }
            let seen: Vec<_> = pods.iter().enumerate().map(|(index, pod)| observed(index, pod)).collect();
            let out_of_service = |seen: &[WorkloadPod]| seen.iter().filter(|pod| !pod.is_in_service()).count();
            let restarting = |seen: &[WorkloadPod]| seen.iter().filter(|pod| pod.is_restarting()).count();
            let before = (out_of_service(&seen), restarting(&seen));
            let planned = plan(&seen, budget);
            for (key, _) in &planned.restarts {
                let index: usize = key.name.parse().unwrap();
                prop_assert!(pods[index].failed_at.is_some() && pods[index].requested_at.is_none());
                pods[index].requested_at = Some(now);
            }
            let seen: Vec<_> = pods.iter().enumerate().map(|(index, pod)| observed(index, pod)).collect();
            let after = (out_of_service(&seen), restarting(&seen));
            let limit = usize::try_from(max_unavailable).unwrap();
            prop_assert!(after.0 <= limit.max(before.0), "{before:?} to {after:?} unavailable");
            prop_assert!(after.1 <= limit.max(before.1), "{before:?} to {after:?} restarting");
            // Nothing more is planned, and what waits has a reason that is true.
            let again = plan(&seen, budget);
            prop_assert!(again.restarts.is_empty());
            for (key, _, reason) in &again.waiting {
                let index: usize = key.name.parse().unwrap();
                match reason {
                    WaitReason::Restarting(number) => {
                        prop_assert!(*number >= max_unavailable && after.1 >= limit);
                    }
                    WaitReason::Unavailable(number) => {
                        prop_assert!(pods[index].ready && *number >= max_unavailable && after.0 >= limit);
                    }
                }
            }
            let waiting = again.waiting.len();
            let candidates = seen.iter().filter(|pod| pod.candidate().is_some()).count();
            prop_assert_eq!(waiting, candidates, "each failure is restarted or waits");
        }
    }
}
