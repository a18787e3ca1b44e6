//! Annotations that a SidecarSet gives to its Pods.

use std::collections::BTreeMap;

use kruise_api::go_json;
use kruise_api::sidecarset::{SidecarSetPatchPodMetadata, SidecarSetPatchPolicy};
use serde_json::Value;

/// An annotation that cannot be merged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key} of {whose} is not valid JSON: {why}")]
pub struct InvalidAnnotation {
    /// Key of the annotation.
    pub key: String,
    /// Whose value it is: `the Pod` or `the SidecarSet`.
    pub whose: &'static str,
    /// What the parser says.
    pub why: String,
}

/// Applies the patches, in their order, to the annotations of a Pod.
///
/// # Errors
/// If annotations are to be merged that are no JSON.
pub fn patch_annotations(
    annotations: &mut BTreeMap<String, String>,
    patches: &[SidecarSetPatchPodMetadata],
) -> Result<(), InvalidAnnotation> {
    for patch in patches {
        for (key, value) in patch.annotations.iter().flatten() {
            match &patch.patch_policy {
                None | Some(SidecarSetPatchPolicy::Retain) => {
                    annotations.entry(key.clone()).or_insert_with(|| value.clone());
                }
                Some(SidecarSetPatchPolicy::Overwrite) => {
                    annotations.insert(key.clone(), value.clone());
                }
                Some(SidecarSetPatchPolicy::MergePatchJson) => {
                    let current = annotations.get(key).filter(|current| !current.is_empty());
                    let merged = match current {
                        Some(current) => merge(key, current, value)?,
                        None => value.clone(),
                    };
                    annotations.insert(key.clone(), merged);
                }
                // A policy of a later release.
                Some(_) => {}
            }
        }
    }
    Ok(())
}

/// RFC 7396.
fn merge(key: &str, current: &str, patch: &str) -> Result<String, InvalidAnnotation> {
    let parse = |text: &str, whose: &'static str| {
        serde_json::from_str::<Value>(text).map_err(|error| InvalidAnnotation {
            key: key.to_owned(),
            whose,
            why: error.to_string(),
        })
    };
    let mut merged = parse(current, "the Pod")?;
    json_patch::merge(&mut merged, &parse(patch, "the SidecarSet")?);
    Ok(go_json::to_sorted_json(&merged))
}
