//! Which containers are updated together.

use std::collections::BTreeSet;

use super::patch::readers_of_removed;
use super::pod::Pod;
use super::spec::Spec;
use kruise_api::in_place::ContainerRefMetadata;

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
    let readers = readers_of_removed(pod, spec);
    let loses_env = |name: &str| spec.update_env_from_metadata && readers.contains(name);
    let mut batch: BTreeSet<String> = containers
        .iter()
        .filter(|c| c.priority.is_none() || c.priority == highest || loses_env(&c.name))
        .map(|c| c.name.clone())
        .collect();
    loop {
        let reads = |name: &String| spec.container_ref_metadata.get(name);
        let shares_reference = |name: &String| {
            let of_batch = batch.iter().filter_map(reads);
            reads(name).is_some_and(|one| of_batch.into_iter().any(|other| share_references(one, other)))
        };
        let joining = containers
            .iter()
            .map(|c| &c.name)
            .find(|name| !batch.contains(*name) && shares_reference(name));
        match joining {
            Some(name) => batch.insert(name.clone()),
            None => return batch,
        };
    }
}

fn share_references(one: &ContainerRefMetadata, other: &ContainerRefMetadata) -> bool {
    one.labels.keys().any(|k| other.labels.contains_key(k))
        || one.annotations.keys().any(|k| other.annotations.contains_key(k))
}
