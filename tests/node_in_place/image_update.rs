//! Updates of images.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kruise_api::cloneset::CloneSet;
use kruise_api::container_hash::plain_hash;
use kube::ResourceExt;
use serde_json::json;

use crate::clone_set_ops::{
    CloneSetOps, assert_container_untouched, assert_restarted_once, assert_same_pod, condition_is_true,
    container, container_status, shared_cluster,
};
use crate::pod_meta::PodMetaOps;

#[tokio::test]
async fn image_update_in_place_keeps_pod_and_volumes() {
    let test = shared_cluster().await;
    let mut app = container("app", "kruise-test/term:1");
    app["volumeMounts"] = json!([{"name": "data", "mountPath": "/state"}]);
    app["lifecycle"] = json!({"postStart": {"exec": {"command": ["sh", "-c", "echo start >> /state/starts; cp /state/starts /log/starts"]}}});
    let claim = json!({"metadata": {"name": "data"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}});
    let containers = json!([app, container("side", "kruise-test/term:1")]);
    let set = test
        .create_set("web", 1, containers, json!({"volumeClaimTemplates": [claim]}))
        .await;
    let before = test.single_pod("web").await;
    assert!(condition_is_true(&before, "InPlaceUpdateReady") && condition_is_true(&before, "Ready"));
    let claims = test.api::<PersistentVolumeClaim>();
    let old_claims = claims.list(&Default::default()).await.unwrap().items;

    test.set_image("web", 0, "kruise-test/term:2").await;
    let updated = test.wait_settled("web").await;
    let after: Pod = test.single_pod("web").await;
    assert_same_pod(&before, &after);
    assert_restarted_once(&before, &after, "app");
    assert_container_untouched(&before, &after, "side");
    assert_ne!(
        container_status(&before, "app").image_id,
        container_status(&after, "app").image_id
    );
    assert_eq!(
        after.spec.as_ref().unwrap().containers[0].image.as_deref(),
        Some("kruise-test/term:2")
    );

    let claims = claims.list(&Default::default()).await.unwrap().items;
    let identities = |claims: &[PersistentVolumeClaim]| -> Vec<_> {
        claims
            .iter()
            .map(|c| (c.name_any(), c.uid(), c.spec.clone().unwrap().volume_name))
            .collect()
    };
    assert_eq!(identities(&old_claims), identities(&claims));
    assert_eq!(claims.len(), 1);
    let starts = std::fs::read_to_string(test.log_dir.join("starts")).unwrap();
    assert_eq!(
        starts, "start\nstart\n",
        "the volume kept what the first container wrote"
    );

    let revision = |set: &CloneSet| set.status.clone().unwrap().update_revision;
    assert_ne!(revision(&set), revision(&updated));
    assert_eq!(after.labels()["controller-revision-hash"], revision(&updated));
    assert_eq!(after.labels()["lifecycle.apps.kruise.io/state"], "Normal");
    assert!(condition_is_true(&after, "InPlaceUpdateReady") && condition_is_true(&after, "Ready"));
}

#[tokio::test]
async fn second_tag_of_same_image_is_confirmed_by_daemon() {
    let test = shared_cluster().await;
    let containers = json!([container("app", "kruise-test/term:1")]);
    test.create_set("web", 1, containers, json!({})).await;
    let before = test.single_pod("web").await;
    test.set_image("web", 0, "kruise-test/term:1-again").await;
    test.wait_settled("web").await;
    let after = test.single_pod("web").await;
    assert_same_pod(&before, &after);
    assert_restarted_once(&before, &after, "app");
    assert_eq!(
        container_status(&before, "app").image_id,
        container_status(&after, "app").image_id
    );
    let meta = test
        .wait_meta(&after.name_any(), "it is told of", |_, _| true)
        .await;
    assert_eq!(
        meta.hashes("app").0,
        plain_hash("app", "kruise-test/term:1-again")
    );
}

#[tokio::test]
async fn unpullable_image_affects_one_pod_and_rolls_back() {
    let test = shared_cluster().await;
    let containers = json!([container("app", "kruise-test/term:1")]);
    let first = test.create_set("web", 3, containers, json!({})).await;
    let before = test.pods_of("web").await;
    test.set_image("web", 0, "kruise-test/no-such:1").await;
    let blocked = test.wait_waiting_message("web", "ImagePull").await;
    let status = blocked.status.unwrap();
    assert_eq!((status.updated_replicas, status.available_replicas), (1, 2));
    let pods_during_failure = test.pods_of("web").await;
    let is_waiting = |pod: &&Pod| {
        container_status(pod, "app")
            .state
            .as_ref()
            .unwrap()
            .waiting
            .is_some()
    };
    assert_eq!(pods_during_failure.iter().filter(is_waiting).count(), 1);

    test.set_image("web", 0, "kruise-test/term:1").await;
    let rolled_back = test.wait_settled("web").await;
    let after = test.pods_of("web").await;
    let revision = |set: &CloneSet| set.status.clone().unwrap().update_revision;
    assert_eq!(
        revision(&first),
        revision(&rolled_back),
        "the old revision is used again"
    );
    assert_eq!(after.len(), 3);
    for ((before, held), after) in before.iter().zip(&pods_during_failure).zip(&after) {
        assert_same_pod(before, after);
        match is_waiting(&held) {
            true => assert_restarted_once(before, after, "app"),
            false => assert_container_untouched(before, after, "app"),
        }
    }
}
