//! What the container meta duty needs of a Pod; Pods that it does not tell of carry none of it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::json;

use crate::api::container_hash::{self, Metadata};
use crate::api::in_place::RuntimeContainerMetaSet;
use crate::api::{GROUP, keys};

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

    fn of(container: &core::Container, metadata: &Metadata<'_>) -> Self {
        let variables = container.env.as_deref().unwrap_or_default();
        let env = variables.iter().enumerate().flat_map(|(at, variable)| {
            let hidden = variables[at + 1..]
                .iter()
                .any(|later| later.name == variable.name);
            let from_metadata = container_hash::env_from_metadata(&json!({ "env": [variable] }));
            from_metadata.into_iter().map(move |(name, origin)| Variable {
                value: origin.value(metadata).to_owned(),
                hidden,
                name,
            })
        });
        Self {
            plain_hashes: [
                container_hash::plain_hash(&container.name, container.image.as_deref().unwrap_or_default()),
                container_hash::plain_hash_before_131(&json!(container)),
            ],
            env: env.collect(),
            name: container.name.clone(),
        }
    }
}

impl MetaView {
    /// Reduces a Pod to this, if it is one to tell of: controlled by a workload of our group, or with sidecars
    /// of a SidecarSet.
    pub(super) fn of(meta: &ObjectMeta, spec: &core::PodSpec, status: &core::PodStatus) -> Option<Box<Self>> {
        let (no_labels, no_annotations) = (BTreeMap::new(), BTreeMap::new());
        let metadata = Metadata {
            labels: meta.labels.as_ref().unwrap_or(&no_labels),
            annotations: meta.annotations.as_ref().unwrap_or(&no_annotations),
        };
        let ours = |owner: &&_| is_ours(owner);
        let owned = meta.owner_references.iter().flatten().find(ours).is_some();
        if !owned && !metadata.annotations.contains_key(keys::SIDECAR_SET_HASH) {
            return None;
        }
        let told = metadata.annotations.get(keys::RUNTIME_CONTAINERS_META);
        let mut conditions = status.conditions.iter().flatten();
        let updating = conditions.any(|c| c.type_ == keys::IN_PLACE_UPDATE_READY && c.status == "False");
        Some(Box::new(Self {
            told: told.and_then(|text| serde_json::from_str(text).ok()),
            updating,
            version: meta.resource_version.clone().unwrap_or_default(),
            containers: spec.containers.iter().map(|c| Wanted::of(c, &metadata)).collect(),
        }))
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
    use serde_json::Value;

    fn view(pod: Value) -> Option<Box<MetaView>> {
        let pod: core::Pod = serde_json::from_value(pod).unwrap();
        MetaView::of(&pod.metadata, &pod.spec.unwrap(), &pod.status.unwrap_or_default())
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
