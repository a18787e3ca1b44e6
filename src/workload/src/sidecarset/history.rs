//! ControllerRevisions of a SidecarSet: which one is the current one, and which are kept.
//!
//! They are in the namespace that Kruise is installed in, because new Pods of all namespaces may get their content.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use kruise_api::owner::{Owner, OwnerKind};
use kruise_api::sidecarset::{SidecarContainer, SidecarSetSpec};
use kruise_api::{go_json, keys};
use serde::Serialize;
use serde_json::{Value, json};

use super::recorded;
use super::set::SetView;
use crate::in_place::Pod;
use crate::revision::{
    self, DEFAULT_HISTORY_LIMIT, DesiredRevision, Revision, RevisionAction, with_go_fields,
};

/// Kind of the owner.
pub const KIND: &str = "SidecarSet";

/// A ControllerRevision of Kruise's namespace.
#[derive(Clone, Debug, Default)]
pub struct ListedRevision<R> {
    /// Its content.
    pub revision: R,
    /// Its controller.
    pub controller: Option<Owner>,
}

/// What decisions about revisions need of a SidecarSet.
#[derive(Clone, Copy, Debug)]
pub struct HistoryOwner<'a> {
    /// The SidecarSet.
    pub set: SetView<'a>,
    /// Its UID.
    pub uid: &'a str,
    /// Its labels, which its revisions get.
    pub labels: &'a BTreeMap<String, String>,
    /// `status.collisionCount`.
    pub collisions: Option<i32>,
}

/// How the revision of the spec becomes the newest, and what is deleted then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryPlan {
    /// Name of the revision of the spec.
    pub latest: String,
    /// `status.collisionCount` for that name.
    pub collisions: i32,
    /// How it becomes the newest.
    pub action: RevisionAction,
    /// What is to be created, if it is.
    pub desired: DesiredRevision,
    /// New value of label [`keys::SIDECAR_SET_CUSTOM_VERSION`] of an existing revision.
    pub custom_version: Option<String>,
    /// Revisions without a controller that become the set's, as in Kubernetes' own workloads: otherwise they would
    /// remain after the set is deleted. Upstream uses but does not adopt them.
    pub adopt: Vec<String>,
    /// Revisions to delete, the oldest first.
    pub delete: Vec<String>,
}

/// The data of the revision of a spec, in Go's JSON: what new Pods get of it. Empty lists are null.
#[must_use]
pub fn encode_spec(spec: &SidecarSetSpec) -> String {
    // With the fields of volumes that Go always writes.
    let volumes = with_go_fields(json!({ "spec": { "volumes": list(spec.volumes.as_ref()) } }));
    go_json::to_sorted_json(&json!({ "spec": {
        "$patch": "replace",
        "containers": containers(spec.containers.as_ref()),
        "imagePullSecrets": list(spec.image_pull_secrets.as_ref()),
        "initContainers": containers(spec.init_containers.as_ref()),
        "patchPodMetadata": list(spec.patch_pod_metadata.as_ref()),
        "volumes": volumes["spec"]["volumes"],
    } }))
}

/// Containers with the fields that Go always writes and without those that it omits.
fn containers(containers: Option<&Vec<SidecarContainer>>) -> Value {
    let ordered = go_json::to_ordered_json(&list(containers), &go_json::SIDECAR_CONTAINER);
    serde_json::from_str(&ordered).unwrap_or_default()
}

fn list<T: Serialize>(list: Option<&Vec<T>>) -> Value {
    let items = list.filter(|items| !items.is_empty());
    items.map_or(Value::Null, |items| {
        serde_json::to_value(items).unwrap_or_default()
    })
}

/// The revision that the spec corresponds to.
#[must_use]
pub fn desired_revision(owner: &HistoryOwner<'_>) -> DesiredRevision {
    let set = &owner.set;
    let mut labels = owner.labels.clone();
    labels.insert(keys::SIDECAR_SET_NAME.to_owned(), set.name.to_owned());
    if !set.spec.custom_version.is_empty() {
        let version = set.spec.custom_version.clone();
        labels.insert(keys::SIDECAR_SET_CUSTOM_VERSION.to_owned(), version);
    }
    DesiredRevision::new(
        set.name,
        encode_spec(set.spec),
        labels,
        set.annotations.clone(),
        Some(owner.collisions.unwrap_or(0)),
    )
}

/// Plans the revisions of a set; `listed` are those of Kruise's namespace, in any order, and `pods` the matched Pods.
#[must_use]
pub fn plan<R: Borrow<Revision>>(
    owner: &HistoryOwner<'_>,
    listed: &[ListedRevision<R>],
    pods: &[&Pod],
) -> HistoryPlan {
    let set = &owner.set;
    let has_label = |revision: &Revision| {
        let label = revision.labels.get(keys::SIDECAR_SET_NAME);
        label.is_some_and(|name| name == set.name)
    };
    let is_own = |listed: &&ListedRevision<R>| {
        has_label(listed.revision.borrow())
            && listed.controller.as_ref().is_none_or(|controller| {
                controller.kind == OwnerKind::SidecarSet && controller.uid == owner.uid
            })
    };
    let own = || listed.iter().filter(is_own);
    let orphans = own().filter(|listed| listed.controller.is_none());
    let mut adopt: Vec<String> = orphans
        .map(|listed| listed.revision.borrow().name.clone())
        .collect();
    let mut revisions: Vec<&Revision> = own().map(|listed| listed.revision.borrow()).collect();
    revision::sort(&mut revisions);

    let desired = desired_revision(owner);
    let action = revision::plan(&desired, &revisions);
    let mut collisions = owner.collisions.unwrap_or(0);
    let (latest, desired) = match &action {
        RevisionAction::UseNewest { name } | RevisionAction::Promote { name, .. } => (name.clone(), desired),
        RevisionAction::Create { .. } => {
            let taken: BTreeSet<&str> = listed.iter().map(|l| l.revision.borrow().name.as_str()).collect();
            let mut named = desired;
            while taken.contains(named.name.as_str()) && collisions < i32::MAX {
                collisions = collisions.saturating_add(1);
                named = named.with_collisions(set.name, collisions);
            }
            (named.name.clone(), named)
        }
    };
    let existing = revisions.iter().find(|revision| revision.name == latest);
    let custom_version = existing.and_then(|existing| {
        let wanted = &set.spec.custom_version;
        let differs = custom_version(existing) != Some(wanted);
        (differs && !wanted.is_empty()).then(|| wanted.clone())
    });
    let delete = to_delete(set, &revisions, &latest, pods);
    adopt.retain(|name| !delete.contains(name));
    HistoryPlan {
        latest,
        collisions,
        action,
        desired,
        custom_version,
        adopt,
        delete,
    }
}

/// Revisions to delete, the oldest first: those above the limit that neither Pods nor the injection need. `revisions`
/// are the existing ones, the newest last; `latest` becomes the last.
fn to_delete(set: &SetView<'_>, revisions: &[&Revision], latest: &str, pods: &[&Pod]) -> Vec<String> {
    let limit = set.spec.revision_history_limit.unwrap_or(DEFAULT_HISTORY_LIMIT);
    let limit = usize::try_from(limit).unwrap_or(0).max(1);
    let others: Vec<&Revision> = revisions.iter().copied().filter(|r| r.name != latest).collect();
    let mut surplus = (others.len() + 1).saturating_sub(limit);
    if surplus == 0 {
        return Vec::new();
    }
    let mut used: BTreeSet<String> = pods.iter().filter_map(|pod| revision_of(set, pod)).collect();
    if let Some(injected) = set.spec.injected_revision() {
        used.extend(injected.revision_name.clone());
        let version = injected.custom_version.as_ref();
        let version = version.filter(|version| !version.is_empty());
        let wanted = Some(&set.spec.custom_version).filter(|version| !version.is_empty());
        let latest_version = || custom_version(revisions.iter().find(|revision| revision.name == latest)?);
        // The newest one with that version is injected; the latest is kept anyway.
        let version = version.filter(|version| wanted.or_else(latest_version) != Some(*version));
        if let Some(version) = version {
            let newest = others
                .iter()
                .rev()
                .find(|revision| custom_version(revision) == Some(version));
            used.extend(newest.map(|revision| revision.name.clone()));
        }
    }
    let mut delete = Vec::new();
    for revision in others {
        if surplus == 0 {
            break;
        }
        if !used.contains(&revision.name) {
            delete.push(revision.name.clone());
            surplus -= 1;
        }
    }
    delete
}

fn custom_version(revision: &Revision) -> Option<&String> {
    revision.labels.get(keys::SIDECAR_SET_CUSTOM_VERSION)
}

/// Name of the revision that a Pod records.
#[must_use]
pub fn revision_of(set: &SetView<'_>, pod: &Pod) -> Option<String> {
    let text = pod.annotations.get(keys::SIDECAR_SET_HASH)?;
    let record = recorded::parse(text).remove(set.name)?;
    Some(record.controller_revision).filter(|name| !name.is_empty())
}
