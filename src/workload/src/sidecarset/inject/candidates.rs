//! Which SidecarSets a new Pod gets, and in which order.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use kruise_api::keys::NAMESPACE_NAME;
use kruise_api::sidecarset::SidecarSetSpec;

use super::{Cluster, InjectionError, revision};
use crate::sidecarset::matching::selects_new_pod;
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

/// The sets for a Pod with these labels: those for this namespace before those for all, each by name. A set whose
/// canary is among them is left out.
pub(super) fn select<'a>(
    labels: &BTreeMap<String, String>,
    namespace: &str,
    cluster: &Cluster<'a>,
    random_percent: &mut dyn FnMut() -> u32,
) -> Result<Vec<Selected<'a>>, InjectionError> {
    let matching = cluster
        .sets
        .iter()
        .filter(|set| selects_new_pod(set.spec, labels, cluster.namespace_labels));
    let mut sets: Vec<(Scope, &SetView<'a>)> = matching
        .filter_map(|set| Some((scope(set.spec, namespace)?, set)))
        .collect();
    sets.sort_by_key(|(scope, set)| (*scope, set.name));

    let mut selected = Vec::new();
    for (_, set) in &sets {
        selected.push(revision::select(set, labels, cluster.revisions, random_percent)?);
    }
    let replaced: BTreeSet<&str> = sets.iter().filter_map(|(_, set)| set.canary_base()).collect();
    selected.retain(|set| !replaced.contains(set.name));
    Ok(selected)
}

/// Whether a set names its namespaces. Such sets come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::sidecarset) enum Scope {
    Namespaces,
    Cluster,
}

impl Scope {
    /// The scope of a set in each namespace that it is for.
    pub(in crate::sidecarset) fn of(spec: &SidecarSetSpec) -> Self {
        match namespaces(spec) {
            Some(_) => Self::Namespaces,
            None => Self::Cluster,
        }
    }
}

/// The scope of a set; `None` if it names other namespaces than this.
fn scope(spec: &SidecarSetSpec, namespace: &str) -> Option<Scope> {
    match namespaces(spec) {
        Some(names) => names.contains(&namespace).then_some(Scope::Namespaces),
        None => Some(Scope::Cluster),
    }
}

/// The namespaces that a set names, if it does.
fn namespaces(spec: &SidecarSetSpec) -> Option<Vec<&str>> {
    let selector = spec.namespace_selector.as_ref()?;
    let label = selector.match_labels.as_ref().and_then(|l| l.get(NAMESPACE_NAME));
    if let Some(name) = label {
        return Some(vec![name]);
    }
    let mut expressions = selector.match_expressions.iter().flatten();
    let listed = expressions.find(|one| one.key == NAMESPACE_NAME && one.operator == "In")?;
    Some(listed.values.iter().flatten().map(String::as_str).collect())
}
