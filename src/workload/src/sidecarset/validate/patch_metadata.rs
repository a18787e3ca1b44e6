//! Annotations for the Pods, and the whitelist of the administrator.

use std::collections::HashSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kruise_api::selector;
use kruise_api::validation::{FieldErrors, labels};
use serde::Deserialize;
use serde_json::Value;

use super::read::{list, text};
use super::{Request, pattern};

const FIELD: &str = "spec.patchPodMetadata";

pub(super) fn check(request: &Request, errors: &mut FieldErrors) {
    let patches = list(&request.set["spec"]["patchPodMetadata"], FIELD, errors);
    if patches.is_empty() {
        return;
    }
    if let Err(why) = check_whitelist(request, patches) {
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

/// What the administrator allows; an absent list is an empty one.
#[derive(Debug, Default, Deserialize)]
struct Whitelist {
    rules: Option<Vec<Rule>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Rule {
    /// SidecarSets that the rule is for; all if absent.
    selector: Option<LabelSelector>,
    /// Regular expressions for keys of annotations, each of which may match any part of a key.
    allowed_annotation_key_exprs: Option<Vec<String>>,
}

fn check_whitelist(request: &Request, patches: &[Value]) -> Result<(), String> {
    let whitelist = match request.whitelist {
        None => Whitelist::default(),
        Some(text) => serde_json::from_str::<Option<Whitelist>>(text)
            .map_err(|why| format!("the whitelist cannot be read: {why}"))?
            .unwrap_or_default(),
    };
    let labels = kruise_api::cloneset::string_map(&request.set["metadata"]["labels"]);
    let mut patterns = Vec::new();
    for rule in whitelist.rules.into_iter().flatten() {
        if let Some(selector) = &rule.selector {
            check_operators(selector)?;
            if !selector::matches(selector, &labels) {
                continue;
            }
        }
        patterns.extend(rule.allowed_annotation_key_exprs.into_iter().flatten());
    }
    if patterns.is_empty() {
        if request.patch_metadata_allowed {
            return Ok(());
        }
        return Err("the whitelist has no rule for this SidecarSet".to_owned());
    }
    let allowed =
        pattern::compile_set(&patterns).map_err(|why| format!("the whitelist is invalid: {why}"))?;
    match patches.iter().flat_map(keys).find(|key| !allowed.is_match(key)) {
        Some(key) => Err(format!("the whitelist does not allow annotation {key}")),
        None => Ok(()),
    }
}

fn check_operators(selector: &LabelSelector) -> Result<(), String> {
    let known = ["In", "NotIn", "Exists", "DoesNotExist"];
    let mut operators = selector
        .match_expressions
        .iter()
        .flatten()
        .map(|one| &one.operator);
    match operators.find(|operator| !known.contains(&operator.as_str())) {
        Some(operator) => Err(format!("the whitelist has an unknown operator {operator:?}")),
        None => Ok(()),
    }
}
