//! JSON as Go writes it, byte for byte, because hashes are computed over these bytes.
//!
//! Maps have sorted keys, structs have their fields in the order of declaration, and `<`, `>`, `&`, U+2028 and U+2029
//! are escaped. Fields of structs are left out as by Go's `omitempty`, and quantities are in their canonical form.
//! Values without a struct are expected as the API server serves them: zero values are already absent.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::{Map, Value};

mod container;
mod layout;
pub mod quantity;
mod sidecar_container;

pub use container::{CONTAINER, PROBE};
pub use layout::{GoField, GoStruct, inlined, nested, quantities, quantity, scalar};
pub use sidecar_container::SIDECAR_CONTAINER;

use layout::{GoValue, WhenEmpty};

/// A value without a Go struct: all keys sorted, as Go writes maps.
#[must_use]
pub fn to_sorted_json(value: &Value) -> String {
    let mut out = String::new();
    write(value, &mut out);
    out
}

/// A value of a Go struct, or a list of them; fields that the struct does not have are left out.
#[must_use]
pub fn to_ordered_json(value: &Value, layout: &'static GoStruct) -> String {
    let mut out = String::new();
    write_struct(value, layout, &mut out);
    out
}

/// A value that serializes its fields in the order in which Go declares them; maps must be sorted.
#[must_use]
pub fn to_json(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).unwrap_or_default();
    let mut out = String::with_capacity(json.len());
    escape(&json, &mut out);
    out
}

fn write(value: &Value, out: &mut String) {
    match value {
        Value::Array(items) => join(out, ['[', ']'], items.iter(), write),
        Value::Object(map) => write_map(map, out, write),
        Value::String(text) => write_string(text, out),
        other => out.push_str(&other.to_string()),
    }
}

fn write_map(map: &Map<String, Value>, out: &mut String, write_value: impl Fn(&Value, &mut String)) {
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_by_key(|(key, _)| *key);
    join(out, ['{', '}'], entries.into_iter(), |(key, value), out| {
        write_string(key, out);
        out.push(':');
        write_value(value, out);
    });
}

fn write_struct(value: &Value, layout: &'static GoStruct, out: &mut String) {
    match value {
        Value::Array(items) => join(out, ['[', ']'], items.iter(), |item, out| match item {
            // Go reads null as the zero value.
            Value::Null => write_struct(&Value::Object(Map::new()), layout, out),
            item => write_struct(item, layout, out),
        }),
        Value::Object(map) => {
            let mut fields = Vec::new();
            collect_fields(map, layout, &mut fields);
            join(out, ['{', '}'], fields.into_iter(), |(field, value), out| {
                write_string(field.name, out);
                out.push(':');
                match (value, field.empty) {
                    (Some(value), _) => write_field(value, field.value, out),
                    (None, WhenEmpty::Written(json)) => out.push_str(json),
                    (None, _) => out.push_str("null"),
                }
            });
        }
        other => write(other, out),
    }
}

/// The fields that are written, with their values unless absent.
fn collect_fields<'a>(
    object: &'a Map<String, Value>,
    layout: &'static GoStruct,
    into: &mut Vec<(&'static GoField, Option<&'a Value>)>,
) {
    for field in layout.0 {
        if let GoValue::Inlined(inner) = field.value {
            collect_fields(object, inner, into);
            continue;
        }
        let value = field.value(object);
        if value.is_some() || matches!(field.empty, WhenEmpty::Written(_)) {
            into.push((field, value));
        }
    }
}

fn write_field(value: &Value, kind: GoValue, out: &mut String) {
    match (kind, value) {
        (GoValue::Struct(layout), value) => write_struct(value, layout, out),
        (GoValue::Quantity, value) => write_quantity(value, out),
        (GoValue::Quantities, Value::Object(map)) => write_map(map, out, write_quantity),
        (_, Value::Array(items)) => join(out, ['[', ']'], items.iter(), |item, out| match item {
            // The lists that we know are lists of strings.
            Value::Null => out.push_str("\"\""),
            item => write(item, out),
        }),
        (_, value) => write(value, out),
    }
}

fn write_quantity(value: &Value, out: &mut String) {
    let text = match value {
        Value::Null => Cow::from("0"),
        Value::String(text) => Cow::from(text),
        Value::Number(number) => Cow::from(number.to_string()),
        other => return write(other, out),
    };
    write_string(&quantity::canonical(&text).unwrap_or(text.into_owned()), out);
}

fn join<T>(
    out: &mut String,
    brackets: [char; 2],
    items: impl Iterator<Item = T>,
    mut write_item: impl FnMut(T, &mut String),
) {
    out.push(brackets[0]);
    for (at, item) in items.enumerate() {
        if at > 0 {
            out.push(',');
        }
        write_item(item, out);
    }
    out.push(brackets[1]);
}

fn write_string(text: &str, out: &mut String) {
    escape(&Value::from(text).to_string(), out);
}

/// Outside strings, JSON has none of the characters to escape.
fn escape(json: &str, out: &mut String) {
    json.chars().for_each(|c| push_escaped(c, out));
}

/// Adds a character of JSON, escaped if Go escapes it.
pub fn push_escaped(c: char, out: &mut String) {
    if is_escaped(c) {
        out.push_str(&format!("\\u{:04x}", u32::from(c)));
    } else {
        out.push(c);
    }
}

/// Characters that Go escapes and `serde_json` does not.
fn is_escaped(c: char) -> bool {
    matches!(c, '<' | '>' | '&' | '\u{2028}' | '\u{2029}')
}

/// Length in bytes as Go, and so etcd, encodes the output of `serde_json`.
#[must_use]
pub fn encoded_length(json: &str) -> usize {
    let bytes = |c| {
        if is_escaped(c) {
            ESCAPE_LENGTH
        } else {
            c.len_utf8()
        }
    };
    json.chars().map(bytes).sum()
}

/// Length in bytes of a character in a string as Go encodes it.
#[must_use]
pub fn encoded_width(c: char) -> usize {
    match c {
        '"' | '\\' | '\u{8}' | '\t' | '\n' | '\u{c}' | '\r' => 2,
        c if is_escaped(c) || c < ' ' => ESCAPE_LENGTH,
        c => c.len_utf8(),
    }
}

/// Bytes of an escape of four digits.
const ESCAPE_LENGTH: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const INNER: GoStruct = GoStruct(&[scalar("z"), scalar("a")]);
    const OUTER: GoStruct = GoStruct(&[
        scalar("name"),
        nested("list", &INNER),
        nested("one", &INNER).or_default_json("{}"),
    ]);

    #[test]
    fn zero_values_are_omitted_except_of_pointers_and_structs() {
        const EMPTY: GoStruct = GoStruct(&[
            inlined(&INNER),
            scalar("plain"),
            scalar("pointer").pointer(),
            scalar("always").or_default_json("0"),
            nested("struct", &INNER),
            quantities("quantities"),
            quantity("quantity"),
        ]);
        for (value, text) in [
            (json!({}), r#"{"always":0,"quantity":"0"}"#),
            (
                json!({ "plain": 0, "pointer": 0 }),
                r#"{"pointer":0,"always":0,"quantity":"0"}"#,
            ),
            (
                json!({ "plain": "", "always": 1 }),
                r#"{"always":1,"quantity":"0"}"#,
            ),
            (
                json!({ "plain": [], "struct": [] }),
                r#"{"always":0,"quantity":"0"}"#,
            ),
            (
                json!({ "plain": false, "struct": {} }),
                r#"{"always":0,"struct":{},"quantity":"0"}"#,
            ),
            (
                json!({ "plain": [null], "struct": [null] }),
                r#"{"plain":[""],"always":0,"struct":[{}],"quantity":"0"}"#,
            ),
            (
                json!({ "a": 1, "z": 0, "quantities": {} }),
                r#"{"a":1,"always":0,"quantity":"0"}"#,
            ),
            (
                json!({ "quantities": { "b": 1.5, "a": "1024Mi", "c": null, "d": "x" }, "quantity": "2000m" }),
                r#"{"always":0,"quantities":{"a":"1Gi","b":"1500m","c":"0","d":"x"},"quantity":"2"}"#,
            ),
        ] {
            assert_eq!(to_ordered_json(&value, &EMPTY), text);
        }
        let odd =
            json!({ "quantities": [{}], "quantity": {}, "struct": "x", "plain": { "b": [], "a": null } });
        assert_eq!(
            to_ordered_json(&odd, &EMPTY),
            r#"{"plain":{"a":null,"b":[]},"always":0,"struct":"x","quantities":[{}],"quantity":{}}"#
        );
    }

    #[test]
    fn struct_fields_keep_order_and_maps_are_sorted() {
        let value =
            json!({"list": [{"a": {"y": 1, "b": null}, "z": "<&>\u{2028}"}], "unknown": 1, "name": "n"});
        assert_eq!(
            to_ordered_json(&value, &OUTER),
            r#"{"name":"n","list":[{"z":"\u003c\u0026\u003e\u2028","a":{"b":null,"y":1}}],"one":{}}"#
        );
        assert_eq!(
            to_sorted_json(&json!([{"b": 1, "a": "\u{8}\n"}])),
            r#"[{"a":"\b\n","b":1}]"#
        );
    }

    #[test]
    fn encoded_length_matches_the_encoded_text() {
        let text = "a\"\\/\u{0}\u{8}\t\n\u{c}\r\u{1f}\u{7f}<&>ä\u{2028}\u{2029}€😀";
        for value in [json!(text), json!({ "<": [text, 1.5, null] })] {
            assert_eq!(encoded_length(&value.to_string()), to_sorted_json(&value).len());
        }
        let inside: usize = text.chars().map(encoded_width).sum();
        assert_eq!(inside + 2, to_sorted_json(&json!(text)).len());
    }
}
