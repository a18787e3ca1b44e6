//! Fields of a set as the API server reads them. A policy that writes a field of another type, or one that does not
//! exist, makes the API server refuse every Pod with status 500, whatever the failure policy. So does a webhook that
//! writes a field of another type.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::Unsupported;
use crate::in_place::quantity;

/// The value without nulls and empty lists, if it is a `T`.
pub(super) fn checked<T: DeserializeOwned + Serialize>(
    mut value: Value,
    field: &str,
) -> Result<Value, Unsupported> {
    clean(&mut value, field, |value| value.is_null() || is_empty_list(value))?;
    let typed = T::deserialize(&value).and_then(|typed| serde_json::to_value(typed));
    let typed = typed.map_err(|why| unreadable(field, &why))?;
    match unknown_field(&value, &typed, field) {
        Some(unknown) => Err(Unsupported::new(&unknown, "is no field that this release knows")),
        None => Ok(value),
    }
}

/// Whether the API server can read the value as a `T`, with fields that this release does not know; `field` is its path.
///
/// # Errors
///
/// If it cannot.
pub(crate) fn check<T: DeserializeOwned>(value: &Value, field: &str) -> Result<(), Unsupported> {
    let mut value = value.clone();
    clean(&mut value, field, Value::is_null)?;
    T::deserialize(&value)
        .map(drop)
        .map_err(|why| unreadable(field, &why))
}

fn unreadable(field: &str, why: &serde_json::Error) -> Unsupported {
    Unsupported::new(field, format_args!("cannot be read: {why}"))
}

/// Fields whose members have names of the user's.
const FREE_NAMES: [&str; 5] = [
    "labels",
    "annotations",
    "volumeAttributes",
    "options",
    "matchLabels",
];

/// Removes members that say as much as none, and writes quantities as text. The types leave an empty list out as they
/// leave out an unknown field, and the API server stores neither.
fn clean(value: &mut Value, field: &str, is_removed: fn(&Value) -> bool) -> Result<(), Unsupported> {
    match value {
        Value::Array(items) => {
            for (at, item) in items.iter_mut().enumerate() {
                clean(item, &format!("{field}[{at}]"), is_removed)?;
            }
        }
        Value::Object(fields) => {
            fields.retain(|_, value| !is_removed(value));
            for (name, value) in fields {
                let field = format!("{field}.{name}");
                match name.as_str() {
                    "limits" | "requests" => {
                        for (name, amount) in value.as_object_mut().into_iter().flatten() {
                            clean_quantity(amount, &format!("{field}.{name}"))?;
                        }
                    }
                    "sizeLimit" | "divisor" => clean_quantity(value, &field)?,
                    name if FREE_NAMES.contains(&name) => {}
                    _ => clean(value, &field, is_removed)?,
                }
            }
        }
        _ => {}
    }
    Ok(())
}

fn clean_quantity(value: &mut Value, field: &str) -> Result<(), Unsupported> {
    match value {
        Value::Number(number) => *value = number.to_string().into(),
        // As the API server reads it.
        Value::Null => *value = "0".into(),
        _ => {}
    }
    let is_quantity = value.as_str().is_some_and(|text| quantity::parse(text).is_some());
    is_quantity
        .then_some(())
        .ok_or_else(|| Unsupported::new(field, "is no quantity"))
}

/// A field that was lost because the type does not have it.
fn unknown_field(value: &Value, typed: &Value, field: &str) -> Option<String> {
    match (value, typed) {
        (Value::Object(fields), Value::Object(known)) => fields.iter().find_map(|(name, value)| {
            let field = format!("{field}.{name}");
            match known.get(name) {
                Some(typed) => unknown_field(value, typed, &field),
                None => Some(field),
            }
        }),
        (Value::Array(items), Value::Array(known)) => {
            let mut pairs = items.iter().zip(known).enumerate();
            pairs.find_map(|(at, (value, typed))| unknown_field(value, typed, &format!("{field}[{at}]")))
        }
        _ => None,
    }
}

fn is_empty_list(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty)
}

/// A container without the fields that only a SidecarSet has.
pub(super) fn container(fields: &Map<String, Value>, field: &str) -> Result<Value, Unsupported> {
    checked::<k8s_openapi::api::core::v1::Container>(Value::Object(fields.clone()), field)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use k8s_openapi::api::core::v1::Volume;
    use serde_json::json;

    use super::*;

    fn container_of(value: Value) -> Result<Value, String> {
        container(value.as_object().unwrap(), "c").map_err(|why| why.to_string())
    }

    #[test]
    fn fields_that_the_api_server_would_not_read_are_refused() {
        let clean = container_of(
            json!({ "name": "a", "image": null, "env": [], "newField": [], "labels": [], "resources": { "limits": { "cpu": 1.5, "memory": "1Gi" } } }),
        );
        let resources = json!({ "limits": { "cpu": "1.5", "memory": "1Gi" } });
        assert_eq!(clean, Ok(json!({ "name": "a", "resources": resources })));
        for (value, why) in [
            (
                json!({ "args": [1] }),
                "c cannot be read: invalid type: integer `1`, expected a string",
            ),
            (
                json!({ "image2": "a" }),
                "c.image2 is no field that this release knows",
            ),
            (
                json!({ "lifecycle": { "nope": {} } }),
                "c.lifecycle.nope is no field that this release knows",
            ),
            (
                json!({ "nope": { "list": [] } }),
                "c.nope is no field that this release knows",
            ),
            (
                json!({ "nope": "" }),
                "c.nope is no field that this release knows",
            ),
            (
                json!({ "ports": [{ "containerPort": 80, "x": 1 }] }),
                "c.ports[0].x is no field that this release knows",
            ),
            (
                json!({ "resources": { "limits": { "cpu": "x" } } }),
                "c.resources.limits.cpu is no quantity",
            ),
        ] {
            assert_eq!(container_of(value), Err(why.to_owned()));
        }
        let odd_names =
            json!({ "name": "v", "csi": { "driver": "d", "volumeAttributes": { "sizeLimit": "x" } } });
        assert_eq!(checked::<Volume>(odd_names.clone(), "v").unwrap(), odd_names);
    }
}
