//! SidecarSet: v1alpha1 has the name of a namespace as well, and its `customVersion` is a label.
//!
//! v1alpha1 → v1beta1 makes a selector of `namespace` and a field of the label, as upstream does. Unlike upstream, the
//! way back is without loss: `namespace`, and the `namespaceSelector` that it overrides, are kept in
//! [`keys::SIDECAR_SET_NAMESPACE_SELECTOR`], and a label of v1beta1 that looks like a custom version in
//! [`keys::SIDECAR_SET_V1BETA1_VERSION`].

use serde_json::{Map, Value, json};

use super::metadata::{
    LABELS, metadata_entry, remove_annotation, remove_metadata_entry, set_annotation, set_metadata_entry,
};
use crate::keys;
use crate::validation::labels::label_value_errors;

const NAMESPACE: &str = "namespace";
const NAMESPACE_SELECTOR: &str = "namespaceSelector";
const CUSTOM_VERSION: &str = "customVersion";
const LABEL: &str = "label";

/// v1alpha1 → v1beta1.
pub(super) fn to_v1beta1(object: &mut Value) {
    remove_annotation(object, keys::SIDECAR_SET_NAMESPACE_SELECTOR);
    if let Some(spec) = spec_mut(object)
        && let Some(namespace) = remove_text(spec, NAMESPACE)
    {
        let selector = json!({ "matchLabels": { keys::NAMESPACE_NAME: namespace } });
        let overridden = spec.insert(NAMESPACE_SELECTOR.to_owned(), selector);
        let overridden = overridden.unwrap_or_default().to_string();
        set_annotation(object, keys::SIDECAR_SET_NAMESPACE_SELECTOR, overridden);
    }

    let kept = remove_annotation(object, keys::SIDECAR_SET_V1BETA1_VERSION);
    let kept = kept.and_then(|text| serde_json::from_str::<Map<String, Value>>(&text).ok());
    let current = remove_metadata_entry(object, LABELS, keys::SIDECAR_SET_CUSTOM_VERSION);
    let current = current.filter(|version| !version.is_empty());
    let version = match kept {
        Some(mut kept) => {
            let label = remove_text(&mut kept, LABEL);
            let version = remove_text(&mut kept, CUSTOM_VERSION);
            let unchanged = label_for(label.as_deref(), version.as_deref()) == current.as_deref();
            if let Some(label) = label {
                set_metadata_entry(object, LABELS, keys::SIDECAR_SET_CUSTOM_VERSION, label);
            }
            if unchanged { version } else { current }
        }
        None => current,
    };
    if let Some(spec) = spec_mut(object)
        && let Some(version) = version
    {
        spec.insert(CUSTOM_VERSION.to_owned(), version.into());
    }
}

/// v1beta1 → v1alpha1.
pub(super) fn to_v1alpha1(object: &mut Value) {
    let overridden = remove_annotation(object, keys::SIDECAR_SET_NAMESPACE_SELECTOR);
    if let Some(overridden) = overridden
        && let Some(spec) = spec_mut(object)
        && let Some(namespace) = selected_namespace(spec)
    {
        spec.remove(NAMESPACE_SELECTOR);
        spec.insert(NAMESPACE.to_owned(), namespace.into());
        if let Ok(selector @ Value::Object(_)) = serde_json::from_str(&overridden) {
            spec.insert(NAMESPACE_SELECTOR.to_owned(), selector);
        }
    }

    remove_annotation(object, keys::SIDECAR_SET_V1BETA1_VERSION);
    let version = spec_mut(object).and_then(|spec| remove_text(spec, CUSTOM_VERSION));
    let label = metadata_entry(object, LABELS, keys::SIDECAR_SET_CUSTOM_VERSION).map(str::to_owned);
    let written = label_for(label.as_deref(), version.as_deref()).map(str::to_owned);
    if label.is_some() || written != version {
        let kept = json!({ LABEL: label, CUSTOM_VERSION: version });
        set_annotation(object, keys::SIDECAR_SET_V1BETA1_VERSION, kept.to_string());
    }
    if let Some(written) = written {
        set_metadata_entry(object, LABELS, keys::SIDECAR_SET_CUSTOM_VERSION, written);
    }
}

/// The label of v1alpha1 for a label and a custom version of v1beta1. Text that is no label must not become one: the
/// API server could not read the object, nor any list that contains it.
fn label_for<'a>(label: Option<&'a str>, version: Option<&'a str>) -> Option<&'a str> {
    version
        .filter(|version| !version.is_empty() && label_value_errors(version).is_empty())
        .or(label)
}

/// The only namespace that the selector matches, if it does so by its name.
fn selected_namespace(spec: &Map<String, Value>) -> Option<String> {
    let selector = spec.get(NAMESPACE_SELECTOR)?.as_object()?;
    let labels = selector.get("matchLabels")?.as_object()?;
    let by_name = selector.len() == 1 && labels.len() == 1;
    let name = labels.get(keys::NAMESPACE_NAME)?.as_str()?;
    (by_name && !name.is_empty()).then(|| name.to_owned())
}

/// Removes a text, and returns it unless it is empty. Values of another type are kept: conversion must not repair them.
fn remove_text(object: &mut Map<String, Value>, field: &str) -> Option<String> {
    let text = object.get(field)?.as_str()?.to_owned();
    object.remove(field);
    Some(text).filter(|text| !text.is_empty())
}

fn spec_mut(object: &mut Value) -> Option<&mut Map<String, Value>> {
    object.get_mut("spec")?.as_object_mut()
}

#[cfg(test)]
mod tests;
