//! What is left of an update that stops after its resize and before the write that records it.
//!
//! A resize is a request of its own, and comes first, so that one that is refused leaves the Pod as it was. Where the next
//! request then fails, or its sender dies, the Pod has another size than its revision, and nothing would say so. That is
//! why each such resize is announced by an annotation with the old size, which the write that records it takes off.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Value, json};

use super::pod::{Container, Pod, Resources};
use super::spec::Spec;
use super::write::{Target, Write, json_text};
use super::{patch, quantity};
use crate::api::keys;

/// CPU and memory of containers, by name.
type Sizes = BTreeMap<String, ResourceRequirements>;

/// Whether the Pod may have been resized for a revision that it does not have.
#[must_use]
pub fn unrecorded(pod: &Pod) -> bool {
    pod.annotations.contains_key(keys::IN_PLACE_UPDATE_RESIZING)
}

/// The annotation that announces `resize`: what the Pod has now of what that changes. What was announced before stays, for
/// that is older.
#[must_use]
pub fn announcement(pod: &Pod, resize: &Write) -> String {
    let mut old = announced(pod);
    let changed = resize.patch["spec"]["containers"].as_array();
    for change in changed.into_iter().flatten().map(Container::of) {
        let Some(container) = pod.containers.iter().find(|c| c.name == change.name) else {
            continue;
        };
        let before = Resources {
            limits: of_those(&container.resources.limits, &change.resources.limits),
            requests: of_those(&container.resources.requests, &change.resources.requests),
        };
        add(old.entry(change.name).or_default(), &before);
    }
    json_text(&old)
}

fn of_those(has: &BTreeMap<String, String>, changed: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let kept = has.iter().filter(|(name, _)| changed.contains_key(*name));
    kept.map(|(name, quantity)| (name.clone(), quantity.clone()))
        .collect()
}

/// Gives a Pod the size again that it had before the resizes of an update that did not begin. It keeps its revision and its
/// state; where a container is restarted for its size, the Pod is out of its Services meanwhile.
#[must_use]
pub fn take_back(pod: &Pod, now: Timestamp) -> Vec<Write> {
    let spec = back(pod);
    if spec.container_resources.is_empty() {
        let done = json!({ "metadata": { "annotations": { keys::IN_PLACE_UPDATE_RESIZING: null } } });
        return vec![Write::new(Target::Pod, pod, done)];
    }
    patch::begin(pod, &spec, &Map::new(), &Map::new(), now)
}

/// Whether that restarts a container.
#[must_use]
pub fn disturbs(pod: &Pod) -> bool {
    let spec = back(pod);
    !spec.container_resources.is_empty() && patch::disturbs(pod, &spec)
}

fn back(pod: &Pod) -> Spec {
    let revision = pod.labels.get(keys::CONTROLLER_REVISION_HASH);
    let mut spec = Spec {
        revision: revision.cloned().unwrap_or_default(),
        ..Spec::default()
    };
    settle(pod, &mut spec.container_resources);
    spec
}

/// Adds what leads back to the size from before the announced resizes, but for what `sizes` says already.
pub fn settle(pod: &Pod, sizes: &mut Sizes) {
    for (name, old) in announced(pod) {
        let Some(container) = pod.containers.iter().find(|c| c.name == name) else {
            continue;
        };
        let old = Resources::of(&serde_json::to_value(old).unwrap_or(Value::Null));
        let other = Resources {
            limits: other(&container.resources.limits, &old.limits),
            requests: other(&container.resources.requests, &old.requests),
        };
        if other != Resources::default() {
            add(sizes.entry(name).or_default(), &other);
        }
    }
}

/// CPU and memory that are other than they were. Whoever may annotate a Pod could have written `old`.
fn other(has: &BTreeMap<String, String>, old: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let sizes = old
        .iter()
        .filter(|(name, size)| matches!(name.as_str(), "cpu" | "memory") && quantity::parse(size).is_some());
    let changed = sizes.filter(|(name, old)| has.get(*name).is_some_and(|is| !quantity::equal(is, old)));
    changed.map(|(name, old)| (name.clone(), old.clone())).collect()
}

/// What the annotation says; nothing where it cannot be read.
fn announced(pod: &Pod) -> Sizes {
    let text = pod.annotations.get(keys::IN_PLACE_UPDATE_RESIZING);
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

fn add(into: &mut ResourceRequirements, more: &Resources) {
    for (into, more) in [
        (&mut into.limits, &more.limits),
        (&mut into.requests, &more.requests),
    ] {
        for (name, quantity) in more {
            let into = into.get_or_insert_default();
            into.entry(name.clone())
                .or_insert_with(|| Quantity(quantity.clone()));
        }
    }
}
