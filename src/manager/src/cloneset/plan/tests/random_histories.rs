//! Long random histories: limits are always kept, and in the end the requested state is reached.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::convergence::{assert_goal, converge, goal};
use super::events::{apply_event, cluster_event};
use super::fake_cluster::{FakeCluster, HOOK};
use super::idle_pods::count_settled_pods;
use super::{limits, progress_deadline};
use crate::cloneset::plan::{Action, Features, PatchReason, Plan, plan};
use kruise_api::keys;
use kruise_workload::in_place::normalize::TemplateStorage;

pub(super) fn clone_set_spec(hooks: bool, claims: bool) -> Value {
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

pub(super) fn edit_rolling_update(cluster: &mut FakeCluster, patch: Value) {
    cluster.edit(&json!({ "updateStrategy": { "rollingUpdate": patch } }));
}

pub(super) fn edit_container(cluster: &mut FakeCluster, field: &str, value: Value) {
    let mut containers = cluster.set["spec"]["template"]["spec"]["containers"].clone();
    containers[0][field] = value;
    cluster.edit(&json!({ "template": { "spec": { "containers": containers } } }));
}

/// One reconcile with all its checks. Returns the plan.
pub(super) fn checked_reconcile(cluster: &mut FakeCluster) -> Plan {
    let exists = |name: &&String| {
        let pod = cluster.pods.get(*name);
        pod.is_some_and(|pod| pod["metadata"]["deletionTimestamp"].is_null())
    };
    let unseen = cluster.not_yet_watched.iter().filter(exists).cloned().collect();
    let (observed, planned) = cluster.reconcile();
    assert_eq!(
        planned,
        plan(&observed, cluster.now),
        "the same observation gives another plan"
    );
    let adopts = |action: &Action| {
        matches!(
            action,
            Action::PatchPod {
                reason: PatchReason::Adopt,
                ..
            }
        )
    };
    assert!(
        observed
            .set
            .status
            .as_ref()
            .is_none_or(|status| status.observed_generation.is_none())
            || !planned.actions.iter().any(adopts),
        "a CloneSet with an observed generation adopts an orphan"
    );
    limits::check_limits(cluster, &observed, &planned, &unseen);
    progress_deadline::assert_progressing(cluster.now, &observed, &planned);
    count_settled_pods(&observed, cluster.now);
    planned
}

/// A quarter of the usual number of cases (`PROPTEST_CASES`): each one is a long history.
fn config() -> ProptestConfig {
    let usual = ProptestConfig::default();
    ProptestConfig {
        cases: usual.cases / 4,
        max_shrink_iters: 2000,
        ..usual
    }
}

/// Features with defaults, or random ones.
fn any_features() -> impl Strategy<Value = Features> {
    let defaults = Features::default();
    let any = any::<[bool; 9]>().prop_map(|on| Features {
        short_hash: on[0],
        partition_rollback: on[1],
        preparing_update_as_update: on[2],
        recreate_for_claims: on[3],
        env_from_metadata: on[4],
        vertical: on[5],
        pre_download: on[6],
        exclude_preparing_delete: on[7],
        template_storage: TemplateStorage::from_gate(on[8]),
    });
    prop_oneof![1 => Just(defaults), 2 => any]
}

/// Properties of a CloneSet and its cluster.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Whether its hooks have a finalizer and a label, if it has hooks.
    hooks: Option<(bool, bool)>,
    claims: bool,
    /// Whether there is a second container.
    two_containers: bool,
    /// Whether the first container must be ready before the second one starts.
    ordered: bool,
    /// Whether containers read a label and an annotation as environment.
    env: bool,
    /// Whether a change of the CPU request restarts the container.
    restarts: bool,
    /// Whether there is a daemon even if nothing needs one.
    has_daemon: bool,
    /// Whether the API server counts the generations of Pods.
    counts_generations: bool,
    /// Whether the memory limit of a plan fits only one Pod.
    large_pods: bool,
}

fn any_shape() -> impl Strategy<Value = Shape> {
    let items = prop_oneof![Just((true, false)), Just((false, true)), Just((true, true))];
    let shape_of = |(hooks, on): (_, [bool; 8])| Shape {
        hooks,
        claims: on[0],
        two_containers: on[1],
        ordered: on[2],
        env: on[3],
        restarts: on[4],
        has_daemon: on[5],
        counts_generations: on[6],
        large_pods: on[7],
    };
    (prop::option::of(items), any::<[bool; 8]>()).prop_map(shape_of)
}

impl Shape {
    fn spec(self) -> Value {
        let mut spec = clone_set_spec(self.hooks.is_some(), self.claims);
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
        containers.truncate(if self.two_containers { 2 } else { 1 });
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
    fn limits_hold_and_every_history_converges(
        shape in any_shape(),
        deadline in prop::option::of(1_i32..60),
        features in any_features(),
        goal in goal(),
        history in prop::collection::vec(cluster_event(), 1..120),
    ) {
        let mut spec = shape.spec();
        spec["progressDeadlineSeconds"] = json!(deadline);
        let mut cluster = FakeCluster::new(spec);
        cluster.features = features;
        // Only the daemon can confirm a new environment.
        cluster.has_daemon = shape.has_daemon || shape.env;
        cluster.counts_generations = shape.counts_generations;
        cluster.memory = if shape.large_pods { usize::MAX } else { 0 };
        for one in &history {
            apply_event(&mut cluster, one);
        }
        let at_first = converge(&mut cluster, goal);
        assert_goal(&cluster, goal, &at_first);
    }
}
