//! One NodeImage per Node.

use k8s_openapi::api::core::v1::Node;
use kruise_api::node_image::NodeImage;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};

use crate::waits;
use crate::world::{
    Answer, answer, completed, create, job, jobs, node, nodes, set_ready, until, until_gone, world,
};
use support::untyped::untyped;

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

/// The API server takes times that our types do not hold: a tag that has one keeps no job from its node, is asked for anew
/// where a job needs it, and no tag beside it is lost.
#[tokio::test]
async fn times_in_the_year_9999_keep_no_node_from_its_jobs() {
    const FAR: &str = "9999-12-31T23:59:59Z";
    let admin = world().admin().await;
    nodes(&admin, &["far"], json!({})).await;
    // As they are on the wire: what our types make of it is what is tested.
    let images = untyped(&admin, "apps.kruise.io", "v1beta1", "NodeImage", None);
    let state =
        json!({ "tag": "near", "phase": "Succeeded", "version": 1, "startTime": FAR, "completionTime": FAR });
    let status = json!({ "status": { "desired": 1, "firstSyncStatus": { "syncAt": FAR },
        "imageStatuses": { "nginx": { "tags": [state] }, "gone": { "tags": [state] } } } });
    let merge = PatchParams::default();
    let stored = images
        .patch_status("far", &merge, &Patch::Merge(&status))
        .await
        .unwrap();
    assert_eq!(
        stored.data["status"]["imageStatuses"]["nginx"]["tags"][0]["completionTime"],
        FAR
    );
    let now = admin.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let tag = |name: &str, created: &str| json!({ "tag": name, "createdAt": created, "version": 1, "pullPolicy": { "ttlSecondsAfterFinished": 86400 } });
    let spec = json!({ "spec": { "images": {
        "nginx": { "tags": [tag("far", FAR), tag("near", &now)] }, "redis": { "tags": [tag("far", FAR)] } } } });
    let stored = images.patch("far", &merge, &Patch::Merge(&spec)).await.unwrap();
    assert_eq!(
        stored.data["spec"]["images"]["redis"]["tags"][0]["createdAt"],
        FAR
    );

    let node = json!({ "names": ["far"] });
    for (name, image) in [("beside-far", "nginx:wanted"), ("needs-far", "redis:far")] {
        create(
            &jobs(&admin),
            job(name, json!({ "image": image, "selector": node })),
        )
        .await;
    }
    let generation = stored.metadata.generation.unwrap();
    let there = |object: &Value, image: &str, tag: &str| {
        let tags = object["images"][image]["tags"].as_array().into_iter().flatten();
        let mut found = tags.filter(|there| there["tag"] == tag && there["createdAt"] != FAR);
        found
            .next()
            .is_some_and(|there| tag == "near" || !there["ownerReferences"].is_null())
    };
    let asked = waits::until("both images are asked for", &String::new, || async {
        let object = images.get("far").await.unwrap();
        let all = [("nginx", "near"), ("nginx", "wanted"), ("redis", "far")];
        let spec = &object.data["spec"];
        (all.iter().all(|(image, tag)| there(spec, image, tag)) && !spec.to_string().contains(FAR))
            .then_some(object)
    });
    let asked = asked.await;
    // What had no readable time is removed, and each job is written once, or together, or twice where it met the removal.
    let writes = asked.metadata.generation.unwrap() - generation;
    assert!((1..=5).contains(&writes), "{writes} writes");
    answer(&admin, "far", Answer::Succeeded).await;
    for name in ["beside-far", "needs-far"] {
        let ended = until(&jobs(&admin), name, "ended", completed).await;
        assert_eq!(ended.status.unwrap().succeeded, 1, "{name}");
    }
    let settled = images.get("far").await.unwrap();
    assert_eq!(
        settled.metadata.generation, asked.metadata.generation,
        "nothing is left to write"
    );
}
