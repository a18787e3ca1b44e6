//! Containers that start one after the other: barriers are lifted one by one.

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::jobs::wait_for_event;
use crate::test_cluster::{api, create, shared_cluster, wait_until, wait_until_deleted};

const COMPLETED_ANNOTATION: &str = "apps.kruise.io/container-launch-priority-completed";

/// A Pod whose containers wait for keys of a ConfigMap.
fn pod_with_barriers(name: &str, map_name: &str, priorities: &[(&str, i64)]) -> Value {
    let container = |(container, priority): &(&str, i64)| {
        let key = json!({ "configMapKeyRef": { "name": map_name, "key": format!("p_{priority}") } });
        json!({ "name": container, "image": "i", "env": [{ "name": "KRUISE_CONTAINER_BARRIER", "valueFrom": key }] })
    };
    let containers: Vec<Value> = priorities.iter().map(container).collect();
    let spec = json!({ "nodeName": "nowhere", "terminationGracePeriodSeconds": 0, "containers": containers });
    json!({ "metadata": { "name": name }, "spec": spec })
}

/// Plays kubelet: exactly these containers are ready.
async fn set_ready_containers(pods: &Api<Pod>, name: &str, containers: &[&str]) {
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

fn barrier_keys(map: &ConfigMap) -> Vec<&str> {
    let data = map.data.iter().flatten();
    data.map(|(key, value)| {
        assert_eq!(value, "true");
        key.as_str()
    })
    .collect()
}

fn completed(pod: &Pod) -> bool {
    pod.annotations()
        .get(COMPLETED_ANNOTATION)
        .is_some_and(|value| value == "true")
}

#[tokio::test]
async fn barrier_keys_are_added_as_priorities_become_ready() {
    let admin = shared_cluster().admin().await;
    let (pods, maps): (Api<Pod>, Api<ConfigMap>) = (api(&admin), api(&admin));
    let priorities = [("late", -3), ("first", 7), ("second", 7), ("middle", 0)];
    let pod = create(
        &pods,
        pod_with_barriers("ordered", "ordered-barrier", &priorities),
    )
    .await;
    let name = "ordered-barrier";
    let map = wait_until(&maps, name, "the first key", |map| barrier_keys(map) == ["p_7"]).await;
    let owner = &map.owner_references()[0];
    assert_eq!(
        (owner.kind.as_str(), &owner.uid),
        ("Pod", pod.metadata.uid.as_ref().unwrap())
    );
    set_ready_containers(&pods, "ordered", &["first", "second"]).await;
    wait_until(&maps, name, "the second key", |map| {
        barrier_keys(map) == ["p_0", "p_7"]
    })
    .await;
    assert!(!completed(&pods.get("ordered").await.unwrap()));
    set_ready_containers(&pods, "ordered", &["first", "second", "middle"]).await;
    wait_until(&maps, name, "the last key", |map| {
        barrier_keys(map) == ["p_-3", "p_0", "p_7"]
    })
    .await;
    wait_until(&pods, "ordered", "that it is complete", completed).await;
}

#[tokio::test]
async fn deleted_barrier_is_recreated_with_next_priority() {
    let admin = shared_cluster().admin().await;
    let (pods, maps): (Api<Pod>, Api<ConfigMap>) = (api(&admin), api(&admin));
    let name = "lost-barrier";
    create(
        &pods,
        pod_with_barriers("lost", name, &[("a", 2), ("b", 1), ("c", 0)]),
    )
    .await;
    wait_until(&maps, name, "the first key", |map| barrier_keys(map) == ["p_2"]).await;
    maps.delete(name, &DeleteParams::default()).await.unwrap();
    set_ready_containers(&pods, "lost", &["a"]).await;
    wait_until(&maps, name, "both keys", |map| {
        barrier_keys(map) == ["p_1", "p_2"]
    })
    .await;
}

#[tokio::test]
async fn barrier_of_an_earlier_pod_is_replaced() {
    let admin = shared_cluster().admin().await;
    let (pods, maps): (Api<Pod>, Api<ConfigMap>) = (api(&admin), api(&admin));
    // Without a garbage collector it is not deleted.
    let owner = json!({ "apiVersion": "v1", "kind": "Pod", "name": "again", "uid": "of-another-time" });
    let old = json!({ "metadata": { "name": "again-barrier", "ownerReferences": [owner] },
        "data": { "p_1": "true", "p_0": "true" } });
    create(&maps, old).await;
    let pod = create(
        &pods,
        pod_with_barriers("again", "again-barrier", &[("a", 1), ("b", 0)]),
    )
    .await;
    let uid = pod.metadata.uid.unwrap();
    let has_owner = |map: &ConfigMap| map.owner_references().iter().any(|owner| owner.uid == uid);
    let map = wait_until(&maps, "again-barrier", "one of its own", has_owner).await;
    assert_eq!(barrier_keys(&map), ["p_1"]);
    pods.delete("again", &DeleteParams::default()).await.unwrap();
    wait_until_deleted(&pods, "again").await;
}

#[tokio::test]
async fn foreign_barrier_configmap_is_left_alone() {
    let admin = shared_cluster().admin().await;
    let (pods, maps): (Api<Pod>, Api<ConfigMap>) = (api(&admin), api(&admin));
    create(
        &maps,
        json!({ "metadata": { "name": "theirs-barrier" }, "data": { "p_1": "no" } }),
    )
    .await;
    create(&pods, pod_with_barriers("theirs", "theirs-barrier", &[("a", 1)])).await;
    create(
        &pods,
        pod_with_barriers("other", "of-the-user", &[("a", 1), ("b", 0)]),
    )
    .await;
    // By the time this Pod is reconciled, the two before it are done.
    create(
        &pods,
        pod_with_barriers("ours", "ours-barrier", &[("a", 1), ("b", 0)]),
    )
    .await;
    wait_until(&maps, "ours-barrier", "its key", |map| {
        barrier_keys(map) == ["p_1"]
    })
    .await;
    wait_for_event(&api(&admin), "theirs", "LaunchPriorityBlocked").await;
    let theirs = maps.get("theirs-barrier").await.unwrap();
    assert_eq!(theirs.data.unwrap()["p_1"], "no");
    assert!(!completed(&pods.get("theirs").await.unwrap()));
    assert!(maps.get_opt("of-the-user").await.unwrap().is_none());
}

#[tokio::test]
async fn refused_write_of_a_barrier_is_reported() {
    let admin = shared_cluster().admin().await;
    let (pods, maps): (Api<Pod>, Api<ConfigMap>) = (api(&admin), api(&admin));
    let name = "fixed-barrier";
    create(&pods, pod_with_barriers("fixed", name, &[("a", 1), ("b", 0)])).await;
    wait_until(&maps, name, "the first key", |map| barrier_keys(map) == ["p_1"]).await;
    let immutable = Patch::Merge(json!({ "immutable": true }));
    let patched = maps.patch(name, &PatchParams::default(), &immutable).await;
    patched.unwrap();
    set_ready_containers(&pods, "fixed", &["a"]).await;
    wait_for_event(&api(&admin), "fixed", "LaunchPriorityBlocked").await;
}
