use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Value, json};

use crate::api::cloneset::CloneSetSpec;
use crate::manager::cloneset::plan::limits::Limits;
use crate::manager::cloneset::plan::numbers::{Counted, Numbers, numbers};
use crate::manager::cloneset::plan::types::Switches;

fn limits(given: &Value) -> Limits {
    let mut spec = json!({ "selector": {}, "template": {}, "replicas": given["replicas"] });
    if given["rollingUpdate"] == true {
        let mut rolling = json!({});
        for field in ["partition", "maxUnavailable", "maxSurge", "paused"] {
            rolling[field] = given[field].clone();
        }
        spec["updateStrategy"]["rollingUpdate"] = rolling;
    }
    spec["scaleStrategy"]["excludePreparingDelete"] = given["excludePreparingDelete"].clone();
    let mut spec: CloneSetSpec = serde_json::from_value(spec).unwrap();
    let most: Option<IntOrString> = serde_json::from_value(given["scaleMaxUnavailable"].clone()).unwrap();
    spec.scale_strategy.as_mut().unwrap().max_unavailable = most;
    let switches = Switches {
        partition_rollback: given["gatePartitionRollback"] == true,
        ..Switches::default()
    };
    Limits::of(&spec, &switches)
}

fn counted(given: &Value) -> impl Iterator<Item = Counted> + '_ {
    given["pods"].as_array().into_iter().flatten().map(|pod| {
        let state = pod["state"].as_str().unwrap();
        let prepared = given["preparingUpdateAsUpdate"] == true && state == "PreparingUpdate";
        Counted {
            new: pod["revision"] == "new" || prepared,
            preparing_delete: state == "PreparingDelete",
            specified: pod["specifiedDelete"] == true,
            available: pod["ready"] == true && matches!(state, "" | "Normal"),
        }
    })
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
    let vectors = include_str!("../../../../../tests/data/go/cloneset-diffs.jsonl");
    assert_eq!(vectors.lines().count(), 2000);
    for (at, line) in vectors.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let given = &vector["in"];
        let same = given["currentEqualsUpdate"] == true;
        let ours = told(numbers(counted(given), &limits(given), same));
        assert_eq!(ours, vector["out"], "line {}", at + 1);
    }
}
