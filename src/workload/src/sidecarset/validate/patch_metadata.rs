//! Annotations for the Pods.

use std::collections::HashSet;

use kruise_api::validation::{FieldErrors, labels};
use serde_json::Value;

use super::read::{list, text};
use super::request::Request;
use super::whitelist;

const FIELD: &str = "spec.patchPodMetadata";

pub(super) fn check(request: &Request, errors: &mut FieldErrors) {
    let patches = list(&request.set["spec"]["patchPodMetadata"], FIELD, errors);
    if patches.is_empty() {
        return;
    }
    if let Err(why) = whitelist::check(request, patches.iter().flat_map(keys)) {
        errors.required(FIELD, why);
    }
    let mut seen = HashSet::new();
    for patch in patches {
        let annotations = &patch["annotations"];
        if annotations.is_null() || annotations.as_object().is_some_and(serde_json::Map::is_empty) {
            errors.required(FIELD, "no annotations defined for SidecarSet");
        }
        labels::validate_annotations(annotations, "patchPodMetadata.annotations", errors);
        if text(&patch["patchPolicy"], FIELD, errors).is_empty() {
            errors.required(FIELD, "no patchPolicy defined for patchPodMetadata");
        }
        for key in keys(patch) {
            if !seen.insert(key) {
                errors.required(FIELD, format_args!("annotation {key} is given more than once"));
            }
        }
    }
}

/// The annotations that a patch sets.
pub(super) fn keys(patch: &Value) -> impl Iterator<Item = &str> {
    let annotations = patch["annotations"].as_object();
    annotations.into_iter().flatten().map(|(key, _)| key.as_str())
}
