//! CloneSet: the update strategy is flat in v1alpha1, and some of it is labels and annotations there.
//!
//! v1alpha1 → v1beta1 keeps these labels and annotations, as upstream does; there the fields count, and on the way back
//! the labels and annotations are set from them. Unlike upstream, `OnDelete` keeps the fields of a rolling update, and
//! pre-download fields in the spec of v1alpha1 count if the annotation is absent. The `podUpdatePolicy` of a v1beta1
//! `OnDelete` is kept in [`keys::CLONESET_POD_UPDATE_POLICY`].

use serde_json::{Map, Value, json};

use super::metadata::{
    LABELS, annotation, metadata_entry, remove_annotation, remove_metadata_entry, set_annotation,
    set_metadata_entry,
};
use crate::keys;

const ON_DELETE: &str = "OnDelete";
const ROLLING_UPDATE: &str = "RollingUpdate";
const RE_CREATE: &str = "ReCreate";

/// v1alpha1 → v1beta1.
pub(super) fn to_v1beta1(object: &mut Value) {
    let policy = remove_annotation(object, keys::CLONESET_POD_UPDATE_POLICY);
    let mut scale = take_object(object, "scaleStrategy");
    let reuse = scale.remove("disablePVCReuse") != Some(json!(true));
    scale.insert("enablePVCReuse".to_owned(), json!(reuse));
    if has_exclude_label(object) {
        scale.insert("excludePreparingDelete".to_owned(), json!(true));
    }
    put_object(object, "scaleStrategy", scale);

    let mut rolling = take_object(object, "updateStrategy");
    apply_annotations(object, &mut rolling);
    let update_type = match rolling.remove("type") {
        Some(Value::String(update_type)) if !update_type.is_empty() => update_type,
        _ => RE_CREATE.to_owned(),
    };
    let mut update = Map::new();
    if update_type == ON_DELETE {
        update.insert("type".to_owned(), json!(ON_DELETE));
        rolling.extend(policy.map(|policy| ("podUpdatePolicy".to_owned(), json!(policy))));
    } else {
        update.insert("type".to_owned(), json!(ROLLING_UPDATE));
        rolling.insert("podUpdatePolicy".to_owned(), json!(update_type));
    }
    if !rolling.is_empty() {
        update.insert("rollingUpdate".to_owned(), Value::Object(rolling));
    }
    put_object(object, "updateStrategy", update);
}

/// v1beta1 → v1alpha1.
pub(super) fn to_v1alpha1(object: &mut Value) {
    remove_annotation(object, keys::CLONESET_POD_UPDATE_POLICY);

    let mut scale = take_object(object, "scaleStrategy");
    let reuse = scale.remove("enablePVCReuse") == Some(json!(true));
    scale.insert("disablePVCReuse".to_owned(), json!(!reuse));
    set_exclude_label(
        object,
        scale.remove("excludePreparingDelete") == Some(json!(true)),
    );
    put_object(object, "scaleStrategy", scale);

    let mut flat = take_object(object, "updateStrategy");
    let on_delete = flat.remove("type") == Some(json!(ON_DELETE));
    let mut update_type = if on_delete { ON_DELETE } else { RE_CREATE }.to_owned();
    if let Some(Value::Object(mut rolling)) = flat.remove("rollingUpdate") {
        match rolling.remove("podUpdatePolicy") {
            // Absent means the same, and the API server fills it in.
            Some(Value::String(policy)) if policy.is_empty() || policy == RE_CREATE => {}
            Some(Value::String(policy)) if on_delete => {
                set_annotation(object, keys::CLONESET_POD_UPDATE_POLICY, policy);
            }
            Some(Value::String(policy)) => update_type = policy,
            _ => {}
        }
        let in_place = rolling.get_mut("inPlaceUpdateStrategy");
        pre_download_to_annotations(object, in_place.unwrap_or(&mut Value::Null));
        flat.extend(rolling);
    }
    flat.insert("type".to_owned(), json!(update_type));
    put_object(object, "updateStrategy", flat);
}

/// The fields of an object, or of an empty new one; `None` for a value of a different type, which conversion must not
/// repair.
fn object_or_default(value: &mut Value) -> Option<&mut Map<String, Value>> {
    if value.is_null() {
        *value = json!({});
    }
    value.as_object_mut()
}

/// Sets the pre-download fields from their annotations, if there are any.
fn apply_annotations(object: &Value, rolling: &mut Map<String, Value>) {
    for (field, key) in keys::PRE_DOWNLOAD {
        let Some(text) = annotation(object, key) else {
            continue;
        };
        match parse_value(field, text) {
            Some(value) => {
                let in_place = rolling.entry("inPlaceUpdateStrategy").or_insert(Value::Null);
                if let Some(fields) = object_or_default(in_place) {
                    fields.insert(field.to_owned(), value);
                }
            }
            None => {
                rolling
                    .get_mut("inPlaceUpdateStrategy")
                    .and_then(Value::as_object_mut)
                    .map(|fields| fields.remove(field));
            }
        }
    }
}

/// Moves the pre-download fields to annotations. An annotation whose field is absent is removed, unless v1beta1 has no
/// field for its text.
fn pre_download_to_annotations(object: &mut Value, in_place: &mut Value) {
    for (field, key) in keys::PRE_DOWNLOAD {
        let annotated = annotation(object, key).and_then(|text| parse_value(field, text));
        let desired = in_place.as_object_mut().and_then(|fields| fields.remove(field));
        let desired = desired.filter(|value| !value.is_null());
        if desired == annotated {
            continue;
        }
        match desired {
            Some(value) => set_annotation(object, key, to_text(&value)),
            None => {
                remove_annotation(object, key);
            }
        }
    }
}

fn to_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The annotation's value as a field of v1beta1. Any text for the parallelism, numbers for the others.
fn parse_value(field: &str, text: &str) -> Option<Value> {
    match text.parse::<i32>() {
        Ok(number) => Some(json!(number)),
        Err(_) if field == keys::PRE_DOWNLOAD[0].0 && !text.is_empty() => Some(json!(text)),
        Err(_) => None,
    }
}

/// Whether the label is `true`. Other values have no meaning.
fn has_exclude_label(object: &Value) -> bool {
    metadata_entry(object, LABELS, keys::CLONESET_EXCLUDE_PREPARING_DELETE) == Some(keys::TRUE)
}

/// Sets the label from the field. Values without a meaning are kept.
fn set_exclude_label(object: &mut Value, exclude: bool) {
    match (has_exclude_label(object), exclude) {
        (false, true) => set_metadata_entry(
            object,
            LABELS,
            keys::CLONESET_EXCLUDE_PREPARING_DELETE,
            keys::TRUE.to_owned(),
        ),
        (true, false) => {
            remove_metadata_entry(object, LABELS, keys::CLONESET_EXCLUDE_PREPARING_DELETE);
        }
        _ => {}
    }
}

fn spec_mut(object: &mut Value) -> Option<&mut Map<String, Value>> {
    object.get_mut("spec")?.as_object_mut()
}

/// Takes an object out of the spec; an empty one if absent.
fn take_object(object: &mut Value, field: &str) -> Map<String, Value> {
    match spec_mut(object).and_then(|spec| spec.remove(field)) {
        Some(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

fn put_object(object: &mut Value, field: &str, map: Map<String, Value>) {
    if let Some(spec) = spec_mut(object) {
        spec.insert(field.to_owned(), Value::Object(map));
    }
}

#[cfg(test)]
mod tests;
