//! Objects that only claim to belong to a CloneSet: in another namespace, or with an owner that the API server does not
//! resolve; and revisions without a Pod template.

use kube::api::{Api, DynamicObject};
use serde_json::{Value, json};

use crate::fixture::{Fixture, identities};
use crate::pods::{name, revision, uid};
use crate::test_cluster::shared_cluster;

/// An owner reference to the CloneSet with this API version.
fn owner_reference(set: &Value, version: &str) -> Value {
    json!({ "apiVersion": format!("apps.kruise.io/{version}"), "kind": "CloneSet", "name": name(set), "uid": uid(set),
        "controller": true })
}

fn jobs(fixture: &Fixture) -> Api<DynamicObject> {
    fixture.api("apps.kruise.io", "v1beta1", "ImagePullJob")
}

fn revisions(fixture: &Fixture) -> Api<DynamicObject> {
    fixture.api("apps", "v1", "ControllerRevision")
}

/// A copy of this Pod with the highest deletion cost.
fn pod_like(pod: &Value, name: &str, owner: &Value) -> Value {
    json!({
        "metadata": {
            "name": name, "labels": pod["metadata"]["labels"], "ownerReferences": [owner],
            "annotations": { "controller.kubernetes.io/pod-deletion-cost": "2147483647" },
        },
        "spec": { "containers": [{ "name": "app", "image": "example.com/app:1" }], "terminationGracePeriodSeconds": 0 },
    })
}

fn image(pod: &Value) -> &str {
    pod["spec"]["containers"][0]["image"].as_str().unwrap()
}

#[tokio::test]
async fn objects_of_another_namespace_are_not_owned() {
    let fixture = Fixture::new(shared_cluster(), "owned").await;
    let other_fixture = Fixture::new(shared_cluster(), "owned-evil").await;
    let set = json!(fixture.create_cloneset("web", json!({})).await);
    fixture.wait_settled("web").await;
    let before = fixture.pods_of("web").await;

    let job = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "metadata": { "name": "pre" }, "spec": { "image": "example.com/app:1", "parallelism": 0,
        "selector": { "names": [] }, "completionPolicy": { "type": "Always" } } });
    fixture.create(&jobs(&fixture), job.clone()).await;
    for (index, version) in ["v9", "v1beta1", "v1alpha1"].into_iter().enumerate() {
        let owner = owner_reference(&set, version);
        // The first has the name of one of our objects.
        let name = if index == 0 {
            name(&before[0])
        } else {
            format!("web-{version}")
        };
        other_fixture
            .create(&other_fixture.pods(), pod_like(&before[0], &name, &owner))
            .await;
        // This version is not served, so the object cannot replace ours and is added next to it.
        if version == "v9" {
            let forged = pod_like(&before[0], "forged", &owner);
            fixture.create(&fixture.pods(), forged).await;
        }
    }
    let mut forged = job;
    forged["metadata"]["ownerReferences"] = json!([owner_reference(&set, "v9")]);
    other_fixture.create(&jobs(&other_fixture), forged).await;
    let stored = revisions(&fixture).get(&revision(&before[0])).await.unwrap();
    let mut other = json!({ "metadata": { "name": stored.metadata.name, "labels": stored.metadata.labels,
        "ownerReferences": [owner_reference(&set, "v9")] }, "revision": 0, "data": stored.data["data"] });
    other["data"]["spec"]["template"]["spec"]["containers"][0]["image"] = json!("example.com/evil:1");
    other_fixture.create(&revisions(&other_fixture), other).await;
    other_fixture
        .wait_pods("web", "running", |pods| {
            pods.len() == 3 && pods.iter().all(|pod| pod["status"]["phase"] == "Running")
        })
        .await;

    // Whatever it has observed by now, it creates one more Pod, of its own revision.
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 4 } }))
        .await;
    let settled = fixture.wait_settled("web").await;
    assert_eq!(settled.status.unwrap().replicas, 4);
    let mut after = fixture.pods_of("web").await;
    after.retain(|pod| name(pod) != "forged");
    assert_eq!(after.len(), 4);
    assert!(after.iter().all(|pod| image(pod) == "example.com/app:1"));
    let (before, after) = (identities(&before), identities(&after));
    assert!(
        before.iter().all(|pod| after.contains(pod)),
        "{before:?} {after:?}"
    );
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 1 } }))
        .await;
    let one_left = |pods: &[&Value]| pods.iter().filter(|pod| name(pod) != "forged").count() == 1;
    fixture.wait_pods("web", "one of its own", one_left).await;
    fixture.wait_settled("web").await;
    assert_eq!(other_fixture.pods_of("web").await.len(), 3);
    let mut writes = other_fixture.accepted_writes();
    // The forged jobs are valid jobs, and get their status and events.
    writes.retain(|(_, resource, _)| resource != "imagepulljobs/status" && resource != "events");
    assert_eq!(writes, []);
    jobs(&fixture).get("pre").await.expect("the orphaned job is kept");
}

#[tokio::test]
async fn invalid_revision_does_not_stop_other_clonesets() {
    let fixture = Fixture::new(shared_cluster(), "odd-revision").await;
    let rolling = json!({ "partition": "100%" });
    let set = json!(
        fixture
            .create_cloneset("web", json!({ "updateStrategy": { "rollingUpdate": rolling } }))
            .await
    );
    fixture.wait_settled("web").await;
    let pods = fixture.pods_of("web").await;
    let old = revision(&pods[0]);
    fixture.set_image("web", "example.com/app:2").await;
    let has_new_revision =
        |set: &kruise_api::cloneset::CloneSet| set.status.as_ref().is_some_and(|s| s.update_revision != old);
    fixture
        .wait_status("web", "another revision", has_new_revision)
        .await;

    let stored = revisions(&fixture).get(&old).await.unwrap();
    revisions(&fixture)
        .delete(&old, &Default::default())
        .await
        .unwrap();
    let invalid_revision = json!({ "metadata": { "name": old, "labels": stored.metadata.labels,
        "ownerReferences": [owner_reference(&set, "v1beta1")] }, "revision": 1, "data": { "spec": { "template": { "spec": "x" } } } });
    fixture.create(&revisions(&fixture), invalid_revision).await;
    let event = fixture.wait_event("InvalidRevision", "web").await;
    let message = event["message"].as_str().unwrap();
    assert!(
        message.contains(&old) && message.contains("does not hold a Pod template"),
        "{message}"
    );
    fixture
        .pods()
        .delete(&name(&pods[0]), &Default::default())
        .await
        .unwrap();
    let deleted_uid = uid(&pods[0]);
    let replaced = |pods: &[&Value]| pods.len() == 3 && pods.iter().all(|pod| uid(pod) != deleted_uid);
    let after = fixture.wait_pods("web", "three again", replaced).await;
    let new = after.iter().filter(|pod| image(pod) == "example.com/app:2");
    assert_eq!(new.count(), 1, "it is created from the existing revision");

    fixture.create_cloneset("db", json!({})).await;
    fixture.wait_settled("db").await;
}

const INSTANCE_ID: &str = "apps.kruise.io/cloneset-instance-id";

/// Claims with the right name that another object owns, or that have another Pod's instance ID, are not changed.
#[tokio::test]
async fn claims_of_other_owners_are_not_adopted_with_a_pod() {
    let fixture = Fixture::new(shared_cluster(), "adopted-claims").await;
    let claims = fixture.api("", "v1", "PersistentVolumeClaim");
    let size = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Mi" } } });
    let backup =
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": "backup", "uid": "b", "controller": true });
    let other_owner = owner_reference(
        &json!({ "metadata": { "name": "web", "uid": "another" } }),
        "v1beta1",
    );
    let cases = [
        ("aaaaa", "aaaaa", json!([])),
        ("bbbbb", "bbbbb", json!([backup])),
        ("ccccc", "ccccc", json!([other_owner])),
        ("ddddd", "aaaaa", json!([])),
    ];
    for (pod, id, owners) in &cases {
        let metadata = json!({ "name": format!("data-web-{pod}"), "labels": { INSTANCE_ID: id }, "ownerReferences": owners });
        fixture
            .create(&claims, json!({ "metadata": metadata, "spec": size }))
            .await;
        let metadata = json!({ "name": format!("web-{pod}"), "labels": { "app": "web", INSTANCE_ID: pod } });
        let container = json!({ "name": "app", "image": "example.com/app:1" });
        let orphan = json!({ "metadata": metadata,
            "spec": { "containers": [container], "terminationGracePeriodSeconds": 0 } });
        fixture.create(&fixture.pods(), orphan).await;
    }
    let templates = json!([{ "metadata": { "name": "data" }, "spec": size }]);
    let rolling = json!({ "rollingUpdate": { "paused": true } });
    let spec = json!({ "replicas": 4, "volumeClaimTemplates": templates, "updateStrategy": rolling });
    let set = json!(fixture.create_cloneset("web", spec).await);
    let adopted = |pods: &[&Value]| {
        let owned = |pod: &&&Value| pod["metadata"]["ownerReferences"][0]["uid"] == uid(&set);
        pods.len() == 4 && pods.iter().filter(owned).count() == 4
    };
    fixture.wait_pods("web", "all adopted", adopted).await;
    for (pod, _, owners) in &cases {
        let claim = json!(claims.get(&format!("data-web-{pod}")).await.unwrap());
        let owner_references: Vec<&Value> = claim["metadata"]["ownerReferences"]
            .as_array()
            .into_iter()
            .flatten()
            .collect();
        let uids: Vec<&Value> = owner_references.into_iter().map(|owner| &owner["uid"]).collect();
        let expected = if *pod == "aaaaa" {
            json!([uid(&set)])
        } else {
            json!(
                owners
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|owner| &owner["uid"])
                    .collect::<Vec<_>>()
            )
        };
        assert_eq!(json!(uids), expected, "{claim}");
    }
}
