//! Helpers for tests of the controllers.
#![allow(clippy::unwrap_used)]

use serde_json::{Map, Value};

/// Applies a strategic merge patch like the API server, as far as our patches need it.
pub fn apply(object: &mut Value, patch: &Value) {
    match (object, patch) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
                    let removed = value.as_array().unwrap();
                    if let Some(Value::Array(items)) = into.get_mut(list) {
                        items.retain(|item| !removed.contains(item));
                    }
                } else if value.is_null() {
                    into.remove(key);
                } else {
                    apply(into.entry(key).or_insert(Value::Null), value);
                }
            }
        }
        (Value::Array(into), Value::Array(from)) => {
            for item in from {
                let mut keys = ["type", "uid"].into_iter();
                let key = keys.find(|key| item.get(key).is_some()).unwrap_or("name");
                let same = |other: &Value| item.is_object() && item[key] == other[key] || item == other;
                if item["$patch"] == "delete" {
                    into.retain(|other| !same(other));
                    continue;
                }
                match into.iter_mut().find(|other| same(other)) {
                    Some(other) => apply(other, item),
                    None => into.push(item.clone()),
                }
            }
        }
        (into, Value::Object(from)) if into.is_null() => {
            *into = Value::Object(Map::new());
            apply(into, &Value::Object(from.clone()));
        }
        (into, from) => *into = from.clone(),
    }
}
