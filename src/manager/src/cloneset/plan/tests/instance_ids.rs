//! Instance IDs: the suffix of a Pod's name, which its claims share.

use std::collections::BTreeSet;

use serde_json::json;

use super::fake_cluster::{FakeCluster, owner_reference};
use super::random_histories::clone_set_spec;
use super::scenarios::settle;
use crate::cloneset::plan::Action;
use kruise_api::{keys, names};

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

/// Otherwise no other Pod would be created, because a refused creation is tried again before others.
#[test]
fn claims_with_ids_that_no_pod_can_have_are_not_used() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    for id in ["", "A_b", "x..y"] {
        let name = format!("data-{}", cluster.claims.len());
        let labels = json!({ keys::CLONESET_INSTANCE_ID: id });
        let metadata = json!({ "name": name, "labels": labels, "ownerReferences": [owner_reference()] });
        cluster.claims.insert(name, json!({ "metadata": metadata }));
    }
    settle(&mut cluster);
    let valid = cluster.pods.keys().filter(|name| names::is_subdomain(name));
    assert_eq!(valid.count(), 5, "{:?}", cluster.pods.keys());
    assert_eq!((cluster.pods.len(), cluster.claims.len()), (5, 8));
}
