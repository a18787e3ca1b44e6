//! Claims with a second owner: a backup that keeps its data for as long as it exists.

use kube::api::{Api, DynamicObject, Patch};
use serde_json::{Value, json};

use crate::fixture::Fixture;
use crate::pods::{is_terminating, name, uid};
use crate::test_cluster::shared_cluster;

/// A CloneSet `db` of three Pods, each with a claim that a ConfigMap also owns: as the first owner, as the last, and as
/// its controller.
async fn create_with_shared_claims(namespace: &str, reuse: bool) -> (Fixture, Vec<Value>) {
    let fixture = Fixture::new(shared_cluster(), namespace).await;
    let spec = json!({
        "scaleStrategy": { "enablePVCReuse": reuse },
        "volumeClaimTemplates": [{ "metadata": { "name": "data" }, "spec": {
            "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } },
        } }],
    });
    fixture.create_cloneset("db", spec).await;
    fixture.wait_settled("db").await;
    let backup = json!({ "metadata": { "name": "backup" } });
    let backup = json!(fixture.create(&fixture.api("", "v1", "ConfigMap"), backup).await);
    let pods = fixture.pods_of("db").await;
    for (index, pod) in pods.iter().enumerate() {
        let claim = claim_of(&fixture, pod).await;
        let mut set_owner = claim["metadata"]["ownerReferences"][0].clone();
        let is_controller = index == 2;
        let backup_owner = json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": "backup", "uid": uid(&backup),
            "controller": is_controller });
        set_owner["controller"] = json!(!is_controller);
        let owners = if index == 1 {
            [set_owner, backup_owner]
        } else {
            [backup_owner, set_owner]
        };
        let patch = Patch::Merge(json!({ "metadata": { "ownerReferences": owners } }));
        let name = name(&claim);
        claims(&fixture)
            .patch(&name, &Default::default(), &patch)
            .await
            .unwrap();
    }
    (fixture, pods)
}

fn claims(fixture: &Fixture) -> Api<DynamicObject> {
    fixture.api("", "v1", "PersistentVolumeClaim")
}

async fn claim_of(fixture: &Fixture, pod: &Value) -> Value {
    json!(claims(fixture).get(&format!("data-{}", name(pod))).await.unwrap())
}

/// Kinds and names of the owners, sorted.
fn owners(claim: &Value) -> Vec<(String, String)> {
    let owners = claim["metadata"]["ownerReferences"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut owners: Vec<_> = owners.map(|o| (text(&o["kind"]), text(&o["name"]))).collect();
    owners.sort();
    owners
}

fn with_backup(kind: &str, name: &str) -> Vec<(String, String)> {
    let mut owners =
        [("ConfigMap", "backup"), (kind, name)].map(|(kind, name)| (kind.to_owned(), name.to_owned()));
    owners.sort();
    owners.to_vec()
}

#[tokio::test]
async fn scale_in_hands_shared_claims_to_pods_and_keeps_other_owner() {
    let (fixture, pods) = create_with_shared_claims("shared", true).await;
    fixture
        .patch_set("db", json!({ "spec": { "replicas": 0 } }))
        .await;
    fixture.wait_pods("db", "gone", |pods| pods.is_empty()).await;
    for pod in &pods {
        let claim = claim_of(&fixture, pod).await;
        assert_eq!(owners(&claim), with_backup("Pod", &name(pod)), "{claim:#}");
        // A UID in the manager's patches protects another claim of the same name.
        let other = Patch::Strategic(json!({ "metadata": { "uid": "other", "labels": { "x": "y" } } }));
        let result = claims(&fixture)
            .patch(&name(&claim), &Default::default(), &other)
            .await;
        let code = match &result {
            Err(kube::Error::Api(status)) => status.code,
            _ => 0,
        };
        assert!([409, 422].contains(&code), "{result:?}");
    }
}

#[tokio::test]
async fn shared_claims_are_reused_or_left_to_other_owner() {
    for (namespace, reuse) in [("shared-reused", true), ("shared-not-reused", false)] {
        let (fixture, pods) = create_with_shared_claims(namespace, reuse).await;
        for pod in &pods {
            fixture
                .pods()
                .delete(&name(pod), &Default::default())
                .await
                .unwrap();
        }
        let before: Vec<String> = pods.iter().map(uid).collect();
        let replaced =
            move |now: &[&Value]| now.len() == 3 && now.iter().all(|pod| !before.contains(&uid(pod)));
        let after = fixture.wait_pods("db", "complete again", replaced).await;
        fixture.wait_settled("db").await;
        let names: Vec<String> = after.iter().map(name).collect();
        for pod in &pods {
            let claim = claim_of(&fixture, pod).await;
            assert_eq!(names.contains(&name(pod)), reuse, "{names:?} {claim:#}");
            // The claim of a terminating Pod is owned by that Pod; the claim of a deleted Pod is released.
            let is_pods = owners(&claim) == with_backup("Pod", &name(pod));
            let is_released = is_pods || owners(&claim) == [("ConfigMap".to_owned(), "backup".to_owned())];
            let is_kept = owners(&claim) == with_backup("CloneSet", "db");
            assert_eq!((is_kept, is_released), (reuse, !reuse), "{claim:#}");
            assert!(!is_terminating(&claim), "{claim:#}");
        }
    }
}
