//! The ten numbers are upstream's: for Pods that are what the vectors say, as far as we can tell by looking at them.

use jiff::{Timestamp, ToSpan};
use serde_json::{Value, json};

use super::world::{World, owner};
use crate::cloneset::plan::draft::Draft;
use crate::cloneset::plan::numbers::Numbers;
use crate::cloneset::plan::view::View;
use crate::cloneset::plan::{Observed, ownership};
use kruise_api::keys;
use kruise_workload::in_place::Pod;

/// Seconds that a Pod must be ready for to be available.
const MIN_READY: i64 = 10;

fn spec(given: &Value) -> Value {
    let mut spec = json!({
        "replicas": given["replicas"],
        "selector": { "matchLabels": { "app": "x" } },
        "template": { "metadata": { "labels": { "app": "x" } }, "spec": { "containers": [] } },
        "minReadySeconds": MIN_READY,
        "scaleStrategy": {
            "excludePreparingDelete": given["excludePreparingDelete"],
            "maxUnavailable": given["scaleMaxUnavailable"],
            "podsToDelete": [],
        },
    });
    if given["rollingUpdate"] == true {
        for field in ["partition", "maxUnavailable", "maxSurge", "paused"] {
            spec["updateStrategy"]["rollingUpdate"][field] = given[field].clone();
        }
    }
    spec
}

/// A Pod that is what the vector says. What makes one unavailable, or has somebody ask for its deletion, takes turns.
fn pod(at: usize, given: &Value, now: Timestamp) -> Value {
    let ago = |seconds: i64| now.checked_sub(seconds.seconds()).unwrap().to_string();
    let (mut phase, mut ready, mut open, mut since) = ("Running", "True", "True", ago(MIN_READY + 1));
    if given["ready"] == false {
        match at % 4 {
            0 => ready = "False",
            1 => phase = "Pending",
            2 => open = "False",
            _ => since = ago(MIN_READY),
        }
    }
    let revision = if given["revision"] == "new" {
        "s-new"
    } else {
        "s-old"
    };
    let mut labels = json!({
        "app": "x", (keys::CONTROLLER_REVISION_HASH): revision, (keys::POD_TEMPLATE_HASH): revision,
    });
    if given["state"] != "" {
        labels[keys::LIFECYCLE_STATE] = given["state"].clone();
    }
    if given["specifiedDelete"] == true && at.is_multiple_of(2) {
        labels[keys::SPECIFIED_DELETE] = json!("whatever");
    }
    let condition =
        |type_: &str, status: &str| json!({ "type": type_, "status": status, "lastTransitionTime": since });
    json!({
        "metadata": {
            "name": format!("s-{at}"), "uid": format!("u{at}"), "labels": labels,
            "ownerReferences": [owner()],
        },
        "spec": { "readinessGates": [{ "conditionType": keys::IN_PLACE_UPDATE_READY }], "containers": [] },
        "status": {
            "phase": phase,
            "conditions": [condition("Ready", ready), condition(keys::IN_PLACE_UPDATE_READY, open)],
        },
    })
}

/// What is observed where the vector's Pods are, and the time.
fn observed(given: &Value) -> (Observed, Timestamp) {
    let mut world = World::new(spec(given));
    let pods = given["pods"].as_array().into_iter().flatten().enumerate();
    let named: Vec<String> = pods
        .clone()
        .filter(|(at, pod)| at % 2 == 1 && pod["specifiedDelete"] == true)
        .map(|(at, _)| format!("s-{at}"))
        .collect();
    world.set["spec"]["scaleStrategy"]["podsToDelete"] = json!(named);
    world.switches.partition_rollback = given["gatePartitionRollback"] == true;
    world.switches.preparing_update_as_update = given["preparingUpdateAsUpdate"] == true;
    let mut observed = world.observe();
    let pods = pods.map(|(at, given)| Pod::of(&pod(at, given, world.now)).into());
    observed.pods = pods.collect();
    observed.update = "s-new".to_owned();
    let same = given["currentEqualsUpdate"] == true;
    observed.current = if same { "s-new" } else { "s-old" }.to_owned();
    (observed, world.now)
}

fn told(numbers: Numbers) -> Value {
    json!({
        "scaleUpNum": numbers.scale_up,
        "scaleUpNumOldRevision": numbers.scale_up_old,
        "scaleUpLimit": numbers.scale_up_limit,
        "scaleDownNum": numbers.scale_down,
        "scaleDownNumOldRevision": numbers.scale_down_old,
        "deleteReadyLimit": numbers.delete_ready_limit,
        "useSurge": numbers.use_surge,
        "useSurgeOldRevision": numbers.use_surge_old,
        "updateNum": numbers.update,
        "updateMaxUnavailable": numbers.update_max_unavailable,
    })
}

#[test]
fn numbers_are_those_of_the_go_implementation() {
    let vectors = include_str!("../../../../../../tests/data/go/cloneset-diffs.jsonl");
    assert_eq!(vectors.lines().count(), 2000);
    for (at, line) in vectors.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let (observed, now) = observed(&vector["in"]);
        let (mut view, mut draft) = (View::new(&observed, now), Draft::default());
        ownership::claim(&mut view, &mut draft);
        let ours = told(view.numbers(|pod| view.scaled_as_updated(pod)));
        assert_eq!(ours, vector["out"], "line {}", at + 1);
    }
}
