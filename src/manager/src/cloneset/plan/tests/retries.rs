//! What failed by half is taken up again, and nothing is left of it.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::cases::{condition, settle};
use super::faults::Fault;
use super::histories::{rolling, spec};
use super::world::World;
use crate::cloneset::plan::{Act, Concern, Failure, Plan, Subject, Why};
use kruise_api::keys;

/// A CloneSet of two with claims that are not reused; the next act fails in this way.
fn two(fault: Fault) -> World {
    let mut world = World::new(spec(false, true));
    world.edit(&json!({ "replicas": 2, "scaleStrategy": { "enablePVCReuse": false } }));
    (world.failing, world.fault) = (1, fault);
    world
}

fn later(world: &mut World) -> Plan {
    world.now = world.now.checked_add(6.seconds()).unwrap();
    world.reconcile().1
}

/// All comes to rest once what failed may be tried again.
fn at_last(world: &mut World) {
    later(world);
    settle(world);
}

/// Names of the Pods that a plan makes, and how many claims for them.
fn made(plan: &Plan) -> Vec<(String, usize)> {
    let pods = plan.acts.iter().filter_map(|act| match act {
        Act::CreatePod { name, claims, .. } => Some((name.clone(), claims.len())),
        _ => None,
    });
    pods.collect()
}

#[test]
fn claims_of_a_pod_that_is_refused_are_kept_for_the_next_try() {
    let mut world = two(Fault::Refused);
    world.failing = 2;
    let (_, plan) = world.reconcile();
    let names = made(&plan);
    assert_eq!(names.len(), 2);
    let claims: Vec<String> = world.claims.keys().cloned().collect();
    for _ in 0..5 {
        world.failing = 2;
        let plan = later(&mut world);
        let again: Vec<_> = names.iter().map(|(name, _)| (name.clone(), 0)).collect();
        assert_eq!(made(&plan), again);
        assert_eq!(plan.acts.len(), 2, "nothing is written but the Pods: {plan:?}");
    }
    // One is needed still, so the claim of the other goes.
    world.edit(&json!({ "replicas": 1 }));
    at_last(&mut world);
    let kept: Vec<&String> = world.claims.keys().collect();
    assert_eq!(kept, [&claims[0]]);
    assert_eq!(world.pods.keys().collect::<Vec<_>>(), [&names[0].0]);
}

#[test]
fn claims_of_pods_that_are_not_wanted_any_more_go() {
    let mut world = two(Fault::Refused);
    world.failing = 2;
    world.reconcile();
    assert_eq!(world.claims.len(), 2);
    world.edit(&json!({ "replicas": 0 }));
    settle(&mut world);
    assert_eq!(world.claims.len(), 0);
}

#[test]
fn a_pod_that_may_have_been_made_is_not_made_twice() {
    let mut world = two(Fault::Lost);
    let (_, plan) = world.reconcile();
    let names = made(&plan);
    assert_eq!(world.pods.len(), 2);
    assert_eq!(world.observe().pods.len(), 1, "the watch has not shown it");
    let plan = later(&mut world);
    let unknown = names.iter().filter(|(name, _)| made(&plan)[0].0 == *name);
    assert_eq!((unknown.count(), made(&plan).len()), (1, 1), "{plan:?}");
    settle(&mut world);
    assert_eq!(world.pods.len(), 2);
    assert!(world.left.pods.is_empty());
}

#[test]
fn claims_of_a_pod_that_may_turn_up_stay_for_a_while() {
    let mut world = two(Fault::Lost);
    world.edit(&json!({ "replicas": 1 }));
    world.reconcile();
    world.edit(&json!({ "replicas": 0 }));
    let plan = later(&mut world);
    assert_eq!(plan.acts, []);
    assert!(plan.wake.is_some(), "somebody has to look when that is over");
    world.pods.clear();
    for _ in 0..5 {
        later(&mut world);
    }
    assert_eq!(world.claims.len(), 0);
}

/// Two Pods, of which one was to be deleted and is not, but its claim is its own already.
fn half_deleted(reuse: bool) -> World {
    let mut world = two(Fault::HalfDone);
    world.failing = 0;
    world.edit(&json!({ "scaleStrategy": { "enablePVCReuse": reuse } }));
    settle(&mut world);
    world.edit(&json!({ "replicas": 1 }));
    world.failing = 1;
    world.reconcile();
    assert_eq!((world.pods.len(), world.claims.len()), (2, 2));
    assert_eq!(world.observe().given.len(), 1);
    world
}

#[test]
fn a_claim_goes_with_its_pod_whatever_happens_in_between() {
    for (reuse, dies) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut world = half_deleted(reuse);
        let before: Vec<String> = world.claims.keys().cloned().collect();
        if dies {
            world.restart();
        }
        at_last(&mut world);
        assert_eq!((world.pods.len(), world.claims.len()), (1, 1), "reuse {reuse}");
        world.edit(&json!({ "replicas": 2 }));
        settle(&mut world);
        let kept = before.iter().filter(|claim| world.claims.contains_key(*claim));
        assert_eq!(kept.count(), 1, "the other has another one's data");
    }
}

#[test]
fn a_claim_of_a_pod_that_stays_after_all_is_taken_back() {
    for dies in [false, true] {
        let mut world = half_deleted(true);
        world.edit(&json!({ "replicas": 2 }));
        if dies {
            world.restart();
        }
        let (pods, claims) = (world.pods.clone(), world.claims.len());
        at_last(&mut world);
        assert_eq!(
            pods.keys().collect::<Vec<_>>(),
            world.pods.keys().collect::<Vec<_>>()
        );
        assert!(world.observe().given.is_empty());
        let gone = pods.keys().next().unwrap();
        world.delete(gone);
        settle(&mut world);
        assert!(world.pods.contains_key(gone), "another takes the id over");
        assert_eq!(world.claims.len(), claims);
    }
}

#[test]
fn somebody_else_s_name_is_not_tried_again() {
    let mut world = two(Fault::Refused);
    let (_, plan) = world.reconcile();
    let refused = made(&plan)[0].0.clone();
    let foreign: Value = json!({ "metadata": { "name": refused, "uid": "f", "labels": { "app": "x" },
        "ownerReferences": [{ "uid": "another", "controller": true }] }, "spec": {}, "status": {} });
    world.pods.insert(refused.clone(), foreign);
    later(&mut world);
    at_last(&mut world);
    let ours = world.observe().pods;
    assert_eq!(ours.len(), 2);
    assert!(ours.iter().all(|pod| pod.name != refused));
}

/// Its node may be dead. Claims that no Pod has need not wait for it; its own are for the one that takes its place.
#[test]
fn a_pod_that_never_goes_keeps_no_other_from_claims_that_nobody_has() {
    let mut world = two(Fault::Refused);
    world.failing = 0;
    world.edit(&json!({ "scaleStrategy": { "enablePVCReuse": true } }));
    settle(&mut world);
    let names: Vec<String> = world.pods.keys().cloned().collect();
    world.edit(&json!({ "replicas": 1 }));
    world.delete(&names[0]);
    settle(&mut world);
    assert_eq!((world.pods.len(), world.claims.len()), (1, 2));
    world.pods.get_mut(&names[1]).unwrap()["metadata"]["finalizers"] = json!(["example.io/dead"]);
    world.delete(&names[1]);
    let (_, plan) = world.reconcile();
    assert_eq!(made(&plan), [(names[0].clone(), 0)]);

    world.edit(&json!({ "replicas": 2 }));
    settle(&mut world);
    assert_eq!(world.pods.len(), 2, "one of them is going");
    let waits = condition(&world, "Waiting").unwrap().message;
    assert!(
        waits.contains("to terminate, so that its PVCs can be reused"),
        "{waits}"
    );
    world.pods.remove(&names[1]);
    settle(&mut world);
    assert_eq!(
        world.pods.keys().collect::<Vec<_>>(),
        names.iter().collect::<Vec<_>>()
    );
    assert_eq!(world.claims.len(), 2);
}

fn images(world: &mut World, [app, side]: [&str; 2]) {
    let containers = json!([{ "name": "app", "image": app }, { "name": "side", "image": side }]);
    world.edit(&json!({ "template": { "spec": { "containers": containers } } }));
}

/// What the plan does about two Pods that are to run `app:2` after a minute of grace, which is over; the template has these
/// images by now. Where that was refused, the next update may begin after so many seconds.
fn after_the_grace_period(wanted: [&str; 2], refusals: &[i64]) -> Vec<(Why, String)> {
    let mut world = World::new(spec(false, false));
    world.edit(&json!({ "replicas": 2 }));
    let grace = json!({ "gracePeriodSeconds": 60 });
    rolling(
        &mut world,
        json!({ "maxUnavailable": 2, "inPlaceUpdateStrategy": grace }),
    );
    images(&mut world, ["app:1", "side:1"]);
    settle(&mut world);
    images(&mut world, ["app:2", "side:1"]);
    world.reconcile();
    for pod in world.pods.values() {
        assert!(pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_GRACE].is_string());
    }
    world.now = world.now.checked_add(61.seconds()).unwrap();
    images(&mut world, wanted);
    let mut observed = world.observe();
    let failure = |seconds: i64| Failure {
        of: Concern::Update,
        lasting: true,
        of_resize: false,
        answered: true,
        until: world.now.checked_add(seconds.seconds()).unwrap(),
        message: "no".to_owned(),
    };
    for updates in refusals {
        observed.failures.insert(Subject::Updates, failure(*updates));
        let uids = world
            .pods
            .values()
            .map(|pod| pod["metadata"]["uid"].as_str().unwrap());
        let failures = uids.map(|uid| (Subject::Pod(uid.to_owned()), failure(0)));
        observed.failures.extend(failures);
    }
    let planned = crate::cloneset::plan::plan(&observed, world.now);
    let patches = planned.acts.iter().filter_map(|act| match act {
        Act::PatchPod { why, writes, .. } => {
            let last = writes.last().unwrap();
            Some((*why, last.trial.as_deref().unwrap_or(&last.patch).to_string()))
        }
        _ => None,
    });
    patches.collect()
}

#[test]
fn another_revision_takes_over_a_change_that_is_refused_after_its_grace_period() {
    let goes_on = after_the_grace_period(["app:2", "side:2"], &[]);
    assert!(
        goes_on.len() == 2 && goes_on.iter().all(|(why, _)| *why == Why::GoOn),
        "{goes_on:?}"
    );
    let again = after_the_grace_period(["app:2", "side:1"], &[0]);
    assert!(
        again.len() == 2 && again.iter().all(|(why, _)| *why == Why::GoOn),
        "{again:?}"
    );
    assert_eq!(after_the_grace_period(["app:2", "side:2"], &[5]), []);
    let next = after_the_grace_period(["app:2", "side:2"], &[0]);
    assert_eq!(next.len(), 1, "one is tried while updates are refused");
    for (why, trial) in next {
        assert_eq!(why, Why::UpdateInPlace);
        assert!(trial.contains("app:2") && trial.contains("side:2"), "{trial}");
    }
}
