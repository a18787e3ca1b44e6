//! Templates as large as tenants can store them: the work grows with their length, not with its square.

use std::time::Instant;

use serde_json::{Map, Value, json};

use super::*;

/// A revision whose template has these annotations and containers.
fn revision(annotations: &Map<String, Value>, containers: &[Value]) -> Value {
    json!({ "spec": { "template": {
        "metadata": { "annotations": annotations }, "spec": { "containers": containers } } } })
}

fn assert_quick(begin: Instant) {
    assert!(begin.elapsed().as_secs() < 10, "{:?}", begin.elapsed());
}

#[test]
fn many_annotations_change() {
    const READ: usize = 2_000;
    let containers: Vec<Value> = (0..READ)
        .map(|at| {
            let from = json!({ "fieldRef": { "fieldPath": format!("metadata.annotations['a{at}']") } });
            json!({ "name": format!("c{at}"), "image": "c:1", "env": [{ "name": "A", "valueFrom": from }] })
        })
        .collect();
    let with = |value: &str| {
        let annotations = (0..20_000).map(|at| (format!("a{at}"), json!(value)));
        revision(&annotations.collect(), &containers)
    };
    let (old, new) = (with("1"), with("2"));
    let begin = Instant::now();
    let spec = spec_between(&old, &new).unwrap();
    assert_quick(begin);
    assert_eq!(spec.container_ref_metadata.len(), READ);
    assert_eq!(spec.container_ref_metadata["c7"].annotations["a7"], "2");
    let patch = Template::from_data(&new).metadata_patch(&decoded(&spec));
    assert_eq!(
        patch["metadata"]["annotations"].as_object().unwrap().len(),
        20_000 - READ
    );
}

fn decoded(spec: &Spec) -> Value {
    let patch = spec.meta_data_patch.as_ref().unwrap();
    let text = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, patch).unwrap();
    serde_json::from_slice(&text).unwrap()
}
