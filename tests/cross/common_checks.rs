//! What must work with any combination of managers and daemons.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase, ContainerRecreateRequestStatus,
};
use kruise_api::image_pull_job::{ImagePullJob, ImagePullJobStatus};
use kruise_api::node_image::{ImagePullPhase, NodeImage};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use testbed::cluster::{Image, NODE_NAME};

use crate::interop_cluster::{InteropCluster, create};

/// Creates a job for this node and waits for its end.
async fn run_job(cluster: &InteropCluster, name: &str, image: &str, extra_spec: Value) -> ImagePullJobStatus {
    let mut spec = json!({ "image": image, "selector": { "names": [NODE_NAME] },
        "completionPolicy": { "type": "Always" }, "pullPolicy": { "backoffLimit": 0, "timeoutSeconds": 60 } });
    json_patch::merge(&mut spec, &extra_spec);
    let images: Api<NodeImage> = Api::all(cluster.client.clone());
    cluster.wait_until(images, NODE_NAME, "there", |_| true).await;
    let jobs: Api<ImagePullJob> = cluster.api();
    create(&jobs, json!({ "metadata": { "name": name }, "spec": spec })).await;
    let ended = cluster
        .wait_until(jobs, name, "ended", |j| {
            j.status.as_ref().is_some_and(|s| s.completion_time.is_some())
        })
        .await;
    ended.status.unwrap()
}

/// Creates a job for this node, which must succeed.
pub async fn run_successful_job(cluster: &InteropCluster, name: &str, image: &str, extra_spec: Value) {
    let status = run_job(cluster, name, image, extra_spec).await;
    let counts = (status.desired, status.active, status.succeeded, status.failed);
    if counts != (1, 0, 1, 0) {
        let images: Api<NodeImage> = Api::all(cluster.client.clone());
        let node = images.get(NODE_NAME).await.unwrap();
        panic!("{name}: {status:?}, {node:?}\n{}", cluster.logs());
    }
}

/// Jobs: an image that is pulled, one that is present, a digest if `digests`, one with a password, and one that does
/// not exist.
pub async fn check_image_pulls(cluster: &InteropCluster, digests: bool) {
    let images: Api<NodeImage> = Api::all(cluster.client.clone());
    let registry = &cluster.node.runtime.registry;
    registry
        .push("cross/large:1", &Image::scratch().random(8).cmd(["none"]))
        .unwrap();
    let listed = || cluster.node.runtime.ctr(&["images", "list", "-q"]).unwrap();
    assert!(!listed().contains("cross/large"));
    run_successful_job(cluster, "pulled", "cross/large:1", json!({})).await;
    assert!(listed().contains("docker.io/cross/large:1"), "{}", listed());
    run_successful_job(cluster, "present", "cross/large:1", json!({})).await;
    let image = images.get(NODE_NAME).await.unwrap();
    let tag = &image.status.unwrap().image_statuses["cross/large"].tags[0];
    assert_eq!((&tag.phase, tag.progress), (&ImagePullPhase::Succeeded, 100));
    assert!(
        tag.image_id
            .as_ref()
            .is_some_and(|id| id.starts_with("cross/large@sha256:")),
        "{tag:?}"
    );
    if digests {
        let table = cluster
            .node
            .runtime
            .ctr(&["images", "list", "name==docker.io/cross/large:1"])
            .unwrap();
        let digest = table
            .split_whitespace()
            .find(|word| word.starts_with("sha256:"))
            .unwrap();
        let digest = format!("cross/large@{digest}");
        run_successful_job(cluster, "digest", &digest, json!({})).await;
    }

    let secret = json!({ "metadata": { "name": "pull" }, "type": "kubernetes.io/dockerconfigjson",
        "stringData": { ".dockerconfigjson": registry.docker_config() } });
    create(&cluster.api::<Secret>(), secret).await;
    let private = format!("{}/cross/large:1", registry.private_host());
    run_successful_job(cluster, "private", &private, json!({ "pullSecrets": ["pull"] })).await;

    let failed = run_job(cluster, "nowhere", "cross/nowhere:1", json!({})).await;
    assert_eq!((failed.succeeded, failed.failed), (0, 1), "{failed:?}");
    assert_eq!(failed.failed_nodes, [NODE_NAME]);
}

/// Container IDs and restart counts of a Pod.
pub fn container_ids(pod: &Pod) -> BTreeMap<String, (String, i32)> {
    let statuses = pod.status.as_ref().and_then(|s| s.container_statuses.as_ref());
    let all = statuses.into_iter().flatten();
    all.map(|s| {
        (
            s.name.clone(),
            (s.container_id.clone().unwrap_or_default(), s.restart_count),
        )
    })
    .collect()
}

pub fn has_condition(pod: &Pod, type_: &str) -> bool {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
    conditions.is_some_and(|all| all.iter().any(|c| c.type_ == type_ && c.status == "True"))
}

/// A request, the number of its containers, and their state before.
pub struct RecreateCase {
    name: &'static str,
    count: usize,
    before: BTreeMap<String, (String, i32)>,
}

/// Requests: one container, three, forced, and after an unready grace period.
pub async fn check_recreate_requests(cluster: &InteropCluster) {
    let cases = [
        ("one", 1, json!({})),
        ("three", 3, json!({ "minStartedSeconds": 1 })),
        ("force", 1, json!({ "forceRecreate": true })),
        ("unready", 1, json!({ "unreadyGracePeriodSeconds": 1 })),
    ];
    for (name, count, _) in &cases {
        create_pod(cluster, name, *count).await;
    }
    let mut all = Vec::new();
    for (name, count, strategy) in cases {
        all.push(create_request(cluster, name, count, strategy).await);
    }
    for case in all {
        let status = wait_until_recreated(cluster, &case).await;
        let grace = |c: &Condition| c.type_ == "PreRecreateGrace" && c.status == "True";
        assert_eq!(status.conditions.iter().any(grace), case.name == "unready");
    }
}

/// One request for the one container of a new Pod.
pub async fn check_recreate(cluster: &InteropCluster, name: &'static str) {
    create_pod(cluster, name, 1).await;
    wait_until_recreated(cluster, &create_request(cluster, name, 1, json!({})).await).await;
}

/// A request for three containers, of which at least one is being stopped; finish it with [`wait_until_recreated`].
pub async fn start_recreate(cluster: &InteropCluster, name: &'static str) -> RecreateCase {
    create_pod(cluster, name, 3).await;
    let case = create_request(cluster, name, 3, json!({})).await;
    let requests = cluster.api::<ContainerRecreateRequest>();
    cluster
        .wait_until(requests, name, "begun", |r| {
            let states = r.status.iter().flat_map(|s| &s.container_recreate_states);
            states.into_iter().any(|s| s.phase == Phase::Recreating)
        })
        .await;
    case
}

async fn create_pod(cluster: &InteropCluster, name: &str, count: usize) {
    let parts: Vec<Value> = (0..count)
        .map(|n| json!({ "name": format!("c{n}"), "image": "kruise-test/slow-stop:1", "imagePullPolicy": "IfNotPresent" }))
        .collect();
    let spec = json!({ "nodeName": NODE_NAME, "containers": parts, "terminationGracePeriodSeconds": 10,
        "readinessGates": [{ "conditionType": "KruisePodReady" }] });
    create(
        &cluster.api::<Pod>(),
        json!({ "metadata": { "name": name }, "spec": spec }),
    )
    .await;
}

/// Requests the recreation of all containers of a Pod, once that is ready.
async fn create_request(
    cluster: &InteropCluster,
    name: &'static str,
    count: usize,
    strategy: Value,
) -> RecreateCase {
    let ready = cluster
        .wait_until(cluster.api::<Pod>(), name, "ready", |p| has_condition(p, "Ready"))
        .await;
    let case: Vec<Value> = (0..count).map(|n| json!({ "name": format!("c{n}") })).collect();
    let spec =
        json!({ "podName": name, "containers": case, "strategy": strategy, "activeDeadlineSeconds": 300 });
    let requests = cluster.api::<ContainerRecreateRequest>();
    create(&requests, json!({ "metadata": { "name": name }, "spec": spec })).await;
    let before = container_ids(&ready);
    RecreateCase { name, count, before }
}

/// The request has completed and was cleaned up, and each container was replaced and restarted once.
pub async fn wait_until_recreated(
    cluster: &InteropCluster,
    case: &RecreateCase,
) -> ContainerRecreateRequestStatus {
    let name = case.name;
    let requests = cluster.api::<ContainerRecreateRequest>();
    let ended = cluster
        .wait_until(requests, name, "cleared up", |r| {
            let done = r.status.as_ref().is_some_and(|s| s.completion_time.is_some());
            done && !r.labels().contains_key("crr.apps.kruise.io/active") && r.finalizers().is_empty()
        })
        .await;
    let status = ended.status.unwrap();
    let states = &status.container_recreate_states;
    assert!(
        status.phase == Phase::Completed
            && states.len() == case.count
            && states.iter().all(|s| s.phase == Phase::Succeeded),
        "{name}: {status:?}\n{}",
        cluster.logs()
    );
    let after = cluster
        .wait_until(cluster.api::<Pod>(), name, "ready again", |p| {
            has_condition(p, "Ready")
        })
        .await;
    for (container, (id, restarts)) in container_ids(&after) {
        assert_ne!(
            case.before[&container].0, id,
            "{name}: {container} is still the old one"
        );
        assert_eq!(restarts, 1, "{name}: {container}");
    }
    status
}
