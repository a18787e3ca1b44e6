//! Hooks that block Pods before deletion, before and after their update, and before their use, and release them.

use std::ops::Deref;

use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::pods::{
    condition, condition_is_true, container_status, is_serving, is_terminating, lifecycle_state, name,
    runs_image, text, uid, uids_by_name,
};
use crate::workloads::{NodeNamespace, TestCluster, shared_cluster, template};

const HOOK_NAME: &str = "example.com/held";

/// A template whose Pods are blocked from their creation, by a label or a finalizer.
fn template_with_hook(kind: &str) -> Value {
    let mut template = template("web");
    match kind {
        "label" => template["metadata"]["labels"][HOOK_NAME] = json!("yes"),
        _ => template["metadata"]["finalizers"] = json!([HOOK_NAME]),
    }
    template
}

fn label_hook(mark_not_ready: bool) -> Value {
    json!({ "labelsHandler": { HOOK_NAME: "yes" }, "markPodNotReady": mark_not_ready })
}

fn finalizer_hook(mark_not_ready: bool) -> Value {
    json!({ "finalizersHandler": [HOOK_NAME], "markPodNotReady": mark_not_ready })
}

/// Adds the label to a Pod, or removes it.
async fn set_hook_label(ns: &NodeNamespace<impl Deref<Target = TestCluster>>, pod: &str, value: Value) {
    let patch = Patch::Merge(json!({ "metadata": { "labels": { HOOK_NAME: value } } }));
    ns.pods()
        .patch(pod, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// Removes the finalizers of a Pod.
async fn remove_finalizers(ns: &NodeNamespace<impl Deref<Target = TestCluster>>, pod: &str) {
    let patch = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    ns.pods()
        .patch(pod, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// Waits until one Pod is in that state, serving or not; returns its name.
async fn wait_for_one_in_state(
    ns: &NodeNamespace<impl Deref<Target = TestCluster>>,
    state: &str,
    serving: bool,
) -> Value {
    let matches = |pod: &Value| lifecycle_state(pod) == state && is_serving(pod) == serving;
    let what = format!("one is {state}, and serves: {serving}");
    let pods = ns
        .wait_pods("web", &what, |pods| pods.iter().any(|pod| matches(pod)))
        .await;
    pods.into_iter().find(matches).unwrap()
}

/// Waits until condition Waiting, or an event, names the hook.
async fn wait_waiting_message(ns: &NodeNamespace<impl Deref<Target = TestCluster>>, text: &str) {
    let what = format!("it says {text:?}");
    ns.wait_status("web", &what, |status| {
        let mut conditions = status.conditions.iter();
        conditions.any(|c| c.type_ == "Waiting" && c.message.contains(text))
    })
    .await;
}

#[tokio::test]
async fn pre_delete_hook_makes_pod_unready_and_holds_deletion() {
    let ns = shared_cluster().await;
    let set = json!({ "replicas": 2, "template": template_with_hook("finalizer"), "progressDeadlineSeconds": 600,
        "lifecycle": { "preDelete": finalizer_hook(true) } });
    ns.create_set("web", set).await;
    ns.wait_settled("web").await;
    let before = ns.pods_of("web").await;
    ns.patch_set("web", json!({ "spec": { "replicas": 1 } })).await;
    let pod = wait_for_one_in_state(&ns, "PreparingDelete", false).await;
    let not_ready = condition(&pod, "KruisePodReady");
    assert_eq!(not_ready["status"], "False");
    assert!(
        text(&not_ready["message"]).contains("preDeleteHook"),
        "{not_ready}"
    );
    assert!(condition_is_true(&pod, "ContainersReady") && !is_terminating(&pod));
    assert_eq!(
        container_status(&pod, "app").id,
        container_status(&before[&name(&pod)], "app").id,
        "it runs"
    );
    wait_waiting_message(&ns, "preDelete").await;
    let status = ns
        .wait_status("web", "one ready of two", |s| {
            (s.replicas, s.ready_replicas) == (2, 1)
        })
        .await;
    assert_eq!(status.available_replicas, 1);
    // A Pod that is out of service does not come back.
    ns.patch_set("web", json!({ "spec": { "replicas": 2 } })).await;
    ns.wait_status("web", "looked at", |s| s.replicas == 2).await;
    remove_finalizers(&ns, &name(&pod)).await;
    let is_replaced =
        |pods: &[&Value]| pods.len() == 2 && pods.iter().all(|p| uid(p) != uid(&pod) && is_serving(p));
    let pods = ns.wait_pods("web", "another in its place", is_replaced).await;
    ns.wait_settled("web").await;
    for pod in &pods {
        remove_finalizers(&ns, &name(pod)).await;
    }
}

#[tokio::test]
async fn scale_up_cancels_prepared_deletion() {
    let ns = shared_cluster().await;
    let set = json!({ "replicas": 2, "template": template_with_hook("label"), "lifecycle": { "preDelete": label_hook(false) } });
    let before = ns.create_settled_set("web", set).await;
    ns.patch_set("web", json!({ "spec": { "replicas": 1 } })).await;
    let pod = wait_for_one_in_state(&ns, "PreparingDelete", true).await;
    ns.patch_set("web", json!({ "spec": { "replicas": 2 } })).await;
    ns.wait_settled("web").await;
    assert_eq!(ns.pod_uids("web").await, before);
    ns.patch_set("web", json!({ "spec": { "replicas": 1 } })).await;
    let second_victim = wait_for_one_in_state(&ns, "PreparingDelete", true).await;
    set_hook_label(&ns, &name(&second_victim), Value::Null).await;
    let pods = ns.wait_pods("web", "it is gone", |pods| pods.len() == 1).await;
    assert_ne!(uid(&pods[0]), uid(&second_victim));
    assert!(before.values().any(|uid| *uid == text(&pod["metadata"]["uid"])));
}

#[tokio::test]
async fn in_place_update_hook_holds_pod_before_and_after() {
    let ns = shared_cluster().await;
    let set = json!({ "replicas": 2, "template": template_with_hook("label"), "progressDeadlineSeconds": 600,
        "lifecycle": { "inPlaceUpdate": label_hook(true) } });
    ns.create_set("web", set).await;
    ns.wait_settled("web").await;
    let before = ns.pods_of("web").await;
    let monitor = ns.monitor_pods("web").await;
    ns.set_image("web", "kruise-test/term:2").await;
    for round in 1..=2 {
        let pod = wait_for_one_in_state(&ns, "PreparingUpdate", false).await;
        let (pod_name, old) = (name(&pod), container_status(&before[&name(&pod)], "app"));
        assert!(
            text(&condition(&pod, "KruisePodReady")["message"]).contains("preUpdateHook"),
            "{pod}"
        );
        assert_eq!(container_status(&pod, "app").id, old.id, "it is held");
        wait_waiting_message(&ns, "inPlaceUpdate").await;
        set_hook_label(&ns, &pod_name, Value::Null).await;
        let is_updated = |pod: &Value| {
            lifecycle_state(pod) == "Updated" && is_serving(pod) && runs_image(pod, "kruise-test/term:2")
        };
        ns.wait_pod(&pod_name, "updated, and ready again", is_updated)
            .await;
        // It does not count as serving before its hook is set again, so the other one waits.
        let update_counts = |s: &kruise_api::cloneset::CloneSetStatus| {
            (
                s.updated_replicas,
                s.updated_available_replicas,
                s.available_replicas,
            )
        };
        let status = ns
            .wait_status("web", "ready, not available", |s| s.ready_replicas == 2)
            .await;
        assert_eq!(update_counts(&status), (round, Some(round - 1), 1));
        set_hook_label(&ns, &pod_name, json!("yes")).await;
        ns.wait_pod(&pod_name, "in use", |pod| lifecycle_state(pod) == "Normal")
            .await;
    }
    ns.wait_settled("web").await;
    let after = ns.pods_of("web").await;
    assert_eq!(uids_by_name(after.values()), uids_by_name(before.values()));
    assert!(
        after
            .values()
            .all(|pod| container_status(pod, "app").restarts == 1),
        "{after:#?}"
    );
    assert!(monitor.observed().min_serving >= 1);
}

#[tokio::test]
async fn rollback_during_preparation_keeps_the_pod() {
    let ns = shared_cluster().await;
    let set = json!({ "replicas": 2, "template": template_with_hook("label"), "lifecycle": { "inPlaceUpdate": label_hook(true) } });
    ns.create_set("web", set).await;
    let first = ns.wait_settled("web").await;
    let before = ns.pods_of("web").await;
    ns.set_image("web", "kruise-test/term:2").await;
    wait_for_one_in_state(&ns, "PreparingUpdate", false).await;
    ns.set_image("web", "kruise-test/term:1").await;
    let rolled_back = ns.wait_settled("web").await;
    assert_eq!(rolled_back.update_revision, first.update_revision);
    let pods = ns
        .wait_pods("web", "all serve", |pods| {
            pods.len() == 2 && pods.iter().all(|p| is_serving(p))
        })
        .await;
    for pod in &pods {
        assert_eq!(
            container_status(pod, "app"),
            container_status(&before[&name(pod)], "app"),
            "nothing was restarted"
        );
        assert_eq!(lifecycle_state(pod), "Normal");
    }
}

#[tokio::test]
async fn pre_normal_hook_delays_availability_of_new_pods() {
    let ns = shared_cluster().await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 1 });
    let set = json!({ "replicas": 2, "progressDeadlineSeconds": 600, "updateStrategy": { "rollingUpdate": rolling },
        "lifecycle": { "preNormal": { "labelsHandler": { HOOK_NAME: "yes" } } } });
    ns.create_set("web", set).await;
    let all_preparing = |pods: &[&Value]| {
        pods.len() == 2
            && pods
                .iter()
                .all(|p| is_serving(p) && lifecycle_state(p) == "PreparingNormal")
    };
    let pods = ns.wait_pods("web", "ready, not in use", all_preparing).await;
    let status = ns
        .wait_status("web", "two ready", |s| s.ready_replicas == 2)
        .await;
    assert_eq!(status.available_replicas, 0);
    wait_waiting_message(&ns, "preNormal").await;
    for pod in &pods {
        set_hook_label(&ns, &name(pod), json!("yes")).await;
    }
    ns.wait_settled("web").await;
    let monitor = ns.monitor_pods("web").await;
    ns.set_image("web", "kruise-test/term:2").await;
    for old_left in [1, 0] {
        let is_new_pod = |pod: &Value| {
            is_serving(pod)
                && lifecycle_state(pod) == "PreparingNormal"
                && runs_image(pod, "kruise-test/term:2")
        };
        let has_waiting_pod = |pods: &[&Value]| pods.len() == 2 && pods.iter().any(|pod| is_new_pod(pod));
        let pods = ns.wait_pods("web", "a new one waits", has_waiting_pod).await;
        let old = pods
            .iter()
            .filter(|pod| runs_image(pod, "kruise-test/term:1"))
            .count();
        assert_eq!(old, old_left, "the other one is not replaced meanwhile");
        let new = name(pods.iter().find(|pod| is_new_pod(pod)).unwrap());
        set_hook_label(&ns, &new, json!("yes")).await;
        ns.wait_pod(&new, "in use", |pod| lifecycle_state(pod) == "Normal")
            .await;
    }
    ns.wait_settled("web").await;
    assert!(monitor.observed().min_serving >= 1);
}
