//! Enhanced liveness probes: another program than kubelet runs them, so they move into an annotation.

use serde_json::{Value, json};

use kruise_api::go_json::{PROBE, to_ordered_json, to_sorted_json};
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::owner::controlled_by_our_group;

/// Moves the liveness probes of a new Pod (raw JSON) that asks for it into annotation
/// [`keys::CONTAINER_PROBE_CONTEXT`]; a workload of ours must control the Pod. Returns whether the Pod changed.
pub fn apply(pod: &mut Value) -> bool {
    let metadata = &pod["metadata"];
    if metadata["annotations"][keys::USING_ENHANCED_LIVENESS] != keys::TRUE
        || !controlled_by_our_group(&metadata["ownerReferences"])
    {
        return false;
    }
    let mut probes = Vec::new();
    let containers = pod
        .get_mut("spec")
        .and_then(|spec| spec.get_mut("containers")?.as_array_mut());
    for container in containers.into_iter().flatten().filter_map(Value::as_object_mut) {
        let Some(probe) = container.remove("livenessProbe").filter(|probe| !probe.is_null()) else {
            continue;
        };
        let name = to_sorted_json(container.get("name").unwrap_or(&json!("")));
        probes.push(format!(
            r#"{{"name":{name},"livenessProbe":{}}}"#,
            to_ordered_json(&probe, &PROBE)
        ));
    }
    if probes.is_empty() {
        return false;
    }
    let context = json!(format!("[{}]", probes.join(",")));
    set(
        pod,
        &["metadata", "annotations", keys::CONTAINER_PROBE_CONTEXT],
        context,
    );
    true
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn zero_values_are_written_as_in_go() {
        let probe = json!({
            "httpGet": { "path": "", "port": "", "httpHeaders": [] },
            "exec": { "command": ["", "0"] },
            "grpc": { "port": 0, "service": "" },
            "failureThreshold": 0,
            "terminationGracePeriodSeconds": 0,
        });
        assert_eq!(
            to_ordered_json(&probe, &PROBE),
            r#"{"exec":{"command":["","0"]},"httpGet":{"port":""},"grpc":{"port":0,"service":""},"terminationGracePeriodSeconds":0}"#
        );
    }

    #[test]
    fn annotations_match_go() {
        let vectors = include_str!("../../../../tests/data/go/enhanced-liveness.jsonl");
        assert_eq!(vectors.lines().count(), 80);
        for (at, line) in vectors.lines().enumerate() {
            let vector: Value = serde_json::from_str(line).unwrap();
            let out = &vector["out"];
            if vector["operation"] != "CREATE" {
                // The caller looks at the request.
                assert_eq!(out["skip"], true);
                continue;
            }
            let mut pod = vector["pod"].clone();
            let changed = apply(&mut pod);
            let left = pod["spec"]["containers"].as_array().unwrap().iter();
            let left: Vec<&Value> = left
                .filter(|c| c["livenessProbe"].is_object())
                .map(|c| &c["name"])
                .collect();
            assert_eq!(json!(!changed), out["skip"], "{}: {line}", at + 1);
            assert_eq!(
                pod["metadata"]["annotations"],
                out["annotations"],
                "{}: {line}",
                at + 1
            );
            assert_eq!(json!(left), out["livenessProbesLeft"], "{}: {line}", at + 1);
        }
    }
}
