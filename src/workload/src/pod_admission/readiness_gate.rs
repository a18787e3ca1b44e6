//! Readiness gate `KruisePodReady`, which lets us keep a Pod out of its Services.

use serde_json::{Value, json};

use kruise_api::json::append;
use kruise_api::keys;
use kruise_api::owner::controlled_by_our_group;

/// Adds the readiness gate to a Pod (raw JSON) that a workload of ours controls, or to any Pod with gate
/// `KruisePodReadinessGate`. Returns whether the Pod changed.
pub fn apply(pod: &mut Value, all_pods: bool) -> bool {
    let gates = pod["spec"]["readinessGates"].as_array();
    let exists = gates
        .into_iter()
        .flatten()
        .any(|gate| gate["conditionType"] == keys::KRUISE_POD_READY);
    if exists || !(all_pods || controlled_by_our_group(&pod["metadata"]["ownerReferences"])) {
        return false;
    }
    append(
        pod,
        &["spec", "readinessGates"],
        json!({ "conditionType": keys::KRUISE_POD_READY }),
    );
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_is_added_once_to_pods_of_our_workloads() {
        let pod = |api_version: &str| {
            json!({ "metadata": { "ownerReferences": [
                { "apiVersion": "v1", "kind": "X" },
                { "apiVersion": api_version, "kind": "StatefulSet", "controller": true },
            ] } })
        };
        let gates = json!([{ "conditionType": "KruisePodReady" }]);
        for (api_version, all, expected) in [
            ("apps.kruise.io/v1beta1", false, true),
            ("apps.kruise.io/v9", false, true),
            ("apps/v1", false, false),
            ("apps.kruise.io.x/v1", false, false),
            ("apps/v1", true, true),
        ] {
            let mut pod = pod(api_version);
            assert_eq!(apply(&mut pod, all), expected, "{api_version}");
            assert_eq!(pod["spec"]["readinessGates"] == gates, expected);
            assert!(!apply(&mut pod, all));
        }
    }
}
