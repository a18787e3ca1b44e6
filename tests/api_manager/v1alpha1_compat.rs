//! Jobs and requests that are executed by a daemon that only knows v1alpha1.

use k8s_openapi::api::core::v1::{Pod, Secret};
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase,
};
use kruise_api::image_pull_job::ImagePullJobStatus;
use kruise_api::keys;
use kruise_api::node_image::{ImagePullPhase, ImageTagStatus, NodeImage};
use kruise_cluster::Cluster;
use kube::ResourceExt;
use kube::api::Api;
use serde_json::{Value, json};

use crate::pod_readiness::condition;
use crate::recreate_requests;
use crate::test_cluster::{
    WAIT_TIMEOUT, api, completed, create, create_nodes, create_pod, job, jobs, merge_status, run_container,
    shared_cluster, wait_for_tag, wait_until,
};
use crate::v1alpha1_daemon::V1alpha1Daemon;

fn tag_status(image: &NodeImage, name: &str, tag: &str) -> Option<ImageTagStatus> {
    let status = image.status.as_ref()?;
    let tags = &status.image_statuses.get(name)?.tags;
    tags.iter().find(|t| t.tag == tag).cloned()
}

/// A job for an image that exists and one for an image that does not, with a secret.
async fn create_jobs(admin: &Cluster) {
    let secret = json!({ "metadata": { "name": "old-pull" }, "type": "kubernetes.io/dockerconfigjson",
        "stringData": { ".dockerconfigjson": "{\"auths\":{}}" } });
    create(&api::<Secret>(admin), secret).await;
    for image in ["good", "bad"] {
        let spec = json!({ "image": format!("old:{image}"), "pullSecrets": ["old-pull"],
            "selector": { "matchLabels": { "set": "old-images" } } });
        create(&jobs(admin), job(&format!("old-{image}"), spec)).await;
    }
}

/// The counters of a finished job: desired, active, succeeded, failed.
fn counters(status: &ImagePullJobStatus) -> [i32; 4] {
    [status.desired, status.active, status.succeeded, status.failed]
}

#[tokio::test]
async fn v1alpha1_daemon_completes_pull_jobs() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["old-images"], json!({ "set": "old-images" })).await;
    create_jobs(&admin).await;
    wait_for_tag(&admin, "old-images", "old", "good").await;
    let before = wait_for_tag(&admin, "old-images", "old", "bad").await;
    assert_eq!(
        before.spec.images["old"].pull_secrets[0].mode.as_deref(),
        Some("batch")
    );

    let daemon = V1alpha1Daemon::start("old-images").await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    let in_progress = wait_until(&images, "old-images", "half-way", |i: &NodeImage| {
        i.status.as_ref().is_some_and(|s| s.pulling == 2)
    })
    .await;
    assert_eq!(tag_status(&in_progress, "old", "good").unwrap().progress, 40);
    for name in ["old-good", "old-bad"] {
        wait_until(&jobs(&admin), name, "at work", |j| {
            j.status.as_ref().is_some_and(|s| (s.desired, s.active) == (1, 1))
        })
        .await;
    }

    daemon.allow_completion.send(true).unwrap();
    let good = wait_until(&jobs(&admin), "old-good", "ended", completed).await;
    assert_eq!(counters(&good.status.unwrap()), [1, 0, 1, 0]);
    let bad = wait_until(&jobs(&admin), "old-bad", "ended", completed).await;
    let bad = bad.status.unwrap();
    assert_eq!(counters(&bad), [1, 0, 0, 1]);
    assert_eq!(bad.failed_nodes, ["old-images"]);

    let after = images.get("old-images").await.unwrap();
    assert_eq!(
        after.spec, before.spec,
        "the daemon's writes must not change the spec"
    );
    assert!(!after.annotations().contains_key(keys::NODE_IMAGE_SECRET_MODES));
    let pulled = tag_status(&after, "old", "good").unwrap();
    assert_eq!(pulled.phase, ImagePullPhase::Succeeded);
    assert_eq!(pulled.image_id.as_deref(), Some("old@sha256:1"));
    assert_eq!(
        tag_status(&after, "old", "bad").unwrap().message.as_deref(),
        Some("no such image")
    );
}

/// A Pod with our readiness gate, on a node that will have a v1alpha1 daemon.
async fn create_pod_with_readiness_gate(admin: &Cluster) -> Api<Pod> {
    create_nodes(admin, &["old-recreate"], json!({})).await;
    create_pod(admin, "old-pod", "old-recreate", json!({}), true).await;
    wait_until(&api(admin), "old-pod", "condition made", |p: &Pod| {
        condition(p, "KruisePodReady").is_some()
    })
    .await;
    api(admin)
}

/// Conditions of a request as JSON, with the one of that type first.
fn conditions(request: &ContainerRecreateRequest, type_: &str) -> Vec<Value> {
    let all = request.status.iter().flat_map(|s| s.conditions.iter());
    let (matching, others): (Vec<_>, Vec<_>) = all.partition(|c| c.type_ == type_);
    matching
        .into_iter()
        .chain(others)
        .map(|c| serde_json::to_value(c).unwrap())
        .collect()
}

#[tokio::test]
async fn v1alpha1_daemon_completes_recreate_request() {
    let admin = shared_cluster().admin().await;
    let requests: Api<ContainerRecreateRequest> = api(&admin);
    let pods = create_pod_with_readiness_gate(&admin).await;
    let strategy = json!({ "strategy": { "unreadyGracePeriodSeconds": 1 } });
    recreate_requests::create(&requests, "old", "old-pod", strategy).await;
    // A value without a field in v1alpha1, set before the daemon starts.
    let foreign_condition = json!({ "type": "example.com/Seen", "status": "False", "reason": "Because", "message": "of this",
        "lastTransitionTime": "2026-01-02T03:04:05Z" });
    let status = json!({ "phase": "Pending", "conditions": [foreign_condition] });
    merge_status(&requests, "old", status).await;

    let mut daemon = V1alpha1Daemon::start("old-recreate").await;
    let stopped = tokio::time::timeout(WAIT_TIMEOUT, daemon.stopped_containers.recv()).await;
    assert_eq!(
        stopped.expect("the container is stopped"),
        Some("containerd://one".into())
    );
    let unready = pods.get("old-pod").await.unwrap();
    assert_eq!(condition(&unready, "KruisePodReady").unwrap().0, "False");
    run_container(&admin, "old-pod", "containerd://two", 1).await;

    let ended = wait_until(&requests, "old", "cleared up", |r: &ContainerRecreateRequest| {
        let done = r.status.as_ref().is_some_and(|s| s.completion_time.is_some());
        let complete = r
            .status
            .iter()
            .flat_map(|s| &s.conditions)
            .any(|c| c.type_ == "Complete");
        done && complete && !r.labels().contains_key("crr.apps.kruise.io/active") && r.finalizers().is_empty()
    })
    .await;
    let kept_conditions = conditions(&ended, "example.com/Seen");
    assert_eq!(kept_conditions.len(), 3, "{kept_conditions:?}");
    // That daemon does not know the condition, so the manager sets it.
    assert_eq!(
        (&kept_conditions[2]["type"], &kept_conditions[2]["status"]),
        (&json!("Complete"), &json!("True"))
    );
    assert_eq!(kept_conditions[0], foreign_condition);
    assert_eq!(
        (&kept_conditions[1]["type"], &kept_conditions[1]["status"]),
        (&json!("PreRecreateGrace"), &json!("True"))
    );
    assert!(!ended.annotations().contains_key(keys::CRR_CONDITIONS));
    let status = ended.status.unwrap();
    assert_eq!(status.phase, Phase::Completed);
    assert_eq!(status.container_recreate_states[0].phase, Phase::Succeeded);
    assert_eq!(
        status.container_status_snapshot[0].container_id.as_deref(),
        Some("containerd://two")
    );
    wait_until(&pods, "old-pod", "KruisePodReady is True again", |p: &Pod| {
        condition(p, "KruisePodReady").is_some_and(|c| c.0 == "True")
    })
    .await;
    assert!(
        daemon.stopped_containers.try_recv().is_err(),
        "a container was stopped twice"
    );
}
