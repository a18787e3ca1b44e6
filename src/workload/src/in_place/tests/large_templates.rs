//! Templates as large as tenants can store them: the work grows with their length, not with its square.

use std::time::Instant;

use serde_json::{Map, Value, json};

use super::*;
use crate::in_place::container_batches;
use kruise_api::in_place::ContainerRefMetadata;
use kruise_api::keys;

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

/// Each container reads one annotation of the previous one, and one of the next.
#[test]
fn chain_of_readers_is_one_batch() {
    const CONTAINERS: usize = 2_000;
    let containers: Vec<Value> = (0..CONTAINERS)
        .map(|at| {
            let key = json!({ "name": "barrier", "key": format!("p_{at}") });
            let barrier =
                json!({ "name": keys::ENV_CONTAINER_BARRIER, "valueFrom": { "configMapKeyRef": key } });
            json!({ "name": format!("c{at:04}"), "image": "c:1", "env": [barrier] })
        })
        .collect();
    let pod = Pod::from_json(&json!({ "spec": { "containers": containers } }));
    let reads = |at: usize| {
        let annotations = [at, at + 1].map(|key| (format!("a{key}"), "2".to_owned()));
        let read = ContainerRefMetadata {
            annotations: annotations.into(),
            ..ContainerRefMetadata::default()
        };
        (format!("c{at:04}"), read)
    };
    let spec = Spec {
        container_ref_metadata: (0..CONTAINERS).map(reads).collect(),
        ..Spec::default()
    };
    let begin = Instant::now();
    let batch = container_batches::first_batch(&pod, &spec);
    assert_quick(begin);
    assert_eq!(batch.len(), CONTAINERS);
}

/// First the update waits for its grace period, and then another one takes its finalizers over.
#[test]
fn many_finalizers_are_added() {
    const FINALIZERS: usize = 40_000;
    let finalizers: Value = (0..FINALIZERS).map(|at| format!("example.com/{at}")).collect();
    let template = |finalizers: &Value| {
        let mut revision = revision(&Map::new(), &[json!({ "name": "c", "image": "c:1" })]);
        revision["spec"]["template"]["metadata"]["finalizers"] = finalizers.clone();
        revision
    };
    let (old, new) = (template(&Value::Null), template(&finalizers));
    let added = spec_between(&old, &new).unwrap();
    let mut pod = pod(&["c"]);
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_GRACE] = json!(json!(added).to_string());
    let begin_time = Instant::now();
    let writes = begin(&Pod::from_json(&pod), &new, &added);
    assert_quick(begin_time);
    let patched = &writes.last().unwrap().patch["metadata"]["finalizers"];
    assert_eq!(patched.as_array().unwrap().len(), FINALIZERS);
}

fn decoded(spec: &Spec) -> Value {
    let patch = spec.meta_data_patch.as_ref().unwrap();
    let text = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, patch).unwrap();
    serde_json::from_slice(&text).unwrap()
}
