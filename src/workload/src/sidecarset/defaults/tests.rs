//! Comparison with OpenKruise's webhook, and unusual objects.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;
use kruise_api::go_json::{SIDECAR_CONTAINER, to_ordered_json};

const VECTORS: &str = include_str!("../../../../../tests/data/go/sidecarset-hash.jsonl");

fn spec_of(set: &Value) -> &Map<String, Value> {
    set["spec"].as_object().unwrap()
}

/// Spec and annotations as Go's types write them: containers as text, and the rest without zero values.
fn as_go(spec: &Value, annotations: &Value) -> Value {
    let mut spec = spec.clone();
    for list in ["containers", "initContainers"] {
        let containers = std::mem::take(&mut spec[list]);
        if !containers.is_null() && containers != json!([]) {
            spec[list] = json!(to_ordered_json(&containers, &SIDECAR_CONTAINER));
        }
    }
    spec["updateStrategy"] = without_zero(spec["updateStrategy"].take());
    spec["injectionStrategy"] = without_zero(spec["injectionStrategy"].take());
    if let Some(spec) = spec.as_object_mut() {
        spec.retain(|field, value| {
            let no_strategy = field == "injectionStrategy" && *value == json!({});
            !no_strategy && ![json!(null), json!([]), json!("")].contains(value)
        });
    }
    json!({ "spec": spec, "annotations": annotations })
}

/// Without `paused: false` and empty lists.
fn without_zero(mut strategy: Value) -> Value {
    if let Some(strategy) = strategy.as_object_mut() {
        strategy.retain(|field, value| !(field == "paused" && *value == false) && *value != json!([]));
    }
    if strategy.is_null() { json!({}) } else { strategy }
}

#[test]
fn hashes_and_defaults_match_the_go_implementation() {
    assert_eq!(VECTORS.lines().count(), 110);
    let mut panics = 0;
    for (at, line) in VECTORS.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let set = &vector["in"];
        let Hashes { hash, without_image } = Hashes::of_spec(spec_of(set));
        assert_eq!(json!(hash), vector["hash"], "line {}", at + 1);
        assert_eq!(
            json!(without_image),
            vector["hashWithoutImage"],
            "line {}",
            at + 1
        );
        let mut defaulted = set.clone();
        set_defaults(&mut defaulted);
        let Some(expected) = vector.get("defaulted") else {
            // `sourceContainerNameFrom: {}` crashes theirs.
            assert!(vector["defaultingPanics"].is_string());
            panics += 1;
            continue;
        };
        assert_eq!(
            as_go(&defaulted["spec"], &defaulted["metadata"]["annotations"]),
            as_go(&expected["spec"], &expected["annotations"]),
            "line {}",
            at + 1
        );
    }
    assert_eq!(panics, 1);
}

/// Replaces one of the values inside, chosen by `choices`.
fn spoil(value: &mut Value, choices: &[usize], new: Value) {
    let Some((choice, rest)) = choices.split_first() else {
        *value = new;
        return;
    };
    let inner = match value {
        Value::Object(map) if !map.is_empty() => {
            let at = choice % map.len();
            map.values_mut().nth(at)
        }
        Value::Array(items) if !items.is_empty() => {
            let at = choice % items.len();
            items.get_mut(at)
        }
        _ => None,
    };
    match inner {
        Some(inner) => spoil(inner, rest, new),
        None => *value = new,
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-100..100).prop_map(|eighths| json!(f64::from(eighths) / 8.0)),
        ".{0,4}".prop_map(Value::from),
        Just(json!([])),
        Just(json!({})),
        Just(json!([null, {}, [], "1e3"])),
        Just(json!({ "limits": 1, "fieldRef": [], "httpGet": {}, "divisor": 1.5 })),
    ]
}

proptest! {
    /// Whatever is submitted, the hashes are those of what is stored, and the second time nothing changes.
    #[test]
    fn defaults_are_stable(
        line in 0_usize..110,
        choices in prop::collection::vec(any::<usize>(), 0..8),
        new in any_value(),
    ) {
        let vector: Value = serde_json::from_str(VECTORS.lines().nth(line).unwrap()).unwrap();
        let mut set = vector["in"].clone();
        if let Some(spec) = set.get_mut("spec") {
            spoil(spec, &choices, new);
        }
        set_defaults(&mut set);
        let once = set.clone();
        set_defaults(&mut set);
        prop_assert_eq!(&set, &once);
        if let Some(spec) = set["spec"].as_object() {
            let mut annotated = set.clone();
            Hashes::of_spec(spec).annotate(&mut annotated);
            prop_assert_eq!(&annotated, &set);
            // As Go reads it: unknown fields and zero values do not count.
            let mut go = spec.clone();
            for list in ["containers", "initContainers"] {
                if let Some(containers) = go.get_mut(list).filter(|list| list.is_array()) {
                    *containers = serde_json::from_str(&to_ordered_json(containers, &SIDECAR_CONTAINER)).unwrap();
                }
            }
            prop_assert_eq!(Hashes::of_spec(&go), Hashes::of_spec(spec));
        }
    }
}

#[test]
fn other_values_than_objects_are_kept() {
    for other in [
        json!(null),
        json!(1),
        json!([]),
        json!({ "spec": "x", "metadata": {} }),
    ] {
        let mut set = other.clone();
        set_defaults(&mut set);
        assert_eq!(set, other);
    }
    let mut set = json!({ "spec": {
        "containers": [null, "x", { "name": 1, "ports": {}, "resources": [], "transferEnv": [{ "sourceContainerNameFrom": {} }] }],
        "updateStrategy": 7,
        "injectionStrategy": { "revision": { "customVersion": "1" } },
        "volumes": [{ "name": "a" }, { "name": "b", "newKind": {} }, { "name": "c", "secret": null }, {}],
    } });
    set_defaults(&mut set);
    let spec = &set["spec"];
    assert_eq!(spec["updateStrategy"], 7);
    assert_eq!(spec["injectionStrategy"]["revision"]["policy"], "Always");
    assert_eq!(
        spec["containers"][2]["transferEnv"],
        json!([{ "sourceContainerNameFrom": {} }])
    );
    let volumes = spec["volumes"].as_array().unwrap();
    let empty: Vec<_> = volumes
        .iter()
        .map(|volume| volume["emptyDir"].is_object())
        .collect();
    assert_eq!(empty, [true, false, true, true]);
}

#[test]
fn quantities_are_stored_in_canonical_form() {
    let mut set = json!({ "spec": {
        "containers": [{
            "resources": { "limits": { "cpu": "1000m", "memory": "x" }, "requests": { "cpu": 0.0001 } },
            "resourcesPolicy": { "resourcesExpr": { "limits": { "cpu": "1000m" } } },
            "env": [{ "valueFrom": { "resourceFieldRef": { "divisor": "1000m" } } }],
        }],
        "volumes": [
            { "emptyDir": { "sizeLimit": "1024Mi" } },
            { "csi": { "volumeAttributes": { "sizeLimit": "1024Mi" } } },
            { "downwardAPI": { "items": [{ "resourceFieldRef": { "divisor": 1 } }] } },
            { "ephemeral": { "volumeClaimTemplate": { "spec": { "resources": { "requests": { "storage": "0.5Gi" } } } } } },
        ],
    } });
    set_defaults(&mut set);
    let at = |pointer: &str| set["spec"].pointer(pointer).unwrap();
    for (pointer, value) in [
        (
            "/containers/0/resources/limits",
            json!({ "cpu": "1", "memory": "x" }),
        ),
        ("/containers/0/resources/requests", json!({ "cpu": "1m" })),
        (
            "/containers/0/resourcesPolicy/resourcesExpr/limits/cpu",
            json!("1000m"),
        ),
        (
            "/containers/0/env/0/valueFrom/resourceFieldRef/divisor",
            json!("1"),
        ),
        ("/volumes/0/emptyDir/sizeLimit", json!("1Gi")),
        ("/volumes/1/csi/volumeAttributes/sizeLimit", json!("1024Mi")),
        (
            "/volumes/2/downwardAPI/items/0/resourceFieldRef/divisor",
            json!("1"),
        ),
        (
            "/volumes/3/ephemeral/volumeClaimTemplate/spec/resources/requests/storage",
            json!("512Mi"),
        ),
    ] {
        assert_eq!(*at(pointer), value, "{pointer}");
    }
}
