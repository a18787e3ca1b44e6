//! Hashes of revisions and claim templates, computed over the JSON that Go writes for its typed values.

use serde_json::{Value, json};

use kruise_api::container_hash::deep_hash;
use kruise_api::go_json::{self, GoStruct, nested, quantities, scalar};

/// Letters that Kubernetes uses in generated names.
const LETTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";

/// Hash of a revision's data, in letters that form no words.
pub(super) fn revision_hash(data: &str, collisions: Option<i32>) -> String {
    let mut text = data.to_owned();
    if let Some(count) = collisions {
        text += &count.to_string();
    }
    // FNV-1, unlike all other hashes here.
    let hash = text.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        hash.wrapping_mul(0x0100_0193) ^ u32::from(byte)
    });
    safe_encode(&hash.to_string())
}

/// A text of digits in letters that form no words, as Kubernetes' `rand.SafeEncodeString`.
pub(crate) fn safe_encode(digits: &str) -> String {
    let letter = |digit: u8| char::from(LETTERS[usize::from(digit) % LETTERS.len()]);
    digits.bytes().map(letter).collect()
}

/// A Pod template as Go's types write it: with nulls and empty objects for absent fields.
///
/// The template must be as the API server or OpenKruise's webhook writes it, without other empty values.
pub(crate) fn with_go_fields(mut template: Value) -> Value {
    add_metadata(&mut template);
    let Some(spec) = template.get_mut("spec") else {
        return template;
    };
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        for container in items(spec, list) {
            insert_missing(container, "resources", json!({}));
            for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
                if let Some(grpc) = container.get_mut(probe).and_then(|probe| probe.get_mut("grpc")) {
                    insert_missing(grpc, "service", Value::Null);
                }
            }
        }
    }
    for volume in items(spec, "volumes") {
        if let Some(claim) = volume.pointer_mut("/ephemeral/volumeClaimTemplate") {
            add_metadata(claim);
            if let Some(spec) = claim.get_mut("spec") {
                insert_missing(spec, "resources", json!({}));
            }
        }
    }
    template
}

/// Go writes a missing `creationTimestamp` as null.
fn add_metadata(object: &mut Value) {
    insert_missing(object, "metadata", json!({}));
    if let Some(metadata) = object.get_mut("metadata") {
        insert_missing(metadata, "creationTimestamp", Value::Null);
    }
}

pub(super) fn items<'a>(object: &'a mut Value, list: &str) -> impl Iterator<Item = &'a mut Value> + use<'a> {
    object
        .get_mut(list)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}

fn insert_missing(object: &mut Value, field: &str, value: Value) {
    if let Some(map) = object.as_object_mut() {
        map.entry(field).or_insert(value);
    }
}

/// Hash of claim templates with defaults, by name and spec; `None` without claim templates.
pub fn claim_hash(claims: &[Value]) -> Option<String> {
    if claims.is_empty() {
        return None;
    }
    let named = |claim: &Value| claim["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let mut claims: Vec<&Value> = claims.iter().collect();
    claims.sort_by_key(|claim| named(claim));
    let bare: Value = claims
        .into_iter()
        .map(|claim| json!({ "metadata": { "name": named(claim) }, "spec": claim["spec"] }))
        .collect();
    Some(deep_hash(&go_json::to_ordered_json(&bare, &CLAIM)).to_string())
}

/// `v1.PersistentVolumeClaim`; only name and spec count.
const CLAIM: GoStruct = GoStruct(&[
    nested("metadata", &METADATA).or_default_json("{\"creationTimestamp\":null}"),
    nested("spec", &CLAIM_SPEC).or_default_json("{\"resources\":{}}"),
    scalar("status").or_default_json("{}"),
]);

const METADATA: GoStruct = GoStruct(&[
    scalar("name"),
    scalar("creationTimestamp").or_default_json("null"),
]);

const CLAIM_SPEC: GoStruct = GoStruct(&[
    scalar("accessModes"),
    nested("selector", &SELECTOR),
    nested("resources", &RESOURCES).or_default_json("{}"),
    scalar("volumeName"),
    scalar("storageClassName").pointer(),
    scalar("volumeMode").pointer(),
    nested("dataSource", &REFERENCE),
    nested("dataSourceRef", &REFERENCE),
    scalar("volumeAttributesClassName").pointer(),
]);

const SELECTOR: GoStruct = GoStruct(&[scalar("matchLabels"), nested("matchExpressions", &REQUIREMENT)]);

const REQUIREMENT: GoStruct = GoStruct(&[
    scalar("key").or_default_json("\"\""),
    scalar("operator").or_default_json("\"\""),
    scalar("values"),
]);

const RESOURCES: GoStruct = GoStruct(&[quantities("limits"), quantities("requests")]);

const REFERENCE: GoStruct = GoStruct(&[
    scalar("apiGroup").or_default_json("null"),
    scalar("kind").or_default_json("\"\""),
    scalar("name").or_default_json("\"\""),
    scalar("namespace").pointer(),
]);
