//! Updates: how many Pods, how fast, in place or not, and rollbacks.

use kruise_api::cloneset::CloneSet;
use serde_json::{Value, json};

use crate::fake_kubelet::NO_IMAGE;
use crate::fixture::{Fixture, identities};
use crate::test_cluster::{shared_cluster, wait_until};

fn strategy(rolling: Value) -> Value {
    json!({ "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": rolling } })
}

fn image(pod: &Value) -> &str {
    pod["spec"]["containers"][0]["image"].as_str().unwrap()
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions
        .into_iter()
        .any(|c| c["type"] == "Ready" && c["status"] == "True")
}

fn has_updated(set: &CloneSet, count: i32) -> bool {
    let status = set.status.as_ref().unwrap();
    status.updated_replicas == count
        && status.updated_available_replicas == Some(count)
        && status.available_replicas == set.spec.desired_replicas()
}

/// Number of Pods with that image; all must be ready.
fn count_with_image(pods: &[Value], expected: &str) -> usize {
    pods.iter().filter(|pod| image(pod) == expected).count()
}

#[tokio::test]
async fn partition_updates_half_then_all_then_rolls_back() {
    let fixture = Fixture::new(shared_cluster(), "partition").await;
    let rolling = |partition: &str| {
        strategy(
            json!({ "podUpdatePolicy": "InPlaceIfPossible", "partition": partition,
            "maxUnavailable": "50%" }),
        )
    };
    let mut spec = rolling("50%");
    spec["replicas"] = json!(4);
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    let before = identities(&fixture.pods_of("web").await);
    fixture.set_image("web", "example.com/app:2").await;
    for (partition, new) in [("50%", 2), ("0%", 4), ("50%", 2)] {
        fixture
            .patch_set("web", json!({ "spec": rolling(partition) }))
            .await;
        fixture
            .wait_status("web", "as many updated as wanted", |s| has_updated(s, new))
            .await;
        let pods = fixture.pods_of("web").await;
        assert_eq!(
            count_with_image(&pods, "example.com/app:2"),
            new as usize,
            "partition {partition}"
        );
        assert_eq!(identities(&pods), before);
        if new == 4 {
            // A rollback is possible only while the update revision differs from the current one.
            fixture.set_image("web", "example.com/app:1").await;
            fixture.wait_settled("web").await;
            fixture.set_image("web", "example.com/app:2").await;
        }
    }
}

#[tokio::test]
async fn recreate_respects_max_unavailable_and_max_surge() {
    let fixture = Fixture::new(shared_cluster(), "surge").await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 0, "maxSurge": 1 });
    fixture.create_cloneset("web", strategy(rolling)).await;
    fixture.wait_settled("web").await;
    let before = identities(&fixture.pods_of("web").await);
    fixture.set_image("web", "example.com/app:2").await;
    let replaced = fixture.wait_pods("web", "replaced", |pods| {
        let active = || {
            pods.iter()
                .filter(|p| p["metadata"]["deletionTimestamp"].is_null())
        };
        let serving = active().filter(|p| is_ready(p)).count();
        assert!(active().count() <= 4, "more than replicas and surge");
        assert!(serving >= 3, "only {serving} are ready");
        pods.len() == 3
            && pods
                .iter()
                .all(|p| image(p) == "example.com/app:2" && is_ready(p))
    });
    let after = identities(&replaced.await);
    assert!(
        before
            .iter()
            .all(|(_, uid)| after.iter().all(|(_, new)| new != uid))
    );
    fixture.wait_settled("web").await;
}

#[tokio::test]
async fn bad_image_stops_at_max_unavailable_and_rolls_back() {
    let fixture = Fixture::new(shared_cluster(), "rollback").await;
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 });
    fixture.create_cloneset("web", strategy(rolling)).await;
    let first = fixture.wait_settled("web").await;
    let before = fixture.pods_of("web").await;
    fixture.set_image("web", NO_IMAGE).await;
    let one_waiting = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        status.updated_replicas == 1 && status.ready_replicas == 2
    };
    fixture
        .wait_status("web", "one Pod waits for its image", one_waiting)
        .await;
    assert_eq!(count_with_image(&fixture.pods_of("web").await, NO_IMAGE), 1);
    fixture.set_image("web", "example.com/app:1").await;
    let rolled_back = fixture.wait_settled("web").await;
    let after = fixture.pods_of("web").await;
    assert_eq!(identities(&before), identities(&after));
    let revision = |set: &CloneSet| set.status.clone().unwrap().update_revision;
    assert_eq!(
        revision(&first),
        revision(&rolled_back),
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
async fn paused_in_place_update_waits_until_resumed() {
    let fixture = Fixture::new(shared_cluster(), "paused").await;
    let rolling = |paused: bool| {
        strategy(json!({ "podUpdatePolicy": "InPlaceOnly", "maxUnavailable": "100%", "paused": paused }))
    };
    fixture.create_cloneset("web", rolling(true)).await;
    fixture.wait_settled("web").await;
    let before = identities(&fixture.pods_of("web").await);
    fixture.set_image("web", "example.com/app:2").await;
    fixture
        .wait_status("web", "seen", |set| {
            let status = set.status.as_ref().unwrap();
            status.updated_replicas == 0 && status.update_revision != status.current_revision
        })
        .await;
    assert_eq!(
        count_with_image(&fixture.pods_of("web").await, "example.com/app:1"),
        3
    );
    fixture.patch_set("web", json!({ "spec": rolling(false) })).await;
    fixture.wait_settled("web").await;
    let pods = fixture.pods_of("web").await;
    assert_eq!(count_with_image(&pods, "example.com/app:2"), 3);
    assert_eq!(identities(&pods), before);
}

#[tokio::test]
async fn in_place_update_hooks_hold_pods_before_and_after() {
    let fixture = Fixture::new(shared_cluster(), "hooks").await;
    let hook = json!({ "labelsHandler": { "example.com/serving": "yes" }, "markPodNotReady": true });
    let mut spec = json!({ "replicas": 1, "lifecycle": { "inPlaceUpdate": hook } });
    spec["template"] = json!({ "metadata": { "labels": { "example.com/serving": "yes" } } });
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    let before = fixture.pods_of("web").await;
    let name = before[0]["metadata"]["name"].as_str().unwrap().to_owned();
    let state = |pod: &Value| pod["metadata"]["labels"]["lifecycle.apps.kruise.io/state"].clone();
    fixture.set_image("web", "example.com/app:2").await;
    let preparing = |pods: &[&Value]| pods.iter().all(|p| state(p) == "PreparingUpdate" && !is_ready(p));
    let pods = fixture
        .wait_pods("web", "held by the hook, and not ready", preparing)
        .await;
    assert_eq!(image(&pods[0]), "example.com/app:1");

    set_label(&fixture, &name, json!(null)).await;
    let updated = |pods: &[&Value]| pods.iter().all(|p| state(p) == "Updated" && is_ready(p));
    let pods = fixture
        .wait_pods("web", "updated, and waiting for the hook", updated)
        .await;
    assert_eq!(image(&pods[0]), "example.com/app:2");

    set_label(&fixture, &name, json!("yes")).await;
    let normal = |pods: &[&Value]| pods.iter().all(|p| state(p) == "Normal");
    let pods = fixture.wait_pods("web", "in use again", normal).await;
    assert_eq!(identities(&before), identities(&pods));
}

async fn set_label(fixture: &Fixture, pod: &str, value: Value) {
    let patch = json!({ "metadata": { "labels": { "example.com/serving": value } } });
    let patch = kube::api::Patch::Merge(patch);
    fixture
        .pods()
        .patch(pod, &Default::default(), &patch)
        .await
        .unwrap();
}

#[tokio::test]
async fn rollout_creates_events_and_waiting_condition() {
    let fixture = Fixture::new(shared_cluster(), "told").await;
    fixture
        .create_cloneset("web", json!({ "progressDeadlineSeconds": 600 }))
        .await;
    fixture.wait_settled("web").await;
    fixture.set_image("web", NO_IMAGE).await;
    let waiting = |set: &CloneSet| {
        let conditions = &set.status.as_ref().unwrap().conditions;
        conditions.iter().find(|c| c.type_ == "Waiting").cloned()
    };
    let image_pull_waiting =
        |set: &CloneSet| waiting(set).is_some_and(|c| c.message.contains("container app: "));
    wait_until(
        &fixture.sets(),
        "web",
        "says what it waits for",
        image_pull_waiting,
    )
    .await;
    for reason in ["SuccessfulCreate", "SuccessfulUpdatePodInPlace"] {
        fixture.wait_event(reason, "web").await;
    }
}

/// A resize is a separate write, which raises the Pod's generation before the image does.
#[tokio::test]
async fn in_place_state_records_generation_before_image_patch() {
    let fixture = Fixture::new(shared_cluster(), "generation").await;
    let container = |image: &str, cpu: &str| {
        let resources = json!({ "requests": { "cpu": cpu } });
        json!({ "template": { "spec": { "containers": [{ "name": "app", "image": image, "resources": resources }] } } })
    };
    fixture
        .create_cloneset("web", container("example.com/app:1", "1"))
        .await;
    fixture.wait_settled("web").await;
    fixture.stop_kubelet();
    fixture
        .patch_set("web", json!({ "spec": container("example.com/app:2", "2") }))
        .await;
    let changed = |pods: &[&Value]| pods.iter().all(|pod| image(pod) == "example.com/app:2");
    for pod in fixture.wait_pods("web", "patched", changed).await {
        let state = &pod["metadata"]["annotations"]["apps.kruise.io/inplace-update-state"];
        let state: Value = serde_json::from_str(state.as_str().unwrap()).unwrap();
        let recorded = &state["lastContainerStatuses"]["app"]["generation"];
        assert_eq!((&pod["metadata"]["generation"], recorded), (&json!(3), &json!(2)));
    }
}
