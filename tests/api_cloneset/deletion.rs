//! Deletions: which Pods a scale-down picks (not ready, low deletion cost, crowded node or zone), evicted Pods, and
//! whole CloneSets.

use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::fake_kubelet::{NO_IMAGE, NO_NODE, bind_pod};
use crate::fixture::Fixture;
use crate::pods::name;
use crate::test_cluster::shared_cluster;
use support::untyped::untyped;

const ZONE: &str = "example.com/zone";
/// Nodes and their zones.
const NODES: [(&str, &str); 3] = [("crowded-1", "a"), ("crowded-2", "a"), ("alone", "b")];

async fn create_nodes(fixture: &Fixture) {
    let nodes = untyped(&fixture.admin, "", "v1", "Node", None);
    for (name, zone) in NODES {
        fixture
            .create(
                &nodes,
                json!({ "metadata": { "name": name, "labels": { ZONE: zone } } }),
            )
            .await;
    }
}

/// Sets a Pod's deletion cost, and another image in the same write: that image shows when the manager has observed the
/// Pod.
async fn set_deletion_cost(fixture: &Fixture, pod: &str, cost: &str, image: &str) {
    let patch = Patch::Strategic(json!({
        "metadata": { "annotations": { "controller.kubernetes.io/pod-deletion-cost": cost } },
        "spec": { "containers": [{ "name": "app", "image": image }] },
    }));
    fixture
        .pods()
        .patch(pod, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

async fn wait_for_ready_replicas(fixture: &Fixture, count: i32) {
    fixture
        .wait_status("web", &format!("{count} ready"), |set| {
            set.status.as_ref().unwrap().ready_replicas == count
        })
        .await;
}

/// Scales to `count` Pods; returns the names of the Pods that are kept.
async fn scale_to(fixture: &Fixture, count: usize) -> Vec<String> {
    fixture
        .patch_set("web", json!({ "spec": { "replicas": count } }))
        .await;
    let pods = fixture
        .wait_pods("web", "scaled in", |pods| pods.len() == count)
        .await;
    pods.iter().map(name).collect()
}

#[tokio::test]
async fn scale_in_deletes_unready_crowded_and_low_cost_pods_first() {
    let fixture = Fixture::new(shared_cluster(), "too-many").await;
    create_nodes(&fixture).await;
    let constraint = json!({ "maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": { "matchLabels": { "app": "web" } } });
    let template = json!({ "spec": {
        "nodeSelector": { (NO_NODE): "true" }, "topologySpreadConstraints": [constraint] } });
    fixture
        .create_cloneset("web", json!({ "replicas": 4, "template": template }))
        .await;
    let pods = fixture.wait_pods("web", "four", |pods| pods.len() == 4).await;
    let names: Vec<String> = pods.iter().map(name).collect();
    // The Pod in a zone of its own is deleted last; without zones it would be the first.
    for (index, node) in [(1, "crowded-1"), (2, "crowded-2"), (3, "crowded-1"), (0, "alone")] {
        bind_pod(&fixture.pods(), &names[index], node).await.unwrap();
        let count = if index == 0 {
            4
        } else {
            i32::try_from(index).unwrap()
        };
        wait_for_ready_replicas(&fixture, count).await;
    }

    set_deletion_cost(&fixture, &names[3], "100", NO_IMAGE).await;
    wait_for_ready_replicas(&fixture, 3).await;
    assert_eq!(
        scale_to(&fixture, 3).await,
        names[..3],
        "an unready one goes at any cost"
    );

    let remaining = scale_to(&fixture, 2).await;
    assert!(
        remaining.contains(&names[0]),
        "{remaining:?} of {names:?}: one of two in a zone goes"
    );

    // It became ready last, so only its cost makes it the first to be deleted.
    set_deletion_cost(&fixture, &names[0], "10", NO_IMAGE).await;
    wait_for_ready_replicas(&fixture, 1).await;
    set_deletion_cost(&fixture, &names[0], "10", "example.com/app:1").await;
    wait_for_ready_replicas(&fixture, 2).await;
    assert_eq!(scale_to(&fixture, 1).await, names[..1], "the cheaper one goes");
}

#[tokio::test]
async fn evicted_pod_is_replaced() {
    let fixture = Fixture::new(shared_cluster(), "evicted").await;
    fixture.create_cloneset("web", json!({})).await;
    fixture.wait_settled("web").await;
    let pods = fixture.pods_of("web").await;
    let evicted = name(&pods[0]);
    let status = json!({ "status": { "phase": "Failed", "reason": "Evicted", "message": "The node was low on resource",
        "conditions": [{ "type": "Ready", "status": "False" }] } });
    fixture
        .pods()
        .patch_status(&evicted, &PatchParams::default(), &Patch::Strategic(status))
        .await
        .unwrap();
    let replaced = |pods: &[&Value]| {
        let mut new = pods.iter().filter(|pod| pod["status"]["phase"] != "Failed");
        pods.len() == 4 && new.all(|pod| pod["status"]["phase"] == "Running")
    };
    let after = fixture.wait_pods("web", "one in its place", replaced).await;
    assert!(
        after.iter().any(|pod| name(pod) == evicted),
        "the evicted Pod is kept"
    );
    // One Pod fewer shows that the status was written since.
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 2 } }))
        .await;
    let set = fixture.wait_settled("web").await;
    assert_eq!(set.status.unwrap().replicas, 2);
    let expected_pods = |pods: &[&Value]| pods.len() == 3 && pods.iter().any(|pod| name(pod) == evicted);
    fixture
        .wait_pods("web", "two and the evicted one", expected_pods)
        .await;
}

/// With foreground deletion, the CloneSet is kept until its Pods are deleted.
#[tokio::test]
async fn terminating_cloneset_creates_no_replacement_pods() {
    let fixture = Fixture::new(shared_cluster(), "foreground").await;
    fixture.create_cloneset("web", json!({})).await;
    fixture.wait_settled("web").await;
    let foreground = DeleteParams::foreground();
    fixture.sets().delete("web", &foreground).await.unwrap();
    let deleted = name(&fixture.pods_of("web").await[0]);
    let before = fixture.accepted_writes().len();
    fixture
        .pods()
        .delete(&deleted, &Default::default())
        .await
        .unwrap();
    let two_remaining = |pods: &[&Value]| pods.len() == 2 && pods.iter().all(|pod| name(pod) != deleted);
    fixture.wait_pods("web", "one is gone", two_remaining).await;
    fixture.set_image("web", "example.com/app:2").await;
    // When this later CloneSet is reconciled, so are the earlier changes.
    fixture.create_cloneset("other", json!({ "replicas": 1 })).await;
    fixture.wait_settled("other").await;
    let pods = fixture.pods_of("web").await;
    assert_eq!(pods.len(), 2);
    assert!(
        pods.iter()
            .all(|pod| pod["spec"]["containers"][0]["image"] == "example.com/app:1")
    );
    let about_web =
        |write: &&(String, String, String)| write.1.starts_with("pods") && write.2.starts_with("web");
    let writes = fixture.accepted_writes();
    let after: Vec<_> = writes[before..].iter().filter(about_web).collect();
    assert!(after.is_empty(), "{after:?}");
}
