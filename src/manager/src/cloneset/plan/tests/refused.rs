//! A template that is refused stops the update, and nothing else.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::cases::{condition, kubelets, reason, settle};
use super::histories::{container, rolling, spec};
use super::world::World;
use crate::cloneset::plan::{Act, Template};
use kruise_api::keys;

/// Three Pods that all run `app:1`, with all of them to be updated at once.
fn three() -> World {
    let mut world = World::new(spec(false, false));
    world.edit(&json!({ "replicas": 3 }));
    rolling(&mut world, json!({ "maxUnavailable": "100%" }));
    settle(&mut world);
    world
}

/// Somebody asks for what cannot be.
fn mistake(world: &mut World) {
    world.refuse(true);
    container(world, "image", json!("app:3"));
    assert!(matches!(world.template, Template::Refused(_)));
}

fn images(world: &World) -> Vec<&Value> {
    let image = |pod: &'_ Value| pod["spec"]["containers"][0]["image"].is_string();
    let pods = world.pods.values().filter(|pod| image(pod));
    pods.map(|pod| &pod["spec"]["containers"][0]["image"]).collect()
}

fn open(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let mut gate = conditions.filter(|c| c["type"] == keys::IN_PLACE_UPDATE_READY);
    gate.all(|c| c["status"] == "True")
}

#[test]
fn pods_in_mid_update_are_finished_and_counted() {
    let mut world = three();
    container(&mut world, "image", json!("app:2"));
    world.reconcile();
    assert!(world.pods.values().all(|pod| !open(pod)), "the update has begun");
    world.reconcile();
    assert_eq!(world.set["status"]["readyReplicas"], 0);
    let told = world.set["status"]["observedGeneration"].clone();
    mistake(&mut world);
    settle(&mut world);
    assert!(world.pods.values().all(open), "they serve again");
    assert_eq!(images(&world), ["app:2"; 3]);
    let status = world.set["status"].clone();
    assert_eq!(
        (&status["readyReplicas"], &status["availableReplicas"]),
        (&json!(3), &json!(3))
    );
    assert_eq!(
        status["observedGeneration"], told,
        "that template is not taken in"
    );
    assert_eq!(
        condition(&world, "FailedUpdate").unwrap().message,
        "no such field"
    );
    let waiting = condition(&world, "Waiting").unwrap();
    assert_eq!(waiting.message, "CloneSet cannot be updated: no such field");
    assert_eq!(
        (waiting.status.as_str(), waiting.reason.as_str()),
        ("True", "TemplateRefused")
    );

    world.refuse(false);
    settle(&mut world);
    assert_eq!(images(&world), ["app:3"; 3]);
    assert_eq!(condition(&world, "FailedUpdate"), None);
    assert_eq!(condition(&world, "Waiting"), None);
}

/// As in OpenKruise: it says what it said, and the deadline goes on.
#[test]
fn progressing_stays_as_it_was_until_the_template_is_taken() {
    for (under_way, said) in [(false, "CloneSetAvailable"), (true, "CloneSetUpdated")] {
        let mut world = three();
        world.edit(&json!({ "progressDeadlineSeconds": 60 }));
        settle(&mut world);
        if under_way {
            container(&mut world, "image", json!("app:2"));
            world.reconcile();
        }
        let before = condition(&world, "Progressing").unwrap();
        assert_eq!(before.reason, said);
        mistake(&mut world);
        settle(&mut world);
        world.now = world.now.checked_add(61.seconds()).unwrap();
        world.reconcile();
        assert_eq!(condition(&world, "Progressing"), Some(before));
        assert_eq!(
            condition(&world, "Waiting").unwrap().reason,
            "TemplateRefused",
            "what an alert looks at meanwhile"
        );

        world.refuse(false);
        world.reconcile();
        assert_eq!(reason(&world), "ProgressDeadlineExceeded");
    }
}

#[test]
fn what_is_not_known_yet_is_no_news_and_no_update() {
    let mut world = three();
    mistake(&mut world);
    settle(&mut world);
    let told = world.set["status"].clone();
    world.template = Template::Unknown;
    let (_, plan) = world.reconcile();
    assert_eq!((plan.acts, plan.events.len(), plan.status), (Vec::new(), 0, None));
    assert_eq!(world.set["status"], told, "what was told may hold yet");
    let name = world.pods.keys().next().unwrap().clone();
    world.delete(&name);
    settle(&mut world);
    assert_eq!(images(&world), ["app:1"; 3]);
}

#[test]
fn lost_pods_are_replaced_by_those_of_the_last_template_and_replicas_count() {
    let mut world = three();
    mistake(&mut world);
    let name = world.pods.keys().next().unwrap().clone();
    world.delete(&name);
    settle(&mut world);
    assert_eq!(images(&world), ["app:1"; 3]);
    for replicas in [5, 1] {
        world.edit(&json!({ "replicas": replicas }));
        settle(&mut world);
        assert_eq!(images(&world).len(), replicas);
    }
    assert_eq!(images(&world), ["app:1"]);
}

#[test]
fn a_rollout_that_has_begun_goes_no_further() {
    let mut world = three();
    rolling(&mut world, json!({ "maxUnavailable": 1 }));
    container(&mut world, "image", json!("app:2"));
    world.reconcile();
    mistake(&mut world);
    settle(&mut world);
    let mut there = images(&world);
    there.sort_by_key(|image| image.to_string());
    assert_eq!(there, ["app:1", "app:1", "app:2"]);
}

#[test]
fn without_any_revision_nothing_is_made_and_the_reason_is_told() {
    let mut world = World::new(spec(false, true));
    world.revisions.clear();
    world.refusing = true;
    world.edit(&json!({ "replicas": 1000 }));
    let (_, plan) = world.reconcile();
    assert_eq!((plan.acts.len(), plan.wake), (0, None));
    assert_eq!(plan.events.len(), 1);
    assert_eq!(
        condition(&world, "FailedUpdate").unwrap().message,
        "no such field"
    );
}

/// The mistake may be the selector's: what it does not pick is not let go, and not made again without end.
#[test]
fn a_selector_that_picks_none_of_ours_changes_nothing() {
    let mut world = three();
    world.refuse(true);
    world.edit(&json!({ "selector": { "matchLabels": { "app": "y" } }, "template": { "x": 1 } }));
    kubelets(&mut world);
    let (_, plan) = world.reconcile();
    assert_eq!(plan.acts, Vec::<Act>::new());
    assert_eq!(world.set["status"]["replicas"], 3);
}
