//! JSON as Go writes it, byte for byte, because hashes are computed over these bytes.
//!
//! Maps have sorted keys, structs have their fields in the order of declaration, and `<`, `>`, `&`, U+2028 and U+2029
//! are escaped. Values are expected as the API server serves them: zero values are already absent, except those that Go
//! always writes.

use serde_json::Value;

/// A Go struct: its JSON fields in the order of their declaration.
#[derive(Debug)]
pub struct GoStruct(pub &'static [GoField]);

/// A field of a Go struct.
#[derive(Debug)]
pub struct GoField {
    name: &'static str,
    layout: Option<&'static GoStruct>,
    default_json: Option<&'static str>,
}

/// A field whose value is a scalar, a map, or a list of these.
#[must_use]
pub const fn scalar(name: &'static str) -> GoField {
    GoField {
        name,
        layout: None,
        default_json: None,
    }
}

/// A field whose value is a struct, or a list of structs.
#[must_use]
pub const fn nested(name: &'static str, layout: &'static GoStruct) -> GoField {
    GoField {
        name,
        layout: Some(layout),
        default_json: None,
    }
}

impl GoField {
    /// The same field, written as `json` if it is absent: what Go's `omitempty` does not omit.
    #[must_use]
    pub const fn or_default_json(self, json: &'static str) -> Self {
        Self {
            default_json: Some(json),
            ..self
        }
    }
}

/// A value without a Go struct: all keys sorted, as Go writes maps.
#[must_use]
pub fn to_sorted_json(value: &Value) -> String {
    let mut out = String::new();
    write(value, None, &mut out);
    out
}

/// A value of a Go struct, or a list of them; fields that the struct does not have are left out.
#[must_use]
pub fn to_ordered_json(value: &Value, layout: &'static GoStruct) -> String {
    let mut out = String::new();
    write(value, Some(layout), &mut out);
    out
}

fn write(value: &Value, layout: Option<&'static GoStruct>, out: &mut String) {
    match (value, layout) {
        (Value::Array(items), _) => {
            join(out, ['[', ']'], items.iter(), |item, out| {
                write(item, layout, out)
            });
        }
        (Value::Object(map), None) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            join(out, ['{', '}'], entries.into_iter(), |(key, value), out| {
                write_string(key, out);
                out.push(':');
                write(value, None, out);
            });
        }
        (Value::Object(map), Some(layout)) => {
            let present = |field: &'static GoField| {
                let value = map.get(field.name).filter(|v| !v.is_null());
                (value.is_some() || field.default_json.is_some()).then_some((field, value))
            };
            join(
                out,
                ['{', '}'],
                layout.0.iter().filter_map(present),
                |(field, value), out| {
                    write_string(field.name, out);
                    out.push(':');
                    match value {
                        Some(value) => write(value, field.layout, out),
                        None => out.push_str(field.default_json.unwrap_or_default()),
                    }
                },
            );
        }
        (Value::String(text), _) => write_string(text, out),
        (other, _) => out.push_str(&other.to_string()),
    }
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
    for c in Value::from(text).to_string().chars() {
        if is_escaped(c) {
            out.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            out.push(c);
        }
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
