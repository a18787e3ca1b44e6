//! Claims that are somebody else's, too: a backup that keeps its data for as long as it is there.

use kube::api::{Api, DynamicObject, Patch};
use serde_json::{Value, json};

use crate::field::Field;
use crate::pods::{deleting, name, uid};
use crate::world::world;

/// A CloneSet `db` of three Pods, each with a claim that a ConfigMap owns, too: as the first owner, the last, and as
/// its controller.
async fn shared(namespace: &str, reuse: bool) -> (Field, Vec<Value>) {
    let field = Field::new(world(), namespace).await;
    let spec = json!({
        "scaleStrategy": { "enablePVCReuse": reuse },
        "volumeClaimTemplates": [{ "metadata": { "name": "data" }, "spec": {
            "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } },
        } }],
    });
    field.set("db", spec).await;
    field.settled("db").await;
    let backup = json!({ "metadata": { "name": "backup" } });
    let backup = json!(field.create(&field.api("", "v1", "ConfigMap"), backup).await);
    let pods = field.pods_of("db").await;
    for (at, pod) in pods.iter().enumerate() {
        let claim = claim(&field, pod).await;
        let mut ours = claim["metadata"]["ownerReferences"][0].clone();
        let controls = at == 2;
        let theirs = json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": "backup", "uid": uid(&backup),
            "controller": controls });
        ours["controller"] = json!(!controls);
        let owners = if at == 1 { [ours, theirs] } else { [theirs, ours] };
        let patch = Patch::Merge(json!({ "metadata": { "ownerReferences": owners } }));
        let name = name(&claim);
        claims(&field)
            .patch(&name, &Default::default(), &patch)
            .await
            .unwrap();
    }
    (field, pods)
}

fn claims(field: &Field) -> Api<DynamicObject> {
    field.api("", "v1", "PersistentVolumeClaim")
}

async fn claim(field: &Field, pod: &Value) -> Value {
    json!(claims(field).get(&format!("data-{}", name(pod))).await.unwrap())
}

/// Kinds and names of the owners, sorted.
fn owners(claim: &Value) -> Vec<(String, String)> {
    let owners = claim["metadata"]["ownerReferences"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut owners: Vec<_> = owners.map(|o| (text(&o["kind"]), text(&o["name"]))).collect();
    owners.sort();
    owners
}

fn and_backup(kind: &str, name: &str) -> Vec<(String, String)> {
    let mut owners =
        [("ConfigMap", "backup"), (kind, name)].map(|(kind, name)| (kind.to_owned(), name.to_owned()));
    owners.sort();
    owners.to_vec()
}

#[tokio::test]
async fn claims_of_two_owners_go_over_to_their_pods_and_stay_the_other_s() {
    let (field, pods) = shared("shared", true).await;
    field.edit("db", json!({ "spec": { "replicas": 0 } })).await;
    field.until_pods("db", "gone", |pods| pods.is_empty()).await;
    for pod in &pods {
        let claim = claim(&field, pod).await;
        assert_eq!(owners(&claim), and_backup("Pod", &name(pod)), "{claim:#}");
        // What the manager's patches say is what keeps another claim of that name safe.
        let other = Patch::Strategic(json!({ "metadata": { "uid": "other", "labels": { "x": "y" } } }));
        let refused = claims(&field)
            .patch(&name(&claim), &Default::default(), &other)
            .await;
        let code = match &refused {
            Err(kube::Error::Api(status)) => status.code,
            _ => 0,
        };
        assert!([409, 422].contains(&code), "{refused:?}");
    }
}

#[tokio::test]
async fn claims_of_two_owners_are_used_again_or_left_to_the_other() {
    for (namespace, reuse) in [("shared-reused", true), ("shared-not-reused", false)] {
        let (field, pods) = shared(namespace, reuse).await;
        for pod in &pods {
            field
                .pods()
                .delete(&name(pod), &Default::default())
                .await
                .unwrap();
        }
        let before: Vec<String> = pods.iter().map(uid).collect();
        let replaced =
            move |now: &[&Value]| now.len() == 3 && now.iter().all(|pod| !before.contains(&uid(pod)));
        let after = field.until_pods("db", "complete again", replaced).await;
        field.settled("db").await;
        let names: Vec<String> = after.iter().map(name).collect();
        for pod in &pods {
            let claim = claim(&field, pod).await;
            assert_eq!(names.contains(&name(pod)), reuse, "{names:?} {claim:#}");
            // A Pod that is seen to go is given its claim; that of one which is gone is let go.
            let pod_s = owners(&claim) == and_backup("Pod", &name(pod));
            let goes = pod_s || owners(&claim) == [("ConfigMap".to_owned(), "backup".to_owned())];
            let stays = owners(&claim) == and_backup("CloneSet", "db");
            assert_eq!((stays, goes), (reuse, !reuse), "{claim:#}");
            assert!(!deleting(&claim), "{claim:#}");
        }
    }
}
