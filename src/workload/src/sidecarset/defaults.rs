//! What the webhook stores in a SidecarSet: defaults, and hashes over these.
//!
//! Works on the object as submitted, in either version: the fields are the same. Values of a wrong type and unknown
//! fields are kept, for the schema to refuse or a later release to know; OpenKruise drops the latter.

use serde_json::{Map, Value, json};

use super::hash::Hashes;
use crate::core_defaults::{
    FIELD_REF, FieldDefault, SetBy, env_sources, ephemeral_claim, fields, for_each_file, items, pull_policy,
    text, visit_container, visit_volume,
};
use kruise_api::go_json::quantity::{canonical, canonical_milli};

/// Number of revisions to keep.
const REVISION_HISTORY_LIMIT: i32 = 10;

/// Sets the defaults of a SidecarSet (raw, in either version), and its hashes as annotations, whatever they were.
///
/// Quantities are written in their canonical form, as OpenKruise stores them: they are part of revisions.
pub fn set_defaults(set: &mut Value) {
    let spec = set.as_object_mut().and_then(|set| object_or_default(set, "spec"));
    let Some(spec) = spec else { return };
    set_spec_defaults(spec);
    let hashes = Hashes::of_spec(spec);
    hashes.annotate(set);
}

fn set_spec_defaults(spec: &mut Map<String, Value>) {
    if let Some(strategy) = object_or_default(spec, "updateStrategy") {
        fill_all(strategy, &[text("type", "RollingUpdate")]);
        for (field, default) in [("partition", 0), ("maxUnavailable", 1)] {
            fill_null(strategy, field, json!(default));
        }
    }
    for (list, position) in [
        ("initContainers", "AfterAppContainer"),
        ("containers", "BeforeAppContainer"),
    ] {
        for container in items(spec, list).filter_map(Value::as_object_mut) {
            set_container_defaults(container, position);
        }
    }
    for volume in items(spec, "volumes").filter_map(Value::as_object_mut) {
        set_volume_defaults(volume);
    }
    fill_null(spec, "revisionHistoryLimit", json!(REVISION_HISTORY_LIMIT));
    for patch in items(spec, "patchPodMetadata").filter_map(Value::as_object_mut) {
        fill_all(patch, &[text("patchPolicy", "Retain")]);
    }
    let revision = fields(spec, "injectionStrategy").and_then(|strategy| fields(strategy, "revision"));
    if let Some(revision) = revision {
        fill_all(revision, &[text("policy", "Always")]);
    }
}

fn set_container_defaults(container: &mut Map<String, Value>, position: &'static str) {
    let policy = pull_policy(container.get("image"));
    fill_all(
        container,
        &[text("podInjectPolicy", position), text("imagePullPolicy", policy)],
    );
    // A `shareVolumeDevicePolicy` has no default: it would change the hashes of older sets.
    for (field, default) in [
        ("upgradeStrategy", text("upgradeType", "ColdUpgrade")),
        ("shareVolumePolicy", text("type", "disabled")),
    ] {
        if let Some(object) = object_or_default(container, field) {
            default.fill(object);
        }
    }
    visit_container(container, &mut fill);
    for from in items(container, "transferEnv").filter_map(Value::as_object_mut) {
        let source = fields(from, "sourceContainerNameFrom").and_then(|source| fields(source, "fieldRef"));
        if let Some(field) = source {
            fill_all(field, &FIELD_REF);
        }
    }
    env_sources(container).for_each(write_divisor);
    write_resources(container, canonical_milli);
}

fn set_volume_defaults(volume: &mut Map<String, Value>) {
    let has_source = volume
        .iter()
        .any(|(field, value)| field != "name" && !value.is_null());
    if !has_source {
        volume.insert("emptyDir".to_owned(), json!({}));
    }
    visit_volume(volume, &mut fill);
    for_each_file(volume, &mut write_divisor);
    if let Some(size) = fields(volume, "emptyDir").and_then(|empty| empty.get_mut("sizeLimit")) {
        write_quantity(size, canonical);
    }
    if let Some(claim) = ephemeral_claim(volume) {
        write_resources(claim, canonical);
    }
}

fn fill(object: &mut Map<String, Value>, defaults: &[FieldDefault], by: SetBy) {
    if by == SetBy::OpenKruise {
        fill_all(object, defaults);
    }
}

fn fill_all(object: &mut Map<String, Value>, defaults: &[FieldDefault]) {
    defaults.iter().for_each(|default| default.fill(object));
}

/// The object of that name, which is created if absent.
fn object_or_default<'a>(
    object: &'a mut Map<String, Value>,
    field: &str,
) -> Option<&'a mut Map<String, Value>> {
    fill_null(object, field, json!({})).as_object_mut()
}

/// The value of a field, which is set if absent.
fn fill_null<'a>(object: &'a mut Map<String, Value>, field: &str, default: Value) -> &'a mut Value {
    let value = object.entry(field).or_insert(Value::Null);
    if value.is_null() {
        *value = default;
    }
    value
}

fn write_divisor(from: &mut Map<String, Value>) {
    if let Some(divisor) = fields(from, "resourceFieldRef").and_then(|resource| resource.get_mut("divisor")) {
        write_quantity(divisor, canonical);
    }
}

fn write_resources(object: &mut Map<String, Value>, form: impl Fn(&str) -> Option<String>) {
    let Some(resources) = fields(object, "resources") else {
        return;
    };
    for list in ["limits", "requests"] {
        let amounts = fields(resources, list).into_iter().flat_map(Map::values_mut);
        amounts.for_each(|amount| write_quantity(amount, &form));
    }
}

/// Text that is no quantity is kept.
fn write_quantity(value: &mut Value, form: impl Fn(&str) -> Option<String>) {
    let text = match value {
        Value::String(text) => form(text),
        Value::Number(number) => form(&number.to_string()),
        _ => None,
    };
    if let Some(text) = text {
        *value = Value::String(text);
    }
}

#[cfg(test)]
mod tests;
