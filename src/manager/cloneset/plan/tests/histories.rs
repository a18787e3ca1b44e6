//! Long random histories: whatever happens, limits are kept, and in the end there is what was asked for.

use jiff::ToSpan;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::limits;
use super::world::{HOOK, World};
use crate::api::keys;
use crate::manager::cloneset::plan::limits::{Limits, on_delete};
use crate::manager::cloneset::plan::{Switches, plan};

/// What may happen between two passes. Numbers choose among what there is.
#[derive(Clone, Debug)]
enum Happening {
    /// Passes of the controller.
    Reconcile(u8),
    Seconds(u8),
    Kubelets(u8),
    Hooks(u8),
    Crash(u8),
    Deleted(u8),
    Specified(u8),
    ToDelete(u8),
    Failing(u8),
    Replicas(u8),
    Image(u8),
    Cpu(u8),
    Command(u8),
    Label(u8),
    Partition(u8),
    Unavailable(u8),
    Surge(u8),
    Paused(bool),
    Policy(u8),
    Grace(u8),
    MinReady(u8),
    ScaleUnavailable(u8),
    MarkNotReady(bool),
    PvcReuse(bool),
    Exclude(bool),
    OnDelete(bool),
}

fn happening() -> impl Strategy<Value = Happening> {
    use Happening::*;
    let n = any::<u8>;
    prop_oneof![
        12 => (1_u8..4).prop_map(Reconcile),
        4 => n().prop_map(Seconds),
        8 => n().prop_map(Kubelets),
        6 => n().prop_map(Hooks),
        1 => n().prop_map(Crash),
        1 => n().prop_map(Deleted),
        1 => n().prop_map(Specified),
        1 => n().prop_map(ToDelete),
        1 => n().prop_map(Failing),
        1 => n().prop_map(Replicas),
        3 => n().prop_map(Image),
        1 => n().prop_map(Cpu),
        1 => n().prop_map(Command),
        1 => n().prop_map(Label),
        2 => n().prop_map(Partition),
        1 => n().prop_map(Unavailable),
        1 => n().prop_map(Surge),
        1 => any::<bool>().prop_map(Paused),
        1 => n().prop_map(Policy),
        1 => n().prop_map(Grace),
        1 => n().prop_map(MinReady),
        1 => n().prop_map(ScaleUnavailable),
        1 => any::<bool>().prop_map(MarkNotReady),
        1 => any::<bool>().prop_map(PvcReuse),
        1 => any::<bool>().prop_map(Exclude),
        1 => any::<bool>().prop_map(OnDelete),
    ]
}

pub(super) fn spec(hooks: bool, claims: bool) -> Value {
    let hook = json!({ "finalizersHandler": [HOOK] });
    json!({
        "replicas": 5,
        "selector": { "matchLabels": { "app": "x" } },
        "template": {
            "metadata": { "labels": { "app": "x" } },
            "spec": { "containers": [{
                "name": "app", "image": "app:1",
                "resources": { "requests": { "cpu": "1" } }, "command": ["run"],
            }]},
        },
        "volumeClaimTemplates":
            if claims { json!([{ "metadata": { "name": "data" }, "spec": { "x": 1 } }]) } else { json!([]) },
        "scaleStrategy": { "enablePVCReuse": true },
        "updateStrategy": { "rollingUpdate": {
            "podUpdatePolicy": "InPlaceIfPossible", "partition": 0, "maxUnavailable": 1, "maxSurge": 0,
        }},
        "lifecycle": if hooks {
            json!({ "preDelete": hook.clone(), "inPlaceUpdate": hook.clone(), "preNormal": hook })
        } else {
            json!({})
        },
    })
}

pub(super) fn rolling(world: &mut World, patch: Value) {
    world.edit(&json!({ "updateStrategy": { "rollingUpdate": patch } }));
}

pub(super) fn container(world: &mut World, field: &str, value: Value) {
    let mut containers = world.set["spec"]["template"]["spec"]["containers"].clone();
    containers[0][field] = value;
    world.edit(&json!({ "template": { "spec": { "containers": containers } } }));
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

fn happen(world: &mut World, happening: &Happening) {
    match happening {
        Happening::Reconcile(times) => (0..*times).for_each(|_| pass(world)),
        Happening::Seconds(n) => world.now = world.now.checked_add(i64::from(*n % 40).seconds()).unwrap(),
        Happening::Kubelets(n) => some(world, *n).iter().for_each(|name| world.kubelet(name)),
        Happening::Hooks(n) => some(world, *n).iter().for_each(|name| world.hook(name)),
        Happening::Crash(n) => pick(world, *n).iter().for_each(|name| world.crash(name)),
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
        Happening::Failing(n) => world.failing = usize::from(*n % 4),
        other => edit(world, other),
    }
}

fn edit(world: &mut World, happening: &Happening) {
    match happening {
        Happening::Replicas(n) => world.edit(&json!({ "replicas": n % 9 })),
        Happening::Image(n) => {
            let tag = ["1", "2", "3", "bad"][usize::from(n % 4)];
            container(world, "image", json!(format!("app:{tag}")));
        }
        Happening::Cpu(n) => container(world, "resources", json!({ "requests": { "cpu": n % 2 + 1 } })),
        Happening::Command(n) => container(world, "command", json!([format!("run{}", n % 2)])),
        Happening::Label(n) => {
            world.edit(&json!({ "template": { "metadata": { "labels": { "l": (n % 2).to_string() } } } }))
        }
        Happening::Partition(n) => rolling(world, json!({ "partition": share(*n, 8) })),
        Happening::Unavailable(n) => rolling(world, json!({ "maxUnavailable": n % 3 })),
        Happening::Surge(n) => rolling(world, json!({ "maxSurge": n % 3 })),
        Happening::Paused(paused) => rolling(world, json!({ "paused": paused })),
        Happening::Policy(n) => {
            let policy = ["ReCreate", "InPlaceIfPossible", "InPlaceIfPossible"][usize::from(n % 3)];
            rolling(world, json!({ "podUpdatePolicy": policy }));
        }
        Happening::Grace(n) => {
            rolling(
                world,
                json!({ "inPlaceUpdateStrategy": { "gracePeriodSeconds": n % 2 * 10 } }),
            );
        }
        Happening::MinReady(n) => world.edit(&json!({ "minReadySeconds": n % 2 * 7 })),
        Happening::ScaleUnavailable(n) => {
            let most = if n % 3 == 0 { json!(null) } else { json!(n % 3) };
            world.edit(&json!({ "scaleStrategy": { "maxUnavailable": most } }));
        }
        Happening::MarkNotReady(mark) if world.set["spec"]["lifecycle"]["preDelete"].is_object() => {
            let hook = json!({ "markPodNotReady": mark });
            world.edit(&json!({ "lifecycle": { "preDelete": hook.clone(), "inPlaceUpdate": hook } }));
        }
        Happening::PvcReuse(reuse) => world.edit(&json!({ "scaleStrategy": { "enablePVCReuse": reuse } })),
        Happening::Exclude(exclude) => {
            world.edit(&json!({ "scaleStrategy": { "excludePreparingDelete": exclude } }));
        }
        Happening::OnDelete(on) => {
            let type_ = if *on { "OnDelete" } else { "RollingUpdate" };
            world.edit(&json!({ "updateStrategy": { "type": type_ } }));
        }
        _ => {}
    }
}

fn pass(world: &mut World) {
    let (observed, planned) = world.reconcile();
    assert_eq!(
        planned,
        plan(&observed, world.now),
        "the same observation gives another plan"
    );
    limits::check(world, &observed, &planned);
}

/// The world stops changing, and everybody does what is asked of them.
fn rest(world: &mut World) {
    if world.set["spec"]["template"]["spec"]["containers"][0]["image"] == "app:bad" {
        container(world, "image", json!("app:4"));
    }
    // Pods that keep an image which cannot be pulled are what a partition asks for, and never available.
    if world
        .revisions
        .iter()
        .any(|r| r.data["spec"]["template"]["spec"]["containers"][0]["image"] == "app:bad")
    {
        rolling(world, json!({ "partition": 0 }));
    }
    rolling(world, json!({ "paused": false }));
    world.edit(&json!({ "updateStrategy": { "type": "RollingUpdate" } }));
    let spec = world.observe().set.spec.clone();
    let limits = Limits::of(&spec, &Switches::default());
    if limits.unavailable == 0 && limits.surge == 0 {
        rolling(world, json!({ "maxUnavailable": 1 }));
    }

    world.failing = 0;
    let mut last = Vec::new();
    for _ in 0..600 {
        let (_, planned) = world.reconcile();
        let names: Vec<String> = world.pods.keys().cloned().collect();
        let before = (world.pods.clone(), world.claims.clone());
        for name in &names {
            world.kubelet(name);
            world.hook(name);
        }
        let quiet = planned.acts.is_empty() && planned.status.is_none() && planned.wake.is_none();
        if quiet && before == (world.pods.clone(), world.claims.clone()) {
            return;
        }
        last = planned.acts;
        world.now = world.now.checked_add(3.seconds()).unwrap();
    }
    panic!("no end in sight: {last:?}\n{:#}", world.set);
}

/// There is what was asked for.
fn reached(world: &World) {
    let observed = world.observe();
    let spec = &observed.set.spec;
    let limits = Limits::of(spec, &observed.switches);
    let status = observed.set.status.clone().unwrap();
    let told = format!("{:#}\n{status:#?}", world.set["spec"]);
    assert_eq!(i64::from(status.replicas), limits.replicas, "{told}");
    assert_eq!(i64::from(status.available_replicas), limits.replicas, "{told}");
    assert!(!on_delete(spec));
    let one = observed.current == observed.update;
    let updated = i64::from(status.updated_replicas);
    let wanted = limits.replicas - limits.partition;
    assert!(
        updated == wanted || (one && updated >= wanted),
        "{updated} of {wanted} are updated: {told}"
    );
    if !spec.volume_claim_templates.is_empty() {
        for pod in world.pods.values() {
            let claim = pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
                .as_str()
                .unwrap();
            assert!(world.claims.contains_key(claim), "a Pod lacks its claim");
        }
    }
    for pod in world.pods.values() {
        assert_eq!(
            pod["spec"]["ofOthers"], pod["metadata"]["uid"],
            "a field was lost"
        );
        assert_eq!(pod["metadata"]["labels"][keys::LIFECYCLE_STATE], "Normal");
    }
}

/// A quarter of the usual number of cases (`PROPTEST_CASES`): each is a long history.
fn config() -> ProptestConfig {
    let usual = ProptestConfig::default();
    ProptestConfig {
        cases: usual.cases / 4,
        max_shrink_iters: 2000,
        ..usual
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn limits_hold_and_every_history_ends(
        hooks in any::<bool>(),
        claims in any::<bool>(),
        history in prop::collection::vec(happening(), 1..120),
    ) {
        let mut world = World::new(spec(hooks, claims));
        for one in &history {
            happen(&mut world, one);
        }
        rest(&mut world);
        reached(&world);
    }
}
