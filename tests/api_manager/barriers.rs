//! Containers that start one after the other: barriers are lifted one by one.

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::jobs::until_event;
use crate::world::{api, create, until, until_gone, world};

const COMPLETED: &str = "apps.kruise.io/container-launch-priority-completed";

/// A Pod whose containers wait for keys of a ConfigMap.
fn waiting(name: &str, map: &str, priorities: &[(&str, i64)]) -> Value {
    let container = |(container, priority): &(&str, i64)| {
        let key = json!({ "configMapKeyRef": { "name": map, "key": format!("p_{priority}") } });
        json!({ "name": container, "image": "i", "env": [{ "name": "KRUISE_CONTAINER_BARRIER", "valueFrom": key }] })
    };
    let containers: Vec<Value> = priorities.iter().map(container).collect();
    let spec = json!({ "nodeName": "nowhere", "terminationGracePeriodSeconds": 0, "containers": containers });
    json!({ "metadata": { "name": name }, "spec": spec })
}

/// Plays kubelet: these containers are ready, and no others.
async fn ready(pods: &Api<Pod>, name: &str, containers: &[&str]) {
    let status = |name: &&str| {
        json!({ "name": name, "ready": true, "restartCount": 0, "image": "i", "imageID": "i",
            "containerID": "containerd://x", "state": { "running": {} } })
    };
    let statuses: Vec<Value> = containers.iter().map(status).collect();
    let patch = json!({ "status": { "phase": "Running", "containerStatuses": statuses } });
    pods.patch_status(name, &PatchParams::default(), &Patch::Strategic(&patch))
        .await
        .unwrap();
}

fn keys(map: &ConfigMap) -> Vec<&str> {
    let data = map.data.iter().flatten();
    data.map(|(key, value)| {
        assert_eq!(value, "true");
        key.as_str()
    })
    .collect()
}

fn completed(pod: &Pod) -> bool {
    pod.annotations()
        .get(COMPLETED)
        .is_some_and(|word| word == "true")
}

#[tokio::test]
async fn each_priority_has_its_turn_when_the_ones_before_are_ready() {
    let admin = world().admin().await;
    let (pods, maps): (Api<Pod>, Api<ConfigMap>) = (api(&admin), api(&admin));
    let priorities = [("late", -3), ("first", 7), ("second", 7), ("middle", 0)];
    let pod = create(&pods, waiting("ordered", "ordered-barrier", &priorities)).await;
    let name = "ordered-barrier";
    let map = until(&maps, name, "the first key", |map| keys(map) == ["p_7"]).await;
    let owner = &map.owner_references()[0];
    assert_eq!(
        (owner.kind.as_str(), &owner.uid),
        ("Pod", pod.metadata.uid.as_ref().unwrap())
    );
    ready(&pods, "ordered", &["first", "second"]).await;
    until(&maps, name, "the second key", |map| keys(map) == ["p_0", "p_7"]).await;
    assert!(!completed(&pods.get("ordered").await.unwrap()));
    ready(&pods, "ordered", &["first", "second", "middle"]).await;
    until(&maps, name, "the last key", |map| {
        keys(map) == ["p_-3", "p_0", "p_7"]
    })
    .await;
    until(&pods, "ordered", "that it is complete", completed).await;
}

#[tokio::test]
async fn what_was_lost_is_there_again_with_the_next_priority() {
    let admin = world().admin().await;
    let (pods, maps): (Api<Pod>, Api<ConfigMap>) = (api(&admin), api(&admin));
    let name = "lost-barrier";
    create(&pods, waiting("lost", name, &[("a", 2), ("b", 1), ("c", 0)])).await;
    until(&maps, name, "the first key", |map| keys(map) == ["p_2"]).await;
    maps.delete(name, &DeleteParams::default()).await.unwrap();
    ready(&pods, "lost", &["a"]).await;
    until(&maps, name, "both keys", |map| keys(map) == ["p_1", "p_2"]).await;
}

#[tokio::test]
async fn keys_of_a_pod_that_had_the_name_before_lift_nothing() {
    let admin = world().admin().await;
    let (pods, maps): (Api<Pod>, Api<ConfigMap>) = (api(&admin), api(&admin));
    // Without a garbage collector it stays.
    let owner = json!({ "apiVersion": "v1", "kind": "Pod", "name": "again", "uid": "of-another-time" });
    let old = json!({ "metadata": { "name": "again-barrier", "ownerReferences": [owner] },
        "data": { "p_1": "true", "p_0": "true" } });
    create(&maps, old).await;
    let pod = create(&pods, waiting("again", "again-barrier", &[("a", 1), ("b", 0)])).await;
    let uid = pod.metadata.uid.unwrap();
    let own = |map: &ConfigMap| map.owner_references().iter().any(|owner| owner.uid == uid);
    let map = until(&maps, "again-barrier", "one of its own", own).await;
    assert_eq!(keys(&map), ["p_1"]);
    pods.delete("again", &DeleteParams::default()).await.unwrap();
    until_gone(&pods, "again").await;
}

#[tokio::test]
async fn what_is_somebody_else_s_is_left_alone() {
    let admin = world().admin().await;
    let (pods, maps): (Api<Pod>, Api<ConfigMap>) = (api(&admin), api(&admin));
    create(
        &maps,
        json!({ "metadata": { "name": "theirs-barrier" }, "data": { "p_1": "no" } }),
    )
    .await;
    create(&pods, waiting("theirs", "theirs-barrier", &[("a", 1)])).await;
    create(&pods, waiting("other", "of-the-user", &[("a", 1), ("b", 0)])).await;
    // Whatever is done for the two before is done by the time that this has its turn.
    create(&pods, waiting("ours", "ours-barrier", &[("a", 1), ("b", 0)])).await;
    until(&maps, "ours-barrier", "its key", |map| keys(map) == ["p_1"]).await;
    until_event(&api(&admin), "theirs", "LaunchPriorityBlocked").await;
    let theirs = maps.get("theirs-barrier").await.unwrap();
    assert_eq!(theirs.data.unwrap()["p_1"], "no");
    assert!(!completed(&pods.get("theirs").await.unwrap()));
    assert!(maps.get_opt("of-the-user").await.unwrap().is_none());
}
