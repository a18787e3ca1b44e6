//! The hashes of a SidecarSet's containers, by which its Pods are current or not.
//!
//! They are OpenKruise's: another hash of the same containers would update all Pods. Fields that are newer than
//! OpenKruise's (those of Kubernetes 1.32) count if [`SIDECAR_CONTAINER`] has them; OpenKruise drops them from the set.
//! Unknown fields do not count.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::revision::safe_encode;
use kruise_api::go_json::{SIDECAR_CONTAINER, to_ordered_json};
use kruise_api::json::{list_items, set};
use kruise_api::keys;
use kruise_api::sidecarset::SidecarSet;

/// The hashes of a SidecarSet's containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hashes {
    /// Of the whole containers.
    pub hash: String,
    /// Of the containers without their images: if it differs, Pods cannot be updated in place.
    pub without_image: String,
}

impl Hashes {
    /// The hashes of the spec of a SidecarSet (raw, in either version).
    #[must_use]
    pub fn of_spec(spec: &Map<String, Value>) -> Self {
        Self {
            hash: encode(&document(spec, <[Value]>::to_vec)),
            without_image: encode(&document(spec, without_images)),
        }
    }

    /// Writes the hashes as annotations of the SidecarSet.
    pub fn annotate(self, set_object: &mut Value) {
        for (key, hash) in [
            (keys::SIDECAR_SET_HASH, self.hash),
            (keys::SIDECAR_SET_HASH_WITHOUT_IMAGE, self.without_image),
        ] {
            set(set_object, &["metadata", "annotations", key], json!(hash));
        }
    }
}

/// The set with its hashes: one that was stored while no webhook answered has none, and all Pods would look updated.
#[must_use]
pub fn with_hashes(mut set: SidecarSet) -> SidecarSet {
    let annotations = set.metadata.annotations.get_or_insert_default();
    let has = |key: &str| annotations.get(key).is_some_and(|hash| !hash.is_empty());
    if has(keys::SIDECAR_SET_HASH) && has(keys::SIDECAR_SET_HASH_WITHOUT_IMAGE) {
        return set;
    }
    let spec = json!(set.spec);
    let hashes = Hashes::of_spec(spec.as_object().unwrap_or(&Map::new()));
    annotations.insert(keys::SIDECAR_SET_HASH.to_owned(), hashes.hash);
    annotations.insert(
        keys::SIDECAR_SET_HASH_WITHOUT_IMAGE.to_owned(),
        hashes.without_image,
    );
    set
}

/// Whether an init container (raw) runs for as long as the Pod does.
#[must_use]
pub fn is_native_sidecar(init_container: &Value) -> bool {
    init_container.get("restartPolicy").and_then(Value::as_str) == Some("Always")
}

/// What is hashed, as Go writes it: all containers, and all init containers if any of them is a native sidecar. An
/// absent list is null.
fn document(spec: &Map<String, Value>, prepare: impl Fn(&[Value]) -> Vec<Value>) -> String {
    let list = |name: &str| match spec.get(name) {
        Some(Value::Array(containers)) => {
            to_ordered_json(&Value::Array(prepare(containers)), &SIDECAR_CONTAINER)
        }
        _ => "null".to_owned(),
    };
    let containers = list("containers");
    if list_items(spec, "initContainers").iter().any(is_native_sidecar) {
        let init_containers = list("initContainers");
        format!(r#"{{"containers":{containers},"initContainers":{init_containers}}}"#)
    } else {
        format!(r#"{{"containers":{containers}}}"#)
    }
}

fn without_images(containers: &[Value]) -> Vec<Value> {
    let mut containers = containers.to_vec();
    for container in containers.iter_mut().filter_map(Value::as_object_mut) {
        container.remove("image");
    }
    containers
}

fn encode(document: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, document.as_bytes());
    let mut hex = String::with_capacity(2 * digest.as_ref().len());
    for byte in digest.as_ref() {
        // Writing to a String does not fail.
        let _ = write!(hex, "{byte:02x}");
    }
    safe_encode(&hex)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(spec: Value) -> (String, String) {
        let spec: Map<String, Value> = serde_json::from_value(spec).unwrap_or_default();
        let Hashes { hash, without_image } = Hashes::of_spec(&spec);
        (hash, without_image)
    }

    const HASH: &str = "w26c4x8fz245642fdv499b464248f974xddx4x55z5dw55bc6x66464fxz77dc78";
    const WITHOUT_IMAGE: &str = "8wzddb4dvv9c6x8zdc77z4z75987424f457dfv6724ddw6zbdx467wz5x24fc759";

    #[test]
    fn init_containers_count_if_one_is_a_native_sidecar() {
        let containers = json!([{ "name": "container1", "image": "test-image" }]);
        let known = (HASH.to_owned(), WITHOUT_IMAGE.to_owned());
        assert_eq!(hashes(json!({ "containers": containers })), known);
        let init = |restart_policy: Value| {
            json!({ "containers": containers, "initContainers": [
                { "name": "container1", "image": "test-image" }, { "name": "x", "restartPolicy": restart_policy },
            ] })
        };
        assert_eq!(hashes(init(Value::Null)), known);
        assert_ne!(hashes(init(json!("Always"))), known);
    }

    #[test]
    fn absent_and_empty_lists_differ_and_other_types_are_absent() {
        let absent = hashes(json!({}));
        assert_eq!(hashes(json!({ "containers": null })), absent);
        assert_eq!(hashes(json!({ "containers": "x" })), absent);
        assert_ne!(hashes(json!({ "containers": [] })), absent);
    }

    #[test]
    fn image_counts_in_one_hash_only() {
        let with = |image: &str| hashes(json!({ "containers": [{ "name": "a", "image": image }] }));
        let ((one, one_without), (other, other_without)) = (with("a:1"), with("a:2"));
        assert_ne!(one, other);
        assert_eq!(one_without, other_without);
    }

    #[test]
    fn only_missing_hashes_are_added() {
        let set = |annotations: Value| -> SidecarSet {
            let containers = json!([{ "name": "container1", "image": "test-image" }]);
            let metadata = json!({ "name": "s", "annotations": annotations });
            let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet", "metadata": metadata,
                "spec": { "containers": containers } });
            serde_json::from_value(object).unwrap_or_else(|why| unreachable!("{why}"))
        };
        let hash_of = |set: SidecarSet| {
            let annotations = set.metadata.annotations.unwrap_or_default();
            annotations
                .get(keys::SIDECAR_SET_HASH)
                .cloned()
                .unwrap_or_default()
        };
        let added = hash_of(with_hashes(set(Value::Null)));
        assert_eq!(added.len(), HASH.len());
        assert_eq!(
            hash_of(with_hashes(set(json!({ keys::SIDECAR_SET_HASH: "" })))),
            added
        );
        let stored = json!({ keys::SIDECAR_SET_HASH: "h", keys::SIDECAR_SET_HASH_WITHOUT_IMAGE: "w" });
        assert_eq!(hash_of(with_hashes(set(stored))), "h");
    }
}
