//! What is left of an update that stops after its resize and before the write that records it.
//!
//! A resize is a separate request and is sent first, so that a refused one leaves the Pod unchanged. If the next
//! request then fails, or its sender dies, the Pod has a size other than its revision's, and nothing would record that.
//! So each such resize is announced by an annotation with the old size; the write that records the resize removes it.
//! If the resize is refused and the rest of the update is done without it, the annotation holds the size that the Pod
//! should still get.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Serialize};

use super::completion::same_resources;
use super::pod::{Condition, Container, Pod};
use super::quantity;
use super::spec::Spec;
use super::template::Template;
use super::write::{PodWrite, json_text};
use kruise_api::keys;

/// CPU and memory by container name.
type Sizes = BTreeMap<String, ResourceRequirements>;
type Quantities = BTreeMap<String, Quantity>;

/// Content of the annotation.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ResizeAnnotation {
    /// Revision label of the Pod until the resize is recorded.
    revision: String,
    /// Old sizes of the containers; if the resize was refused, the desired ones.
    containers: Sizes,
    /// Whether the Pod has its revision without these sizes, because its resize was refused.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    refused: bool,
}

/// Whether the size of the Pod may differ from its revision.
#[must_use]
pub fn has_resize_annotation(pod: &Pod) -> bool {
    pod.annotations.contains_key(keys::IN_PLACE_UPDATE_RESIZING)
}

/// Whether it differs because the resize was refused.
#[must_use]
pub fn resize_refused(pod: &Pod) -> bool {
    read_annotation(pod).is_some_and(|announced| announced.refused)
}

/// Whether the Pod may have been resized for a revision that it does not have.
#[must_use]
pub fn has_unrecorded_resize(pod: &Pod) -> bool {
    has_resize_annotation(pod) && !resize_refused(pod)
}

/// Whether kubelet may still restart a container of such a Pod for its size.
#[must_use]
pub fn resize_in_progress(pod: &Pod) -> bool {
    let changing = |container: &Container| {
        let actual = pod
            .container_status(&container.name)
            .and_then(|s| s.resources.as_ref());
        actual.is_some_and(|given| !same_resources(given, &container.resources))
    };
    has_resize_annotation(pod) && pod.containers.iter().any(changing)
}

/// The annotation that announces `resize`: the current values of what it changes. Sizes that are already announced are
/// kept, because they are older.
#[must_use]
pub(super) fn resize_annotation(pod: &Pod, resize: &PodWrite) -> String {
    let mut original_sizes = announced_sizes(pod);
    for (name, change) in changed_sizes(resize) {
        let Some(container) = pod.containers.iter().find(|c| c.name == name) else {
            continue;
        };
        let old = ResourceRequirements {
            limits: current_values(&container.resources.limits, change.limits),
            requests: current_values(&container.resources.requests, change.requests),
            ..ResourceRequirements::default()
        };
        merge_resources(original_sizes.entry(name).or_default(), old);
    }
    to_annotation(revision_label_of(pod), original_sizes, resize_refused(pod))
}

/// `spec` without its sizes, which are refused, and the annotation with the sizes that the Pod should get once it has
/// `revision`, or its current one if that is `None`.
pub(super) fn defer_resize(pod: &Pod, spec: &Spec, revision: Option<&str>) -> (Spec, String) {
    let mut without_resize = spec.clone();
    let mut deferred_sizes = std::mem::take(&mut without_resize.container_resources);
    merge_sizes(&mut deferred_sizes, announced_sizes(pod));
    let revision = revision.map_or_else(|| self::revision_label_of(pod), str::to_owned);
    (without_resize, to_annotation(revision, deferred_sizes, true))
}

/// Reason of a resize that kubelet began and fails to do; kubelet retries.
pub const RESIZE_ERROR: &str = "Error";

/// kubelet's condition for the last resize: it cannot do it, cannot do it yet, or fails to do it.
#[must_use]
pub fn resize_condition(pod: &Pod) -> Option<&Condition> {
    // The condition may be about the previous resize.
    let is_current = pod
        .observed_generation
        .is_none_or(|observed| observed >= pod.generation);
    let active = |kind: &str| pod.condition(kind).filter(|c| c.is_true && is_current);
    active("PodResizePending").or_else(|| active("PodResizeInProgress").filter(|c| c.reason == RESIZE_ERROR))
}

/// The same as a message, if the sizes are those of `template`.
#[must_use]
pub fn resize_message(pod: &Pod, template: Template<'_>) -> Option<String> {
    let pending = resize_condition(pod)?;
    let quantities = |map: &BTreeMap<String, String>| {
        non_empty(
            map.iter()
                .map(|(name, size)| (name.clone(), Quantity(size.clone())))
                .collect(),
        )
    };
    let sizes = pod.containers.iter().map(|container| {
        let sizes = ResourceRequirements {
            limits: quantities(&container.resources.limits),
            requests: quantities(&container.resources.requests),
            ..ResourceRequirements::default()
        };
        (container.name.clone(), sizes)
    });
    let requested = template.with_template_values(Spec {
        container_resources: sizes.collect(),
        ..Spec::default()
    });
    // Resizes that others request do not concern the workload.
    let own = differing_sizes(pod, requested.container_resources).is_empty();
    own.then(|| format!("{}: {}", pending.reason, pending.message))
}

/// The announcement that remains once `resize` is recorded; `None` if nothing remains.
#[must_use]
pub(super) fn annotation_without(pod: &Pod, resize: Option<&PodWrite>) -> Option<String> {
    let mut containers = announced_sizes(pod);
    for (name, change) in resize.iter().flat_map(|resize| changed_sizes(resize)) {
        if let Some(old) = containers.get_mut(&name) {
            old.limits = remove_changed(old.limits.take(), change.limits);
            old.requests = remove_changed(old.requests.take(), change.requests);
        }
    }
    containers.retain(|_, old| *old != ResourceRequirements::default());
    (!containers.is_empty()).then(|| to_annotation(revision_label_of(pod), containers, resize_refused(pod)))
}

fn to_annotation(revision: String, containers: Sizes, refused: bool) -> String {
    json_text(&ResizeAnnotation {
        revision,
        containers,
        refused,
    })
}

/// The resized containers with their new sizes.
fn changed_sizes(resize: &PodWrite) -> Sizes {
    let changed = resize.patch["spec"]["containers"].as_array();
    let named = changed.into_iter().flatten().filter_map(|container| {
        let name = container["name"].as_str()?.to_owned();
        Some((name, serde_json::from_value(container["resources"].clone()).ok()?))
    });
    named.collect()
}

/// The Pod's current values of the changed quantities.
fn current_values(current: &BTreeMap<String, String>, changed: Option<Quantities>) -> Option<Quantities> {
    let names = changed.unwrap_or_default().into_keys();
    let quantities = names.filter_map(|name| Some((name.clone(), Quantity(current.get(&name)?.clone()))));
    non_empty(quantities.collect())
}

fn remove_changed(old: Option<Quantities>, changed: Option<Quantities>) -> Option<Quantities> {
    let (mut old, changed) = (old.unwrap_or_default(), changed.unwrap_or_default());
    old.retain(|name, _| !changed.contains_key(name));
    non_empty(old)
}

fn non_empty(quantities: Quantities) -> Option<Quantities> {
    Some(quantities).filter(|all| !all.is_empty())
}

/// The sizes of `template` that undo the announced resizes.
#[must_use]
pub(super) fn sizes_to_restore(pod: &Pod, template: Template<'_>) -> Sizes {
    let changed = Spec {
        container_resources: differing_sizes(pod, announced_sizes(pod)),
        ..Spec::default()
    };
    // Anyone who may annotate a Pod could have written the announcement.
    differing_sizes(pod, template.with_template_values(changed).container_resources)
}

/// The `sizes` that differ from those of the Pod's containers.
fn differing_sizes(pod: &Pod, mut sizes: Sizes) -> Sizes {
    sizes.retain(|name, size| {
        let Some(Container {
            resources: current, ..
        }) = pod.containers.iter().find(|c| c.name == *name)
        else {
            return false;
        };
        size.limits = differing_quantities(&current.limits, size.limits.take());
        size.requests = differing_quantities(&current.requests, size.requests.take());
        *size != ResourceRequirements::default()
    });
    sizes
}

/// The quantities that differ.
fn differing_quantities(current: &BTreeMap<String, String>, old: Option<Quantities>) -> Option<Quantities> {
    let mut old = old.unwrap_or_default();
    old.retain(|name, Quantity(size)| {
        current
            .get(name)
            .is_some_and(|actual| !quantity::equal(actual, size))
    });
    non_empty(old)
}

/// The announced sizes; empty if the annotation is invalid, or if another implementation has recorded the update since.
fn announced_sizes(pod: &Pod) -> Sizes {
    read_annotation(pod).unwrap_or_default().containers
}

fn read_annotation(pod: &Pod) -> Option<ResizeAnnotation> {
    let text = pod.annotations.get(keys::IN_PLACE_UPDATE_RESIZING)?;
    let annotation = serde_json::from_str::<ResizeAnnotation>(text).ok();
    annotation.filter(|announced| announced.revision == revision_label_of(pod))
}

/// Revision label of the Pod.
pub(super) fn revision_label_of(pod: &Pod) -> String {
    let label = pod.labels.get(keys::CONTROLLER_REVISION_HASH);
    label.cloned().unwrap_or_default()
}

/// Adds sizes of containers without overwriting existing ones.
pub(super) fn merge_sizes(into: &mut Sizes, more: Sizes) {
    for (name, more) in more {
        merge_resources(into.entry(name).or_default(), more);
    }
}

fn merge_resources(into: &mut ResourceRequirements, more: ResourceRequirements) {
    for (into, more) in [
        (&mut into.limits, more.limits),
        (&mut into.requests, more.requests),
    ] {
        for (name, quantity) in more.into_iter().flatten() {
            into.get_or_insert_default().entry(name).or_insert(quantity);
        }
    }
}
