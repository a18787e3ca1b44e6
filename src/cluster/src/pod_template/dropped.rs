//! Fields that the API server's response lacks.

use serde_json::Value;

/// Fields that are set in `before` and missing in `after`.
#[must_use]
pub fn dropped_fields(before: &Value, after: &Value) -> Vec<String> {
    let mut found = Vec::new();
    collect_dropped_fields(before, after, "spec.template", &mut found);
    found
}

/// Collects fields that were set and are missing now.
pub(super) fn collect_dropped_fields(before: &Value, after: &Value, path: &str, fields: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            for (key, value) in before.iter().filter(|(_, value)| is_set(value)) {
                let path = format!("{path}.{key}");
                match after.get(key) {
                    Some(after) => collect_dropped_fields(value, after, &path, fields),
                    None => fields.push(path),
                }
            }
        }
        (Value::Array(before), Value::Array(after)) => {
            for (at, (before, after)) in before.iter().zip(after).enumerate() {
                collect_dropped_fields(before, after, &format!("{path}[{at}]"), fields);
            }
        }
        _ => {}
    }
}

/// Go omits what is null, empty, zero or false.
pub(super) fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => fields.values().any(is_set),
        Value::Bool(true) => true,
    }
}
