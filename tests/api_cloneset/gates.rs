//! Feature gates that are off when nobody says anything.

use kruise_api::cloneset::CloneSet;
use serde_json::{Value, json};

use crate::apart::without_webhooks;
use crate::field::{Field, identities};
use crate::manager::Manager;
use crate::pods::{label, revision, state, text, wanted_image};
use crate::world::{World, world};

const GATES: &str =
    "CloneSetShortHash=true,PreparingUpdateAsUpdate=true,RecreatePodWhenChangeVCTInCloneSetGate=true";

fn claims(storage: &str) -> Value {
    json!([{ "metadata": { "name": "data" }, "spec": { "accessModes": ["ReadWriteOnce"],
        "resources": { "requests": { "storage": storage } } } }])
}

/// All Pods say their revision by its short hash alone.
async fn hashes_are_short(field: &Field, set: &CloneSet) {
    let update = set.status.as_ref().unwrap().update_revision.clone();
    let short = update.strip_prefix("web-").unwrap();
    let pods = field.pods_of("web").await;
    for pod in &pods {
        assert_eq!([revision(pod), label(pod, "pod-template-hash")], [short, short]);
    }
    let revisions = field.api("apps", "v1", "ControllerRevision");
    let labels = revisions.get(&update).await.unwrap().metadata.labels.unwrap();
    assert_eq!(labels["controller.kubernetes.io/hash"], short);
}

/// How much storage each claim asks for that is a Pod's.
async fn storage(field: &Field) -> Vec<String> {
    let all = field.claims().await;
    let asked = |claim: &Value| text(&claim["spec"]["resources"]["requests"]["storage"]);
    all.iter().map(asked).collect()
}

/// Another image is given to the Pods as they are; with other claim templates, new Pods take their places.
async fn other_claims_ask_for_new_pods(field: &Field) {
    let mut spec = json!({ "volumeClaimTemplates": claims("1Gi") });
    spec["template"] = json!({ "metadata": { "labels": { "app": "web" } } });
    field.set("web", spec).await;
    let set = field.settled("web").await;
    hashes_are_short(field, &set).await;
    let before = identities(&field.pods_of("web").await);

    field.image("web", "example.com/app:2").await;
    let set = field.settled("web").await;
    hashes_are_short(field, &set).await;
    assert_eq!(identities(&field.pods_of("web").await), before, "in place");

    let set = field
        .edit(
            "web",
            json!({ "spec": { "volumeClaimTemplates": claims("2Gi") } }),
        )
        .await;
    field.settled("web").await;
    assert_eq!(identities(&field.pods_of("web").await), before, "claims alone");
    assert_eq!(storage(field).await, ["1Gi"; 3]);
    assert!(set.status.is_some());

    field.image("web", "example.com/app:3").await;
    let set = field.settled("web").await;
    hashes_are_short(field, &set).await;
    let after = identities(&field.pods_of("web").await);
    assert!(
        before.iter().all(|one| !after.contains(one)),
        "{before:?} {after:?}"
    );
    assert_eq!(storage(field).await, ["2Gi"; 3]);

    field.image("web", "example.com/app:4").await;
    field.settled("web").await;
    assert_eq!(
        identities(&field.pods_of("web").await),
        after,
        "the same claims again"
    );
}

/// What was known is asked for again, with the claims as nobody stores them.
async fn the_same_claims_are_known_however_they_are_written(field: &Field) {
    let after = identities(&field.pods_of("web").await);
    without_webhooks(field);
    let spelled = json!({ "volumeClaimTemplates": claims("2048Mi") });
    field.image_and("web", "example.com/app:3", spelled).await;
    field.settled("web").await;
    assert_eq!(
        identities(&field.pods_of("web").await),
        after,
        "the same claims, back in a revision that is there"
    );
}

/// A Pod that waits for its hook counts as updated, so that a new one makes up for it with the old revision.
async fn a_prepared_pod_makes_room_for_an_old_one(field: &Field) {
    let hook = json!({ "labelsHandler": { "example.com/hold": "yes" } });
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "partition": "90%", "maxUnavailable": 1 });
    let mut spec = json!({ "lifecycle": { "inPlaceUpdate": hook } });
    spec["updateStrategy"] = json!({ "rollingUpdate": rolling });
    spec["template"] = json!({ "metadata": { "labels": { "app": "held", "example.com/hold": "yes" } } });
    field.set("held", spec).await;
    field.settled("held").await;
    field.image("held", "example.com/app:2").await;
    let prepared = |pods: &[&Value]| pods.iter().filter(|p| state(p) == "PreparingUpdate").count() == 1;
    field.until_pods("held", "one is prepared", prepared).await;
    field.edit("held", json!({ "spec": { "replicas": 4 } })).await;
    let pods = field
        .until_pods("held", "four", |pods| pods.len() == 4 && prepared(pods))
        .await;
    let old = pods
        .iter()
        .filter(|pod| wanted_image(pod, 0) == "example.com/app:1");
    assert_eq!(old.count(), 4, "the prepared one is the one to be updated");
    let name = pods.iter().find(|p| state(p) == "PreparingUpdate").unwrap()["metadata"]["name"].clone();
    let free = kube::api::Patch::Merge(json!({ "metadata": { "labels": { "example.com/hold": null } } }));
    let params = kube::api::PatchParams::default();
    field
        .pods()
        .patch(name.as_str().unwrap(), &params, &free)
        .await
        .unwrap();
    let pods = field
        .until_pods("held", "updated", |pods| {
            pods.iter().any(|p| state(p) == "Updated")
        })
        .await;
    let new = pods
        .iter()
        .filter(|pod| wanted_image(pod, 0) == "example.com/app:2");
    assert_eq!((new.count(), pods.len()), (1, 4));
}

/// A Pod that is out of its Services for its deletion is not kept after all, and not one of those asked for, so another
/// one is made.
async fn a_pod_that_is_to_go_does_not_count(field: &Field, scale_strategy: Value) {
    let hook = json!({ "labelsHandler": { "example.com/hold": "yes" }, "markPodNotReady": true });
    let template = json!({ "metadata": { "labels": { "app": "going", "example.com/hold": "yes" } } });
    let spec = json!({ "replicas": 2, "lifecycle": { "preDelete": hook }, "template": template,
        "scaleStrategy": scale_strategy });
    field.set("going", spec).await;
    field.settled("going").await;
    let going = |pods: &[&Value]| pods.iter().filter(|p| state(p) == "PreparingDelete").count() == 1;
    field.edit("going", json!({ "spec": { "replicas": 1 } })).await;
    field.until_pods("going", "one is to go", going).await;
    field.edit("going", json!({ "spec": { "replicas": 2 } })).await;
    let another = |pods: &[&Value]| pods.len() == 3 && going(pods);
    field.until_pods("going", "another one", another).await;
}

#[tokio::test]
async fn a_cloneset_may_say_that_pods_that_are_to_go_do_not_count() {
    let field = Field::new(world(), "exclude").await;
    a_pod_that_is_to_go_does_not_count(&field, json!({ "excludePreparingDelete": true })).await;
}

#[tokio::test]
async fn gates_that_are_off_by_default_do_what_they_say() {
    let world: &'static World = Box::leak(Box::new(World::new()));
    let mut manager = Manager::somewhere_with(
        &world.plane,
        "kruise-manager",
        &[
            format!("--feature-gates={GATES}"),
            "--cloneset-scaling-exclude-preparing-delete".to_owned(),
        ],
    );
    manager.start().unwrap();
    let field = Field::new(world, "gates").await;
    tokio::join!(
        other_claims_ask_for_new_pods(&field),
        a_prepared_pod_makes_room_for_an_old_one(&field),
        a_pod_that_is_to_go_does_not_count(&field, json!({}))
    );
    the_same_claims_are_known_however_they_are_written(&field).await;
}
