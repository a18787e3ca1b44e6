//! Hooks that hold Pods before deletion, before and after their update, and before their use, and let them go.

use std::ops::Deref;

use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::pods::{condition, container, deleting, identities, is, name, runs, serves, state, text, uid};
use crate::workloads::{Bed, Space, shared, template};

const HOOK: &str = "example.com/held";

/// A template whose Pods are held from the beginning, by a label or a finalizer.
fn held(by: &str) -> Value {
    let mut template = template("web");
    match by {
        "label" => template["metadata"]["labels"][HOOK] = json!("yes"),
        _ => template["metadata"]["finalizers"] = json!([HOOK]),
    }
    template
}

fn by_label(mark: bool) -> Value {
    json!({ "labelsHandler": { HOOK: "yes" }, "markPodNotReady": mark })
}

fn by_finalizer(mark: bool) -> Value {
    json!({ "finalizersHandler": [HOOK], "markPodNotReady": mark })
}

/// Puts the label onto a Pod, or takes it off.
async fn mark(space: &Space<impl Deref<Target = Bed>>, pod: &str, value: Value) {
    let patch = Patch::Merge(json!({ "metadata": { "labels": { HOOK: value } } }));
    space
        .pods()
        .patch(pod, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// Takes the finalizers off a Pod.
async fn let_go(space: &Space<impl Deref<Target = Bed>>, pod: &str) {
    let patch = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    space
        .pods()
        .patch(pod, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// Waits until one Pod is in that state, and served or not; its name.
async fn one_is(space: &Space<impl Deref<Target = Bed>>, wanted: &str, serving: bool) -> Value {
    let is_it = |pod: &Value| state(pod) == wanted && serves(pod) == serving;
    let what = format!("one is {wanted}, and serves: {serving}");
    let pods = space
        .until_pods("web", &what, |pods| pods.iter().any(|pod| is_it(pod)))
        .await;
    pods.into_iter().find(is_it).unwrap()
}

/// Waits until condition Waiting, or an event, tells which hook is waited for.
async fn progress_says(space: &Space<impl Deref<Target = Bed>>, words: &str) {
    let what = format!("it says {words:?}");
    space
        .status("web", &what, |status| {
            let mut conditions = status.conditions.iter();
            conditions.any(|c| c.type_ == "Waiting" && c.message.contains(words))
        })
        .await;
}

#[tokio::test]
async fn before_its_deletion_a_pod_leaves_its_services_and_waits_for_its_hook() {
    let space = shared().await;
    let set = json!({ "replicas": 2, "template": held("finalizer"), "progressDeadlineSeconds": 600,
        "lifecycle": { "preDelete": by_finalizer(true) } });
    space.set("web", set).await;
    space.settled("web").await;
    let before = space.pods_of("web").await;
    space.edit("web", json!({ "spec": { "replicas": 1 } })).await;
    let pod = one_is(&space, "PreparingDelete", false).await;
    let why = condition(&pod, "KruisePodReady");
    assert_eq!(why["status"], "False");
    assert!(text(&why["message"]).contains("preDeleteHook"), "{why}");
    assert!(is(&pod, "ContainersReady") && !deleting(&pod));
    assert_eq!(
        container(&pod, "app").id,
        container(&before[&name(&pod)], "app").id,
        "it runs"
    );
    progress_says(&space, "preDelete").await;
    let status = space
        .status("web", "one ready of two", |s| {
            (s.replicas, s.ready_replicas) == (2, 1)
        })
        .await;
    assert_eq!(status.available_replicas, 1);
    // One that serves no more does not come back.
    space.edit("web", json!({ "spec": { "replicas": 2 } })).await;
    space.status("web", "looked at", |s| s.replicas == 2).await;
    let_go(&space, &name(&pod)).await;
    let gone = |pods: &[&Value]| pods.len() == 2 && pods.iter().all(|p| uid(p) != uid(&pod) && serves(p));
    let pods = space.until_pods("web", "another in its place", gone).await;
    space.settled("web").await;
    for pod in &pods {
        let_go(&space, &name(pod)).await;
    }
}

#[tokio::test]
async fn a_pod_that_waits_for_its_deletion_and_is_needed_again_stays() {
    let space = shared().await;
    let set =
        json!({ "replicas": 2, "template": held("label"), "lifecycle": { "preDelete": by_label(false) } });
    let before = space.settled_set("web", set).await;
    space.edit("web", json!({ "spec": { "replicas": 1 } })).await;
    let pod = one_is(&space, "PreparingDelete", true).await;
    space.edit("web", json!({ "spec": { "replicas": 2 } })).await;
    space.settled("web").await;
    assert_eq!(space.identities("web").await, before);
    space.edit("web", json!({ "spec": { "replicas": 1 } })).await;
    let again = one_is(&space, "PreparingDelete", true).await;
    mark(&space, &name(&again), Value::Null).await;
    let pods = space
        .until_pods("web", "it is gone", |pods| pods.len() == 1)
        .await;
    assert_ne!(uid(&pods[0]), uid(&again));
    assert!(before.values().any(|uid| *uid == text(&pod["metadata"]["uid"])));
}

#[tokio::test]
async fn before_and_after_its_update_a_pod_waits_for_its_hook() {
    let space = shared().await;
    let set = json!({ "replicas": 2, "template": held("label"), "progressDeadlineSeconds": 600,
        "lifecycle": { "inPlaceUpdate": by_label(true) } });
    space.set("web", set).await;
    space.settled("web").await;
    let before = space.pods_of("web").await;
    let witness = space.witness("web").await;
    space.image("web", "kruise-test/term:2").await;
    for round in 1..=2 {
        let pod = one_is(&space, "PreparingUpdate", false).await;
        let (who, old) = (name(&pod), container(&before[&name(&pod)], "app"));
        assert!(
            text(&condition(&pod, "KruisePodReady")["message"]).contains("preUpdateHook"),
            "{pod}"
        );
        assert_eq!(container(&pod, "app").id, old.id, "it is held");
        progress_says(&space, "inPlaceUpdate").await;
        mark(&space, &who, Value::Null).await;
        let updated = |pod: &Value| state(pod) == "Updated" && serves(pod) && runs(pod, "kruise-test/term:2");
        space.until_pod(&who, "updated, and ready again", updated).await;
        // It is not in use before its hook has come back, so that the other one waits.
        let counts = |s: &kruise_api::cloneset::CloneSetStatus| {
            (
                s.updated_replicas,
                s.updated_available_replicas,
                s.available_replicas,
            )
        };
        let status = space
            .status("web", "ready, not available", |s| s.ready_replicas == 2)
            .await;
        assert_eq!(counts(&status), (round, Some(round - 1), 1));
        mark(&space, &who, json!("yes")).await;
        space
            .until_pod(&who, "in use", |pod| state(pod) == "Normal")
            .await;
    }
    space.settled("web").await;
    let after = space.pods_of("web").await;
    assert_eq!(identities(after.values()), identities(before.values()));
    assert!(
        after.values().all(|pod| container(pod, "app").restarts == 1),
        "{after:#?}"
    );
    assert!(witness.seen().least_serving >= 1);
}

#[tokio::test]
async fn a_pod_held_before_an_update_that_is_taken_back_goes_on_as_it_was() {
    let space = shared().await;
    let set =
        json!({ "replicas": 2, "template": held("label"), "lifecycle": { "inPlaceUpdate": by_label(true) } });
    space.set("web", set).await;
    let first = space.settled("web").await;
    let before = space.pods_of("web").await;
    space.image("web", "kruise-test/term:2").await;
    one_is(&space, "PreparingUpdate", false).await;
    space.image("web", "kruise-test/term:1").await;
    let back = space.settled("web").await;
    assert_eq!(back.update_revision, first.update_revision);
    let pods = space
        .until_pods("web", "all serve", |pods| {
            pods.len() == 2 && pods.iter().all(|p| serves(p))
        })
        .await;
    for pod in &pods {
        assert_eq!(
            container(pod, "app"),
            container(&before[&name(pod)], "app"),
            "nothing was restarted"
        );
        assert_eq!(state(pod), "Normal");
    }
}

#[tokio::test]
async fn a_new_pod_is_in_use_when_its_hook_has_come() {
    let space = shared().await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 1 });
    let set = json!({ "replicas": 2, "progressDeadlineSeconds": 600, "updateStrategy": { "rollingUpdate": rolling },
        "lifecycle": { "preNormal": { "labelsHandler": { HOOK: "yes" } } } });
    space.set("web", set).await;
    let all_ready =
        |pods: &[&Value]| pods.len() == 2 && pods.iter().all(|p| serves(p) && state(p) == "PreparingNormal");
    let pods = space.until_pods("web", "ready, not in use", all_ready).await;
    let status = space.status("web", "two ready", |s| s.ready_replicas == 2).await;
    assert_eq!(status.available_replicas, 0);
    progress_says(&space, "preNormal").await;
    for pod in &pods {
        mark(&space, &name(pod), json!("yes")).await;
    }
    space.settled("web").await;
    let witness = space.witness("web").await;
    space.image("web", "kruise-test/term:2").await;
    for left in [1, 0] {
        let is_new =
            |pod: &Value| serves(pod) && state(pod) == "PreparingNormal" && runs(pod, "kruise-test/term:2");
        let waits = |pods: &[&Value]| pods.len() == 2 && pods.iter().any(|pod| is_new(pod));
        let pods = space.until_pods("web", "a new one waits", waits).await;
        let old = pods.iter().filter(|pod| runs(pod, "kruise-test/term:1")).count();
        assert_eq!(old, left, "the other one is not replaced meanwhile");
        let new = name(pods.iter().find(|pod| is_new(pod)).unwrap());
        mark(&space, &new, json!("yes")).await;
        space
            .until_pod(&new, "in use", |pod| state(pod) == "Normal")
            .await;
    }
    space.settled("web").await;
    assert!(witness.seen().least_serving >= 1);
}
