//! What goes: of too many Pods those that serve least, that cost least, and that are crowded; Pods that are evicted, and
//! whole CloneSets.

use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::field::Field;
use crate::kubelet::{NO_IMAGE, NO_NODE, bind};
use crate::pods::name;
use crate::world::world;
use support::untyped::untyped;

const ZONE: &str = "example.com/zone";
/// Nodes and their zones.
const NODES: [(&str, &str); 3] = [("crowded-1", "a"), ("crowded-2", "a"), ("alone", "b")];

async fn nodes(field: &Field) {
    let nodes = untyped(&field.admin, "", "v1", "Node", None);
    for (name, zone) in NODES {
        field
            .create(
                &nodes,
                json!({ "metadata": { "name": name, "labels": { ZONE: zone } } }),
            )
            .await;
    }
}

/// Says what the deletion of a Pod costs, and gives it another image in the same write, by which it is seen that the
/// manager knows.
async fn cost(field: &Field, pod: &str, cost: &str, image: &str) {
    let patch = Patch::Strategic(json!({
        "metadata": { "annotations": { "controller.kubernetes.io/pod-deletion-cost": cost } },
        "spec": { "containers": [{ "name": "app", "image": image }] },
    }));
    field
        .pods()
        .patch(pod, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

async fn ready(field: &Field, count: i32) {
    field
        .status("web", &format!("{count} ready"), |set| {
            set.status.as_ref().unwrap().ready_replicas == count
        })
        .await;
}

/// Scales to so many; the names of those that stay.
async fn scaled(field: &Field, count: usize) -> Vec<String> {
    field.edit("web", json!({ "spec": { "replicas": count } })).await;
    let pods = field
        .until_pods("web", "scaled in", |pods| pods.len() == count)
        .await;
    pods.iter().map(name).collect()
}

#[tokio::test]
async fn of_too_many_pods_the_unready_the_crowded_and_the_cheap_go_first() {
    let field = Field::new(world(), "too-many").await;
    nodes(&field).await;
    let constraint = json!({ "maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": { "matchLabels": { "app": "web" } } });
    let template = json!({ "spec": {
        "nodeSelector": { (NO_NODE): "true" }, "topologySpreadConstraints": [constraint] } });
    field
        .set("web", json!({ "replicas": 4, "template": template }))
        .await;
    let pods = field.until_pods("web", "four", |pods| pods.len() == 4).await;
    let names: Vec<String> = pods.iter().map(name).collect();
    // The one in a zone of its own comes last, and would go first if zones were not known.
    for (at, node) in [(1, "crowded-1"), (2, "crowded-2"), (3, "crowded-1"), (0, "alone")] {
        bind(&field.pods(), &names[at], node).await.unwrap();
        let count = if at == 0 { 4 } else { i32::try_from(at).unwrap() };
        ready(&field, count).await;
    }

    cost(&field, &names[3], "100", NO_IMAGE).await;
    ready(&field, 3).await;
    assert_eq!(
        scaled(&field, 3).await,
        names[..3],
        "an unready one goes at any cost"
    );

    let left = scaled(&field, 2).await;
    assert!(
        left.contains(&names[0]),
        "{left:?} of {names:?}: one of two in a zone goes"
    );

    // It is the last to have become ready again, so that nothing but its cost speaks for it.
    cost(&field, &names[0], "10", NO_IMAGE).await;
    ready(&field, 1).await;
    cost(&field, &names[0], "10", "example.com/app:1").await;
    ready(&field, 2).await;
    assert_eq!(scaled(&field, 1).await, names[..1], "the cheaper one goes");
}

#[tokio::test]
async fn another_takes_the_place_of_an_evicted_pod() {
    let field = Field::new(world(), "evicted").await;
    field.set("web", json!({})).await;
    field.settled("web").await;
    let pods = field.pods_of("web").await;
    let evicted = name(&pods[0]);
    let status = json!({ "status": { "phase": "Failed", "reason": "Evicted", "message": "The node was low on resource",
        "conditions": [{ "type": "Ready", "status": "False" }] } });
    field
        .pods()
        .patch_status(&evicted, &PatchParams::default(), &Patch::Strategic(status))
        .await
        .unwrap();
    let another = |pods: &[&Value]| {
        let mut new = pods.iter().filter(|pod| pod["status"]["phase"] != "Failed");
        pods.len() == 4 && new.all(|pod| pod["status"]["phase"] == "Running")
    };
    let after = field.until_pods("web", "one in its place", another).await;
    assert!(
        after.iter().any(|pod| name(pod) == evicted),
        "it stays to be looked at"
    );
    // One fewer says that the status has been written since.
    field.edit("web", json!({ "spec": { "replicas": 2 } })).await;
    let set = field.settled("web").await;
    assert_eq!(set.status.unwrap().replicas, 2);
    let left = |pods: &[&Value]| pods.len() == 3 && pods.iter().any(|pod| name(pod) == evicted);
    field.until_pods("web", "two and the evicted one", left).await;
}

/// In the foreground, the CloneSet stays until its Pods are gone.
#[tokio::test]
async fn a_cloneset_that_goes_makes_no_pods_in_the_place_of_those_that_go() {
    let field = Field::new(world(), "foreground").await;
    field.set("web", json!({})).await;
    field.settled("web").await;
    let foreground = DeleteParams::foreground();
    field.sets().delete("web", &foreground).await.unwrap();
    let gone = name(&field.pods_of("web").await[0]);
    let before = field.writes().len();
    field.pods().delete(&gone, &Default::default()).await.unwrap();
    let two = |pods: &[&Value]| pods.len() == 2 && pods.iter().all(|pod| name(pod) != gone);
    field.until_pods("web", "one is gone", two).await;
    field.image("web", "example.com/app:2").await;
    // What comes after all that has been looked at after it.
    field.set("other", json!({ "replicas": 1 })).await;
    field.settled("other").await;
    let pods = field.pods_of("web").await;
    assert_eq!(pods.len(), 2);
    assert!(
        pods.iter()
            .all(|pod| pod["spec"]["containers"][0]["image"] == "example.com/app:1")
    );
    let about_web =
        |write: &&(String, String, String)| write.1.starts_with("pods") && write.2.starts_with("web");
    let writes = field.writes();
    let after: Vec<_> = writes[before..].iter().filter(about_web).collect();
    assert!(after.is_empty(), "{after:?}");
}
