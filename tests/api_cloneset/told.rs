//! Each thing that is done to Pods is an event, and so is what is in the way of it.

use kruise_api::cloneset::CloneSet;
use kruise_api::keys::IMAGE_PRE_DOWNLOAD_CREATED;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::field::Field;
use crate::locked::{LOCK, lift, lock, policy};
use crate::pods::{name, state};
use crate::world::world;

const HOLD: &str = "example.com/hold";

/// What an event says: its type and its message.
async fn told(field: &Field, reason: &str) -> (String, String) {
    let event = field.event(reason, "web").await;
    let text = |field: &str| event[field].as_str().unwrap().to_owned();
    (text("type"), text("message"))
}

/// The Pods of `web` that are in this state, once there are so many of them.
async fn in_state(field: &Field, wanted: &str, count: usize) -> Vec<String> {
    let of = |pods: &[&Value]| pods.iter().filter(|pod| state(pod) == wanted).count();
    let pods = field.until_pods("web", wanted, |pods| of(pods) == count).await;
    pods.iter().filter(|pod| state(pod) == wanted).map(name).collect()
}

async fn label(field: &Field, pod: &str, labels: Value) {
    let patch = Patch::Merge(json!({ "metadata": { "labels": labels } }));
    let params = PatchParams::default();
    field.pods().patch(pod, &params, &patch).await.unwrap();
}

#[tokio::test]
async fn what_is_done_to_pods_is_told() {
    let field = Field::new(world(), "all-told").await;
    let hook = json!({ "labelsHandler": { HOLD: "yes" } });
    let template = json!({ "metadata": { "labels": { HOLD: "yes" } } });
    let one_by_one =
        json!({ "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 } });
    let spec = json!({ "lifecycle": { "preDelete": hook, "inPlaceUpdate": hook }, "template": template,
        "updateStrategy": one_by_one });
    field.set("web", spec).await;
    field.settled("web").await;
    let held = |words: &'static str| ("Normal".to_owned(), words);
    let says = async |reason: &str, (type_, words): (String, &str), pod: &str| {
        let (told_type, message) = told(&field, reason).await;
        assert_eq!(told_type, type_, "{reason}");
        assert!(
            message.contains(words) && message.contains(pod),
            "{reason}: {message}"
        );
        world().logged(&message, "all-told/web").await;
    };

    field.edit("web", json!({ "spec": { "replicas": 2 } })).await;
    let going = in_state(&field, "PreparingDelete", 1).await.remove(0);
    says("PreparingDelete", held("preDelete"), &going).await;
    field.edit("web", json!({ "spec": { "replicas": 3 } })).await;
    in_state(&field, "Normal", 3).await;
    says("DeletionCancelled", held("cancelled the deletion of pod"), &going).await;

    let first = name(&field.pods_of("web").await[0]);
    label(&field, &first, json!({ "app": "apart" })).await;
    says("SuccessfulRelease", held("released pod"), &first).await;
    in_state(&field, "Normal", 3).await;

    field.image("web", "example.com/app:2").await;
    let prepared = in_state(&field, "PreparingUpdate", 1).await.remove(0);
    says("PreparingUpdate", held("inPlaceUpdate"), &prepared).await;
    label(&field, &prepared, json!({ HOLD: "no" })).await;
    says(
        "SuccessfulUpdatePodInPlace",
        held("successfully update pod"),
        &prepared,
    )
    .await;
}

/// What is done to Pods and revisions is in the log, without debug.
#[tokio::test]
async fn what_is_done_is_logged() {
    let field = Field::new(world(), "all-logged").await;
    let logged = async |words: &str| world().logged(words, "set=all-logged/web").await;
    let revision = async |words: &str, name: &str| {
        let object = format!("set=all-logged/web revision=\"{name}\"");
        assert_eq!(world().logged(words, &object).await, 1, "{words} {name}");
    };
    let update = |set: &CloneSet| set.status.as_ref().unwrap().update_revision.clone();
    let in_place = json!({ "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible" } });
    let spec = json!({ "replicas": 2, "revisionHistoryLimit": 1, "updateStrategy": in_place });
    field.set("web", spec).await;
    let first = update(&field.settled("web").await);
    revision("created a revision", &first).await;
    let pods: Vec<_> = field.pods_of("web").await.iter().map(name).collect();
    for pod in &pods {
        assert_eq!(logged(&format!("succeed to create pod {pod} ")).await, 1);
    }

    field.image("web", "example.com/app:2").await;
    let second = update(&field.settled("web").await);
    revision("created a revision", &second).await;
    for pod in &pods {
        let words = format!("successfully update pod {pod} in-place(revision {second})");
        assert_eq!(logged(&words).await, 1);
    }

    field.edit("web", json!({ "spec": { "replicas": 1 } })).await;
    field.settled("web").await;
    let kept = name(&field.pods_of("web").await[0]);
    for pod in pods.iter().filter(|pod| **pod != kept) {
        assert_eq!(logged(&format!("succeed to delete pod {pod} ")).await, 1);
    }

    field.image("web", "example.com/app:1").await;
    assert_eq!(update(&field.settled("web").await), first);
    revision("made an old revision the newest", &first).await;
    field.image("web", "example.com/app:3").await;
    field.settled("web").await;
    revision("deleted an old revision", &second).await;
}

#[tokio::test]
async fn what_is_in_the_way_is_told_with_the_api_servers_words() {
    let field = Field::new(world(), "all-refused").await;
    let hook = json!({ "labelsHandler": { HOLD: "yes" } });
    let template = json!({ "metadata": { "labels": { HOLD: "yes" } } });
    let spec = json!({ "replicas": 1, "lifecycle": { "preDelete": hook }, "template": template });
    let stray = json!({ "metadata": { "name": "stray", "labels": { "app": "web" } },
        "spec": { "terminationGracePeriodSeconds": 0, "containers": [{ "name": "app", "image": "example.com/app:1" }] } });
    field.create(&field.pods(), stray).await;
    lock(&field, "stray").await;
    let refused = async |reason: &str| {
        let (type_, message) = told(&field, reason).await;
        assert_eq!(type_, "Warning");
        assert!(message.contains("this Pod is locked"), "{reason}: {message}");
    };
    field.set("web", spec).await;
    refused("FailedScale").await;
    field.pods().delete("stray", &Default::default()).await.unwrap();
    field.settled("web").await;
    let one = name(&field.pods_of("web").await[0]);
    label(&field, &one, json!({ LOCK: "yes" })).await;
    field.image("web", "example.com/app:2").await;
    refused("FailedUpdatePodInPlace").await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate" });
    field
        .edit(
            "web",
            json!({ "spec": { "updateStrategy": { "rollingUpdate": rolling } } }),
        )
        .await;
    refused("FailedUpdatePodReCreate").await;
    field.edit("web", json!({ "spec": { "replicas": 0 } })).await;
    refused("FailedDelete").await;
    field
        .edit("web", json!({ "spec": { "replicas": 1, "lifecycle": null } }))
        .await;
    lift(&field).await;
    field.settled("web").await;
    assert_eq!(told(&field, "SuccessfulUpdatePodReCreate").await.0, "Normal");
}

/// Revisions are labelled once their jobs are there; one that may not be has them all the same, and is left alone until the
/// spec changes.
#[tokio::test]
async fn what_is_in_the_way_of_pulling_ahead_is_told() {
    let field = Field::new(world(), "ahead-refused").await;
    let rolling = json!({ "rollingUpdate": { "maxUnavailable": 1, "partition": 3 } });
    field
        .set("web", json!({ "replicas": 4, "updateStrategy": rolling }))
        .await;
    field.settled("web").await;
    let revisions = field.api("apps", "v1", "ControllerRevision");
    let first = name(&json!(
        revisions.list(&Default::default()).await.unwrap().items[0]
    ));
    let locked = (
        "object.metadata.labels == oldObject.metadata.labels",
        "its labels are locked",
    );
    policy(&field, "controllerrevisions", locked).await;
    let (probe, label) = (
        PatchParams::default().dry_run(),
        json!({ "metadata": { "labels": { HOLD: "yes" } } }),
    );
    let (probe, label) = (&probe, &Patch::Merge(label));
    let locked = async |wanted: bool| {
        let answer = revisions.patch(&first, probe, label).await;
        (answer.is_err() == wanted).then_some(())
    };
    field.until("the policy is in effect", || locked(true)).await;
    field.image("web", "example.com/app:2").await;
    let (type_, message) = told(&field, "FailedPreDownload").await;
    assert_eq!(type_, "Warning");
    assert!(message.contains("its labels are locked"), "{message}");
    lift(&field).await;
    field
        .until("the policy is in effect no more", || locked(false))
        .await;
    field.edit("web", json!({ "spec": { "replicas": 5 } })).await;
    let labelled = async || {
        let all = revisions.list(&Default::default()).await.unwrap().items;
        let labels = all
            .iter()
            .filter_map(|revision| revision.metadata.labels.as_ref());
        labels
            .flatten()
            .any(|(key, _)| key == IMAGE_PRE_DOWNLOAD_CREATED)
            .then_some(())
    };
    field.until("the revision is labelled", labelled).await;
    let made = field
        .writes()
        .into_iter()
        .filter(|(verb, resource, _)| verb == "create" && resource == "imagepulljobs");
    assert_eq!(made.count(), 1);
}

#[tokio::test]
async fn a_wait_that_lasts_is_told() {
    let field = Field::new(world(), "lasting").await;
    field.set("web", json!({})).await;
    field.settled("web").await;
    let paused = json!({ "updateStrategy": { "rollingUpdate": { "paused": true } } });
    field.image_and("web", "example.com/app:2", paused).await;
    let words = ("Normal".to_owned(), "the update is paused".to_owned());
    assert_eq!(told(&field, "Paused").await, words);
}
