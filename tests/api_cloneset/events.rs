//! Every change of Pods is reported by an event, and so is every obstacle.

use kruise_api::cloneset::CloneSet;
use kruise_api::keys::IMAGE_PRE_DOWNLOAD_CREATED;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::denied_updates::{LOCK_LABEL, allow_updates, deny_updates, lock_pod};
use crate::fixture::Fixture;
use crate::pods::{lifecycle_state, name};
use crate::test_cluster::shared_cluster;

const HOLD_LABEL: &str = "example.com/hold";

/// Type and message of an event.
async fn event_text(fixture: &Fixture, reason: &str) -> (String, String) {
    let event = fixture.wait_event(reason, "web").await;
    let text = |fixture: &str| event[fixture].as_str().unwrap().to_owned();
    (text("type"), text("message"))
}

/// The Pods of `web` in this state, once there are `count` of them.
async fn wait_for_state(fixture: &Fixture, expected: &str, count: usize) -> Vec<String> {
    let count_in_state = |pods: &[&Value]| pods.iter().filter(|pod| lifecycle_state(pod) == expected).count();
    let pods = fixture
        .wait_pods("web", expected, |pods| count_in_state(pods) == count)
        .await;
    pods.iter()
        .filter(|pod| lifecycle_state(pod) == expected)
        .map(name)
        .collect()
}

async fn set_labels(fixture: &Fixture, pod: &str, labels: Value) {
    let patch = Patch::Merge(json!({ "metadata": { "labels": labels } }));
    let params = PatchParams::default();
    fixture.pods().patch(pod, &params, &patch).await.unwrap();
}

#[tokio::test]
async fn pod_actions_create_events() {
    let fixture = Fixture::new(shared_cluster(), "all-told").await;
    let hook = json!({ "labelsHandler": { HOLD_LABEL: "yes" } });
    let template = json!({ "metadata": { "labels": { HOLD_LABEL: "yes" } } });
    let one_by_one =
        json!({ "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 } });
    let spec = json!({ "lifecycle": { "preDelete": hook, "inPlaceUpdate": hook }, "template": template,
        "updateStrategy": one_by_one });
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    let normal = |text: &'static str| ("Normal".to_owned(), text);
    let expect_event = async |reason: &str, (type_, text): (String, &str), pod: &str| {
        let (event_type, message) = event_text(&fixture, reason).await;
        assert_eq!(event_type, type_, "{reason}");
        assert!(
            message.contains(text) && message.contains(pod),
            "{reason}: {message}"
        );
        shared_cluster().wait_for_log(&message, "all-told/web").await;
    };

    fixture
        .patch_set("web", json!({ "spec": { "replicas": 2 } }))
        .await;
    let preparing_delete = wait_for_state(&fixture, "PreparingDelete", 1).await.remove(0);
    expect_event("PreparingDelete", normal("preDelete"), &preparing_delete).await;
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 3 } }))
        .await;
    wait_for_state(&fixture, "Normal", 3).await;
    expect_event(
        "DeletionCancelled",
        normal("cancelled the deletion of pod"),
        &preparing_delete,
    )
    .await;

    let first = name(&fixture.pods_of("web").await[0]);
    set_labels(&fixture, &first, json!({ "app": "apart" })).await;
    expect_event("SuccessfulRelease", normal("released pod"), &first).await;
    wait_for_state(&fixture, "Normal", 3).await;

    fixture.set_image("web", "example.com/app:2").await;
    let prepared = wait_for_state(&fixture, "PreparingUpdate", 1).await.remove(0);
    expect_event("PreparingUpdate", normal("inPlaceUpdate"), &prepared).await;
    set_labels(&fixture, &prepared, json!({ HOLD_LABEL: "no" })).await;
    expect_event(
        "SuccessfulUpdatePodInPlace",
        normal("successfully update pod"),
        &prepared,
    )
    .await;
}

/// Changes of Pods and revisions are logged at level INFO.
#[tokio::test]
async fn pod_and_revision_actions_are_logged() {
    let fixture = Fixture::new(shared_cluster(), "all-logged").await;
    let logged = async |text: &str| shared_cluster().wait_for_log(text, "set=all-logged/web").await;
    let revision = async |text: &str, name: &str| {
        let object = format!("set=all-logged/web revision=\"{name}\"");
        assert_eq!(
            shared_cluster().wait_for_log(text, &object).await,
            1,
            "{text} {name}"
        );
    };
    let update = |set: &CloneSet| set.status.as_ref().unwrap().update_revision.clone();
    let in_place = json!({ "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible" } });
    let spec = json!({ "replicas": 2, "revisionHistoryLimit": 1, "updateStrategy": in_place });
    fixture.create_cloneset("web", spec).await;
    let first = update(&fixture.wait_settled("web").await);
    revision("created a revision", &first).await;
    let pods: Vec<_> = fixture.pods_of("web").await.iter().map(name).collect();
    for pod in &pods {
        assert_eq!(logged(&format!("succeed to create pod {pod} ")).await, 1);
    }

    fixture.set_image("web", "example.com/app:2").await;
    let second = update(&fixture.wait_settled("web").await);
    revision("created a revision", &second).await;
    for pod in &pods {
        let text = format!("successfully update pod {pod} in-place(revision {second})");
        assert_eq!(logged(&text).await, 1);
    }

    fixture
        .patch_set("web", json!({ "spec": { "replicas": 1 } }))
        .await;
    fixture.wait_settled("web").await;
    let kept = name(&fixture.pods_of("web").await[0]);
    for pod in pods.iter().filter(|pod| **pod != kept) {
        assert_eq!(logged(&format!("succeed to delete pod {pod} ")).await, 1);
    }

    fixture.set_image("web", "example.com/app:1").await;
    assert_eq!(update(&fixture.wait_settled("web").await), first);
    revision("made an old revision the newest", &first).await;
    fixture.set_image("web", "example.com/app:3").await;
    fixture.wait_settled("web").await;
    revision("deleted an old revision", &second).await;
}

#[tokio::test]
async fn denied_actions_create_events_with_api_server_message() {
    let fixture = Fixture::new(shared_cluster(), "all-refused").await;
    let hook = json!({ "labelsHandler": { HOLD_LABEL: "yes" } });
    let template = json!({ "metadata": { "labels": { HOLD_LABEL: "yes" } } });
    let spec = json!({ "replicas": 1, "lifecycle": { "preDelete": hook }, "template": template });
    let orphan = json!({ "metadata": { "name": "stray", "labels": { "app": "web" } },
        "spec": { "terminationGracePeriodSeconds": 0, "containers": [{ "name": "app", "image": "example.com/app:1" }] } });
    fixture.create(&fixture.pods(), orphan).await;
    lock_pod(&fixture, "stray").await;
    let expect_denied = async |reason: &str| {
        let (type_, message) = event_text(&fixture, reason).await;
        assert_eq!(type_, "Warning");
        assert!(message.contains("this Pod is locked"), "{reason}: {message}");
    };
    fixture.create_cloneset("web", spec).await;
    expect_denied("FailedScale").await;
    fixture.pods().delete("stray", &Default::default()).await.unwrap();
    fixture.wait_settled("web").await;
    let one = name(&fixture.pods_of("web").await[0]);
    set_labels(&fixture, &one, json!({ LOCK_LABEL: "yes" })).await;
    fixture.set_image("web", "example.com/app:2").await;
    expect_denied("FailedUpdatePodInPlace").await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate" });
    fixture
        .patch_set(
            "web",
            json!({ "spec": { "updateStrategy": { "rollingUpdate": rolling } } }),
        )
        .await;
    expect_denied("FailedUpdatePodReCreate").await;
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 0 } }))
        .await;
    expect_denied("FailedDelete").await;
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 1, "lifecycle": null } }))
        .await;
    allow_updates(&fixture).await;
    fixture.wait_settled("web").await;
    assert_eq!(
        event_text(&fixture, "SuccessfulUpdatePodReCreate").await.0,
        "Normal"
    );
}

/// A revision is labelled once its jobs exist. A denied revision keeps its jobs and is not retried until the spec
/// changes.
#[tokio::test]
async fn denied_pre_download_creates_event() {
    let fixture = Fixture::new(shared_cluster(), "ahead-refused").await;
    let rolling = json!({ "rollingUpdate": { "maxUnavailable": 1, "partition": 3 } });
    fixture
        .create_cloneset("web", json!({ "replicas": 4, "updateStrategy": rolling }))
        .await;
    fixture.wait_settled("web").await;
    let revisions = fixture.api("apps", "v1", "ControllerRevision");
    let first = name(&json!(
        revisions.list(&Default::default()).await.unwrap().items[0]
    ));
    let locked = (
        "object.metadata.labels == oldObject.metadata.labels",
        "its labels are locked",
    );
    deny_updates(&fixture, "controllerrevisions", locked).await;
    let (probe, label) = (
        PatchParams::default().dry_run(),
        json!({ "metadata": { "labels": { HOLD_LABEL: "yes" } } }),
    );
    let (probe, label) = (&probe, &Patch::Merge(label));
    let locked = async |expected: bool| {
        let answer = revisions.patch(&first, probe, label).await;
        (answer.is_err() == expected).then_some(())
    };
    fixture
        .poll_until("the policy is in effect", || locked(true))
        .await;
    fixture.set_image("web", "example.com/app:2").await;
    let (type_, message) = event_text(&fixture, "FailedPreDownload").await;
    assert_eq!(type_, "Warning");
    assert!(message.contains("its labels are locked"), "{message}");
    allow_updates(&fixture).await;
    fixture
        .poll_until("the policy is in effect no more", || locked(false))
        .await;
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 5 } }))
        .await;
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
    fixture.poll_until("the revision is labelled", labelled).await;
    let created = fixture
        .accepted_writes()
        .into_iter()
        .filter(|(verb, resource, _)| verb == "create" && resource == "imagepulljobs");
    assert_eq!(created.count(), 1);
}

#[tokio::test]
async fn paused_rollout_creates_event() {
    let fixture = Fixture::new(shared_cluster(), "lasting").await;
    fixture.create_cloneset("web", json!({})).await;
    fixture.wait_settled("web").await;
    let paused = json!({ "updateStrategy": { "rollingUpdate": { "paused": true } } });
    fixture
        .set_image_and_spec("web", "example.com/app:2", paused)
        .await;
    let text = ("Normal".to_owned(), "the update is paused".to_owned());
    assert_eq!(event_text(&fixture, "Paused").await, text);
}
