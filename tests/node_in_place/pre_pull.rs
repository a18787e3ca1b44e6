//! Images that are pulled before the Pods need them.

use std::ops::Deref;

use k8s_openapi::api::core::v1::{Event, Pod};
use kruise_api::cloneset::CloneSet;
use kruise_api::image_pull_job::ImagePullJob;
use kube::api::ListParams;
use serde_json::json;
use testbed::cluster::Image;

use crate::clone_set_ops::{
    CloneSetOps, assert_restarted_once, assert_same_pod, container, container_status, in_place_strategy,
    shared_cluster,
};
use crate::fixture::{DaemonCluster, TestNamespace};

/// Has one file more than other images, and is on no node yet.
const NEW_IMAGE: &str = "kruise-test/ahead:1";

#[tokio::test]
async fn image_is_pre_pulled_before_in_place_update() {
    let test = shared_cluster().await;
    let image = Image::busybox().script("true").random(1);
    test.cluster
        .node
        .runtime
        .registry
        .push(NEW_IMAGE, &image)
        .unwrap();
    let strategy = |paused: bool| in_place_strategy(json!({"paused": paused}));
    let names = ["app", "side"].map(|name| container(name, "kruise-test/term:1"));
    let spec = json!({"updateStrategy": strategy(true)});
    test.create_set("web", 4, json!(names), spec).await;
    let before = test.pods_of("web").await;
    test.set_image("web", 0, NEW_IMAGE).await;
    wait_pre_pulled(&test).await;
    let paused_pods = test.pods_of("web").await;
    let not_restarted = |pod: &Pod| container_status(pod, "app").restart_count == 0;
    assert!(paused_pods.iter().all(not_restarted), "it is paused");

    test.patch_spec("web", json!({"updateStrategy": strategy(false)}))
        .await;
    test.wait_settled("web").await;
    for (before, after) in before.iter().zip(&test.pods_of("web").await) {
        assert_same_pod(before, after);
        assert_restarted_once(before, after, "app");
    }
    let jobs = test.api::<ImagePullJob>();
    test.poll_until("the job's end with the rollout's", || async {
        let remaining = jobs.list(&ListParams::default()).await.unwrap().items;
        remaining.is_empty().then_some(())
    })
    .await;
    let events = test.api::<Event>().list(&ListParams::default()).await.unwrap();
    let kubelet_pulled = |event: &&Event| {
        event.reason.as_deref() == Some("Pulling")
            && event.message.as_ref().is_some_and(|m| m.contains(NEW_IMAGE))
    };
    let pulling = events.items.iter().find(kubelet_pulled);
    assert_eq!(pulling, None, "kubelet found it there");
}

/// Waits until the image of the new revision is on the node, pulled for that container only.
async fn wait_pre_pulled<G: Deref<Target = DaemonCluster>>(test: &TestNamespace<G>) {
    let has_new_revision = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        status.update_revision != status.current_revision
    };
    let set = test
        .wait_status("web", "the new revision", has_new_revision)
        .await;
    let job = format!("{}-app", set.status.unwrap().update_revision);
    let has_pulled = |job: &ImagePullJob| job.status.as_ref().is_some_and(|s| s.succeeded == 1);
    let (job, _) = test.watch_until(&job, "it has pulled", has_pulled).await;
    assert_eq!(job.spec.image, NEW_IMAGE);
    assert_eq!(job.metadata.owner_references.as_ref().unwrap()[0].name, "web");
    let node_images = test.cluster.node.runtime.ctr(&["images", "ls", "-q"]).unwrap();
    let is_new_image = |name: &str| name == format!("docker.io/{NEW_IMAGE}");
    assert!(node_images.lines().any(is_new_image), "{node_images}");
    let all = test.api::<ImagePullJob>().list(&ListParams::default()).await;
    assert_eq!(all.unwrap().items.len(), 1);
}
