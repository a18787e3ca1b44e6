//! Pods that were resized, or were to be, for an update that does not begin.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::cases::{kubelets, settle};
use super::faults::Fault;
use super::histories::{container, rolling, spec};
use super::world::World;
use crate::api::keys;
use crate::in_place::{Pod, Target, resize};
use crate::manager::cloneset::plan::{Act, Plan};

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
    assert!(world.pods.values().any(|pod| resize::unrecorded(&Pod::of(pod))));
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
    assert!(!world.pods.values().any(|pod| resize::unrecorded(&Pod::of(pod))));
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
