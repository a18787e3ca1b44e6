//! What may happen to a CloneSet and its Pods, and who does it.

use jiff::ToSpan;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::faults::Fault;
use super::histories::{container, pass, rolling};
use super::world::{BACKUP, World, owner};
use kruise_api::keys;

/// What may happen between two passes. Numbers choose among what there is.
#[derive(Clone, Debug)]
pub(super) enum Happening {
    /// Passes of the controller.
    Reconcile(u8),
    Seconds(u8),
    Kubelets(u8),
    Hooks(u8),
    Daemons(u8),
    Crash(u8),
    /// A Pod is evicted, or ends by itself, and stays to be looked at.
    Ended(u8),
    Deleted(u8),
    Specified(u8),
    ToDelete(u8),
    Failing(u8),
    /// The manager dies, and another one begins.
    Restart,
    /// The CloneSet is deleted without what it owns, and made again.
    Orphaned,
    /// What is deleted takes its time from now on, or no more.
    Slow(bool),
    /// Somebody makes a Pod that the selector picks.
    Stray,
    /// Somebody else becomes an owner of a claim, or its controller.
    Shared(u8),
    /// Somebody else's Pod takes a name that one of ours was to have.
    Foreign(u8),
    /// Somebody makes objects that claim to be the CloneSet's, and are not.
    Forged(u8),
    /// A Pod is taken out of the CloneSet to be looked at, or given back.
    Apart(u8),
    /// A label that priority and scatter go by.
    Rank(u8),
    Priority(u8),
    Scatter(bool),
    /// The image of the second container, or those of both.
    Side(u8),
    Replicas(u8),
    /// What new claims are made of.
    Claims(u8),
    Image(u8),
    Cpu(u8),
    Command(u8),
    Label(u8),
    /// An annotation of the template.
    Note(u8),
    Partition(u8),
    Unavailable(u8),
    Surge(u8),
    Paused(bool),
    Policy(u8),
    Grace(u8),
    MinReady(u8),
    ScaleUnavailable(u8),
    MarkNotReady(bool),
    /// A hook is taken out of the spec, or put back.
    Hooked(u8),
    PvcReuse(bool),
    Exclude(bool),
    OnDelete(bool),
    /// The API server refuses new templates from now on, or no more.
    Refusing(bool),
}

/// How often something happens, and what it is; a number chooses among what there is.
type Kind = (u8, fn(u8) -> Happening);

const KINDS: [Kind; 44] = {
    use Happening::*;
    [
        (12, |n| Reconcile(n % 3 + 1)),
        (4, Seconds),
        (8, Kubelets),
        (6, Hooks),
        (5, Daemons),
        (1, Crash),
        (1, Ended),
        (1, Deleted),
        (1, Specified),
        (1, ToDelete),
        (2, Failing),
        (1, |_| Restart),
        (1, |_| Orphaned),
        (1, |n| Slow(odd(n))),
        (1, |_| Stray),
        (1, Shared),
        (1, Foreign),
        (1, Forged),
        (1, Apart),
        (1, Rank),
        (1, Priority),
        (1, |n| Scatter(odd(n))),
        (3, Side),
        (1, Replicas),
        (1, Claims),
        (3, Image),
        (2, Cpu),
        (1, Command),
        (1, Label),
        (1, Note),
        (2, Partition),
        (1, Unavailable),
        (1, Surge),
        (1, |n| Paused(odd(n))),
        (1, Policy),
        (1, Grace),
        (1, MinReady),
        (1, ScaleUnavailable),
        (1, |n| MarkNotReady(odd(n))),
        (1, Hooked),
        (1, |n| PvcReuse(odd(n))),
        (1, |n| Exclude(odd(n))),
        (1, |n| OnDelete(odd(n))),
        (2, |n| Refusing(odd(n))),
    ]
};

fn odd(n: u8) -> bool {
    n % 2 == 1
}

/// One strategy for them all: one of each would take longer to choose from than the history itself takes.
pub(super) fn happening() -> impl Strategy<Value = Happening> {
    let times: u8 = KINDS.iter().map(|(times, _)| times).sum();
    (0..times, any::<u8>()).prop_map(|(mut at, n)| {
        let mut kinds = KINDS.iter();
        let kind = kinds.find_map(|(times, kind)| {
            let here = at < *times;
            at = at.saturating_sub(*times);
            here.then_some(kind)
        });
        kind.unwrap()(n)
    })
}

fn pick(world: &World, n: u8) -> Option<String> {
    let names: Vec<&String> = world.pods.keys().collect();
    names
        .get(usize::from(n) % names.len().max(1))
        .map(|name| (*name).clone())
}

/// Some of the Pods, by the bits of `n`.
fn some(world: &World, n: u8) -> Vec<String> {
    let named = world.pods.keys().enumerate();
    named
        .filter(|(at, _)| n & (1 << (at % 8)) != 0)
        .map(|(_, name)| name.clone())
        .collect()
}

fn share(n: u8, replicas: u8) -> Value {
    let percent = ["0%", "25%", "50%", "99%", "100%"];
    match n % 3 {
        0 => json!(percent[usize::from(n / 3) % percent.len()]),
        _ => json!(n / 3 % (replicas + 1)),
    }
}

pub(super) fn happen(world: &mut World, happening: &Happening) {
    match happening {
        Happening::Reconcile(times) => (0..*times).for_each(|_| drop(pass(world))),
        Happening::Seconds(n) => {
            world.now = world.now.checked_add(i64::from(*n % 40).seconds()).unwrap();
            world.unseen.clear();
        }
        Happening::Kubelets(n) => some(world, *n).iter().for_each(|name| world.kubelet(name)),
        Happening::Hooks(n) => some(world, *n).iter().for_each(|name| world.hook(name)),
        Happening::Daemons(n) => some(world, *n).iter().for_each(|name| world.daemon(name)),
        Happening::Crash(n) => pick(world, *n).iter().for_each(|name| world.crash(name)),
        Happening::Ended(n) => {
            let phase = if odd(*n) { "Failed" } else { "Succeeded" };
            pick(world, n / 2).iter().for_each(|name| world.end(name, phase));
        }
        Happening::Deleted(n) => pick(world, *n).iter().for_each(|name| world.delete(name)),
        Happening::Specified(n) => {
            let name = pick(world, *n);
            let pod = name.and_then(|name| world.pods.get_mut(&name));
            pod.into_iter()
                .for_each(|pod| pod["metadata"]["labels"][keys::SPECIFIED_DELETE] = json!("true"));
        }
        Happening::ToDelete(n) => {
            let name = pick(world, *n);
            world.edit(&json!({ "scaleStrategy": { "podsToDelete": name.into_iter().collect::<Vec<_>>() } }));
        }
        Happening::Failing(n) => {
            let faults = [
                Fault::Refused,
                Fault::HalfDone,
                Fault::NearlyDone,
                Fault::NoResize,
                Fault::Unresizable,
                Fault::Lost,
            ];
            (world.failing, world.fault) = (usize::from(*n % 4), faults[usize::from(n / 4 % 6)]);
        }
        Happening::Restart => world.restart(),
        Happening::Orphaned => world.orphan(),
        other => others(world, other),
    }
}

/// What others do to Pods.
fn others(world: &mut World, happening: &Happening) {
    match happening {
        Happening::Slow(slow) => {
            world.slow = *slow;
            world.going.clear();
            world.collect();
        }
        Happening::Stray => {
            let name = format!("stray-{}", world.fresh());
            world.create(&name, stranger(json!([])));
        }
        Happening::Shared(n) => share_claim(world, *n),
        Happening::Foreign(n) => {
            let ids = world.claims.values();
            let ids = ids.filter_map(|c| c["metadata"]["labels"][keys::CLONESET_INSTANCE_ID].as_str());
            let names = ids
                .map(|id| format!("s-{id}"))
                .chain(world.left.pods.keys().cloned());
            let free: Vec<String> = names.filter(|name| !world.pods.contains_key(name)).collect();
            if let Some(name) = free.get(usize::from(*n) % free.len().max(1)) {
                world.create(name, stranger(json!([{ "uid": "another", "controller": true }])));
            }
        }
        Happening::Forged(n) => forge(world, *n),
        Happening::Apart(n) => label(world, *n, "app", |app| if app == "x" { "apart" } else { "x" }),
        Happening::Refusing(refusing) => world.refuse(*refusing),
        Happening::Rank(n) => label(world, *n, "rank", |rank| if rank == "1" { "2" } else { "1" }),
        other => edit(world, other),
    }
}

/// Somebody else owns one of the claims, too.
pub(super) fn share_claim(world: &mut World, n: u8) {
    let at = usize::from(n / 4) % world.claims.len().max(1);
    let Some(claim) = world.claims.values_mut().nth(at) else {
        return;
    };
    let owners = claim["metadata"]["ownerReferences"].as_array_mut().unwrap();
    owners.retain(|owner| owner["uid"] != BACKUP);
    let takes_over = n & 1 != 0;
    if takes_over {
        owners
            .iter_mut()
            .for_each(|owner| owner["controller"] = json!(false));
    }
    let at = if n & 2 != 0 { owners.len() } else { 0 };
    owners.insert(at, json!({ "uid": BACKUP, "controller": takes_over }));
    claim["shared"] = json!(true);
}

/// Somebody makes a Pod with a forged owner: in another namespace as it is, or beside ours with what the API server does not
/// resolve. There it has a name, a UID or labels of ours.
fn forge(world: &mut World, n: u8) {
    let forged = [
        owner(),
        json!({ "apiVersion": "apps.kruise.io/v9", "kind": "CloneSet", "name": "s", "uid": "set", "controller": true }),
        json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "t", "uid": "set", "controller": true }),
        json!({ "apiVersion": "v1", "kind": "Pod", "name": "s", "uid": "set", "controller": true }),
    ];
    let at = usize::from(n) % forged.len();
    let mut pod = pick(world, n / 8).map_or_else(|| stranger(json!([])), |name| world.pods[&name].clone());
    pod["metadata"]["ownerReferences"] = json!([forged[at]]);
    if odd(n / 4) || at == 0 {
        world.make_abroad(pod);
        return;
    }
    let name = format!("forged-{}", world.fresh());
    let mut pod = stranger(pod["metadata"]["ownerReferences"].clone());
    pod["metadata"]["annotations"][keys::POD_DELETION_COST] = json!("2147483647");
    world.create(&name, pod);
}

/// A Pod that is not made by us.
fn stranger(owners: Value) -> Value {
    let container = json!({ "name": "app", "image": "app:1" });
    json!({
        "metadata": { "name": "", "labels": { "app": "x" }, "ownerReferences": owners },
        "spec": { "containers": [container] },
    })
}

/// Changes a label of a Pod.
fn label(world: &mut World, n: u8, key: &str, to: fn(&str) -> &'static str) {
    let name = pick(world, n);
    if let Some(pod) = name.and_then(|name| world.pods.get_mut(&name)) {
        let label = &mut pod["metadata"]["labels"][key];
        *label = json!(to(label.as_str().unwrap_or_default()));
    }
}

/// A word, or none.
fn word(n: u8) -> Value {
    [json!("0"), json!("1"), json!(null)][usize::from(n % 3)].clone()
}

/// Changes the template's containers.
fn containers(world: &mut World, change: impl FnOnce(&mut Vec<Value>)) {
    let mut all = world.set["spec"]["template"]["spec"]["containers"].clone();
    change(all.as_array_mut().unwrap());
    world.edit(&json!({ "template": { "spec": { "containers": all } } }));
}

fn edit(world: &mut World, happening: &Happening) {
    match happening {
        Happening::Replicas(n) => world.edit(&json!({ "replicas": n % 9 })),
        Happening::Claims(n) => {
            let mut templates = world.set["spec"]["volumeClaimTemplates"].clone();
            if let Some(data) = templates.get_mut(0) {
                data["spec"]["x"] = json!(n % 2);
                world.edit(&json!({ "volumeClaimTemplates": templates }));
                // What was made of the others is not to be used.
                world.left.pods.clear();
            }
        }
        Happening::Image(n) => {
            let tag = ["1", "2", "3", "bad"][usize::from(n % 4)];
            container(world, "image", json!(format!("app:{tag}")));
        }
        Happening::Cpu(n) => containers(world, |all| {
            let at = usize::from(n / 2) % all.len();
            all[at]["resources"]["requests"]["cpu"] = json!(n % 2 + 1);
        }),
        Happening::Command(n) => container(world, "command", json!([format!("run{}", n % 2)])),
        Happening::Label(n) => metadata(world, json!({ "labels": { "l": word(*n) } })),
        Happening::Note(n) => metadata(world, json!({ "annotations": { "n": word(*n) } })),
        Happening::Side(n) => containers(world, |all| {
            if let [app, side] = all.as_mut_slice() {
                side["image"] = json!(format!("side:{}", n % 2));
                if n & 2 != 0 {
                    app["image"] = json!(format!("app:{}", n / 4 % 3 + 1));
                }
            }
        }),
        Happening::MinReady(n) => {
            let seconds = [0, 7, 40, 600][usize::from(n % 4)];
            world.edit(&json!({ "minReadySeconds": seconds }));
        }
        Happening::ScaleUnavailable(n) => {
            let most = if n % 3 == 0 { json!(null) } else { json!(n % 3) };
            world.edit(&json!({ "scaleStrategy": { "maxUnavailable": most } }));
        }
        Happening::PvcReuse(reuse) => world.edit(&json!({ "scaleStrategy": { "enablePVCReuse": reuse } })),
        Happening::Exclude(exclude) => {
            world.edit(&json!({ "scaleStrategy": { "excludePreparingDelete": exclude } }));
        }
        Happening::OnDelete(on) => {
            let type_ = if *on { "OnDelete" } else { "RollingUpdate" };
            world.edit(&json!({ "updateStrategy": { "type": type_ } }));
        }
        other => strategy(world, other),
    }
}

fn metadata(world: &mut World, metadata: Value) {
    world.edit(&json!({ "template": { "metadata": metadata } }));
}

/// Changes what holds Pods.
fn hooks(world: &mut World, happening: &Happening) {
    match happening {
        Happening::MarkNotReady(mark) => {
            for hook in ["preDelete", "inPlaceUpdate"] {
                if world.set["spec"]["lifecycle"][hook].is_object() {
                    world.edit(&json!({ "lifecycle": { hook: { "markPodNotReady": mark } } }));
                }
            }
        }
        Happening::Hooked(n) => {
            let hook = ["preDelete", "inPlaceUpdate", "preNormal"][usize::from(n / 2 % 3)];
            let asked = [&Value::Null, &world.hooks[hook]][usize::from(n % 2)].clone();
            world.edit(&json!({ "lifecycle": { hook: asked } }));
        }
        _ => {}
    }
}

/// Changes how Pods are updated.
fn strategy(world: &mut World, happening: &Happening) {
    match happening {
        Happening::Partition(n) => rolling(world, json!({ "partition": share(*n, 8) })),
        Happening::Unavailable(n) => rolling(world, json!({ "maxUnavailable": n % 3 })),
        Happening::Surge(n) => rolling(world, json!({ "maxSurge": n % 3 })),
        Happening::Paused(paused) => rolling(world, json!({ "paused": paused })),
        Happening::Policy(n) => {
            let policy = [
                "ReCreate",
                "InPlaceIfPossible",
                "InPlaceIfPossible",
                "InPlaceOnly",
            ][usize::from(n % 4)];
            rolling(world, json!({ "podUpdatePolicy": policy }));
        }
        Happening::Grace(n) => {
            rolling(
                world,
                json!({ "inPlaceUpdateStrategy": { "gracePeriodSeconds": n % 2 * 10 } }),
            );
        }
        Happening::Priority(n) => {
            let terms = json!([{ "weight": 5, "matchSelector": { "matchLabels": { "rank": "1" } } }]);
            let strategies = [
                json!({ "weightPriority": terms, "orderPriority": null }),
                json!({ "orderPriority": [{ "orderedKey": "rank" }], "weightPriority": null }),
                json!(null),
            ];
            rolling(
                world,
                json!({ "priorityStrategy": strategies[usize::from(n % 3)] }),
            );
        }
        Happening::Scatter(on) => {
            let terms = [json!({ "key": "rank", "value": "1" })];
            let terms = terms.iter().filter(|_| *on).collect::<Vec<_>>();
            rolling(world, json!({ "scatterStrategy": terms }));
        }
        other => hooks(world, other),
    }
}
