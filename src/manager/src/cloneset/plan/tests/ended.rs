//! Pods that have ended for good, and stay to be looked at: evicted ones, or such as have done their work.

use serde_json::json;

use super::cases::settle;
use super::histories::spec;
use super::world::{World, owned};
use kruise_api::keys;

#[test]
fn a_pod_that_has_ended_counts_for_nothing_and_another_takes_its_place() {
    for (phase, reuse) in [("Failed", false), ("Succeeded", false), ("Failed", true)] {
        let mut world = World::new(spec(false, true));
        world.edit(&json!({ "scaleStrategy": { "enablePVCReuse": reuse } }));
        settle(&mut world);
        let ended = world.pods.keys().next().unwrap().clone();
        world.end(&ended, phase);
        let data = world.claims[&format!("data-{ended}")].clone();
        settle(&mut world);
        if reuse {
            assert_eq!(world.pods.len(), 5);
            assert_eq!(
                world.pods[&ended]["status"]["phase"], "Running",
                "it has its place, and its data"
            );
            assert_eq!(world.claims[&format!("data-{ended}")], data);
            continue;
        }
        assert_eq!(world.pods.len(), 6, "it is nobody's to delete");
        let status = &world.set["status"];
        for count in ["replicas", "readyReplicas", "updatedAvailableReplicas"] {
            assert_eq!(status[count], 5, "{count}");
        }
        let pod = &world.pods[&ended]["metadata"];
        let claim = &world.claims[&format!("data-{ended}")];
        let with_it = owned(claim, pod["uid"].as_str().unwrap());
        assert!(with_it, "without reuse, its claim goes with it: {claim}");
        let id = &pod["labels"][keys::CLONESET_INSTANCE_ID];
        let others = world.pods.iter().filter(|(name, _)| **name != ended);
        let mut ids = others.map(|(_, pod)| &pod["metadata"]["labels"][keys::CLONESET_INSTANCE_ID]);
        assert!(ids.all(|other| other != id));
    }
}
