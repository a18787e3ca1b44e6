//! Differences between two JSON documents, as in RFC 6902.

use std::borrow::Cow;

use serde_json::Value;

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldChange {
    /// Keys from the root.
    pub path: Vec<String>,
    /// Whether the value existed before and after; otherwise it was added or removed.
    pub replaced: bool,
}

/// All differences. Lists are compared by index.
pub fn field_changes(old: &Value, new: &Value) -> Vec<FieldChange> {
    let mut found = Vec::new();
    visit_changes(old, new, &mut |path, replaced| {
        let path = path.iter().map(ToString::to_string).collect();
        found.push(FieldChange { path, replaced });
    });
    found
}

/// Calls `visit` for each difference, with its keys from the root, and whether the value existed before and after.
pub fn visit_changes<'a>(old: &'a Value, new: &'a Value, visit: &mut dyn FnMut(&[Cow<'a, str>], bool)) {
    walk(old, new, &mut Vec::new(), visit);
}

fn walk<'a>(
    old: &'a Value,
    new: &'a Value,
    path: &mut Vec<Cow<'a, str>>,
    visit: &mut dyn FnMut(&[Cow<'a, str>], bool),
) {
    match (old, new) {
        (Value::Object(one), Value::Object(other)) => {
            let added = other.keys().filter(|key| !one.contains_key(*key));
            for key in one.keys().chain(added) {
                walk_child(key.into(), [one.get(key), other.get(key)], path, visit);
            }
        }
        (Value::Array(one), Value::Array(other)) => {
            for at in 0..one.len().max(other.len()) {
                walk_child(at.to_string().into(), [one.get(at), other.get(at)], path, visit);
            }
        }
        (one, other) if one == other => {}
        _ => visit(path, true),
    }
}

fn walk_child<'a>(
    key: Cow<'a, str>,
    versions: [Option<&'a Value>; 2],
    path: &mut Vec<Cow<'a, str>>,
    visit: &mut dyn FnMut(&[Cow<'a, str>], bool),
) {
    path.push(key);
    match versions {
        [Some(old), Some(new)] => walk(old, new, path, visit),
        _ => visit(path, false),
    }
    path.pop();
}
