//! Pods that have ended permanently and are kept for inspection: evicted or completed ones.

use serde_json::json;

use super::fake_cluster::{FakeCluster, has_owner};
use super::random_histories::clone_set_spec;
use super::scenarios::settle;
use kruise_api::keys;

#[test]
fn terminal_pod_is_replaced_and_not_counted() {
    for (phase, reuse) in [("Failed", false), ("Succeeded", false), ("Failed", true)] {
        let mut cluster = FakeCluster::new(clone_set_spec(false, true));
        cluster.edit(&json!({ "scaleStrategy": { "enablePVCReuse": reuse } }));
        settle(&mut cluster);
        let ended = cluster.pods.keys().next().unwrap().clone();
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
