//! How a history ends: the world stops changing, something is asked for, and that is what there is in the end.

use std::collections::BTreeMap;

use jiff::ToSpan;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::cases::{condition, settle};
use super::histories::{container, pass, rolling, spec};
use super::whole::{no_claim_is_left, pods_are_whole};
use super::world::World;
use crate::cloneset::plan::limits::Limits;
use crate::cloneset::plan::{Act, Observed};
use kruise_api::cloneset::CloneSetStatus;
use kruise_api::keys;
use kruise_workload::in_place::{Options, Pod, Revision, spec as engine};
use kruise_workload::pods;

/// What is asked for in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// An update, in place or not.
    Updated,
    /// An update in place, and nothing else.
    InPlace,
    /// That Pods be made and deleted as they are; those that want another delete it.
    OnDelete,
    /// The same, for a while.
    Paused,
}

pub(super) fn end() -> impl Strategy<Value = End> {
    prop_oneof![4 => Just(End::Updated), 2 => Just(End::InPlace), 1 => Just(End::OnDelete), 1 => Just(End::Paused)]
}

/// The Pods of a time.
pub(super) struct Kept {
    /// The label of the revision that each of ours has which nobody wants to be deleted, by its UID.
    labels: BTreeMap<String, Option<String>>,
    /// How many were nobody's, and may become ours.
    strays: usize,
}

/// The world stops changing, and everybody does what is asked of them. Returns the Pods that there were when it began to.
pub(super) fn rest(world: &mut World, end: End) -> Kept {
    world.catch_up();
    ask(world, end);
    let at_first = kept(&world.observe());
    let mut last = Vec::new();
    for _ in 0..600 {
        let planned = pass(world);
        let names: Vec<String> = world.pods.keys().cloned().collect();
        let before = (world.pods.clone(), world.claims.clone());
        for name in &names {
            world.kubelet(name);
            world.daemon(name);
            world.hook(name);
        }
        let same = before == (world.pods.clone(), world.claims.clone());
        let quiet = same && planned.acts.is_empty() && planned.status.is_none();
        if quiet && planned.wake.is_none() {
            return at_first;
        }
        last = planned.acts;
        let soon = world.now.checked_add(3.seconds()).unwrap();
        // Nothing happens until then.
        let wake = planned.wake.filter(|wake| quiet && *wake > soon);
        world.now = wake.unwrap_or(soon);
    }
    panic!("no end in sight: {last:?}\n{:#}", world.set);
}

fn image(template: &Value) -> &Value {
    &template["spec"]["containers"][0]["image"]
}

/// Asks for what can be, and for `end`.
fn ask(world: &mut World, end: End) {
    world.refuse(false);
    if image(&world.set["spec"]["template"]) == "app:bad" {
        container(world, "image", json!("app:4"));
    }
    let bad = |data: &Value| image(&data["spec"]["template"]) == "app:bad";
    let bad: Vec<String> = world
        .revisions
        .iter()
        .filter(|r| bad(&r.data))
        .map(|r| r.name.clone())
        .collect();
    // Pods that keep an image which cannot be pulled are what a partition asks for, and never available.
    if !bad.is_empty() {
        rolling(world, json!({ "partition": 0 }));
    }
    rolling(world, json!({ "paused": end == End::Paused }));
    match end {
        // What cannot be done in place would wait for ever, as that policy asks for.
        End::Updated if policy(world) == "InPlaceOnly" => {
            rolling(world, json!({ "podUpdatePolicy": "InPlaceIfPossible" }));
        }
        // Pods beyond those asked for would help nobody, and are refused at admission.
        End::InPlace => rolling(world, json!({ "podUpdatePolicy": "InPlaceOnly", "maxSurge": 0 })),
        _ => {}
    }
    let type_ = if end == End::OnDelete {
        "OnDelete"
    } else {
        "RollingUpdate"
    };
    world.edit(&json!({ "updateStrategy": { "type": type_ } }));
    let spec = world.observe().set.spec.clone();
    let limits = Limits::of(&spec, &world.switches);
    if limits.unavailable == 0 && limits.surge == 0 {
        rolling(world, json!({ "maxUnavailable": 1 }));
    }
    if end != End::Updated {
        // Only another Pod mends these, and that is somebody's to ask for.
        for pod in &world.observe().pods {
            if bad.iter().any(|revision| pods::at(pod, revision)) {
                world.delete(&pod.name);
            }
        }
    }
}

fn policy(world: &World) -> &Value {
    &world.set["spec"]["updateStrategy"]["rollingUpdate"]["podUpdatePolicy"]
}

fn ours(pod: &Pod) -> bool {
    pod.active() && super::world::ours(pod) && pod.labels["app"] == "x"
}

/// Whether somebody asked for its deletion, or the update did.
fn marked(observed: &Observed, pod: &Pod) -> bool {
    let strategy = observed.set.spec.scale_strategy.iter();
    let mut named = strategy.flat_map(|s| &s.pods_to_delete);
    pod.labels.contains_key(keys::SPECIFIED_DELETE) || named.any(|name| *name == pod.name)
}

fn kept(observed: &Observed) -> Kept {
    let label = |pod: &Pod| pod.labels.get(keys::CONTROLLER_REVISION_HASH).cloned();
    let stays = |pod: &&Pod| {
        let preparing = pods::state(pod).as_str() == "PreparingDelete";
        ours(pod) && !preparing && !marked(observed, pod)
    };
    let all = || observed.pods.iter().map(AsRef::as_ref);
    let labels = all().filter(stays).map(|pod| (pod.uid.clone(), label(pod)));
    Kept {
        labels: labels.collect(),
        strays: all().filter(|pod| pod.controller.is_none()).count(),
    }
}

/// There is what was asked for.
pub(super) fn reached(world: &World, end: End, at_first: &Kept) {
    let observed = world.observe();
    let limits = Limits::of(&observed.set.spec, &observed.switches);
    let status = observed.set.status.clone().unwrap();
    let told = format!("{end:?}: {:#}\n{status:#?}", world.set["spec"]);
    match end {
        End::Paused => as_far_as_the_prepared_let(&observed, &limits, &status, &told),
        _ => {
            let ahead = match end {
                End::OnDelete => made_ahead(&observed, &limits, &status),
                _ => 0,
            };
            let there = i64::from(status.replicas);
            assert!(
                (limits.replicas..=limits.replicas + ahead).contains(&there),
                "{told}"
            );
            assert_eq!(status.available_replicas, status.replicas, "{told}");
            let marked = observed
                .pods
                .iter()
                .find(|pod| ours(pod) && marked(&observed, pod));
            assert_eq!(marked, None, "it was to be deleted: {told}");
        }
    }
    let missing = lacking(&observed, &limits, &status);
    match end {
        End::Updated => assert_eq!(missing, 0, "{told}"),
        End::InPlace => stuck(world, &observed, missing, &told),
        End::OnDelete | End::Paused => {}
    }
    if end != End::Updated {
        stayed(&observed, &limits, end, at_first, &told);
    }
    if observed.current == observed.update {
        assert_eq!(world.jobs, Vec::<String>::new(), "nothing is left to pull ahead");
    }
    pods_are_whole(world, end);
    no_claim_is_left(world, &observed);
}

/// How many Pods more than wanted may stay that were made ahead of those which somebody is to delete.
fn made_ahead(observed: &Observed, limits: &Limits, status: &CloneSetStatus) -> i64 {
    let missing = lacking(observed, limits, status);
    let too_old = i64::from(status.replicas - status.updated_replicas) - limits.partition;
    match (missing, too_old) {
        (1.., 1..) | (..=-1, ..=-1) => missing.abs().min(too_old.abs()).min(limits.surge),
        _ => 0,
    }
}

/// Pods that were prepared for an update may wait for it as long as it is paused, and for so long the limits may not
/// allow for more.
fn as_far_as_the_prepared_let(observed: &Observed, limits: &Limits, status: &CloneSetStatus, told: &str) {
    let (there, available) = (i64::from(status.replicas), i64::from(status.available_replicas));
    let ours = || observed.pods.iter().filter(|pod| ours(pod));
    let prepared = |pod: &&std::sync::Arc<Pod>| pods::state(pod).as_str() == "PreparingUpdate";
    let prepared = i64::try_from(ours().filter(prepared).count()).unwrap();
    assert_eq!(available, there - prepared, "{told}");
    let kept = available <= limits.replicas - limits.unavailable;
    let marked = ours().find(|pod| marked(observed, pod));
    assert!(kept || marked.is_none(), "{marked:?} was to be deleted: {told}");
    assert!(kept || there <= limits.replicas, "{told}");
    let none_made = prepared >= limits.scale_unavailable;
    assert!(none_made || there >= limits.replicas, "{told}");
}

/// How many Pods are still to be updated; below 0, to be taken back.
fn lacking(observed: &Observed, limits: &Limits, status: &CloneSetStatus) -> i64 {
    let missing = limits.replicas - limits.partition - i64::from(status.updated_replicas);
    // Without roll-backs, a partition that was raised finds more of them.
    let rollback = limits.rollback && observed.current != observed.update;
    if rollback { missing } else { missing.max(0) }
}

/// As many Pods as cannot be updated in place, or taken back, are missing at most, and the status says so.
fn stuck(world: &World, observed: &Observed, missing: i64, told: &str) {
    let to = match missing {
        0 => return,
        1.. => &observed.update,
        _ => &observed.current,
    };
    let on = |pod: &&std::sync::Arc<Pod>| ours(pod) && pods::at(pod, &observed.update) == (missing < 0);
    let cannot = observed
        .pods
        .iter()
        .filter(on)
        .filter(|pod| !in_place(observed, pod, to));
    let cannot = i64::try_from(cannot.count()).unwrap();
    assert!(
        missing.abs() <= cannot,
        "{missing} are missing, of which {cannot} cannot be: {told}"
    );
    for type_ in ["FailedUpdate", "Waiting"] {
        let said = condition(world, type_).map(|c| c.message).unwrap_or_default();
        assert!(said.contains("policy is InPlaceOnly"), "{type_}: {said:?}");
    }
}

/// Whether the engine can lead a Pod to a revision.
fn in_place(observed: &Observed, pod: &Pod, to: &str) -> bool {
    let options = Options {
        env_from_metadata: observed.switches.env_from_metadata,
        vertical: observed.switches.vertical,
        recreate_for_claims: false,
        grace_seconds: 0,
        stored: observed.switches.stored,
    };
    let find = |which: &dyn Fn(&str) -> bool| {
        let found = observed.revisions.iter().find(|r| which(&r.name));
        found.map(|r| Revision {
            name: &r.name,
            data: &r.data,
            claims: r.claims.as_deref(),
        })
    };
    let (old, new) = (find(&|name| pods::at(pod, name)), find(&|name| name == to));
    old.zip(new)
        .is_some_and(|(old, new)| engine::spec(&old, &new, &options).is_ok())
}

/// No Pod gave way to another one, unless that was there and became ours; and none was changed that was to stay as it
/// was.
fn stayed(observed: &Observed, limits: &Limits, end: End, at_first: &Kept, told: &str) {
    let (before, now) = (&at_first.labels, kept(observed).labels);
    let gone = before.keys().filter(|uid| !now.contains_key(*uid)).count();
    let wanted = usize::try_from(limits.replicas).unwrap();
    assert!(
        gone <= before.len().saturating_sub(wanted) + at_first.strays,
        "{gone} of {} Pods are gone: {told}",
        before.len()
    );
    let mut both = now
        .iter()
        .filter_map(|(uid, label)| Some((label, before.get(uid)?)));
    let changed = both.find(|(now, before)| now != before);
    assert!(
        end == End::InPlace || changed.is_none(),
        "{changed:?} was updated: {told}"
    );
}

fn counted(world: &World) -> [i64; 2] {
    let status = &world.set["status"];
    [&status["replicas"], &status["updatedReplicas"]].map(|n| n.as_i64().unwrap())
}

/// Somebody else is to delete the old ones, and may never do it.
#[test]
fn nothing_is_made_ahead_of_an_update_that_is_for_others() {
    let mut world = World::new(spec(false, false));
    rolling(&mut world, json!({ "maxSurge": 2, "maxUnavailable": 0 }));
    world.edit(&json!({ "updateStrategy": { "type": "OnDelete" } }));
    settle(&mut world);
    container(&mut world, "image", json!("app:2"));
    settle(&mut world);
    assert_eq!(counted(&world), [5, 0]);
    // A deletion that somebody asked for still gets its place beforehand.
    let name = world.pods.keys().next().unwrap().clone();
    world.edit(&json!({ "scaleStrategy": { "podsToDelete": [name] } }));
    let (_, plan) = world.reconcile();
    assert!(
        matches!(plan.acts[..], [Act::CreatePod { .. }]),
        "{:?}",
        plan.acts
    );
    settle(&mut world);
    assert!(!world.pods.contains_key(&name));
    assert_eq!(counted(&world), [5, 1]);
    // Fewer are fewer, also where some are new.
    for replicas in [4, 3] {
        world.edit(&json!({ "replicas": replicas, "scaleStrategy": { "podsToDelete": [] } }));
        rolling(&mut world, json!({ "maxSurge": 0, "maxUnavailable": 1 }));
        settle(&mut world);
        assert_eq!(counted(&world), [replicas, 1]);
    }
}

/// OpenKruise makes Pods ahead also where somebody else is to delete the old ones: whoever takes over keeps both.
#[test]
fn surge_pods_that_openkruise_made_under_on_delete_stay() {
    let mut world = World::new(spec(false, false));
    rolling(&mut world, json!({ "maxSurge": 2, "maxUnavailable": 0 }));
    settle(&mut world);
    let old: Vec<String> = world.pods.keys().cloned().collect();
    rolling(&mut world, json!({ "podUpdatePolicy": "ReCreate" }));
    container(&mut world, "image", json!("app:2"));
    let (_, plan) = world.reconcile();
    assert!(
        matches!(plan.acts[..], [Act::CreatePod { .. }, Act::CreatePod { .. }, ..]),
        "{:?}",
        plan.acts
    );
    world.edit(&json!({ "updateStrategy": { "type": "OnDelete" } }));
    settle(&mut world);
    assert_eq!(counted(&world), [7, 2]);
    assert!(old.iter().all(|name| world.pods.contains_key(name)));
    // Nothing takes the place of those that are deleted as long as there are more than are wanted.
    for (deleted, counts) in [(2, [5, 2]), (5, [5, 5])] {
        world.edit(&json!({ "scaleStrategy": { "podsToDelete": &old[..deleted] } }));
        settle(&mut world);
        let left = old.iter().filter(|name| world.pods.contains_key(*name));
        assert_eq!((counted(&world), left.count()), (counts, old.len() - deleted));
    }
}

/// Its name must not be forgotten while it is nobody's.
#[test]
fn a_pod_that_is_to_be_deleted_is_so_once_it_is_ours() {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    let container = json!({ "name": "app", "image": "app:1" });
    let stray = json!({
        "metadata": { "labels": { "app": "x" }, "ownerReferences": [] }, "spec": { "containers": [container] },
    });
    world.create("stray", stray);
    let there: Vec<String> = world.pods.keys().cloned().collect();
    world.edit(&json!({ "scaleStrategy": { "podsToDelete": ["stray"] } }));
    world.set["status"] = Value::Null;
    settle(&mut world);
    let left: Vec<&String> = world.pods.keys().collect();
    assert_eq!(
        left,
        there.iter().filter(|name| *name != "stray").collect::<Vec<_>>()
    );
    assert_eq!(world.set["spec"]["scaleStrategy"]["podsToDelete"], Value::Null);
}
