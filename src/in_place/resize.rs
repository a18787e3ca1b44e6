//! What is left of an update that stops after its resize and before the write that records it.
//!
//! A resize is a request of its own, and comes first, so that one that is refused leaves the Pod as it was. Where the next
//! request then fails, or its sender dies, the Pod has other resources than its revision, and nothing says so. That is
//! why each such resize is announced by an annotation, which the write that records it takes off.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::Value;

use super::pod::{Container, Pod, Resources};
use super::quantity;
use super::spec::Spec;
use crate::api::keys;

/// Whether the Pod may have been resized for a revision that it does not have.
#[must_use]
pub fn unrecorded(pod: &Pod) -> bool {
    pod.annotations.contains_key(keys::IN_PLACE_UPDATE_RESIZING)
}

/// Adds to an update of the Pod what gives it the CPU and memory of `template` (raw JSON of the revision that it is updated
/// to), where it has others.
pub fn settle(pod: &Pod, template: &Value, spec: &mut Spec) {
    let containers = template["spec"]["containers"].as_array();
    for asked in containers.into_iter().flatten().map(Container::of) {
        let Some(has) = pod.containers.iter().find(|c| c.name == asked.name) else {
            continue;
        };
        let wanted = requested(asked.resources);
        let limits = differing(&has.resources.limits, &wanted.limits);
        let requests = differing(&has.resources.requests, &wanted.requests);
        if limits.is_empty() && requests.is_empty() {
            continue;
        }
        let into: &mut ResourceRequirements = spec.container_resources.entry(asked.name).or_default();
        add(&mut into.limits, limits);
        add(&mut into.requests, requests);
    }
}

/// What a Pod has that is made so: what is limited and not requested has a request as high as its limit.
fn requested(mut resources: Resources) -> Resources {
    for (name, limit) in &resources.limits {
        let request = resources.requests.entry(name.clone());
        request.or_insert_with(|| limit.clone());
    }
    resources
}

/// CPU and memory that are to be other than they are.
fn differing(
    has: &BTreeMap<String, String>,
    wanted: &BTreeMap<String, String>,
) -> BTreeMap<String, Quantity> {
    let ours = wanted
        .iter()
        .filter(|(name, _)| matches!(name.as_str(), "cpu" | "memory"));
    let differ = ours.filter(|(name, to)| has.get(*name).is_none_or(|is| !quantity::equal(is, to)));
    differ
        .map(|(name, to)| (name.clone(), Quantity(to.clone())))
        .collect()
}

fn add(into: &mut Option<BTreeMap<String, Quantity>>, more: BTreeMap<String, Quantity>) {
    if !more.is_empty() {
        into.get_or_insert_default().extend(more);
    }
}
