//! Long random histories: whatever happens, limits are kept, and in the end there is what was asked for.

use jiff::ToSpan;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::happenings::{happen, happening};
use super::rest::what_rests_needs_nothing;
use super::world::{BACKUP, HOOK, World, owned};
use super::{deadline, limits};
use crate::api::keys;
use crate::manager::cloneset::plan::limits::{Limits, on_delete};
use crate::manager::cloneset::plan::{Observed, Plan, Switches, plan};

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

/// One pass, with all that must hold of it. Returns what was planned.
pub(super) fn pass(world: &mut World) -> Plan {
    let there = |name: &&String| {
        let pod = world.pods.get(*name);
        pod.is_some_and(|pod| pod["metadata"]["deletionTimestamp"].is_null())
    };
    let unseen = world.unseen.iter().filter(there).cloned().collect();
    let (observed, planned) = world.reconcile();
    assert_eq!(
        planned,
        plan(&observed, world.now),
        "the same observation gives another plan"
    );
    limits::check(world, &observed, &planned, &unseen);
    deadline::kept(world, &observed, &planned);
    what_rests_needs_nothing(&observed, world.now);
    planned
}

/// The world stops changing, and everybody does what is asked of them.
fn rest(world: &mut World) {
    world.refuse(false);
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
    // What cannot be done in place waits for ever, as that policy asks for.
    if world.set["spec"]["updateStrategy"]["rollingUpdate"]["podUpdatePolicy"] == "InPlaceOnly" {
        rolling(world, json!({ "podUpdatePolicy": "InPlaceIfPossible" }));
    }
    world.edit(&json!({ "updateStrategy": { "type": "RollingUpdate" } }));
    let spec = world.observe().set.spec.clone();
    let limits = Limits::of(&spec, &world.switches);
    if limits.unavailable == 0 && limits.surge == 0 {
        rolling(world, json!({ "maxUnavailable": 1 }));
    }

    world.catch_up();
    let mut last = Vec::new();
    for _ in 0..600 {
        let planned = pass(world);
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
    // Without roll-backs, a partition that was raised finds more of them.
    let more = one || !limits.rollback;
    assert!(
        updated == wanted || (more && updated >= wanted),
        "{updated} of {wanted} are updated: {told}"
    );
    if one {
        assert_eq!(world.jobs, Vec::<String>::new(), "nothing is left to pull ahead");
    }
    let ours = |pod: &&Value| pod["metadata"]["ownerReferences"][0]["uid"] == "set";
    let made = |pod: &&Value| ours(pod) && pod["metadata"]["labels"][keys::CLONESET_INSTANCE_ID].is_string();
    if !spec.volume_claim_templates.is_empty() {
        for pod in world.pods.values().filter(made) {
            let claim = pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
                .as_str()
                .unwrap();
            assert!(
                owned(&world.claims[claim], "set"),
                "a claim would go with its Pod, whoever deletes that"
            );
        }
    }
    no_claim_is_left(world, &observed);
    for pod in world.pods.values().filter(made) {
        assert_eq!(
            pod["spec"]["ofOthers"], pod["metadata"]["uid"],
            "a field was lost"
        );
        assert_eq!(pod["metadata"]["labels"][keys::LIFECYCLE_STATE], "Normal");
    }
}

/// Every claim is a Pod's, unless claims are kept for later ones: of Pods that the CloneSet did not delete. Those that
/// are somebody else's, too, are that one's alone in the end.
fn no_claim_is_left(world: &World, observed: &Observed) {
    let shared = world.claims.values().filter(|claim| claim["shared"] == true);
    for claim in shared {
        assert!(owned(claim, BACKUP), "another's claim was taken away: {claim}");
    }
    let owners = |claim: &Value| claim["metadata"]["ownerReferences"].as_array().cloned();
    let theirs = |claim: &Value| owners(claim).unwrap().iter().all(|owner| owner["uid"] == BACKUP);
    let ours: Vec<&Value> = world.claims.values().filter(|claim| !theirs(claim)).collect();
    for claim in &ours {
        let id = &claim["metadata"]["labels"][keys::CLONESET_INSTANCE_ID];
        let id = id.as_str().unwrap();
        assert!(
            !world.spent.contains(id),
            "its Pod was deleted, and it was not: {claim}"
        );
    }
    let strategy = observed.set.spec.scale_strategy.as_ref();
    if strategy.is_some_and(|s| s.enable_pvc_reuse) {
        return;
    }
    for claim in ours {
        let id = claim["metadata"]["labels"][keys::CLONESET_INSTANCE_ID]
            .as_str()
            .unwrap();
        assert!(world.pods.contains_key(&format!("s-{id}")), "nobody has {claim}");
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

/// Features as they are when nobody says anything, or in any other way.
fn switches() -> impl Strategy<Value = Switches> {
    let usual = Switches::default();
    let any = any::<[bool; 8]>().prop_map(|on| Switches {
        short_hash: on[0],
        partition_rollback: on[1],
        preparing_update_as_update: on[2],
        recreate_for_claims: on[3],
        env_from_metadata: on[4],
        vertical: on[5],
        pre_download: on[6],
        exclude_preparing_delete: on[7],
    });
    prop_oneof![1 => Just(usual), 2 => any]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn limits_hold_and_every_history_ends(
        hooks in any::<bool>(),
        claims in any::<bool>(),
        two in any::<bool>(),
        deadline in prop::option::of(1_i32..60),
        switches in switches(),
        history in prop::collection::vec(happening(), 1..120),
    ) {
        let mut spec = spec(hooks, claims);
        spec["progressDeadlineSeconds"] = json!(deadline);
        if two {
            let side = json!({ "name": "side", "image": "side:1" });
            spec["template"]["spec"]["containers"].as_array_mut().unwrap().push(side);
        }
        let mut world = World::new(spec);
        world.switches = switches;
        for one in &history {
            happen(&mut world, one);
        }
        rest(&mut world);
        reached(&world);
    }
}
