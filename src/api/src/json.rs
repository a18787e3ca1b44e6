//! Sets fields of JSON, and estimates its memory. `value["field"] = …` panics if `value` is a string, a number or a
//! list; this does not.

use serde_json::{Map, Value};

/// Sets the field at the end of `path`. Values on the way that are not objects are replaced by objects.
pub fn set(value: &mut Value, path: &[&str], new: Value) {
    let Some((first, rest)) = path.split_first() else {
        *value = new;
        return;
    };
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    if let Some(fields) = value.as_object_mut() {
        set(fields.entry(*first).or_insert(Value::Null), rest, new);
    }
}

/// Sets the field at the end of `path` if it is absent or null. Absent values on the way become objects; other values
/// that are not objects are kept, and the field is not set, for the schema to refuse.
pub fn set_default(value: &mut Value, path: &[&str], new: Value) {
    let (Some(fields), Some((first, rest))) = (value.as_object_mut(), path.split_first()) else {
        return;
    };
    let field = fields.entry(*first).or_insert(Value::Null);
    if rest.is_empty() {
        if field.is_null() {
            *field = new;
        }
        return;
    }
    if field.is_null() {
        *field = Value::Object(Map::new());
    }
    set_default(field, rest, new);
}

/// Adds an item to the list at the end of `path`. Values on the way that are no objects, or no list, are replaced.
pub fn append(value: &mut Value, path: &[&str], item: Value) {
    let Some((first, rest)) = path.split_first() else {
        match value {
            Value::Array(items) => items.push(item),
            other => *other = Value::Array(vec![item]),
        }
        return;
    };
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    if let Some(fields) = value.as_object_mut() {
        append(fields.entry(*first).or_insert(Value::Null), rest, item);
    }
}

/// The merge patch (RFC 7386) that gives a value which may be `current` exactly the fields of `desired`. A merge patch
/// alone keeps the fields that it does not name, at every depth.
#[must_use]
pub fn replacing_patch(current: &Value, desired: &Value) -> Value {
    let (Some(old), Some(new)) = (current.as_object(), desired.as_object()) else {
        return desired.clone();
    };
    let removed = old.keys().filter(|key| !new.contains_key(*key));
    let removed = removed.map(|key| (key.clone(), Value::Null));
    let kept = new.iter().map(|(key, value)| {
        let value = old
            .get(key)
            .map_or_else(|| value.clone(), |old| replacing_patch(old, value));
        (key.clone(), value)
    });
    Value::Object(removed.chain(kept).collect())
}

/// Bytes of the first entry of an object: a whole leaf of a B-tree, with room for eleven keys and values.
const FIRST_ENTRY_BYTES: usize = 640;
/// Bytes of each further value in a list, which grows by doubling; an object's leaves are half full.
const ITEM_BYTES: usize = 64;

/// Upper bound of the bytes that a JSON text takes when it is read as [`Value`], give or take the allocator's own.
#[must_use]
pub fn estimate_memory(text: &[u8]) -> usize {
    let (mut sum, mut quoted, mut escaped, mut opened) = (text.len(), false, false, false);
    for byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            _ if quoted => {}
            b'{' => opened = true,
            b'}' => opened = false,
            b':' => {
                sum += if opened { FIRST_ENTRY_BYTES } else { ITEM_BYTES };
                opened = false;
            }
            b',' | b'[' => sum += ITEM_BYTES,
            _ => {}
        }
    }
    sum
}

/// The items of a list; empty if there is no list.
#[must_use]
pub fn list_items<'a>(spec: &'a Map<String, Value>, list: &str) -> &'a [Value] {
    spec.get(list)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn memory_estimate_counts_values_outside_strings() {
        for (text, above_its_length) in [
            ("1", 0),
            ("{}", 0),
            (r#"{"":0}"#, FIRST_ENTRY_BYTES),
            (r#"{"a":1,"b":2}"#, FIRST_ENTRY_BYTES + 2 * ITEM_BYTES),
            (r#"{"a":{"b":{}}}"#, 2 * FIRST_ENTRY_BYTES),
            (r#"{"a":{},"b":{}}"#, FIRST_ENTRY_BYTES + 2 * ITEM_BYTES),
            (r#"{"a":[1,2]}"#, FIRST_ENTRY_BYTES + 2 * ITEM_BYTES),
            (r#"["a,[{\":{",1]"#, 2 * ITEM_BYTES),
        ] {
            assert_eq!(
                estimate_memory(text.as_bytes()),
                text.len() + above_its_length,
                "{text}"
            );
        }
    }

    #[test]
    fn replacing_patch_removes_what_is_not_desired() {
        let current =
            json!({ "same": 1, "list": [1], "map": { "a": "x", "b": { "c": 1 } }, "gone": { "d": 1 } });
        let desired = json!({ "same": 1, "list": [2], "map": { "b": { "e": 2 } } });
        let patch =
            json!({ "same": 1, "list": [2], "map": { "a": null, "b": { "c": null, "e": 2 } }, "gone": null });
        assert_eq!(replacing_patch(&current, &desired), patch);
        assert_eq!(replacing_patch(&Value::Null, &desired), desired);
    }

    #[test]
    fn set_replaces_values_of_any_type() {
        for mut there in [
            json!(null),
            json!("x"),
            json!(1),
            json!([1]),
            json!({ "a": [] }),
            json!({ "a": { "b": 1 } }),
        ] {
            set(&mut there, &["a", "b"], json!(2));
            assert_eq!(there, json!({ "a": { "b": 2 } }));
        }
        let mut there = json!({ "a": 1, "b": { "c": 2 } });
        set(&mut there, &["b", "d"], json!(3));
        assert_eq!(there, json!({ "a": 1, "b": { "c": 2, "d": 3 } }));
    }

    #[test]
    fn append_makes_a_list() {
        for (mut there, then) in [
            (json!(null), json!({ "a": { "b": [1] } })),
            (json!({ "a": [] }), json!({ "a": { "b": [1] } })),
            (json!({ "a": { "b": null } }), json!({ "a": { "b": [1] } })),
            (json!({ "a": { "b": [0] } }), json!({ "a": { "b": [0, 1] } })),
        ] {
            append(&mut there, &["a", "b"], json!(1));
            assert_eq!(there, then);
        }
    }

    #[test]
    fn set_default_keeps_existing_values() {
        for (mut there, then) in [
            (json!({}), json!({ "a": { "b": 2 } })),
            (json!({ "a": null }), json!({ "a": { "b": 2 } })),
            (json!({ "a": { "b": null } }), json!({ "a": { "b": 2 } })),
            (json!({ "a": { "b": 1 } }), json!({ "a": { "b": 1 } })),
            (json!({ "a": "x" }), json!({ "a": "x" })),
            (json!("x"), json!("x")),
        ] {
            set_default(&mut there, &["a", "b"], json!(2));
            assert_eq!(there, then);
        }
    }
}
