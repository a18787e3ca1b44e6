//! Resizes that are refused, and those whose update ends before they are recorded: a resize is a request of its own.

use kruise_api::cloneset::CloneSet;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::dies::until_asked;
use crate::errors::{quota, says};
use crate::field::{Field, identities};
use crate::kubelet::LATER;
use crate::locked::{lift, lock, policy};
use crate::lost::{Bed, alone};
use crate::pods::{label, name, runs, serves};
use crate::proxy::Loss;
use crate::world::{World, world};

const OLD: &str = "example.com/app:1";
const NEW: &str = "example.com/app:2";

fn template(image: &str, cpu: &str) -> Value {
    let app = json!({ "name": "app", "image": image, "resources": { "requests": { "cpu": cpu } } });
    json!({ "template": { "spec": { "containers": [app] } } })
}

async fn ask(field: &Field, image: &str, cpu: &str) {
    field.edit("web", json!({ "spec": template(image, cpu) })).await;
}

fn cpu(pod: &Value) -> &Value {
    &pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]
}

fn announced(pod: &Value) -> &Value {
    &pod["metadata"]["annotations"]["apps.kruise.io/inplace-update-resizing"]
}

/// Three Pods with the old image and one CPU.
async fn started(world: &'static World, namespace: &str) -> (Field, Vec<Value>) {
    let field = Field::new(world, namespace).await;
    field.set("web", template(OLD, "1")).await;
    field.settled("web").await;
    let pods = field.pods_of("web").await;
    (field, pods)
}

/// In use, with all that they had before.
async fn as_before(field: &Field, before: &[Value]) {
    let done = |pods: &[&Value]| {
        let plain = |pod: &&&Value| announced(pod).is_null() && serves(pod);
        let specs = pods.iter().map(|pod| &pod["spec"]);
        specs.eq(before.iter().map(|pod| &pod["spec"])) && pods.iter().all(|pod| plain(&pod))
    };
    let after = field.until_pods("web", "in use, and as they were", done).await;
    assert_eq!(identities(&after), identities(before));
}

/// Waits until the CloneSet says that it waits for this reason, in these words.
async fn waits(field: &Field, reason: &str, words: &str) {
    let told = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        let waiting = status.conditions.iter().find(|c| c.type_ == "Waiting");
        waiting.is_some_and(|c| c.reason == reason && c.message.contains(words))
    };
    field.status("web", &format!("{reason}: {words}"), told).await;
}

/// All Pods in use with the new image and the size from before, and the CloneSet says why.
async fn only_the_image_is_new(field: &Field, before: &[Value], why: &str) {
    let in_use = |pods: &[&Value]| {
        let mut pods = pods.iter();
        pods.all(|pod| serves(pod) && runs(pod, NEW) && cpu(pod) == "1")
    };
    let pods = field.until_pods("web", "in use with the new image", in_use).await;
    assert_eq!(identities(&pods), identities(before));
    waits(field, "ResizeRefused", why).await;
    field.event("FailedUpdatePodInPlace", "web").await;
}

/// All Pods with the new size, which they were refused before.
async fn resized_at_last(field: &Field, before: &[Value]) {
    let sized = |pods: &[&Value]| {
        let mut pods = pods.iter();
        pods.all(|pod| serves(pod) && cpu(pod) == "9" && announced(pod).is_null())
    };
    let pods = field.until_pods("web", "resized", sized).await;
    assert_eq!(identities(&pods), identities(before));
}

#[tokio::test]
async fn a_resize_beyond_the_quota_does_not_hold_back_the_image() {
    let (field, before) = started(world(), "no-cpu").await;
    quota(&field, "requests.cpu", 5).await;
    ask(&field, NEW, "9").await;
    only_the_image_is_new(&field, &before, "exceeded quota: few").await;
    quota(&field, "requests.cpu", 50).await;
    resized_at_last(&field, &before).await;
}

/// A policy that refuses resizes, in effect.
async fn no_resize(field: &Field, pod: &Value) -> &'static str {
    let refused = "sizes cannot be changed here";
    policy(field, "pods/resize", ("false", refused)).await;
    let probe = PatchParams::default().dry_run();
    let size = Patch::Strategic(json!({ "spec": template(OLD, "3")["template"]["spec"] }));
    let in_effect = || async {
        let pods = field.pods();
        let tried = pods.patch_subresource("resize", &name(pod), &probe, &size).await;
        tried.is_err().then_some(())
    };
    field.until("the policy is in effect", in_effect).await;
    refused
}

#[tokio::test]
async fn a_refused_resize_does_not_hold_back_the_image_under_in_place_only() {
    let (field, before) = started(world(), "size-only").await;
    let only = json!({ "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceOnly" } } });
    field.edit("web", json!({ "spec": only })).await;
    let refused = no_resize(&field, &before[0]).await;
    ask(&field, NEW, "9").await;
    only_the_image_is_new(&field, &before, refused).await;
    lift(&field).await;
    resized_at_last(&field, &before).await;
}

#[tokio::test]
async fn a_refused_resize_replaces_pods_under_in_place_if_possible() {
    let (field, before) = started(world(), "size-again").await;
    let refused = no_resize(&field, &before[0]).await;
    ask(&field, NEW, "9").await;
    field.event("FailedUpdatePodInPlace", "web").await;
    field.settled("web").await;
    let after = field.pods_of("web").await;
    let there = |pod: &Value| runs(pod, NEW) && cpu(pod) == "9" && announced(pod).is_null();
    assert!(after.iter().all(there), "{refused}: {after:#?}");
    let gone = identities(&before);
    assert!(identities(&after).iter().all(|one| !gone.contains(one)));
}

/// The node may have room later, which only kubelet knows.
#[tokio::test]
async fn a_deferred_resize_does_not_hold_back_the_image_under_in_place_only() {
    let (field, before) = started(world(), "size-deferred").await;
    let only = json!({ "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceOnly" } } });
    field.edit("web", json!({ "spec": only })).await;
    ask(&field, NEW, LATER).await;
    let in_use = |pods: &[&Value]| pods.iter().all(|pod| serves(pod) && runs(pod, NEW));
    let pods = field.until_pods("web", "in use with the new image", in_use).await;
    assert_eq!(identities(&pods), identities(&before));
    waits(&field, "ResizePending", "resize is Deferred: ").await;
    field.event("FailedUpdatePodInPlace", "web").await;
}

/// The size is taken, and the rest refused.
#[tokio::test]
async fn a_pod_of_which_only_the_size_can_be_changed_serves_and_holds_up_no_other() {
    let (field, before) = started(world(), "no-image-either").await;
    let locked = name(&before[0]);
    lock(&field, &locked).await;
    ask(&field, NEW, "2").await;
    says(&field, "FailedUpdate", "this Pod is locked").await;
    let in_use = |pods: &[&Value]| {
        let new = pods.iter().filter(|pod| runs(pod, NEW));
        new.count() == before.len() - 1 && pods.iter().all(|pod| serves(pod) && cpu(pod) == "2")
    };
    field
        .until_pods("web", "all in use, all but one are updated", in_use)
        .await;
    lift(&field).await;
    field.settled("web").await;
    let after = field.pods_of("web").await;
    assert_eq!(identities(&after), identities(&before));
    assert!(after.iter().all(|pod| announced(pod).is_null() && runs(pod, NEW)));
}

/// Three Pods, some of which were resized for an update with this image, which nothing says but the announcement; the
/// manager is dead. And the Pods from before.
async fn resized(bed: &mut Bed, namespace: &str, image: &str) -> (Field, Vec<Value>) {
    let (field, before) = started(bed.world, namespace).await;
    // It dies while it waits.
    let never = Loss::Until("nobody says so");
    bed.proxy.lose(namespace, "patch pods", never, 1, before.len());
    ask(&field, image, "2").await;
    until_asked(bed, namespace).await;
    bed.manager.kill().unwrap();
    let half = field.pods_of("web").await;
    let half: Vec<&Value> = half.iter().filter(|pod| cpu(pod) == "2").collect();
    assert!(!half.is_empty());
    for pod in half {
        let announced: Value = serde_json::from_str(announced(pod).as_str().unwrap()).unwrap();
        assert_eq!(announced["revision"], label(pod, "controller-revision-hash"));
        assert_eq!(
            announced["containers"],
            json!({ "app": { "requests": { "cpu": "1" } } })
        );
    }
    (field, before)
}

#[tokio::test]
async fn what_was_resized_for_an_update_that_is_not_wanted_any_more_is_taken_back() {
    let mut bed = alone().await;
    let (field, before) = resized(&mut bed, "dies-resized", OLD).await;
    ask(&field, OLD, "1").await;
    bed.manager.start().unwrap();
    field.settled("web").await;
    as_before(&field, &before).await;
}

/// Nothing is known to be wrong with it but its size.
#[tokio::test]
async fn a_pod_whose_size_cannot_be_taken_back_serves_and_that_is_told() {
    let mut bed = alone().await;
    let (field, before) = resized(&mut bed, "dies-refused", NEW).await;
    ask(&field, OLD, "1").await;
    let refused = no_resize(&field, &before[0]).await;
    bed.manager.start().unwrap();
    says(&field, "FailedUpdate", refused).await;
    field
        .until_pods("web", "in use", |pods| pods.iter().all(|pod| serves(pod)))
        .await;
    lift(&field).await;
    as_before(&field, &before).await;
}
