//! ImagePullJobs, fanned out to nodes whose daemons the tests play.

use k8s_openapi::api::core::v1::Event;
use kruise_api::image_pull_job::{ImagePullJob, ImagePullJobStatus};
use kruise_api::node_image::NodeImage;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::test_cluster::{
    PullOutcome, completed, create, create_node, create_nodes, create_pod, job, jobs, report_pull,
    shared_cluster, wait_for_tag, wait_until, wait_until_deleted,
};

fn node_selector(set: &str) -> Value {
    json!({ "matchLabels": { "set": set } })
}

/// Type, reason and message of a job's one condition.
fn single_condition(status: &ImagePullJobStatus) -> (&str, &str, &str) {
    assert_eq!(status.conditions.len(), 1, "{:?}", status.conditions);
    let condition = &status.conditions[0];
    (&condition.type_, &condition.reason, &condition.message)
}

fn counts(job: &ImagePullJob) -> (i32, i32, i32, i32) {
    let s = job.status.clone().unwrap_or_default();
    (s.desired, s.active, s.succeeded, s.failed)
}

#[tokio::test]
async fn job_respects_parallelism_and_completes_with_last_node() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["par-1", "par-2", "par-3"], json!({ "set": "par" })).await;
    let spec = json!({ "image": "nginx:par", "selector": node_selector("par"), "parallelism": "1" });
    create(&jobs(&admin), job("par", spec)).await;

    wait_for_tag(&admin, "par-1", "nginx", "par").await;
    wait_until(&jobs(&admin), "par", "one node at work", |j| {
        counts(j) == (3, 1, 0, 0)
    })
    .await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    assert!(images.get("par-2").await.unwrap().spec.images.is_empty());

    report_pull(&admin, "par-1", PullOutcome::Succeeded).await;
    wait_for_tag(&admin, "par-2", "nginx", "par").await;
    let status = wait_until(&jobs(&admin), "par", "one node done", |j| {
        counts(j) == (3, 1, 1, 0)
    })
    .await
    .status
    .unwrap();
    assert_eq!(status.message.as_deref(), Some("job is running, progress 33.3%"));

    report_pull(&admin, "par-2", PullOutcome::Failed("no such image")).await;
    wait_for_tag(&admin, "par-3", "nginx", "par").await;
    report_pull(&admin, "par-3", PullOutcome::Succeeded).await;
    let status = wait_until(&jobs(&admin), "par", "ended", completed)
        .await
        .status
        .unwrap();
    assert_eq!((status.succeeded, status.failed, status.active), (2, 1, 0));
    assert_eq!(status.failed_nodes, ["par-2"]);
    assert_eq!(status.message.as_deref(), Some("job has completed"));
    assert_eq!(
        single_condition(&status),
        (
            "Failed",
            "NodesFailed",
            "failed on 1 of 3 nodes; par-2: no such image"
        )
    );
}

#[tokio::test]
async fn paused_job_resumes() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["paused-1", "paused-2"], json!({ "set": "paused" })).await;
    let spec = json!({ "image": "nginx:paused", "selector": node_selector("paused"), "parallelism": 0 });
    create(&jobs(&admin), job("paused", spec)).await;
    let job = wait_until(&jobs(&admin), "paused", "counted", |j| counts(j) == (2, 0, 0, 0)).await;
    assert_eq!(
        single_condition(&job.status.unwrap()),
        ("Waiting", "Paused", "paused: spec.parallelism is 0")
    );
    let unpause = json!({ "spec": { "parallelism": 2 } });
    jobs(&admin)
        .patch("paused", &PatchParams::default(), &Patch::Merge(&unpause))
        .await
        .unwrap();
    for node in ["paused-1", "paused-2"] {
        wait_for_tag(&admin, node, "nginx", "paused").await;
        report_pull(&admin, node, PullOutcome::Succeeded).await;
    }
    wait_until(&jobs(&admin), "paused", "ended", completed).await;
    assert_kubectl_wait("paused", "Complete");
}

#[tokio::test]
async fn edited_limits_reach_the_nodes_that_pull() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["edit-1", "edit-2"], json!({ "set": "edit" })).await;
    let spec = json!({ "image": "nginx:edit", "selector": node_selector("edit"), "parallelism": "50%" });
    create(&jobs(&admin), job("edit", spec)).await;
    wait_for_tag(&admin, "edit-1", "nginx", "edit").await;
    let edit = json!({ "spec": { "pullPolicy": { "timeoutSeconds": 7, "backoffLimit": 1 } } });
    jobs(&admin)
        .patch("edit", &PatchParams::default(), &Patch::Merge(&edit))
        .await
        .unwrap();
    let images = Api::<NodeImage>::all(admin.client.clone());
    let limits = |image: &NodeImage| {
        let tag = image.spec.images.get("nginx")?.tags.first()?;
        let policy = tag.pull_policy.as_ref()?;
        Some((tag.version, policy.timeout_seconds?, policy.backoff_limit?))
    };
    // The version stays: what runs is not aborted.
    wait_until(&images, "edit-1", "given the new limits", move |image| {
        limits(image) == Some((0, 7, 1))
    })
    .await;
    assert!(images.get("edit-2").await.unwrap().spec.images.is_empty());
    report_pull(&admin, "edit-1", PullOutcome::Succeeded).await;
    wait_for_tag(&admin, "edit-2", "nginx", "edit").await;
    assert_eq!(limits(&images.get("edit-2").await.unwrap()), Some((0, 7, 1)));
}

/// Runs `kubectl wait` for the condition, in both versions.
fn assert_kubectl_wait(job: &str, condition: &str) {
    let condition = format!("--for=condition={condition}");
    for kind in ["imagepulljob", "imagepulljob.v1alpha1.apps.kruise.io"] {
        let job = format!("{kind}/{job}");
        let wait = ["wait", &condition, "--timeout=10s", &job];
        shared_cluster().plane.kubectl(&wait).unwrap();
    }
}

#[tokio::test]
async fn job_without_daemon_reports_no_daemon_until_deadline() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["deserted-1"], json!({})).await;
    let spec = json!({ "image": "nginx:deserted", "selector": { "names": ["deserted-1"] },
        "pullPolicy": { "timeoutSeconds": 1 }, "completionPolicy": { "activeDeadlineSeconds": 25 } });
    create(&jobs(&admin), job("deserted", spec)).await;
    let no_daemon = "deserted-1 has not started the pull: is kruise-daemon running there?";
    wait_until(&jobs(&admin), "deserted", "waiting for the daemon", |j| {
        j.status.as_ref().is_some_and(|s| {
            !s.conditions.is_empty() && single_condition(s) == ("Waiting", "NoDaemon", no_daemon)
        })
    })
    .await;
    let ended = wait_until(&jobs(&admin), "deserted", "ended", completed).await;
    let status = ended.status.unwrap();
    assert_eq!(
        status.message.as_deref(),
        Some("job exceeds activeDeadlineSeconds")
    );
    let expected = format!("job exceeds activeDeadlineSeconds; {no_daemon}; failed on 1 of 1 nodes");
    assert_eq!(
        single_condition(&status),
        ("Failed", "DeadlineExceeded", &*expected)
    );
    assert_kubectl_wait("deserted", "Failed");
}

#[tokio::test]
async fn pod_selector_selects_nodes_of_running_pods() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["pods-1", "pods-2", "pods-3"], json!({})).await;
    for (name, node) in [("p-1", "pods-1"), ("p-2", "pods-1"), ("p-3", "pods-3")] {
        create_pod(&admin, name, node, json!({ "app": "by-pod" }), false).await;
    }
    let spec = json!({ "image": "nginx:pods", "podSelector": { "matchLabels": { "app": "by-pod" } }, "parallelism": 9 });
    create(&jobs(&admin), job("by-pod", spec)).await;
    for node in ["pods-1", "pods-3"] {
        wait_for_tag(&admin, node, "nginx", "pods").await;
        report_pull(&admin, node, PullOutcome::Succeeded).await;
    }
    let ended = wait_until(&jobs(&admin), "by-pod", "ended", completed).await;
    assert_eq!(counts(&ended), (2, 0, 2, 0));
}

#[tokio::test]
async fn jobs_share_a_tag_removed_with_the_last_job() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["shared-1"], json!({ "set": "shared" })).await;
    for name in ["shared-a", "shared-b"] {
        let spec = json!({ "image": "quay.io/a/b@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "selector": node_selector("shared") });
        create(&jobs(&admin), job(name, spec)).await;
    }
    let images = Api::<NodeImage>::all(admin.client.clone());
    let image = wait_until(&images, "shared-1", "wanted by both", |i: &NodeImage| {
        let entry = i.spec.images.get("quay.io/a/b");
        entry.is_some_and(|e| e.tags[0].owner_references.len() == 2)
    })
    .await;
    assert!(
        image.spec.images["quay.io/a/b"].tags[0]
            .tag
            .starts_with("sha256:")
    );
    report_pull(&admin, "shared-1", PullOutcome::Succeeded).await;
    for name in ["shared-a", "shared-b"] {
        wait_until(&jobs(&admin), name, "ended", completed).await;
    }
    jobs(&admin)
        .delete("shared-a", &DeleteParams::default())
        .await
        .unwrap();
    jobs(&admin)
        .delete("shared-b", &DeleteParams::default())
        .await
        .unwrap();
    wait_until(&images, "shared-1", "cleaned up", |i: &NodeImage| {
        i.spec.images.is_empty()
    })
    .await;
}

#[tokio::test]
async fn job_ends_at_deadline_and_is_deleted_after_ttl() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["late-1", "late-2"], json!({ "set": "late" })).await;
    let spec = json!({ "image": "nginx:late", "selector": node_selector("late"), "pullPolicy": { "timeoutSeconds": 1 },
        "completionPolicy": { "activeDeadlineSeconds": 8, "ttlSecondsAfterFinished": 8 } });
    create(&jobs(&admin), job("late", spec)).await;
    wait_for_tag(&admin, "late-1", "nginx", "late").await;
    report_pull(&admin, "late-1", PullOutcome::Pulling).await;
    let ended = wait_until(&jobs(&admin), "late", "ended", completed).await;
    let status = ended.status.unwrap();
    assert_eq!(
        status.message.as_deref(),
        Some("job exceeds activeDeadlineSeconds")
    );
    assert_eq!((status.failed, status.active), (2, 0));
    assert_eq!(status.failed_nodes, ["late-1", "late-2"]);
    wait_until_deleted(&jobs(&admin), "late").await;
    assert_eq!(
        shared_cluster()
            .wait_for_log("ImagePullJob deleted", "job=default/late")
            .await,
        1
    );
}

#[tokio::test]
async fn never_completing_job_includes_later_nodes() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["never-1"], json!({ "set": "never" })).await;
    let spec = json!({ "image": "nginx:never", "selector": node_selector("never"), "completionPolicy": { "type": "Never" } });
    create(&jobs(&admin), job("never", spec)).await;
    wait_for_tag(&admin, "never-1", "nginx", "never").await;
    report_pull(&admin, "never-1", PullOutcome::Succeeded).await;
    wait_until(&jobs(&admin), "never", "one done", |j| counts(j) == (1, 0, 1, 0)).await;
    create_node(&admin, "never-2", json!({ "set": "never" }), true).await;
    wait_for_tag(&admin, "never-2", "nginx", "never").await;
    report_pull(&admin, "never-2", PullOutcome::Succeeded).await;
    let job = wait_until(&jobs(&admin), "never", "both done", |j| counts(j) == (2, 0, 2, 0)).await;
    assert!(!completed(&job));
    // A deleted tag (its TTL is a day) is requested again.
    let images = Api::<NodeImage>::all(admin.client.clone());
    let removal = json!({ "spec": { "images": { "nginx": null } } });
    images
        .patch("never-1", &PatchParams::default(), &Patch::Merge(&removal))
        .await
        .unwrap();
    wait_for_tag(&admin, "never-1", "nginx", "never").await;
}

#[tokio::test]
async fn job_without_matching_nodes_completes_with_reason() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["known-1"], json!({})).await;
    let cases = [
        (
            "unknown-node",
            json!({ "image": "nginx:x", "selector": { "names": ["no-such-node"] } }),
            "no NodeImage named no-such-node",
        ),
        (
            "no-node",
            json!({ "image": "nginx:x", "selector": node_selector("nowhere") }),
            "no node matches spec.selector",
        ),
        (
            "no-pod",
            json!({ "image": "nginx:x", "podSelector": { "matchLabels": { "app": "nobody" } } }),
            "no running Pod matches spec.podSelector",
        ),
    ];
    for (name, spec, expected) in cases {
        create(&jobs(&admin), job(name, spec)).await;
        let ended = wait_until(&jobs(&admin), name, "ended", completed).await;
        let status = ended.status.unwrap();
        assert_eq!(status.message.as_deref(), Some("job has completed"), "{name}");
        let (type_, reason, message) = single_condition(&status);
        assert!(
            (type_, reason) == ("Complete", "NoNode") && message.contains(expected),
            "{name}: {message:?}"
        );
    }
    let events = Api::<Event>::namespaced(admin.client.clone(), "default");
    wait_for_event(&events, "unknown-node", "UnknownNode").await;
}

/// Waits for an event about that object.
pub async fn wait_for_event(events: &Api<Event>, name: &str, reason: &str) -> Event {
    let start = std::time::Instant::now();
    loop {
        let fields = format!("involvedObject.name={name},reason={reason}");
        let found = events.list(&ListParams::default().fields(&fields)).await.unwrap();
        if let Some(event) = found.items.into_iter().next() {
            return event;
        }
        assert!(
            start.elapsed() < crate::test_cluster::WAIT_TIMEOUT,
            "no event {reason} about {name}"
        );
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn deleted_node_does_not_block_its_job() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["leaves-1", "leaves-2"], json!({ "set": "leaves" })).await;
    let spec = json!({ "image": "nginx:leaves", "selector": node_selector("leaves"), "parallelism": 1 });
    create(&jobs(&admin), job("leaves", spec)).await;
    wait_for_tag(&admin, "leaves-1", "nginx", "leaves").await;
    let all = Api::<k8s_openapi::api::core::v1::Node>::all(admin.client.clone());
    all.delete("leaves-1", &DeleteParams::default()).await.unwrap();
    let image = wait_for_tag(&admin, "leaves-2", "nginx", "leaves").await;
    assert_eq!(image.name_any(), "leaves-2");
    report_pull(&admin, "leaves-2", PullOutcome::Succeeded).await;
    let ended = wait_until(&jobs(&admin), "leaves", "ended", completed).await;
    assert_eq!(counts(&ended), (1, 0, 1, 0));
}

#[tokio::test]
async fn full_nodeimage_fails_the_node_with_event() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["full-1", "full-2"], json!({ "set": "full" })).await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    // No daemon responds, so they fail at once; their tags must not be deleted before the job is created.
    let policy = json!({ "ttlSecondsAfterFinished": 3600 });
    let tag = json!([{ "tag": "1", "createdAt": "2020-01-01T00:00:00Z", "pullPolicy": policy }]);
    let entries: serde_json::Map<String, Value> = (0..256)
        .map(|n| (format!("image-{n}"), json!({ "tags": tag })))
        .collect();
    let full = json!({ "spec": { "images": entries } });
    images
        .patch("full-1", &PatchParams::default(), &Patch::Merge(&full))
        .await
        .unwrap();
    let spec = json!({ "image": "nginx:full", "selector": node_selector("full"), "parallelism": 2 });
    create(&jobs(&admin), job("full", spec)).await;
    wait_for_tag(&admin, "full-2", "nginx", "full").await;
    report_pull(&admin, "full-2", PullOutcome::Succeeded).await;
    let ended = wait_until(&jobs(&admin), "full", "ended", completed).await;
    assert_eq!(counts(&ended), (2, 0, 1, 1));
    assert_eq!(ended.status.unwrap().failed_nodes, ["full-1"]);
    let events = Api::<Event>::namespaced(admin.client.clone(), "default");
    wait_for_event(&events, "full", "FailedUpdateNodeImage").await;
}
