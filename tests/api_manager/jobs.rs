//! ImagePullJobs, fanned out to nodes whose daemons we play.

use k8s_openapi::api::core::v1::Event;
use kruise_api::image_pull_job::{ImagePullJob, ImagePullJobStatus};
use kruise_api::node_image::NodeImage;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::world::{
    Answer, answer, asked, completed, create, job, jobs, node, nodes, pod, until, until_gone, world,
};

fn on(set: &str) -> Value {
    json!({ "matchLabels": { "set": set } })
}

/// Type, reason and message of a job's one condition.
fn told(status: &ImagePullJobStatus) -> (&str, &str, &str) {
    assert_eq!(status.conditions.len(), 1, "{:?}", status.conditions);
    let condition = &status.conditions[0];
    (&condition.type_, &condition.reason, &condition.message)
}

fn counts(job: &ImagePullJob) -> (i32, i32, i32, i32) {
    let s = job.status.clone().unwrap_or_default();
    (s.desired, s.active, s.succeeded, s.failed)
}

#[tokio::test]
async fn a_job_asks_as_many_nodes_at_a_time_as_it_may_and_ends_with_the_last() {
    let admin = world().admin().await;
    nodes(&admin, &["par-1", "par-2", "par-3"], json!({ "set": "par" })).await;
    let spec = json!({ "image": "nginx:par", "selector": on("par"), "parallelism": "1" });
    create(&jobs(&admin), job("par", spec)).await;

    asked(&admin, "par-1", "nginx", "par").await;
    until(&jobs(&admin), "par", "one node at work", |j| {
        counts(j) == (3, 1, 0, 0)
    })
    .await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    assert!(images.get("par-2").await.unwrap().spec.images.is_empty());

    answer(&admin, "par-1", Answer::Succeeded).await;
    asked(&admin, "par-2", "nginx", "par").await;
    let status = until(&jobs(&admin), "par", "one node done", |j| {
        counts(j) == (3, 1, 1, 0)
    })
    .await
    .status
    .unwrap();
    assert_eq!(status.message.as_deref(), Some("job is running, progress 33.3%"));

    answer(&admin, "par-2", Answer::Failed("no such image")).await;
    asked(&admin, "par-3", "nginx", "par").await;
    answer(&admin, "par-3", Answer::Succeeded).await;
    let status = until(&jobs(&admin), "par", "ended", completed)
        .await
        .status
        .unwrap();
    assert_eq!((status.succeeded, status.failed, status.active), (2, 1, 0));
    assert_eq!(status.failed_nodes, ["par-2"]);
    assert_eq!(status.message.as_deref(), Some("job has completed"));
    assert_eq!(
        told(&status),
        (
            "Failed",
            "NodesFailed",
            "failed on 1 of 3 nodes; par-2: no such image"
        )
    );
}

#[tokio::test]
async fn a_paused_job_goes_on_when_it_may() {
    let admin = world().admin().await;
    nodes(&admin, &["paused-1", "paused-2"], json!({ "set": "paused" })).await;
    let spec = json!({ "image": "nginx:paused", "selector": on("paused"), "parallelism": 0 });
    create(&jobs(&admin), job("paused", spec)).await;
    let job = until(&jobs(&admin), "paused", "counted", |j| counts(j) == (2, 0, 0, 0)).await;
    assert_eq!(
        told(&job.status.unwrap()),
        ("Waiting", "Paused", "paused: spec.parallelism is 0")
    );
    let more = json!({ "spec": { "parallelism": 2 } });
    jobs(&admin)
        .patch("paused", &PatchParams::default(), &Patch::Merge(&more))
        .await
        .unwrap();
    for node in ["paused-1", "paused-2"] {
        asked(&admin, node, "nginx", "paused").await;
        answer(&admin, node, Answer::Succeeded).await;
    }
    until(&jobs(&admin), "paused", "ended", completed).await;
    kubectl_finds("paused", "Complete");
}

/// What a user waits for, in both versions.
fn kubectl_finds(job: &str, condition: &str) {
    let condition = format!("--for=condition={condition}");
    for kind in ["imagepulljob", "imagepulljob.v1alpha1.apps.kruise.io"] {
        let job = format!("{kind}/{job}");
        let wait = ["wait", &condition, "--timeout=10s", &job];
        world().plane.kubectl(&wait).unwrap();
    }
}

#[tokio::test]
async fn a_job_whose_daemon_does_not_begin_says_so_and_so_does_its_deadline() {
    let admin = world().admin().await;
    nodes(&admin, &["deserted-1"], json!({})).await;
    let spec = json!({ "image": "nginx:deserted", "selector": { "names": ["deserted-1"] },
        "pullPolicy": { "timeoutSeconds": 1 }, "completionPolicy": { "activeDeadlineSeconds": 25 } });
    create(&jobs(&admin), job("deserted", spec)).await;
    let words = "deserted-1 has not started the pull: is kruise-daemon running there?";
    until(&jobs(&admin), "deserted", "waiting for the daemon", |j| {
        j.status
            .as_ref()
            .is_some_and(|s| !s.conditions.is_empty() && told(s) == ("Waiting", "NoDaemon", words))
    })
    .await;
    let ended = until(&jobs(&admin), "deserted", "ended", completed).await;
    let status = ended.status.unwrap();
    assert_eq!(
        status.message.as_deref(),
        Some("job exceeds activeDeadlineSeconds")
    );
    let want = format!("job exceeds activeDeadlineSeconds; {words}; failed on 1 of 1 nodes");
    assert_eq!(told(&status), ("Failed", "DeadlineExceeded", &*want));
    kubectl_finds("deserted", "Failed");
}

#[tokio::test]
async fn nodes_are_found_by_the_pods_on_them() {
    let admin = world().admin().await;
    nodes(&admin, &["pods-1", "pods-2", "pods-3"], json!({})).await;
    for (name, node) in [("p-1", "pods-1"), ("p-2", "pods-1"), ("p-3", "pods-3")] {
        pod(&admin, name, node, json!({ "app": "by-pod" }), false).await;
    }
    let spec = json!({ "image": "nginx:pods", "podSelector": { "matchLabels": { "app": "by-pod" } }, "parallelism": 9 });
    create(&jobs(&admin), job("by-pod", spec)).await;
    for node in ["pods-1", "pods-3"] {
        asked(&admin, node, "nginx", "pods").await;
        answer(&admin, node, Answer::Succeeded).await;
    }
    let ended = until(&jobs(&admin), "by-pod", "ended", completed).await;
    assert_eq!(counts(&ended), (2, 0, 2, 0));
}

#[tokio::test]
async fn two_jobs_share_an_entry_and_it_goes_with_the_last_of_them() {
    let admin = world().admin().await;
    nodes(&admin, &["shared-1"], json!({ "set": "shared" })).await;
    for name in ["shared-a", "shared-b"] {
        let spec = json!({ "image": "quay.io/a/b@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "selector": on("shared") });
        create(&jobs(&admin), job(name, spec)).await;
    }
    let images = Api::<NodeImage>::all(admin.client.clone());
    let image = until(&images, "shared-1", "wanted by both", |i: &NodeImage| {
        let entry = i.spec.images.get("quay.io/a/b");
        entry.is_some_and(|e| e.tags[0].owner_references.len() == 2)
    })
    .await;
    assert!(
        image.spec.images["quay.io/a/b"].tags[0]
            .tag
            .starts_with("sha256:")
    );
    answer(&admin, "shared-1", Answer::Succeeded).await;
    for name in ["shared-a", "shared-b"] {
        until(&jobs(&admin), name, "ended", completed).await;
    }
    jobs(&admin)
        .delete("shared-a", &DeleteParams::default())
        .await
        .unwrap();
    jobs(&admin)
        .delete("shared-b", &DeleteParams::default())
        .await
        .unwrap();
    until(&images, "shared-1", "cleaned up", |i: &NodeImage| {
        i.spec.images.is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_job_ends_at_its_deadline_and_goes_after_its_time() {
    let admin = world().admin().await;
    nodes(&admin, &["late-1", "late-2"], json!({ "set": "late" })).await;
    let spec = json!({ "image": "nginx:late", "selector": on("late"), "pullPolicy": { "timeoutSeconds": 1 },
        "completionPolicy": { "activeDeadlineSeconds": 8, "ttlSecondsAfterFinished": 8 } });
    create(&jobs(&admin), job("late", spec)).await;
    asked(&admin, "late-1", "nginx", "late").await;
    answer(&admin, "late-1", Answer::Pulling).await;
    let ended = until(&jobs(&admin), "late", "ended", completed).await;
    let status = ended.status.unwrap();
    assert_eq!(
        status.message.as_deref(),
        Some("job exceeds activeDeadlineSeconds")
    );
    assert_eq!((status.failed, status.active), (2, 0));
    assert_eq!(status.failed_nodes, ["late-1", "late-2"]);
    until_gone(&jobs(&admin), "late").await;
    assert_eq!(
        world().logged("ImagePullJob deleted", "job=default/late").await,
        1
    );
}

#[tokio::test]
async fn a_job_without_end_takes_in_nodes_that_come_later() {
    let admin = world().admin().await;
    nodes(&admin, &["never-1"], json!({ "set": "never" })).await;
    let spec =
        json!({ "image": "nginx:never", "selector": on("never"), "completionPolicy": { "type": "Never" } });
    create(&jobs(&admin), job("never", spec)).await;
    asked(&admin, "never-1", "nginx", "never").await;
    answer(&admin, "never-1", Answer::Succeeded).await;
    until(&jobs(&admin), "never", "one done", |j| counts(j) == (1, 0, 1, 0)).await;
    node(&admin, "never-2", json!({ "set": "never" }), true).await;
    asked(&admin, "never-2", "nginx", "never").await;
    answer(&admin, "never-2", Answer::Succeeded).await;
    let job = until(&jobs(&admin), "never", "both done", |j| counts(j) == (2, 0, 2, 0)).await;
    assert!(!completed(&job));
    // An entry that goes (as it does after a day) is asked for again.
    let images = Api::<NodeImage>::all(admin.client.clone());
    let gone = json!({ "spec": { "images": { "nginx": null } } });
    images
        .patch("never-1", &PatchParams::default(), &Patch::Merge(&gone))
        .await
        .unwrap();
    asked(&admin, "never-1", "nginx", "never").await;
}

#[tokio::test]
async fn what_cannot_be_carried_out_says_so() {
    let admin = world().admin().await;
    nodes(&admin, &["known-1"], json!({})).await;
    let cases = [
        (
            "unknown-node",
            json!({ "image": "nginx:x", "selector": { "names": ["no-such-node"] } }),
            "no NodeImage named no-such-node",
        ),
        (
            "no-node",
            json!({ "image": "nginx:x", "selector": on("nowhere") }),
            "no node matches spec.selector",
        ),
        (
            "no-pod",
            json!({ "image": "nginx:x", "podSelector": { "matchLabels": { "app": "nobody" } } }),
            "no running Pod matches spec.podSelector",
        ),
    ];
    for (name, spec, want) in cases {
        create(&jobs(&admin), job(name, spec)).await;
        let ended = until(&jobs(&admin), name, "ended", completed).await;
        let status = ended.status.unwrap();
        assert_eq!(status.message.as_deref(), Some("job has completed"), "{name}");
        let (type_, reason, message) = told(&status);
        assert!(
            (type_, reason) == ("Complete", "NoNode") && message.contains(want),
            "{name}: {message:?}"
        );
    }
    let events = Api::<Event>::namespaced(admin.client.clone(), "default");
    until_event(&events, "unknown-node", "UnknownNode").await;
}

/// Waits until there is an event about that object.
pub async fn until_event(events: &Api<Event>, name: &str, reason: &str) -> Event {
    let start = std::time::Instant::now();
    loop {
        let fields = format!("involvedObject.name={name},reason={reason}");
        let found = events.list(&ListParams::default().fields(&fields)).await.unwrap();
        if let Some(event) = found.items.into_iter().next() {
            return event;
        }
        assert!(
            start.elapsed() < crate::world::PATIENCE,
            "no event {reason} about {name}"
        );
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_node_that_goes_does_not_hold_its_job_back() {
    let admin = world().admin().await;
    nodes(&admin, &["leaves-1", "leaves-2"], json!({ "set": "leaves" })).await;
    let spec = json!({ "image": "nginx:leaves", "selector": on("leaves"), "parallelism": 1 });
    create(&jobs(&admin), job("leaves", spec)).await;
    asked(&admin, "leaves-1", "nginx", "leaves").await;
    let all = Api::<k8s_openapi::api::core::v1::Node>::all(admin.client.clone());
    all.delete("leaves-1", &DeleteParams::default()).await.unwrap();
    let image = asked(&admin, "leaves-2", "nginx", "leaves").await;
    assert_eq!(image.name_any(), "leaves-2");
    answer(&admin, "leaves-2", Answer::Succeeded).await;
    let ended = until(&jobs(&admin), "leaves", "ended", completed).await;
    assert_eq!(counts(&ended), (1, 0, 1, 0));
}

#[tokio::test]
async fn a_node_that_can_hold_no_more_images_fails_and_says_so() {
    let admin = world().admin().await;
    nodes(&admin, &["full-1", "full-2"], json!({ "set": "full" })).await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    // No daemon answers, so they fail at once; they must not be cleared before the job comes.
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
    let spec = json!({ "image": "nginx:full", "selector": on("full"), "parallelism": 2 });
    create(&jobs(&admin), job("full", spec)).await;
    asked(&admin, "full-2", "nginx", "full").await;
    answer(&admin, "full-2", Answer::Succeeded).await;
    let ended = until(&jobs(&admin), "full", "ended", completed).await;
    assert_eq!(counts(&ended), (2, 0, 1, 1));
    assert_eq!(ended.status.unwrap().failed_nodes, ["full-1"]);
    let events = Api::<Event>::namespaced(admin.client.clone(), "default");
    until_event(&events, "full", "FailedUpdateNodeImage").await;
}
