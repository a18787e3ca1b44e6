//! Enhanced liveness probes: another program than kubelet runs them, so they move into an annotation.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use kruise_api::go_json::{PROBE, to_ordered_json, to_sorted_json};
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::owner::controlled_by_our_group;

/// An entry of the annotation.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry<'a> {
    name: String,
    #[serde(borrow)]
    liveness_probe: &'a RawValue,
}

/// Moves the liveness probes of a new Pod (raw JSON) that asks for it into annotation
/// [`keys::CONTAINER_PROBE_CONTEXT`]; a workload of ours must control the Pod. Returns whether the Pod changed.
///
/// The webhook may be called again, for what other webhooks have added: unlike upstream, probes that are in the
/// annotation stay there, if the Pod has the container. An annotation of another form is replaced.
pub fn apply(pod: &mut Value) -> bool {
    let metadata = &pod["metadata"];
    if metadata["annotations"][keys::USING_ENHANCED_LIVENESS] != keys::TRUE
        || !controlled_by_our_group(&metadata["ownerReferences"])
    {
        return false;
    }
    let existing = metadata["annotations"][keys::CONTAINER_PROBE_CONTEXT].as_str();
    let existing = existing.unwrap_or_default().to_owned();
    let existing: Vec<Entry<'_>> = serde_json::from_str(&existing).unwrap_or_default();
    // Each is used once: a Pod may have a thousand containers of one name at this point.
    let mut existing: BTreeMap<String, &RawValue> = existing
        .into_iter()
        .rev()
        .map(|entry| (entry.name, entry.liveness_probe))
        .collect();
    let (mut probes, mut is_changed) = (Vec::new(), false);
    let containers = pod
        .get_mut("spec")
        .and_then(|spec| spec.get_mut("containers")?.as_array_mut());
    for container in containers.into_iter().flatten().filter_map(Value::as_object_mut) {
        let removed = container.remove("livenessProbe").filter(|probe| !probe.is_null());
        is_changed |= removed.is_some();
        let name = container.get("name");
        let moved_before = existing.remove(name.and_then(Value::as_str).unwrap_or_default());
        let removed = removed.map(|probe| to_ordered_json(&probe, &PROBE));
        let Some(probe) = removed.or_else(|| Some(moved_before?.get().to_owned())) else {
            continue;
        };
        let name = to_sorted_json(name.unwrap_or(&json!("")));
        probes.push(format!(r#"{{"name":{name},"livenessProbe":{probe}}}"#));
    }
    if !is_changed {
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
    fn second_call_keeps_the_probes_of_the_first() {
        let probe = |path: &str| json!({ "httpGet": { "path": path, "port": 80 } });
        let owner = json!([{ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "web", "uid": "w",
            "controller": true }]);
        let mut pod = json!({
            "metadata": { "annotations": { keys::USING_ENHANCED_LIVENESS: "true" }, "ownerReferences": owner },
            "spec": { "containers": [
                { "name": "app", "livenessProbe": probe("/app") },
                { "name": "other" },
            ] },
        });
        let annotation = |pod: &Value| {
            let text = pod["metadata"]["annotations"][keys::CONTAINER_PROBE_CONTEXT].as_str();
            text.unwrap().to_owned()
        };
        assert!(apply(&mut pod));
        let first = annotation(&pod);
        assert!(!apply(&mut pod));
        assert_eq!(annotation(&pod), first);
        let sidecar = json!({ "name": "sidecar", "livenessProbe": probe("/sidecar") });
        pod["spec"]["containers"].as_array_mut().unwrap().push(sidecar);
        let injected = pod.clone();
        assert!(apply(&mut pod));
        let entry = |name: &str| {
            format!(r#"{{"name":"{name}","livenessProbe":{{"httpGet":{{"path":"/{name}","port":80}}}}}}"#)
        };
        let (app, sidecar) = (entry("app"), entry("sidecar"));
        assert_eq!(annotation(&pod), format!("[{app},{sidecar}]"));
        // The probe of the spec is the later one, and others may have written the annotation.
        for (there, then) in [
            (
                format!("[{},{app}]", app.replace("\"app", "\"gone")),
                format!("[{app},{sidecar}]"),
            ),
            (
                format!("[{}]", sidecar.replace(":80", ":81")),
                format!("[{sidecar}]"),
            ),
            // The first one counts.
            (
                format!("[{app},{}]", app.replace(":80", ":81")),
                format!("[{app},{sidecar}]"),
            ),
            (format!("[{app}"), format!("[{sidecar}]")),
            (app.clone(), format!("[{sidecar}]")),
            (r#"["app"]"#.to_owned(), format!("[{sidecar}]")),
            (
                r#"[{"name":1,"livenessProbe":{}}]"#.to_owned(),
                format!("[{sidecar}]"),
            ),
        ] {
            let mut pod = injected.clone();
            pod["metadata"]["annotations"][keys::CONTAINER_PROBE_CONTEXT] = json!(there);
            assert!(apply(&mut pod));
            assert_eq!(annotation(&pod), then, "{there}");
        }
    }

    /// The API server refuses containers of one name only after the webhooks.
    #[test]
    fn entry_is_kept_for_one_container() {
        let owner = json!([{ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "web", "uid": "w",
            "controller": true }]);
        let entry = r#"{"name":"b","livenessProbe":{"exec":{}}}"#;
        let annotations = json!({ keys::USING_ENHANCED_LIVENESS: "true",
            keys::CONTAINER_PROBE_CONTEXT: format!("[{entry}]") });
        let mut pod = json!({
            "metadata": { "annotations": annotations, "ownerReferences": owner },
            "spec": { "containers": [{ "name": "a", "livenessProbe": {} }, { "name": "b" }, { "name": "b" }] },
        });
        assert!(apply(&mut pod));
        let written = pod["metadata"]["annotations"][keys::CONTAINER_PROBE_CONTEXT].as_str();
        assert_eq!(
            written.unwrap(),
            format!(r#"[{{"name":"a","livenessProbe":{{}}}},{entry}]"#)
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
