//! Selectors, and the revision to inject.

use kruise_api::validation::{FieldErrors, labels};
use serde_json::Value;

use super::read::{as_text, text};
use super::request::{Request, Revision};

pub(super) fn check(request: &Request, errors: &mut FieldErrors) {
    let spec = &request.set["spec"];
    if spec["selector"].is_null() {
        errors.required("spec.selector", "no selector defined for SidecarSet");
    }
    check_selector(&spec["selector"], "spec.selector", errors);
    check_selector(&spec["namespaceSelector"], "spec.namespaceSelector", errors);
    // It becomes the label of a revision.
    let version = as_text(&spec["customVersion"]);
    for why in labels::label_value_errors(version) {
        errors.invalid("spec.customVersion", &spec["customVersion"], why);
    }
    let revision = &spec["injectionStrategy"]["revision"];
    if !revision.is_null() {
        check_revision(request, revision, errors);
    }
}

/// Checks a selector that must select something. OpenKruise reports an invalid one twice.
pub(super) fn check_selector(selector: &Value, field: &str, errors: &mut FieldErrors) {
    if selector.is_null() {
        return;
    }
    let mut found = FieldErrors::default();
    labels::validate_selector(selector, field, &mut found);
    if !found.is_empty() {
        let field = format!("{field}.selector");
        found.invalid(field, selector, "not a valid label selector");
    } else if is_empty(selector) {
        found.invalid(field, selector, "empty selector is not valid for sidecarset");
    }
    errors.append(found);
}

/// Whether a selector has no requirement, so that it matches everything.
pub(super) fn is_empty(selector: &Value) -> bool {
    let labels = selector["matchLabels"].as_object();
    let expressions = selector["matchExpressions"].as_array();
    labels.is_none_or(serde_json::Map::is_empty) && expressions.is_none_or(Vec::is_empty)
}

fn check_revision(request: &Request, revision: &Value, errors: &mut FieldErrors) {
    let name = &revision["revisionName"];
    let version = &revision["customVersion"];
    let own_name = as_text(&request.set["metadata"]["name"]);
    let named = |stored: &&Revision| name == stored.name;
    let tagged = |stored: &&Revision| {
        stored.sidecar_set == own_name && stored.custom_version.is_some_and(|tag| version == tag)
    };
    let mut stored = request.revisions.iter();
    let found = match (name.is_null(), version.is_null()) {
        (true, true) => {
            let why = "revisionName and customVersion cannot be empty simultaneously";
            return finish(revision, Some(why), errors);
        }
        (false, _) => stored.find(named),
        (true, false) => stored.find(tagged),
    };
    let why = "there is no such ControllerRevision";
    finish(revision, found.is_none().then_some(why), errors);
}

fn finish(revision: &Value, why: Option<&str>, errors: &mut FieldErrors) {
    if let Some(why) = why {
        errors.invalid("revision", revision, why);
    }
    let policy = &revision["policy"];
    if !["", "Always", "Partial"].contains(&text(policy, "revision.policy", errors)) {
        errors.invalid("revision.policy", policy, "must be Always or Partial");
    }
}
