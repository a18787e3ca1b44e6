//! What the manual's fragments of an update strategy say.

use kruise_api::cloneset::CloneSet;
use kruise_api::keys;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::{ALL, FIRST, NEXT, says};
use crate::field::Field;
use crate::pods::{condition, container, label, name as named, text, wanted_image};

/// Strategy of a v1beta1 object: the example's own is to make new Pods.
pub(super) fn in_place(more: Value) -> Value {
    let mut rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible" });
    json_patch::merge(&mut rolling, &more);
    json!({ "updateStrategy": { "rollingUpdate": rolling } })
}

pub(super) fn all_run(pods: &[Value], image: &str) {
    let images: Vec<String> = pods.iter().map(|pod| wanted_image(pod, 0)).collect();
    assert_eq!(images, vec![image; images.len()]);
}

/// Between the end of its readiness and the new image is the time that was asked for.
async fn grace_is_given(field: &Field, name: &str) {
    field.image(name, NEXT).await;
    let closed = |pod: &&Value| condition(pod, "InPlaceUpdateReady")["status"] == "False";
    let pods = field
        .until_pods(name, "one out of its Services", |pods| pods.iter().any(closed))
        .await;
    let one = pods.iter().find(closed).unwrap();
    assert_eq!(wanted_image(one, 0), FIRST, "no time was given");
    let since = text(&condition(one, "InPlaceUpdateReady")["lastTransitionTime"]);
    let since: jiff::Timestamp = since.parse().unwrap();
    field
        .until_pod(&named(one), "given the image", |pod| wanted_image(pod, 0) == NEXT)
        .await;
    let waited = jiff::Timestamp::now().duration_since(since);
    assert!(waited.as_secs() >= 10, "only {waited}");
}

/// No more than a fifth is unavailable at a time.
async fn one_at_a_time(field: &Field, name: &str) {
    let witness = field.witness(name).await;
    field.image_and(name, NEXT, in_place(json!({}))).await;
    field.settled(name).await;
    let pods = field.pods_of(name).await;
    all_run(&pods, NEXT);
    let seen = witness.seen();
    assert_eq!((seen.least_serving, seen.most), (ALL - 1, ALL), "{seen:?}");
}

/// Three Pods more are there for a while, and one fewer at most.
async fn three_more(field: &Field, name: &str) {
    let witness = field.witness(name).await;
    field.image(name, NEXT).await;
    field.settled(name).await;
    let pods = field
        .until_pods(name, "no more than asked for", |pods| pods.len() == ALL)
        .await;
    all_run(&pods, NEXT);
    let seen = witness.seen();
    assert_eq!(seen.most, ALL + 3, "{seen:?}");
    assert!(seen.least_serving >= ALL - 1, "{seen:?}");
}

/// Labels Pods, and waits until the manager has seen it: the label that it wants to be there comes back.
async fn labelled(field: &Field, name: &str, key: &str, values: [&str; ALL]) {
    for (pod, value) in field.pods_of(name).await.iter().zip(values) {
        let labels = json!({ key: value, keys::POD_TEMPLATE_HASH: null });
        let patch = Patch::Merge(json!({ "metadata": { "labels": labels } }));
        let pods = field.pods();
        let params = PatchParams::default();
        pods.patch(&named(pod), &params, &patch).await.unwrap();
    }
    let seen = |pods: &[&Value]| {
        let hash = |pod: &&Value| !label(pod, keys::POD_TEMPLATE_HASH).is_empty();
        pods.iter()
            .all(|pod| hash(pod) && pod["metadata"]["labels"][key].is_string())
    };
    field.until_pods(name, "seen with their labels", seen).await;
}

/// Values of a label in the order in which the Pods are updated, one after the other.
async fn turns(field: &Field, name: &str, key: &str, values: [&str; ALL]) -> Vec<String> {
    labelled(field, name, key, values).await;
    field.image_and(name, NEXT, in_place(json!({}))).await;
    field.settled(name).await;
    let mut pods = field.pods_of(name).await;
    // Who runs them counts the containers that it starts.
    let number = |pod: &Value| -> u64 {
        let id = container(pod, "nginx").id;
        id.rsplit('/').next().unwrap().parse().unwrap()
    };
    pods.sort_by_key(number);
    pods.iter().map(|pod| label(pod, key)).collect()
}

async fn paused(field: &Field, name: &str) {
    field.image_and(name, NEXT, in_place(json!({}))).await;
    let seen = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        status.update_revision != status.current_revision
    };
    let set = field.status(name, "the new revision seen", seen).await;
    assert_eq!(set.status.unwrap().updated_replicas, 0);
    says(field, name, "the update is paused").await;
    all_run(&field.pods_of(name).await, FIRST);
    let goes_on = in_place(json!({ "paused": false }));
    field.edit(name, json!({ "spec": goes_on })).await;
    field.settled(name).await;
    all_run(&field.pods_of(name).await, NEXT);
}

/// What a fragment for updates says.
pub(super) async fn says_how(field: &Field, name: &str, strategy: &Value) {
    let printed = |path: &str| strategy.pointer(path).is_some();
    if printed("/inPlaceUpdateStrategy/gracePeriodSeconds") {
        grace_is_given(field, name).await;
    } else if printed("/maxUnavailable") {
        one_at_a_time(field, name).await;
    } else if printed("/maxSurge") {
        three_more(field, name).await;
    } else if printed("/priorityStrategy/weightPriority") {
        let values = ["none", "bar", "foo", "bar", "foo"];
        let turns = turns(field, name, "test-key", values).await;
        assert_eq!(turns, ["foo", "foo", "bar", "bar", "none"]);
    } else if printed("/priorityStrategy/orderPriority") {
        let values = ["r-1", "r-4", "r-3", "r-10", "r-2"];
        let turns = turns(field, name, "some-label-key", values).await;
        assert_eq!(turns, ["r-10", "r-4", "r-3", "r-2", "r-1"]);
    } else if printed("/scatterStrategy") {
        let values = ["bar", "bar", "bar", "else", "else"];
        let turns = turns(field, name, "foo", values).await;
        // They are spread anew for each turn, and when one of the others is left there is nothing to spread.
        assert_eq!(turns[..2], ["bar", "else"], "{turns:?}");
    } else {
        assert!(printed("/paused"), "what does {strategy} say?");
        paused(field, name).await;
    }
}
