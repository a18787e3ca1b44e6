//! The owner of an object, as the API server resolves an owner reference.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde_json::{Value, json};

use super::{GROUP, V1ALPHA1, V1BETA1};

/// The kinds of owners that are distinguished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OwnerKind {
    /// A CloneSet, in a served version.
    CloneSet,
    /// A ContainerRecreateJob, in its only version.
    ContainerRecreateJob,
    /// A DaemonSet of Kubernetes.
    DaemonSet,
    /// A Deployment of Kubernetes.
    Deployment,
    /// An ImageListPullJob, in a served version.
    ImageListPullJob,
    /// A Pod.
    Pod,
    /// A ReplicaSet of Kubernetes.
    ReplicaSet,
    /// A SidecarSet, in a served version. It has no namespace.
    SidecarSet,
    /// A StatefulSet of Kubernetes.
    StatefulSet,
    /// Any other kind.
    Other,
}

/// An owner, in the namespace of the object that it owns, or without a namespace.
///
/// The writer of an object sets its references. One of a version that is not served, or with a different name than the
/// object of that UID has, refers to nothing; the garbage collector cannot map the former, so such an object is kept.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// Kind of the owner.
    pub kind: OwnerKind,
    /// Name of the owner.
    pub name: String,
    /// UID of the owner.
    pub uid: String,
}

impl Owner {
    /// The owner that a reference names.
    #[must_use]
    pub fn from_reference(reference: &OwnerReference) -> Self {
        Self {
            kind: OwnerKind::from_api_version_and_kind(&reference.api_version, &reference.kind),
            name: reference.name.clone(),
            uid: reference.uid.clone(),
        }
    }

    /// The CloneSet with these metadata, as the owner of others.
    #[must_use]
    pub fn clone_set(metadata: &ObjectMeta) -> Self {
        Self {
            kind: OwnerKind::CloneSet,
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
        }
    }

    /// The Pod with this name and UID, as the owner of others.
    #[must_use]
    pub fn pod(name: &str, uid: &str) -> Self {
        Self {
            kind: OwnerKind::Pod,
            name: name.to_owned(),
            uid: uid.to_owned(),
        }
    }

    /// A reference to the Pod with this name and UID, for objects that go with it. It is not its controller, and does
    /// not block its deletion, which would need permission for the finalizers of Pods.
    #[must_use]
    pub fn pod_reference(name: &str, uid: &str) -> OwnerReference {
        OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            ..OwnerReference::default()
        }
    }

    /// The controller of the object with these metadata.
    #[must_use]
    pub fn controller(metadata: &ObjectMeta) -> Option<Self> {
        Self::controller_in(metadata.owner_references.as_deref().unwrap_or_default())
    }

    /// The controller among the owner references of an object.
    #[must_use]
    pub fn controller_in(references: &[OwnerReference]) -> Option<Self> {
        let mut controllers = references.iter().filter(|owner| owner.controller == Some(true));
        controllers.next().map(Self::from_reference)
    }

    /// The same, from `metadata.ownerReferences` as JSON.
    #[must_use]
    pub fn controller_from_json(references: &Value) -> Option<Self> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        find_controller(references).map(|owner| Self {
            kind: OwnerKind::from_api_version_and_kind(&text(&owner["apiVersion"]), &text(&owner["kind"])),
            name: text(&owner["name"]),
            uid: text(&owner["uid"]),
        })
    }

    /// The controller owner reference to it; for a kind of ours.
    #[must_use]
    pub fn controller_reference(&self) -> Value {
        controller_reference(self.kind.as_str(), &self.name, &self.uid)
    }

    /// Identifies the owner among those of all namespaces. Neither names nor UIDs contain a slash.
    #[must_use]
    pub fn group_key(&self, namespace: Option<&str>) -> String {
        let namespace = namespace.unwrap_or_default();
        let (kind, name, uid) = (self.kind.as_str(), &self.name, &self.uid);
        format!("{namespace}/{kind}/{name}/{uid}")
    }
}

/// The controller in `metadata.ownerReferences` (JSON).
fn find_controller(references: &Value) -> Option<&Value> {
    let mut owners = references.as_array().into_iter().flatten();
    owners.find(|owner| owner["controller"] == true)
}

/// The controller in `metadata.ownerReferences` (JSON) if it is of our API group, whatever its kind and version.
#[must_use]
pub fn controller_of_our_group(references: &Value) -> Option<&Value> {
    let controller = find_controller(references)?;
    let (group, _) = controller["apiVersion"].as_str()?.split_once('/')?;
    (group == GROUP).then_some(controller)
}

/// Whether there is such a controller.
#[must_use]
pub fn controlled_by_our_group(references: &Value) -> bool {
    controller_of_our_group(references).is_some()
}

/// The controller owner reference to a workload of ours, for objects that it creates or adopts.
#[must_use]
pub fn controller_reference(kind: &str, name: &str, uid: &str) -> Value {
    json!({
        "apiVersion": format!("{GROUP}/{V1BETA1}"),
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": true,
        "blockOwnerDeletion": true,
    })
}

impl OwnerKind {
    fn from_api_version_and_kind(api_version: &str, kind: &str) -> Self {
        let ours = |version: &str| [V1BETA1, V1ALPHA1].contains(&version);
        match (api_version.split_once('/'), kind) {
            (Some((GROUP, version)), "CloneSet") if ours(version) => Self::CloneSet,
            (Some((GROUP, version)), "SidecarSet") if ours(version) => Self::SidecarSet,
            (Some((GROUP, version)), "ImageListPullJob") if ours(version) => Self::ImageListPullJob,
            (Some((GROUP, V1ALPHA1)), "ContainerRecreateJob") => Self::ContainerRecreateJob,
            (Some(("apps", "v1")), "DaemonSet") => Self::DaemonSet,
            (Some(("apps", "v1")), "Deployment") => Self::Deployment,
            (Some(("apps", "v1")), "ReplicaSet") => Self::ReplicaSet,
            (Some(("apps", "v1")), "StatefulSet") => Self::StatefulSet,
            (None, "Pod") if api_version == "v1" => Self::Pod,
            _ => Self::Other,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::CloneSet => "CloneSet",
            Self::ContainerRecreateJob => "ContainerRecreateJob",
            Self::DaemonSet => "DaemonSet",
            Self::Deployment => "Deployment",
            Self::ImageListPullJob => "ImageListPullJob",
            Self::Pod => "Pod",
            Self::ReplicaSet => "ReplicaSet",
            Self::SidecarSet => "SidecarSet",
            Self::StatefulSet => "StatefulSet",
            Self::Other => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn kind(api_version: &str, kind: &str) -> OwnerKind {
        let reference =
            json!({ "apiVersion": api_version, "kind": kind, "name": "n", "uid": "u", "controller": true });
        let owner = Owner::controller_from_json(&json!([reference])).unwrap();
        let typed: OwnerReference = serde_json::from_value(reference).unwrap();
        assert_eq!(owner, Owner::from_reference(&typed));
        owner.kind
    }

    #[test]
    fn owner_kind_requires_a_served_version() {
        for version in ["apps.kruise.io/v1beta1", "apps.kruise.io/v1alpha1"] {
            assert_eq!(kind(version, "CloneSet"), OwnerKind::CloneSet);
            assert_eq!(kind(version, "SidecarSet"), OwnerKind::SidecarSet);
            assert_eq!(kind(version, "Pod"), OwnerKind::Other);
        }
        for version in [
            "apps.kruise.io/v9",
            "apps.kruise.io/",
            "apps.kruise.io",
            "example.com/v1beta1",
            "apps.kruise.io/v1beta1/x",
            "v1beta1",
            "",
        ] {
            assert_eq!(kind(version, "CloneSet"), OwnerKind::Other, "{version}");
            assert_eq!(kind(version, "SidecarSet"), OwnerKind::Other, "{version}");
        }
        assert_eq!(kind("v1", "Pod"), OwnerKind::Pod);
        assert_eq!(kind("v2", "Pod"), OwnerKind::Other);
        assert_eq!(Owner::controller_from_json(&json!([{ "kind": "Pod" }])), None);
        assert_eq!(Owner::controller_from_json(&json!("x")), None);
    }

    #[test]
    fn group_keys_are_distinct_per_owner() {
        let owner = |kind, name: &str| Owner {
            kind,
            name: name.to_owned(),
            uid: "u".to_owned(),
        };
        let web = owner(OwnerKind::CloneSet, "web");
        let groups = [
            web.group_key(Some("a")),
            web.group_key(Some("b")),
            owner(OwnerKind::CloneSet, "db").group_key(Some("a")),
            owner(OwnerKind::Pod, "web").group_key(Some("a")),
        ];
        let distinct: std::collections::BTreeSet<&String> = groups.iter().collect();
        assert_eq!(distinct.len(), groups.len());
    }
}
