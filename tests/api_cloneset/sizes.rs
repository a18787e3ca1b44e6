//! Resizes that are refused, and those whose update ends before they are recorded: a resize is a request of its own.

use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::dies::until_asked;
use crate::errors::{quota, says};
use crate::field::{Field, identities};
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

#[tokio::test]
async fn a_resize_beyond_the_quota_changes_no_container_and_is_told() {
    let (field, before) = started(world(), "no-cpu").await;
    quota(&field, "requests.cpu", 5).await;
    ask(&field, NEW, "9").await;
    says(&field, "FailedUpdate", "exceeded quota: few").await;
    let in_use = |pods: &[&Value]| pods.iter().all(|pod| serves(pod) && runs(pod, OLD));
    field.until_pods("web", "in use as they were", in_use).await;
    ask(&field, OLD, "1").await;
    field.settled("web").await;
    as_before(&field, &before).await;
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
    let refused = "nobody changes sizes here";
    policy(&field, "pods/resize", ("false", refused)).await;
    let probe = PatchParams::default().dry_run();
    let size = Patch::Strategic(json!({ "spec": template(OLD, "3")["template"]["spec"] }));
    let in_effect = || async {
        let pods = field.pods();
        let tried = pods
            .patch_subresource("resize", &name(&before[0]), &probe, &size)
            .await;
        tried.is_err().then_some(())
    };
    field.until("the policy is in effect", in_effect).await;
    bed.manager.start().unwrap();
    says(&field, "FailedUpdate", refused).await;
    field
        .until_pods("web", "in use", |pods| pods.iter().all(|pod| serves(pod)))
        .await;
    lift(&field).await;
    as_before(&field, &before).await;
}
