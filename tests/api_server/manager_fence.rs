//! What the tokens of the manager and of the webhooks may write, beyond what their roles say.

use kube::api::{Api, DeleteParams, DynamicObject};
use serde_json::{Value, json};
use testbed::cluster::Bound;

use crate::fence::heeded;
use crate::world::{create, merge, refused, typed, world, would_create, would_merge};

fn owner(version: &str, kind: &str) -> Value {
    json!([{ "apiVersion": version, "kind": kind, "name": "o", "uid": "11111111-2222-3333-4444-555555555555",
        "controller": true }])
}

fn clone_set() -> Value {
    owner("apps.kruise.io/v1beta1", "CloneSet")
}

/// A Pod of that owner.
fn pod(name: &str, owners: Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "ownerReferences": owners },
        "spec": { "automountServiceAccountToken": false, "containers": [{ "name": "app", "image": "i:1" }] } })
}

async fn delete(api: &Api<DynamicObject>, name: &str) -> Result<Value, String> {
    let done = api.delete(name, &DeleteParams::default()).await;
    done.map(|_| Value::Null).map_err(|why| why.to_string())
}

#[tokio::test]
async fn the_manager_creates_pods_of_clonesets_only_and_changes_no_others() {
    let manager = world().account("kruise-manager", Bound::Nothing).await;
    let pods = typed(&manager, "v1", "Pod", Some("default"));
    let admins = typed(&world().admin().await, "v1", "Pod", Some("default"));
    for owners in [
        json!([]),
        owner("apps/v1", "ReplicaSet"),
        owner("apps.kruise.io/v1beta1", "StatefulSet"),
        owner("example.com/v1", "CloneSet"),
    ] {
        let forged = || would_create(&pods, pod("m-forged", owners.clone()));
        heeded(forged, "may create Pods of CloneSets only").await;
    }
    create(&pods, pod("m-ours", clone_set())).await.unwrap();
    let image = |image: &str| json!({ "spec": { "containers": [{ "name": "app", "image": image }] } });
    merge(&pods, "m-ours", image("i:2")).await.unwrap();
    delete(&pods, "m-ours").await.unwrap();

    create(&admins, pod("m-theirs", owner("apps/v1", "ReplicaSet")))
        .await
        .unwrap();
    let words = "may not change spec or owner of Pod m-theirs, which belongs to apps/ReplicaSet";
    refused(merge(&pods, "m-theirs", image("i:2")).await, words);
    let stolen = json!({ "metadata": { "ownerReferences": clone_set() } });
    refused(merge(&pods, "m-theirs", stolen.clone()).await, words);
    refused(
        delete(&pods, "m-theirs").await,
        "may not delete Pod m-theirs, which belongs to no CloneSet",
    );
    let barrier = json!({ "metadata": { "annotations": { "a": "1" } } });
    merge(&pods, "m-theirs", barrier).await.unwrap();
    // A Pod of nobody is adopted, and nothing else.
    create(&admins, pod("m-orphan", json!([]))).await.unwrap();
    let words = "may not change spec or owner of Pod m-orphan, which belongs to no controller";
    refused(merge(&pods, "m-orphan", image("i:2")).await, words);
    let given = json!({ "metadata": { "ownerReferences": owner("apps/v1", "ReplicaSet") } });
    refused(merge(&pods, "m-orphan", given).await, words);
    merge(&pods, "m-orphan", stolen).await.unwrap();
}

#[tokio::test]
async fn the_manager_creates_what_clonesets_are_made_of_for_clonesets_only() {
    let manager = world().account("kruise-manager", Bound::Nothing).await;
    let claim =
        json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    for (version, kind, key, content) in [
        ("v1", "PersistentVolumeClaim", "spec", claim),
        ("apps/v1", "ControllerRevision", "data", json!({})),
        (
            "apps.kruise.io/v1beta1",
            "ImagePullJob",
            "spec",
            json!({ "image": "i", "completionPolicy": {} }),
        ),
    ] {
        let api = typed(&manager, version, kind, Some("default"));
        let object = |owners: Value| {
            let mut object = json!({ "apiVersion": version, "kind": kind,
                "metadata": { "name": "m-part", "ownerReferences": owners } });
            object[key] = content.clone();
            if kind == "ControllerRevision" {
                object["revision"] = json!(1);
            }
            object
        };
        let forged = || would_create(&api, object(owner("apps/v1", "StatefulSet")));
        heeded(forged, &format!("may create a {kind} of a CloneSet only")).await;
        would_create(&api, object(clone_set())).await.unwrap();
    }
}

#[tokio::test]
async fn the_manager_changes_and_deletes_no_claims_revisions_and_jobs_of_others() {
    let manager = world().account("kruise-manager", Bound::Nothing).await;
    let admin = world().admin().await;
    let spec = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    let job = json!({ "image": "i", "completionPolicy": {} });
    for (version, kind, key, content) in [
        ("v1", "PersistentVolumeClaim", "spec", spec),
        ("apps/v1", "ControllerRevision", "data", json!({ "a": "1" })),
        ("apps.kruise.io/v1beta1", "ImagePullJob", "spec", job),
    ] {
        let admins = typed(&admin, version, kind, Some("default"));
        let managers = typed(&manager, version, kind, Some("default"));
        let made = async |name: &str, labels: Value, owners: Value| {
            let mut object = json!({ "apiVersion": version, "kind": kind,
                "metadata": { "name": name, "labels": labels, "ownerReferences": owners } });
            object[key] = content.clone();
            if kind == "ControllerRevision" {
                object["revision"] = json!(1);
            }
            create(&admins, object).await.unwrap();
        };
        made("m-other", json!({}), owner("apps/v1", "StatefulSet")).await;
        let id = json!({ "apps.kruise.io/cloneset-instance-id": "x" });
        made("m-own", id, clone_set()).await;
        let mark = json!({ "metadata": { "annotations": { "a": "1" } } });
        let others = format!("{kind} m-other, which");
        let image = "may not change the image of ImagePullJob m-own".to_owned();
        let (name, patch, words) = match kind {
            "ImagePullJob" => ("m-own", json!({ "spec": { "image": "j" } }), &image),
            _ => ("m-other", mark.clone(), &others),
        };
        heeded(|| would_merge(&managers, name, patch.clone()), words).await;
        if kind != "ImagePullJob" {
            refused(merge(&managers, "m-other", mark.clone()).await, &others);
        }
        refused(delete(&managers, "m-other").await, &others);
        merge(&managers, "m-own", mark).await.unwrap();
        delete(&managers, "m-own").await.unwrap();
        delete(&admins, "m-other").await.unwrap();
    }
}

#[tokio::test]
async fn the_manager_writes_barriers_certificates_and_copies_only() {
    let manager = world().account("kruise-manager", Bound::Nothing).await;
    let named =
        |kind: &str, name: &str| json!({ "apiVersion": "v1", "kind": kind, "metadata": { "name": name } });
    let maps = typed(&manager, "v1", "ConfigMap", Some("kube-system"));
    let other = || would_create(&maps, named("ConfigMap", "coredns"));
    heeded(
        other,
        "may write no ConfigMap but those whose names end with -barrier",
    )
    .await;
    let of_nobody = would_create(&maps, named("ConfigMap", "web-barrier")).await;
    refused(of_nobody, "that of the Pod that owns it, POD-barrier");
    let mut barrier = named("ConfigMap", "web-barrier");
    barrier["metadata"]["ownerReferences"] =
        json!([{ "apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "u" }]);
    would_create(&maps, barrier).await.unwrap();
    let admins = typed(&world().admin().await, "v1", "ConfigMap", Some("kube-system"));
    create(&admins, named("ConfigMap", "x-barrier")).await.unwrap();
    let words = "kruise-manager may change no ConfigMap but that of the Pod that owns it, POD-barrier";
    refused(delete(&maps, "x-barrier").await, words);
    let taken = json!([{ "apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "u" }]);
    let taken = json!({ "metadata": { "ownerReferences": taken } });
    refused(merge(&maps, "x-barrier", taken).await, words);
    delete(&admins, "x-barrier").await.unwrap();
    let own = typed(&manager, "v1", "Secret", Some("kruise-system"));
    let other = || would_create(&own, named("Secret", "other"));
    heeded(other, "may write no Secret but").await;
    let copies = typed(&manager, "v1", "Secret", Some("kruise-daemon-config"));
    would_create(&copies, named("Secret", "copy")).await.unwrap();
}

#[tokio::test]
async fn pod_templates_are_created_in_dry_runs_only() {
    let template = json!({ "apiVersion": "v1", "kind": "PodTemplate", "metadata": { "generateName": "dry-" },
        "template": { "spec": { "containers": [{ "name": "app", "image": "i" }] } } });
    for account in ["kruise-manager", "kruise-webhook"] {
        let cluster = world().account(account, Bound::Nothing).await;
        let templates = typed(&cluster, "v1", "PodTemplate", Some("default"));
        let stored = || create(&templates, template.clone());
        heeded(stored, "may create PodTemplates in dry runs only").await;
        would_create(&templates, template.clone()).await.unwrap();
    }
}
