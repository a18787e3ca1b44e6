//! Labels and annotations of an object that is converted.

use serde_json::Value;

use crate::json::set;
use crate::validation::labels::{MAX_ANNOTATIONS_BYTES, annotation_bytes};

/// Maps of metadata.
pub(super) const ANNOTATIONS: &str = "annotations";
pub(super) const LABELS: &str = "labels";

/// The text of a label or annotation.
pub(super) fn metadata_entry<'a>(object: &'a Value, map: &str, key: &str) -> Option<&'a str> {
    entry_text(object["metadata"][map].get(key)?)
}

/// No stored object has a longer text, and JSON in it may take a hundred times its length when it is parsed.
fn entry_text(entry: &Value) -> Option<&str> {
    entry.as_str().filter(|text| text.len() <= MAX_ANNOTATIONS_BYTES)
}

pub(super) fn set_metadata_entry(object: &mut Value, map: &str, key: &str, value: String) {
    set(object, &["metadata", map, key], value.into());
}

/// Removes a label or annotation, and the map if it becomes empty.
pub(super) fn remove_metadata_entry(object: &mut Value, map: &str, key: &str) -> Option<String> {
    let metadata = object.get_mut("metadata")?.as_object_mut()?;
    let entries = metadata.get_mut(map)?.as_object_mut()?;
    let taken = entries.remove(key);
    if taken.is_some() && entries.is_empty() {
        metadata.remove(map);
    }
    entry_text(&taken?).map(str::to_owned)
}

pub(super) fn annotation<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    metadata_entry(object, ANNOTATIONS, key)
}

/// Sets an annotation if there is room for it. An object that is converted to more annotations than may be stored could
/// not be read in that version, nor could any list that contains it.
pub(super) fn set_annotation(object: &mut Value, key: &str, value: String) {
    remove_annotation(object, key);
    let existing_bytes = annotation_bytes(&object["metadata"][ANNOTATIONS]);
    if existing_bytes + key.len() + value.len() <= MAX_ANNOTATIONS_BYTES {
        set_metadata_entry(object, ANNOTATIONS, key, value);
    }
}

pub(super) fn remove_annotation(object: &mut Value, key: &str) -> Option<String> {
    remove_metadata_entry(object, ANNOTATIONS, key)
}

/// The JSON in an annotation, if it is a list.
pub(super) fn annotated_list(object: &Value, key: &str) -> Option<Vec<Value>> {
    serde_json::from_str(annotation(object, key)?).ok()
}
