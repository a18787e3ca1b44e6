//! Instance IDs: the suffix of a Pod's name, which its claims share.

use std::collections::BTreeSet;

use serde_json::json;

use super::fake_cluster::FakeCluster;
use super::random_histories::clone_set_spec;
use crate::cloneset::plan::Action;
use kruise_api::keys;

/// The characters of Kubernetes' own random names.
const ID_CHARACTERS: &str = "bcdfghjklmnpqrstvwxz2456789";

#[test]
fn instance_ids_have_five_name_characters() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    cluster.edit(&json!({ "replicas": 300 }));
    let (_, plan) = cluster.reconcile();
    let mut ids = BTreeSet::new();
    for action in &plan.actions {
        let Action::CreatePod { name, pod, claims } = action else {
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
    assert_eq!(ids.len(), 300, "IDs must be unique");
    let used: BTreeSet<char> = ids.iter().flat_map(|id| id.chars()).collect();
    assert_eq!(used, ID_CHARACTERS.chars().collect());
}
