//! Objects that claim to be a CloneSet's and are not: of another namespace, or with an owner that the API server does not
//! resolve; and revisions that hold no Pod template.

use kube::api::{Api, DynamicObject};
use serde_json::{Value, json};

use crate::field::{Field, identities};
use crate::pods::{name, revision, uid};
use crate::world::world;

/// A reference to the CloneSet, as if it were in that version of the API.
fn owner(set: &Value, version: &str) -> Value {
    json!({ "apiVersion": format!("apps.kruise.io/{version}"), "kind": "CloneSet", "name": name(set), "uid": uid(set),
        "controller": true })
}

fn jobs(field: &Field) -> Api<DynamicObject> {
    field.api("apps.kruise.io", "v1beta1", "ImagePullJob")
}

fn revisions(field: &Field) -> Api<DynamicObject> {
    field.api("apps", "v1", "ControllerRevision")
}

/// A Pod like this one, which costs more to delete than any other.
fn alike(pod: &Value, name: &str, owner: &Value) -> Value {
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
async fn pods_revisions_and_jobs_of_another_namespace_are_not_a_cloneset_s() {
    let field = Field::new(world(), "owned").await;
    let evil = Field::new(world(), "owned-evil").await;
    let set = json!(field.set("web", json!({})).await);
    field.settled("web").await;
    let before = field.pods_of("web").await;

    let job = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "metadata": { "name": "pre" }, "spec": { "image": "example.com/app:1", "parallelism": 0,
        "selector": { "names": [] }, "completionPolicy": { "type": "Always" } } });
    field.create(&jobs(&field), job.clone()).await;
    for (at, version) in ["v9", "v1beta1", "v1alpha1"].into_iter().enumerate() {
        let owner = owner(&set, version);
        // The first has the name of one of ours.
        let name = if at == 0 {
            name(&before[0])
        } else {
            format!("web-{version}")
        };
        evil.create(&evil.pods(), alike(&before[0], &name, &owner)).await;
        // So it is beside ours with a version that nobody serves.
        if version == "v9" {
            let forged = alike(&before[0], "forged", &owner);
            field.create(&field.pods(), forged).await;
        }
    }
    let mut forged = job;
    forged["metadata"]["ownerReferences"] = json!([owner(&set, "v9")]);
    evil.create(&jobs(&evil), forged).await;
    let stored = revisions(&field).get(&revision(&before[0])).await.unwrap();
    let mut other = json!({ "metadata": { "name": stored.metadata.name, "labels": stored.metadata.labels,
        "ownerReferences": [owner(&set, "v9")] }, "revision": 0, "data": stored.data["data"] });
    other["data"]["spec"]["template"]["spec"]["containers"][0]["image"] = json!("example.com/evil:1");
    evil.create(&revisions(&evil), other).await;
    evil.until_pods("web", "running", |pods| {
        pods.len() == 3 && pods.iter().all(|pod| pod["status"]["phase"] == "Running")
    })
    .await;

    // Whatever it has heard of by now, it makes one more Pod, and of its own revision.
    field.edit("web", json!({ "spec": { "replicas": 4 } })).await;
    let settled = field.settled("web").await;
    assert_eq!(settled.status.unwrap().replicas, 4);
    let mut after = field.pods_of("web").await;
    after.retain(|pod| name(pod) != "forged");
    assert_eq!(after.len(), 4);
    assert!(after.iter().all(|pod| image(pod) == "example.com/app:1"));
    let (before, after) = (identities(&before), identities(&after));
    assert!(
        before.iter().all(|pod| after.contains(pod)),
        "{before:?} {after:?}"
    );
    field.edit("web", json!({ "spec": { "replicas": 1 } })).await;
    let one = |pods: &[&Value]| pods.iter().filter(|pod| name(pod) != "forged").count() == 1;
    field.until_pods("web", "one of its own", one).await;
    field.settled("web").await;
    assert_eq!(evil.pods_of("web").await.len(), 3);
    let mut writes = evil.writes();
    // The forged jobs are jobs all the same, and get their status and events.
    writes.retain(|(_, resource, _)| resource != "imagepulljobs/status" && resource != "events");
    assert_eq!(writes, []);
    jobs(&field).get("pre").await.expect("nobody's job is deleted");
}

#[tokio::test]
async fn a_revision_that_holds_no_pod_template_stops_no_other_cloneset() {
    let field = Field::new(world(), "odd-revision").await;
    let rolling = json!({ "partition": "100%" });
    let set = json!(
        field
            .set("web", json!({ "updateStrategy": { "rollingUpdate": rolling } }))
            .await
    );
    field.settled("web").await;
    let pods = field.pods_of("web").await;
    let old = revision(&pods[0]);
    field.image("web", "example.com/app:2").await;
    let another =
        |set: &kruise_api::cloneset::CloneSet| set.status.as_ref().is_some_and(|s| s.update_revision != old);
    field.status("web", "another revision", another).await;

    let stored = revisions(&field).get(&old).await.unwrap();
    revisions(&field).delete(&old, &Default::default()).await.unwrap();
    let odd = json!({ "metadata": { "name": old, "labels": stored.metadata.labels,
        "ownerReferences": [owner(&set, "v1beta1")] }, "revision": 1, "data": { "spec": { "template": { "spec": "x" } } } });
    field.create(&revisions(&field), odd).await;
    let told = field.event("InvalidRevision", "web").await;
    let note = told["message"].as_str().unwrap();
    assert!(
        note.contains(&old) && note.contains("does not hold a Pod template"),
        "{note}"
    );
    field
        .pods()
        .delete(&name(&pods[0]), &Default::default())
        .await
        .unwrap();
    let gone = uid(&pods[0]);
    let replaced = |pods: &[&Value]| pods.len() == 3 && pods.iter().all(|pod| uid(pod) != gone);
    let after = field.until_pods("web", "three again", replaced).await;
    let new = after.iter().filter(|pod| image(pod) == "example.com/app:2");
    assert_eq!(new.count(), 1, "it is made of the revision that there is");

    field.set("db", json!({})).await;
    field.settled("db").await;
}

const ID: &str = "apps.kruise.io/cloneset-instance-id";

/// Of claims with the right name, those that another owns, or that have the id of another Pod, stay as they are.
#[tokio::test]
async fn claims_of_others_are_not_adopted_with_the_pod_whose_name_they_have() {
    let field = Field::new(world(), "adopted-claims").await;
    let claims = field.api("", "v1", "PersistentVolumeClaim");
    let size = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Mi" } } });
    let backup =
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": "backup", "uid": "b", "controller": true });
    let of_another = owner(
        &json!({ "metadata": { "name": "web", "uid": "another" } }),
        "v1beta1",
    );
    let cases = [
        ("aaaaa", "aaaaa", json!([])),
        ("bbbbb", "bbbbb", json!([backup])),
        ("ccccc", "ccccc", json!([of_another])),
        ("ddddd", "aaaaa", json!([])),
    ];
    for (pod, id, owners) in &cases {
        let metadata =
            json!({ "name": format!("data-web-{pod}"), "labels": { ID: id }, "ownerReferences": owners });
        field
            .create(&claims, json!({ "metadata": metadata, "spec": size }))
            .await;
        let metadata = json!({ "name": format!("web-{pod}"), "labels": { "app": "web", ID: pod } });
        let container = json!({ "name": "app", "image": "example.com/app:1" });
        let orphan = json!({ "metadata": metadata,
            "spec": { "containers": [container], "terminationGracePeriodSeconds": 0 } });
        field.create(&field.pods(), orphan).await;
    }
    let templates = json!([{ "metadata": { "name": "data" }, "spec": size }]);
    let rolling = json!({ "rollingUpdate": { "paused": true } });
    let spec = json!({ "replicas": 4, "volumeClaimTemplates": templates, "updateStrategy": rolling });
    let set = json!(field.set("web", spec).await);
    let adopted = |pods: &[&Value]| {
        let ours = |pod: &&&Value| pod["metadata"]["ownerReferences"][0]["uid"] == uid(&set);
        pods.len() == 4 && pods.iter().filter(ours).count() == 4
    };
    field.until_pods("web", "all adopted", adopted).await;
    for (pod, _, owners) in &cases {
        let claim = json!(claims.get(&format!("data-web-{pod}")).await.unwrap());
        let has: Vec<&Value> = claim["metadata"]["ownerReferences"]
            .as_array()
            .into_iter()
            .flatten()
            .collect();
        let uids: Vec<&Value> = has.into_iter().map(|owner| &owner["uid"]).collect();
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
