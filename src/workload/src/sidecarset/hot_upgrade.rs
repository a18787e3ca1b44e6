//! Sidecars with hot upgrade: two containers, of which one works and the other has the empty image.

use kruise_api::sidecarset::SidecarContainer;

use super::predicates::{
    image_in_pod, is_consistent, is_consistent_container, is_running_and_ready, working_containers,
};
use super::recorded::{WorkingContainers, hot_upgrade_names};
use super::set::{SetView, image, name};
use crate::in_place::Pod;

/// The two containers of a sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotPair {
    /// Name of the container that works.
    pub working: String,
    /// Name of the other one.
    pub idle: String,
}

/// The containers of a sidecar. Unless the first one is recorded as working, it is the second, as in upstream.
#[must_use]
pub fn pair(sidecar: &str, working: &WorkingContainers) -> HotPair {
    let [first, second] = hot_upgrade_names(sidecar);
    if working.get(sidecar) == Some(&first) {
        HotPair {
            working: first,
            idle: second,
        }
    } else {
        HotPair {
            working: second,
            idle: first,
        }
    }
}

/// Each sidecar with hot upgrade, and its containers.
pub fn pairs<'a>(set: &SetView<'a>, pod: &Pod) -> Vec<(&'a SidecarContainer, HotPair)> {
    let mut containers = set.hot_upgrade_containers().peekable();
    if containers.peek().is_none() {
        // The record may be long, and is not read for the other sets of the Pod.
        return Vec::new();
    }
    let working = working_containers(pod);
    containers
        .map(|container| (container, pair(name(container), &working)))
        .collect()
}

/// Whether a sidecar is not switched off, although its other container has taken over: the image of the empty one must
/// be set again.
#[must_use]
pub fn is_idle_container_running(container: &SidecarContainer, pair: &HotPair, pod: &Pod) -> bool {
    image_in_pod(pod, &pair.idle)
        .is_some_and(|image| image != container.upgrade_strategy.hot_upgrade_empty_image)
}

/// Whether the Pod is ready and none of the set's containers is about to be switched off.
#[must_use]
pub fn is_ready(set: &SetView<'_>, pod: &Pod) -> bool {
    let flips = pairs(set, pod).into_iter().any(|(container, pair)| {
        let has_empty_image = !container.upgrade_strategy.hot_upgrade_empty_image.is_empty();
        has_empty_image && is_idle_container_running(container, &pair, pod)
    });
    !flips && is_running_and_ready(pod)
}

/// The container to update, and the other one: `None` if it has the new image already, or the Pod lacks a container.
///
/// A container with the empty image comes first; then one that is not ready while the other one is; then the one that
/// does not work.
#[must_use]
pub fn upgrade_target(set: &SetView<'_>, sidecar: &SidecarContainer, pod: &Pod) -> Option<(String, String)> {
    let [first, second] = hot_upgrade_names(name(sidecar));
    let empty = &sidecar.upgrade_strategy.hot_upgrade_empty_image;
    let (first_image, second_image) = (image_in_pod(pod, &first)?, image_in_pod(pod, &second)?);
    let running = |container: &str| {
        pod.container_status(container).is_some_and(|status| status.ready)
            && is_consistent_container(set, pod, container)
    };
    let (target, other) = if first_image == empty {
        (first, second)
    } else if second_image == empty {
        (second, first)
    } else {
        match (running(&first), running(&second)) {
            (true, false) => (second, first),
            (false, true) => (first, second),
            _ => {
                let pair = pair(name(sidecar), &working_containers(pod));
                (pair.idle, pair.working)
            }
        }
    };
    (image_in_pod(pod, &other)? != image(sidecar)).then_some((target, other))
}

/// The container that works again after a rollback: it still has the image of the set, while the one that was updated
/// has another. Upstream lets that one take over even so, or wait for its readiness forever.
#[must_use]
pub fn rolled_back_container(sidecar: &SidecarContainer, pod: &Pod) -> Option<String> {
    let HotPair { working, idle } = pair(name(sidecar), &working_containers(pod));
    let has_image = |container: &str| image_in_pod(pod, container) == Some(image(sidecar));
    (has_image(&idle) && !has_image(&working)).then_some(idle)
}

/// Whether the sidecars that were updated have taken over, so that the others can be switched off.
#[must_use]
pub fn is_flip_due(set: &SetView<'_>, pod: &Pod) -> bool {
    let pairs = pairs(set, pod);
    let running =
        |(container, pair): &(&SidecarContainer, HotPair)| is_idle_container_running(container, pair, pod);
    if !pairs.iter().any(running) {
        return false;
    }
    let is_idle = |name: &str| pairs.iter().any(|(_, pair)| pair.idle == name);
    let mut names = set.names_in_pod();
    names.retain(|name| !is_idle(name));
    let all_ready = || {
        let mut statuses = pod.container_statuses.iter();
        statuses.all(|status| is_idle(&status.name) || status.ready)
    };
    is_consistent(set, pod, Some(&names)) && (is_running_and_ready(pod) || all_ready())
}
