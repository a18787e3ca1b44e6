//! Reads fields of raw JSON. A value of a wrong type is an error, and counts as absent; so does null, without an error.

use std::fmt::Display;

use kruise_api::validation::FieldErrors;
use serde_json::{Map, Value};

/// A string; empty if absent.
pub(super) fn text<'a>(value: &'a Value, field: impl Display, errors: &mut FieldErrors) -> &'a str {
    match value {
        Value::String(text) => text,
        Value::Null => "",
        other => {
            errors.invalid(field, other, "must be a string");
            ""
        }
    }
}

/// A list; empty if absent.
pub(super) fn list<'a>(value: &'a Value, field: impl Display, errors: &mut FieldErrors) -> &'a [Value] {
    match value {
        Value::Array(items) => items,
        Value::Null => &[],
        other => {
            errors.invalid(field, other, "must be a list");
            &[]
        }
    }
}

/// An object.
pub(super) fn object<'a>(
    value: &'a Value,
    field: impl Display,
    errors: &mut FieldErrors,
) -> Option<&'a Map<String, Value>> {
    match value {
        Value::Object(map) => Some(map),
        Value::Null => None,
        other => {
            errors.invalid(field, other, "must be an object");
            None
        }
    }
}

/// A number of 32 bits.
pub(super) fn int32(value: &Value, field: impl Display, errors: &mut FieldErrors) -> Option<i32> {
    if value.is_null() {
        return None;
    }
    let number = value.as_i64().and_then(|number| i32::try_from(number).ok());
    if number.is_none() {
        errors.invalid(field, value, "must be an integer of 32 bits");
    }
    number
}

/// The items of a list that was checked before.
pub(super) fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A string that was checked before.
pub(super) fn as_text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
