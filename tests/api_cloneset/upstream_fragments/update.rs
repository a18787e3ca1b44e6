//! The manual's fragments of an update strategy.

use kruise_api::cloneset::CloneSet;
use kruise_api::keys;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::{NEW_IMAGE, OLD_IMAGE, REPLICAS, wait_for_waiting_message};
use crate::fixture::Fixture;
use crate::pods::{condition, container_status, label, name as named, spec_image, text};

/// Strategy of a v1beta1 object; the example's own recreates Pods.
pub(super) fn in_place_strategy(more: Value) -> Value {
    let mut rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible" });
    json_patch::merge(&mut rolling, &more);
    json!({ "updateStrategy": { "rollingUpdate": rolling } })
}

pub(super) fn assert_all_run(pods: &[Value], image: &str) {
    let images: Vec<String> = pods.iter().map(|pod| spec_image(pod, 0)).collect();
    assert_eq!(images, vec![image; images.len()]);
}

/// The grace period passes between the Pod becoming not ready and the new image.
async fn check_grace_period(fixture: &Fixture, name: &str) {
    fixture.set_image(name, NEW_IMAGE).await;
    let not_ready = |pod: &&Value| condition(pod, "InPlaceUpdateReady")["status"] == "False";
    let pods = fixture
        .wait_pods(name, "one out of its Services", |pods| pods.iter().any(not_ready))
        .await;
    let one = pods.iter().find(not_ready).unwrap();
    assert_eq!(spec_image(one, 0), OLD_IMAGE, "no time was given");
    let since = text(&condition(one, "InPlaceUpdateReady")["lastTransitionTime"]);
    let since: jiff::Timestamp = since.parse().unwrap();
    fixture
        .wait_pod(&named(one), "given the image", |pod| {
            spec_image(pod, 0) == NEW_IMAGE
        })
        .await;
    let elapsed = jiff::Timestamp::now().duration_since(since);
    assert!(elapsed.as_secs() >= 10, "only {elapsed}");
}

/// At most a fifth is unavailable at a time.
async fn check_max_unavailable(fixture: &Fixture, name: &str) {
    let watch = fixture.watch_pods(name).await;
    fixture
        .set_image_and_spec(name, NEW_IMAGE, in_place_strategy(json!({})))
        .await;
    fixture.wait_settled(name).await;
    let pods = fixture.pods_of(name).await;
    assert_all_run(&pods, NEW_IMAGE);
    let observed = watch.observed();
    assert_eq!(
        (observed.min_serving, observed.max_pods),
        (REPLICAS - 1, REPLICAS),
        "{observed:?}"
    );
}

/// There are three more Pods for a while, and at most one fewer.
async fn check_max_surge(fixture: &Fixture, name: &str) {
    let watch = fixture.watch_pods(name).await;
    fixture.set_image(name, NEW_IMAGE).await;
    fixture.wait_settled(name).await;
    let pods = fixture
        .wait_pods(name, "no more than asked for", |pods| pods.len() == REPLICAS)
        .await;
    assert_all_run(&pods, NEW_IMAGE);
    let observed = watch.observed();
    assert_eq!(observed.max_pods, REPLICAS + 3, "{observed:?}");
    assert!(observed.min_serving >= REPLICAS - 1, "{observed:?}");
}

/// Labels Pods, and waits until the manager has observed that: it restores the label that it manages.
async fn label_pods(fixture: &Fixture, name: &str, key: &str, values: [&str; REPLICAS]) {
    for (pod, value) in fixture.pods_of(name).await.iter().zip(values) {
        let labels = json!({ key: value, keys::POD_TEMPLATE_HASH: null });
        let patch = Patch::Merge(json!({ "metadata": { "labels": labels } }));
        let pods = fixture.pods();
        let params = PatchParams::default();
        pods.patch(&named(pod), &params, &patch).await.unwrap();
    }
    let observed = |pods: &[&Value]| {
        let hash = |pod: &&Value| !label(pod, keys::POD_TEMPLATE_HASH).is_empty();
        pods.iter()
            .all(|pod| hash(pod) && pod["metadata"]["labels"][key].is_string())
    };
    fixture.wait_pods(name, "seen with their labels", observed).await;
}

/// Values of a label in the order in which the Pods are updated, one after the other.
async fn update_order(fixture: &Fixture, name: &str, key: &str, values: [&str; REPLICAS]) -> Vec<String> {
    label_pods(fixture, name, key, values).await;
    fixture
        .set_image_and_spec(name, NEW_IMAGE, in_place_strategy(json!({})))
        .await;
    fixture.wait_settled(name).await;
    let mut pods = fixture.pods_of(name).await;
    // The fake kubelet numbers the containers that it starts.
    let number = |pod: &Value| -> u64 {
        let id = container_status(pod, "nginx").id;
        id.rsplit('/').next().unwrap().parse().unwrap()
    };
    pods.sort_by_key(number);
    pods.iter().map(|pod| label(pod, key)).collect()
}

async fn check_paused(fixture: &Fixture, name: &str) {
    fixture
        .set_image_and_spec(name, NEW_IMAGE, in_place_strategy(json!({})))
        .await;
    let observed = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        status.update_revision != status.current_revision
    };
    let set = fixture.wait_status(name, "the new revision seen", observed).await;
    assert_eq!(set.status.unwrap().updated_replicas, 0);
    wait_for_waiting_message(fixture, name, "the update is paused").await;
    assert_all_run(&fixture.pods_of(name).await, OLD_IMAGE);
    let resume = in_place_strategy(json!({ "paused": false }));
    fixture.patch_set(name, json!({ "spec": resume })).await;
    fixture.wait_settled(name).await;
    assert_all_run(&fixture.pods_of(name).await, NEW_IMAGE);
}

/// Checks a fragment for updates.
pub(super) async fn check_update_strategy(fixture: &Fixture, name: &str, strategy: &Value) {
    let has = |path: &str| strategy.pointer(path).is_some();
    if has("/inPlaceUpdateStrategy/gracePeriodSeconds") {
        check_grace_period(fixture, name).await;
    } else if has("/maxUnavailable") {
        check_max_unavailable(fixture, name).await;
    } else if has("/maxSurge") {
        check_max_surge(fixture, name).await;
    } else if has("/priorityStrategy/weightPriority") {
        let values = ["none", "bar", "foo", "bar", "foo"];
        let order = update_order(fixture, name, "test-key", values).await;
        assert_eq!(order, ["foo", "foo", "bar", "bar", "none"]);
    } else if has("/priorityStrategy/orderPriority") {
        let values = ["r-1", "r-4", "r-3", "r-10", "r-2"];
        let order = update_order(fixture, name, "some-label-key", values).await;
        assert_eq!(order, ["r-10", "r-4", "r-3", "r-2", "r-1"]);
    } else if has("/scatterStrategy") {
        let values = ["bar", "bar", "bar", "else", "else"];
        let order = update_order(fixture, name, "foo", values).await;
        // They are scattered again for each turn; with only one left of the others there is nothing to scatter.
        assert_eq!(order[..2], ["bar", "else"], "{order:?}");
    } else {
        assert!(has("/paused"), "what does {strategy} say?");
        check_paused(fixture, name).await;
    }
}
