//! `patchPodMetadata`: annotations that a SidecarSet adds to its Pods.

use std::collections::BTreeMap;

use kruise_api::sidecarset::{SidecarSetPatchPodMetadata, SidecarSetPatchPolicy};

use super::json_merge::{MergeError, merge};

/// Why an annotation cannot be patched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("patchPodMetadata of annotation {key:?}: {why}")]
pub struct PatchError {
    /// Key of the annotation.
    pub key: String,
    /// What is wrong with the Pod's value or the patch.
    pub why: MergeError,
}

/// Applies the entries in their order to the annotations of a Pod.
///
/// # Errors
///
/// If a JSON patch, or the value that it is for, is invalid.
pub fn patch_annotations(
    annotations: &mut BTreeMap<String, String>,
    entries: &[SidecarSetPatchPodMetadata],
) -> Result<(), PatchError> {
    for entry in entries {
        let policy = entry.patch_policy.as_ref();
        for (key, value) in entry.annotations.iter().flatten() {
            let present = annotations.get(key);
            let new = match policy.unwrap_or(&SidecarSetPatchPolicy::Retain) {
                SidecarSetPatchPolicy::Retain if present.is_some() => continue,
                SidecarSetPatchPolicy::Retain | SidecarSetPatchPolicy::Overwrite => value.clone(),
                SidecarSetPatchPolicy::MergePatchJson => match present.filter(|text| !text.is_empty()) {
                    Some(present) => merge(present, value).map_err(|why| PatchError {
                        key: key.clone(),
                        why,
                    })?,
                    None => value.clone(),
                },
                SidecarSetPatchPolicy::Other(_) => continue,
            };
            annotations.insert(key.clone(), new);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn policies_decide_about_present_annotations() {
        let patch = |policy: Value, value: &str| -> Vec<SidecarSetPatchPodMetadata> {
            let annotations = json!({ "present": value, "empty": value, "new": value });
            serde_json::from_value(json!([{ "annotations": annotations, "patchPolicy": policy }, {}]))
                .unwrap()
        };
        let pod: BTreeMap<String, String> = [
            ("present".to_owned(), r#"{"b":1}"#.to_owned()),
            ("empty".to_owned(), String::new()),
        ]
        .into();
        let patched = |policy: Value, value: &str| {
            let mut annotations = pod.clone();
            let result = patch_annotations(&mut annotations, &patch(policy, value));
            result.map(|()| annotations.into_values().collect::<Vec<_>>())
        };
        let value = r#"{"a":null}"#;
        for policy in [json!(null), json!("Retain")] {
            assert_eq!(patched(policy, value).unwrap(), ["", value, r#"{"b":1}"#]);
        }
        assert_eq!(patched(json!("Overwrite"), value).unwrap(), [value; 3]);
        assert_eq!(
            patched(json!("MergePatchJson"), value).unwrap(),
            [value, value, r#"{"b":1}"#]
        );
        assert_eq!(patched(json!("x"), value).unwrap(), ["", r#"{"b":1}"#]);
        let error = patched(json!("MergePatchJson"), "x").unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"patchPodMetadata of annotation "present": invalid JSON patch"#
        );
    }
}
