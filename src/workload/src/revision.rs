//! ControllerRevisions of a workload: what they are called, what they hold, and which of them stay.
//!
//! Labels, annotations and data are OpenKruise's, byte for byte, so that either program takes the other's revisions
//! for its own: a revision that is thought new replaces all Pods. So are names.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::in_place::normalize::{TemplateStorage, same_template};
use kruise_api::json::{estimate_memory, set};
use kruise_api::{GROUP, V1BETA1, go_json, keys};

mod hashes;

pub use hashes::claim_hash;

/// How many bytes of a workload's name go into the names of its revisions.
const MAX_NAME_BYTES: usize = 223;
/// Revisions that are kept besides those in use, where the workload does not say.
pub const DEFAULT_HISTORY_LIMIT: i32 = 10;

/// Whose revision it is.
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

/// The revision that the spec of a workload stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredRevision {
    /// Name of the ControllerRevision.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// Its data, in Go's JSON.
    pub data: String,
}

/// A ControllerRevision that exists, as far as it is decided upon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revision {
    /// Name.
    pub name: String,
    /// Number; the newest has the greatest.
    pub number: i64,
    /// When it was made.
    pub created: Option<Time>,
    /// Data, in Go's JSON.
    pub data: String,
    /// The memory that the data takes when it is parsed, in bytes, as [`estimate_memory`] estimates it.
    pub memory: usize,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotation [`keys::VOLUME_CLAIM_TEMPLATE_HASH`].
    pub claim_hash: Option<String>,
    /// Why its data is no Pod template, if so: the API server stores any object.
    pub invalid_reason: Option<String>,
}

/// How the wanted revision comes to be the newest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RevisionAction {
    /// It is the newest already.
    UseNewest {
        /// Name of the revision.
        name: String,
    },
    /// It is an older one, which is made the newest: a roll-back.
    Promote {
        /// Name of the revision.
        name: String,
        /// Its new number.
        number: i64,
        /// Its new claim template hash, if that differs.
        claim_hash: Option<String>,
    },
    /// There is none like it.
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

/// Why Pods cannot be made of a revision's data, if so.
fn invalid_reason(data: Option<&Value>) -> Option<String> {
    match data.and_then(|data| data.pointer("/spec/template")) {
        Some(template) => template_error(template),
        None => Some("spec.template is missing".to_owned()),
    }
}

/// Why Pods cannot be made of a template, if so.
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
    /// The Pod template that the revision holds.
    pub fn template(&self) -> Option<Value> {
        decode_template(&self.data)
    }
}

/// The Pod template that a revision's data holds.
pub fn decode_template(data: &str) -> Option<Value> {
    let mut data: Value = serde_json::from_str(data).ok()?;
    let mut template = data.pointer_mut("/spec/template")?.take();
    template.as_object_mut()?.remove("$patch");
    Some(template)
}

/// The revision that a Pod template and claim templates, both with defaults, stand for.
///
/// `collisions` is `status.collisionCount`.
pub fn desired_revision(
    owner: &RevisionOwner<'_>,
    template: &Value,
    claims: &[Value],
    collisions: Option<i32>,
) -> DesiredRevision {
    let data = encode_template(template);
    let hash = hashes::revision_hash(&data, collisions);
    let mut labels = kruise_api::cloneset::string_map(&template["metadata"]["labels"]);
    labels.insert(keys::REVISION_HASH.to_owned(), hash.clone());
    let mut annotations = owner.annotations.clone();
    annotations.insert(
        keys::VOLUME_CLAIM_TEMPLATE_HASH.to_owned(),
        claim_hash(claims).unwrap_or_default(),
    );
    DesiredRevision {
        name: revision_name(owner.name, &hash),
        labels,
        annotations,
        data,
    }
}

/// A revision's data, in Go's JSON: the template, with what Go writes for nothing.
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
    /// The reference that makes an object the workload's.
    pub fn reference(&self) -> Value {
        json!({
            "apiVersion": format!("{GROUP}/{V1BETA1}"),
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": true,
            "blockOwnerDeletion": true,
        })
    }
}

impl DesiredRevision {
    /// The same revision under the name that it has after `collisions` names were taken. Its label stays, as
    /// with upstream.
    pub fn with_collisions(&self, owner: &RevisionOwner<'_>, collisions: i32) -> Self {
        Self {
            name: revision_name(owner.name, &hashes::revision_hash(&self.data, Some(collisions))),
            ..self.clone()
        }
    }

    /// Whether a revision that exists says the same.
    pub fn matches(&self, existing: &Revision) -> bool {
        let number = |labels: &BTreeMap<String, String>| {
            labels
                .get(keys::REVISION_HASH)
                .and_then(|hash| hash.parse::<u32>().ok())
        };
        let numbers = number(&self.labels).zip(number(&existing.labels));
        self.data == existing.data && numbers.is_none_or(|(one, other)| one == other)
    }

    /// The ControllerRevision as the body of a request that makes it. As text, because the API server stores
    /// the bytes of `data` as they come, and the Go implementation compares these bytes.
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

/// The template of a revision that holds the same as `template`, whatever defaults either has: of the newest, or else of one
/// with the same bytes, or else of the newest that does. One that no Pods can be made of stands for nothing.
pub fn equivalent_template(
    template: &Value,
    revisions: &[impl Borrow<Revision>],
    storage: TemplateStorage,
) -> Option<Value> {
    let bytes = encode_template(template);
    let newest_first = || revisions.iter().rev().map(Borrow::borrow);
    let valid = || newest_first().filter(|revision| revision.invalid_reason.is_none());
    let same = |revision: &Revision| {
        let existing = revision.template()?;
        (revision.data == bytes || same_template(template, &existing, storage)).then_some(existing)
    };
    let equal = || valid().find(|revision| revision.data == bytes);
    valid()
        .take(1)
        .find_map(same)
        .or_else(|| equal().and_then(Revision::template))
        .or_else(|| valid().find_map(same))
}

/// Whether the newest revision holds the template but for images, so that what was found out about that one holds of this
/// one: of its defaults only the pull policy depends on an image, where none is said. Claim templates are checked with the
/// template and are in no revision, so that there must have been none, and be none.
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

/// Whether the API server takes any text like this for an image.
fn is_plain_image(image: &str) -> bool {
    !image.is_empty() && image.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Whether there are no claim templates, or a revision has the hash of these: written otherwise, the same ones have another.
pub fn has_claim_hash(claims: &[Value], revisions: &[impl Borrow<Revision>]) -> bool {
    let hash = claim_hash(claims);
    hash.is_none()
        || revisions
            .iter()
            .any(|revision| revision.borrow().claim_hash == hash)
}

/// How the wanted revision comes to be the newest of those known, which are sorted.
///
/// A change of claim templates alone makes no revision, as with upstream.
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

/// The name of the current revision: that of the status, if there is such a revision, or else the update
/// revision.
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

/// Names of the revisions to delete, the oldest first, so that `limit` of those that nobody uses stay.
///
/// `known` is sorted; `used` holds the names of the current and the update revision, and the values of the
/// revision labels of all Pods. A negative limit is 0.
pub fn revisions_to_delete(
    revisions: &[impl Borrow<Revision>],
    used: &BTreeSet<&str>,
    limit: i32,
) -> Vec<String> {
    let unused: Vec<&Revision> = revisions
        .iter()
        .map(Borrow::borrow)
        .filter(|revision| !used.iter().any(|label| same_revision(label, &revision.name)))
        .collect();
    let kept = usize::try_from(limit).unwrap_or(0);
    let surplus = unused.len().saturating_sub(kept);
    unused
        .iter()
        .take(surplus)
        .map(|revision| revision.name.clone())
        .collect()
}

/// What follows the last `-` of a revision's name: its hash.
pub fn short_hash(name: &str) -> &str {
    name.rsplit_once('-').map_or(name, |(_, hash)| hash)
}

/// What a Pod's label says of its revision: the name, or its hash alone where the name is too long for a label.
pub fn revision_label(name: &str) -> &str {
    const MAX_LABEL_BYTES: usize = 63;
    if name.len() > MAX_LABEL_BYTES {
        short_hash(name)
    } else {
        name
    }
}

/// Whether two names of revisions, whole or short, mean the same revision.
pub fn same_revision(one: &str, other: &str) -> bool {
    one == other || short_hash(one) == short_hash(other)
}

#[cfg(test)]
mod tests;
