//! Jobs and requests that are carried out by a daemon which knows v1alpha1 alone.

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

use crate::old_daemon::OldDaemon;
use crate::pods::condition;
use crate::requests;
use crate::world::{
    PATIENCE, api, asked, completed, create, job, jobs, merge_status, nodes, pod, runs, until, world,
};

fn tag(image: &NodeImage, name: &str, tag: &str) -> Option<ImageTagStatus> {
    let status = image.status.as_ref()?;
    let tags = &status.image_statuses.get(name)?.tags;
    tags.iter().find(|t| t.tag == tag).cloned()
}

/// A job for an image that there is and one for an image that there is not, with a secret.
async fn ask_for_images(admin: &Cluster) {
    let secret = json!({ "metadata": { "name": "old-pull" }, "type": "kubernetes.io/dockerconfigjson",
        "stringData": { ".dockerconfigjson": "{\"auths\":{}}" } });
    create(&api::<Secret>(admin), secret).await;
    for image in ["good", "bad"] {
        let spec = json!({ "image": format!("old:{image}"), "pullSecrets": ["old-pull"],
            "selector": { "matchLabels": { "set": "old-images" } } });
        create(&jobs(admin), job(&format!("old-{image}"), spec)).await;
    }
}

/// The counters of a job that has ended: desired, active, succeeded, failed.
fn counters(status: &ImagePullJobStatus) -> [i32; 4] {
    [status.desired, status.active, status.succeeded, status.failed]
}

#[tokio::test]
async fn jobs_end_whose_daemon_knows_v1alpha1_alone() {
    let admin = world().admin().await;
    nodes(&admin, &["old-images"], json!({ "set": "old-images" })).await;
    ask_for_images(&admin).await;
    asked(&admin, "old-images", "old", "good").await;
    let before = asked(&admin, "old-images", "old", "bad").await;
    assert_eq!(
        before.spec.images["old"].pull_secrets[0].mode.as_deref(),
        Some("batch")
    );

    let daemon = OldDaemon::start("old-images").await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    let half = until(&images, "old-images", "half-way", |i: &NodeImage| {
        i.status.as_ref().is_some_and(|s| s.pulling == 2)
    })
    .await;
    assert_eq!(tag(&half, "old", "good").unwrap().progress, 40);
    for name in ["old-good", "old-bad"] {
        until(&jobs(&admin), name, "at work", |j| {
            j.status.as_ref().is_some_and(|s| (s.desired, s.active) == (1, 1))
        })
        .await;
    }

    daemon.pulls_may_end.send(true).unwrap();
    let good = until(&jobs(&admin), "old-good", "ended", completed).await;
    assert_eq!(counters(&good.status.unwrap()), [1, 0, 1, 0]);
    let bad = until(&jobs(&admin), "old-bad", "ended", completed).await;
    let bad = bad.status.unwrap();
    assert_eq!(counters(&bad), [1, 0, 0, 1]);
    assert_eq!(bad.failed_nodes, ["old-images"]);

    let after = images.get("old-images").await.unwrap();
    assert_eq!(
        after.spec, before.spec,
        "the daemon's writes changed what it is asked for"
    );
    assert!(!after.annotations().contains_key(keys::NODE_IMAGE_SECRET_MODES));
    let pulled = tag(&after, "old", "good").unwrap();
    assert_eq!(pulled.phase, ImagePullPhase::Succeeded);
    assert_eq!(pulled.image_id.as_deref(), Some("old@sha256:1"));
    assert_eq!(
        tag(&after, "old", "bad").unwrap().message.as_deref(),
        Some("no such image")
    );
}

/// A Pod with our readiness gate, on a node that an old daemon will have.
async fn gated_pod(admin: &Cluster) -> Api<Pod> {
    nodes(admin, &["old-recreate"], json!({})).await;
    pod(admin, "old-pod", "old-recreate", json!({}), true).await;
    until(&api(admin), "old-pod", "condition made", |p: &Pod| {
        condition(p, "KruisePodReady").is_some()
    })
    .await;
    api(admin)
}

/// The conditions of a request as JSON, the one of that type first.
fn conditions(request: &ContainerRecreateRequest, type_: &str) -> Vec<Value> {
    let all = request.status.iter().flat_map(|s| s.conditions.iter());
    let (wanted, others): (Vec<_>, Vec<_>) = all.partition(|c| c.type_ == type_);
    wanted
        .into_iter()
        .chain(others)
        .map(|c| serde_json::to_value(c).unwrap())
        .collect()
}

#[tokio::test]
async fn a_request_completes_whose_daemon_knows_v1alpha1_alone() {
    let admin = world().admin().await;
    let requests: Api<ContainerRecreateRequest> = api(&admin);
    let pods = gated_pod(&admin).await;
    let more = json!({ "strategy": { "unreadyGracePeriodSeconds": 1 } });
    requests::create(&requests, "old", "old-pod", more).await;
    // What v1alpha1 has no field for, there before the daemon comes.
    let foreign = json!({ "type": "example.com/Seen", "status": "False", "reason": "Because", "message": "of this",
        "lastTransitionTime": "2026-01-02T03:04:05Z" });
    let status = json!({ "phase": "Pending", "conditions": [foreign] });
    merge_status(&requests, "old", status).await;

    let mut daemon = OldDaemon::start("old-recreate").await;
    let stopped = tokio::time::timeout(PATIENCE, daemon.stopped.recv()).await;
    assert_eq!(
        stopped.expect("the container is stopped"),
        Some("containerd://one".into())
    );
    let unready = pods.get("old-pod").await.unwrap();
    assert_eq!(condition(&unready, "KruisePodReady").unwrap().0, "False");
    runs(&admin, "old-pod", "containerd://two", 1).await;

    let ended = until(&requests, "old", "cleared up", |r: &ContainerRecreateRequest| {
        let done = r.status.as_ref().is_some_and(|s| s.completion_time.is_some());
        let complete = r
            .status
            .iter()
            .flat_map(|s| &s.conditions)
            .any(|c| c.type_ == "Complete");
        done && complete && !r.labels().contains_key("crr.apps.kruise.io/active") && r.finalizers().is_empty()
    })
    .await;
    let kept = conditions(&ended, "example.com/Seen");
    assert_eq!(kept.len(), 3, "{kept:?}");
    // That daemon knows no such condition, so that the manager sets it.
    assert_eq!(
        (&kept[2]["type"], &kept[2]["status"]),
        (&json!("Complete"), &json!("True"))
    );
    assert_eq!(kept[0], foreign);
    assert_eq!(
        (&kept[1]["type"], &kept[1]["status"]),
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
    until(&pods, "old-pod", "let go", |p: &Pod| {
        condition(p, "KruisePodReady").is_some_and(|c| c.0 == "True")
    })
    .await;
    assert!(
        daemon.stopped.try_recv().is_err(),
        "a container was stopped twice"
    );
}
