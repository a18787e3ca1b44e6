//! How injected Pods are updated. Most of it is checked only if they are.

use std::collections::HashSet;

use kruise_api::validation::{FieldErrors, labels};
use serde_json::Value;

use super::container_names::is_native_sidecar;
use super::read::{as_text, int32, items, list, text};
use super::spec::{check_selector, is_empty};

const FIELD: &str = "spec.updateStrategy";

pub(super) fn check(spec: &Value, errors: &mut FieldErrors) {
    let strategy = &spec["updateStrategy"];
    if text(&strategy["type"], format_args!("{FIELD}.type"), errors) != "RollingUpdate" {
        return;
    }
    if items(&spec["initContainers"]).iter().any(is_native_sidecar) {
        errors.required(
            FIELD,
            "init containers cannot be updated in place; set type: NotUpdate for native sidecars",
        );
    }
    let selector = &strategy["selector"];
    let partition = &strategy["partition"];
    if !selector.is_null() && !partition.is_null() && *partition != 0 {
        errors.invalid(
            "updateStrategy",
            strategy,
            "partition and selector cannot be used together",
        );
    }
    check_selector(selector, &format!("{FIELD}.selector"), errors);
    check_limit(partition, &format!("{FIELD}.partition"), errors);
    check_limit(
        &strategy["maxUnavailable"],
        &format!("{FIELD}.maxUnavailable"),
        errors,
    );
    check_priority(&strategy["priorityStrategy"], errors);
    check_scatter(&strategy["scatterStrategy"], errors);
}

/// Checks a number of Pods, or a percentage of them. Percentages above 100 are valid.
fn check_limit(limit: &Value, field: &str, errors: &mut FieldErrors) {
    match limit {
        Value::Null => {}
        Value::String(text) => {
            let digits = text.strip_suffix('%').unwrap_or_default();
            if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                errors.invalid(field, limit, "must be an integer or a percentage, as 1 or '10%'");
            }
        }
        number => {
            if int32(number, field, errors).is_some_and(|number| number < 0) {
                errors.invalid(field, limit, "must be greater than or equal to 0");
            }
        }
    }
}

/// Reports the first error only, as OpenKruise does.
fn check_priority(strategy: &Value, errors: &mut FieldErrors) {
    let field = format!("{FIELD}.priorityStrategy");
    let weights = list(
        &strategy["weightPriority"],
        format_args!("{field}.weightPriority"),
        errors,
    );
    let orders = list(
        &strategy["orderPriority"],
        format_args!("{field}.orderPriority"),
        errors,
    );
    let has_valid_weight = |term: &Value| {
        let weight = &term["weight"];
        weight.is_null() || weight.as_i64().is_some_and(|weight| (0..=100).contains(&weight))
    };
    let mut wrong = weights.iter().filter_map(|term| {
        if !has_valid_weight(term) {
            return Some("weight must be an integer from 0 to 100");
        }
        let selector = &term["matchSelector"];
        if is_empty(selector) {
            return Some("matchSelector cannot be empty");
        }
        let mut invalid = FieldErrors::default();
        labels::validate_selector(selector, "", &mut invalid);
        (!invalid.is_empty()).then_some("matchSelector is not a valid label selector")
    });
    let why = if !weights.is_empty() && !orders.is_empty() {
        Some("only one of weightPriority and orderPriority can be used")
    } else if orders.iter().any(|term| as_text(&term["orderedKey"]).is_empty()) {
        Some("orderedKey cannot be empty")
    } else {
        wrong.next()
    };
    if let Some(why) = why {
        errors.required(field, why);
    }
}

/// Reports the first error only, as OpenKruise does.
fn check_scatter(strategy: &Value, errors: &mut FieldErrors) {
    let field = format!("{FIELD}.scatterStrategy");
    let mut seen = HashSet::new();
    for term in list(strategy, &field, errors) {
        let [key, value] = ["key", "value"].map(|part| as_text(&term[part]));
        if key.is_empty() {
            return errors.required(field, "key cannot be empty");
        }
        if !seen.insert((key, value)) {
            return errors.required(field, format_args!("duplicated key={key} value={value}"));
        }
    }
}
