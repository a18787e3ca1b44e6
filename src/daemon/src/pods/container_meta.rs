//! The part of a Pod that the container meta controller needs; Pods without published metadata have none of it.

use std::collections::{BTreeMap, HashSet};

use k8s_openapi::api::core::v1 as core;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::error::{Error, MAX_CONTAINERS, MAX_ENV_BYTES};
use super::raw;
use kruise_api::container_hash::{self, PodMetadata};
use kruise_api::in_place::RuntimeContainerMetaSet;
use kruise_api::{GROUP, keys};

/// The metadata of a Pod that has annotation `apps.kruise.io/runtime-containers-meta`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodContainerMeta {
    /// The current annotation; none if it is absent or unreadable.
    pub published: Option<RuntimeContainerMetaSet>,
    /// Whether an in-place update is in progress: condition `InPlaceUpdateReady` is False.
    pub updating: bool,
    /// The Pod's resource version.
    pub resource_version: String,
    /// The Pod's main containers.
    pub containers: Vec<DesiredContainer>,
}

/// The largest container, in bytes of JSON, that is hashed as kubelets before 1.31 did: that hash needs the whole
/// container.
const MAX_HASHED_BYTES: usize = 64 << 10;

/// The desired state of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DesiredContainer {
    /// Its name.
    pub name: String,
    /// The hashes that kubelet may set when it creates the container: that of 1.31 and later, and the older one.
    pub plain_hashes: [u64; 2],
    /// The environment from labels and annotations, with their current values.
    pub env: Vec<EnvVar>,
}

/// An environment variable whose value comes from a label or an annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnvVar {
    /// Its name.
    pub name: String,
    /// The value from the Pod's metadata; empty if it has none.
    pub value: String,
    /// Whether the spec defines the name again later, so that this value never applies.
    pub shadowed: bool,
}

impl DesiredContainer {
    /// The hash of the desired environment.
    #[must_use]
    pub fn env_hash(&self) -> u64 {
        container_hash::env_hash(self.env.iter().map(|v| (v.name.as_str(), v.value.as_str())))
    }

    /// `bytes_left` is the rest of the Pod's limit for environment bytes.
    fn parse(text: &RawValue, metadata: &PodMetadata<'_>, bytes_left: &mut usize) -> Result<Self, Error> {
        let container: raw::Container<'_> = serde_json::from_str(text.get())?;
        let variables: Vec<&RawValue> = match container.env {
            Some(text) => serde_json::from_str(text.get())?,
            None => Vec::new(),
        };
        let (mut env, mut later_names) = (Vec::new(), HashSet::new());
        for text in variables.into_iter().rev() {
            let variable: Value = serde_json::from_str(text.get())?;
            for (name, origin) in container_hash::env_from_metadata(&json!({ "env": [&variable] })) {
                let value = origin.value(metadata);
                let size = size_of::<EnvVar>() + name.len() + value.len();
                *bytes_left = bytes_left.checked_sub(size).ok_or(Error::EnvironmentTooLarge)?;
                env.push(EnvVar {
                    value: value.to_owned(),
                    shadowed: later_names.contains(name.as_str()),
                    name,
                });
            }
            if let Some(name) = variable.get("name").and_then(Value::as_str) {
                later_names.insert(name.to_owned());
            }
        }
        env.reverse();
        let image = container.image.as_deref().unwrap_or_default();
        let plain_hash = container_hash::plain_hash(&container.name, image);
        let legacy_hash = match text.get().len() {
            ..=MAX_HASHED_BYTES => {
                let container_spec: core::Container = serde_json::from_str(text.get())?;
                container_hash::plain_hash_before_131(&json!(container_spec))
            }
            _ => plain_hash,
        };
        Ok(Self {
            plain_hashes: [plain_hash, legacy_hash],
            env,
            name: container.name,
        })
    }
}

impl PodContainerMeta {
    /// Reads the metadata of a Pod that needs the annotation: controlled by a workload of our group, or with sidecars
    /// of a SidecarSet.
    pub(super) fn from_pod(
        meta: &raw::Metadata<'_>,
        containers: &[&RawValue],
        status: &raw::Status<'_>,
    ) -> Result<Option<Box<Self>>, Error> {
        let no_annotations = BTreeMap::new();
        let annotations = meta.annotations.as_ref().unwrap_or(&no_annotations);
        let kruise_owned = meta.owner_references.iter().flatten().any(is_kruise_owner);
        if !kruise_owned && !annotations.contains_key(keys::SIDECAR_SET_HASH) {
            return Ok(None);
        }
        let labels = match meta.labels {
            Some(text) => serde_json::from_str(text.get())?,
            None => BTreeMap::new(),
        };
        let metadata = PodMetadata {
            labels: &labels,
            annotations,
        };
        let mut bytes_left = MAX_ENV_BYTES;
        let desired = containers
            .iter()
            .map(|text| DesiredContainer::parse(text, &metadata, &mut bytes_left));
        let annotation = annotations.get(keys::RUNTIME_CONTAINERS_META);
        let published =
            annotation.and_then(|text| serde_json::from_str::<RuntimeContainerMetaSet>(text).ok());
        Ok(Some(Box::new(Self {
            published: published.filter(|set| set.containers.len() <= MAX_CONTAINERS),
            updating: status.has_condition(keys::IN_PLACE_UPDATE_READY, "False"),
            resource_version: meta.resource_version.clone().unwrap_or_default(),
            containers: desired.collect::<Result<_, _>>()?,
        })))
    }
}

fn is_kruise_owner(owner: &k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference) -> bool {
    let group = owner.api_version.split_once('/').map(|(group, _)| group);
    owner.controller == Some(true) && group == Some(GROUP)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parse_meta(pod: Value) -> Option<Box<PodContainerMeta>> {
        let text = pod.to_string();
        let raw::Pod {
            metadata,
            spec,
            status,
        } = serde_json::from_str(&text).unwrap();
        PodContainerMeta::from_pod(&metadata, &spec.containers.unwrap(), &status).unwrap()
    }

    #[test]
    fn only_pods_of_kruise_workloads_have_container_meta() {
        let owner = |group: &str, controller: bool| {
            json!({"apiVersion": group, "kind": "X", "name": "x",
            "uid": "u", "controller": controller})
        };
        let owned = |owner: Value| {
            parse_meta(json!({"metadata": {"ownerReferences": [owner]}, "spec": {"containers": []}}))
        };
        assert!(owned(owner("apps.kruise.io/v1alpha1", true)).is_some());
        assert!(owned(owner("apps.kruise.io/v1beta1", false)).is_none());
        assert!(owned(owner("apps/v1", true)).is_none());
        assert!(owned(owner("apps.kruise.io.example/v1", true)).is_none());
        let annotated = |key: &str| {
            parse_meta(json!({"metadata": {"annotations": {key: "{}"}}, "spec": {"containers": []}}))
        };
        assert!(annotated("kruise.io/sidecarset-hash").is_some());
        assert!(annotated("kruise.io/other").is_none());
    }

    #[test]
    fn only_metadata_that_env_refers_to_is_kept() {
        let from =
            |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
        let pod = json!({
            "metadata": {
                "labels": {"app": "x"},
                "annotations": {"kruise.io/sidecarset-hash": "{}", "cfg": "1",
                    "apps.kruise.io/runtime-containers-meta": "not JSON"},
            },
            "spec": {"containers": [
                {"name": "b", "image": "i:1", "env": [
                    from("CFG", "metadata.annotations['cfg']"), from("GONE", "metadata.labels['gone']"),
                    from("HID", "metadata.labels['app']"), from("NODE", "spec.nodeName"), {"name": "HID", "value": "v"},
                ]},
                {"name": "a"},
            ]},
            "status": {"conditions": [{"type": "InPlaceUpdateReady", "status": "False"}]},
        });
        let view = parse_meta(pod).unwrap();
        assert!(view.updating && view.published.is_none());
        let [b, a] = view.containers.as_slice() else {
            unreachable!("two containers")
        };
        let env: Vec<_> = b
            .env
            .iter()
            .map(|v| (v.name.as_str(), v.value.as_str(), v.shadowed))
            .collect();
        assert_eq!(
            env,
            [("CFG", "1", false), ("GONE", "", false), ("HID", "x", true)]
        );
        assert_eq!(b.plain_hashes[0], container_hash::plain_hash("b", "i:1"));
        assert_eq!((a.env.len(), a.env_hash()), (0, 86_995_377));
    }
}
