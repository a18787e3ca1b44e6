#![allow(clippy::unwrap_used, clippy::panic)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
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
        gate: true,
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

#[test]
fn labels_are_set_where_admission_was_down() {
    let mut bare = request();
    bare.metadata.labels = None;
    let Some(Act::Label(labels)) = plan(&bare, Some(&pod("x")), None, at(1)).act else {
        panic!("no labels")
    };
    assert_eq!(labels.len(), 3);
    assert_eq!(plan(&request(), Some(&pod("x")), None, at(1)).act, None);
}

#[test]
fn a_pod_that_has_gone_ends_the_request_after_the_daemon_had_its_chance() {
    let mut other = pod("x");
    other.uid = "another".into();
    for gone in [None, Some(&other)] {
        let first = plan(&request(), gone, None, at(5));
        assert_eq!((&first.act, first.wake), (&None, Some(at(6))));
        let then = plan(&request(), gone, first.waiting.as_ref(), at(6));
        assert!(matches!(then.act, Some(Act::Complete(s)) if s.message.as_deref() == Some(GONE)));
    }
}

#[test]
fn a_request_that_no_daemon_takes_up_says_so() {
    let first = plan(&request(), Some(&pod("x")), None, at(4));
    assert_eq!((first.act, first.wake), (None, Some(at(5))));
    let Some(Act::Wait(conditions)) = plan(&request(), Some(&pod("x")), None, at(5)).act else {
        panic!("it waits");
    };
    let [waiting] = conditions.as_slice() else {
        panic!("one condition: {conditions:?}");
    };
    let said = (
        waiting.type_.as_str(),
        waiting.reason.as_str(),
        waiting.message.as_str(),
    );
    assert_eq!(
        said,
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
        Plan::at(Some(at(60)))
    );
    let Some(Act::Complete(status)) = plan(&silent, Some(&pod("x")), None, at(60)).act else {
        panic!("it ends");
    };
    assert_eq!(status.message.as_deref(), Some(NO_RESPONSE));
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
fn a_deadline_before_it_is_said_that_no_daemon_is_there_says_so_too() {
    let mut short = request();
    short.spec.active_deadline_seconds = Some(3);
    let Some(Act::Complete(status)) = plan(&short, Some(&pod("x")), None, at(4)).act else {
        panic!("it ends");
    };
    let reasons: Vec<_> = status
        .conditions
        .iter()
        .map(|c| (c.type_.as_str(), c.reason.as_str()))
        .collect();
    assert_eq!(reasons, [("Failed", "NoDaemon")]);
    assert_eq!(status.message.as_deref(), Some(DEADLINE));
}

/// A daemon of OpenKruise keeps conditions, sets the phase only where it is empty, and knows none of ours.
#[test]
fn a_request_that_another_make_of_daemon_has_is_not_judged_silent_and_gets_its_conditions() {
    let Some(Act::Wait(conditions)) = plan(&request(), Some(&pod("x")), None, at(5)).act else {
        panic!("it waits");
    };
    let mut queued = request();
    queued.status = Some(Status {
        phase: Phase::Pending,
        conditions: conditions.clone(),
        ..Status::default()
    });
    let heard = plan(&queued, Some(&pod("x")), None, at(300)).act;
    assert_eq!(heard, Some(Act::Conditions(Vec::new())), "Waiting goes");
    queued.status.as_mut().unwrap().conditions.clear();
    assert_eq!(plan(&queued, Some(&pod("x")), None, at(300)), Plan::default());

    let mut done = recreating(request());
    let status = done.status.as_mut().unwrap();
    status.conditions = conditions;
    status.phase = Phase::Completed;
    status.completion_time = Some(Time(at(9)));
    status.container_recreate_states[0].phase = Phase::Succeeded;
    let Some(Act::Conditions(said)) = plan(&done, Some(&pod("x")), None, at(9)).act else {
        panic!("it says how it ended");
    };
    let types: Vec<_> = said.iter().map(|c| c.type_.as_str()).collect();
    assert_eq!(types, ["Complete"]);
    done.status.as_mut().unwrap().conditions = said;
    let closed = plan(&done, Some(&pod("x")), None, at(9)).act;
    assert_eq!(closed, Some(Act::Close { release: false }));
}

#[test]
fn requests_without_a_daemon_end() {
    let ends =
        |request: &ContainerRecreateRequest, now| match plan(request, Some(&pod("x")), None, at(now)).act {
            Some(Act::Complete(status)) => status.message,
            _ => None,
        };
    assert_eq!(ends(&request(), 59), None);
    assert_eq!(ends(&request(), 60).as_deref(), Some(NO_RESPONSE));
    let mut limited = recreating(request());
    limited.spec.active_deadline_seconds = Some(10);
    assert_eq!(ends(&limited, 10), None);
    assert_eq!(ends(&limited, 11).as_deref(), Some(DEADLINE));
    assert_eq!(ends(&recreating(request()), 1000), None);
}

#[test]
fn at_the_deadline_what_was_not_done_has_failed() {
    let mut limited = recreating(request());
    limited.spec.active_deadline_seconds = Some(10);
    let Some(Act::Complete(status)) = plan(&limited, Some(&pod("x")), None, at(20)).act else {
        panic!("not ended")
    };
    assert_eq!(status.container_recreate_states[0].phase, Phase::Failed);
    assert!(status.container_recreate_states[0].is_killed);
}

#[test]
fn the_snapshot_is_written_only_where_the_daemon_does_not() {
    let busy = recreating(request());
    let mut old = pod("containerd://old");
    old.containers[0].restarts = 0;
    assert_eq!(plan(&busy, Some(&old), None, at(5)), Plan::default());
    let new = pod("containerd://new");
    let first = plan(&busy, Some(&new), None, at(5));
    assert_eq!((&first.act, first.wake), (&None, Some(at(6))));
    let Some(Act::Snapshot(snapshot)) = plan(&busy, Some(&new), first.waiting.as_ref(), at(6)).act else {
        panic!("no snapshot")
    };
    let mut ours = busy.clone();
    ours.status.as_mut().unwrap().container_recreate_states[0].container_id = Some("containerd://old".into());
    assert_eq!(
        plan(&ours, Some(&new), first.waiting.as_ref(), at(6)),
        Plan::default()
    );
    let mut told = busy.clone();
    told.status.as_mut().unwrap().container_status_snapshot = snapshot;
    assert_eq!(plan(&told, Some(&new), None, at(7)), Plan::default());
}

#[test]
fn a_pod_is_guarded_before_it_is_held_and_let_go_in_the_end() {
    let mut busy = recreating(request());
    busy.spec.strategy = Some(Strategy_ {
        unready_grace_period_seconds: Some(3),
        ..Strategy_::default()
    });
    let act = |r: &ContainerRecreateRequest, p: &PodView| plan(r, Some(p), None, at(1)).act;
    let mut plain = pod("containerd://old");
    plain.containers[0].restarts = 0;
    let mut ungated = plain.clone();
    ungated.gate = false;
    assert_eq!(act(&busy, &ungated), Some(Act::Grace));
    assert_eq!(act(&busy, &plain), Some(Act::Guard));
    busy.metadata.finalizers = Some(vec![keys::CRR_UNREADY_ACQUIRED.to_owned()]);
    assert_eq!(act(&busy, &plain), Some(Act::Hold));
    busy.status.as_mut().unwrap().conditions.push(Condition {
        type_: keys::PRE_RECREATE_GRACE.into(),
        status: "True".into(),
        reason: String::new(),
        message: String::new(),
        last_transition_time: Time(at(1)),
        observed_generation: None,
    });
    assert_eq!(act(&busy, &plain), None);
    busy.status.as_mut().unwrap().completion_time = Some(Time(at(2)));
    busy.status.as_mut().unwrap().conclude("n");
    assert_eq!(act(&busy, &plain), Some(Act::Close { release: true }));
}

proptest! {
    /// A request with a deadline, a time to live, or no daemon ends and goes, and nothing is done for ever.
    #[test]
    fn every_request_settles(deadline in prop::option::of(3_i64..100), ttl in 0_i32..100, grace in any::<bool>(),
                             started in any::<bool>(), there in any::<bool>(), gate in any::<bool>(),
                             labelled in any::<bool>(), id in "[ab]") {
        let mut request = if started { recreating(request()) } else { request() };
        if !labelled { request.metadata.labels = None; }
        request.spec.active_deadline_seconds = deadline;
        request.spec.ttl_seconds_after_finished = Some(ttl);
        request.spec.strategy = Some(Strategy_ { unready_grace_period_seconds: grace.then_some(1), ..Strategy_::default() });
        let mut pod = pod(&id);
        pod.gate = gate;
        let (mut now, mut waiting, mut held) = (0, None, false);
        for _ in 0..40 {
            let plan = plan(&request, there.then_some(&pod), waiting.as_ref(), at(now));
            waiting = plan.waiting;
            let status = request.status.get_or_insert_default();
            match plan.act {
                Some(Act::Label(l)) => request.metadata.labels.get_or_insert_default().extend(l),
                Some(Act::Complete(s)) => { prop_assert!(status.completion_time.is_none()); *status = *s; }
                Some(Act::Wait(conditions) | Act::Conditions(conditions)) => status.conditions = conditions,
                Some(Act::Guard) => request.metadata.finalizers = Some(vec![keys::CRR_UNREADY_ACQUIRED.into()]),
                Some(act @ (Act::Hold | Act::Grace)) => {
                    prop_assert_eq!(act == Act::Hold, gate);
                    held = gate;
                    status.conditions.push(Condition { type_: keys::PRE_RECREATE_GRACE.into(), status: "True".into(),
                        reason: String::new(), message: String::new(), last_transition_time: Time(at(now)), observed_generation: None });
                }
                Some(Act::Snapshot(s)) => status.container_status_snapshot = s,
                Some(Act::Close { release }) => {
                    held = held && !release;
                    request.metadata.labels.get_or_insert_default().remove(keys::CRR_ACTIVE);
                    request.metadata.finalizers = None;
                }
                Some(Act::Delete) => { prop_assert!(!held, "the Pod is left unready"); return Ok(()); }
                None => match plan.wake {
                    Some(wake) => { prop_assert!(wake > at(now)); now = wake.as_second(); }
                    None => {
                        prop_assert!(there && started && deadline.is_none(), "waits for nothing");
                        return Ok(());
                    }
                }
            }
        }
        prop_assert!(false, "never settles");
    }
}
