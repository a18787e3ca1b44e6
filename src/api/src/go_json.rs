//! JSON as Go writes it: byte for byte, for hashes are taken over these bytes.
//!
//! Maps have their keys sorted, structs their fields in the order of their declaration, and `<`, `>`, `&`, U+2028
//! and U+2029 are escaped. Values are expected as the API server serves them, so that zero values are absent
//! already, but for those that Go writes always.

use serde_json::Value;

/// A Go struct: its JSON fields in the order of their declaration.
#[derive(Debug)]
pub struct Struct(pub &'static [Field]);

/// A field of a Go struct.
#[derive(Debug)]
pub struct Field {
    name: &'static str,
    of: Option<&'static Struct>,
    always: Option<&'static str>,
}

/// A field whose value is a scalar, a map, or a list of these.
#[must_use]
pub const fn plain(name: &'static str) -> Field {
    Field {
        name,
        of: None,
        always: None,
    }
}

/// A field whose value is a struct, or a list of structs.
#[must_use]
pub const fn nested(name: &'static str, of: &'static Struct) -> Field {
    Field {
        name,
        of: Some(of),
        always: None,
    }
}

impl Field {
    /// The same field, written as `json` where the value has none: what Go's `omitempty` does not omit.
    #[must_use]
    pub const fn or(self, json: &'static str) -> Self {
        Self {
            always: Some(json),
            ..self
        }
    }
}

/// A value without a Go struct behind it: all keys sorted, as Go writes maps.
#[must_use]
pub fn sorted(value: &Value) -> String {
    let mut out = String::new();
    write(value, None, &mut out);
    out
}

/// A value of a Go struct, or a list of such; fields that the struct does not have are left out.
#[must_use]
pub fn ordered(value: &Value, of: &'static Struct) -> String {
    let mut out = String::new();
    write(value, Some(of), &mut out);
    out
}

fn write(value: &Value, of: Option<&'static Struct>, out: &mut String) {
    match (value, of) {
        (Value::Array(items), _) => {
            join(out, ['[', ']'], items.iter(), |item, out| write(item, of, out));
        }
        (Value::Object(map), None) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            join(out, ['{', '}'], entries.into_iter(), |(key, value), out| {
                string(key, out);
                out.push(':');
                write(value, None, out);
            });
        }
        (Value::Object(map), Some(of)) => {
            let present = |field: &'static Field| {
                let value = map.get(field.name).filter(|v| !v.is_null());
                (value.is_some() || field.always.is_some()).then_some((field, value))
            };
            join(
                out,
                ['{', '}'],
                of.0.iter().filter_map(present),
                |(field, value), out| {
                    string(field.name, out);
                    out.push(':');
                    match value {
                        Some(value) => write(value, field.of, out),
                        None => out.push_str(field.always.unwrap_or_default()),
                    }
                },
            );
        }
        (Value::String(text), _) => string(text, out),
        (other, _) => out.push_str(&other.to_string()),
    }
}

fn join<T>(
    out: &mut String,
    around: [char; 2],
    items: impl Iterator<Item = T>,
    mut one: impl FnMut(T, &mut String),
) {
    out.push(around[0]);
    for (at, item) in items.enumerate() {
        if at > 0 {
            out.push(',');
        }
        one(item, out);
    }
    out.push(around[1]);
}

fn string(text: &str, out: &mut String) {
    for c in Value::from(text).to_string().chars() {
        if escaped(c) {
            out.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            out.push(c);
        }
    }
}

/// What Go escapes and `serde_json` does not.
fn escaped(c: char) -> bool {
    matches!(c, '<' | '>' | '&' | '\u{2028}' | '\u{2029}')
}

/// How many bytes Go, and so etcd, makes of what `serde_json` wrote.
#[must_use]
pub fn length(json: &str) -> usize {
    let bytes = |c| if escaped(c) { ESCAPED } else { c.len_utf8() };
    json.chars().map(bytes).sum()
}

/// How many bytes Go makes of a character inside of a string.
#[must_use]
pub fn width(c: char) -> usize {
    match c {
        '"' | '\\' | '\u{8}' | '\t' | '\n' | '\u{c}' | '\r' => 2,
        c if escaped(c) || c < ' ' => ESCAPED,
        c => c.len_utf8(),
    }
}

/// Bytes of an escape of four digits.
const ESCAPED: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const INNER: Struct = Struct(&[plain("z"), plain("a")]);
    const OUTER: Struct = Struct(&[
        plain("name"),
        nested("list", &INNER),
        nested("one", &INNER).or("{}"),
    ]);

    #[test]
    fn structs_keep_their_order_and_maps_are_sorted() {
        let value =
            json!({"list": [{"a": {"y": 1, "b": null}, "z": "<&>\u{2028}"}], "unknown": 1, "name": "n"});
        assert_eq!(
            ordered(&value, &OUTER),
            r#"{"name":"n","list":[{"z":"\u003c\u0026\u003e\u2028","a":{"b":null,"y":1}}],"one":{}}"#
        );
        assert_eq!(
            sorted(&json!([{"b": 1, "a": "\u{8}\n"}])),
            r#"[{"a":"\b\n","b":1}]"#
        );
    }

    #[test]
    fn lengths_are_those_of_the_text() {
        let text = "a\"\\/\u{0}\u{8}\t\n\u{c}\r\u{1f}\u{7f}<&>ä\u{2028}\u{2029}€😀";
        for value in [json!(text), json!({ "<": [text, 1.5, null] })] {
            assert_eq!(length(&value.to_string()), sorted(&value).len());
        }
        let inside: usize = text.chars().map(width).sum();
        assert_eq!(inside + 2, sorted(&json!(text)).len());
    }
}
