//! Pods that are ready, and not for as long as `minReadySeconds` yet.

use serde_json::json;

use super::cases::{kubelets, settle};
use super::histories::{container, rolling, spec};
use super::world::World;
use crate::cloneset::plan::{Act, Concern, Failure, Subject, Why};

/// A bad canary that has just become ready serves nobody's budget, so taking it back does not wait for ten minutes.
#[test]
fn a_rollback_deletes_a_pod_that_is_ready_and_not_available_at_once() {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    world.edit(&json!({ "minReadySeconds": 600 }));
    rolling(
        &mut world,
        json!({ "podUpdatePolicy": "ReCreate", "partition": 4 }),
    );
    world.now = world
        .now
        .checked_add(jiff::SignedDuration::from_secs(700))
        .unwrap();
    settle(&mut world);
    container(&mut world, "image", json!("app:2"));
    for _ in 0..6 {
        world.reconcile();
        kubelets(&mut world);
    }
    let new = |world: &World| {
        let pods = world.pods.iter();
        let mut new = pods.filter(|(_, pod)| pod["spec"]["containers"][0]["image"] == "app:2");
        new.next().map(|(name, _)| name.clone())
    };
    let canary = new(&world).expect("one is updated");
    assert_eq!(world.set["status"]["readyReplicas"], 5);
    assert_eq!(world.set["status"]["availableReplicas"], 4);
    rolling(&mut world, json!({ "partition": 0 }));
    container(&mut world, "image", json!("app:1"));
    world.reconcile();
    let (_, plan) = world.reconcile();
    let deleted = plan.acts.iter().filter_map(|act| match act {
        Act::DeletePod { name, .. } => Some(name),
        _ => None,
    });
    assert_eq!(deleted.collect::<Vec<_>>(), [&canary]);
}

/// An image policy that refuses the new image refuses it for every Pod.
#[test]
fn where_updates_are_refused_alike_one_pod_is_tried_at_a_time() {
    let mut world = World::new(spec(false, false));
    rolling(&mut world, json!({ "maxUnavailable": "100%" }));
    settle(&mut world);
    container(&mut world, "image", json!("app:2"));
    let until = world.now.checked_add(jiff::SignedDuration::from_secs(8)).unwrap();
    let failure = Failure {
        of: Concern::Update,
        lasting: true,
        of_resize: false,
        answered: true,
        until,
        message: "image is not allowed".to_owned(),
    };
    let updates = |world: &World| {
        let mut observed = world.observe();
        observed.failures.insert(Subject::Updates, failure.clone());
        let planned = crate::cloneset::plan::plan(&observed, world.now);
        let acts = planned.acts.iter();
        let begun = acts.filter(|act| {
            matches!(
                act,
                Act::PatchPod {
                    why: Why::UpdateInPlace,
                    ..
                }
            )
        });
        (begun.count(), planned.wake)
    };
    assert_eq!(updates(&world), (0, Some(until)));
    world.now = until;
    assert_eq!(updates(&world).0, 1);
}
