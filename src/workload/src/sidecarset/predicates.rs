//! What a Pod is, as its SidecarSet sees it: matched, updated, consistent, ready, upgradable.

use std::cell::LazyCell;
use std::collections::BTreeSet;

use kruise_api::image_reference::ImageReference;
use kruise_api::keys;

use super::recorded::{self, WorkingContainers, hot_upgrade_names, parse_injected_list, parse_working};
use super::set::{SetView, is_hot_upgrade, name};
use crate::in_place::{Pod, pod::ContainerStatus};

/// Whether the Pod lists the set as injected.
#[must_use]
pub fn is_injected(set: &SetView<'_>, pod: &Pod) -> bool {
    parse_injected_list(annotation(pod, keys::SIDECAR_SET_INJECTED_LIST)).contains(set.name)
}

/// Image of a container of the Pod.
#[must_use]
pub fn image_in_pod<'a>(pod: &'a Pod, container: &str) -> Option<&'a str> {
    let mut containers = pod.containers.iter();
    Some(containers.find(|c| c.name == container)?.image.as_str())
}

/// What the Pod records about the containers that work.
#[must_use]
pub fn working_containers(pod: &Pod) -> WorkingContainers {
    let text = pod.annotations.get(keys::SIDECAR_SET_WORKING_CONTAINER);
    parse_working(text.map(String::as_str).unwrap_or_default())
}

/// Whether the Pod has all containers of the set. One with hot upgrade is there twice, and recorded.
#[must_use]
pub fn has_all_containers(set: &SetView<'_>, pod: &Pod) -> bool {
    let working = LazyCell::new(|| working_containers(pod));
    let has = |container: &str| image_in_pod(pod, container).is_some();
    set.containers().all(|container| {
        let name = name(container);
        if is_hot_upgrade(container) {
            working.contains_key(name) && hot_upgrade_names(name).iter().all(|name| has(name))
        } else {
            has(name)
        }
    })
}

/// Whether the Pod has the current containers of the set, as it records.
#[must_use]
pub fn is_updated(set: &SetView<'_>, pod: &Pod) -> bool {
    recorded_hash(pod, keys::SIDECAR_SET_HASH, set.name) == set.hash()
}

/// Whether the set's containers differ from the Pod's in nothing but images, so that the Pod can be updated in place.
#[must_use]
pub fn is_upgradable(set: &SetView<'_>, pod: &Pod) -> bool {
    recorded_hash(pod, keys::SIDECAR_SET_HASH_WITHOUT_IMAGE, set.name) == set.hash_without_image()
}

/// Whether no ready container of the set still runs its old image. While one does, the previous update is not over; a
/// container that is not ready does not hold up the next update, which may correct it.
#[must_use]
pub fn is_previous_update_over(set: &SetView<'_>, pod: &Pod) -> bool {
    set.names_in_pod().iter().all(|container| {
        let ready = pod.container_status(container).is_some_and(|status| status.ready);
        !ready || is_consistent_container(set, pod, container)
    })
}

/// Whether the Pod is running, ready and not terminating.
#[must_use]
pub fn is_running_and_ready(pod: &Pod) -> bool {
    pod.phase == "Running" && pod.condition_ready() && !pod.terminating
}

/// Whether kubelet runs the images of the Pod's spec in these containers; in all of the set's if `None` or empty.
#[must_use]
pub fn is_consistent(set: &SetView<'_>, pod: &Pod, containers: Option<&BTreeSet<String>>) -> bool {
    match containers.filter(|containers| !containers.is_empty()) {
        Some(containers) => are_consistent(set, pod, |name| containers.contains(name)),
        None => {
            let all = set.names_in_pod();
            are_consistent(set, pod, |name| all.contains(name))
        }
    }
}

/// Whether kubelet runs the image of the Pod's spec in this container.
#[must_use]
pub fn is_consistent_container(set: &SetView<'_>, pod: &Pod, container: &str) -> bool {
    are_consistent(set, pod, |name| name == container)
}

/// A digest must be that of the running image. Where there is a tag, an update is over when the ID or the name of the
/// running image has changed.
fn are_consistent(set: &SetView<'_>, pod: &Pod, counts: impl Fn(&str) -> bool) -> bool {
    if pod.containers.len() != pod.container_statuses.len() {
        return false;
    }
    for container in pod.containers.iter().filter(|c| counts(&c.name)) {
        match ImageReference::parse(&container.image) {
            Ok(image) if image.digest().is_some() => {
                let status = pod.container_status(&container.name);
                if !status.is_some_and(|status| runs_digest(status, &image)) {
                    return false;
                }
            }
            // As in upstream, the other digests are not compared then.
            _ => return is_update_over(set, pod, counts),
        }
    }
    true
}

/// Whether the ID of the running image, `[SCHEME://]NAME@DIGEST`, has the name and the digest of `image`.
fn runs_digest(status: &ContainerStatus, image: &ImageReference) -> bool {
    let id = status.image_id.split_once("://");
    let id = id.map_or(status.image_id.as_str(), |(_, id)| id);
    ImageReference::parse(id).is_ok_and(|running| {
        running.digest() == image.digest() && running.host() == image.host() && running.path() == image.path()
    })
}

/// Whether no container still has the image that it had before the last update by this set.
fn is_update_over(set: &SetView<'_>, pod: &Pod, counts: impl Fn(&str) -> bool) -> bool {
    let text = annotation(pod, keys::SIDECAR_SET_IN_PLACE_UPDATE_STATE);
    if text.is_empty() {
        return true;
    }
    let Some(states) = recorded::parse_states(text) else {
        return false;
    };
    let Some(state) = states.get(set.name) else {
        return true;
    };
    let mut statuses = pod
        .container_statuses
        .iter()
        .filter(|status| counts(&status.name));
    statuses.all(|status| {
        state.old_image_id(&status.name) != Some(&status.image_id)
            || image_in_pod(pod, &status.name).is_some_and(|image| is_same_image(image, &status.image))
    })
}

/// Whether two texts name the same image. Runtimes report names with the registry.
fn is_same_image(image: &str, reported: &str) -> bool {
    image == reported || ImageReference::parse(image).is_ok_and(|image| image.is_same_image(reported))
}

fn recorded_hash(pod: &Pod, key: &str, set: &str) -> String {
    let record = recorded::parse(annotation(pod, key)).remove(set);
    record.unwrap_or_default().hash
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> &'a str {
    pod.annotations.get(key).map(String::as_str).unwrap_or_default()
}
