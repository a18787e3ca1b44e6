//! Updates: how far, how fast, in place or not, and back.

use kruise_api::cloneset::CloneSet;
use serde_json::{Value, json};

use crate::field::{Field, identities};
use crate::kubelet::NO_IMAGE;
use crate::world::{until, world};

fn strategy(rolling: Value) -> Value {
    json!({ "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": rolling } })
}

fn image(pod: &Value) -> &str {
    pod["spec"]["containers"][0]["image"].as_str().unwrap()
}

fn ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions
        .into_iter()
        .any(|c| c["type"] == "Ready" && c["status"] == "True")
}

fn updated(set: &CloneSet, count: i32) -> bool {
    let status = set.status.as_ref().unwrap();
    status.updated_replicas == count
        && status.updated_available_replicas == Some(count)
        && status.available_replicas == set.spec.wanted()
}

/// `count` of the Pods have that image, and all are ready.
fn have(pods: &[Value], wanted: &str) -> usize {
    pods.iter().filter(|pod| image(pod) == wanted).count()
}

#[tokio::test]
async fn half_of_the_pods_are_updated_then_all_then_half_go_back() {
    let field = Field::new(world(), "partition").await;
    let rolling = |partition: &str| {
        strategy(
            json!({ "podUpdatePolicy": "InPlaceIfPossible", "partition": partition,
            "maxUnavailable": "50%" }),
        )
    };
    let mut spec = rolling("50%");
    spec["replicas"] = json!(4);
    field.set("web", spec).await;
    field.settled("web").await;
    let before = identities(&field.pods_of("web").await);
    field.image("web", "example.com/app:2").await;
    for (partition, new) in [("50%", 2), ("0%", 4), ("50%", 2)] {
        field.edit("web", json!({ "spec": rolling(partition) })).await;
        field
            .status("web", "as many updated as wanted", |s| updated(s, new))
            .await;
        let pods = field.pods_of("web").await;
        assert_eq!(
            have(&pods, "example.com/app:2"),
            new as usize,
            "partition {partition}"
        );
        assert_eq!(identities(&pods), before);
        if new == 4 {
            // Only while it differs from the current revision can the update be taken back.
            field.image("web", "example.com/app:1").await;
            field.settled("web").await;
            field.image("web", "example.com/app:2").await;
        }
    }
}

#[tokio::test]
async fn replaced_pods_are_never_too_few_nor_too_many() {
    let field = Field::new(world(), "surge").await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 0, "maxSurge": 1 });
    field.set("web", strategy(rolling)).await;
    field.settled("web").await;
    let before = identities(&field.pods_of("web").await);
    field.image("web", "example.com/app:2").await;
    let worst = field.until_pods("web", "replaced", |pods| {
        let active = || {
            pods.iter()
                .filter(|p| p["metadata"]["deletionTimestamp"].is_null())
        };
        let serving = active().filter(|p| ready(p)).count();
        assert!(active().count() <= 4, "more than replicas and surge");
        assert!(serving >= 3, "only {serving} are ready");
        pods.len() == 3 && pods.iter().all(|p| image(p) == "example.com/app:2" && ready(p))
    });
    let after = identities(&worst.await);
    assert!(
        before
            .iter()
            .all(|(_, uid)| after.iter().all(|(_, new)| new != uid))
    );
    field.settled("web").await;
}

#[tokio::test]
async fn an_image_that_cannot_be_pulled_stops_at_the_limit_and_is_taken_back() {
    let field = Field::new(world(), "rollback").await;
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 });
    field.set("web", strategy(rolling)).await;
    let first = field.settled("web").await;
    let before = field.pods_of("web").await;
    field.image("web", NO_IMAGE).await;
    let waits = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        status.updated_replicas == 1 && status.ready_replicas == 2
    };
    field.status("web", "one Pod waits for its image", waits).await;
    assert_eq!(have(&field.pods_of("web").await, NO_IMAGE), 1);
    field.image("web", "example.com/app:1").await;
    let back = field.settled("web").await;
    let after = field.pods_of("web").await;
    assert_eq!(identities(&before), identities(&after));
    let revision = |set: &CloneSet| set.status.clone().unwrap().update_revision;
    assert_eq!(
        revision(&first),
        revision(&back),
        "the old revision is used again"
    );
    let restarts = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_i64();
    assert_eq!(
        after.iter().filter_map(restarts).sum::<i64>(),
        1,
        "of one Pod alone"
    );
}

#[tokio::test]
async fn a_paused_update_waits_and_what_cannot_be_done_in_place_is_not() {
    let field = Field::new(world(), "paused").await;
    let rolling = |paused: bool| {
        strategy(json!({ "podUpdatePolicy": "InPlaceOnly", "maxUnavailable": "100%", "paused": paused }))
    };
    field.set("web", rolling(true)).await;
    field.settled("web").await;
    let before = identities(&field.pods_of("web").await);
    field.image("web", "example.com/app:2").await;
    field
        .status("web", "seen", |set| {
            let status = set.status.as_ref().unwrap();
            status.updated_replicas == 0 && status.update_revision != status.current_revision
        })
        .await;
    assert_eq!(have(&field.pods_of("web").await, "example.com/app:1"), 3);
    field.edit("web", json!({ "spec": rolling(false) })).await;
    field.settled("web").await;
    let pods = field.pods_of("web").await;
    assert_eq!(have(&pods, "example.com/app:2"), 3);
    assert_eq!(identities(&pods), before);
}

#[tokio::test]
async fn hooks_hold_pods_before_and_after_their_update() {
    let field = Field::new(world(), "hooks").await;
    let hook = json!({ "labelsHandler": { "example.com/serving": "yes" }, "markPodNotReady": true });
    let mut spec = json!({ "replicas": 1, "lifecycle": { "inPlaceUpdate": hook } });
    spec["template"] = json!({ "metadata": { "labels": { "example.com/serving": "yes" } } });
    field.set("web", spec).await;
    field.settled("web").await;
    let before = field.pods_of("web").await;
    let name = before[0]["metadata"]["name"].as_str().unwrap().to_owned();
    let state = |pod: &Value| pod["metadata"]["labels"]["lifecycle.apps.kruise.io/state"].clone();
    field.image("web", "example.com/app:2").await;
    let held = |pods: &[&Value]| pods.iter().all(|p| state(p) == "PreparingUpdate" && !ready(p));
    let pods = field
        .until_pods("web", "held by the hook, and not ready", held)
        .await;
    assert_eq!(image(&pods[0]), "example.com/app:1");

    label(&field, &name, json!(null)).await;
    let done = |pods: &[&Value]| pods.iter().all(|p| state(p) == "Updated" && ready(p));
    let pods = field
        .until_pods("web", "updated, and waiting for the hook", done)
        .await;
    assert_eq!(image(&pods[0]), "example.com/app:2");

    label(&field, &name, json!("yes")).await;
    let normal = |pods: &[&Value]| pods.iter().all(|p| state(p) == "Normal");
    let pods = field.until_pods("web", "in use again", normal).await;
    assert_eq!(identities(&before), identities(&pods));
}

async fn label(field: &Field, pod: &str, value: Value) {
    let patch = json!({ "metadata": { "labels": { "example.com/serving": value } } });
    let patch = kube::api::Patch::Merge(patch);
    field
        .pods()
        .patch(pod, &Default::default(), &patch)
        .await
        .unwrap();
}

#[tokio::test]
async fn what_a_rollout_does_is_told() {
    let field = Field::new(world(), "told").await;
    field.set("web", json!({ "progressDeadlineSeconds": 600 })).await;
    field.settled("web").await;
    field.image("web", NO_IMAGE).await;
    let progressing = |set: &CloneSet| {
        let conditions = &set.status.as_ref().unwrap().conditions;
        conditions.iter().find(|c| c.type_ == "Waiting").cloned()
    };
    let waits = |set: &CloneSet| progressing(set).is_some_and(|c| c.message.contains("container app: "));
    until(&field.sets(), "web", "says what it waits for", waits).await;
    for reason in ["SuccessfulCreate", "SuccessfulUpdatePodInPlace"] {
        field.event(reason, "web").await;
    }
}

/// A resize is a write of its own, which raises the Pod's generation before the image does.
#[tokio::test]
async fn what_is_recorded_is_of_the_generation_right_before_the_image() {
    let field = Field::new(world(), "generation").await;
    let container = |image: &str, cpu: &str| {
        let resources = json!({ "requests": { "cpu": cpu } });
        json!({ "template": { "spec": { "containers": [{ "name": "app", "image": image, "resources": resources }] } } })
    };
    field.set("web", container("example.com/app:1", "1")).await;
    field.settled("web").await;
    field.kubelet_goes();
    field
        .edit("web", json!({ "spec": container("example.com/app:2", "2") }))
        .await;
    let changed = |pods: &[&Value]| pods.iter().all(|pod| image(pod) == "example.com/app:2");
    for pod in field.until_pods("web", "patched", changed).await {
        let state = &pod["metadata"]["annotations"]["apps.kruise.io/inplace-update-state"];
        let state: Value = serde_json::from_str(state.as_str().unwrap()).unwrap();
        let recorded = &state["lastContainerStatuses"]["app"]["generation"];
        assert_eq!((&pod["metadata"]["generation"], recorded), (&json!(3), &json!(2)));
    }
}
