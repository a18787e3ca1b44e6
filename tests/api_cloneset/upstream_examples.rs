//! The examples of OpenKruise's manual, as printed: applied and reconciled.

use serde::Deserialize;
use serde_json::Value;

use crate::fixture::{Fixture, identities};
use crate::test_cluster::shared_cluster;

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
async fn upstream_manual_examples_roll_out() {
    let fixture = Fixture::new(shared_cluster(), "manual").await;
    let namespace = format!("--namespace={}", fixture.namespace);
    let apply = ["apply", &namespace, "-f", &path("cloneset.yaml")];
    shared_cluster().plane.kubectl(&apply).unwrap();
    for name in ["sample", "sample-data"] {
        let set = fixture.wait_settled(name).await;
        let status = set.status.unwrap();
        assert_eq!(
            (status.replicas, status.label_selector.as_str()),
            (5, "app=sample"),
            "{name}"
        );
        assert_eq!(set.spec.template["spec"]["dnsPolicy"], "ClusterFirst");
    }
    // Both select the same Pods, and neither adopts the other's.
    let pods = fixture.pods_of("sample").await;
    let owned_by = |set: &str| {
        pods.iter()
            .filter(|p| p["metadata"]["ownerReferences"][0]["name"] == set)
            .count()
    };
    assert_eq!(
        (owned_by("sample"), owned_by("sample-data"), pods.len()),
        (5, 5, 10)
    );
    let claims = fixture
        .api("", "v1", "PersistentVolumeClaim")
        .list(&Default::default())
        .await
        .unwrap();
    assert_eq!(claims.items.len(), 5);
    let before = identities(&pods);
    shared_cluster().plane.kubectl(&apply).unwrap();
    fixture.wait_settled("sample-data").await;
    assert_eq!(
        identities(&fixture.pods_of("sample").await),
        before,
        "applied once more"
    );
}
