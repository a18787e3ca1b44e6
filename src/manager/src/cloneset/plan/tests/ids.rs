//! Instance ids: what a Pod's name ends in, and what its claims share with it.

use std::collections::BTreeSet;

use serde_json::json;

use super::histories::spec;
use super::world::World;
use crate::cloneset::plan::Act;
use kruise_api::keys;

/// The characters that Kubernetes' own random names have.
const CHARACTERS: &str = "bcdfghjklmnpqrstvwxz2456789";

#[test]
fn an_id_has_five_characters_of_those_that_names_are_made_of() {
    let mut world = World::new(spec(false, true));
    world.edit(&json!({ "replicas": 300 }));
    let (_, plan) = world.reconcile();
    let mut ids = BTreeSet::new();
    for act in &plan.acts {
        let Act::CreatePod { name, pod, claims } = act else {
            continue;
        };
        let id = name.strip_prefix("s-").unwrap();
        assert_eq!(id.len(), 5, "{name}");
        assert_eq!(pod["metadata"]["name"], *name);
        assert_eq!(pod["metadata"]["generateName"], "s-");
        for object in [pod, &claims[0]] {
            assert_eq!(object["metadata"]["labels"][keys::CLONESET_INSTANCE_ID], id);
        }
        ids.insert(id);
    }
    assert_eq!(ids.len(), 300, "each has its own");
    let used: BTreeSet<char> = ids.iter().flat_map(|id| id.chars()).collect();
    assert_eq!(used, CHARACTERS.chars().collect());
}
