//! What CloneSets own besides Pods, reduced: revisions and claims.

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::api::{GROUP, keys};
use crate::manager::cloneset::plan::Claim;
use crate::manager::cloneset::revision::Revision;

/// What the manager knows of a ControllerRevision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RevisionView {
    /// Identity of the object.
    pub uid: String,
    /// Its version.
    pub resource_version: String,
    /// UID of the CloneSet that controls it, if any does.
    pub controller: Option<String>,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// What it holds.
    pub revision: Revision,
}

/// What the manager knows of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimView {
    /// Its version.
    pub resource_version: String,
    /// UID of its first owner: the CloneSet, or a Pod that takes it along.
    pub owner: Option<String>,
    /// What it is.
    pub claim: Claim,
}

impl RevisionView {
    /// Reduces a revision; `None` for those that others control.
    #[must_use]
    pub fn of(object: &ControllerRevision) -> Option<Self> {
        let controller = controller_kind(&object.metadata);
        if controller.is_some_and(|(kind, _)| kind != "CloneSet") {
            return None;
        }
        let metadata = &object.metadata;
        Some(Self {
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            controller: controller.map(|(_, uid)| uid.to_owned()),
            deleting: metadata.deletion_timestamp.is_some(),
            revision: Revision::from(object),
        })
    }
}

/// Kind and UID of the controller; the kind is empty for those of other groups.
fn controller_kind(metadata: &ObjectMeta) -> Option<(&str, &str)> {
    let owners = metadata.owner_references.iter().flatten();
    let owner = owners.into_iter().find(|o| o.controller == Some(true))?;
    let ours = owner
        .api_version
        .split_once('/')
        .is_some_and(|(group, _)| group == GROUP);
    Some((if ours { &owner.kind } else { "" }, &owner.uid))
}

impl ClaimView {
    /// Reduces a claim.
    #[must_use]
    pub fn of(object: &PersistentVolumeClaim) -> Self {
        let metadata = &object.metadata;
        let labels = metadata.labels.as_ref();
        let instance = labels.and_then(|l| l.get(keys::CLONESET_INSTANCE_ID));
        let phase = object.status.as_ref().and_then(|s| s.phase.as_deref());
        let class = object.spec.as_ref().and_then(|s| s.storage_class_name.clone());
        Self {
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            owner: metadata
                .owner_references
                .iter()
                .flatten()
                .map(|o| o.uid.clone())
                .next(),
            claim: Claim {
                name: metadata.name.clone().unwrap_or_default(),
                uid: metadata.uid.clone().unwrap_or_default(),
                instance: instance.cloned().unwrap_or_default(),
                deleting: metadata.deletion_timestamp.is_some(),
                unbound: (phase != Some("Bound")).then(|| class.unwrap_or_default()),
            },
        }
    }
}
