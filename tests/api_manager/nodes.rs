//! One NodeImage per Node.

use k8s_openapi::api::core::v1::Node;
use kruise::api::node_image::NodeImage;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde_json::json;

use crate::world::{node, set_ready, until, until_gone, world};

#[tokio::test]
async fn a_nodeimage_comes_with_a_ready_node_follows_its_labels_and_goes_with_it() {
    let admin = world().admin().await;
    let nodes = Api::<Node>::all(admin.client.clone());
    let images = Api::<NodeImage>::all(admin.client.clone());

    node(
        &admin,
        "comes-and-goes",
        json!({ "zone": "a", "old": "x" }),
        false,
    )
    .await;
    node(&admin, "comes-first", json!({}), true).await;
    until(&images, "comes-first", "there", |_| true).await;
    assert!(
        images.get_opt("comes-and-goes").await.unwrap().is_none(),
        "its node is not ready"
    );

    set_ready(&admin, "comes-and-goes", true).await;
    let image = until(&images, "comes-and-goes", "there", |_| true).await;
    assert_eq!(image.labels().get("zone").map(String::as_str), Some("a"));

    let labels = json!({ "metadata": { "labels": { "zone": "b", "old": null } } });
    nodes
        .patch("comes-and-goes", &PatchParams::default(), &Patch::Merge(&labels))
        .await
        .unwrap();
    until(&images, "comes-and-goes", "relabelled", |i: &NodeImage| {
        i.labels().get("zone").is_some_and(|z| z == "b") && !i.labels().contains_key("old")
    })
    .await;

    nodes
        .delete("comes-and-goes", &DeleteParams::default())
        .await
        .unwrap();
    until_gone(&images, "comes-and-goes").await;
    for words in ["NodeImage created", "NodeImage deleted: its Node has gone"] {
        assert_eq!(world().logged(words, "comes-and-goes").await, 1, "{words}");
    }
}

#[tokio::test]
async fn a_virtual_node_has_none_and_a_nodeimage_for_tests_needs_no_node() {
    let admin = world().admin().await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    let fake = json!({ "metadata": { "name": "fake", "labels": { "apps.kruise.io/fake-nodeimage": "true" } }, "spec": {} });
    crate::world::create(&images, fake).await;
    node(&admin, "virtual", json!({ "type": "virtual-kubelet" }), true).await;
    // Nodes are looked at in the order of their coming; when the later one is done, so is the earlier.
    node(&admin, "after-virtual", json!({}), true).await;
    until(&images, "after-virtual", "there", |_| true).await;
    assert!(images.get_opt("virtual").await.unwrap().is_none());
    assert!(
        images
            .get("fake")
            .await
            .unwrap()
            .meta()
            .deletion_timestamp
            .is_none()
    );
}

#[tokio::test]
async fn a_tag_that_no_daemon_answers_fails_and_then_goes_after_its_time() {
    let admin = world().admin().await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    let tag = |ttl: i32| {
        json!([{ "tag": "1", "createdAt": "2020-01-01T00:00:00Z", "version": 3,
            "pullPolicy": { "ttlSecondsAfterFinished": ttl } }])
    };
    let silent = json!({
        "metadata": { "name": "silent", "labels": { "apps.kruise.io/fake-nodeimage": "true" } },
        "spec": { "images": { "stays": { "tags": tag(86400) }, "goes": { "tags": tag(1) } } },
    });
    crate::world::create(&images, silent).await;
    let failed = until(&images, "silent", "given up", |i: &NodeImage| {
        let statuses = i.status.as_ref().map(|s| &s.image_statuses);
        statuses.is_some_and(|s| s.contains_key("stays"))
    })
    .await;
    let status = failed.status.unwrap();
    let state = &status.image_statuses["stays"].tags[0];
    assert_eq!((state.phase.as_str(), state.version), ("Failed", 3));
    assert_eq!(
        state.message.as_deref(),
        Some("node has not responded for a long time")
    );
    let words = "marked the pull as failed: kruise-daemon does not respond";
    world().logged(words, "stays:1").await;
    let left = until(&images, "silent", "cleaned up", |i: &NodeImage| {
        !i.spec.images.contains_key("goes")
    })
    .await;
    assert!(left.spec.images.contains_key("stays"), "its time has not come");
}
