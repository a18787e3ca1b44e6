//! Pods that were resized, or were to be, for an update that does not begin.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::cases::{condition, kubelets, settle, waits};
use super::faults::Fault;
use super::histories::{container, rolling, spec};
use super::world::World;
use crate::cloneset::plan::{Act, Concern, Failure, Plan, Subject, plan};
use kruise_api::keys;
use kruise_workload::in_place::{Pod, Target, resize};

/// CPU, and an image with it.
fn ask(world: &mut World, cpu: &str, image: &str) {
    let mut app = world.set["spec"]["template"]["spec"]["containers"][0].clone();
    (app["resources"], app["image"]) = (json!({ "requests": { "cpu": cpu } }), json!(image));
    world.edit(&json!({ "template": { "spec": { "containers": [app] } } }));
}

/// So many Pods, of which each is asked for other CPU, and those of one pass are kept from it in this way.
fn begun(pods: u8, fault: Fault) -> World {
    let mut world = World::new(spec(false, false));
    world.edit(&json!({ "replicas": pods }));
    settle(&mut world);
    (world.failing, world.fault) = (usize::MAX, fault);
    ask(&mut world, "2", "app:1");
    world.reconcile();
    assert!(world.pods.values().any(|pod| resize::announced(&Pod::of(pod))));
    world
}

/// One Pod that was resized, and no more.
fn resized() -> World {
    let mut world = begun(1, Fault::NearlyDone);
    assert_eq!(cpu(&world), "2");
    world.failing = 0;
    world
}

fn first(world: &World) -> &Value {
    world.pods.values().next().unwrap()
}

fn cpu(world: &World) -> &Value {
    &first(world)["spec"]["containers"][0]["resources"]["requests"]["cpu"]
}

fn later(world: &mut World) -> Plan {
    world.now = world.now.checked_add(6.seconds()).unwrap();
    world.reconcile().1
}

/// All comes to rest once what failed may be tried again; nothing is announced any more.
fn at_last(world: &mut World) {
    world.failing = 0;
    later(world);
    settle(world);
    assert!(!world.pods.values().any(|pod| resize::announced(&Pod::of(pod))));
    assert_eq!(
        world.set["status"]["availableReplicas"],
        world.set["spec"]["replicas"]
    );
}

/// Where the patches of a plan go.
fn targets(plan: &Plan) -> Vec<Target> {
    let patches = plan.acts.iter().flat_map(|act| match act {
        Act::PatchPod { writes, .. } => writes.as_slice(),
        _ => &[],
    });
    patches.map(|write| write.to).collect()
}

#[test]
fn a_size_is_taken_back_with_the_update_that_it_was_for() {
    for restart in [false, true] {
        let mut world = resized();
        if restart {
            world.restart();
        }
        ask(&mut world, "1", "app:1");
        at_last(&mut world);
        assert_eq!(cpu(&world), "1");
    }
    // So it is where the update may not go on for now, or is another one.
    let mut world = resized();
    rolling(&mut world, json!({ "paused": true }));
    at_last(&mut world);
    assert_eq!(cpu(&world), "1");
    rolling(&mut world, json!({ "paused": false }));
    settle(&mut world);
    assert_eq!(cpu(&world), "2");
    let mut world = resized();
    ask(&mut world, "1", "app:2");
    at_last(&mut world);
    assert_eq!(cpu(&world), "1");
    assert_eq!(world.set["status"]["updatedReadyReplicas"], 1);
}

#[test]
fn a_size_that_was_not_recorded_is_with_the_next_try() {
    let mut world = resized();
    let plan = later(&mut world);
    assert_eq!(
        targets(&plan),
        [Target::Resize, Target::Pod],
        "it is announced already"
    );
    settle(&mut world);
    assert_eq!(cpu(&world), "2");
    assert_eq!(world.set["status"]["updatedReadyReplicas"], 1);
}

/// The first of the two sizes was taken, the second refused; neither is wanted any more.
#[test]
fn what_is_announced_again_goes_back_to_the_size_before_both() {
    let mut world = resized();
    ask(&mut world, "9", "app:2");
    (world.failing, world.fault) = (1, Fault::NoResize);
    assert_eq!(targets(&later(&mut world))[0], Target::Status);
    assert_eq!(cpu(&world), "2");
    ask(&mut world, "1", "app:1");
    at_last(&mut world);
    assert_eq!(cpu(&world), "1");
}

/// A resize that was not done has changed nothing; one that was is taken back to what the revision says, for an annotation
/// is no word on sizes.
#[test]
fn sizes_that_others_gave_stay_unless_an_update_changed_them() {
    for (fault, cpu) in [(Fault::NoResize, "250m"), (Fault::NearlyDone, "1")] {
        let mut world = World::new(spec(false, false));
        world.edit(&json!({ "replicas": 1 }));
        settle(&mut world);
        let pod = world.pods.values_mut().next().unwrap();
        pod["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "250m", "memory": "1Gi" } });
        settle(&mut world);
        (world.failing, world.fault) = (1, fault);
        ask(&mut world, "2", "app:1");
        world.reconcile();
        ask(&mut world, "1", "app:1");
        at_last(&mut world);
        let requests = &first(&world)["spec"]["containers"][0]["resources"]["requests"];
        assert_eq!(*requests, json!({ "cpu": cpu, "memory": "1Gi" }));
    }
}

/// A quota may stand for days.
#[test]
fn a_size_that_is_refused_for_long_is_announced_once() {
    let mut world = begun(5, Fault::NoResize);
    for _ in 0..20 {
        later(&mut world);
        kubelets(&mut world);
    }
    let versions = |world: &World| -> Vec<Value> {
        let pods = world.pods.values();
        pods.map(|pod| pod["metadata"]["resourceVersion"].clone())
            .collect()
    };
    let before = versions(&world);
    for _ in 0..20 {
        later(&mut world);
    }
    assert_eq!(versions(&world), before, "nothing is written");
    ask(&mut world, "1", "app:1");
    let plan = later(&mut world);
    assert!(
        targets(&plan).iter().all(|to| *to == Target::Pod),
        "nothing was resized: {plan:?}"
    );
    at_last(&mut world);
}

/// One Pod that is asked for more CPU and another image, which an API server refuses that does not resize it.
fn refused(policy: &str, fault: Fault) -> World {
    let mut world = World::new(spec(false, false));
    world.edit(&json!({ "replicas": 1 }));
    rolling(&mut world, json!({ "podUpdatePolicy": policy }));
    settle(&mut world);
    (world.failing, world.fault) = (usize::MAX, fault);
    ask(&mut world, "9", "app:2");
    world.reconcile();
    world
}

fn image(world: &World) -> &Value {
    &first(world)["spec"]["containers"][0]["image"]
}

#[test]
fn a_refused_resize_replaces_the_pod_under_in_place_if_possible() {
    let mut world = refused("InPlaceIfPossible", Fault::Unresizable);
    let before = first(&world)["metadata"].clone();
    assert_eq!(before["labels"][keys::SPECIFIED_DELETE], "true");
    assert_eq!(image(&world), "app:1", "it goes as it is");
    settle(&mut world);
    assert_ne!(first(&world)["metadata"]["uid"], before["uid"]);
    assert_eq!((cpu(&world), image(&world)), (&json!("9"), &json!("app:2")));
}

/// Neither is there another Pod where a quota has no room for one.
#[test]
fn a_refused_resize_does_not_hold_back_the_image_of_the_same_edit() {
    for (policy, fault) in [
        ("InPlaceOnly", Fault::Unresizable),
        ("InPlaceOnly", Fault::NoResize),
        ("InPlaceIfPossible", Fault::NoResize),
    ] {
        let mut world = refused(policy, fault);
        let uid = first(&world)["metadata"]["uid"].clone();
        for _ in 0..20 {
            kubelets(&mut world);
            later(&mut world);
        }
        assert_eq!((cpu(&world), image(&world)), (&json!("1"), &json!("app:2")));
        let status = &world.set["status"];
        assert_eq!(
            [&status["updatedReadyReplicas"], &status["availableReplicas"]],
            [1, 1]
        );
        let waiting = condition(&world, "Waiting").unwrap();
        assert_eq!(waiting.reason, "ResizeRefused");
        assert!(waiting.message.contains("its resize was refused"), "{waiting:?}");
        // It is tried again, and with the next update.
        let mut next = world.clone();
        at_last(&mut world);
        assert_eq!(
            (cpu(&world), &first(&world)["metadata"]["uid"]),
            (&json!("9"), &uid)
        );
        assert_eq!(condition(&world, "Waiting"), None);
        next.failing = 0;
        next.failures.clear();
        ask(&mut next, "9", "app:3");
        settle(&mut next);
        assert_eq!((cpu(&next), image(&next)), (&json!("9"), &json!("app:3")));
    }
}

/// The same where it is refused after its update began: in its second batch, or after a grace period.
#[test]
fn a_resize_that_is_refused_later_does_not_hold_back_the_image_either() {
    for (policy, recreated) in [("InPlaceOnly", false), ("InPlaceIfPossible", true)] {
        let mut world = ordered();
        rolling(&mut world, json!({ "podUpdatePolicy": policy }));
        let uid = first(&world)["metadata"]["uid"].clone();
        ask_both(&mut world, ["2", "2"], ["1", "3"]);
        are(&world, [("2", "1"), ("1", "1")]);
        (world.failing, world.fault) = (1, Fault::Unresizable);
        settle(&mut world);
        later(&mut world);
        settle(&mut world);
        are(&world, [("2", "1"), ("2", "3")]);
        assert_eq!(first(&world)["metadata"]["uid"] != uid, recreated);
    }
    let mut world = World::new(spec(false, false));
    world.edit(&json!({ "replicas": 1 }));
    let grace = json!({ "gracePeriodSeconds": 60 });
    let only = json!({ "podUpdatePolicy": "InPlaceOnly", "inPlaceUpdateStrategy": grace });
    rolling(&mut world, only);
    settle(&mut world);
    ask(&mut world, "9", "app:2");
    settle(&mut world);
    assert_eq!(image(&world), "app:1");
    (world.failing, world.fault) = (usize::MAX, Fault::Unresizable);
    world.now = world.now.checked_add(60.seconds()).unwrap();
    for _ in 0..5 {
        kubelets(&mut world);
        later(&mut world);
    }
    assert_eq!((cpu(&world), image(&world)), (&json!("1"), &json!("app:2")));
    assert_eq!(world.set["status"]["availableReplicas"], 1);
}

/// Nothing else is asked for, so the Pod has its revision, and is no update that was not done.
#[test]
fn a_resize_alone_that_is_refused_is_no_update() {
    let mut world = World::new(spec(false, false));
    world.edit(&json!({ "replicas": 1 }));
    rolling(&mut world, json!({ "podUpdatePolicy": "InPlaceOnly" }));
    settle(&mut world);
    (world.failing, world.fault) = (usize::MAX, Fault::Unresizable);
    ask(&mut world, "9", "app:1");
    for _ in 0..3 {
        kubelets(&mut world);
        later(&mut world);
    }
    world.reconcile();
    assert_eq!(world.set["status"]["updatedReplicas"], 0);
    assert!(waits(&world).contains("failed: refused"), "{}", waits(&world));
}

/// While many Pods are refused their size, one of them is tried at a time, each in its turn.
#[test]
fn refused_sizes_are_tried_one_at_a_time() {
    let mut world = World::new(spec(false, false));
    rolling(
        &mut world,
        json!({ "podUpdatePolicy": "InPlaceOnly", "maxUnavailable": 5 }),
    );
    settle(&mut world);
    (world.failing, world.fault) = (usize::MAX, Fault::Unresizable);
    ask(&mut world, "9", "app:2");
    world.reconcile();
    kubelets(&mut world);
    world.reconcile();
    let mut observed = world.observe();
    let refused = Failure {
        of: Concern::Update,
        until: world.now,
        lasting: true,
        of_resize: true,
        answered: true,
        message: "refused".to_owned(),
    };
    observed.failures = [(Subject::Sizes, refused.clone())].into();
    for _ in 0..5 {
        let plan = plan(&observed, world.now);
        let resized = plan.acts.iter().filter_map(|act| match act {
            Act::PatchPod { uid, writes, .. } if writes.iter().any(|w| w.to == Target::Resize) => Some(uid),
            _ => None,
        });
        let resized: Vec<_> = resized.collect();
        assert_eq!(resized.len(), 1, "{plan:?}");
        let again = observed
            .failures
            .insert(Subject::Pod(resized[0].clone()), refused.clone());
        assert_eq!(again, None, "it was tried already");
    }
}

/// Kubelet says that it cannot give the Pod its size, or not yet, or that it fails to.
fn no_room(world: &mut World, reason: &str) {
    let now = world.now.to_string();
    let old = json!({ "requests": { "cpu": "1" } });
    for pod in world.pods.values_mut() {
        pod["status"]["containerStatuses"][0]["resources"] = old.clone();
        let kind = if reason == "Error" {
            "PodResizeInProgress"
        } else {
            "PodResizePending"
        };
        let pending = json!({ "type": kind, "status": "True", "reason": reason,
            "message": "Node didn't have enough resource: cpu", "lastTransitionTime": now });
        kruise_workload::testing::apply(pod, &json!({ "status": { "conditions": [pending] } }));
    }
}

#[test]
fn a_resize_that_kubelet_cannot_do_replaces_the_pod_under_in_place_if_possible() {
    for (reason, minutes) in [("Infeasible", 0), ("Deferred", 5), ("Error", 5)] {
        let mut world = World::new(spec(false, false));
        world.edit(&json!({ "replicas": 1 }));
        settle(&mut world);
        let uid = first(&world)["metadata"]["uid"].clone();
        ask(&mut world, "9", "app:2");
        world.reconcile();
        kubelets(&mut world);
        no_room(&mut world, reason);
        let end = world.now.checked_add(minutes.minutes()).unwrap();
        let mut wake = world.reconcile().1.wake;
        while world.now < end {
            world.now = wake.unwrap_or_else(|| panic!("{reason}: nobody looks again"));
            wake = world.reconcile().1.wake;
        }
        assert_eq!(world.now, end, "{reason}");
        settle(&mut world);
        assert_ne!(first(&world)["metadata"]["uid"], uid, "{reason}");
        assert_eq!(cpu(&world), "9");
    }
}

#[test]
fn a_resize_that_kubelet_cannot_do_holds_back_no_image_under_in_place_only() {
    for reason in ["Infeasible", "Deferred", "Error"] {
        let mut world = World::new(spec(false, false));
        rolling(&mut world, json!({ "podUpdatePolicy": "InPlaceOnly" }));
        settle(&mut world);
        ask(&mut world, "9", "app:2");
        let mut events = Vec::new();
        for _ in 0..50 {
            events.extend(world.reconcile().1.events);
            kubelets(&mut world);
            no_room(&mut world, reason);
        }
        let status = &world.set["status"];
        let (updated, available) = (&status["updatedReadyReplicas"], &status["availableReplicas"]);
        assert_eq!((updated, available), (&json!(5), &json!(5)), "{reason}");
        assert!(
            world
                .pods
                .values()
                .all(|p| p["spec"]["containers"][0]["image"] == "app:2")
        );
        let waiting = condition(&world, "Waiting").unwrap();
        assert_eq!(waiting.reason, "ResizePending");
        assert!(waiting.message.contains("didn't have enough"), "{waiting:?}");
        assert!(
            events.iter().any(|event| event.message.contains(reason)),
            "{events:?}"
        );
        // In the end there is room.
        for pod in world.pods.values_mut() {
            let conditions = pod["status"]["conditions"].as_array_mut().unwrap();
            conditions.retain(|c| !c["type"].as_str().unwrap().starts_with("PodResize"));
        }
        settle(&mut world);
        assert_eq!(condition(&world, "Waiting"), None);
    }
}

/// What kubelet says is about the size from before, until it has seen the new one.
#[test]
fn a_pending_resize_from_before_replaces_no_pod() {
    let mut world = World::new(spec(false, false));
    world.counts = true;
    world.edit(&json!({ "replicas": 1 }));
    rolling(&mut world, json!({ "podUpdatePolicy": "InPlaceOnly" }));
    settle(&mut world);
    ask(&mut world, "9", "app:1");
    world.reconcile();
    kubelets(&mut world);
    no_room(&mut world, "Infeasible");
    world.reconcile();
    world.reconcile();
    let uid = first(&world)["metadata"]["uid"].clone();
    rolling(&mut world, json!({ "podUpdatePolicy": "InPlaceIfPossible" }));
    ask(&mut world, "2", "app:1");
    let label = |world: &World| first(world)["metadata"]["labels"][keys::SPECIFIED_DELETE].clone();
    for _ in 0..3 {
        world.reconcile();
    }
    assert_eq!((cpu(&world), label(&world)), (&json!("2"), Value::Null));
    assert_eq!(first(&world)["metadata"]["uid"], uid);
    // It has seen it, and has no room for that either.
    kubelets(&mut world);
    no_room(&mut world, "Infeasible");
    world.reconcile();
    assert_eq!(label(&world), "true");
}

/// Somebody else resizes a Pod, which the CloneSet neither waits for nor answers.
#[test]
fn a_pending_resize_of_others_is_not_waited_for() {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    for pod in world.pods.values_mut() {
        pod["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "9" } });
    }
    no_room(&mut world, "Infeasible");
    let (_, plan) = world.reconcile();
    assert_eq!((plan.acts, plan.status), (Vec::new(), None));
}

/// Nothing happened to the Pod but a word, so no hook is asked and its state stays.
#[test]
fn what_was_not_resized_goes_through_no_state() {
    let mut world = begun(1, Fault::NoResize);
    let hook = json!({ "labelsHandler": { "example.com/hold": "yes" } });
    world.edit(&json!({ "lifecycle": { "inPlaceUpdate": hook } }));
    ask(&mut world, "1", "app:1");
    world.failing = 0;
    let before = first(&world)["metadata"]["labels"].clone();
    later(&mut world);
    assert_eq!(first(&world)["metadata"]["labels"], before);
    at_last(&mut world);
}

#[test]
fn what_goes_anyway_keeps_its_size() {
    let mut world = resized();
    let pod = world.pods.values_mut().next().unwrap();
    pod["metadata"]["labels"][keys::SPECIFIED_DELETE] = json!("true");
    let hook = json!({ "labelsHandler": { "app": "x" } });
    world.edit(&json!({ "lifecycle": { "preDelete": hook } }));
    ask(&mut world, "1", "app:1");
    for _ in 0..5 {
        let plan = later(&mut world);
        assert!(!targets(&plan).contains(&Target::Resize), "{plan:?}");
    }
}

/// Another implementation leaves alone what it does not know, and may have recorded the update since.
#[test]
fn what_is_recorded_after_all_is_not_taken_back() {
    let mut world = resized();
    let announced = first(&world)["metadata"]["annotations"][keys::IN_PLACE_UPDATE_RESIZING].clone();
    let grace = json!({ "gracePeriodSeconds": 60 });
    rolling(&mut world, json!({ "inPlaceUpdateStrategy": grace }));
    ask(&mut world, "2", "app:2");
    later(&mut world);
    let pod = world.pods.values_mut().next().unwrap();
    assert!(pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_GRACE].is_string());
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_RESIZING] = announced;
    assert_eq!(targets(&later(&mut world)), []);
    world.now = world.now.checked_add(60.seconds()).unwrap();
    at_last(&mut world);
    assert_eq!(cpu(&world), "2");
    assert_eq!(first(&world)["spec"]["containers"][0]["image"], "app:2");
}

/// One Pod of two containers, of which `side` is started when `app` is ready.
fn ordered() -> World {
    let mut spec = spec(false, false);
    spec["replicas"] = json!(1);
    let order = json!({ (keys::CONTAINER_LAUNCH_PRIORITY): keys::CONTAINER_LAUNCH_ORDERED });
    spec["template"]["metadata"]["annotations"] = order;
    spec["template"]["spec"]["containers"] = containers(["1", "1"], ["1", "1"]);
    let mut world = World::new(spec);
    settle(&mut world);
    world
}

/// Both, with these tags and CPU.
fn containers(tags: [&str; 2], cpu: [&str; 2]) -> Value {
    let one = |at: usize, name: &str| {
        let size = json!({ "requests": { "cpu": cpu[at] } });
        json!({ "name": name, "image": format!("{name}:{}", tags[at]), "resources": size })
    };
    json!([one(0, "app"), one(1, "side")])
}

fn ask_both(world: &mut World, tags: [&str; 2], cpu: [&str; 2]) {
    world.edit(&json!({ "template": { "spec": { "containers": containers(tags, cpu) } } }));
    later(world);
}

/// Tag and CPU of each container.
fn both(world: &World) -> [(String, String); 2] {
    [0, 1].map(|at| {
        let container = &first(world)["spec"]["containers"][at];
        let image = container["image"].as_str().unwrap();
        let cpu = container["resources"]["requests"]["cpu"].as_str().unwrap();
        (image.split(':').next_back().unwrap().to_owned(), cpu.to_owned())
    })
}

fn are(world: &World, [app, side]: [(&str, &str); 2]) {
    let owned = |(tag, cpu): (&str, &str)| (tag.to_owned(), cpu.to_owned());
    assert_eq!(both(world), [owned(app), owned(side)]);
}

/// A batch that is still to come has a size, too, and it is newer.
#[test]
fn a_size_of_the_next_batch_is_not_taken_back() {
    for (ready_before, wanted) in [(false, "2"), (true, "2"), (false, "3")] {
        let mut world = ordered();
        ask_both(&mut world, ["2", "1"], ["1", "2"]);
        are(&world, [("2", "1"), ("1", "1")]);
        (world.failing, world.fault) = (1, Fault::NearlyDone);
        ask_both(&mut world, ["2", "1"], ["1", "3"]);
        are(&world, [("2", "1"), ("1", "3")]);
        if ready_before {
            kubelets(&mut world);
        }
        ask_both(&mut world, [wanted, "1"], ["1", "2"]);
        at_last(&mut world);
        are(&world, [(wanted, "1"), ("1", "2")]);
    }
}

/// The batches of the update before go on.
#[test]
fn a_size_that_is_refused_in_mid_update_keeps_no_batch_from_its_turn() {
    for (fault, size) in [(Fault::NoResize, "1"), (Fault::NearlyDone, "3")] {
        let mut world = ordered();
        ask_both(&mut world, ["2", "2"], ["1", "1"]);
        are(&world, [("2", "1"), ("1", "1")]);
        (world.failing, world.fault) = (1, fault);
        ask_both(&mut world, ["2", "2"], ["3", "1"]);
        are(&world, [("2", size), ("1", "1")]);
        (world.failing, world.fault) = (usize::MAX, Fault::NoResize);
        for _ in 0..5 {
            kubelets(&mut world);
            later(&mut world);
        }
        are(&world, [("2", size), ("2", "1")]);
        at_last(&mut world);
        are(&world, [("2", "3"), ("2", "1")]);
    }
}

#[test]
fn sizes_go_back_together_whatever_comes_first_at_the_start() {
    let mut world = ordered();
    for cpu in [["1", "2"], ["2", "1"]] {
        (world.failing, world.fault) = (1, Fault::NearlyDone);
        ask_both(&mut world, ["1", "1"], cpu);
    }
    let before = both(&world);
    assert!(before.iter().any(|(_, cpu)| cpu == "2"), "{before:?}");
    ask_both(&mut world, ["1", "1"], ["1", "1"]);
    at_last(&mut world);
    are(&world, [("1", "1"), ("1", "1")]);
}

/// Each restarts a container, so they are out of use, or were made so, one after the other.
#[test]
fn sizes_that_restart_containers_are_taken_back_within_the_limit() {
    let mut world = World::new(spec(false, false));
    let policy = json!([{ "resourceName": "cpu", "restartPolicy": "RestartContainer" }]);
    container(&mut world, "resizePolicy", policy);
    settle(&mut world);
    // As if somebody else had opened their gates.
    for pod in world.pods.values_mut() {
        let two = json!({ "requests": { "cpu": "2" } });
        pod["spec"]["containers"][0]["resources"] = two.clone();
        pod["status"]["containerStatuses"][0]["resources"] = two;
        let revision = &pod["metadata"]["labels"][keys::CONTROLLER_REVISION_HASH];
        let old = json!({ "revision": revision, "containers": { "app": { "requests": { "cpu": "1" } } } });
        pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_RESIZING] = json!(old.to_string());
    }
    kubelets(&mut world);
    let plan = later(&mut world);
    assert_eq!(targets(&plan), [Target::Status, Target::Resize, Target::Pod]);
    at_last(&mut world);
    let sizes = world
        .pods
        .values()
        .map(|pod| &pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]);
    assert!(sizes.into_iter().all(|cpu| cpu == "1"));
}

#[test]
fn what_somebody_made_up_is_taken_off_and_nothing_else() {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    let revision = first(&world)["metadata"]["labels"][keys::CONTROLLER_REVISION_HASH].clone();
    let sizes =
        json!({ "app": { "requests": { "cpu": "many", "gpu": "1" } }, "none": { "limits": { "cpu": "1" } } });
    let impossible = json!({ "revision": revision, "containers": sizes });
    let two = json!({ "app": { "requests": { "cpu": "2" } } });
    let of_another = json!({ "revision": "s-another", "containers": two });
    for word in ["", "nonsense", &impossible.to_string(), &of_another.to_string()] {
        let pod = world.pods.values_mut().next().unwrap();
        pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_RESIZING] = json!(word);
        assert_eq!(targets(&later(&mut world)), [Target::Pod], "{word}");
        at_last(&mut world);
        assert_eq!(cpu(&world), "1");
    }
}
