//! Claims with another owner: the CloneSet uses them nevertheless, and the other one remains an owner.

use std::collections::BTreeSet;

use jiff::ToSpan;
use serde_json::{Value, json};

use super::events::share_claim;
use super::fake_cluster::{BACKUP, FakeCluster, has_owner};
use super::random_histories::{clone_set_spec, edit_rolling_update};
use super::scenarios::{run_kubelets, settle};
use crate::cloneset::plan::{Action, PatchReason};
use kruise_api::keys;

/// A Pod with a claim that has another owner: the last or the first in the list, or the controller.
fn cluster_with_shared_claim(reuse: bool, kind: u8) -> FakeCluster {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    cluster.edit(&json!({ "replicas": 1, "scaleStrategy": { "enablePVCReuse": reuse } }));
    settle(&mut cluster);
    share_claim(&mut cluster, kind);
    cluster
}

fn only_claim(cluster: &FakeCluster) -> &Value {
    assert_eq!(cluster.claims.len(), 1);
    cluster.claims.values().next().unwrap()
}

#[test]
fn shared_claim_moves_to_pod_and_keeps_other_owner() {
    for how in 0..4 {
        let mut cluster = cluster_with_shared_claim(true, how);
        let name = cluster.pods.keys().next().unwrap().clone();
        let uid = cluster.pods[&name]["metadata"]["uid"]
            .as_str()
            .unwrap()
            .to_owned();
        cluster.pods.get_mut(&name).unwrap()["metadata"]["finalizers"] = json!(["example.io/late"]);
        cluster.edit(&json!({ "replicas": 0 }));
        settle(&mut cluster);
        let claim = only_claim(&cluster);
        let owners = [uid.as_str(), BACKUP, "set"].map(|uid| has_owner(claim, uid));
        assert_eq!(owners, [true, true, false], "{how}: {claim}");
        cluster.pods.get_mut(&name).unwrap()["metadata"]["finalizers"] = json!([]);
        cluster.collect_garbage();
        settle(&mut cluster);
        let owners = [uid.as_str(), BACKUP, "set"].map(|uid| has_owner(only_claim(&cluster), uid));
        assert_eq!(owners, [false, true, false], "{how}");
    }
}

#[test]
fn shared_claim_is_reused_or_left_to_other_owner() {
    for (reuse, how) in [false, true]
        .into_iter()
        .flat_map(|r| (0..4).map(move |how| (r, how)))
    {
        let mut cluster = cluster_with_shared_claim(reuse, how);
        let name = cluster.pods.keys().next().unwrap().clone();
        let claim = cluster.claims.keys().next().unwrap().clone();
        cluster.delete_pod(&name);
        settle(&mut cluster);
        assert_eq!(cluster.pods.contains_key(&name), reuse, "{how}");
        let remaining = &cluster.claims[&claim];
        assert_eq!(
            (has_owner(remaining, BACKUP), has_owner(remaining, "set")),
            (true, reuse),
            "{how}"
        );
        let ours = cluster.claims.values().filter(|claim| has_owner(claim, "set"));
        assert_eq!(ours.count(), 1, "{how}");
    }
}

/// A deletion without dependents orphaned them.
#[test]
fn orphan_claims_are_adopted_with_their_pods() {
    for reuse in [false, true] {
        let mut cluster = FakeCluster::new(clone_set_spec(false, true));
        cluster.edit(&json!({ "replicas": 3, "scaleStrategy": { "enablePVCReuse": reuse } }));
        settle(&mut cluster);
        let (pods, claims) = (cluster.pods.clone(), cluster.claims.clone());
        cluster.recreate_without_dependents();
        assert!(!claims.is_empty() && !cluster.claims.values().any(|claim| has_owner(claim, "set")));
        let (_, plan) = cluster.reconcile();
        for action in &plan.actions {
            let Action::PatchPod {
                name,
                reason: why,
                claims,
                ..
            } = action
            else {
                panic!("{action:?}");
            };
            let names: Vec<&String> = claims.iter().map(|claim| &claim.name).collect();
            assert_eq!((*why, names), (PatchReason::Adopt, vec![&format!("data-{name}")]));
        }
        settle(&mut cluster);
        assert_eq!(
            cluster.pods.keys().collect::<Vec<_>>(),
            pods.keys().collect::<Vec<_>>()
        );
        assert!(
            cluster.claims.values().all(|claim| has_owner(claim, "set")),
            "{reuse}"
        );
        // A new Pod of the same name gets its data; claims of surplus Pods are deleted.
        let name = pods.keys().next().unwrap();
        cluster.delete_pod(name);
        settle(&mut cluster);
        assert_eq!(cluster.pods.contains_key(name), reuse);
        cluster.edit(&json!({ "replicas": 1 }));
        settle(&mut cluster);
        assert_eq!((cluster.pods.len(), cluster.claims.len()), (1, 1), "{reuse}");
    }
}

/// Only one of the Pod's two claims is left to the CloneSet.
#[test]
fn pod_is_replaced_under_another_name_if_a_claim_is_not_ours() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    let templates = ["data", "logs"].map(|name| json!({ "metadata": { "name": name }, "spec": { "x": 1 } }));
    cluster.edit(&json!({ "replicas": 3, "volumeClaimTemplates": templates }));
    settle(&mut cluster);
    let name = cluster.pods.keys().next().unwrap().clone();
    let [data, logs] = ["data", "logs"].map(|template| format!("{template}-{name}"));
    cluster.claims.get_mut(&logs).unwrap()["metadata"]["ownerReferences"] = json!([]);
    cluster.delete_pod(&name);
    for _ in 0..20 {
        cluster.reconcile();
        run_kubelets(&mut cluster);
        cluster.now = cluster.now.checked_add(31.seconds()).unwrap();
    }
    assert_eq!(cluster.pods.len(), 3);
    assert!(!cluster.pods.contains_key(&name));
    assert!(has_owner(&cluster.claims[&data], "set"), "its data is kept");

    // After an edit, the claims are tried again: they are the CloneSet's once more.
    let owners = cluster.claims[&data]["metadata"]["ownerReferences"].clone();
    cluster.claims.get_mut(&logs).unwrap()["metadata"]["ownerReferences"] = owners;
    cluster.edit(&json!({ "replicas": 4 }));
    settle(&mut cluster);
    assert!(cluster.pods.contains_key(&name));
    assert_eq!((cluster.pods.len(), cluster.claims.len()), (4, 8));
}

/// A user may have copied the labels of a running Pod into the template, or changed them on a Pod.
#[test]
fn claims_of_running_pods_stay_whatever_their_labels_become() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    cluster.edit(&json!({ "replicas": 3, "scaleStrategy": { "enablePVCReuse": false } }));
    edit_rolling_update(
        &mut cluster,
        json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 3 }),
    );
    settle(&mut cluster);
    let copied = cluster.pods.values().next().unwrap()["metadata"].clone();
    let (pods, claims) = (cluster.pods.len(), cluster.claims.len());
    assert_eq!((pods, claims), (3, 3));
    let labels = copied["labels"].clone();
    let annotations =
        json!({ "note": "2", keys::IN_PLACE_UPDATE_STATE: "{}", keys::IN_PLACE_UPDATE_GRACE: "{}" });
    cluster.edit(&json!({ "template": { "metadata": { "labels": labels, "annotations": annotations } } }));
    settle(&mut cluster);
    let ids: BTreeSet<_> = cluster
        .pods
        .values()
        .map(|pod| pod["metadata"]["labels"][keys::CLONESET_INSTANCE_ID].to_string())
        .collect();
    assert_eq!((ids.len(), cluster.claims.len()), (3, 3), "{ids:?}");
    assert_eq!(cluster.set["status"]["updatedReplicas"], 3);
    for pod in cluster.pods.values() {
        assert_eq!(pod["metadata"]["annotations"]["note"], "2");
        assert!(pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_GRACE].is_null());
    }

    let name = cluster.pods.keys().next().unwrap().clone();
    cluster.pods.get_mut(&name).unwrap()["metadata"]["labels"][keys::CLONESET_INSTANCE_ID] = json!("other");
    settle(&mut cluster);
    assert_eq!(cluster.claims.len(), 3);

    // A Pod takes its own claim along when it is deleted, and not that of the Pod whose ID its label has.
    let others = cluster.pods.keys().skip(1).take(2).cloned().collect::<Vec<_>>();
    let id = others[1].strip_prefix("s-").unwrap().to_owned();
    cluster.pods.get_mut(&others[0]).unwrap()["metadata"]["labels"][keys::CLONESET_INSTANCE_ID] = json!(id);
    cluster.edit(&json!({ "replicas": 2, "scaleStrategy": { "podsToDelete": [others[0]] } }));
    settle(&mut cluster);
    assert!(
        cluster.claims.contains_key(&format!("data-{}", others[1])),
        "{:?}",
        cluster.claims.keys()
    );
}
