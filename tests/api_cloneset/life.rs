//! The life of Pods: made, updated where they are, deleted; and what that costs.

use serde_json::json;

use crate::field::{Field, identities};
use crate::world::world;

#[tokio::test]
async fn pods_are_made_updated_where_they_are_and_deleted() {
    let field = Field::new(world(), "life").await;
    field.set("web", json!({})).await;
    let set = field.settled("web").await;
    let before = field.pods_of("web").await;
    assert_eq!(before.len(), 3);
    let gates = json!([{ "conditionType": "InPlaceUpdateReady" }, { "conditionType": "KruisePodReady" }]);
    assert!(before.iter().all(|pod| pod["spec"]["readinessGates"] == gates));
    let born = field.pod_writes();
    assert!(born.len() <= 6, "two writes to a ready Pod, but: {born:?}");

    field.image("web", "example.com/app:2").await;
    let updated = field.settled("web").await;
    let after = field.pods_of("web").await;
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
    let all = field.pod_writes();
    assert!(
        all.len() <= born.len() + 9,
        "three writes to a Pod updated in place, but: {all:?}"
    );

    field.edit("web", json!({ "spec": { "replicas": 0 } })).await;
    field.settled("web").await;
    field.until_pods("web", "gone", |pods| pods.is_empty()).await;
}
