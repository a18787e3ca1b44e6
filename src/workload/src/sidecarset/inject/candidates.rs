//! Which SidecarSets a new Pod gets, and in which order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::keys::NAMESPACE_NAME;
use kruise_api::sidecarset::SidecarSetSpec;

use super::error::InjectionError;
use super::revision::{self, Selected};
use crate::sidecarset::matching::selects_new_pod;
use crate::sidecarset::set::SetView;

/// What the cluster has, as far as it matters for one Pod.
#[derive(Clone, Copy, Debug)]
pub struct Cluster<'a> {
    /// All SidecarSets, in any order.
    pub sets: &'a [SetView<'a>],
    /// Labels of the Pod's Namespace; `None` if it is not known.
    pub namespace_labels: Option<&'a BTreeMap<String, String>>,
    /// The ControllerRevisions of SidecarSets, as far as sets name them.
    pub revisions: &'a [Arc<ControllerRevision>],
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
