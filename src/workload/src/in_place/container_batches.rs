//! Which containers are updated together.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::pod::{Container, Pod};
use super::spec::{Spec, decode_patch};
use kruise_api::container_hash::EnvOrigin;

/// The containers of `spec` to update now: all without a launch priority, all with the highest one, all that read a
/// label or annotation which is removed, because that is done now, and all that read one that one of them reads.
pub fn first_batch(pod: &Pod, spec: &Spec) -> BTreeSet<String> {
    let changed = |name: &str| {
        spec.container_images.contains_key(name)
            || spec.container_ref_metadata.contains_key(name)
            || spec.container_resources.contains_key(name)
    };
    let containers: Vec<_> = pod.containers.iter().filter(|c| changed(&c.name)).collect();
    let highest = containers.iter().filter_map(|c| c.priority).max();
    let of_removed = readers_of_removed(pod, spec);
    let loses_env = |name: &str| spec.update_env_from_metadata && of_removed.contains(name);
    let mut readers: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for container in &containers {
        for entry in references(spec, &container.name) {
            readers.entry(entry).or_default().push(&container.name);
        }
    }
    let due = containers
        .iter()
        .filter(|c| c.priority.is_none() || c.priority == highest || loses_env(&c.name));
    let mut joining: Vec<&str> = due.map(|c| c.name.as_str()).collect();
    let mut batch = BTreeSet::new();
    while let Some(name) = joining.pop() {
        if batch.insert(name.to_owned()) {
            // All readers of an entry join with the first one.
            let others = references(spec, name).filter_map(|entry| readers.remove(&entry));
            joining.extend(others.flatten());
        }
    }
    batch
}

/// The changed labels and annotations that a container reads: kind and key.
fn references<'a>(
    spec: &'a Spec,
    container: &str,
) -> impl Iterator<Item = (&'static str, &'a str)> + use<'a> {
    let read = spec.container_ref_metadata.get(container).into_iter();
    read.flat_map(|read| {
        let labels = read.labels.keys().map(|key| ("label", key.as_str()));
        labels.chain(read.annotations.keys().map(|key| ("annotation", key.as_str())))
    })
}

/// Names of the containers that read a label or annotation which the update removes.
pub(super) fn readers_of_removed<'a>(pod: &'a Pod, spec: &Spec) -> BTreeSet<&'a str> {
    let patch = decode_patch(spec.meta_data_patch.as_deref().unwrap_or_default());
    let is_removed = |part: &str, key: &str| patch["metadata"][part].get(key).is_some_and(Value::is_null);
    let reads_removed = |container: &&Container| {
        container.env.iter().any(|(_, origin)| match origin {
            EnvOrigin::Label(key) => is_removed("labels", key),
            EnvOrigin::Annotation(key) => is_removed("annotations", key),
        })
    };
    let readers = pod.containers.iter().filter(reads_removed);
    readers.map(|container| container.name.as_str()).collect()
}
