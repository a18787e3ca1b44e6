//! The hashes of a container in annotation `apps.kruise.io/runtime-containers-meta`.
//!
//! The daemon writes them, the in-place engine compares them, and either may be the Go one: so they are upstream's
//! numbers. All of them are FNV-1a (32 bits) over Kubernetes' deep-hash rendering of some JSON.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::go_json;

/// Environment variables with a sidecar's version; they never cause a restart.
const IGNORED_ENV: [&str; 2] = ["SIDECARSET_VERSION", "SIDECARSET_VERSION_ALT"];

/// Labels and annotations of a Pod, which environment variables refer to.
#[derive(Clone, Copy, Debug)]
pub struct PodMetadata<'a> {
    /// Labels of the Pod.
    pub labels: &'a BTreeMap<String, String>,
    /// Annotations of the Pod.
    pub annotations: &'a BTreeMap<String, String>,
}

/// The source of a variable's value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EnvOrigin {
    /// The Pod's label of this key.
    Label(String),
    /// The Pod's annotation of this key.
    Annotation(String),
}

impl EnvOrigin {
    /// Parses a `fieldPath`; `None` unless it is `metadata.labels['k']` or `metadata.annotations['k']`.
    #[must_use]
    pub fn from_field_path(path: &str) -> Option<Self> {
        let (field, key) = path.strip_suffix("']")?.split_once("['")?;
        match field {
            "metadata.labels" => Some(Self::Label(key.to_owned())),
            "metadata.annotations" => Some(Self::Annotation(key.to_owned())),
            _ => None,
        }
    }

    /// The value from this metadata; empty if the key is missing.
    #[must_use]
    pub fn value<'a>(&self, metadata: &PodMetadata<'a>) -> &'a str {
        let found = match self {
            Self::Label(key) => metadata.labels.get(key),
            Self::Annotation(key) => metadata.annotations.get(key),
        };
        found.map(String::as_str).unwrap_or_default()
    }
}

/// The environment variables of a container (raw JSON of `v1.Container`) that come from the Pod's labels and
/// annotations, as (name, origin), in the order of the container.
#[must_use]
pub fn env_from_metadata(container: &Value) -> Vec<(String, EnvOrigin)> {
    let variables = container["env"].as_array().into_iter().flatten();
    let from_metadata = variables.filter_map(|variable| {
        let name = variable["name"].as_str().unwrap_or_default();
        let has_value = variable["value"].as_str().is_some_and(|v| !v.is_empty());
        let path = variable["valueFrom"]["fieldRef"]["fieldPath"].as_str()?;
        let origin =
            EnvOrigin::from_field_path(path).filter(|_| !has_value && !IGNORED_ENV.contains(&name))?;
        Some((name.to_owned(), origin))
    });
    from_metadata.collect()
}

/// `extractedEnvFromMetadataHash` of a container (raw JSON) that was started in a Pod with `metadata`.
#[must_use]
pub fn expected_env_hash(container: &Value, metadata: &PodMetadata<'_>) -> u64 {
    let variables = env_from_metadata(container);
    env_hash(
        variables
            .iter()
            .map(|(name, origin)| (name.as_str(), origin.value(metadata))),
    )
}

/// `extractedEnvFromMetadataHash` of these variables, as (name, value), in any order.
#[must_use]
pub fn env_hash<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> u64 {
    let mut variables: Vec<_> = variables.into_iter().collect();
    if variables.is_empty() {
        return deep_hash("null");
    }
    variables.sort_by_key(|(name, _)| *name);
    let entries = variables.into_iter().map(|(name, value)| match value {
        "" => json!({"name": name}),
        value => json!({"name": name, "value": value}),
    });
    deep_hash(&go_json::to_sorted_json(&entries.collect()))
}

/// `plainHash`: kubelet's hash of a container, as kubelet 1.31 and later compute it.
#[must_use]
pub fn plain_hash(name: &str, image: &str) -> u64 {
    deep_hash(&go_json::to_sorted_json(&json!({"image": image, "name": name})))
}

/// `plainHash` as kubelet computed it before 1.31: over the whole container (raw JSON of `v1.Container` as the API
/// server serves it).
#[must_use]
pub fn plain_hash_before_131(container: &Value) -> u64 {
    deep_hash(&go_json::to_ordered_json(container, &go_json::CONTAINER))
}

/// FNV-1a (32 bits) over Kubernetes' deep-hash rendering of a byte string, `([]uint8)[1 2 …]`.
#[must_use]
pub fn deep_hash(text: &str) -> u64 {
    let mut hash = 0x811c_9dc5_u32;
    let mut feed = |byte: u8| hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    b"([]uint8)[".iter().for_each(|byte| feed(*byte));
    for (at, byte) in text.bytes().enumerate() {
        if at > 0 {
            feed(b' ');
        }
        let digits = [byte / 100, byte / 10 % 10, byte % 10];
        let leading = digits.iter().take_while(|d| **d == 0).count().min(2);
        digits[leading..].iter().for_each(|digit| feed(b'0' + digit));
    }
    feed(b']');
    u64::from(hash)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn map(value: &Value) -> BTreeMap<String, String> {
        serde_json::from_value::<Option<_>>(value.clone())
            .unwrap()
            .unwrap_or_default()
    }

    #[test]
    fn hashes_match_the_go_implementation() {
        let vectors = include_str!("../../../tests/data/go/container-hashes.jsonl");
        assert_eq!(vectors.lines().count(), 150);
        for line in vectors.lines() {
            let vector: Value = serde_json::from_str(line).unwrap();
            let container = &vector["container"];
            let (labels, annotations) = (map(&vector["labels"]), map(&vector["annotations"]));
            let metadata = PodMetadata {
                labels: &labels,
                annotations: &annotations,
            };
            let text = |field: &str| container[field].as_str().unwrap();
            assert_eq!(
                json!(expected_env_hash(container, &metadata)),
                vector["expectedEnvHash"],
                "{line}"
            );
            assert_eq!(
                json!(plain_hash(text("name"), text("image"))),
                vector["plainHash"],
                "{line}"
            );
            assert_eq!(
                json!(plain_hash_before_131(container)),
                vector["plainHashBefore131"],
                "{line}"
            );
        }
    }

    #[test]
    fn other_field_paths_have_no_origin() {
        assert_eq!(
            EnvOrigin::from_field_path("metadata.labels['a/b']"),
            Some(EnvOrigin::Label("a/b".into()))
        );
        for path in [
            "metadata.name",
            "metadata.labels",
            "metadata.labels['x",
            "spec.x['y']",
            "",
        ] {
            assert_eq!(EnvOrigin::from_field_path(path), None, "{path}");
        }
    }

    #[test]
    fn empty_env_hashes_as_null() {
        assert_eq!(env_hash([]), 86_995_377);
        assert_eq!(deep_hash("null"), 86_995_377);
    }

    #[test]
    fn literal_values_and_sidecar_versions_are_ignored() {
        let from = |name: &str, value: &str| json!({"name": name, "value": value, "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a']"}}});
        let container = json!({"env": [from("A", ""), from("B", "x"), from(IGNORED_ENV[0], "")]});
        assert_eq!(
            env_from_metadata(&container),
            [("A".to_owned(), EnvOrigin::Label("a".into()))]
        );
    }
}
