//! Writing into JSON. `value["field"] = …` panics where `value` is a string, a number or a list; this does not.

use serde_json::{Map, Value};

/// Sets the field at the end of `path`. What is on the way and is no object is replaced by one.
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

/// Sets the field at the end of `path` where it is absent or null. What is on the way and absent becomes an object; what is
/// there and is none stays, and the field with it, for the schema to refuse.
pub fn default(value: &mut Value, path: &[&str], new: Value) {
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
    default(field, rest, new);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_field_is_set_whatever_is_there() {
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
    fn a_default_changes_nothing_that_is_there() {
        for (mut there, then) in [
            (json!({}), json!({ "a": { "b": 2 } })),
            (json!({ "a": null }), json!({ "a": { "b": 2 } })),
            (json!({ "a": { "b": null } }), json!({ "a": { "b": 2 } })),
            (json!({ "a": { "b": 1 } }), json!({ "a": { "b": 1 } })),
            (json!({ "a": "x" }), json!({ "a": "x" })),
            (json!("x"), json!("x")),
        ] {
            default(&mut there, &["a", "b"], json!(2));
            assert_eq!(there, then);
        }
    }
}
