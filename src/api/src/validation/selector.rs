//! Label selectors: checks that the API server does for its own kinds, but not for ours. Fields name the key; those in
//! [`super::labels`] are OpenKruise's.

use serde_json::{Value, json};

use super::FieldErrors;
use super::labels::{label_value_errors, qualified_name_errors};

/// Checks `matchLabels` and `matchExpressions` of the selector at `field`.
pub fn check(selector: &Value, field: &str, errors: &mut FieldErrors) {
    for (key, value) in selector["matchLabels"].as_object().into_iter().flatten() {
        let field = format!("{field}.matchLabels[{key}]");
        check_key(key, &field, errors);
        check_value(value, &field, errors);
    }
    for (at, expression) in selector["matchExpressions"]
        .as_array()
        .into_iter()
        .flatten()
        .enumerate()
    {
        let field = format!("{field}.matchExpressions[{at}]");
        check_key(
            expression["key"].as_str().unwrap_or_default(),
            &format!("{field}.key"),
            errors,
        );
        let values = expression["values"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        let count = values.len();
        match expression["operator"].as_str().unwrap_or_default() {
            "In" | "NotIn" if count == 0 => {
                errors.add(
                    format!("{field}.values"),
                    &Value::Null,
                    "In and NotIn need at least one value",
                );
            }
            "Exists" | "DoesNotExist" if count > 0 => errors.add(
                format!("{field}.values"),
                &expression["values"],
                "Exists and DoesNotExist take no values",
            ),
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            _ => errors.add(
                format!("{field}.operator"),
                &expression["operator"],
                "give In, NotIn, Exists or DoesNotExist",
            ),
        }
        for (at, value) in values.iter().enumerate() {
            check_value(value, &format!("{field}.values[{at}]"), errors);
        }
    }
}

/// Checks a label key.
pub fn check_key(key: &str, field: &str, errors: &mut FieldErrors) {
    if !qualified_name_errors(key).is_empty() {
        errors.add(
            field,
            &json!(key),
            "not a label key; expected [DOMAIN/]NAME with a NAME of 1 to 63 characters",
        );
    }
}

/// Checks a label value.
pub fn check_value(value: &Value, field: &str, errors: &mut FieldErrors) {
    let is_valid = |text: &str| label_value_errors(text).is_empty();
    if !value.as_str().is_some_and(is_valid) {
        errors.add(
            field,
            value,
            "not a label value; expected up to 63 letters, digits, '-', '_' and '.', \
             with a letter or digit at both ends",
        );
    }
}
