//! One NodeImage per Node.

use k8s_openapi::api::core::v1::Node;
use kruise_api::node_image::NodeImage;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};

use crate::test_cluster::{
    PullOutcome, completed, create, create_node, create_nodes, job, jobs, report_pull, set_node_ready,
    shared_cluster, wait_until, wait_until_deleted,
};
use crate::waits;
use support::untyped::untyped;

#[tokio::test]
async fn nodeimage_follows_its_node() {
    let admin = shared_cluster().admin().await;
    let nodes = Api::<Node>::all(admin.client.clone());
    let images = Api::<NodeImage>::all(admin.client.clone());

    create_node(
        &admin,
        "comes-and-goes",
        json!({ "zone": "a", "old": "x" }),
        false,
    )
    .await;
    create_node(&admin, "comes-first", json!({}), true).await;
    wait_until(&images, "comes-first", "there", |_| true).await;
    assert!(
        images.get_opt("comes-and-goes").await.unwrap().is_none(),
        "its node is not ready"
    );

    set_node_ready(&admin, "comes-and-goes", true).await;
    let image = wait_until(&images, "comes-and-goes", "there", |_| true).await;
    assert_eq!(image.labels().get("zone").map(String::as_str), Some("a"));

    let labels = json!({ "metadata": { "labels": { "zone": "b", "old": null } } });
    nodes
        .patch("comes-and-goes", &PatchParams::default(), &Patch::Merge(&labels))
        .await
        .unwrap();
    wait_until(&images, "comes-and-goes", "relabelled", |i: &NodeImage| {
        i.labels().get("zone").is_some_and(|z| z == "b") && !i.labels().contains_key("old")
    })
    .await;

    nodes
        .delete("comes-and-goes", &DeleteParams::default())
        .await
        .unwrap();
    wait_until_deleted(&images, "comes-and-goes").await;
    for log_message in ["NodeImage created", "NodeImage deleted: its Node has gone"] {
        assert_eq!(
            shared_cluster().wait_for_log(log_message, "comes-and-goes").await,
            1,
            "{log_message}"
        );
    }
}

#[tokio::test]
async fn virtual_node_has_no_nodeimage_and_fake_one_needs_no_node() {
    let admin = shared_cluster().admin().await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    let fake = json!({ "metadata": { "name": "fake", "labels": { "apps.kruise.io/fake-nodeimage": "true" } }, "spec": {} });
    crate::test_cluster::create(&images, fake).await;
    create_node(&admin, "virtual", json!({ "type": "virtual-kubelet" }), true).await;
    // Nodes are reconciled in the order of their creation; when the later one is done, so is the earlier.
    create_node(&admin, "after-virtual", json!({}), true).await;
    wait_until(&images, "after-virtual", "there", |_| true).await;
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
async fn unanswered_tag_fails_and_is_removed_after_ttl() {
    let admin = shared_cluster().admin().await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    let tag = |ttl: i32| {
        json!([{ "tag": "1", "createdAt": "2020-01-01T00:00:00Z", "version": 3,
            "pullPolicy": { "ttlSecondsAfterFinished": ttl } }])
    };
    let fake = json!({
        "metadata": { "name": "silent", "labels": { "apps.kruise.io/fake-nodeimage": "true" } },
        "spec": { "images": { "stays": { "tags": tag(86400) }, "goes": { "tags": tag(1) } } },
    });
    crate::test_cluster::create(&images, fake).await;
    let failed = wait_until(&images, "silent", "given up", |i: &NodeImage| {
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
    let log_message = "marked the pull as failed: kruise-daemon does not respond";
    shared_cluster().wait_for_log(log_message, "stays:1").await;
    let cleaned_up = wait_until(&images, "silent", "cleaned up", |i: &NodeImage| {
        !i.spec.images.contains_key("goes")
    })
    .await;
    assert!(
        cleaned_up.spec.images.contains_key("stays"),
        "its time has not come"
    );
}

/// The API server accepts timestamps that our types cannot hold: a tag with one keeps no job from its node, is
/// requested again when a job needs it, and no other tag is lost.
#[tokio::test]
async fn timestamps_of_year_9999_do_not_block_jobs() {
    const FAR: &str = "9999-12-31T23:59:59Z";
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["far"], json!({})).await;
    // Untyped, because the test is about how our types parse them.
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
    let is_requested = |object: &Value, image: &str, tag: &str| {
        let tags = object["images"][image]["tags"].as_array().into_iter().flatten();
        let mut found = tags.filter(|entry| entry["tag"] == tag && entry["createdAt"] != FAR);
        found
            .next()
            .is_some_and(|entry| tag == "near" || !entry["ownerReferences"].is_null())
    };
    let requested = waits::poll_until("both images are asked for", &String::new, || async {
        let object = images.get("far").await.unwrap();
        let all = [("nginx", "near"), ("nginx", "wanted"), ("redis", "far")];
        let spec = &object.data["spec"];
        (all.iter().all(|(image, tag)| is_requested(spec, image, tag)) && !spec.to_string().contains(FAR))
            .then_some(object)
    });
    let requested = requested.await;
    // The tag with the unreadable time is removed; the jobs are written one by one or together, or twice after a
    // conflict with the removal.
    let writes = requested.metadata.generation.unwrap() - generation;
    assert!((1..=5).contains(&writes), "{writes} writes");
    report_pull(&admin, "far", PullOutcome::Succeeded).await;
    for name in ["beside-far", "needs-far"] {
        let ended = wait_until(&jobs(&admin), name, "ended", completed).await;
        assert_eq!(ended.status.unwrap().succeeded, 1, "{name}");
    }
    let final_image = images.get("far").await.unwrap();
    assert_eq!(
        final_image.metadata.generation, requested.metadata.generation,
        "nothing is left to write"
    );
}
