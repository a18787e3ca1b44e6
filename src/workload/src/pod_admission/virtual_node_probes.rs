//! The probes of PodProbeMarkers for virtual nodes: their providers read them from an annotation, run them and set the
//! Pod's conditions.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};

use kruise_api::go_json::{PROBE, encoded_length, to_ordered_json, to_sorted_json};
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::node_pod_probe::MAX_PROBES_OF_POD;
use kruise_api::pod_probe_marker::{PodContainerProbe, PodProbeMarker};
use kruise_api::selector;

/// Bytes of the annotation: a Pod may have 256 KiB of annotations in all. Probes beyond are left out.
const MAX_ANNOTATION_BYTES: usize = 40 << 10;

/// Writes the probes of `markers`, the PodProbeMarkers of the Pod's namespace sorted by name, that set a condition into
/// annotation [`keys::POD_PROBE`] of a new Pod (raw JSON). Returns whether the Pod changed. It is not known yet whether
/// the Pod's node will be a virtual one.
pub fn apply(pod: &mut Value, markers: &[Arc<PodProbeMarker>]) -> bool {
    let containers = probed_containers(&pod["spec"]);
    let (mut conditions, mut names, mut used) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let (mut entries, mut bytes) = (Vec::new(), 0);
    for marker in selecting(pod, markers) {
        for probe in &marker.spec.probes {
            let Some(condition) = probe.condition_type() else {
                continue;
            };
            let name = (probe.container_name.as_str(), probe.name.as_str());
            let is_new =
                containers.contains(name.0) && !conditions.contains(condition) && !names.contains(&name);
            if !is_new || entries.len() >= MAX_PROBES_OF_POD {
                continue;
            }
            let entry = entry(probe, condition);
            let length = encoded_length(&entry);
            if bytes + length > MAX_ANNOTATION_BYTES {
                continue;
            }
            bytes += length;
            entries.push(entry);
            conditions.insert(condition);
            names.insert(name);
            used.insert(marker.metadata.name.as_deref().unwrap_or_default());
        }
    }
    if entries.is_empty() {
        return false;
    }
    let annotations = [
        (keys::POD_PROBE, format!("[{}]", entries.join(","))),
        (
            keys::POD_PROBE_MARKER_LIST,
            used.into_iter().collect::<Vec<_>>().join(","),
        ),
    ];
    let mut changed = false;
    for (key, value) in annotations {
        if pod["metadata"]["annotations"][key] != *value {
            set(pod, &["metadata", "annotations", key], json!(value));
            changed = true;
        }
    }
    changed
}

/// The PodProbeMarkers that the Pod names in annotation [`keys::POD_PROBE_MARKER_LIST`], otherwise those that select it.
fn selecting<'a>(pod: &Value, markers: &'a [Arc<PodProbeMarker>]) -> Vec<&'a Arc<PodProbeMarker>> {
    let listed = pod["metadata"]["annotations"][keys::POD_PROBE_MARKER_LIST]
        .as_str()
        .filter(|list| !list.is_empty());
    let listed: Option<BTreeSet<&str>> = listed.map(|list| list.split(',').collect());
    let labels = kruise_api::cloneset::string_map(&pod["metadata"]["labels"]);
    let is_selecting = |marker: &&Arc<PodProbeMarker>| match &listed {
        Some(listed) => listed.contains(marker.metadata.name.as_deref().unwrap_or_default()),
        None => selector::matches(&marker.spec.selector, &labels),
    };
    markers.iter().filter(is_selecting).collect()
}

/// Names of the containers that run as long as the Pod: regular ones and native sidecars.
fn probed_containers(spec: &Value) -> BTreeSet<String> {
    let items = |list: &str| spec[list].as_array().cloned().unwrap_or_default();
    let sidecars = items("initContainers")
        .into_iter()
        .filter(|container| container["restartPolicy"] == "Always");
    let all = items("containers").into_iter().chain(sidecars);
    all.filter_map(|container| Some(container["name"].as_str()?.to_owned()))
        .collect()
}

/// A probe without its policies, as OpenKruise writes it.
fn entry(probe: &PodContainerProbe, condition: &str) -> String {
    let text = |text: &str| to_sorted_json(&json!(text));
    format!(
        r#"{{"name":{},"containerName":{},"probe":{},"podConditionType":{}}}"#,
        text(&probe.name),
        text(&probe.container_name),
        to_ordered_json(&json!(probe.probe), &PROBE),
        text(condition)
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn marker(object: &Value) -> Arc<PodProbeMarker> {
        Arc::new(serde_json::from_value(object.clone()).unwrap())
    }

    #[test]
    fn annotations_match_go() {
        let vectors = include_str!("../../../../tests/data/go/pod-probe-marker.jsonl");
        let vectors = vectors.lines().map(|line| serde_json::from_str(line).unwrap());
        let vectors: Vec<Value> = vectors
            .filter(|vector: &Value| vector["kind"] == "pod-webhook")
            .collect();
        assert_eq!(vectors.len(), 60);
        for vector in vectors {
            let mut pod = vector["pod"].clone();
            let namespace = &pod["metadata"]["namespace"];
            let all = vector["markers"].as_array().unwrap().iter();
            let markers: Vec<_> = all
                .filter(|marker| marker["metadata"]["namespace"] == *namespace)
                .map(marker)
                .collect();
            let changed = apply(&mut pod, &markers);
            assert_eq!(json!(!changed), vector["out"]["skip"], "{vector}");
            assert_eq!(
                pod["metadata"]["annotations"], vector["out"]["annotations"],
                "{vector}"
            );
            assert!(!apply(&mut pod, &markers), "a second call: {vector}");
        }
    }

    /// Otherwise the API server would refuse the Pod.
    #[test]
    fn annotation_is_limited() {
        let probe = |index: usize, command: &str| {
            json!({ "name": format!("p{index}"), "containerName": "app", "podConditionType": format!("x/{index}"),
                "probe": { "exec": { "command": [command] } } })
        };
        let marker = |name: &str, command: &str| {
            let probes: Vec<_> = (0..40)
                .map(|index| probe(index + name.len() * 100, command))
                .collect();
            marker(&json!({ "metadata": { "name": name, "namespace": "n" },
                "spec": { "selector": {}, "probes": probes } }))
        };
        let new_pod = json!({ "metadata": { "name": "p" }, "spec": { "containers": [{ "name": "app" }] } });
        for (command, expected) in [
            ("c", MAX_PROBES_OF_POD),
            (&*"<".repeat(500), 13),
            (&*"c".repeat(50_000), 0),
        ] {
            let mut pod = new_pod.clone();
            let changed = apply(&mut pod, &[marker("a", command), marker("bb", command)]);
            assert_eq!(changed, expected > 0, "{command}");
            let probes = pod["metadata"]["annotations"][keys::POD_PROBE]
                .as_str()
                .unwrap_or("[]");
            assert!(probes.len() < MAX_ANNOTATION_BYTES + 2 + MAX_PROBES_OF_POD);
            let probes: Vec<Value> = serde_json::from_str(probes).unwrap();
            assert_eq!(probes.len(), expected, "{command}");
        }
    }
}
