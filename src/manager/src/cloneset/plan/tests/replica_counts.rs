//! The ten numbers equal upstream's, for Pods as the vectors describe them.

use jiff::{Timestamp, ToSpan};
use serde_json::{Value, json};

use super::fake_cluster::{FakeCluster, owner_reference};
use crate::cloneset::plan::builder::PlanBuilder;
use crate::cloneset::plan::replica_counts::ReplicaCounts;
use crate::cloneset::plan::view::PlanView;
use crate::cloneset::plan::{Observed, ownership};
use kruise_api::keys;
use kruise_workload::in_place::Pod;

/// Seconds that a Pod must be ready for to be available.
const MIN_READY: i64 = 10;

fn spec_of_vector(vector: &Value) -> Value {
    let mut spec = json!({
        "replicas": vector["replicas"],
        "selector": { "matchLabels": { "app": "x" } },
        "template": { "metadata": { "labels": { "app": "x" } }, "spec": { "containers": [] } },
        "minReadySeconds": MIN_READY,
        "scaleStrategy": {
            "excludePreparingDelete": vector["excludePreparingDelete"],
            "maxUnavailable": vector["scaleMaxUnavailable"],
            "podsToDelete": [],
        },
    });
    if vector["rollingUpdate"] == true {
        for field in ["partition", "maxUnavailable", "maxSurge", "paused"] {
            spec["updateStrategy"]["rollingUpdate"][field] = vector[field].clone();
        }
    }
    spec
}

/// A Pod as the vector describes it. The causes of unavailability, and the ways to request its deletion, alternate.
fn pod_of_vector(at: usize, vector: &Value, now: Timestamp) -> Value {
    let ago = |seconds: i64| now.checked_sub(seconds.seconds()).unwrap().to_string();
    let (mut phase, mut ready, mut open, mut since) = ("Running", "True", "True", ago(MIN_READY + 1));
    if vector["ready"] == false {
        match at % 4 {
            0 => ready = "False",
            1 => phase = "Pending",
            2 => open = "False",
            _ => since = ago(MIN_READY),
        }
    }
    let revision = if vector["revision"] == "new" {
        "s-new"
    } else {
        "s-old"
    };
    let mut labels = json!({
        "app": "x", (keys::CONTROLLER_REVISION_HASH): revision, (keys::POD_TEMPLATE_HASH): revision,
    });
    if vector["state"] != "" {
        labels[keys::LIFECYCLE_STATE] = vector["state"].clone();
    }
    if vector["specifiedDelete"] == true && at.is_multiple_of(2) {
        labels[keys::SPECIFIED_DELETE] = json!("whatever");
    }
    let condition =
        |type_: &str, status: &str| json!({ "type": type_, "status": status, "lastTransitionTime": since });
    json!({
        "metadata": {
            "name": format!("s-{at}"), "uid": format!("u{at}"), "labels": labels,
            "ownerReferences": [owner_reference()],
        },
        "spec": { "readinessGates": [{ "conditionType": keys::IN_PLACE_UPDATE_READY }], "containers": [] },
        "status": {
            "phase": phase,
            "conditions": [condition("Ready", ready), condition(keys::IN_PLACE_UPDATE_READY, open)],
        },
    })
}

/// The observed state with the vector's Pods, and the time.
fn observed_of_vector(vector: &Value) -> (Observed, Timestamp) {
    let mut cluster = FakeCluster::new(spec_of_vector(vector));
    let pods = vector["pods"].as_array().into_iter().flatten().enumerate();
    let pods_to_delete: Vec<String> = pods
        .clone()
        .filter(|(at, pod)| at % 2 == 1 && pod["specifiedDelete"] == true)
        .map(|(at, _)| format!("s-{at}"))
        .collect();
    cluster.set["spec"]["scaleStrategy"]["podsToDelete"] = json!(pods_to_delete);
    cluster.features.partition_rollback = vector["gatePartitionRollback"] == true;
    cluster.features.preparing_update_as_update = vector["preparingUpdateAsUpdate"] == true;
    let mut observed = cluster.observe();
    let pods = pods.map(|(at, given)| Pod::from_json(&pod_of_vector(at, given, cluster.now)).into());
    observed.pods = pods.collect();
    observed.update_revision = "s-new".to_owned();
    let same = vector["currentEqualsUpdate"] == true;
    observed.current_revision = if same { "s-new" } else { "s-old" }.to_owned();
    (observed, cluster.now)
}

fn counts_json(numbers: ReplicaCounts) -> Value {
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
fn replica_counts_match_go() {
    let vectors = include_str!("../../../../../../tests/data/go/cloneset-diffs.jsonl");
    assert_eq!(vectors.lines().count(), 2000);
    for (at, line) in vectors.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let (observed, now) = observed_of_vector(&vector["in"]);
        let (mut view, mut builder) = (PlanView::new(&observed, now), PlanBuilder::default());
        ownership::claim_pods(&mut view, &mut builder);
        let ours = counts_json(view.replica_counts(|pod| view.counts_as_updated(pod)));
        assert_eq!(ours, vector["out"], "line {}", at + 1);
    }
}
