//! Values as CEL literals. Text of a user stays text: only printable ASCII without quotes and backslashes is written
//! as it is.

use std::fmt::Write as _;

use serde_json::Value;

use super::Unsupported;

/// Larger integers are floating-point numbers after the policy, which the API server refuses with status 500.
const MAX_INTEGER: u64 = 1 << 53;

/// A string literal.
pub(super) fn string(text: &str) -> String {
    let mut literal = String::with_capacity(text.len() + 2);
    literal.push('\'');
    for c in text.chars() {
        match c {
            '\'' | '\\' => literal.extend(['\\', c]),
            ' '..='~' => literal.push(c),
            c => {
                // Writing to a String does not fail.
                let _ = match u32::from(c) {
                    code @ ..0x1_0000 => write!(literal, "\\u{code:04x}"),
                    code => write!(literal, "\\U{code:08x}"),
                };
            }
        }
    }
    literal.push('\'');
    literal
}

/// A list of string literals.
pub(super) fn strings<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let texts: Vec<String> = texts.into_iter().map(string).collect();
    format!("[{}]", texts.join(", "))
}

/// The literal of a JSON value. Members are wrapped, because CEL allows no list or map of several types.
pub(super) fn value(value: &Value, field: &str) -> Result<String, Unsupported> {
    let wrapped = |inner: &Value, field: &str| Ok(format!("dyn({})", self::value(inner, field)?));
    Ok(match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::String(text) => string(text),
        Value::Number(number) => {
            let size = number.as_i64().map(i64::unsigned_abs);
            if size.is_none_or(|size| size > MAX_INTEGER) {
                return Err(Unsupported::new(field, "is no integer below 2^53"));
            }
            number.to_string()
        }
        Value::Array(items) => {
            let items = items
                .iter()
                .enumerate()
                .map(|(at, item)| wrapped(item, &format!("{field}[{at}]")));
            let items: Vec<String> = items.collect::<Result<_, Unsupported>>()?;
            format!("[{}]", items.join(", "))
        }
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, inner)| {
                let inner = wrapped(inner, &format!("{field}.{name}"))?;
                Ok(format!("{}: {inner}", string(name)))
            });
            let fields: Vec<String> = fields.collect::<Result<_, Unsupported>>()?;
            format!("{{{}}}", fields.join(", "))
        }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn values_become_literals() {
        let value_of = json!({ "a'": ["x\"\\\n", 1, -2, true, null, {}], "é": "😀\0" });
        assert_eq!(
            value(&value_of, "f").unwrap(),
            r#"{'a\'': dyn([dyn('x"\\\u000a'), dyn(1), dyn(-2), dyn(true), dyn(null), dyn({})]), '\u00e9': dyn('\U0001f600\u0000')}"#
        );
        assert_eq!(strings(["a", "'"]), r"['a', '\'']");
        for number in [
            json!(9_007_199_254_740_993_u64),
            json!(1.5),
            json!(u64::MAX),
            json!(i64::MIN),
        ] {
            let error = value(&json!({ "a": [number] }), "f").unwrap_err();
            assert_eq!(error.to_string(), "f.a[0] is no integer below 2^53");
        }
    }

    /// Reads a string literal as CEL does; gives the text, and what follows the literal.
    fn read(literal: &str) -> Option<(String, &str)> {
        let mut text = String::new();
        let mut chars = literal.strip_prefix('\'')?.chars();
        loop {
            match chars.next()? {
                '\'' => return Some((text, chars.as_str())),
                '\\' => match chars.next()? {
                    c @ ('\'' | '\\') => text.push(c),
                    kind @ ('u' | 'U') => {
                        let digits = if kind == 'u' { 4 } else { 8 };
                        let (code, rest) = chars.as_str().split_at_checked(digits)?;
                        text.push(char::from_u32(u32::from_str_radix(code, 16).ok()?)?);
                        chars = rest.chars();
                    }
                    _ => return None,
                },
                c if c.is_ascii_graphic() || c == ' ' => text.push(c),
                _ => return None,
            }
        }
    }

    proptest! {
        /// Whatever the text, CEL reads one literal, and the same text out of it.
        #[test]
        fn text_stays_text(text in prop_oneof![any::<String>(), "['\"\\\\u0-9$(){}+\n\r\u{2028}`\\[\\]]{0,20}"]) {
            let literal = string(&text);
            prop_assert_eq!(read(&literal), Some((text, "")));
        }
    }
}
