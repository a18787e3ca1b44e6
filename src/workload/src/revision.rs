//! ControllerRevisions of a workload: their names, their content, and which of them are kept.
//!
//! Labels, annotations, data and names are OpenKruise's, byte for byte, so that either program accepts the other's
//! revisions as its own: a revision that counts as new replaces all Pods.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::in_place::normalize::{TemplateStorage, normalize};
use kruise_api::json::{estimate_memory, set};
use kruise_api::owner::controller_reference;
use kruise_api::{go_json, keys};

mod hashes;

pub use hashes::claim_hash;
pub(crate) use hashes::{safe_encode, with_go_fields};

/// Maximum bytes of a workload's name in the names of its revisions.
const MAX_NAME_BYTES: usize = 223;
/// Default number of unused revisions that are kept.
pub const DEFAULT_HISTORY_LIMIT: i32 = 10;

/// The owner of a revision.
#[derive(Clone, Copy, Debug)]
pub struct RevisionOwner<'a> {
    /// Kind of the workload.
    pub kind: &'a str,
    /// Namespace of the workload.
    pub namespace: &'a str,
    /// Name of the workload.
    pub name: &'a str,
    /// UID of the workload.
    pub uid: &'a str,
    /// Annotations of the workload.
    pub annotations: &'a BTreeMap<String, String>,
}

/// The revision that a workload's spec corresponds to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredRevision {
    /// Name of the ControllerRevision.
    pub name: String,
    /// Labels of the ControllerRevision.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the ControllerRevision.
    pub annotations: BTreeMap<String, String>,
    /// Data as Go writes its JSON.
    pub data: String,
}

/// An existing ControllerRevision, reduced to what decisions need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revision {
    /// Name of the ControllerRevision.
    pub name: String,
    /// Revision number; the newest has the highest.
    pub number: i64,
    /// Time of its creation.
    pub created: Option<Time>,
    /// Data as Go writes its JSON.
    pub data: String,
    /// Estimated memory of the parsed data in bytes, by [`estimate_memory`].
    pub memory: usize,
    /// Labels of the ControllerRevision.
    pub labels: BTreeMap<String, String>,
    /// Annotation [`keys::VOLUME_CLAIM_TEMPLATE_HASH`].
    pub claim_hash: Option<String>,
    /// Why its data is no Pod template, if so: the API server accepts any object.
    pub invalid_reason: Option<String>,
}

/// How the desired revision becomes the newest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RevisionAction {
    /// It is already the newest.
    UseNewest {
        /// Name of the revision.
        name: String,
    },
    /// It is an older one and becomes the newest: a rollback.
    Promote {
        /// Name of the revision.
        name: String,
        /// New revision number.
        number: i64,
        /// New claim template hash, if it differs.
        claim_hash: Option<String>,
    },
    /// No revision matches; create one.
    Create {
        /// Number of the new revision.
        number: i64,
    },
}

impl From<&ControllerRevision> for Revision {
    fn from(from: &ControllerRevision) -> Self {
        let metadata = &from.metadata;
        let annotations = metadata.annotations.as_ref();
        let data = from.data.as_ref().map(|data| go_json::to_sorted_json(&data.0));
        let data = data.unwrap_or_default();
        Self {
            name: metadata.name.clone().unwrap_or_default(),
            number: from.revision,
            created: metadata.creation_timestamp.clone(),
            memory: estimate_memory(data.as_bytes()),
            data,
            labels: metadata.labels.clone().unwrap_or_default(),
            claim_hash: annotations.and_then(|all| all.get(keys::VOLUME_CLAIM_TEMPLATE_HASH).cloned()),
            invalid_reason: invalid_reason(from.data.as_ref().map(|data| &data.0)),
        }
    }
}

/// Why no Pods can be created from a revision's data, if so.
fn invalid_reason(data: Option<&Value>) -> Option<String> {
    match data.and_then(|data| data.pointer("/spec/template")) {
        Some(template) => template_error(template),
        None => Some("spec.template is missing".to_owned()),
    }
}

/// Why no Pods can be created from a template, if so.
pub fn template_error(template: &Value) -> Option<String> {
    match PodTemplateSpec::deserialize(template) {
        Err(why) => Some(why.to_string()),
        Ok(template)
            if template
                .spec
                .as_ref()
                .is_none_or(|spec| spec.containers.is_empty()) =>
        {
            Some("spec.template has no containers".to_owned())
        }
        Ok(_) => None,
    }
}

impl Revision {
    /// The Pod template in the revision's data.
    pub fn template(&self) -> Option<Value> {
        decode_template(&self.data)
    }
}

/// Decodes the Pod template in a revision's data.
pub fn decode_template(data: &str) -> Option<Value> {
    let mut data: Value = serde_json::from_str(data).ok()?;
    let mut template = data.pointer_mut("/spec/template")?.take();
    template.as_object_mut()?.remove("$patch");
    Some(template)
}

/// The revision for a Pod template and claim templates, both with defaults.
///
/// `collisions` is `status.collisionCount`.
pub fn desired_revision(
    owner: &RevisionOwner<'_>,
    template: &Value,
    claims: &[Value],
    collisions: Option<i32>,
) -> DesiredRevision {
    let labels = kruise_api::cloneset::string_map(&template["metadata"]["labels"]);
    let mut annotations = owner.annotations.clone();
    annotations.insert(
        keys::VOLUME_CLAIM_TEMPLATE_HASH.to_owned(),
        claim_hash(claims).unwrap_or_default(),
    );
    DesiredRevision::new(
        owner.name,
        encode_template(template),
        labels,
        annotations,
        collisions,
    )
}

/// A revision's data in Go's JSON: the template with the empty values that Go writes.
pub fn encode_template(template: &Value) -> String {
    let mut template = hashes::with_go_fields(template.clone());
    set(&mut template, &["$patch"], json!("replace"));
    go_json::to_sorted_json(&json!({ "spec": { "template": template } }))
}

fn revision_name(workload: &str, hash: &str) -> String {
    let end = workload.len().min(MAX_NAME_BYTES);
    let start = workload.get(..end).unwrap_or(workload);
    format!("{start}-{hash}")
}

impl RevisionOwner<'_> {
    /// The controller owner reference to the workload.
    fn reference(&self) -> Value {
        controller_reference(self.kind, self.name, self.uid)
    }
}

impl DesiredRevision {
    /// The revision of a workload with this data, which is Go's JSON. Its hash becomes part of the name, and a label.
    #[must_use]
    pub fn new(
        workload: &str,
        data: String,
        mut labels: BTreeMap<String, String>,
        annotations: BTreeMap<String, String>,
        collisions: Option<i32>,
    ) -> Self {
        let hash = hashes::revision_hash(&data, collisions);
        let name = revision_name(workload, &hash);
        labels.insert(keys::REVISION_HASH.to_owned(), hash);
        Self {
            name,
            labels,
            annotations,
            data,
        }
    }

    /// The same revision with its name after `collisions` name collisions of this workload. Its label does not change,
    /// as in upstream.
    #[must_use]
    pub fn with_collisions(&self, workload: &str, collisions: i32) -> Self {
        Self {
            name: revision_name(workload, &hashes::revision_hash(&self.data, Some(collisions))),
            ..self.clone()
        }
    }

    /// Whether an existing revision has the same content.
    pub fn matches(&self, existing: &Revision) -> bool {
        let number = |labels: &BTreeMap<String, String>| {
            labels
                .get(keys::REVISION_HASH)
                .and_then(|hash| hash.parse::<u32>().ok())
        };
        let numbers = number(&self.labels).zip(number(&existing.labels));
        self.data == existing.data && numbers.is_none_or(|(one, other)| one == other)
    }

    /// The body of the request that creates the ControllerRevision. It is text because the API server stores the bytes
    /// of `data` unchanged, and the Go implementation compares these bytes.
    pub fn request_body(&self, owner: &RevisionOwner<'_>, number: i64) -> String {
        let mut object = json!({
            "apiVersion": "apps/v1",
            "kind": "ControllerRevision",
            "metadata": {
                "name": self.name,
                "namespace": owner.namespace,
                "labels": self.labels,
                "annotations": self.annotations,
                "ownerReferences": [owner.reference()],
            },
            "revision": number,
        });
        set(
            &mut object,
            &["data"],
            serde_json::from_str(&self.data).unwrap_or_default(),
        );
        go_json::to_sorted_json(&object)
    }
}

/// Sorts revisions, the newest last.
pub fn sort(revisions: &mut [impl Borrow<Revision>]) {
    revisions.sort_by(|one, other| {
        let (one, other) = (one.borrow(), other.borrow());
        let key = |revision: &Revision| (revision.number, revision.created.as_ref().map(|time| time.0));
        key(one).cmp(&key(other)).then_with(|| one.name.cmp(&other.name))
    });
}

/// The template of a revision that equals `template` apart from defaults: of the newest, or else of one with the same
/// bytes, or else of the newest that matches. Invalid revisions are skipped.
pub fn equivalent_template(
    template: &Value,
    revisions: &[impl Borrow<Revision>],
    storage: TemplateStorage,
) -> Option<Value> {
    let (bytes, normal) = (encode_template(template), normalize(template, storage));
    let newest_first = || revisions.iter().rev().map(Borrow::borrow);
    let valid = || newest_first().filter(|revision| revision.invalid_reason.is_none());
    let same = |revision: &Revision| {
        let existing = revision.template()?;
        (revision.data == bytes || normalize(&existing, storage) == normal).then_some(existing)
    };
    let equal = || valid().find(|revision| revision.data == bytes);
    valid()
        .take(1)
        .find_map(same)
        .or_else(|| equal().and_then(Revision::template))
        .or_else(|| valid().find_map(same))
}

/// Whether the newest revision matches the template except for images, so that the checks of that revision also apply
/// to this one: the only default that depends on an image is a missing pull policy. Claim templates are checked with
/// the template and are not part of a revision, so there must be none, before and now.
pub fn matches_except_images(
    template: &Value,
    claims: &[Value],
    revisions: &[impl Borrow<Revision>],
) -> bool {
    let newest = revisions.last().map(Borrow::borrow).filter(|newest| {
        claims.is_empty() && newest.claim_hash.as_deref() == Some("") && newest.invalid_reason.is_none()
    });
    let Some(mut stored) = newest.and_then(Revision::template) else {
        return false;
    };
    for list in ["containers", "initContainers"] {
        let spec = stored.get_mut("spec").into_iter();
        let mut stored_containers = spec.flat_map(|spec| hashes::items(spec, list));
        for container in template["spec"][list].as_array().into_iter().flatten() {
            let Some(image) = container["image"].as_str().filter(|image| is_plain_image(image)) else {
                return false;
            };
            if !container["imagePullPolicy"].is_string() {
                return false;
            }
            if let Some(known) = stored_containers.next() {
                set(known, &["image"], image.into());
            }
        }
    }
    encode_template(template) == encode_template(&stored)
}

/// Whether the API server accepts any such text as an image.
fn is_plain_image(image: &str) -> bool {
    !image.is_empty() && image.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Whether there are no claim templates, or a revision has their hash. The same templates written differently have
/// another hash.
pub fn has_claim_hash(claims: &[Value], revisions: &[impl Borrow<Revision>]) -> bool {
    let hash = claim_hash(claims);
    hash.is_none()
        || revisions
            .iter()
            .any(|revision| revision.borrow().claim_hash == hash)
}

/// How the desired revision becomes the newest of the existing ones, which are sorted.
///
/// A change of claim templates alone creates no revision, as in upstream.
pub fn plan(desired: &DesiredRevision, revisions: &[impl Borrow<Revision>]) -> RevisionAction {
    let next = revisions
        .last()
        .map_or(0, |revision| revision.borrow().number)
        .saturating_add(1);
    let all = revisions.iter().map(Borrow::borrow).enumerate();
    match all.rev().find(|(_, one)| desired.matches(one)) {
        Some((at, same)) if at + 1 == revisions.len() => RevisionAction::UseNewest {
            name: same.name.clone(),
        },
        Some((_, same)) => {
            let claim_hash = desired.annotations.get(keys::VOLUME_CLAIM_TEMPLATE_HASH);
            RevisionAction::Promote {
                name: same.name.clone(),
                number: next,
                claim_hash: claim_hash
                    .filter(|hash| same.claim_hash.as_ref() != Some(hash))
                    .cloned(),
            }
        }
        None => RevisionAction::Create { number: next },
    }
}

/// The name of the current revision: that of the status, if this revision exists, or else the update revision.
pub fn current_revision<'a>(
    status: &'a str,
    update: &'a str,
    revisions: &[impl Borrow<Revision>],
) -> &'a str {
    let is_status_revision =
        |revision: &Revision| revision.name == status && revision.invalid_reason.is_none();
    if revisions.iter().map(Borrow::borrow).any(is_status_revision) {
        status
    } else {
        update
    }
}

/// Names of the revisions to delete, the oldest first, so that `limit` unused ones are kept.
///
/// `revisions` is sorted; `used` holds the names of the current and the update revision, and the revision labels of all
/// Pods. A negative limit counts as 0.
pub fn revisions_to_delete(
    revisions: &[impl Borrow<Revision>],
    used: &BTreeSet<&str>,
    limit: i32,
) -> Vec<String> {
    let used: BTreeSet<&str> = used.iter().map(|label| short_hash(label)).collect();
    let unused: Vec<&Revision> = revisions
        .iter()
        .map(Borrow::borrow)
        .filter(|revision| !used.contains(short_hash(&revision.name)))
        .collect();
    let kept = usize::try_from(limit).unwrap_or(0);
    let surplus = unused.len().saturating_sub(kept);
    unused
        .iter()
        .take(surplus)
        .map(|revision| revision.name.clone())
        .collect()
}

/// The part after the last `-` of a revision's name: its hash.
pub fn short_hash(name: &str) -> &str {
    name.rsplit_once('-').map_or(name, |(_, hash)| hash)
}

/// Value of a Pod's revision label: the name, or only its hash if the name is too long for a label.
pub fn revision_label(name: &str) -> &str {
    const MAX_LABEL_BYTES: usize = 63;
    if name.len() > MAX_LABEL_BYTES {
        short_hash(name)
    } else {
        name
    }
}

/// Whether two names, full or short, are of the same revision.
pub fn same_revision(one: &str, other: &str) -> bool {
    short_hash(one) == short_hash(other)
}

#[cfg(test)]
mod tests;
