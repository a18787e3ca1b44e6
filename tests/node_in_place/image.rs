//! Updates of images.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kruise_api::cloneset::CloneSet;
use kruise_api::container_hash::plain_hash;
use kube::ResourceExt;
use serde_json::json;

use crate::field::{Field, container, holds, restarted_once, same_container, same_pod, shared, status};
use crate::pod::Told;

#[tokio::test]
async fn an_image_is_changed_in_the_same_pod_and_nothing_else_is_touched() {
    let test = shared().await;
    let mut app = container("app", "kruise-test/term:1");
    app["volumeMounts"] = json!([{"name": "data", "mountPath": "/state"}]);
    app["lifecycle"] = json!({"postStart": {"exec": {"command": ["sh", "-c", "echo start >> /state/starts; cp /state/starts /log/starts"]}}});
    let claim = json!({"metadata": {"name": "data"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}});
    let containers = json!([app, container("side", "kruise-test/term:1")]);
    let set = test
        .set("web", 1, containers, json!({"volumeClaimTemplates": [claim]}))
        .await;
    let before = test.pod_of("web").await;
    assert!(holds(&before, "InPlaceUpdateReady") && holds(&before, "Ready"));
    let claims = test.api::<PersistentVolumeClaim>();
    let old_claims = claims.list(&Default::default()).await.unwrap().items;

    test.image("web", 0, "kruise-test/term:2").await;
    let done = test.settled("web").await;
    let after: Pod = test.pod_of("web").await;
    same_pod(&before, &after);
    restarted_once(&before, &after, "app");
    same_container(&before, &after, "side");
    assert_ne!(status(&before, "app").image_id, status(&after, "app").image_id);
    assert_eq!(
        after.spec.as_ref().unwrap().containers[0].image.as_deref(),
        Some("kruise-test/term:2")
    );

    let claims = claims.list(&Default::default()).await.unwrap().items;
    let look = |claims: &[PersistentVolumeClaim]| -> Vec<_> {
        claims
            .iter()
            .map(|c| (c.name_any(), c.uid(), c.spec.clone().unwrap().volume_name))
            .collect()
    };
    assert_eq!(look(&old_claims), look(&claims));
    assert_eq!(claims.len(), 1);
    let starts = std::fs::read_to_string(test.log.join("starts")).unwrap();
    assert_eq!(
        starts, "start\nstart\n",
        "the volume kept what the first container wrote"
    );

    let revision = |set: &CloneSet| set.status.clone().unwrap().update_revision;
    assert_ne!(revision(&set), revision(&done));
    assert_eq!(after.labels()["controller-revision-hash"], revision(&done));
    assert_eq!(after.labels()["lifecycle.apps.kruise.io/state"], "Normal");
    assert!(holds(&after, "InPlaceUpdateReady") && holds(&after, "Ready"));
}

#[tokio::test]
async fn a_second_tag_of_the_same_image_is_proven_by_the_daemon() {
    let test = shared().await;
    let containers = json!([container("app", "kruise-test/term:1")]);
    test.set("web", 1, containers, json!({})).await;
    let before = test.pod_of("web").await;
    test.image("web", 0, "kruise-test/term:1-again").await;
    test.settled("web").await;
    let after = test.pod_of("web").await;
    same_pod(&before, &after);
    restarted_once(&before, &after, "app");
    assert_eq!(status(&before, "app").image_id, status(&after, "app").image_id);
    let told = test.told(&after.name_any(), "it is told of", |_, _| true).await;
    assert_eq!(told.told("app").0, plain_hash("app", "kruise-test/term:1-again"));
}

#[tokio::test]
async fn an_image_that_cannot_be_pulled_costs_one_pod_and_is_taken_back_in_place() {
    let test = shared().await;
    let containers = json!([container("app", "kruise-test/term:1")]);
    let first = test.set("web", 3, containers, json!({})).await;
    let before = test.pods_of("web").await;
    test.image("web", 0, "kruise-test/no-such:1").await;
    let says = test.says("web", "ImagePull").await;
    let numbers = says.status.unwrap();
    assert_eq!((numbers.updated_replicas, numbers.available_replicas), (1, 2));
    let held = test.pods_of("web").await;
    let failing = |pod: &&Pod| status(pod, "app").state.as_ref().unwrap().waiting.is_some();
    assert_eq!(held.iter().filter(failing).count(), 1);

    test.image("web", 0, "kruise-test/term:1").await;
    let back = test.settled("web").await;
    let after = test.pods_of("web").await;
    let revision = |set: &CloneSet| set.status.clone().unwrap().update_revision;
    assert_eq!(
        revision(&first),
        revision(&back),
        "the old revision is used again"
    );
    assert_eq!(after.len(), 3);
    for ((before, held), after) in before.iter().zip(&held).zip(&after) {
        same_pod(before, after);
        match failing(&held) {
            true => restarted_once(before, after, "app"),
            false => same_container(before, after, "app"),
        }
    }
}
