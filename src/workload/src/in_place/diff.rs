//! Differences between two JSON documents, as in RFC 6902.

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
    walk(old, new, &mut Vec::new(), &mut found);
    found
}

fn walk(old: &Value, new: &Value, path: &mut Vec<String>, found: &mut Vec<FieldChange>) {
    match (old, new) {
        (Value::Object(one), Value::Object(other)) => {
            let added = other.keys().filter(|key| !one.contains_key(*key));
            for key in one.keys().chain(added) {
                walk_child(key.clone(), one.get(key), other.get(key), path, found);
            }
        }
        (Value::Array(one), Value::Array(other)) => {
            for at in 0..one.len().max(other.len()) {
                walk_child(at.to_string(), one.get(at), other.get(at), path, found);
            }
        }
        (one, other) if one == other => {}
        _ => found.push(FieldChange {
            path: path.clone(),
            replaced: true,
        }),
    }
}

fn walk_child(
    key: String,
    old: Option<&Value>,
    new: Option<&Value>,
    path: &mut Vec<String>,
    found: &mut Vec<FieldChange>,
) {
    path.push(key);
    match (old, new) {
        (Some(old), Some(new)) => walk(old, new, path, found),
        _ => found.push(FieldChange {
            path: path.clone(),
            replaced: false,
        }),
    }
    path.pop();
}
