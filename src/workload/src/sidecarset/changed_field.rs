//! How the containers of a Pod differ from those of its SidecarSet in more than images, for messages.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use kruise_api::go_json::{SIDECAR_CONTAINER, to_ordered_json};
use kruise_api::sidecarset::{SidecarContainer, SidecarSetSpec};
use kruise_api::validation::truncate;
use serde_json::{Map, Value};

use super::hash::is_native_sidecar;

/// Depth of the fields that are named: deeper ones are part of these.
const MAX_DEPTH: usize = 8;
/// Characters of one key or name in a path.
const MAX_LABEL_CHARS: usize = 100;

/// A field of the containers that differs; displayed as "containers\[log\].env\[LEVEL\] differs".
///
/// It has no values, which may be secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedField {
    path: String,
    change: Change,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Differs,
    New,
    Removed,
    Order,
}

impl ChangedField {
    /// The field, as `containers[log].resources.limits.memory`.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl fmt::Display for ChangedField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = &self.path;
        match self.change {
            Change::Differs => write!(f, "{path} differs"),
            Change::New => write!(f, "{path} is new"),
            Change::Removed => write!(f, "{path} is removed"),
            Change::Order => write!(f, "the order of {path} differs"),
        }
    }
}

/// The first field by which a spec differs from the revision of a Pod so that it cannot be updated in place; `old` is
/// the data of its ControllerRevision. `None` if there is none, or the data cannot be read.
///
/// It is what [`super::hash::Hashes::without_image`] is computed of: all containers, and the init containers if one of
/// them is a native sidecar.
#[must_use]
pub fn changed_field(old: &Value, new: &SidecarSetSpec) -> Option<ChangedField> {
    let old = old.get("spec")?.as_object()?;
    let list = "containers";
    let (before, after) = (old_list(old, list)?, new_list(new.containers.as_ref())?);
    if let Some(changed) = compare_items(&before, &after, list, list, MAX_DEPTH) {
        return Some(changed);
    }
    let list = "initContainers";
    let (before, after) = (old_list(old, list)?, new_list(new.init_containers.as_ref())?);
    if !before.iter().chain(&after).any(is_native_sidecar) {
        return None;
    }
    compare_items(&before, &after, list, list, MAX_DEPTH)
}

fn old_list(spec: &Map<String, Value>, list: &str) -> Option<Vec<Value>> {
    without_images(spec.get(list).unwrap_or(&Value::Null))
}

fn new_list(list: Option<&Vec<SidecarContainer>>) -> Option<Vec<Value>> {
    without_images(&serde_json::to_value(list).ok()?)
}

/// Containers as they are hashed, so that what does not count does not differ here.
fn without_images(list: &Value) -> Option<Vec<Value>> {
    if list.is_null() {
        return Some(Vec::new());
    }
    let mut containers: Vec<Value> = serde_json::from_str(&to_ordered_json(list, &SIDECAR_CONTAINER)).ok()?;
    for container in containers.iter_mut().filter_map(Value::as_object_mut) {
        container.remove("image");
    }
    Some(containers)
}

/// The field by which a user tells the items of a list apart.
fn key_of(list: &str) -> Option<&'static str> {
    match list {
        "containers" | "initContainers" | "env" | "httpHeaders" => Some("name"),
        "ports" => Some("containerPort"),
        "volumeMounts" => Some("mountPath"),
        "volumeDevices" => Some("devicePath"),
        "resizePolicy" => Some("resourceName"),
        _ => None,
    }
}

fn compare(old: &Value, new: &Value, path: &str, field: &str, depth: usize) -> Option<ChangedField> {
    if old == new {
        return None;
    }
    let differs = || ChangedField::new(path.to_owned(), Change::Differs);
    let Some(depth) = depth.checked_sub(1) else {
        return Some(differs());
    };
    let changed = match (old, new) {
        (Value::Object(old), Value::Object(new)) => compare_fields(old, new, path, depth),
        (Value::Array(old), Value::Array(new)) if old.iter().chain(new).all(Value::is_object) => {
            // A variable is small: its name says all.
            let depth = if field == "env" { 0 } else { depth };
            compare_items(old, new, path, field, depth)
        }
        _ => None,
    };
    Some(changed.unwrap_or_else(differs))
}

fn compare_fields(
    old: &Map<String, Value>,
    new: &Map<String, Value>,
    path: &str,
    depth: usize,
) -> Option<ChangedField> {
    let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    keys.into_iter().find_map(|key| {
        let label = truncate(key, MAX_LABEL_CHARS);
        let path = if key.contains(['.', '/']) {
            format!("{path}[{label}]")
        } else {
            format!("{path}.{label}")
        };
        match (old.get(key), new.get(key)) {
            (Some(old), Some(new)) => compare(old, new, &path, key, depth),
            (None, _) => Some(ChangedField::new(path, Change::New)),
            (_, None) => Some(ChangedField::new(path, Change::Removed)),
        }
    })
}

/// Compares the items with the same key, and tells which are new or removed.
fn compare_items(
    old: &[Value],
    new: &[Value],
    path: &str,
    field: &str,
    depth: usize,
) -> Option<ChangedField> {
    let key = key_of(field);
    let (old_items, new_items) = (by_label(old, key), by_label(new, key));
    let before: BTreeMap<_, _> = old_items.iter().cloned().collect();
    for (label, item) in &new_items {
        let path = format!("{path}[{}]", label.0);
        match before.get(label) {
            Some(before) => {
                if let Some(changed) = compare(before, item, &path, "", depth) {
                    return Some(changed);
                }
            }
            None => return Some(ChangedField::new(path, Change::New)),
        }
    }
    let after: BTreeSet<_> = new_items.iter().map(|(label, _)| label).collect();
    let removed = old_items.iter().find(|(label, _)| !after.contains(label));
    let removed =
        removed.map(|(label, _)| ChangedField::new(format!("{path}[{}]", label.0), Change::Removed));
    let reordered = || (old != new).then(|| ChangedField::new(path.to_owned(), Change::Order));
    removed.or_else(reordered)
}

/// The items with their keys, or their indexes without one. Of equal keys each counts on its own.
fn by_label<'a>(items: &'a [Value], key: Option<&str>) -> Vec<((String, usize), &'a Value)> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let items = items.iter().enumerate();
    let labelled = items.map(|(at, item)| {
        let label = match key.and_then(|key| item.get(key)) {
            Some(Value::String(text)) if !text.is_empty() => truncate(text, MAX_LABEL_CHARS).into_owned(),
            Some(Value::Number(number)) => number.to_string(),
            _ => at.to_string(),
        };
        let count = seen.entry(label.clone()).or_default();
        *count += 1;
        ((label, *count), item)
    });
    labelled.collect()
}

impl ChangedField {
    fn new(path: String, change: Change) -> Self {
        Self { path, change }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::sidecarset::hash::Hashes;
    use crate::sidecarset::history::encode_spec;

    fn spec(spec: &Value) -> SidecarSetSpec {
        serde_json::from_value(spec.clone()).unwrap()
    }

    /// The difference between two lists of containers, as (old, new).
    fn changed(old: &Value, new: &Value) -> Option<String> {
        let old = serde_json::from_str(&encode_spec(&spec(old))).unwrap();
        changed_field(&old, &spec(new)).map(|field| field.to_string())
    }

    #[test]
    fn fields_have_the_paths_that_users_write() {
        let log = json!({
            "name": "log", "image": "log:1", "args": ["-v"],
            "env": [{ "name": "A", "value": "1" }, { "name": "LEVEL", "value": "info" }],
            "resources": { "limits": { "memory": "1Gi", "nvidia.com/gpu": "1" } },
            "ports": [{ "containerPort": 53 }, { "containerPort": 53, "protocol": "UDP" }],
            "volumeMounts": [{ "name": "v", "mountPath": "/data" }],
            "livenessProbe": { "httpGet": { "port": 1, "httpHeaders": [{ "name": "h", "value": "x" }] } },
        });
        for (path, value, expected) in [
            (
                "/env/1/value",
                json!("debug"),
                "containers[log].env[LEVEL] differs",
            ),
            ("/env/1", json!({ "name": "B" }), "containers[log].env[B] is new"),
            (
                "/env",
                json!([{ "name": "A", "value": "1" }]),
                "containers[log].env[LEVEL] is removed",
            ),
            (
                "/env",
                json!([{ "name": "LEVEL", "value": "info" }, { "name": "A", "value": "1" }]),
                "the order of containers[log].env differs",
            ),
            ("/env", json!([]), "containers[log].env is removed"),
            (
                "/resources/limits/memory",
                json!("2Gi"),
                "containers[log].resources.limits.memory differs",
            ),
            (
                "/resources/limits/nvidia.com~1gpu",
                json!("2"),
                "containers[log].resources.limits[nvidia.com/gpu] differs",
            ),
            ("/args", json!(["-v", "-x"]), "containers[log].args differs"),
            (
                "/ports/1/hostPort",
                json!(2),
                "containers[log].ports[53].hostPort is new",
            ),
            (
                "/volumeMounts/0/readOnly",
                json!(true),
                "containers[log].volumeMounts[/data].readOnly is new",
            ),
            (
                "/livenessProbe/httpGet/httpHeaders/0/value",
                json!("y"),
                "containers[log].livenessProbe.httpGet.httpHeaders[h].value differs",
            ),
            (
                "/upgradeStrategy",
                json!({ "upgradeType": "HotUpgrade" }),
                "containers[log].upgradeStrategy.upgradeType is new",
            ),
        ] {
            let mut new = log.clone();
            let (parent, field) = path.rsplit_once('/').unwrap();
            match new.pointer_mut(path) {
                Some(there) => *there = value,
                None => new.pointer_mut(parent).unwrap()[field] = value,
            }
            let [old, new] = [&log, &new].map(|c| json!({ "containers": [c] }));
            assert_eq!(changed(&old, &new).as_deref(), Some(expected), "{path}");
        }
    }

    #[test]
    fn what_does_not_count_is_not_named() {
        let old = json!({ "containers": [{ "name": "log", "image": "log:1", "resources": { "limits": { "cpu": "1" } } }],
            "initContainers": [{ "name": "init", "image": "init:1" }], "volumes": [] });
        let new = json!({ "containers": [{ "name": "log", "image": "log:2", "resources": { "limits": { "cpu": "1000m" } },
            "unknown": 1 }], "initContainers": [{ "name": "other" }], "volumes": [{ "name": "v" }] });
        assert_eq!(changed(&old, &new), None);
        assert_eq!(changed(&json!({}), &json!({ "containers": [] })), None);
    }

    #[test]
    fn containers_come_and_go() {
        let names = |names: &[&str]| {
            let containers: Vec<Value> = names.iter().map(|name| json!({ "name": name })).collect();
            json!({ "containers": containers })
        };
        let changed = |old: &[&str], new: &[&str]| changed(&names(old), &names(new)).unwrap();
        assert_eq!(changed(&["a"], &["a", "log"]), "containers[log] is new");
        assert_eq!(changed(&["a", "log"], &["a"]), "containers[log] is removed");
        assert_eq!(
            changed(&["a", "b"], &["b", "a"]),
            "the order of containers differs"
        );
        assert_eq!(changed(&["a"], &["a", "a"]), "containers[a] is new");
    }

    #[test]
    fn init_containers_count_with_a_native_sidecar() {
        let init = |policy: Value, image: &str, tty: bool| json!({ "initContainers": [{ "name": "init", "image": image, "restartPolicy": policy, "tty": tty }] });
        let old = init(json!("Always"), "a", false);
        assert_eq!(changed(&old, &init(json!("Always"), "b", false)), None);
        assert_eq!(
            changed(&old, &init(json!("Always"), "a", true)).as_deref(),
            Some("initContainers[init].tty is new")
        );
        assert_eq!(
            changed(&old, &init(json!(null), "a", false)).as_deref(),
            Some("initContainers[init].restartPolicy is removed")
        );
    }

    #[test]
    fn data_of_others_is_not_read() {
        let new = spec(&json!({ "containers": [{ "name": "log" }] }));
        for old in [
            json!(null),
            json!([]),
            json!({ "spec": 1 }),
            json!({ "spec": { "containers": "x" } }),
            json!({ "spec": { "containers": {} } }),
        ] {
            assert_eq!(changed_field(&old, &new), None, "{old}");
        }
        let long = "x".repeat(10_000);
        let many = json!({ "spec": { "containers": [{ "name": long, "env": [{ "name": long }] }] } });
        let path = changed_field(&many, &new).unwrap().to_string();
        assert!(path.len() < 200, "{path}");
    }

    fn any_key() -> impl Strategy<Value = String> {
        let keys = [
            "name",
            "image",
            "args",
            "env",
            "ports",
            "containerPort",
            "resources",
            "limits",
            "restartPolicy",
            "livenessProbe",
            "httpGet",
        ];
        prop::sample::select(keys.to_vec()).prop_map(str::to_owned)
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            Just(json!("")),
            Just(json!(0)),
            any::<bool>().prop_map(Value::from),
            "[a1]{0,2}".prop_map(Value::from),
        ];
        leaf.prop_recursive(5, 24, 3, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                any_object(inner)
            ]
        })
    }

    fn any_object(value: impl Strategy<Value = Value>) -> impl Strategy<Value = Value> {
        let fields = prop::collection::btree_map(any_key(), value, 0..5);
        fields.prop_map(|map| Value::Object(map.into_iter().collect()))
    }

    fn any_containers() -> impl Strategy<Value = Vec<Value>> {
        prop::collection::vec(any_object(any_json()), 0..4)
    }

    proptest! {
        /// No data panics, and paths are bounded.
        #[test]
        fn any_data_can_be_compared(old in any_json(), init in any_json(), new in any_containers()) {
            let old = json!({ "spec": { "containers": old, "initContainers": init } });
            let new = spec(&json!({ "containers": new }));
            if let Some(changed) = changed_field(&old, &new) {
                prop_assert!(changed.path().len() < 2000);
            }
        }

        /// There is a field if, and only if, the hash differs by which Pods are not updated in place.
        #[test]
        fn field_agrees_with_the_hash(
            old in any_containers(),
            changes in prop::collection::vec((0_usize..4, any_key(), any_json()), 0..3),
            swap: bool,
            native: bool,
        ) {
            let mut new = old.clone();
            for (at, key, value) in changes {
                if let Some(Value::Object(container)) = new.get_mut(at) {
                    container.insert(key, value);
                }
            }
            if swap {
                new.reverse();
            }
            let parse = |containers: &[Value]| {
                let sidecar = json!({ "name": "n", "restartPolicy": native.then_some("Always") });
                let init: Vec<&Value> = [&sidecar].into_iter().chain(containers.first()).collect();
                spec(&json!({ "containers": containers, "initContainers": init }))
            };
            let hash = |spec: &SidecarSetSpec| {
                let spec = serde_json::to_value(spec).unwrap();
                Hashes::of_spec(spec.as_object().unwrap()).without_image
            };
            let (old, new) = (parse(&old), parse(&new));
            let data: Value = serde_json::from_str(&encode_spec(&old)).unwrap();
            prop_assert_eq!(changed_field(&data, &new).is_some(), hash(&old) != hash(&new));
        }
    }
}
