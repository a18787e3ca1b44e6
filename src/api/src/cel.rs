//! Text and label selectors in CEL. Text of a user stays text: only printable ASCII without quotes and backslashes is
//! written as it is.

use std::fmt::Write as _;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// Labels of the object.
pub const LABELS: &str = "object.metadata.?labels.orValue({})";

/// A string literal.
#[must_use]
pub fn string(text: &str) -> String {
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
#[must_use]
pub fn strings<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let texts: Vec<String> = texts.into_iter().map(string).collect();
    format!("[{}]", texts.join(", "))
}

/// Whether `labels`, an expression, match a selector, as [`super::selector::matches`] decides it.
#[must_use]
pub fn matches(selector: &LabelSelector, labels: &str) -> String {
    let equal = selector.match_labels.iter().flatten().map(|(key, value)| {
        let (key, value) = (string(key), string(value));
        format!("({key} in {labels} && {labels}[{key}] == {value})")
    });
    let expressions = selector.match_expressions.iter().flatten().map(|one| {
        let key = string(&one.key);
        let values = strings(one.values.iter().flatten().map(String::as_str));
        let listed = format!("({key} in {labels} && {labels}[{key}] in {values})");
        match one.operator.as_str() {
            "In" => listed,
            "NotIn" => format!("!{listed}"),
            "Exists" => format!("{key} in {labels}"),
            "DoesNotExist" => format!("!({key} in {labels})"),
            _ => "false".to_owned(),
        }
    });
    let all: Vec<String> = equal.chain(expressions).collect();
    match all.as_slice() {
        [] => "true".to_owned(),
        all => format!("({})", all.join(" && ")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn selectors_become_expressions() {
        let selector = |value| serde_json::from_value::<LabelSelector>(value).unwrap();
        let all = selector(json!({ "matchLabels": { "a'": "b" }, "matchExpressions": [
            { "key": "c", "operator": "NotIn", "values": ["d", "e"] }, { "key": "f", "operator": "DoesNotExist" },
        ] }));
        assert_eq!(
            matches(&all, "l"),
            r"(('a\'' in l && l['a\''] == 'b') && !('c' in l && l['c'] in ['d', 'e']) && !('f' in l))"
        );
        assert_eq!(matches(&selector(json!({})), "l"), "true");
        assert_eq!(strings(["a", "'"]), r"['a', '\'']");
        let odd = selector(json!({ "matchExpressions": [{ "key": "c", "operator": "?" }] }));
        assert_eq!(matches(&odd, "l"), "(false)");
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
