#![allow(clippy::unwrap_used, clippy::panic)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time};
use proptest::prelude::*;

use super::*;
use crate::view::ContainerView;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestContainer as Container, ContainerRecreateRequestContainerRecreateState as State,
    ContainerRecreateRequestContainerStatusContext as Context, ContainerRecreateRequestSpec as Spec,
    ContainerRecreateRequestStrategy as Strategy_,
};

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn request() -> ContainerRecreateRequest {
    let container = Container {
        name: "a".into(),
        status_context: Some(Context {
            container_id: "containerd://old".into(),
            restart_count: 0,
        }),
        ..Container::default()
    };
    let mut request = ContainerRecreateRequest::new(
        "r",
        Spec {
            pod_name: "p".into(),
            containers: vec![container],
            ..Spec::default()
        },
    );
    request.metadata.creation_timestamp = Some(Time(at(0)));
    let labels = [
        (keys::CRR_ACTIVE, "true"),
        (keys::CRR_NODE_NAME, "n"),
        (keys::CRR_POD_UID, "u"),
    ];
    request.metadata.labels = Some(labels.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    request
}

fn recreating(mut request: ContainerRecreateRequest) -> ContainerRecreateRequest {
    request.status = Some(Status {
        phase: Phase::Recreating,
        container_recreate_states: vec![State {
            name: "a".into(),
            phase: Phase::Recreating,
            message: None,
            is_killed: true,
            container_id: None,
        }],
        ..Status::default()
    });
    request
}

fn pod(id: &str) -> PodView {
    PodView {
        uid: "u".into(),
        node: Some("n".into()),
        has_readiness_gate: true,
        containers: vec![ContainerView {
            name: "a".into(),
            id: id.into(),
            ready: true,
            running: true,
            restarts: 1,
        }],
        ..PodView::default()
    }
}

/// Without the webhook, nothing else tells that another Pod has the name.
#[test]
fn request_whose_controller_is_an_earlier_pod_targets_no_pod() {
    let mut bare = request();
    bare.metadata.labels = None;
    let owner = |uid: &str| OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name: "p".to_owned(),
        uid: uid.to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    };
    for (uid, expected) in [("u", true), ("earlier", false)] {
        bare.metadata.owner_references = Some(vec![owner(uid)]);
        assert_eq!(targets_pod(&bare, &pod("x")), expected);
    }
}

#[test]
fn missing_labels_are_set() {
    let mut bare = request();
    bare.metadata.labels = None;
    let Some(Action::SetLabels(labels)) = plan(&bare, Some(&pod("x")), None, at(1)).action else {
        panic!("no labels")
    };
    assert_eq!(labels.len(), 3);
    assert_eq!(plan(&request(), Some(&pod("x")), None, at(1)).action, None);
}

#[test]
fn deleted_pod_ends_the_request_after_grace() {
    let mut other = pod("x");
    other.uid = "another".into();
    for missing in [None, Some(&other)] {
        let first = plan(&request(), missing, None, at(5));
        assert_eq!((&first.action, first.requeue_at), (&None, Some(at(6))));
        let then = plan(&request(), missing, first.waiting.as_ref(), at(6));
        assert!(
            matches!(then.action, Some(Action::Complete(s)) if s.message.as_deref() == Some(POD_GONE_MESSAGE))
        );
    }
}

#[test]
fn request_of_a_deleted_pod_ends_in_time_when_the_clock_is_set_back() {
    let ahead = DaemonWait {
        task: DaemonTask::EndRequest,
        since: at(3600),
    };
    let set_back = plan(&request(), None, Some(&ahead), at(5));
    assert_eq!(
        (set_back.waiting.unwrap().since, set_back.requeue_at),
        (at(5), Some(at(6)))
    );
}

#[test]
fn unstarted_request_reports_no_daemon() {
    let first = plan(&request(), Some(&pod("x")), None, at(4));
    assert_eq!((first.action, first.requeue_at), (None, Some(at(5))));
    let Some(Action::ReportNoDaemon(conditions)) = plan(&request(), Some(&pod("x")), None, at(5)).action
    else {
        panic!("no wait");
    };
    let [waiting] = conditions.as_slice() else {
        panic!("one condition: {conditions:?}");
    };
    let reported = (
        waiting.type_.as_str(),
        waiting.reason.as_str(),
        waiting.message.as_str(),
    );
    assert_eq!(
        reported,
        (
            "Waiting",
            "NoDaemon",
            "kruise-daemon on node n has not started this request; is it running there?"
        )
    );
    let mut silent = request();
    silent.status = Some(Status {
        conditions,
        ..Status::default()
    });
    assert_eq!(
        plan(&silent, Some(&pod("x")), None, at(5)),
        Plan::wait_until(Some(at(60)))
    );
    let Some(Action::Complete(status)) = plan(&silent, Some(&pod("x")), None, at(60)).action else {
        panic!("not completed");
    };
    assert_eq!(status.message.as_deref(), Some(NO_RESPONSE_MESSAGE));
    let [failed] = status.conditions.as_slice() else {
        panic!("one condition: {:?}", status.conditions);
    };
    assert_eq!(
        (failed.type_.as_str(), failed.reason.as_str()),
        ("Failed", "NoDaemon")
    );
    assert!(
        failed
            .message
            .starts_with("n: kruise-daemon did not start this request"),
        "{failed:?}"
    );
}

#[test]
fn early_deadline_reports_no_daemon() {
    let mut short = request();
    short.spec.active_deadline_seconds = Some(3);
    let Some(Action::Complete(status)) = plan(&short, Some(&pod("x")), None, at(4)).action else {
        panic!("not completed");
    };
    let reasons: Vec<_> = status
        .conditions
        .iter()
        .map(|c| (c.type_.as_str(), c.reason.as_str()))
        .collect();
    assert_eq!(reasons, [("Failed", "NoDaemon")]);
    assert_eq!(status.message.as_deref(), Some(DEADLINE_MESSAGE));
}

/// A daemon of OpenKruise keeps conditions, sets the phase only if it is empty, and writes none of our conditions.
#[test]
fn foreign_daemon_request_gets_conditions() {
    let Some(Action::ReportNoDaemon(conditions)) = plan(&request(), Some(&pod("x")), None, at(5)).action
    else {
        panic!("no wait");
    };
    let mut queued = request();
    queued.status = Some(Status {
        phase: Phase::Pending,
        conditions: conditions.clone(),
        ..Status::default()
    });
    let action = plan(&queued, Some(&pod("x")), None, at(300)).action;
    assert_eq!(action, Some(Action::SetConditions(Vec::new())), "no Waiting");
    queued.status.as_mut().unwrap().conditions.clear();
    assert_eq!(plan(&queued, Some(&pod("x")), None, at(300)), Plan::default());

    let mut done = recreating(request());
    let status = done.status.as_mut().unwrap();
    status.conditions = conditions;
    status.phase = Phase::Completed;
    status.completion_time = Some(Time(at(9)));
    status.container_recreate_states[0].phase = Phase::Succeeded;
    let Some(Action::SetConditions(written)) = plan(&done, Some(&pod("x")), None, at(9)).action else {
        panic!("no final condition");
    };
    let types: Vec<_> = written.iter().map(|c| c.type_.as_str()).collect();
    assert_eq!(types, ["Complete"]);
    done.status.as_mut().unwrap().conditions = written;
    let closed = plan(&done, Some(&pod("x")), None, at(9)).action;
    assert_eq!(closed, Some(Action::Finalize { mark_ready: false }));
}

#[test]
fn requests_without_a_daemon_time_out() {
    let completion_message = |request: &ContainerRecreateRequest, now| match plan(
        request,
        Some(&pod("x")),
        None,
        at(now),
    )
    .action
    {
        Some(Action::Complete(status)) => status.message,
        _ => None,
    };
    assert_eq!(completion_message(&request(), 59), None);
    assert_eq!(
        completion_message(&request(), 60).as_deref(),
        Some(NO_RESPONSE_MESSAGE)
    );
    let mut limited = recreating(request());
    limited.spec.active_deadline_seconds = Some(10);
    assert_eq!(completion_message(&limited, 10), None);
    assert_eq!(
        completion_message(&limited, 11).as_deref(),
        Some(DEADLINE_MESSAGE)
    );
    assert_eq!(completion_message(&recreating(request()), 1000), None);
}

#[test]
fn deadline_fails_unfinished_containers() {
    let mut limited = recreating(request());
    limited.spec.active_deadline_seconds = Some(10);
    let Some(Action::Complete(status)) = plan(&limited, Some(&pod("x")), None, at(20)).action else {
        panic!("not completed")
    };
    assert_eq!(status.container_recreate_states[0].phase, Phase::Failed);
    assert!(status.container_recreate_states[0].is_killed);
}

#[test]
fn snapshot_is_written_only_for_foreign_daemons() {
    let busy = recreating(request());
    let mut old = pod("containerd://old");
    old.containers[0].restarts = 0;
    assert_eq!(plan(&busy, Some(&old), None, at(5)), Plan::default());
    let new = pod("containerd://new");
    let first = plan(&busy, Some(&new), None, at(5));
    assert_eq!((&first.action, first.requeue_at), (&None, Some(at(6))));
    let Some(Action::WriteSnapshot(snapshot)) = plan(&busy, Some(&new), first.waiting.as_ref(), at(6)).action
    else {
        panic!("no snapshot")
    };
    let mut own_daemon = busy.clone();
    own_daemon.status.as_mut().unwrap().container_recreate_states[0].container_id =
        Some("containerd://old".into());
    assert_eq!(
        plan(&own_daemon, Some(&new), first.waiting.as_ref(), at(6)),
        Plan::default()
    );
    let mut recorded = busy.clone();
    recorded.status.as_mut().unwrap().container_status_snapshot = snapshot;
    assert_eq!(plan(&recorded, Some(&new), None, at(7)), Plan::default());
}

#[test]
fn finalizer_precedes_not_ready_until_the_end() {
    let mut busy = recreating(request());
    busy.spec.strategy = Some(Strategy_ {
        unready_grace_period_seconds: Some(3),
        ..Strategy_::default()
    });
    let action = |r: &ContainerRecreateRequest, p: &PodView| plan(r, Some(p), None, at(1)).action;
    let mut plain = pod("containerd://old");
    plain.containers[0].restarts = 0;
    let mut ungated = plain.clone();
    ungated.has_readiness_gate = false;
    assert_eq!(action(&busy, &ungated), Some(Action::StartGracePeriod));
    assert_eq!(action(&busy, &plain), Some(Action::AddFinalizer));
    busy.metadata.finalizers = Some(vec![keys::CRR_UNREADY_ACQUIRED.to_owned()]);
    assert_eq!(action(&busy, &plain), Some(Action::MarkNotReady));
    busy.status.as_mut().unwrap().conditions.push(Condition {
        type_: keys::PRE_RECREATE_GRACE.into(),
        status: "True".into(),
        reason: String::new(),
        message: String::new(),
        last_transition_time: Time(at(1)),
        observed_generation: None,
    });
    assert_eq!(action(&busy, &plain), None);
    busy.status.as_mut().unwrap().completion_time = Some(Time(at(2)));
    busy.status.as_mut().unwrap().set_final_condition("n");
    assert_eq!(action(&busy, &plain), Some(Action::Finalize { mark_ready: true }));
}

proptest! {
    /// A request with a deadline, a TTL or no daemon is completed and deleted, and no action repeats forever.
    #[test]
    fn every_request_ends_and_is_deleted(deadline in prop::option::of(3_i64..100), ttl in 0_i32..100, grace in any::<bool>(),
                             started in any::<bool>(), pod_exists in any::<bool>(), gate in any::<bool>(),
                             labelled in any::<bool>(), id in "[ab]") {
        let mut request = if started { recreating(request()) } else { request() };
        if !labelled { request.metadata.labels = None; }
        request.spec.active_deadline_seconds = deadline;
        request.spec.ttl_seconds_after_finished = Some(ttl);
        request.spec.strategy = Some(Strategy_ { unready_grace_period_seconds: grace.then_some(1), ..Strategy_::default() });
        let mut pod = pod(&id);
        pod.has_readiness_gate = gate;
        let (mut now, mut waiting, mut not_ready) = (0, None, false);
        for _ in 0..40 {
            let plan = plan(&request, pod_exists.then_some(&pod), waiting.as_ref(), at(now));
            waiting = plan.waiting;
            let status = request.status.get_or_insert_default();
            match plan.action {
                Some(Action::SetLabels(l)) => request.metadata.labels.get_or_insert_default().extend(l),
                Some(Action::Complete(s)) => { prop_assert!(status.completion_time.is_none()); *status = *s; }
                Some(Action::ReportNoDaemon(conditions) | Action::SetConditions(conditions)) => status.conditions = conditions,
                Some(Action::AddFinalizer) => request.metadata.finalizers = Some(vec![keys::CRR_UNREADY_ACQUIRED.into()]),
                Some(act @ (Action::MarkNotReady | Action::StartGracePeriod)) => {
                    prop_assert_eq!(act == Action::MarkNotReady, gate);
                    not_ready = gate;
                    status.conditions.push(Condition { type_: keys::PRE_RECREATE_GRACE.into(), status: "True".into(),
                        reason: String::new(), message: String::new(), last_transition_time: Time(at(now)), observed_generation: None });
                }
                Some(Action::WriteSnapshot(s)) => status.container_status_snapshot = s,
                Some(Action::Finalize { mark_ready }) => {
                    not_ready = not_ready && !mark_ready;
                    request.metadata.labels.get_or_insert_default().remove(keys::CRR_ACTIVE);
                    request.metadata.finalizers = None;
                }
                Some(Action::Delete) => { prop_assert!(!not_ready, "the Pod is left not ready"); return Ok(()); }
                None => match plan.requeue_at {
                    Some(wake) => { prop_assert!(wake > at(now)); now = wake.as_second(); }
                    None => {
                        prop_assert!(pod_exists && started && deadline.is_none(), "no requeue time");
                        return Ok(());
                    }
                }
            }
        }
        prop_assert!(false, "does not converge");
    }
}
