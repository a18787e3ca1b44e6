#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod batches;
mod legacy;
mod overtaken;
mod proofs;
mod sizes;
mod vectors;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::*;

/// A Pod with our gate, ready, whose containers run `image:1`.
pub(super) fn pod(containers: &[&str]) -> Value {
    let specs = containers
        .iter()
        .map(|name| json!({ "name": name, "image": format!("{name}:1"), "resources": {} }));
    let statuses = containers.iter().map(|name| {
        json!({
            "name": name, "ready": true, "restartCount": 0, "containerID": format!("containerd://{name}-0"),
            "image": format!("docker.io/library/{name}:1"), "imageID": format!("sha256:{name}-1"),
            "state": { "running": {} },
        })
    });
    json!({
        "metadata": {
            "name": "p", "uid": "u", "resourceVersion": "7", "labels": { "app": "x" },
            "annotations": { "ours": "not" },
        },
        "spec": {
            "readinessGates": [{ "conditionType": "InPlaceUpdateReady" }],
            "containers": specs.collect::<Value>(),
        },
        "status": {
            "phase": "Running",
            "conditions": [
                { "type": "InPlaceUpdateReady", "status": "True" },
                { "type": "ContainersReady", "status": "True" },
                { "type": "Ready", "status": "True" },
            ],
            "containerStatuses": statuses.collect::<Value>(),
        },
    })
}

/// What the API server would make of a strategic merge patch, as far as ours use it.
pub(crate) fn apply(object: &mut Value, patch: &Value) {
    match (object, patch) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
                    let gone = value.as_array().unwrap();
                    if let Some(Value::Array(items)) = into.get_mut(list) {
                        items.retain(|item| !gone.contains(item));
                    }
                } else if value.is_null() {
                    into.remove(key);
                } else {
                    apply(into.entry(key).or_insert(Value::Null), value);
                }
            }
        }
        (Value::Array(into), Value::Array(from)) => {
            for item in from {
                let mut keys = ["type", "uid"].into_iter();
                let key = keys.find(|key| item.get(key).is_some()).unwrap_or("name");
                let same = |other: &Value| item.is_object() && item[key] == other[key] || item == other;
                if item["$patch"] == "delete" {
                    into.retain(|other| !same(other));
                    continue;
                }
                match into.iter_mut().find(|other| same(other)) {
                    Some(other) => apply(other, item),
                    None => into.push(item.clone()),
                }
            }
        }
        (into, Value::Object(from)) if into.is_null() => {
            *into = Value::Object(Map::new());
            apply(into, &Value::Object(from.clone()));
        }
        (into, from) => *into = from.clone(),
    }
}

pub(super) fn apply_all(pod: &mut Value, writes: &[Write]) {
    for write in writes {
        assert_eq!(write.patch["metadata"]["uid"], pod["metadata"]["uid"]);
        apply(pod, &write.patch);
    }
}

pub(super) fn images(containers: &[(&str, &str)]) -> Spec {
    Spec {
        revision: "r2".to_owned(),
        container_images: containers
            .iter()
            .map(|(n, i)| ((*n).to_owned(), (*i).to_owned()))
            .collect(),
        ..Spec::default()
    }
}

pub(super) fn start(pod: &mut Value, spec: &Spec) -> Vec<Write> {
    let writes = patch::begin(&Pod::of(pod), spec, &Map::new(), &Map::new(), at(0));
    apply_all(pod, &writes);
    writes
}

pub(super) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).unwrap()
}

pub(super) fn holds(pod: &Value, type_: &str) -> bool {
    Pod::of(pod).condition(type_).is_some_and(|c| c.holds)
}

pub(super) fn next(pod: &Value, second: i64) -> Refresh {
    refresh(&Pod::of(pod), |revision| revision == "r2", at(second))
}
