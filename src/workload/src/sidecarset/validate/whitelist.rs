//! The annotations for Pods that the administrator allows.
//!
//! Regular expressions are matched in linear time. Their syntax is that of Go but for details: `[[]` and `a{` must be
//! written as `[\[]` and `a\{`, and `\Q…\E` does not exist.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kruise_api::selector;
use regex::{RegexSet, RegexSetBuilder};
use serde::Deserialize;

use super::request::Request;

/// Bytes that all regular expressions may take when compiled.
const MAX_REGEX_BYTES: usize = 8 << 20;

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

/// Checks the keys of annotations for Pods.
pub(super) fn check<'a>(request: &Request, mut keys: impl Iterator<Item = &'a str>) -> Result<(), String> {
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
    let allowed = compile(&patterns).map_err(|why| format!("the whitelist is invalid: {why}"))?;
    match keys.find(|key| !allowed.is_match(key)) {
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

/// An expression that matches where one of several does.
fn compile(patterns: &[String]) -> Result<RegexSet, String> {
    let builder = &mut RegexSetBuilder::new(patterns);
    let set = builder
        .size_limit(MAX_REGEX_BYTES)
        .dfa_size_limit(MAX_REGEX_BYTES)
        .build();
    // The lines before draw where it is.
    set.map_err(|error| error.to_string().lines().last().unwrap_or_default().to_owned())
}
