//! Pods that have ended permanently and are kept for inspection: evicted or completed ones.

use jiff::ToSpan;
use serde_json::json;

use super::fake_cluster::{FakeCluster, has_owner};
use super::random_histories::clone_set_spec;
use super::scenarios::{run_kubelets, settle, waiting_message};
use kruise_api::keys;

#[test]
fn terminal_pod_is_replaced_and_not_counted() {
    for (phase, reuse) in [("Failed", false), ("Succeeded", false), ("Failed", true)] {
        let mut cluster = FakeCluster::new(clone_set_spec(false, true));
        cluster.edit(&json!({ "scaleStrategy": { "enablePVCReuse": reuse } }));
        settle(&mut cluster);
        let ended = cluster.pods.keys().next().unwrap().clone();
        cluster.now = cluster.now.checked_add(1.minute()).unwrap();
        cluster.end_pod(&ended, phase);
        let data = cluster.claims[&format!("data-{ended}")].clone();
        settle(&mut cluster);
        if reuse {
            assert_eq!(cluster.pods.len(), 5);
            assert_eq!(
                cluster.pods[&ended]["status"]["phase"], "Running",
                "its replacement has its name and its data"
            );
            assert_eq!(cluster.claims[&format!("data-{ended}")], data);
            continue;
        }
        assert_eq!(cluster.pods.len(), 6, "a Pod without claims is not deleted");
        let status = &cluster.set["status"];
        for count in ["replicas", "readyReplicas", "updatedAvailableReplicas"] {
            assert_eq!(status[count], 5, "{count}");
        }
        let pod = &cluster.pods[&ended]["metadata"];
        let claim = &cluster.claims[&format!("data-{ended}")];
        let transferred = has_owner(claim, pod["uid"].as_str().unwrap());
        assert!(
            transferred,
            "without reuse, its claim is deleted with it: {claim}"
        );
        let id = &pod["labels"][keys::CLONESET_INSTANCE_ID];
        let others = cluster.pods.iter().filter(|(name, _)| **name != ended);
        let mut ids = others.map(|(_, pod)| &pod["metadata"]["labels"][keys::CLONESET_INSTANCE_ID]);
        assert!(ids.all(|other| other != id));
    }
}

/// A node, or a policy, ends all new Pods at once.
#[test]
fn pods_that_end_at_once_are_not_replaced_without_end() {
    for with_claims in [false, true] {
        let mut cluster = FakeCluster::new(clone_set_spec(false, with_claims));
        let mut ended = 0;
        for _ in 0..600 {
            cluster.reconcile();
            let running: Vec<String> = cluster
                .pods
                .iter()
                .filter(|(_, pod)| pod["status"]["phase"] != "Failed")
                .map(|(name, _)| name.clone())
                .collect();
            ended += running.len();
            for name in running {
                cluster.end_pod(&name, "Failed");
            }
            cluster.now = cluster.now.checked_add(1.second()).unwrap();
        }
        // Each of the five every 32 s, or every 2 s if the evidence is deleted for its claims.
        let most = if with_claims {
            5 * 600 / 2
        } else {
            5 * (600 / 32 + 2)
        };
        assert!((10..=most).contains(&ended), "{with_claims}: {ended} Pods");
    }
}

#[test]
fn an_early_end_delays_only_its_own_replacement() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    let ended = cluster.pods.keys().next().unwrap().clone();
    cluster.end_pod(&ended, "Failed");
    cluster.now = cluster.now.checked_sub(5.seconds()).unwrap();
    cluster.pods.get_mut(&ended).unwrap()["metadata"]["creationTimestamp"] = json!(cluster.now.to_string());
    cluster.edit(&json!({ "replicas": 7, "scaleStrategy": { "maxUnavailable": 2 } }));
    let (_, plan) = cluster.reconcile();
    assert_eq!(
        cluster.pods.len(),
        7,
        "the ended one, four others, and two that were added"
    );
    assert_eq!(plan.requeue_at, cluster.now.checked_add(2.seconds()).ok());
    run_kubelets(&mut cluster);
    cluster.reconcile();
    let message = waiting_message(&cluster);
    assert!(
        message.contains(&ended) && message.contains("within a minute"),
        "{message}"
    );
    cluster.now = cluster.now.checked_add(2.seconds()).unwrap();
    settle(&mut cluster);
    assert_eq!(cluster.pods.len(), 8);
}

#[test]
fn early_end_delays_no_replacement_until_a_clock_that_was_set_back_is_there_again() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    let ended = cluster.pods.keys().next().unwrap().clone();
    cluster.end_pod(&ended, "Failed");
    cluster.now = cluster.now.checked_sub(1.hour()).unwrap();
    settle(&mut cluster);
    assert_eq!(cluster.pods.len(), 6);
}

/// The hook may be there to save what an ended Pod left.
#[test]
fn ended_pod_is_not_deleted_before_its_hook_releases_it() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    cluster.edit(&json!({ "scaleStrategy": { "enablePVCReuse": true },
        "lifecycle": { "preDelete": { "labelsHandler": { "hook": "on" } } } }));
    settle(&mut cluster);
    let ended = cluster.pods.keys().next().unwrap().clone();
    cluster.now = cluster.now.checked_add(1.minute()).unwrap();
    cluster.pods.get_mut(&ended).unwrap()["metadata"]["labels"]["hook"] = json!("on");
    cluster.end_pod(&ended, "Failed");
    settle(&mut cluster);
    let pod = &cluster.pods[&ended];
    assert_eq!(pod["status"]["phase"], "Failed", "not deleted yet");
    assert_eq!(
        pod["metadata"]["labels"][keys::LIFECYCLE_STATE],
        "PreparingDelete"
    );
    let labels = cluster.pods.get_mut(&ended).unwrap()["metadata"]["labels"].as_object_mut();
    labels.unwrap().remove("hook");
    settle(&mut cluster);
    assert_eq!(cluster.pods[&ended]["status"]["phase"], "Running", "replaced");
}
