//! Claims that are somebody else's, too: they are the CloneSet's all the same, and the other stays their owner.

use serde_json::{Value, json};

use super::cases::settle;
use super::happenings::share_claim;
use super::histories::spec;
use super::world::{BACKUP, World, owned};
use crate::cloneset::plan::{Act, Why};

/// A Pod with a claim of which somebody else is an owner: the last or the first of them, or the controller.
fn shared(reuse: bool, how: u8) -> World {
    let mut world = World::new(spec(false, true));
    world.edit(&json!({ "replicas": 1, "scaleStrategy": { "enablePVCReuse": reuse } }));
    settle(&mut world);
    share_claim(&mut world, how);
    world
}

fn only(world: &World) -> &Value {
    assert_eq!(world.claims.len(), 1);
    world.claims.values().next().unwrap()
}

#[test]
fn a_claim_of_two_goes_over_to_its_pod_and_stays_the_other_s() {
    for how in 0..4 {
        let mut world = shared(true, how);
        let name = world.pods.keys().next().unwrap().clone();
        let uid = world.pods[&name]["metadata"]["uid"].as_str().unwrap().to_owned();
        world.pods.get_mut(&name).unwrap()["metadata"]["finalizers"] = json!(["example.io/late"]);
        world.edit(&json!({ "replicas": 0 }));
        settle(&mut world);
        let claim = only(&world);
        let owners = [uid.as_str(), BACKUP, "set"].map(|uid| owned(claim, uid));
        assert_eq!(owners, [true, true, false], "{how}: {claim}");
        world.pods.get_mut(&name).unwrap()["metadata"]["finalizers"] = json!([]);
        world.collect();
        settle(&mut world);
        let owners = [uid.as_str(), BACKUP, "set"].map(|uid| owned(only(&world), uid));
        assert_eq!(owners, [false, true, false], "{how}");
    }
}

#[test]
fn a_claim_of_two_is_used_again_or_left_to_the_other() {
    for (reuse, how) in [false, true]
        .into_iter()
        .flat_map(|r| (0..4).map(move |how| (r, how)))
    {
        let mut world = shared(reuse, how);
        let name = world.pods.keys().next().unwrap().clone();
        let claim = world.claims.keys().next().unwrap().clone();
        world.delete(&name);
        settle(&mut world);
        assert_eq!(world.pods.contains_key(&name), reuse, "{how}");
        let left = &world.claims[&claim];
        assert_eq!((owned(left, BACKUP), owned(left, "set")), (true, reuse), "{how}");
        let ours = world.claims.values().filter(|claim| owned(claim, "set"));
        assert_eq!(ours.count(), 1, "{how}");
    }
}

/// A deletion without the dependents left them behind.
#[test]
fn claims_are_adopted_with_the_pods_that_have_them() {
    for reuse in [false, true] {
        let mut world = World::new(spec(false, true));
        world.edit(&json!({ "replicas": 3, "scaleStrategy": { "enablePVCReuse": reuse } }));
        settle(&mut world);
        let (pods, claims) = (world.pods.clone(), world.claims.clone());
        world.orphan();
        assert!(!claims.is_empty() && !world.claims.values().any(|claim| owned(claim, "set")));
        let (_, plan) = world.reconcile();
        for act in &plan.acts {
            let Act::PatchPod {
                name, why, claims, ..
            } = act
            else {
                panic!("{act:?}");
            };
            let names: Vec<&String> = claims.iter().map(|claim| &claim.name).collect();
            assert_eq!((*why, names), (Why::Adopt, vec![&format!("data-{name}")]));
        }
        settle(&mut world);
        assert_eq!(
            world.pods.keys().collect::<Vec<_>>(),
            pods.keys().collect::<Vec<_>>()
        );
        assert!(world.claims.values().all(|claim| owned(claim, "set")), "{reuse}");
        // The next of a Pod's name has its data, and those of Pods that are too many go.
        let name = pods.keys().next().unwrap();
        world.delete(name);
        settle(&mut world);
        assert_eq!(world.pods.contains_key(name), reuse);
        world.edit(&json!({ "replicas": 1 }));
        settle(&mut world);
        assert_eq!((world.pods.len(), world.claims.len()), (1, 1), "{reuse}");
    }
}
