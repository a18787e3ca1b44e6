//! Hooks, each way there and back.

use serde_json::{Value, json};

use super::cases::{kubelets, reason, settle, waits};
use super::histories::{container, rolling, spec};
use super::world::{HOOK, World};
use kruise_api::keys;
use kruise_workload::in_place::Pod;

/// A CloneSet with hooks whose Pods were taken into use.
fn in_use(mark: bool) -> World {
    let mut world = World::new(spec(true, false));
    let hook = json!({ "markPodNotReady": mark });
    world.edit(&json!({ "replicas": 2, "lifecycle": { "preDelete": hook.clone(), "inPlaceUpdate": hook } }));
    settle(&mut world);
    assert_eq!(states(&world), ["PreparingNormal", "PreparingNormal"]);
    assert!(waits(&world).contains("hook preNormal"));
    hooks(&mut world);
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal"]);
    world
}

fn states(world: &World) -> Vec<String> {
    let mut states: Vec<String> = world
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

fn hooks(world: &mut World) {
    let names: Vec<String> = world.pods.keys().cloned().collect();
    names.iter().for_each(|name| world.hook(name));
}

/// The one Pod in this state.
fn in_state<'a>(world: &'a World, state: &str) -> &'a Value {
    let mut pods = world.pods.values();
    pods.find(|pod| pod["metadata"]["labels"][keys::LIFECYCLE_STATE] == state)
        .unwrap()
}

fn message(pod: &Value) -> String {
    Pod::of(pod)
        .condition(keys::KRUISE_POD_READY)
        .unwrap()
        .message
        .clone()
}

/// So many times the world comes to rest, and then the hooks have their turn.
fn rounds(world: &mut World, count: usize) {
    for _ in 0..count {
        settle(world);
        hooks(world);
    }
}

fn all_run(world: &World, image: &str) -> bool {
    let image_of = |pod: &Value| pod["spec"]["containers"][0]["image"] == image;
    world.pods.values().all(image_of)
}

#[test]
fn an_update_waits_for_its_hook_before_and_after() {
    let mut world = in_use(true);
    container(&mut world, "image", json!("app:2"));
    settle(&mut world);
    assert_eq!(
        states(&world),
        ["Normal", "PreparingUpdate"],
        "maxUnavailable is 1"
    );
    let pod = in_state(&world, "PreparingUpdate");
    assert_eq!(
        message(pod),
        r#"[{"userAgent":"Lifecycle","key":"preUpdateHook"}]"#
    );
    assert!(!Pod::of(pod).condition_ready());
    assert_eq!(pod["spec"]["containers"][0]["image"], "app:1");
    assert!(waits(&world).contains("hook inPlaceUpdate"));
    hooks(&mut world);
    settle(&mut world);
    let pod = in_state(&world, "Updated");
    assert_eq!(pod["spec"]["containers"][0]["image"], "app:2");
    assert_eq!(message(pod), "");
    for _ in 0..4 {
        hooks(&mut world);
        settle(&mut world);
    }
    assert_eq!(states(&world), ["Normal", "Normal"]);
    assert_eq!(reason(&world), "CloneSetAvailable");
}

#[test]
fn what_is_taken_back_while_it_is_prepared_goes_on_as_it_was() {
    for take_back in [
        json!({ "updateStrategy": { "rollingUpdate": { "partition": 2 } } }),
        json!({ "updateStrategy": { "type": "OnDelete" } }),
        json!({ "template": { "spec": { "containers": [
            { "name": "app", "image": "app:1", "resources": { "requests": { "cpu": "1" } }, "command": ["run"] },
        ]}}}),
    ] {
        let mut world = in_use(true);
        container(&mut world, "image", json!("app:2"));
        settle(&mut world);
        world.edit(&take_back);
        settle(&mut world);
        assert_eq!(states(&world), ["Normal", "Normal"], "{take_back}");
        assert!(
            world
                .pods
                .values()
                .all(|pod| message(pod).is_empty() && Pod::of(pod).condition_ready())
        );
    }
}

#[test]
fn what_is_taken_back_half_way_is_updated_back() {
    let mut world = in_use(false);
    container(&mut world, "image", json!("app:2"));
    settle(&mut world);
    hooks(&mut world);
    world.reconcile();
    assert_eq!(states(&world), ["Normal", "Updating"]);
    container(&mut world, "image", json!("app:1"));
    rounds(&mut world, 6);
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal"]);
    assert!(all_run(&world, "app:1"));
}

/// The hook has yet to take the Pod into use, and is to prepare it anew.
#[test]
fn what_is_taken_back_once_it_is_updated_goes_through_its_hook_again() {
    for mark in [false, true] {
        let mut world = in_use(mark);
        container(&mut world, "image", json!("app:2"));
        settle(&mut world);
        hooks(&mut world);
        settle(&mut world);
        assert_eq!(states(&world), ["Normal", "Updated"]);
        assert_eq!(in_state(&world, "Updated")["metadata"]["finalizers"], json!([]));
        container(&mut world, "image", json!("app:1"));
        settle(&mut world);
        let pod = in_state(&world, "PreparingUpdate");
        assert_eq!(
            pod["metadata"]["finalizers"],
            json!([HOOK]),
            "the hook has to let go of it"
        );
        assert_eq!(pod["spec"]["containers"][0]["image"], "app:2");
        assert_eq!(message(pod).contains("preUpdateHook"), mark);
        assert_eq!(Pod::of(pod).condition_ready(), !mark);
        rounds(&mut world, 2);
        settle(&mut world);
        assert_eq!(states(&world), ["Normal", "Normal"]);
        assert!(all_run(&world, "app:1"));
        assert!(world.pods.values().all(|pod| Pod::of(pod).condition_ready()));
    }
}

#[test]
fn a_partition_that_is_raised_takes_pods_back_through_their_hook() {
    let mut world = in_use(true);
    container(&mut world, "image", json!("app:2"));
    rounds(&mut world, 3);
    rolling(&mut world, json!({ "partition": 2 }));
    rounds(&mut world, 8);
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal"]);
    assert!(all_run(&world, "app:1"));
}

/// Its update is no longer possible where it is, and there is to be no other.
#[test]
fn what_was_prepared_for_an_update_that_cannot_be_goes_back_into_use() {
    let mut world = in_use(true);
    rolling(&mut world, json!({ "podUpdatePolicy": "InPlaceOnly" }));
    container(&mut world, "image", json!("app:2"));
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "PreparingUpdate"]);
    container(&mut world, "command", json!(["other"]));
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal"]);
    assert!(world.pods.values().all(|pod| Pod::of(pod).condition_ready()));
    let message = waits(&world);
    assert!(message.contains("stuck: "), "{message}");
}

#[test]
fn a_deletion_waits_for_its_hook_and_is_taken_back_when_pods_are_needed() {
    let mut world = in_use(false);
    let before: Vec<Value> = world
        .pods
        .values()
        .map(|p| p["metadata"]["uid"].clone())
        .collect();
    world.edit(&json!({ "replicas": 1 }));
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "PreparingDelete"]);
    world.edit(&json!({ "replicas": 2 }));
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal"]);
    let after: Vec<Value> = world
        .pods
        .values()
        .map(|p| p["metadata"]["uid"].clone())
        .collect();
    assert_eq!(before, after);
    world.edit(&json!({ "replicas": 1 }));
    settle(&mut world);
    hooks(&mut world);
    settle(&mut world);
    assert_eq!(states(&world), ["Normal"]);
}

/// Scaled in and out again in the middle of an update, or after it: nothing of it is left out.
#[test]
fn a_deletion_that_is_taken_back_leaves_an_update_where_it_was() {
    for updated in [false, true] {
        let mut world = in_use(false);
        world.edit(&json!({ "replicas": 1 }));
        settle(&mut world);
        hooks(&mut world);
        settle(&mut world);
        container(&mut world, "image", json!("app:2"));
        settle(&mut world);
        // One hook lets go of the Pod, and another holds it.
        let held = json!({ "preDelete": { "finalizersHandler": ["example.com/held"] } });
        world.edit(&json!({ "lifecycle": held }));
        for pod in world.pods.values_mut() {
            pod["metadata"]["finalizers"] = json!(["example.com/held"]);
        }
        world.reconcile();
        let before = if updated { "Updated" } else { "Updating" };
        if updated {
            settle(&mut world);
        }
        assert_eq!(states(&world), [before]);
        world.edit(&json!({ "replicas": 0 }));
        world.reconcile();
        let annotations = &in_state(&world, "PreparingDelete")["metadata"]["annotations"];
        assert_eq!(annotations[keys::LIFECYCLE_STATE_BEFORE_DELETE], before);
        // What is not over goes on meanwhile.
        settle(&mut world);
        assert_eq!(states(&world), ["PreparingDelete"]);
        world.edit(&json!({ "replicas": 1 }));
        settle(&mut world);
        let pod = in_state(&world, "Updated");
        let annotations = &pod["metadata"]["annotations"];
        assert!(annotations[keys::LIFECYCLE_STATE_BEFORE_DELETE].is_null());
        assert!(all_run(&world, "app:2"));
        rounds(&mut world, 2);
        settle(&mut world);
        assert_eq!(states(&world), ["Normal"]);
    }
}

#[test]
fn a_marked_deletion_takes_the_pod_out_of_its_services_for_good() {
    let mut world = in_use(true);
    world.edit(&json!({ "replicas": 1 }));
    settle(&mut world);
    let pod = in_state(&world, "PreparingDelete");
    assert_eq!(
        message(pod),
        r#"[{"userAgent":"Lifecycle","key":"preDeleteHook"}]"#
    );
    world.edit(&json!({ "replicas": 2 }));
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "PreparingDelete"]);
    for _ in 0..4 {
        hooks(&mut world);
        kubelets(&mut world);
        settle(&mut world);
    }
    assert_eq!(states(&world), ["Normal", "Normal"], "a new one takes its place");
}

#[test]
fn hooks_that_leave_the_spec_hold_nobody() {
    let mut world = in_use(true);
    container(&mut world, "image", json!("app:2"));
    settle(&mut world);
    world.edit(&json!({ "lifecycle": null }));
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal"]);
    assert!(
        world
            .pods
            .values()
            .all(|pod| pod["spec"]["containers"][0]["image"] == "app:2")
    );
    assert!(world.pods.values().all(|pod| message(pod).is_empty()));
}

/// Each hook by itself, while it holds a Pod.
#[test]
fn a_pod_that_a_hook_holds_goes_on_when_that_leaves_the_spec() {
    // It was prepared to be deleted, so it is.
    let mut world = in_use(true);
    world.edit(&json!({ "replicas": 1 }));
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "PreparingDelete"]);
    world.edit(&json!({ "lifecycle": { "preDelete": null } }));
    settle(&mut world);
    let going = in_state(&world, "PreparingDelete");
    assert!(!going["metadata"]["deletionTimestamp"].is_null(), "{going:#}");
    hooks(&mut world);
    assert_eq!(
        states(&world),
        ["Normal"],
        "its finalizer is for its user to take"
    );
    // It was updated, and is to be taken into use.
    let mut world = in_use(true);
    container(&mut world, "image", json!("app:2"));
    rounds(&mut world, 1);
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Updated"]);
    world.edit(&json!({ "lifecycle": { "inPlaceUpdate": null } }));
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal"]);
    assert!(all_run(&world, "app:2"));
    // It was made, and is to be taken into use.
    let mut world = in_use(true);
    world.edit(&json!({ "replicas": 3 }));
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal", "PreparingNormal"]);
    world.edit(&json!({ "lifecycle": { "preNormal": null } }));
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal", "Normal"]);
}

#[test]
fn a_template_that_is_taken_back_takes_back_pods_that_are_not_in_use_yet() {
    let mut world = in_use(true);
    rolling(&mut world, json!({ "partition": 0, "maxUnavailable": 3 }));
    container(&mut world, "image", json!("app:2"));
    world.edit(&json!({ "replicas": 3 }));
    world.reconcile();
    kubelets(&mut world);
    let new = in_state(&world, "PreparingNormal")["metadata"]["uid"].clone();
    assert_eq!(
        in_state(&world, "PreparingNormal")["spec"]["containers"][0]["image"],
        "app:2"
    );
    container(&mut world, "image", json!("app:1"));
    rounds(&mut world, 8);
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal", "Normal"]);
    assert!(all_run(&world, "app:1"));
    let there = world.pods.values().any(|pod| pod["metadata"]["uid"] == new);
    assert!(there, "the same Pod, taken back where it is");
}

/// Hooks that are older than the rules that refuse them.
#[test]
fn hook_items_that_no_pod_can_have_hold_no_pod() {
    let mut spec = spec(true, false);
    let hook = json!({ "finalizersHandler": ["plain", HOOK], "labelsHandler": { "a b": "c", "d": "-" } });
    spec["lifecycle"] = json!({ "preDelete": hook, "inPlaceUpdate": hook, "preNormal": hook });
    let mut world = World::new(spec);
    world.hooks = json!({ "preDelete": { "finalizersHandler": [HOOK] } });
    world.edit(&json!({ "replicas": 2 }));
    settle(&mut world);
    assert_eq!(
        states(&world),
        ["PreparingNormal", "PreparingNormal"],
        "the other item holds"
    );
    let told = waits(&world);
    assert!(told.contains(HOOK) && !told.contains("plain"), "{told}");
    hooks(&mut world);
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal"]);
    container(&mut world, "image", json!("app:2"));
    rounds(&mut world, 1);
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Updated"]);
    // The hook is put on again for the next update.
    container(&mut world, "image", json!("app:3"));
    world.reconcile();
    let finalizers = &in_state(&world, "PreparingUpdate")["metadata"]["finalizers"];
    assert_eq!(*finalizers, json!([HOOK]));
    rounds(&mut world, 8);
    settle(&mut world);
    assert_eq!(states(&world), ["Normal", "Normal"]);
    assert!(all_run(&world, "app:3"));

    let hook = json!({ "finalizersHandler": ["plain"] });
    let none = json!({ "preDelete": hook, "inPlaceUpdate": hook, "preNormal": hook });
    world.edit(&json!({ "lifecycle": null }));
    world.edit(&json!({ "lifecycle": none, "replicas": 4 }));
    container(&mut world, "image", json!("app:4"));
    settle(&mut world);
    assert_eq!(states(&world), ["Normal"; 4], "nobody is waited for");
    assert!(all_run(&world, "app:4"));
}
