//! The life of Pods: created, updated in place, deleted; and how many requests that costs.

use serde_json::json;

use crate::fixture::{Fixture, identities};
use crate::test_cluster::shared_cluster;

#[tokio::test]
async fn pods_are_created_updated_in_place_and_deleted() {
    let fixture = Fixture::new(shared_cluster(), "life").await;
    fixture.create_cloneset("web", json!({})).await;
    let set = fixture.wait_settled("web").await;
    let before = fixture.pods_of("web").await;
    assert_eq!(before.len(), 3);
    let gates = json!([{ "conditionType": "InPlaceUpdateReady" }, { "conditionType": "KruisePodReady" }]);
    assert!(before.iter().all(|pod| pod["spec"]["readinessGates"] == gates));
    let create_writes = fixture.pod_writes();
    assert!(
        create_writes.len() <= 6,
        "two writes to a ready Pod, but: {create_writes:?}"
    );

    fixture.set_image("web", "example.com/app:2").await;
    let updated = fixture.wait_settled("web").await;
    let after = fixture.pods_of("web").await;
    assert_eq!(identities(&before), identities(&after));
    for (before, after) in before.iter().zip(&after) {
        let (mut old, new) = (before["spec"].clone(), &after["spec"]);
        old["containers"][0]["image"] = json!("example.com/app:2");
        assert_eq!(old, *new, "nothing but the image is another");
        assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 1);
        assert_eq!(
            after["metadata"]["labels"]["lifecycle.apps.kruise.io/state"],
            "Normal"
        );
    }
    let revision = |set: &kruise_api::cloneset::CloneSet| set.status.clone().unwrap().update_revision;
    assert_ne!(revision(&set), revision(&updated));
    let all_writes = fixture.pod_writes();
    assert!(
        all_writes.len() <= create_writes.len() + 9,
        "three writes to a Pod updated in place, but: {all_writes:?}"
    );

    fixture
        .patch_set("web", json!({ "spec": { "replicas": 0 } }))
        .await;
    fixture.wait_settled("web").await;
    fixture.wait_pods("web", "gone", |pods| pods.is_empty()).await;
}
