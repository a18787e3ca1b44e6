//! Other objects that CloneSets own, reduced: revisions and claims.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use kruise_api::keys;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_workload::claim::Claim;
use kruise_workload::revision::Revision;

/// What the manager caches of a ControllerRevision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RevisionView {
    /// UID of the ControllerRevision.
    pub uid: String,
    /// Version for conditional writes.
    pub resource_version: String,
    /// The CloneSet or SidecarSet that controls it, if any.
    pub controller: Option<Owner>,
    /// Whether it has a `deletionTimestamp`.
    pub terminating: bool,
    /// The annotations with the hashes of a SidecarSet's containers.
    pub hash_annotations: BTreeMap<String, String>,
    /// Name, number, labels and data.
    pub revision: Arc<Revision>,
}

/// What the manager caches of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimView {
    /// Version for conditional writes.
    pub resource_version: String,
    /// The owner that counts among all: the CloneSet, or else a Pod that the claim is deleted with.
    pub owner: Option<Owner>,
    /// The reduced claim.
    pub claim: Claim,
}

impl RevisionView {
    /// Reduces a revision; `None` if another object controls it.
    #[must_use]
    pub fn from_object(object: &ControllerRevision) -> Option<Self> {
        let controller = Owner::controller(&object.metadata);
        if controller
            .as_ref()
            .is_some_and(|owner| !matches!(owner.kind, OwnerKind::CloneSet | OwnerKind::SidecarSet))
        {
            return None;
        }
        let metadata = &object.metadata;
        let annotations = metadata.annotations.iter().flatten();
        let hashes = annotations.filter(|(key, _)| {
            [keys::SIDECAR_SET_HASH, keys::SIDECAR_SET_HASH_WITHOUT_IMAGE].contains(&key.as_str())
        });
        Some(Self {
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            controller,
            terminating: metadata.deletion_timestamp.is_some(),
            hash_annotations: hashes.map(|(key, hash)| (key.clone(), hash.clone())).collect(),
            revision: Arc::new(Revision::from(object)),
        })
    }
}

/// The rank of a claim's owner; `None` for other kinds. Of two CloneSets, the controller ranks higher.
fn owner_rank(owner: &OwnerReference) -> Option<u8> {
    match Owner::from_reference(owner).kind {
        OwnerKind::CloneSet => Some(if owner.controller == Some(true) { 2 } else { 1 }),
        OwnerKind::Pod => Some(0),
        OwnerKind::ContainerRecreateJob
        | OwnerKind::DaemonSet
        | OwnerKind::Deployment
        | OwnerKind::ImageListPullJob
        | OwnerKind::ReplicaSet
        | OwnerKind::SidecarSet
        | OwnerKind::StatefulSet
        | OwnerKind::Other => None,
    }
}

impl ClaimView {
    /// Reduces a claim.
    #[must_use]
    pub fn from_object(object: &PersistentVolumeClaim) -> Self {
        let metadata = &object.metadata;
        let labels = metadata.labels.as_ref();
        let instance = labels.and_then(|l| l.get(keys::CLONESET_INSTANCE_ID));
        let phase = object.status.as_ref().and_then(|s| s.phase.as_deref());
        let class = object.spec.as_ref().and_then(|s| s.storage_class_name.clone());
        let owners = metadata.owner_references.iter().flatten();
        let ranked = owners
            .clone()
            .filter_map(|owner| Some((owner_rank(owner)?, owner)));
        let owner = ranked.max_by_key(|(rank, _)| *rank);
        Self {
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            owner: owner.map(|(_, owner)| Owner::from_reference(owner)),
            claim: Claim {
                name: metadata.name.clone().unwrap_or_default(),
                uid: metadata.uid.clone().unwrap_or_default(),
                instance_id: instance.cloned().unwrap_or_default(),
                terminating: metadata.deletion_timestamp.is_some(),
                has_other_owner: owners.clone().any(|owner| owner_rank(owner).is_none()),
                has_other_controller: owners
                    .clone()
                    .any(|owner| owner.controller == Some(true) && owner_rank(owner).is_none()),
                unbound_storage_class: (phase != Some("Bound")).then(|| class.unwrap_or_default()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;

    fn owner(kind: &str, uid: &str, controls: bool) -> Value {
        let group = match kind {
            "CloneSet" => "apps.kruise.io/v1alpha1",
            "Pod" => "v1",
            _ => "example.com/v1",
        };
        json!({ "apiVersion": group, "kind": kind, "name": uid, "uid": uid, "controller": controls })
    }

    /// The UID of the owner that counts, and whether another one is the controller.
    fn owner_of(owners: &[Value]) -> (Option<String>, bool) {
        let claim = json!({ "metadata": { "name": "c", "ownerReferences": owners }, "spec": {} });
        let view = ClaimView::from_object(&serde_json::from_value(claim).unwrap());
        (view.owner.map(|owner| owner.uid), view.claim.has_other_controller)
    }

    #[test]
    fn clone_set_owns_claim_despite_other_owners() {
        let (web, backup) = (owner("CloneSet", "web", true), owner("Backup", "b", false));
        let ours = (Some("web".to_owned()), false);
        assert_eq!(owner_of(&[web.clone(), backup.clone()]), ours);
        assert_eq!(owner_of(&[backup.clone(), web.clone()]), ours);
        assert_eq!(owner_of(&[owner("Pod", "p", false), web.clone()]), ours);
        assert_eq!(owner_of(&[owner("CloneSet", "other", false), web]), ours);
        let theirs = [owner("Backup", "b", true), owner("CloneSet", "web", false)];
        assert_eq!(owner_of(&theirs), (ours.0, true));

        let pod = (Some("p".to_owned()), false);
        assert_eq!(owner_of(&[backup.clone(), owner("Pod", "p", true)]), pod);
        assert_eq!(owner_of(&[backup]), (None, false));
        let alike = json!({ "apiVersion": "example.com/v1", "kind": "CloneSet", "name": "x", "uid": "x" });
        assert_eq!(owner_of(&[alike]), (None, false));
    }
}
