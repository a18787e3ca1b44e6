//! Label selectors: checks that the API server does for its own kinds, but not for ours.

use serde_json::{Value, json};

use super::FieldErrors;

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
    let (prefix, name) = key
        .rsplit_once('/')
        .map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let prefix_is_good = prefix.is_none_or(|prefix| {
        (1..=253).contains(&prefix.len())
            && prefix
                .split('.')
                .all(|part| is_word(part, 253, |c| c.is_ascii_lowercase() || c.is_ascii_digit(), "-"))
    });
    if !prefix_is_good || !is_label_text(name) {
        errors.add(
            field,
            &json!(key),
            "not a label key; expected [DOMAIN/]NAME with a NAME of 1 to 63 characters",
        );
    }
}

/// Checks a label value.
pub fn check_value(value: &Value, field: &str, errors: &mut FieldErrors) {
    let good = value
        .as_str()
        .is_some_and(|text| text.is_empty() || is_label_text(text));
    if !good {
        errors.add(
            field,
            value,
            "not a label value; expected up to 63 letters, digits, '-', '_' and '.', \
             with a letter or digit at both ends",
        );
    }
}

/// Whether the text is a label value, or the name in a label key, and not empty.
#[must_use]
pub fn is_label_text(text: &str) -> bool {
    is_word(text, 63, |c| c.is_ascii_alphanumeric(), "-_.")
}

/// `at_ends` at both ends, `at_ends` or one of `between` elsewhere, 1 to `max` characters.
fn is_word(text: &str, max: usize, at_ends: fn(char) -> bool, between: &str) -> bool {
    (1..=max).contains(&text.len())
        && text.chars().all(|c| at_ends(c) || between.contains(c))
        && text.starts_with(at_ends)
        && text.ends_with(at_ends)
}
