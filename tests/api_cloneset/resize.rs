//! Denied resizes, and resizes whose update ends before they are recorded: a resize is a separate request.

use kruise_api::cloneset::CloneSet;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::denied_updates::{allow_updates, deny_updates, lock_pod};
use crate::errors::{set_quota, wait_for_condition};
use crate::fake_kubelet::DEFERRED_CPU;
use crate::fixture::{Fixture, identities};
use crate::manager_crash::wait_for_faulted_request;
use crate::network_faults::{ProxiedCluster, exclusive_cluster};
use crate::pods::{is_serving, label, name, runs_image};
use crate::proxy::NetworkFault;
use crate::test_cluster::{TestCluster, shared_cluster};

const OLD_IMAGE: &str = "example.com/app:1";
const NEW_IMAGE: &str = "example.com/app:2";

fn template(image: &str, cpu: &str) -> Value {
    let app = json!({ "name": "app", "image": image, "resources": { "requests": { "cpu": cpu } } });
    json!({ "template": { "spec": { "containers": [app] } } })
}

async fn set_image_and_cpu(fixture: &Fixture, image: &str, cpu: &str) {
    fixture
        .patch_set("web", json!({ "spec": template(image, cpu) }))
        .await;
}

fn cpu(pod: &Value) -> &Value {
    &pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]
}

fn resize_annotation(pod: &Value) -> &Value {
    &pod["metadata"]["annotations"]["apps.kruise.io/inplace-update-resizing"]
}

/// Three Pods with the old image and one CPU.
async fn create_three_pods(cluster: &'static TestCluster, namespace: &str) -> (Fixture, Vec<Value>) {
    let fixture = Fixture::new(cluster, namespace).await;
    fixture.create_cloneset("web", template(OLD_IMAGE, "1")).await;
    fixture.wait_settled("web").await;
    let pods = fixture.pods_of("web").await;
    (fixture, pods)
}

/// Waits until the Pods serve with the image and size from before.
async fn wait_until_restored(fixture: &Fixture, before: &[Value]) {
    let restored = |pods: &[&Value]| {
        let is_settled = |pod: &&&Value| resize_annotation(pod).is_null() && is_serving(pod);
        let specs = pods.iter().map(|pod| &pod["spec"]);
        specs.eq(before.iter().map(|pod| &pod["spec"])) && pods.iter().all(|pod| is_settled(&pod))
    };
    let after = fixture
        .wait_pods("web", "in use, and as they were", restored)
        .await;
    assert_eq!(identities(&after), identities(before));
}

/// Waits until condition Waiting has this reason and text.
async fn wait_for_waiting(fixture: &Fixture, reason: &str, text: &str) {
    let reached = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        let waiting = status.conditions.iter().find(|c| c.type_ == "Waiting");
        waiting.is_some_and(|c| c.reason == reason && c.message.contains(text))
    };
    fixture
        .wait_status("web", &format!("{reason}: {text}"), reached)
        .await;
}

/// Waits until all Pods serve with the new image and the old size, and the CloneSet reports the reason.
async fn wait_until_only_image_updated(fixture: &Fixture, before: &[Value], text: &str) {
    let in_use = |pods: &[&Value]| {
        let mut pods = pods.iter();
        pods.all(|pod| is_serving(pod) && runs_image(pod, NEW_IMAGE) && cpu(pod) == "1")
    };
    let pods = fixture
        .wait_pods("web", "in use with the new image", in_use)
        .await;
    assert_eq!(identities(&pods), identities(before));
    wait_for_waiting(fixture, "ResizeRefused", text).await;
    fixture.wait_event("FailedUpdatePodInPlace", "web").await;
}

/// Waits until all Pods have the new size, which was denied before.
async fn wait_until_resized(fixture: &Fixture, before: &[Value]) {
    let is_resized = |pods: &[&Value]| {
        let mut pods = pods.iter();
        pods.all(|pod| is_serving(pod) && cpu(pod) == "9" && resize_annotation(pod).is_null())
    };
    let pods = fixture.wait_pods("web", "resized", is_resized).await;
    assert_eq!(identities(&pods), identities(before));
}

#[tokio::test]
async fn resize_over_quota_does_not_block_image_update() {
    let (fixture, before) = create_three_pods(shared_cluster(), "no-cpu").await;
    set_quota(&fixture, "requests.cpu", 5).await;
    set_image_and_cpu(&fixture, NEW_IMAGE, "9").await;
    wait_until_only_image_updated(&fixture, &before, "exceeded quota: few").await;
    set_quota(&fixture, "requests.cpu", 50).await;
    wait_until_resized(&fixture, &before).await;
}

/// Creates a policy that denies resizes; returns when it is enforced.
async fn deny_resize(fixture: &Fixture, pod: &Value) -> &'static str {
    let message = "sizes cannot be changed here";
    deny_updates(fixture, "pods/resize", ("false", message)).await;
    let probe = PatchParams::default().dry_run();
    let size = Patch::Strategic(json!({ "spec": template(OLD_IMAGE, "3")["template"]["spec"] }));
    let in_effect = || async {
        let pods = fixture.pods();
        let result = pods.patch_subresource("resize", &name(pod), &probe, &size).await;
        result.is_err().then_some(())
    };
    fixture.poll_until("the policy is in effect", in_effect).await;
    message
}

#[tokio::test]
async fn in_place_only_denied_resize_still_updates_image() {
    let (fixture, before) = create_three_pods(shared_cluster(), "size-only").await;
    let in_place_only =
        json!({ "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceOnly" } } });
    fixture.patch_set("web", json!({ "spec": in_place_only })).await;
    let message = deny_resize(&fixture, &before[0]).await;
    set_image_and_cpu(&fixture, NEW_IMAGE, "9").await;
    wait_until_only_image_updated(&fixture, &before, message).await;
    allow_updates(&fixture).await;
    wait_until_resized(&fixture, &before).await;
}

#[tokio::test]
async fn in_place_if_possible_denied_resize_recreates_pods() {
    let (fixture, before) = create_three_pods(shared_cluster(), "size-again").await;
    let message = deny_resize(&fixture, &before[0]).await;
    set_image_and_cpu(&fixture, NEW_IMAGE, "9").await;
    fixture.wait_event("FailedUpdatePodInPlace", "web").await;
    fixture.wait_settled("web").await;
    let after = fixture.pods_of("web").await;
    let is_updated =
        |pod: &Value| runs_image(pod, NEW_IMAGE) && cpu(pod) == "9" && resize_annotation(pod).is_null();
    assert!(after.iter().all(is_updated), "{message}: {after:#?}");
    let old_pods = identities(&before);
    assert!(identities(&after).iter().all(|one| !old_pods.contains(one)));
}

/// The node may have room later, which only kubelet finds out.
#[tokio::test]
async fn in_place_only_deferred_resize_still_updates_image() {
    let (fixture, before) = create_three_pods(shared_cluster(), "size-deferred").await;
    let in_place_only =
        json!({ "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceOnly" } } });
    fixture.patch_set("web", json!({ "spec": in_place_only })).await;
    set_image_and_cpu(&fixture, NEW_IMAGE, DEFERRED_CPU).await;
    let in_use = |pods: &[&Value]| {
        pods.iter()
            .all(|pod| is_serving(pod) && runs_image(pod, NEW_IMAGE))
    };
    let pods = fixture
        .wait_pods("web", "in use with the new image", in_use)
        .await;
    assert_eq!(identities(&pods), identities(&before));
    wait_for_waiting(&fixture, "ResizePending", "resize is Deferred: ").await;
    fixture.wait_event("FailedUpdatePodInPlace", "web").await;
}

/// The size is accepted, and the rest is denied.
#[tokio::test]
async fn resize_only_pod_serves_and_delays_no_other() {
    let (fixture, before) = create_three_pods(shared_cluster(), "no-image-either").await;
    let locked = name(&before[0]);
    lock_pod(&fixture, &locked).await;
    set_image_and_cpu(&fixture, NEW_IMAGE, "2").await;
    wait_for_condition(&fixture, "FailedUpdate", "this Pod is locked").await;
    let in_use = |pods: &[&Value]| {
        let new = pods.iter().filter(|pod| runs_image(pod, NEW_IMAGE));
        new.count() == before.len() - 1 && pods.iter().all(|pod| is_serving(pod) && cpu(pod) == "2")
    };
    fixture
        .wait_pods("web", "all in use, all but one are updated", in_use)
        .await;
    allow_updates(&fixture).await;
    fixture.wait_settled("web").await;
    let after = fixture.pods_of("web").await;
    assert_eq!(identities(&after), identities(&before));
    assert!(
        after
            .iter()
            .all(|pod| resize_annotation(pod).is_null() && runs_image(pod, NEW_IMAGE))
    );
}

/// Three Pods, some of which were resized for an update to this image, which only the annotation records; the manager
/// is killed. Also returns the Pods from before.
async fn crash_during_resize(
    proxied: &mut ProxiedCluster,
    namespace: &str,
    image: &str,
) -> (Fixture, Vec<Value>) {
    let (fixture, before) = create_three_pods(proxied.cluster, namespace).await;
    // The manager is killed while it waits.
    let hold_forever = NetworkFault::HoldUntil("never in a body");
    proxied
        .proxy
        .inject(namespace, "patch pods", hold_forever, 1, before.len());
    set_image_and_cpu(&fixture, image, "2").await;
    wait_for_faulted_request(proxied, namespace).await;
    proxied.manager.kill().unwrap();
    let resized_pods = fixture.pods_of("web").await;
    let resized_pods: Vec<&Value> = resized_pods.iter().filter(|pod| cpu(pod) == "2").collect();
    assert!(!resized_pods.is_empty());
    for pod in resized_pods {
        let announced: Value = serde_json::from_str(resize_annotation(pod).as_str().unwrap()).unwrap();
        assert_eq!(announced["revision"], label(pod, "controller-revision-hash"));
        assert_eq!(
            announced["containers"],
            json!({ "app": { "requests": { "cpu": "1" } } })
        );
    }
    (fixture, before)
}

#[tokio::test]
async fn resize_rollback_after_manager_crash() {
    let mut proxied = exclusive_cluster().await;
    let (fixture, before) = crash_during_resize(&mut proxied, "dies-resized", OLD_IMAGE).await;
    set_image_and_cpu(&fixture, OLD_IMAGE, "1").await;
    proxied.manager.start().unwrap();
    fixture.wait_settled("web").await;
    wait_until_restored(&fixture, &before).await;
}

/// Only its size is wrong.
#[tokio::test]
async fn denied_resize_rollback_is_reported_and_pod_serves() {
    let mut proxied = exclusive_cluster().await;
    let (fixture, before) = crash_during_resize(&mut proxied, "dies-refused", NEW_IMAGE).await;
    set_image_and_cpu(&fixture, OLD_IMAGE, "1").await;
    let message = deny_resize(&fixture, &before[0]).await;
    proxied.manager.start().unwrap();
    wait_for_condition(&fixture, "FailedUpdate", message).await;
    fixture
        .wait_pods("web", "in use", |pods| pods.iter().all(|pod| is_serving(pod)))
        .await;
    allow_updates(&fixture).await;
    wait_until_restored(&fixture, &before).await;
}
