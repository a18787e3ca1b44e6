//! Long random histories: whatever happens, limits are kept, and in the end there is what was asked for.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::ends::{end, reached, rest};
use super::happenings::{happen, happening};
use super::rest::what_rests_needs_nothing;
use super::world::{HOOK, World};
use super::{deadline, limits};
use crate::manager::cloneset::plan::{Plan, Switches, plan};

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
        end in end(),
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
        let at_first = rest(&mut world, end);
        reached(&world, end, &at_first);
    }
}
