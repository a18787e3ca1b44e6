//! What differs between two JSON documents, as RFC 6902 names it.

use serde_json::Value;

/// One difference.
#[derive(Clone, Debug, PartialEq)]
pub struct Change<'a> {
    /// Where: the keys from the root on.
    pub path: Vec<String>,
    /// The new value, if there was another one; `None` where a value was added or removed.
    pub replaced: Option<&'a Value>,
}

/// All differences. Lists are compared place by place.
pub fn changes<'a>(old: &Value, new: &'a Value) -> Vec<Change<'a>> {
    let mut found = Vec::new();
    walk(old, new, &mut Vec::new(), &mut found);
    found
}

fn walk<'a>(old: &Value, new: &'a Value, path: &mut Vec<String>, found: &mut Vec<Change<'a>>) {
    match (old, new) {
        (Value::Object(one), Value::Object(other)) => {
            let added = other.keys().filter(|key| !one.contains_key(*key));
            for key in one.keys().chain(added) {
                below(key.clone(), one.get(key), other.get(key), path, found);
            }
        }
        (Value::Array(one), Value::Array(other)) => {
            for at in 0..one.len().max(other.len()) {
                below(at.to_string(), one.get(at), other.get(at), path, found);
            }
        }
        (one, other) if one == other => {}
        (_, other) => found.push(Change {
            path: path.clone(),
            replaced: Some(other),
        }),
    }
}

fn below<'a>(
    key: String,
    old: Option<&Value>,
    new: Option<&'a Value>,
    path: &mut Vec<String>,
    found: &mut Vec<Change<'a>>,
) {
    path.push(key);
    match (old, new) {
        (Some(old), Some(new)) => walk(old, new, path, found),
        _ => found.push(Change {
            path: path.clone(),
            replaced: None,
        }),
    }
    path.pop();
}
