//! Long random histories: whatever happens, limits are kept, and in the end there is what was asked for.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::ends::{end, reached, rest};
use super::happenings::{happen, happening};
use super::rest::what_rests_needs_nothing;
use super::world::{HOOK, World};
use super::{deadline, limits};
use crate::cloneset::plan::{Act, Plan, Switches, Why, plan};
use kruise_api::keys;
use kruise_workload::in_place::normal::Stored;

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
    let adopts = |act: &Act| matches!(act, Act::PatchPod { why: Why::Adopt, .. });
    assert!(
        observed
            .set
            .status
            .as_ref()
            .is_none_or(|status| status.observed_generation.is_none())
            || !planned.acts.iter().any(adopts),
        "a CloneSet with an observed generation adopts an orphan"
    );
    limits::check(world, &observed, &planned, &unseen);
    deadline::kept(world.now, &observed, &planned);
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
    let any = any::<[bool; 9]>().prop_map(|on| Switches {
        short_hash: on[0],
        partition_rollback: on[1],
        preparing_update_as_update: on[2],
        recreate_for_claims: on[3],
        env_from_metadata: on[4],
        vertical: on[5],
        pre_download: on[6],
        exclude_preparing_delete: on[7],
        stored: Stored::of(on[8]),
    });
    prop_oneof![1 => Just(usual), 2 => any]
}

/// What a CloneSet and its cluster are like.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Which items its hooks have, if it has any: a finalizer, a label.
    hooks: Option<(bool, bool)>,
    claims: bool,
    /// Whether there is a second container.
    two: bool,
    /// Whether the first one is to be ready before the second one is started.
    ordered: bool,
    /// Whether containers take their environment from a label, and an annotation.
    env: bool,
    /// Whether another CPU request starts the container anew.
    restarts: bool,
    /// Whether there is a daemon, where nothing needs one.
    daemons: bool,
    /// Whether generations of Pods are counted.
    counts: bool,
    /// Whether a plan has memory for one Pod alone.
    large: bool,
}

fn shape() -> impl Strategy<Value = Shape> {
    let items = prop_oneof![Just((true, false)), Just((false, true)), Just((true, true))];
    let of = |(hooks, on): (_, [bool; 8])| Shape {
        hooks,
        claims: on[0],
        two: on[1],
        ordered: on[2],
        env: on[3],
        restarts: on[4],
        daemons: on[5],
        counts: on[6],
        large: on[7],
    };
    (prop::option::of(items), any::<[bool; 8]>()).prop_map(of)
}

impl Shape {
    fn spec(self) -> Value {
        let mut spec = spec(self.hooks.is_some(), self.claims);
        if let Some((finalizer, label)) = self.hooks {
            let mut hook = json!({});
            if finalizer {
                hook["finalizersHandler"] = json!([HOOK]);
            }
            if label {
                hook["labelsHandler"] = json!({ HOOK: "yes" });
            }
            spec["lifecycle"] = json!({ "preDelete": hook, "inPlaceUpdate": hook, "preNormal": hook });
        }
        let from = |name: &str, field: &str| json!([{ "name": name, "valueFrom": { "fieldRef": { "fieldPath": format!("metadata.{field}") } } }]);
        let mut app = spec["template"]["spec"]["containers"][0].take();
        let cpu = json!({ "requests": { "cpu": "1" } });
        let mut side = json!({ "name": "side", "image": "side:1", "resources": cpu });
        if self.env {
            app["env"] = from("L", "labels['l']");
            side["env"] = from("N", "annotations['n']");
        }
        if self.restarts {
            app["resizePolicy"] = json!([{ "resourceName": "cpu", "restartPolicy": "RestartContainer" }]);
        }
        let mut containers = vec![app, side];
        containers.truncate(if self.two { 2 } else { 1 });
        spec["template"]["spec"]["containers"] = json!(containers);
        if self.ordered {
            let order = json!({ (keys::CONTAINER_LAUNCH_PRIORITY): keys::CONTAINER_LAUNCH_ORDERED });
            spec["template"]["metadata"]["annotations"] = order;
        }
        spec
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn limits_hold_and_every_history_ends(
        shape in shape(),
        deadline in prop::option::of(1_i32..60),
        switches in switches(),
        end in end(),
        history in prop::collection::vec(happening(), 1..120),
    ) {
        let mut spec = shape.spec();
        spec["progressDeadlineSeconds"] = json!(deadline);
        let mut world = World::new(spec);
        world.switches = switches;
        // An environment is not known to be new but by its word.
        world.daemons = shape.daemons || shape.env;
        world.counts = shape.counts;
        world.memory = if shape.large { usize::MAX } else { 0 };
        for one in &history {
            happen(&mut world, one);
        }
        let at_first = rest(&mut world, end);
        reached(&world, end, &at_first);
    }
}
