//! Which Pods belong to a SidecarSet after their injection.

use std::collections::BTreeMap;

use kruise_api::selector::{is_empty, matches};
use kruise_api::sidecarset::SidecarSetSpec;

use super::predicates::{has_all_containers, is_injected};
use super::set::SetView;
use crate::in_place::Pod;

/// Whether the set is for Pods of a namespace with these labels; `None` if they are unknown.
#[must_use]
pub fn selects_namespace(spec: &SidecarSetSpec, labels: Option<&BTreeMap<String, String>>) -> bool {
    let selector = spec.namespace_selector.as_ref();
    selector.is_none_or(|selector| labels.is_some_and(|labels| matches(selector, labels)))
}

/// Whether the set is for Pods with these labels. An empty selector, which validation refuses, selects nothing.
#[must_use]
pub fn selects_labels(spec: &SidecarSetSpec, labels: &BTreeMap<String, String>) -> bool {
    let selector = spec.selector.as_ref();
    selector.is_some_and(|selector| !is_empty(selector) && matches(selector, labels))
}

/// Whether new Pods with these labels, in a namespace with these, get the set: unless its injection is paused, or a
/// canary of it does.
#[must_use]
pub fn selects_new_pod(
    spec: &SidecarSetSpec,
    labels: &BTreeMap<String, String>,
    namespace_labels: Option<&BTreeMap<String, String>>,
) -> bool {
    // Of many sets, most are for other labels.
    !spec.is_injection_paused() && selects_labels(spec, labels) && selects_namespace(spec, namespace_labels)
}

/// Whether the set manages the Pod: it is active, selected, and has the set's containers, as it records.
#[must_use]
pub fn is_matched(set: &SetView<'_>, pod: &Pod, namespace_labels: Option<&BTreeMap<String, String>>) -> bool {
    pod.active()
        && selects_namespace(set.spec, namespace_labels)
        && selects_labels(set.spec, &pod.labels)
        && is_injected(set, pod)
        && has_all_containers(set, pod)
}
