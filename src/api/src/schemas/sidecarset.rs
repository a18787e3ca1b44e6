//! Schemas of SidecarSet, whose containers and volumes are raw.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::{MAX_LABEL_CHARS, into_schema, label_selector_json, short_keys};

/// Containers, or init containers, of one set: more than a Pod runs.
const MAX_CONTAINERS: usize = 256;
/// Volumes of one set.
const MAX_VOLUMES: usize = 1000;
/// Pull secrets of one set.
const MAX_SECRETS: usize = 256;
/// Patches of one set, each of which is tried for each of its keys.
const MAX_PATCHES: usize = 256;
/// Annotations of one patch.
const MAX_ANNOTATIONS: usize = 1000;
/// The longest annotation, in characters: all annotations of an object together have 256 KiB.
const MAX_ANNOTATION_CHARS: usize = 256 << 10;
/// Entries of `transferEnv` of one container, and names of one entry.
const MAX_VARIABLES: usize = 1000;
/// The longest name, image, expression or pattern, in characters.
const MAX_TEXT_CHARS: usize = 4096;
/// The longest word of those that mean something, in characters.
const MAX_WORD_CHARS: usize = 64;

fn string(max_chars: usize) -> Schema {
    json_schema!({ "type": "string", "maxLength": max_chars })
}

/// A list of a type, with at most `max` items.
fn list_of<T: JsonSchema>(generator: &mut SchemaGenerator, max: usize) -> Schema {
    let item = generator.subschema_for::<T>();
    json_schema!({ "type": "array", "maxItems": max, "items": item })
}

/// A word, such as a policy.
pub(crate) fn word(_: &mut SchemaGenerator) -> Schema {
    string(MAX_WORD_CHARS)
}

/// The value of a label.
pub(crate) fn label_value(_: &mut SchemaGenerator) -> Schema {
    string(MAX_LABEL_CHARS)
}

/// A name, an image, an expression or a pattern.
pub(crate) fn text(_: &mut SchemaGenerator) -> Schema {
    string(MAX_TEXT_CHARS)
}

/// Names of environment variables.
pub(crate) fn texts(generator: &mut SchemaGenerator) -> Schema {
    let item = text(generator);
    json_schema!({ "type": "array", "maxItems": MAX_VARIABLES, "items": item })
}

/// How the resources of several containers become one amount.
pub(crate) fn containers_mode(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ["sum", "max"] })
}

/// Containers to inject, of which the API server keeps every field.
pub(crate) fn containers<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    list_of::<T>(generator, MAX_CONTAINERS)
}

/// Environment variables of other containers.
pub(crate) fn transfer_env<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    list_of::<T>(generator, MAX_VARIABLES)
}

/// Patches of Pods' metadata.
pub(crate) fn metadata_patches<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    list_of::<T>(generator, MAX_PATCHES)
}

/// Volumes, each as `core/v1.Volume`, of which the API server keeps every field.
pub(crate) fn volumes(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": MAX_VOLUMES,
        "x-kubernetes-preserve-unknown-fields": true,
        "items": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
    })
}

/// References to Secrets, each as `core/v1.LocalObjectReference`.
pub(crate) fn local_references(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": MAX_SECRETS,
        "items": {
            "type": "object",
            "x-kubernetes-map-type": "atomic",
            "properties": {
                "name": { "type": "string", "maxLength": MAX_TEXT_CHARS, "description": "Name of the Secret." },
            },
        },
    })
}

/// Annotations for Pods.
pub(crate) fn annotations(_: &mut SchemaGenerator) -> Schema {
    let rules: Value = short_keys();
    into_schema(json!({
        "type": "object",
        "maxProperties": MAX_ANNOTATIONS,
        "additionalProperties": { "type": "string", "maxLength": MAX_ANNOTATION_CHARS },
        "x-kubernetes-validations": rules,
    }))
}

/// Selector of the Pods to inject.
pub(crate) fn injected_pods(_: &mut SchemaGenerator) -> Schema {
    into_schema(label_selector_json("Pods to inject; must not be empty."))
}

/// Selector of their namespaces.
pub(crate) fn namespaces(_: &mut SchemaGenerator) -> Schema {
    into_schema(label_selector_json("Namespaces of these Pods; all when absent."))
}

/// Selector of the Pods to update.
pub(crate) fn pods_to_update(_: &mut SchemaGenerator) -> Schema {
    into_schema(label_selector_json("Pods to update; all when absent."))
}
