//! JSON merge patches (RFC 7396) between texts, with the bytes of OpenKruise: what the patch does not reach keeps its
//! order and its numbers, what it reaches is sorted.

use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::value::RawValue;

use kruise_api::go_json;

/// How deep values are merged.
const MAX_DEPTH: usize = 64;

/// Why two texts cannot be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// The present text is no JSON, or is null.
    #[error("invalid JSON document")]
    Document,
    /// The patch is neither an object nor a list.
    #[error("invalid JSON patch")]
    Patch,
    /// They are nested deeper than 64 levels.
    #[error("JSON is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
}

type Fields<'a> = BTreeMap<String, &'a RawValue>;

/// Merges a patch into a document. A document that is not an object is replaced.
///
/// # Errors
///
/// If one of them is no JSON or too deep, the document is null, or the patch is neither an object nor a list.
pub fn merge(document: &str, patch: &str) -> Result<String, MergeError> {
    let document: &RawValue = serde_json::from_str(document).map_err(|_| MergeError::Document)?;
    let patch: &RawValue = serde_json::from_str(patch).map_err(|_| MergeError::Patch)?;
    if is_null(document) {
        return Err(MergeError::Document);
    }
    if is_null(patch) || !patch.get().starts_with(['{', '[']) {
        return Err(MergeError::Patch);
    }
    if fields(patch).is_none() {
        return prune(patch, MAX_DEPTH);
    }
    merge_values(document, patch, MAX_DEPTH)
}

/// The fields of an object.
fn fields(value: &RawValue) -> Option<Fields<'_>> {
    serde_json::from_str(value.get()).ok()
}

fn is_null(value: &RawValue) -> bool {
    value.get() == "null"
}

fn merge_values(current: &RawValue, patch: &RawValue, depth: usize) -> Result<String, MergeError> {
    let depth = depth.checked_sub(1).ok_or(MergeError::TooDeep)?;
    let Some(current) = fields(current) else {
        return prune(patch, depth);
    };
    let Some(patch) = fields(patch) else {
        return Ok(compact(patch.get()));
    };
    let mut merged = BTreeMap::new();
    for (name, value) in &current {
        if !patch.contains_key(name) {
            merged.insert(name, compact(value.get()));
        }
    }
    for (name, value) in patch.iter().filter(|(_, value)| !is_null(value)) {
        let value = match current.get(name).filter(|value| !is_null(value)) {
            Some(current) => merge_values(current, value, depth)?,
            None => prune(value, depth)?,
        };
        merged.insert(name, value);
    }
    Ok(object(merged))
}

/// A value without fields that are null. Items of lists stay.
fn prune(value: &RawValue, depth: usize) -> Result<String, MergeError> {
    let depth = depth.checked_sub(1).ok_or(MergeError::TooDeep)?;
    if let Some(fields) = fields(value) {
        let kept = fields.iter().filter(|(_, value)| !is_null(value));
        let kept = kept.map(|(name, value)| Ok((name, prune(value, depth)?)));
        return Ok(object(kept.collect::<Result<_, _>>()?));
    }
    match serde_json::from_str::<Vec<&RawValue>>(value.get()) {
        Ok(items) => {
            let items: Vec<String> = items
                .iter()
                .map(|item| prune(item, depth))
                .collect::<Result<_, _>>()?;
            Ok(format!("[{}]", items.join(",")))
        }
        Err(_) => Ok(compact(value.get())),
    }
}

fn object(fields: BTreeMap<&String, String>) -> String {
    let name = |name: &String| go_json::to_sorted_json(&Value::from(name.as_str()));
    let fields: Vec<String> = fields
        .into_iter()
        .map(|(key, value)| format!("{}:{value}", name(key)))
        .collect();
    format!("{{{}}}", fields.join(","))
}

/// The same JSON without spaces between words, with Go's escapes.
fn compact(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let (mut quoted, mut escaped) = (false, false);
    for c in json.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            ' ' | '\t' | '\n' | '\r' if !quoted => continue,
            _ => {}
        }
        go_json::push_escaped(c, &mut out);
    }
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reached_values_are_sorted_and_others_kept() {
        for (document, patch, merged) in [
            (
                r#"{"a":2,"b":{"c":1}}"#,
                r#"{"b":{"c":null,"d":[1]}}"#,
                r#"{"a":2,"b":{"d":[1]}}"#,
            ),
            (
                r#"{"z": {"b":1.0, "a":1e2}}"#,
                r#"{"y":{"b":"<","a":null}}"#,
                r#"{"y":{"b":"\u003c"},"z":{"b":1.0,"a":1e2}}"#,
            ),
            ("[1]", r#"{"b":null,"a":[{"c":null},null]}"#, r#"{"a":[{},null]}"#),
            (r#"{"a":1}"#, "[ null, {\"a\":null} ]", "[null,{}]"),
            (
                r#"{"a":null,"b":null}"#,
                r#"{"a":{"x":null}}"#,
                r#"{"a":{},"b":null}"#,
            ),
            (
                r#"{"a":{"b":1}}"#,
                r#"{"a":[{"x":null}]}"#,
                r#"{"a":[{"x":null}]}"#,
            ),
            (r#""text""#, "{}", "{}"),
        ] {
            assert_eq!(
                merge(document, patch).as_deref(),
                Ok(merged),
                "{document} {patch}"
            );
        }
    }

    #[test]
    fn other_texts_are_errors() {
        for (document, patch, why) in [
            ("plain", "{}", MergeError::Document),
            ("", "{}", MergeError::Document),
            ("null", "{}", MergeError::Document),
            ("{} {}", "{}", MergeError::Document),
            ("{}", "plain", MergeError::Patch),
            ("{}", "", MergeError::Patch),
            ("{}", "null", MergeError::Patch),
            ("{}", "1", MergeError::Patch),
            ("[]", r#""x""#, MergeError::Patch),
        ] {
            assert_eq!(merge(document, patch), Err(why), "{document} {patch}");
        }
        let deep = format!("{}1{}", r#"{"a":"#.repeat(10_000), "}".repeat(10_000));
        assert_eq!(merge("{}", &deep), Err(MergeError::TooDeep));
        assert_eq!(merge(&deep, &deep), Err(MergeError::TooDeep));
        let list = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
        assert_eq!(merge("{}", &list), Err(MergeError::TooDeep));
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            Just(Value::from(1)),
            "[<a\"\\PC]{0,3}".prop_map(Value::from)
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                prop::collection::btree_map("[a-c<]{0,1}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Between objects it is a merge patch, but for nulls in lists of the patch.
        #[test]
        fn objects_are_merged_as_in_the_standard(document in any_json(), patch in any_json()) {
            let merged = merge(&document.to_string(), &patch.to_string());
            if let Ok(merged) = &merged {
                let merged: Value = serde_json::from_str(merged).unwrap();
                let mut expected = document.clone();
                json_patch::merge(&mut expected, &patch);
                if patch.is_object() && !patch.to_string().contains('[') {
                    prop_assert_eq!(merged, expected);
                }
            }
        }

        #[test]
        fn any_text_is_merged_or_refused(document in "[\\[\\]{}:,\"a1 n<]{0,12}", patch in "\\PC{0,12}") {
            let _ = merge(&document, &patch);
            let _ = merge(&patch, &document);
        }
    }
}
