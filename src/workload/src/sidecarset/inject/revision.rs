//! Which revision of a SidecarSet a new Pod gets.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Deserialize;

use kruise_api::keys;
use kruise_api::selector::matches;
use kruise_api::sidecarset::{SidecarSetInjectRevision, SidecarSetInjectRevisionPolicy, SidecarSetSpec};

use super::error::InjectionError;
use crate::sidecarset::hash::Hashes;
use crate::sidecarset::recorded::HashRecord;
use crate::sidecarset::set::SetView;

/// A SidecarSet in the version that is injected.
#[derive(Debug)]
pub(in crate::sidecarset) struct Selected<'a> {
    pub(in crate::sidecarset) name: &'a str,
    pub(in crate::sidecarset) hash: Cow<'a, str>,
    pub(in crate::sidecarset) hash_without_image: Cow<'a, str>,
    /// Name of the ControllerRevision.
    pub(in crate::sidecarset) revision: Cow<'a, str>,
    pub(in crate::sidecarset) spec: Cow<'a, SidecarSetSpec>,
}

impl Selected<'_> {
    /// What a Pod records of it: with the hash, and with that without images.
    pub(in crate::sidecarset) fn records(&self, update_timestamp: Option<String>) -> [HashRecord; 2] {
        let view = SetView {
            name: self.name,
            resource_version: "",
            annotations: &BTreeMap::new(),
            latest_revision: &self.revision,
            spec: &self.spec,
        };
        let record = HashRecord {
            update_timestamp,
            hash: self.hash.clone().into_owned(),
            sidecar_set_name: self.name.to_owned(),
            sidecar_list: Some(view.recorded_names()),
            controller_revision: self.revision.clone().into_owned(),
        };
        let without_image = HashRecord {
            hash: self.hash_without_image.clone().into_owned(),
            controller_revision: String::new(),
            ..record.clone()
        };
        [record, without_image]
    }
}

impl<'a> From<&SetView<'a>> for Selected<'a> {
    fn from(set: &SetView<'a>) -> Self {
        Self {
            name: set.name,
            hash: set.hash().into(),
            hash_without_image: set.hash_without_image().into(),
            revision: set.latest_revision.into(),
            spec: Cow::Borrowed(set.spec),
        }
    }
}

/// The current revision, or the older one that the injection strategy names, if it is for this Pod.
pub(super) fn select<'a>(
    set: &SetView<'a>,
    labels: &BTreeMap<String, String>,
    revisions: &'a [Arc<ControllerRevision>],
    random_percent: &mut dyn FnMut() -> u32,
) -> Result<Selected<'a>, InjectionError> {
    let Some(named) = set.spec.injected_revision() else {
        return Ok(set.into());
    };
    let Some(revision) = find(set, named, revisions)? else {
        return Ok(set.into());
    };
    if is_for(named, set.spec, labels, random_percent) {
        restore(set, revision)
    } else {
        Ok(set.into())
    }
}

/// Returns whether one of `sets` names the revision with a name and labels: [`inject`](super::inject) reads no others.
pub fn named_by(sets: &[SetView<'_>]) -> impl Fn(&str, &BTreeMap<String, String>) -> bool {
    let named = sets
        .iter()
        .filter_map(|set| Some((set.name, set.spec.injected_revision()?)));
    let named: Vec<_> = named.collect();
    move |name, labels| {
        let mut named = named.iter();
        named.any(|(set, named)| is_named(set, named, name, labels))
    }
}

/// Whether the strategy of a set names the revision with this name and these labels.
fn is_named(
    set: &str,
    named: &SidecarSetInjectRevision,
    name: &str,
    labels: &BTreeMap<String, String>,
) -> bool {
    let has_label = |key: &str, value: &str| labels.get(key).is_some_and(|found| found == value);
    match (&named.revision_name, &named.custom_version) {
        (Some(wanted), _) => wanted == name,
        (None, Some(version)) => {
            has_label(keys::SIDECAR_SET_NAME, set) && has_label(keys::SIDECAR_SET_CUSTOM_VERSION, version)
        }
        (None, None) => false,
    }
}

/// The revision that a strategy names, by name or custom version.
pub(in crate::sidecarset) fn find<'a>(
    set: &SetView<'_>,
    named: &SidecarSetInjectRevision,
    revisions: &'a [Arc<ControllerRevision>],
) -> Result<Option<&'a ControllerRevision>, InjectionError> {
    let Some(wanted) = named.revision_name.as_ref().or(named.custom_version.as_ref()) else {
        return Ok(None);
    };
    let no_labels = BTreeMap::new();
    let found = revisions.iter().filter(|one| {
        let name = one.metadata.name.as_deref().unwrap_or_default();
        let labels = one.metadata.labels.as_ref().unwrap_or(&no_labels);
        is_named(set.name, named, name, labels)
    });
    match found.max_by_key(|one| (one.revision, &one.metadata.name)) {
        Some(found) => Ok(Some(found)),
        None => Err(InjectionError::RevisionNotFound {
            set: set.name.to_owned(),
            revision: wanted.clone(),
        }),
    }
}

/// Whether a Pod with these labels gets the older revision.
fn is_for(
    named: &SidecarSetInjectRevision,
    spec: &SidecarSetSpec,
    labels: &BTreeMap<String, String>,
    random_percent: &mut dyn FnMut() -> u32,
) -> bool {
    let update = spec.update_strategy.as_ref();
    let to_update = update.and_then(|update| update.selector.as_ref());
    match percentage(
        named,
        spec,
        to_update.is_none_or(|selector| matches(selector, labels)),
    ) {
        0 => false,
        percentage => percentage >= 100 || random_percent() < percentage,
    }
}

/// Percentage of the Pods that get the older revision: of those that the selector of the update strategy matches, or of
/// the others.
pub(in crate::sidecarset) fn percentage(
    named: &SidecarSetInjectRevision,
    spec: &SidecarSetSpec,
    to_update: bool,
) -> u32 {
    let partial = named.policy == Some(SidecarSetInjectRevisionPolicy::Partial);
    let Some(update) = &spec.update_strategy else {
        return if partial { 0 } else { 100 };
    };
    if update.paused || !partial || !to_update {
        return 100;
    }
    match &update.partition {
        Some(IntOrString::String(text)) => {
            let number = text.strip_suffix('%').and_then(|number| number.parse().ok());
            number.unwrap_or_default()
        }
        Some(IntOrString::Int(_)) | None => 0,
    }
}

/// A set as a revision has it: containers, volumes, pull secrets and annotations, and nothing else.
pub(in crate::sidecarset) fn restore<'a>(
    set: &SetView<'a>,
    revision: &'a ControllerRevision,
) -> Result<Selected<'a>, InjectionError> {
    let name = revision.metadata.name.as_deref().unwrap_or_default();
    let invalid = |why: String| InjectionError::InvalidRevision {
        set: set.name.to_owned(),
        revision: name.to_owned(),
        why,
    };
    let data = revision
        .data
        .as_ref()
        .and_then(|data| data.0.get("spec")?.as_object());
    let data = data.ok_or_else(|| invalid("spec is missing".to_owned()))?;
    let spec = SidecarSetSpec::deserialize(data).map_err(|why| invalid(why.to_string()))?;
    let spec = SidecarSetSpec {
        init_containers: spec.init_containers,
        containers: spec.containers,
        volumes: spec.volumes,
        image_pull_secrets: spec.image_pull_secrets,
        patch_pod_metadata: spec.patch_pod_metadata,
        ..SidecarSetSpec::default()
    };
    let annotation = |key: &str| revision.metadata.annotations.as_ref()?.get(key).cloned();
    let computed = Hashes::of_spec(data);
    let [hash, hash_without_image] = [
        (keys::SIDECAR_SET_HASH, computed.hash),
        (keys::SIDECAR_SET_HASH_WITHOUT_IMAGE, computed.without_image),
    ]
    .map(|(key, computed)| Cow::Owned(annotation(key).unwrap_or(computed)));
    Ok(Selected {
        name: set.name,
        hash,
        hash_without_image,
        revision: name.into(),
        spec: Cow::Owned(spec),
    })
}
