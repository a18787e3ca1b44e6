//! What is left of an update that stops after its resize and before the write that records it.
//!
//! A resize is a request of its own, and comes first, so that one that is refused leaves the Pod as it was. Where the next
//! request then fails, or its sender dies, the Pod has another size than its revision, and nothing would say so. That is
//! why each such resize is announced by an annotation with the old size, which the write that records it takes off. Where
//! the resize is refused and the rest of its update is done without it, the annotation holds the size that the Pod is yet
//! to get.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Serialize};

use super::complete::same;
use super::pod::{Condition, Container, Pod};
use super::quantity;
use super::spec::Spec;
use super::template::Template;
use super::write::{Write, json_text};
use kruise_api::keys;

/// CPU and memory of containers, by name.
type Sizes = BTreeMap<String, ResourceRequirements>;
type Quantities = BTreeMap<String, Quantity>;

/// What the annotation says.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Announced {
    /// Label of the revision that the Pod had, and has until the resize is recorded.
    revision: String,
    /// What the containers had; or, where their resize was refused, what they are to have.
    containers: Sizes,
    /// Whether the Pod has its revision without these sizes, because its resize was refused.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    refused: bool,
}

/// Whether the Pod may have another size than its revision says.
#[must_use]
pub fn announced(pod: &Pod) -> bool {
    pod.annotations.contains_key(keys::IN_PLACE_UPDATE_RESIZING)
}

/// Whether that is so because its resize was refused.
#[must_use]
pub fn refused(pod: &Pod) -> bool {
    announcement_of(pod).is_some_and(|announced| announced.refused)
}

/// Whether the Pod may have been resized for a revision that it does not have.
#[must_use]
pub fn unrecorded(pod: &Pod) -> bool {
    announced(pod) && !refused(pod)
}

/// Whether kubelet may yet restart a container of such a Pod for its size.
#[must_use]
pub fn under_way(pod: &Pod) -> bool {
    let changing = |container: &Container| {
        let given = pod.status(&container.name).and_then(|s| s.resources.as_ref());
        given.is_some_and(|given| !same(given, &container.resources))
    };
    announced(pod) && pod.containers.iter().any(changing)
}

/// The annotation that announces `resize`: what the Pod has now of what that changes. What was announced before stays, for
/// that is older.
#[must_use]
pub(super) fn announcement(pod: &Pod, resize: &Write) -> String {
    let mut containers = before(pod);
    for (name, change) in changes(resize) {
        let Some(has) = pod.containers.iter().find(|c| c.name == name) else {
            continue;
        };
        let old = ResourceRequirements {
            limits: of_those(&has.resources.limits, change.limits),
            requests: of_those(&has.resources.requests, change.requests),
            ..ResourceRequirements::default()
        };
        add(containers.entry(name).or_default(), old);
    }
    announce(revision(pod), containers, refused(pod))
}

/// `spec` without its sizes, which are refused; and the annotation that says which the Pod is to get, once it has
/// `revision`, or this one.
pub(super) fn postponed(pod: &Pod, spec: &Spec, revision: Option<&str>) -> (Spec, String) {
    let mut kept = spec.clone();
    let mut owed = std::mem::take(&mut kept.container_resources);
    add_all(&mut owed, before(pod));
    let revision = revision.map_or_else(|| self::revision(pod), str::to_owned);
    (kept, announce(revision, owed, true))
}

/// Reason of a resize that kubelet began, and fails to do; it goes on trying.
pub const FAILS: &str = "Error";

/// What kubelet says of the last resize of the Pod that it cannot do, or not yet, or fails to do.
#[must_use]
pub fn pending(pod: &Pod) -> Option<&Condition> {
    // What it says may be about the one before.
    let seen = pod.observed.is_none_or(|observed| observed >= pod.generation);
    let held = |kind: &str| pod.condition(kind).filter(|c| c.holds && seen);
    held("PodResizePending").or_else(|| held("PodResizeInProgress").filter(|c| c.reason == FAILS))
}

/// The same where the sizes are those of `template`, in words.
#[must_use]
pub fn pending_to(pod: &Pod, template: Template<'_>) -> Option<String> {
    let pending = pending(pod)?;
    let named = |map: &BTreeMap<String, String>| {
        some(
            map.iter()
                .map(|(name, size)| (name.clone(), Quantity(size.clone())))
                .collect(),
        )
    };
    let sizes = pod.containers.iter().map(|container| {
        let sizes = ResourceRequirements {
            limits: named(&container.resources.limits),
            requests: named(&container.resources.requests),
            ..ResourceRequirements::default()
        };
        (container.name.clone(), sizes)
    });
    let asked = template.values(Spec {
        container_resources: sizes.collect(),
        ..Spec::default()
    });
    // What others ask for is no concern of its workload.
    let own = others(pod, asked.container_resources).is_empty();
    own.then(|| format!("{}: {}", pending.reason, pending.message))
}

/// What is still announced once `resize` is recorded; `None` where that is nothing.
#[must_use]
pub(super) fn announcement_without(pod: &Pod, resize: Option<&Write>) -> Option<String> {
    let mut containers = before(pod);
    for (name, change) in resize.iter().flat_map(|resize| changes(resize)) {
        if let Some(old) = containers.get_mut(&name) {
            old.limits = without(old.limits.take(), change.limits);
            old.requests = without(old.requests.take(), change.requests);
        }
    }
    containers.retain(|_, old| *old != ResourceRequirements::default());
    (!containers.is_empty()).then(|| announce(revision(pod), containers, refused(pod)))
}

fn announce(revision: String, containers: Sizes, refused: bool) -> String {
    json_text(&Announced {
        revision,
        containers,
        refused,
    })
}

/// The containers that are resized, with what is new of their sizes.
fn changes(resize: &Write) -> Sizes {
    let changed = resize.patch["spec"]["containers"].as_array();
    let named = changed.into_iter().flatten().filter_map(|container| {
        let name = container["name"].as_str()?.to_owned();
        Some((name, serde_json::from_value(container["resources"].clone()).ok()?))
    });
    named.collect()
}

/// What the Pod has of what changes.
fn of_those(has: &BTreeMap<String, String>, changed: Option<Quantities>) -> Option<Quantities> {
    let names = changed.unwrap_or_default().into_keys();
    let kept = names.filter_map(|name| Some((name.clone(), Quantity(has.get(&name)?.clone()))));
    some(kept.collect())
}

fn without(old: Option<Quantities>, changed: Option<Quantities>) -> Option<Quantities> {
    let (mut old, changed) = (old.unwrap_or_default(), changed.unwrap_or_default());
    old.retain(|name, _| !changed.contains_key(name));
    some(old)
}

fn some(quantities: Quantities) -> Option<Quantities> {
    Some(quantities).filter(|all| !all.is_empty())
}

/// What leads back from the announced resizes: the sizes of `template`.
#[must_use]
pub(super) fn other_sizes(pod: &Pod, template: Template<'_>) -> Sizes {
    let changed = Spec {
        container_resources: others(pod, before(pod)),
        ..Spec::default()
    };
    // Whoever may annotate a Pod could have written what is announced.
    others(pod, template.values(changed).container_resources)
}

/// Of these sizes, those that the Pod's containers do not have.
fn others(pod: &Pod, mut sizes: Sizes) -> Sizes {
    sizes.retain(|name, size| {
        let Some(Container { resources: has, .. }) = pod.containers.iter().find(|c| c.name == *name) else {
            return false;
        };
        size.limits = other(&has.limits, size.limits.take());
        size.requests = other(&has.requests, size.requests.take());
        *size != ResourceRequirements::default()
    });
    sizes
}

/// What is not so.
fn other(has: &BTreeMap<String, String>, old: Option<Quantities>) -> Option<Quantities> {
    let mut old = old.unwrap_or_default();
    old.retain(|name, Quantity(size)| has.get(name).is_some_and(|is| !quantity::equal(is, size)));
    some(old)
}

/// The sizes that are announced; none where that cannot be read, or another implementation has recorded the update since.
fn before(pod: &Pod) -> Sizes {
    announcement_of(pod).unwrap_or_default().containers
}

fn announcement_of(pod: &Pod) -> Option<Announced> {
    let text = pod.annotations.get(keys::IN_PLACE_UPDATE_RESIZING)?;
    let announced = serde_json::from_str::<Announced>(text).ok();
    announced.filter(|announced| announced.revision == revision(pod))
}

/// Label of the revision that the Pod has.
pub(super) fn revision(pod: &Pod) -> String {
    let label = pod.labels.get(keys::CONTROLLER_REVISION_HASH);
    label.cloned().unwrap_or_default()
}

/// Adds the sizes of containers, but for what is there already.
pub(super) fn add_all(into: &mut Sizes, more: Sizes) {
    for (name, more) in more {
        add(into.entry(name).or_default(), more);
    }
}

fn add(into: &mut ResourceRequirements, more: ResourceRequirements) {
    for (into, more) in [
        (&mut into.limits, more.limits),
        (&mut into.requests, more.requests),
    ] {
        for (name, quantity) in more.into_iter().flatten() {
            into.get_or_insert_default().entry(name).or_insert(quantity);
        }
    }
}
