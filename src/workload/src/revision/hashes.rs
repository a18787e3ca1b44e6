//! Hashes of revisions and of claim templates, over the JSON that Go writes of its typed values.

use serde_json::{Value, json};

use kruise_api::container_hash::deep_hash;
use kruise_api::go_json::{self, Struct, nested, plain};

/// Letters that Kubernetes puts into generated names.
const LETTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";

/// Hash of a revision's data, in letters that make no words.
pub(super) fn of_revision(data: &str, collisions: Option<i32>) -> String {
    let mut text = data.to_owned();
    if let Some(count) = collisions {
        text += &count.to_string();
    }
    // FNV-1, unlike all other hashes here.
    let hash = text.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        hash.wrapping_mul(0x0100_0193) ^ u32::from(byte)
    });
    let letter = |digit: u8| char::from(LETTERS[usize::from(digit) % LETTERS.len()]);
    hash.to_string().bytes().map(letter).collect()
}

/// A Pod template as Go's types write it: with nulls and empty objects where nothing was said.
///
/// The template must be as the API server or OpenKruise's webhook writes it, so that other empty values are absent.
pub(super) fn as_go_writes(mut template: Value) -> Value {
    metadata(&mut template);
    let Some(spec) = template.get_mut("spec") else {
        return template;
    };
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        for container in items(spec, list) {
            present(container, "resources", json!({}));
            for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
                if let Some(grpc) = container.get_mut(probe).and_then(|probe| probe.get_mut("grpc")) {
                    present(grpc, "service", Value::Null);
                }
            }
        }
    }
    for volume in items(spec, "volumes") {
        if let Some(claim) = volume.pointer_mut("/ephemeral/volumeClaimTemplate") {
            metadata(claim);
            if let Some(spec) = claim.get_mut("spec") {
                present(spec, "resources", json!({}));
            }
        }
    }
    template
}

/// Metadata without a time of creation has it as null.
fn metadata(of: &mut Value) {
    present(of, "metadata", json!({}));
    if let Some(metadata) = of.get_mut("metadata") {
        present(metadata, "creationTimestamp", Value::Null);
    }
}

pub(super) fn items<'a>(of: &'a mut Value, list: &str) -> impl Iterator<Item = &'a mut Value> + use<'a> {
    of.get_mut(list)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}

fn present(of: &mut Value, field: &str, value: Value) {
    if let Some(map) = of.as_object_mut() {
        map.entry(field).or_insert(value);
    }
}

/// Hash of claim templates with defaults, by name and spec; `None` when there are none.
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
    Some(deep_hash(&go_json::ordered(&bare, &CLAIM)).to_string())
}

/// `v1.PersistentVolumeClaim`, of which only name and spec are told.
const CLAIM: Struct = Struct(&[
    nested("metadata", &METADATA).or("{\"creationTimestamp\":null}"),
    nested("spec", &CLAIM_SPEC).or("{\"resources\":{}}"),
    plain("status").or("{}"),
]);

const METADATA: Struct = Struct(&[plain("name"), plain("creationTimestamp").or("null")]);

const CLAIM_SPEC: Struct = Struct(&[
    plain("accessModes"),
    nested("selector", &SELECTOR),
    nested("resources", &RESOURCES).or("{}"),
    plain("volumeName"),
    plain("storageClassName"),
    plain("volumeMode"),
    nested("dataSource", &REFERENCE),
    nested("dataSourceRef", &REFERENCE),
    plain("volumeAttributesClassName"),
]);

const SELECTOR: Struct = Struct(&[plain("matchLabels"), nested("matchExpressions", &REQUIREMENT)]);

const REQUIREMENT: Struct = Struct(&[
    plain("key").or("\"\""),
    plain("operator").or("\"\""),
    plain("values"),
]);

const RESOURCES: Struct = Struct(&[plain("limits"), plain("requests")]);

const REFERENCE: Struct = Struct(&[
    plain("apiGroup").or("null"),
    plain("kind").or("\"\""),
    plain("name").or("\"\""),
    plain("namespace"),
]);
