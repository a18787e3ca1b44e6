//! What the container meta duty needs of a Pod; Pods that it does not tell of carry none of it.

use std::collections::{BTreeMap, HashSet};

use k8s_openapi::api::core::v1 as core;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{Error, MOST_CONTAINERS, MOST_ENV, raw};

use kruise_api::container_hash::{self, Metadata};
use kruise_api::in_place::RuntimeContainerMetaSet;
use kruise_api::{GROUP, keys};

/// A Pod whose containers are told of in annotation `apps.kruise.io/runtime-containers-meta`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetaView {
    /// The annotation as it stands; none where it is absent or cannot be read.
    pub told: Option<RuntimeContainerMetaSet>,
    /// Whether an update in place is under way: condition `InPlaceUpdateReady` is False.
    pub updating: bool,
    /// The Pod's resource version.
    pub version: String,
    /// Its main containers.
    pub containers: Vec<Wanted>,
}

/// The longest container, as JSON, that is hashed as kubelets before 1.31 did: for that all of it is read.
const LONGEST_HASHED: usize = 64 << 10;

/// What a container is to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// The hashes that kubelet may give the container when it makes it: that of 1.31 and later, and the older.
    pub plain_hashes: [u64; 2],
    /// The environment that it takes from labels and annotations, with the values of now.
    pub env: Vec<Variable>,
}

/// An environment variable whose value comes from a label or an annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// The value that the Pod's metadata gives; empty where it has none.
    pub value: String,
    /// Whether the spec defines the name once more further down, so that this value never counts.
    pub hidden: bool,
}

impl Wanted {
    /// The hash of its environment as it is to be.
    #[must_use]
    pub fn env_hash(&self) -> u64 {
        container_hash::env_hash(self.env.iter().map(|v| (v.name.as_str(), v.value.as_str())))
    }

    /// `left` is how many bytes of environment the Pod may still have.
    fn of(text: &RawValue, metadata: &Metadata<'_>, left: &mut usize) -> Result<Self, Error> {
        let container: raw::Container<'_> = serde_json::from_str(text.get())?;
        let variables: Vec<&RawValue> = match container.env {
            Some(text) => serde_json::from_str(text.get())?,
            None => Vec::new(),
        };
        let (mut env, mut later) = (Vec::new(), HashSet::new());
        for text in variables.into_iter().rev() {
            let variable: Value = serde_json::from_str(text.get())?;
            for (name, origin) in container_hash::env_from_metadata(&json!({ "env": [&variable] })) {
                let value = origin.value(metadata);
                let bytes = size_of::<Variable>() + name.len() + value.len();
                *left = left.checked_sub(bytes).ok_or(Error::Environment)?;
                env.push(Variable {
                    value: value.to_owned(),
                    hidden: later.contains(name.as_str()),
                    name,
                });
            }
            if let Some(name) = variable.get("name").and_then(Value::as_str) {
                later.insert(name.to_owned());
            }
        }
        env.reverse();
        let image = container.image.as_deref().unwrap_or_default();
        let plain_hash = container_hash::plain_hash(&container.name, image);
        let older = match text.get().len() {
            ..=LONGEST_HASHED => {
                let whole: core::Container = serde_json::from_str(text.get())?;
                container_hash::plain_hash_before_131(&json!(whole))
            }
            _ => plain_hash,
        };
        Ok(Self {
            plain_hashes: [plain_hash, older],
            env,
            name: container.name,
        })
    }
}

impl MetaView {
    /// Reduces a Pod to this, if it is one to tell of: controlled by a workload of our group, or with sidecars
    /// of a SidecarSet.
    pub(super) fn of(
        meta: &raw::Metadata<'_>,
        containers: &[&RawValue],
        status: &raw::Status<'_>,
    ) -> Result<Option<Box<Self>>, Error> {
        let no_annotations = BTreeMap::new();
        let annotations = meta.annotations.as_ref().unwrap_or(&no_annotations);
        let owned = meta.owner_references.iter().flatten().any(is_ours);
        if !owned && !annotations.contains_key(keys::SIDECAR_SET_HASH) {
            return Ok(None);
        }
        let labels = match meta.labels {
            Some(text) => serde_json::from_str(text.get())?,
            None => BTreeMap::new(),
        };
        let metadata = Metadata {
            labels: &labels,
            annotations,
        };
        let mut left = MOST_ENV;
        let wanted = containers
            .iter()
            .map(|text| Wanted::of(text, &metadata, &mut left));
        let told = annotations.get(keys::RUNTIME_CONTAINERS_META);
        let told = told.and_then(|text| serde_json::from_str::<RuntimeContainerMetaSet>(text).ok());
        Ok(Some(Box::new(Self {
            told: told.filter(|told| told.containers.len() <= MOST_CONTAINERS),
            updating: status.is(keys::IN_PLACE_UPDATE_READY, "False"),
            version: meta.resource_version.clone().unwrap_or_default(),
            containers: wanted.collect::<Result<_, _>>()?,
        })))
    }
}

fn is_ours(owner: &k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference) -> bool {
    let group = owner.api_version.split_once('/').map(|(group, _)| group);
    owner.controller == Some(true) && group == Some(GROUP)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn view(pod: Value) -> Option<Box<MetaView>> {
        let text = pod.to_string();
        let raw::Pod {
            metadata,
            spec,
            status,
        } = serde_json::from_str(&text).unwrap();
        MetaView::of(&metadata, &spec.containers.unwrap(), &status).unwrap()
    }

    #[test]
    fn only_pods_of_our_workloads_and_with_our_sidecars_are_told_of() {
        let owner = |group: &str, controller: bool| {
            json!({"apiVersion": group, "kind": "X", "name": "x",
            "uid": "u", "controller": controller})
        };
        let owned = |owner: Value| {
            view(json!({"metadata": {"ownerReferences": [owner]}, "spec": {"containers": []}}))
        };
        assert!(owned(owner("apps.kruise.io/v1alpha1", true)).is_some());
        assert!(owned(owner("apps.kruise.io/v1beta1", false)).is_none());
        assert!(owned(owner("apps/v1", true)).is_none());
        assert!(owned(owner("apps.kruise.io.example/v1", true)).is_none());
        let annotated =
            |key: &str| view(json!({"metadata": {"annotations": {key: "{}"}}, "spec": {"containers": []}}));
        assert!(annotated("kruise.io/sidecarset-hash").is_some());
        assert!(annotated("kruise.io/other").is_none());
    }

    #[test]
    fn of_metadata_only_what_the_environment_takes_is_kept() {
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
        let view = view(pod).unwrap();
        assert!(view.updating && view.told.is_none());
        let [b, a] = view.containers.as_slice() else {
            unreachable!("two containers")
        };
        let env: Vec<_> = b
            .env
            .iter()
            .map(|v| (v.name.as_str(), v.value.as_str(), v.hidden))
            .collect();
        assert_eq!(
            env,
            [("CFG", "1", false), ("GONE", "", false), ("HID", "x", true)]
        );
        assert_eq!(b.plain_hashes[0], container_hash::plain_hash("b", "i:1"));
        assert_eq!((a.env.len(), a.env_hash()), (0, 86_995_377));
    }
}
