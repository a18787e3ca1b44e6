//! What the condition says is waited for.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::cases::{condition, kubelets, settle};
use super::histories::{container, rolling, spec};
use super::world::{HOOK, World};
use crate::cloneset::plan::{Act, Event};
use kruise_api::keys;
use kruise_workload::testing::apply;

fn message(world: &World) -> String {
    condition(world, "Waiting").unwrap_or_default().message
}

/// The message has these words.
#[track_caller]
fn says(world: &mut World, words: &str) {
    world.reconcile();
    let message = message(world);
    assert!(message.contains(words), "{words:?} is not in {message:?}");
}

/// Two Pods that settled.
fn two(hooks: bool, claims: bool) -> World {
    let mut world = World::new(spec(hooks, claims));
    world.edit(&json!({ "replicas": 2 }));
    settle(&mut world);
    world
}

/// The names of the Pods, as a message lists them.
fn names(world: &World) -> String {
    world.pods.keys().cloned().collect::<Vec<_>>().join(", ")
}

fn each(world: &mut World, patch: &Value) {
    world.pods.values_mut().for_each(|pod| apply(pod, patch));
}

#[test]
fn a_state_that_somebody_made_up_is_named() {
    let mut world = two(false, false);
    let made_up = json!({ "metadata": { "labels": { (keys::LIFECYCLE_STATE): "Done" } } });
    each(&mut world, &made_up);
    let words = format!(
        "{} (label lifecycle.apps.kruise.io/state is \"Done\", not a lifecycle state)",
        names(&world)
    );
    says(&mut world, &words);
    container(&mut world, "image", json!("app:2"));
    says(&mut world, &words);
}

#[test]
fn an_image_that_cannot_be_pulled_is_named_and_what_it_holds_up() {
    let mut world = two(false, false);
    container(&mut world, "image", json!("app:bad"));
    world.reconcile();
    kubelets(&mut world);
    says(&mut world, "(container app: ImagePullBackOff of image app:bad)");
    says(&mut world, "(to be updated: maxUnavailable is 1)");
    let before = message(&world);
    for pod in world.pods.values_mut() {
        let state = &mut pod["status"]["containerStatuses"][0]["state"];
        if state["waiting"].is_object() {
            *state = json!({ "waiting": { "reason": "ErrImagePull" } });
        }
    }
    says(&mut world, &before);
}

#[test]
fn a_pod_without_a_node_says_what_the_scheduler_does() {
    let mut world = World::new(spec(false, true));
    world.edit(&json!({ "replicas": 2 }));
    world.reconcile();
    says(&mut world, "(a node)");
    let unschedulable = json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims." });
    each(
        &mut world,
        &json!({ "status": { "conditions": [unschedulable] } }),
    );
    let claim = json!({ "status": { "phase": "slow" } });
    world
        .claims
        .values_mut()
        .for_each(|c| json_patch::merge(c, &claim));
    let list = names(&world);
    says(
        &mut world,
        &format!(
            "{list} (a node: 0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.; \
             its claim of storage class slow is not bound)"
        ),
    );
    let long = json!({ "type": "PodScheduled", "message": "é".repeat(900) });
    each(&mut world, &json!({ "status": { "conditions": [long] } }));
    says(&mut world, "é…");
    assert!(message(&world).len() < 400);
}

#[test]
fn a_pod_that_runs_and_is_not_ready_says_what_it_lacks() {
    let mut world = two(false, false);
    let list = names(&world);
    let status = |status: Value| json!({ "status": status });
    let ready = json!({ "type": "Ready", "status": "False" });
    each(&mut world, &status(json!({ "conditions": [ready] })));
    let gate = json!({ "spec": { "readinessGates": [{ "conditionType": "example.com/db" }] } });
    each(&mut world, &gate);
    says(&mut world, &format!("{list} (readiness gate example.com/db)"));
    let shut = json!({ "type": "example.com/db", "status": "False", "message": "migrating" });
    each(&mut world, &status(json!({ "conditions": [shut] })));
    says(&mut world, "(readiness gate example.com/db: migrating)");
    let container = |state: Value| json!([{ "name": "app", "ready": false, "state": state }]);
    for (state, words) in [
        (
            json!({ "running": {} }),
            "(container app: it runs, but is not ready)",
        ),
        (
            json!({ "waiting": { "reason": "CrashLoopBackOff" } }),
            "(container app: CrashLoopBackOff)",
        ),
        (
            json!({ "waiting": { "reason": "ContainerCreating" } }),
            "(container app: ContainerCreating)",
        ),
        (
            json!({ "terminated": { "exitCode": 3, "reason": "Error", "message": "first\nno such table\n" } }),
            "(container app: it does not run (exit code 3: no such table))",
        ),
    ] {
        let statuses = container(state);
        for pod in world.pods.values_mut() {
            pod["status"]["containerStatuses"] = statuses.clone();
        }
        says(&mut world, words);
    }
    for pod in world.pods.values_mut() {
        pod["status"]["containerStatuses"] = json!([{ "name": "app", "ready": false,
            "state": { "waiting": { "reason": "CrashLoopBackOff", "message": "back-off 5m0s" } },
            "lastState": { "terminated": { "exitCode": 137, "reason": "OOMKilled" } } }]);
    }
    says(
        &mut world,
        "(container app: CrashLoopBackOff (exit code 137, OOMKilled))",
    );
    let initial = json!([{ "name": "setup", "state": { "waiting": { "reason": "ErrImageNeverPull" } } }]);
    world
        .pods
        .values_mut()
        .for_each(|pod| pod["status"]["initContainerStatuses"] = initial.clone());
    says(&mut world, "(container setup: ErrImageNeverPull)");
    let initial = json!([{ "name": "done", "state": { "terminated": { "exitCode": 0 } } }, { "name": "setup",
        "state": { "waiting": { "reason": "CrashLoopBackOff", "message": "back-off 40s restarting" } },
        "lastState": { "terminated": { "exitCode": 2, "message": "no route to db" } } }]);
    for pod in world.pods.values_mut() {
        pod["status"]["initContainerStatuses"] = initial.clone();
    }
    says(
        &mut world,
        "(container setup: CrashLoopBackOff (exit code 2: no route to db))",
    );
    for reason in ["CreateContainerConfigError", "RunContainerError"] {
        let waiting = json!({ "waiting": { "reason": reason, "message": "secret \"x\" not found\nmore" } });
        for pod in world.pods.values_mut() {
            pod["status"]["initContainerStatuses"] = json!([]);
            pod["status"]["containerStatuses"] = container(waiting.clone());
        }
        says(
            &mut world,
            &format!("(container app: {reason} (secret \"x\" not found))"),
        );
    }
}

#[test]
fn a_container_whose_turn_has_not_come_is_no_trouble() {
    let mut world = two(false, false);
    for pod in world.pods.values_mut() {
        let container = |name: &str, priority: i64| {
            let key = json!({ "configMapKeyRef": { "name": "b", "key": format!("p_{priority}") } });
            json!({ "name": name, "env": [{ "name": keys::ENV_CONTAINER_BARRIER, "valueFrom": key }] })
        };
        pod["spec"]["containers"] = json!([container("app", 0), container("db", 1)]);
        let waiting = json!({ "waiting": { "reason": "CreateContainerConfigError" } });
        pod["status"]["containerStatuses"] = json!([
            { "name": "app", "state": waiting }, { "name": "db", "state": { "running": {} } } ]);
        pod["status"]["conditions"] = json!([]);
    }
    says(&mut world, "(container db: it runs, but is not ready)");
    let reason = |world: &mut World, reason: &str| {
        for pod in world.pods.values_mut() {
            pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] = json!(reason);
        }
    };
    reason(&mut world, "InvalidImageName");
    says(&mut world, "(container app: InvalidImageName");
    reason(&mut world, "CreateContainerConfigError");
    for pod in world.pods.values_mut() {
        pod["status"]["containerStatuses"][1]["ready"] = json!(true);
    }
    says(&mut world, "(container app: CreateContainerConfigError)");
}

#[test]
fn who_holds_a_pod_unready_is_named() {
    let mut world = two(false, false);
    let held = json!({ "type": keys::KRUISE_POD_READY, "status": "False",
        "message": r#"[{"userAgent":"Someone","key":"reason"}]"# });
    let ready = json!({ "type": "Ready", "status": "False" });
    each(&mut world, &json!({ "status": { "conditions": [held, ready] } }));
    says(
        &mut world,
        "(readiness gate KruisePodReady, held by reason of Someone)",
    );
}

#[test]
fn hooks_are_named_with_what_they_wait_for() {
    let mut world = two(true, false);
    let list = names(&world);
    says(
        &mut world,
        &format!("{list} (hook preNormal: finalizer {HOOK} to be added)"),
    );
    let pods: Vec<String> = world.pods.keys().cloned().collect();
    pods.iter().for_each(|name| world.hook(name));
    settle(&mut world);
    world.edit(&json!({ "replicas": 0 }));
    world.reconcile();
    says(
        &mut world,
        &format!("hook preDelete: finalizer {HOOK} to be removed"),
    );
}

#[test]
fn the_limit_that_a_deletion_waits_for_is_named() {
    let mut world = two(false, false);
    rolling(&mut world, json!({ "maxUnavailable": "50%" }));
    for pod in world.pods.values_mut() {
        pod["metadata"]["labels"][keys::SPECIFIED_DELETE] = json!("true");
    }
    says(&mut world, "(to be deleted: maxUnavailable is 50%, 1 of 2 Pods)");
}

#[test]
fn time_that_has_to_pass_is_named() {
    let mut world = two(false, false);
    world.edit(&json!({ "minReadySeconds": 30 }));
    world.now = world.now.checked_add(100.seconds()).unwrap();
    settle(&mut world);
    rolling(
        &mut world,
        json!({ "inPlaceUpdateStrategy": { "gracePeriodSeconds": 10 } }),
    );
    container(&mut world, "image", json!("app:2"));
    world.reconcile();
    says(&mut world, "(grace period)");
    for _ in 0..4 {
        kubelets(&mut world);
        world.reconcile();
        world.now = world.now.checked_add(5.seconds()).unwrap();
    }
    kubelets(&mut world);
    world.reconcile();
    kubelets(&mut world);
    says(&mut world, "(to be ready for 30 s, minReadySeconds)");
}

#[test]
fn somebody_s_turn_is_named() {
    let mut world = two(false, true);
    world.edit(&json!({ "updateStrategy": { "type": "OnDelete" } }));
    container(&mut world, "image", json!("app:2"));
    let list = names(&world);
    says(
        &mut world,
        &format!("{list} (to be deleted: updateStrategy type is OnDelete)"),
    );

    // A Pod that goes and cannot yet, with a claim that the next one takes over.
    let name = world.pods.keys().next().unwrap().clone();
    let pod = world.pods.get_mut(&name).unwrap();
    pod["metadata"]["finalizers"] = json!(["example.com/slow"]);
    world.delete(&name);
    says(
        &mut world,
        &format!("{name} (to terminate, so that its PVCs can be reused)"),
    );
}

#[test]
fn a_pause_does_not_hide_what_is_wrong() {
    let mut world = two(false, false);
    rolling(&mut world, json!({ "paused": true }));
    container(&mut world, "image", json!("app:2"));
    settle(&mut world);
    assert_eq!(message(&world), "the update is paused");
    assert_eq!(condition(&world, "Waiting").unwrap().reason, "Paused");
    let status =
        json!([{ "name": "app", "ready": false, "state": { "waiting": { "reason": "CrashLoopBackOff" } } }]);
    let ready = json!({ "type": "Ready", "status": "False" });
    let pod = world.pods.values_mut().next().unwrap();
    pod["status"]["containerStatuses"] = status;
    apply(pod, &json!({ "status": { "conditions": [ready] } }));
    says(&mut world, "the update is paused; ");
    assert_eq!(condition(&world, "Waiting").unwrap().reason, "PodsNotReady");
    says(&mut world, "CrashLoopBackOff");
}

#[test]
fn many_reasons_are_counted_and_not_listed() {
    let mut world = World::new(spec(false, false));
    world.edit(&json!({ "replicas": 40 }));
    settle(&mut world);
    let ready = json!({ "type": "Ready", "status": "False" });
    for (at, pod) in world.pods.values_mut().enumerate() {
        let gate = json!({ "readinessGates": [{ "conditionType": format!("example.com/{at}") }] });
        apply(pod, &json!({ "spec": gate, "status": { "conditions": [ready] } }));
    }
    says(&mut world, "and others for 34 more reasons");
    assert!(message(&world).len() < 600, "{}", message(&world));
}

/// A Pod that was not made by us may lack the gate that takes it out of its Services while a container is restarted.
#[test]
fn an_environment_that_nobody_can_renew_is_not_begun_and_says_why() {
    let mut world = two(false, false);
    let origin = json!({ "fieldRef": { "fieldPath": "metadata.labels['v']" } });
    rolling(&mut world, json!({ "podUpdatePolicy": "InPlaceOnly" }));
    let label = |v: &str| json!({ "template": { "metadata": { "labels": { "v": v } } } });
    world.edit(&label("1"));
    settle(&mut world);
    let env = json!([{ "name": "V", "valueFrom": origin }]);
    // The Pods have read the label all along, and so did their revision.
    for revision in &mut world.revisions {
        revision.data["spec"]["template"]["spec"]["containers"][0]["env"] = env.clone();
    }
    container(&mut world, "env", env.clone());
    for pod in world.pods.values_mut() {
        pod["spec"]["containers"][0]["env"] = env.clone();
        pod["spec"]["readinessGates"] = json!([]);
    }
    settle(&mut world);
    world.edit(&label("2"));
    let patched = |world: &mut World| {
        let (_, plan) = world.reconcile();
        plan.acts.iter().any(|act| matches!(act, Act::PatchPod { .. }))
    };
    assert!(!patched(&mut world), "it is not begun");
    let list = names(&world);
    let words = "policy is InPlaceOnly, and the Pod lacks readiness gate InPlaceUpdateReady; delete the Pod";
    says(&mut world, &format!("stuck: {list} ({words}"));
    // With another image kubelet restarts it, and its environment is new.
    container(&mut world, "image", json!("app:2"));
    assert!(patched(&mut world));
}

/// The events of the next pass, and when it is to be looked at again, in seconds from now.
fn events(world: &mut World) -> (Vec<Event>, Option<i64>) {
    let plan = world.reconcile().1;
    let wake = plan
        .wake
        .map(|at| (at - world.now).total(jiff::Unit::Second).unwrap() as i64);
    (plan.events, wake)
}

#[test]
fn an_event_tells_once_of_a_wait_that_lasts() {
    let mut world = two(false, false);
    world.edit(&json!({ "updateStrategy": { "rollingUpdate": { "paused": true } } }));
    container(&mut world, "image", json!("app:2"));
    assert_eq!(events(&mut world), (vec![], Some(60)));
    let since = condition(&world, "Waiting").unwrap().last_update_time.unwrap().0;
    world.now += 59.seconds();
    assert_eq!(events(&mut world), (vec![], Some(1)));
    world.now += 1.seconds();
    let paused = Event {
        warning: false,
        reason: "Paused",
        message: "the update is paused".to_owned(),
        since: Some(since),
    };
    assert_eq!(events(&mut world), (vec![paused], None));
    world.now += 60.seconds();
    assert_eq!(
        events(&mut world),
        (vec![], None),
        "a new leader does not repeat it"
    );

    world.edit(&json!({ "updateStrategy": { "rollingUpdate": { "paused": false } } }));
    world.reconcile();
    assert_eq!(events(&mut world).0, [], "another wait is young");
    world.now += 60.seconds();
    let (told, _) = events(&mut world);
    assert_eq!(
        told.iter().map(|event| event.reason).collect::<Vec<_>>(),
        ["PodsNotReady"]
    );
    kubelets(&mut world);
    settle(&mut world);
    world.now += 60.seconds();
    assert_eq!(events(&mut world), (vec![], None));
}
