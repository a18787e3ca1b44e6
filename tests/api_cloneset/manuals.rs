//! The examples of OpenKruise's manual, as printed: applied, and acted upon.

use serde::Deserialize;
use serde_json::Value;

use crate::field::{Field, identities};
use crate::world::world;

fn path(file: &str) -> String {
    format!("{}/../tests/data/manuals/{file}", env!("CARGO_MANIFEST_DIR"))
}

pub fn documents(file: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(path(file)).unwrap();
    serde_yaml::Deserializer::from_str(&text)
        .map(|document| Value::deserialize(document).unwrap())
        .collect()
}

#[tokio::test]
async fn the_manual_s_examples_come_up_as_printed() {
    let field = Field::new(world(), "manual").await;
    let namespace = format!("--namespace={}", field.namespace);
    let apply = ["apply", &namespace, "-f", &path("cloneset.yaml")];
    world().plane.kubectl(&apply).unwrap();
    for name in ["sample", "sample-data"] {
        let set = field.settled(name).await;
        let status = set.status.unwrap();
        assert_eq!(
            (status.replicas, status.label_selector.as_str()),
            (5, "app=sample"),
            "{name}"
        );
        assert_eq!(set.spec.template["spec"]["dnsPolicy"], "ClusterFirst");
    }
    // Both select the same Pods, and neither takes those of the other.
    let pods = field.pods_of("sample").await;
    let of = |set: &str| {
        pods.iter()
            .filter(|p| p["metadata"]["ownerReferences"][0]["name"] == set)
            .count()
    };
    assert_eq!((of("sample"), of("sample-data"), pods.len()), (5, 5, 10));
    let claims = field
        .api("", "v1", "PersistentVolumeClaim")
        .list(&Default::default())
        .await
        .unwrap();
    assert_eq!(claims.items.len(), 5);
    let before = identities(&pods);
    world().plane.kubectl(&apply).unwrap();
    field.settled("sample-data").await;
    assert_eq!(
        identities(&field.pods_of("sample").await),
        before,
        "applied once more"
    );
}
