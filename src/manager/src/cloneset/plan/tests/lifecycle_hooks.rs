//! Lifecycle hooks, in both directions.

use serde_json::{Value, json};

use super::fake_cluster::{FakeCluster, HOOK};
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::{progressing_reason, run_kubelets, settle, waiting_message};
use kruise_api::keys;
use kruise_workload::in_place::Pod;

/// A CloneSet with hooks whose Pods are Normal.
fn settled_with_hooks(mark: bool) -> FakeCluster {
    let mut cluster = FakeCluster::new(clone_set_spec(true, false));
    let hook = json!({ "markPodNotReady": mark });
    cluster
        .edit(&json!({ "replicas": 2, "lifecycle": { "preDelete": hook.clone(), "inPlaceUpdate": hook } }));
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["PreparingNormal", "PreparingNormal"]);
    assert!(waiting_message(&cluster).contains("hook preNormal"));
    run_hooks(&mut cluster);
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"]);
    cluster
}

fn lifecycle_states(cluster: &FakeCluster) -> Vec<String> {
    let mut states: Vec<String> = cluster
        .pods
        .values()
        .map(|pod| {
            pod["metadata"]["labels"][keys::LIFECYCLE_STATE]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    states.sort();
    states
}

fn run_hooks(cluster: &mut FakeCluster) {
    let names: Vec<String> = cluster.pods.keys().cloned().collect();
    names.iter().for_each(|name| cluster.run_hook_user(name));
}

/// The only Pod in this state.
fn pod_in_state<'a>(cluster: &'a FakeCluster, state: &str) -> &'a Value {
    let mut pods = cluster.pods.values();
    pods.find(|pod| pod["metadata"]["labels"][keys::LIFECYCLE_STATE] == state)
        .unwrap()
}

fn kruise_pod_ready_message(pod: &Value) -> String {
    Pod::from_json(pod)
        .condition(keys::KRUISE_POD_READY)
        .unwrap()
        .message
        .clone()
}

/// Settles the cluster and then runs the hooks, `count` times.
fn settle_and_run_hooks(cluster: &mut FakeCluster, count: usize) {
    for _ in 0..count {
        settle(cluster);
        run_hooks(cluster);
    }
}

fn all_run_image(cluster: &FakeCluster, image: &str) -> bool {
    let image_of = |pod: &Value| pod["spec"]["containers"][0]["image"] == image;
    cluster.pods.values().all(image_of)
}

#[test]
fn update_waits_for_its_hook_before_and_after() {
    let mut cluster = settled_with_hooks(true);
    edit_container(&mut cluster, "image", json!("app:2"));
    settle(&mut cluster);
    assert_eq!(
        lifecycle_states(&cluster),
        ["Normal", "PreparingUpdate"],
        "maxUnavailable is 1"
    );
    let pod = pod_in_state(&cluster, "PreparingUpdate");
    assert_eq!(
        kruise_pod_ready_message(pod),
        r#"[{"userAgent":"Lifecycle","key":"preUpdateHook"}]"#
    );
    assert!(!Pod::from_json(pod).condition_ready());
    assert_eq!(pod["spec"]["containers"][0]["image"], "app:1");
    assert!(waiting_message(&cluster).contains("hook inPlaceUpdate"));
    run_hooks(&mut cluster);
    settle(&mut cluster);
    let pod = pod_in_state(&cluster, "Updated");
    assert_eq!(pod["spec"]["containers"][0]["image"], "app:2");
    assert_eq!(kruise_pod_ready_message(pod), "");
    for _ in 0..4 {
        run_hooks(&mut cluster);
        settle(&mut cluster);
    }
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"]);
    assert_eq!(progressing_reason(&cluster), "CloneSetAvailable");
}

#[test]
fn rollback_during_preparation_keeps_the_pod() {
    for rollback in [
        json!({ "updateStrategy": { "rollingUpdate": { "partition": 2 } } }),
        json!({ "updateStrategy": { "type": "OnDelete" } }),
        json!({ "template": { "spec": { "containers": [
            { "name": "app", "image": "app:1", "resources": { "requests": { "cpu": "1" } }, "command": ["run"] },
        ]}}}),
    ] {
        let mut cluster = settled_with_hooks(true);
        edit_container(&mut cluster, "image", json!("app:2"));
        settle(&mut cluster);
        cluster.edit(&rollback);
        settle(&mut cluster);
        assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"], "{rollback}");
        assert!(
            cluster
                .pods
                .values()
                .all(|pod| kruise_pod_ready_message(pod).is_empty() && Pod::from_json(pod).condition_ready())
        );
    }
}

#[test]
fn rollback_during_update_updates_back() {
    let mut cluster = settled_with_hooks(false);
    edit_container(&mut cluster, "image", json!("app:2"));
    settle(&mut cluster);
    run_hooks(&mut cluster);
    cluster.reconcile();
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Updating"]);
    edit_container(&mut cluster, "image", json!("app:1"));
    settle_and_run_hooks(&mut cluster, 6);
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"]);
    assert!(all_run_image(&cluster, "app:1"));
}

/// The hook has not acknowledged the Pod yet, and must prepare it again.
#[test]
fn rollback_of_updated_pod_runs_the_hook_again() {
    for mark in [false, true] {
        let mut cluster = settled_with_hooks(mark);
        edit_container(&mut cluster, "image", json!("app:2"));
        settle(&mut cluster);
        run_hooks(&mut cluster);
        settle(&mut cluster);
        assert_eq!(lifecycle_states(&cluster), ["Normal", "Updated"]);
        assert_eq!(
            pod_in_state(&cluster, "Updated")["metadata"]["finalizers"],
            json!([])
        );
        edit_container(&mut cluster, "image", json!("app:1"));
        settle(&mut cluster);
        let pod = pod_in_state(&cluster, "PreparingUpdate");
        assert_eq!(
            pod["metadata"]["finalizers"],
            json!([HOOK]),
            "the hook must release it"
        );
        assert_eq!(pod["spec"]["containers"][0]["image"], "app:2");
        assert_eq!(kruise_pod_ready_message(pod).contains("preUpdateHook"), mark);
        assert_eq!(Pod::from_json(pod).condition_ready(), !mark);
        settle_and_run_hooks(&mut cluster, 2);
        settle(&mut cluster);
        assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"]);
        assert!(all_run_image(&cluster, "app:1"));
        assert!(
            cluster
                .pods
                .values()
                .all(|pod| Pod::from_json(pod).condition_ready())
        );
    }
}

#[test]
fn raised_partition_rolls_back_through_hooks() {
    let mut cluster = settled_with_hooks(true);
    edit_container(&mut cluster, "image", json!("app:2"));
    settle_and_run_hooks(&mut cluster, 3);
    edit_rolling_update(&mut cluster, json!({ "partition": 2 }));
    settle_and_run_hooks(&mut cluster, 8);
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"]);
    assert!(all_run_image(&cluster, "app:1"));
}

/// The in-place update is no longer possible, and the policy allows no other.
#[test]
fn impossible_update_cancels_preparation() {
    let mut cluster = settled_with_hooks(true);
    edit_rolling_update(&mut cluster, json!({ "podUpdatePolicy": "InPlaceOnly" }));
    edit_container(&mut cluster, "image", json!("app:2"));
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "PreparingUpdate"]);
    edit_container(&mut cluster, "command", json!(["other"]));
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"]);
    assert!(
        cluster
            .pods
            .values()
            .all(|pod| Pod::from_json(pod).condition_ready())
    );
    let message = waiting_message(&cluster);
    assert!(message.contains("stuck: "), "{message}");
}

#[test]
fn deletion_waits_for_hook_and_can_be_cancelled() {
    let mut cluster = settled_with_hooks(false);
    let before: Vec<Value> = cluster
        .pods
        .values()
        .map(|p| p["metadata"]["uid"].clone())
        .collect();
    cluster.edit(&json!({ "replicas": 1 }));
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "PreparingDelete"]);
    cluster.edit(&json!({ "replicas": 2 }));
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"]);
    let after: Vec<Value> = cluster
        .pods
        .values()
        .map(|p| p["metadata"]["uid"].clone())
        .collect();
    assert_eq!(before, after);
    cluster.edit(&json!({ "replicas": 1 }));
    settle(&mut cluster);
    run_hooks(&mut cluster);
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal"]);
}

/// Scaled down and up again during an update or after it: no step of the update is skipped.
#[test]
fn cancelled_deletion_resumes_the_update() {
    for updated in [false, true] {
        let mut cluster = settled_with_hooks(false);
        cluster.edit(&json!({ "replicas": 1 }));
        settle(&mut cluster);
        run_hooks(&mut cluster);
        settle(&mut cluster);
        edit_container(&mut cluster, "image", json!("app:2"));
        settle(&mut cluster);
        // One hook releases the Pod, and another blocks it.
        let pre_delete = json!({ "preDelete": { "finalizersHandler": ["example.com/held"] } });
        cluster.edit(&json!({ "lifecycle": pre_delete }));
        for pod in cluster.pods.values_mut() {
            pod["metadata"]["finalizers"] = json!(["example.com/held"]);
        }
        cluster.reconcile();
        let before = if updated { "Updated" } else { "Updating" };
        if updated {
            settle(&mut cluster);
        }
        assert_eq!(lifecycle_states(&cluster), [before]);
        cluster.edit(&json!({ "replicas": 0 }));
        cluster.reconcile();
        let annotations = &pod_in_state(&cluster, "PreparingDelete")["metadata"]["annotations"];
        assert_eq!(annotations[keys::LIFECYCLE_STATE_BEFORE_DELETE], before);
        // The incomplete update continues meanwhile.
        settle(&mut cluster);
        assert_eq!(lifecycle_states(&cluster), ["PreparingDelete"]);
        cluster.edit(&json!({ "replicas": 1 }));
        settle(&mut cluster);
        let pod = pod_in_state(&cluster, "Updated");
        let annotations = &pod["metadata"]["annotations"];
        assert!(annotations[keys::LIFECYCLE_STATE_BEFORE_DELETE].is_null());
        assert!(all_run_image(&cluster, "app:2"));
        settle_and_run_hooks(&mut cluster, 2);
        settle(&mut cluster);
        assert_eq!(lifecycle_states(&cluster), ["Normal"]);
    }
}

#[test]
fn mark_pod_not_ready_deletion_is_not_cancelled() {
    let mut cluster = settled_with_hooks(true);
    cluster.edit(&json!({ "replicas": 1 }));
    settle(&mut cluster);
    let pod = pod_in_state(&cluster, "PreparingDelete");
    assert_eq!(
        kruise_pod_ready_message(pod),
        r#"[{"userAgent":"Lifecycle","key":"preDeleteHook"}]"#
    );
    cluster.edit(&json!({ "replicas": 2 }));
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "PreparingDelete"]);
    for _ in 0..4 {
        run_hooks(&mut cluster);
        run_kubelets(&mut cluster);
        settle(&mut cluster);
    }
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"], "it is replaced");
}

#[test]
fn removed_hooks_block_no_pod() {
    let mut cluster = settled_with_hooks(true);
    edit_container(&mut cluster, "image", json!("app:2"));
    settle(&mut cluster);
    cluster.edit(&json!({ "lifecycle": null }));
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"]);
    assert!(
        cluster
            .pods
            .values()
            .all(|pod| pod["spec"]["containers"][0]["image"] == "app:2")
    );
    assert!(
        cluster
            .pods
            .values()
            .all(|pod| kruise_pod_ready_message(pod).is_empty())
    );
}

/// Removes each hook while it blocks a Pod.
#[test]
fn removed_hook_unblocks_its_pod() {
    // The Pod was prepared for deletion, so it is deleted.
    let mut cluster = settled_with_hooks(true);
    cluster.edit(&json!({ "replicas": 1 }));
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "PreparingDelete"]);
    cluster.edit(&json!({ "lifecycle": { "preDelete": null } }));
    settle(&mut cluster);
    let deleting = pod_in_state(&cluster, "PreparingDelete");
    assert!(
        !deleting["metadata"]["deletionTimestamp"].is_null(),
        "{deleting:#}"
    );
    run_hooks(&mut cluster);
    assert_eq!(
        lifecycle_states(&cluster),
        ["Normal"],
        "its user must remove its finalizer"
    );
    // The Pod was updated and must become Normal.
    let mut cluster = settled_with_hooks(true);
    edit_container(&mut cluster, "image", json!("app:2"));
    settle_and_run_hooks(&mut cluster, 1);
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Updated"]);
    cluster.edit(&json!({ "lifecycle": { "inPlaceUpdate": null } }));
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"]);
    assert!(all_run_image(&cluster, "app:2"));
    // The Pod was created and must become Normal.
    let mut cluster = settled_with_hooks(true);
    cluster.edit(&json!({ "replicas": 3 }));
    settle(&mut cluster);
    assert_eq!(
        lifecycle_states(&cluster),
        ["Normal", "Normal", "PreparingNormal"]
    );
    cluster.edit(&json!({ "lifecycle": { "preNormal": null } }));
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal", "Normal"]);
}

#[test]
fn template_rollback_updates_preparing_normal_pods() {
    let mut cluster = settled_with_hooks(true);
    edit_rolling_update(&mut cluster, json!({ "partition": 0, "maxUnavailable": 3 }));
    edit_container(&mut cluster, "image", json!("app:2"));
    cluster.edit(&json!({ "replicas": 3 }));
    cluster.reconcile();
    run_kubelets(&mut cluster);
    let new = pod_in_state(&cluster, "PreparingNormal")["metadata"]["uid"].clone();
    assert_eq!(
        pod_in_state(&cluster, "PreparingNormal")["spec"]["containers"][0]["image"],
        "app:2"
    );
    edit_container(&mut cluster, "image", json!("app:1"));
    settle_and_run_hooks(&mut cluster, 8);
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal", "Normal"]);
    assert!(all_run_image(&cluster, "app:1"));
    let exists = cluster.pods.values().any(|pod| pod["metadata"]["uid"] == new);
    assert!(exists, "the same Pod is rolled back in place");
}

/// Hooks from before the rules that refuse them.
#[test]
fn invalid_hook_items_block_no_pod() {
    let mut spec = clone_set_spec(true, false);
    let hook = json!({ "finalizersHandler": ["plain", HOOK], "labelsHandler": { "a b": "c", "d": "-" } });
    spec["lifecycle"] = json!({ "preDelete": hook, "inPlaceUpdate": hook, "preNormal": hook });
    let mut cluster = FakeCluster::new(spec);
    cluster.initial_hooks = json!({ "preDelete": { "finalizersHandler": [HOOK] } });
    cluster.edit(&json!({ "replicas": 2 }));
    settle(&mut cluster);
    assert_eq!(
        lifecycle_states(&cluster),
        ["PreparingNormal", "PreparingNormal"],
        "the other item blocks"
    );
    let message = waiting_message(&cluster);
    assert!(message.contains(HOOK) && !message.contains("plain"), "{message}");
    run_hooks(&mut cluster);
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"]);
    edit_container(&mut cluster, "image", json!("app:2"));
    settle_and_run_hooks(&mut cluster, 1);
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Updated"]);
    // The hook is added again for the next update.
    edit_container(&mut cluster, "image", json!("app:3"));
    cluster.reconcile();
    let finalizers = &pod_in_state(&cluster, "PreparingUpdate")["metadata"]["finalizers"];
    assert_eq!(*finalizers, json!([HOOK]));
    settle_and_run_hooks(&mut cluster, 8);
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal", "Normal"]);
    assert!(all_run_image(&cluster, "app:3"));

    let hook = json!({ "finalizersHandler": ["plain"] });
    let none = json!({ "preDelete": hook, "inPlaceUpdate": hook, "preNormal": hook });
    cluster.edit(&json!({ "lifecycle": null }));
    cluster.edit(&json!({ "lifecycle": none, "replicas": 4 }));
    edit_container(&mut cluster, "image", json!("app:4"));
    settle(&mut cluster);
    assert_eq!(lifecycle_states(&cluster), ["Normal"; 4], "no hook is waited for");
    assert!(all_run_image(&cluster, "app:4"));
}

/// An unavailable Pod takes the place of one that the limit blocks. Its preparation must not be cancelled in each second
/// reconcile, or the rollout would never continue.
#[test]
fn unavailable_pod_that_took_a_place_keeps_it_while_its_hook_prepares() {
    let mut cluster = settled_with_hooks(false);
    cluster.edit(&json!({ "replicas": 5, "lifecycle": { "preDelete": null } }));
    edit_rolling_update(
        &mut cluster,
        json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1, "maxSurge": null, "partition": 4 }),
    );
    settle_and_run_hooks(&mut cluster, 3);
    let names: Vec<String> = cluster.pods.keys().cloned().collect();
    let (broken, specified) = (&names[0], &names[1]);
    let conditions = &mut cluster.pods.get_mut(broken).unwrap()["status"]["conditions"];
    for condition in conditions.as_array_mut().unwrap() {
        if condition["type"] == "Ready" {
            condition["status"] = json!("False");
        }
    }
    cluster.pods.get_mut(specified).unwrap()["metadata"]["labels"][keys::SPECIFIED_DELETE] = json!("true");
    edit_container(&mut cluster, "image", json!("app:2"));
    let state = |cluster: &FakeCluster| {
        cluster.pods[broken]["metadata"]["labels"][keys::LIFECYCLE_STATE]
            .as_str()
            .unwrap()
            .to_owned()
    };
    for reconcile in 0..4 {
        let (_, plan) = cluster.reconcile();
        assert_eq!(state(&cluster), "PreparingUpdate", "{reconcile}: {plan:?}");
    }
    cluster.run_hook_user(broken);
    cluster.reconcile();
    assert_eq!(state(&cluster), "Updating");
}
