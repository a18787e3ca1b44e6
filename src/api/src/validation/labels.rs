//! Labels, annotations and selectors, with the fields and types of errors that apimachinery's validation has.
//!
//! The API server validates them in its own kinds and in metadata, but not in the specs of ours.

use serde_json::{Value, json};

use super::FieldErrors;
use crate::names;

/// Maximum of [`annotation_bytes`], in objects of all kinds.
pub const MAX_ANNOTATIONS_BYTES: usize = 256 << 10;
/// Longest name part of a key, and longest label value.
const MAX_LABEL_LENGTH: usize = 63;

/// What is wrong with a key of a label, without its prefix also a name: `[DOMAIN/]NAME`.
#[must_use]
pub fn qualified_name_errors(key: &str) -> Vec<&'static str> {
    let mut errors = Vec::new();
    let (prefix, name) = match key.split_once('/') {
        Some((_, name)) if name.contains('/') => {
            return vec!["must be a name with an optional DNS subdomain and '/' before it"];
        }
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    match prefix {
        Some("") => errors.push("prefix part must be non-empty"),
        Some(prefix) => {
            if prefix.len() > names::MAX_SUBDOMAIN_LENGTH {
                errors.push("prefix part must be no more than 253 bytes");
            }
            if !prefix.split('.').all(names::is_dns_label) {
                errors.push("prefix part must be a lowercase RFC 1123 subdomain");
            }
        }
        None => {}
    }
    if name.is_empty() {
        errors.push("name part must be non-empty");
    } else if name.len() > MAX_LABEL_LENGTH {
        errors.push("name part must be no more than 63 bytes");
    }
    if !is_label_text(name) {
        errors.push(
            "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
             alphanumeric character",
        );
    }
    errors
}

/// What is wrong with the value of a label.
#[must_use]
pub fn label_value_errors(value: &str) -> Vec<&'static str> {
    let mut errors = Vec::new();
    if value.len() > MAX_LABEL_LENGTH {
        errors.push("must be no more than 63 bytes");
    }
    if !value.is_empty() && !is_label_text(value) {
        errors.push(
            "must be empty or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
             alphanumeric character",
        );
    }
    errors
}

/// Letters, digits, and `-`, `_`, `.` between them; of any length, but not empty.
fn is_label_text(text: &str) -> bool {
    let ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    ends(bytes.first())
        && ends(bytes.last())
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
}

/// Checks a key at `field`.
pub fn validate_key(key: &str, field: &str, errors: &mut FieldErrors) {
    for why in qualified_name_errors(key) {
        errors.invalid(field, &json!(key), why);
    }
}

fn validate_value(value: &Value, field: &str, errors: &mut FieldErrors) {
    match value.as_str() {
        Some(text) => {
            for why in label_value_errors(text) {
                errors.invalid(field, value, why);
            }
        }
        None => errors.invalid(field, value, "must be a string"),
    }
}

/// Checks a map of labels.
pub fn validate_labels(labels: &Value, field: &str, errors: &mut FieldErrors) {
    match labels {
        Value::Object(map) => {
            for (key, value) in map {
                validate_key(key, field, errors);
                validate_value(value, field, errors);
            }
        }
        Value::Null => {}
        other => errors.invalid(field, other, "must be an object"),
    }
}

/// Bytes of a map of annotations, keys and values.
#[must_use]
pub fn annotation_bytes(annotations: &Value) -> usize {
    let entries = annotations.as_object().into_iter().flatten();
    entries
        .map(|(key, value)| key.len() + value.as_str().map_or(0, str::len))
        .sum()
}

/// Checks a map of annotations.
pub fn validate_annotations(annotations: &Value, field: &str, errors: &mut FieldErrors) {
    let map = match annotations {
        Value::Object(map) => map,
        Value::Null => return,
        other => return errors.invalid(field, other, "must be an object"),
    };
    for (key, value) in map {
        for why in qualified_name_errors(&key.to_lowercase()) {
            errors.invalid(field, &json!(key), why);
        }
        if !value.is_string() {
            errors.invalid(field, value, "must be a string");
        }
    }
    if annotation_bytes(annotations) > MAX_ANNOTATIONS_BYTES {
        errors.too_long(field, MAX_ANNOTATIONS_BYTES);
    }
}

/// Checks a label selector.
pub fn validate_selector(selector: &Value, field: &str, errors: &mut FieldErrors) {
    if !selector.is_object() {
        if !selector.is_null() {
            errors.invalid(field, selector, "must be an object");
        }
        return;
    }
    validate_labels(&selector["matchLabels"], &format!("{field}.matchLabels"), errors);
    let field = format!("{field}.matchExpressions");
    match &selector["matchExpressions"] {
        Value::Array(expressions) => {
            for (at, expression) in expressions.iter().enumerate() {
                validate_expression(expression, &format!("{field}[{at}]"), errors);
            }
        }
        Value::Null => {}
        other => errors.invalid(field, other, "must be a list"),
    }
}

fn validate_expression(expression: &Value, field: &str, errors: &mut FieldErrors) {
    let no_values = Vec::new();
    let values = match &expression["values"] {
        Value::Array(values) => values,
        Value::Null => &no_values,
        other => {
            errors.invalid(format_args!("{field}.values"), other, "must be a list");
            &no_values
        }
    };
    match expression["operator"].as_str().unwrap_or_default() {
        "In" | "NotIn" if values.is_empty() => errors.required(
            format_args!("{field}.values"),
            "must be specified when `operator` is 'In' or 'NotIn'",
        ),
        "Exists" | "DoesNotExist" if !values.is_empty() => errors.forbidden(
            format_args!("{field}.values"),
            "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
        ),
        "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
        _ => errors.invalid(
            format_args!("{field}.operator"),
            &expression["operator"],
            "not a valid selector operator",
        ),
    }
    let key = expression["key"].as_str().unwrap_or_default();
    validate_key(key, &format!("{field}.key"), errors);
    for (at, value) in values.iter().enumerate() {
        validate_value(value, &format!("{field}.values[{at}]"), errors);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_as_many_errors_as_in_go() {
        let [name, prefix] = [64, 254].map(|length| "a".repeat(length));
        for (key, count) in [
            ("a", 0),
            ("A.b_c-9", 0),
            ("a.b/C", 0),
            ("", 2),
            ("a/", 2),
            ("/a", 1),
            ("/", 3),
            ("a/b/c", 1),
            ("A/b", 1),
            ("a b", 1),
            ("-a", 1),
            ("é", 1),
            (&name, 1),
            (&format!("{name}-"), 2),
            (&format!("{prefix}/a"), 1),
            (&format!("{prefix}-/a"), 2),
        ] {
            assert_eq!(qualified_name_errors(key).len(), count, "{key}");
        }
        for (value, count) in [
            ("", 0),
            ("a", 0),
            ("a b", 1),
            (&name, 1),
            (&format!("{name}-"), 2),
        ] {
            assert_eq!(label_value_errors(value).len(), count, "{value}");
        }
    }

    #[test]
    fn selectors_have_the_fields_of_apimachinery() {
        let selector = json!({
            "matchLabels": { "a b": "c d", "x": 1 },
            "matchExpressions": [
                { "key": "a", "operator": "In" },
                { "key": "", "operator": "Exists", "values": ["-"] },
                { "operator": "Like", "key": "a", "values": "x" },
                7,
            ],
        });
        let mut errors = FieldErrors::default();
        validate_selector(&selector, "s", &mut errors);
        let got: Vec<_> = errors
            .fields()
            .map(|error| format!("{} {}", error.error_type.as_str(), error.field))
            .collect();
        let expected = [
            "FieldValueInvalid s.matchLabels",
            "FieldValueInvalid s.matchLabels",
            "FieldValueInvalid s.matchLabels",
            "FieldValueRequired s.matchExpressions[0].values",
            "FieldValueForbidden s.matchExpressions[1].values",
            "FieldValueInvalid s.matchExpressions[1].key",
            "FieldValueInvalid s.matchExpressions[1].key",
            "FieldValueInvalid s.matchExpressions[1].values[0]",
            "FieldValueInvalid s.matchExpressions[2].values",
            "FieldValueInvalid s.matchExpressions[2].operator",
            "FieldValueInvalid s.matchExpressions[3].operator",
            "FieldValueInvalid s.matchExpressions[3].key",
            "FieldValueInvalid s.matchExpressions[3].key",
        ];
        assert_eq!(got, expected);
    }

    #[test]
    fn annotations_may_have_upper_case_and_are_bounded_in_total() {
        let errors_of = |annotations: &Value| {
            let mut errors = FieldErrors::default();
            validate_annotations(annotations, "a", &mut errors);
            errors.into_messages()
        };
        assert!(errors_of(&json!({ "A.b/C": "any\u{0}thing" })).is_empty());
        assert!(errors_of(&json!({ "a": "x".repeat(MAX_ANNOTATIONS_BYTES - 1) })).is_empty());
        let too_long = errors_of(&json!({ "a": "x".repeat(MAX_ANNOTATIONS_BYTES) }));
        assert_eq!(too_long, ["a: Too long: may not be more than 262144 bytes"]);
        assert_eq!(errors_of(&json!({ "a": 1 })).len(), 1);
        assert_eq!(errors_of(&json!([])).len(), 1);
    }
}
