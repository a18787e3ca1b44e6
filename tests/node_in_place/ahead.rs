//! Images that are pulled before the Pods need them.

use std::ops::Deref;

use k8s_openapi::api::core::v1::{Event, Pod};
use kruise_api::cloneset::CloneSet;
use kruise_api::image_pull_job::ImagePullJob;
use kube::api::ListParams;
use serde_json::json;
use testbed::cluster::Image;

use crate::bed::{Bed, Test};
use crate::field::{Field, container, in_place, restarted_once, same_pod, shared, status};

/// Of one file more than others have, and on no node yet.
const NEW: &str = "kruise-test/ahead:1";

#[tokio::test]
async fn a_new_image_is_on_the_node_before_the_first_pod_is_updated() {
    let test = shared().await;
    let image = Image::busybox().script("true").random(1);
    test.bed.node.runtime.registry.push(NEW, &image).unwrap();
    let strategy = |paused: bool| in_place(json!({"paused": paused}));
    let names = ["app", "side"].map(|name| container(name, "kruise-test/term:1"));
    let spec = json!({"updateStrategy": strategy(true)});
    test.set("web", 4, json!(names), spec).await;
    let before = test.pods_of("web").await;
    test.image("web", 0, NEW).await;
    pulled_ahead(&test).await;
    let held = test.pods_of("web").await;
    let old = |pod: &Pod| status(pod, "app").restart_count == 0;
    assert!(held.iter().all(old), "it is paused");

    test.edit("web", json!({"updateStrategy": strategy(false)})).await;
    test.settled("web").await;
    for (before, after) in before.iter().zip(&test.pods_of("web").await) {
        same_pod(before, after);
        restarted_once(before, after, "app");
    }
    let jobs = test.api::<ImagePullJob>();
    test.until("the job's end with the rollout's", || async {
        let left = jobs.list(&ListParams::default()).await.unwrap().items;
        left.is_empty().then_some(())
    })
    .await;
    let events = test.api::<Event>().list(&ListParams::default()).await.unwrap();
    let kubelet_pulled = |event: &&Event| {
        event.reason.as_deref() == Some("Pulling") && event.message.as_ref().is_some_and(|m| m.contains(NEW))
    };
    let pulling = events.items.iter().find(kubelet_pulled);
    assert_eq!(pulling, None, "kubelet found it there");
}

/// Waits until the image of the new revision is on the node, for that container alone.
async fn pulled_ahead<G: Deref<Target = Bed>>(test: &Test<G>) {
    let seen = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        status.update_revision != status.current_revision
    };
    let set = test.status("web", "the new revision", seen).await;
    let job = format!("{}-app", set.status.unwrap().update_revision);
    let pulled = |job: &ImagePullJob| job.status.as_ref().is_some_and(|s| s.succeeded == 1);
    let (job, _) = test.follow(&job, "it has pulled", pulled).await;
    assert_eq!(job.spec.image, NEW);
    assert_eq!(job.metadata.owner_references.as_ref().unwrap()[0].name, "web");
    let there = test.bed.node.runtime.ctr(&["images", "ls", "-q"]).unwrap();
    let ours = |name: &str| name == format!("docker.io/{NEW}");
    assert!(there.lines().any(ours), "{there}");
    let all = test.api::<ImagePullJob>().list(&ListParams::default()).await;
    assert_eq!(all.unwrap().items.len(), 1);
}
