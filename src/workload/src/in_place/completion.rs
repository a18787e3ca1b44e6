//! Decides whether an in-place update is complete, and how that is proven.
//!
//! The best proof is the daemon's hash for the ID of the running container. Without it, a container other than the one
//! that ran at the time of the patch is proof only together with a different image ID or with the new image's name. A
//! different container alone is no proof: it may have crashed and restarted with the old image before kubelet saw the
//! patch. A different image ID is no proof if the update superseded an incomplete one, because it may be the image of
//! that one. While kubelet reports that it has not seen the patch, an earlier patch may still replace the running
//! container. If all earlier updates were complete, a different container with the new image's hash shows that kubelet
//! has seen the patch, whatever `observedGeneration` a kubelet of a later release left. An update that cannot be proven
//! waits, and reports what it waits for.

use std::fmt;

use jiff::Timestamp;

use super::pod::{Container, ContainerStatus, Pod, Resources};
use super::{annotations, quantity};
use kruise_api::container_hash::{env_hash, plain_hash};
use kruise_api::image_reference::ImageReference;
use kruise_api::in_place::{InPlaceUpdateContainerStatus, InPlaceUpdateState, RuntimeContainerMetaSet};
use kruise_api::keys;

/// Progress of an update.
#[derive(Clone, Debug, PartialEq)]
pub enum UpdateProgress {
    /// There is no update, or it is complete.
    Done,
    /// The update is not complete.
    Waiting(WaitingFor),
}

/// What an update waits for.
#[derive(Clone, Debug, PartialEq)]
pub enum WaitingFor {
    /// An annotation cannot be parsed.
    InvalidAnnotation(String),
    /// The end of the grace period.
    GracePeriod(Option<Timestamp>),
    /// The daemon's report about the environment of a container.
    Environment(String),
    /// The same in a Pod that cannot be taken out of its Services; the daemon does not restart its containers.
    NoReadinessGate(String),
    /// kubelet's report that a container has the new resources, with its message about the resize.
    Resources(String, Option<String>),
    /// A container with the new image, with what runs instead.
    NewContainer(String, String),
    /// Readiness of a container before the next batch.
    ContainerReady(String),
    /// Batches that are still pending.
    NextBatch,
}

impl fmt::Display for WaitingFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidAnnotation(why) => f.write_str(why),
            Self::GracePeriod(Some(until)) => {
                write!(f, "grace period until {}", super::ready::format_seconds(*until))
            }
            Self::GracePeriod(None) => f.write_str("grace period"),
            Self::Environment(name) => write!(
                f,
                "container {name}: the change of its environment is not confirmed yet"
            ),
            Self::NoReadinessGate(name) => write!(
                f,
                "container {name}: its environment is renewed only in a Pod with readiness gate {}; delete the Pod \
                 to have one that has it",
                keys::IN_PLACE_UPDATE_READY
            ),
            Self::Resources(name, message) => {
                write!(f, "container {name}: the new resources are not in effect")?;
                message.iter().try_for_each(|said| write!(f, ": {said}"))
            }
            Self::NewContainer(name, why) => write!(f, "container {name}: {why}"),
            Self::ContainerReady(name) => {
                write!(f, "container {name} must be ready before the next containers")
            }
            Self::NextBatch => f.write_str("the next containers must be updated"),
        }
    }
}

/// Progress of the last update of a Pod, over all containers.
#[must_use]
pub fn progress(pod: &Pod) -> UpdateProgress {
    match (annotations::grace_spec(pod), annotations::update_state(pod)) {
        (Err(why), _) | (_, Err(why)) => UpdateProgress::Waiting(WaitingFor::InvalidAnnotation(why)),
        (Ok(Some(_)), _) => UpdateProgress::Waiting(WaitingFor::GracePeriod(None)),
        (Ok(None), Ok(None)) => UpdateProgress::Done,
        (Ok(None), Ok(Some(state))) => match check_containers(pod, &state) {
            Err(waiting) => UpdateProgress::Waiting(waiting),
            Ok(()) if annotations::has_next_batches(&state) => UpdateProgress::Waiting(WaitingFor::NextBatch),
            Ok(()) => UpdateProgress::Done,
        },
    }
}

/// What the daemon reports about the containers.
///
/// # Errors
/// What the update waits for if the annotation cannot be read.
pub fn runtime_meta(pod: &Pod) -> Result<Option<RuntimeContainerMetaSet>, WaitingFor> {
    let key = keys::RUNTIME_CONTAINERS_META;
    let text = pod.annotations.get(key).map(|text| serde_json::from_str(text));
    let unreadable = |e| WaitingFor::InvalidAnnotation(format!("annotation {key} cannot be read: {e}"));
    text.transpose().map_err(unreadable)
}

/// Checks that a container was replaced since the patch and runs the image of the Pod's spec. A container that is not
/// in the spec is ignored.
///
/// # Errors
/// What the update waits for.
pub fn check_replaced(
    pod: &Pod,
    name: &str,
    last: &InPlaceUpdateContainerStatus,
    meta: Option<&RuntimeContainerMetaSet>,
) -> Result<(), WaitingFor> {
    let Some(container) = pod.containers.iter().find(|c| c.name == name) else {
        return Ok(());
    };
    let verified = check_image(pod, container, last, meta);
    // kubelet's reason for a waiting container is more useful than the missing proof.
    let waiting_reason = pod.container_status(name).and_then(|s| s.waiting.clone());
    verified.map_err(|why| {
        WaitingFor::NewContainer(name.to_owned(), waiting_reason.unwrap_or_else(|| why.to_owned()))
    })
}

/// Checks that the containers of all batches so far are new.
///
/// # Errors
/// What the update waits for.
pub fn check_containers(pod: &Pod, state: &InPlaceUpdateState) -> Result<(), WaitingFor> {
    let meta = runtime_meta(pod)?;
    if state.update_env_from_metadata {
        let stale = pod
            .containers
            .iter()
            .find(|c| !env_is_current(pod, c, meta.as_ref()));
        let waiting = match pod.has_readiness_gate(keys::IN_PLACE_UPDATE_READY) {
            true => WaitingFor::Environment,
            false => WaitingFor::NoReadinessGate,
        };
        stale.map_or(Ok(()), |c| Err(waiting(c.name.clone())))?;
    }
    if state.update_resources {
        let stale = pod.containers.iter().find(|c| !resources_are_current(pod, c));
        stale.map_or(Ok(()), |c| {
            Err(WaitingFor::Resources(c.name.clone(), resize_message(pod)))
        })?;
    }
    let mut last = state.last_container_statuses.iter();
    last.try_for_each(|(name, last)| check_replaced(pod, name, last, meta.as_ref()))
}

fn check_image(
    pod: &Pod,
    container: &Container,
    last: &InPlaceUpdateContainerStatus,
    meta: Option<&RuntimeContainerMetaSet>,
) -> Result<(), &'static str> {
    let status = pod.container_status(&container.name).filter(|s| !s.id.is_empty());
    let status = status.ok_or("it has not been started")?;
    let plain = runtime_hashes(&status.id, meta).map(|(plain, _)| plain);
    let new = plain.is_some_and(|plain| {
        plain == plain_hash(&container.name, &container.image) || Some(plain) == container.plain_before_131
    });
    let another = last.container_id.as_ref().is_some_and(|id| *id != status.id);
    let generations = last.generation.zip(pod.observed_generation);
    if generations.is_some_and(|(before, observed)| observed <= before)
        && !(new && another && !last.superseded)
    {
        return Err("kubelet has not seen the new image yet");
    }
    if new {
        return Ok(());
    }
    // A hash of an unknown form proves nothing: it may be that of another kubelet release.
    let old = last
        .image
        .as_ref()
        .map(|image| plain_hash(&container.name, image));
    if plain.is_some() && plain == old {
        return Err("the daemon says that it was started with the image from before");
    }
    if last.container_id.as_ref().is_some_and(|id| *id == status.id) {
        return Err("the old one has not been replaced yet");
    }
    // If nothing ran at the time of the patch, kubelet may have started the old image after all.
    let another_image = !last.image_id.is_empty() && status.image_id != last.image_id && !last.superseded;
    if another_image || runs_image(&container.image, status) {
        return Ok(());
    }
    Err("it was restarted, but the new image is not confirmed yet")
}

/// Whether a container is reported to run the image that the Pod's spec names. An image with a digest may be reported
/// by tag, but its ID has the digest.
pub(super) fn runs_image(expected: &str, status: &ContainerStatus) -> bool {
    if expected == status.image {
        return true;
    }
    let digest = |r: &ImageReference| {
        r.digest()
            .is_some_and(|d| status.image_id.split('@').next_back() == Some(d))
    };
    ImageReference::parse(expected).is_ok_and(|r| r.is_same_image(&status.image) || digest(&r))
}

/// The daemon's plain hash and environment hash for this container ID.
fn runtime_hashes(id: &str, meta: Option<&RuntimeContainerMetaSet>) -> Option<(u64, u64)> {
    let entry = meta?.containers.iter().find(|entry| entry.container_id == id)?;
    Some((
        entry.hashes.plain_hash,
        entry.hashes.extracted_env_from_metadata_hash,
    ))
}

fn env_is_current(pod: &Pod, container: &Container, meta: Option<&RuntimeContainerMetaSet>) -> bool {
    let metadata = pod.metadata();
    let variables = container
        .env
        .iter()
        .map(|(name, origin)| (name.as_str(), origin.value(&metadata)));
    let status = pod.container_status(&container.name).filter(|s| !s.id.is_empty());
    let started_with = status.and_then(|s| runtime_hashes(&s.id, meta));
    started_with.is_some_and(|(_, env)| env == env_hash(variables))
}

/// kubelet's message about a resize that it cannot do, or cannot do yet.
fn resize_message(pod: &Pod) -> Option<String> {
    let active = |type_: &str| pod.condition(type_).filter(|c| c.is_true && !c.reason.is_empty());
    let condition = active("PodResizePending").or_else(|| active("PodResizeInProgress"))?;
    Some(format!("{}: {}", condition.reason, condition.message))
}

fn resources_are_current(pod: &Pod, container: &Container) -> bool {
    let nothing = Resources::default();
    let actual = pod
        .container_status(&container.name)
        .and_then(|s| s.resources.as_ref());
    same_resources(actual.unwrap_or(&nothing), &container.resources)
}

/// Whether CPU and memory are equal; these are all that kubelet reports reliably.
pub(super) fn same_resources(one: &Resources, other: &Resources) -> bool {
    let same_quantities = |a: &std::collections::BTreeMap<String, String>,
                           b: &std::collections::BTreeMap<String, String>| {
        ["cpu", "memory"]
            .iter()
            .all(|name| match (a.get(*name), b.get(*name)) {
                (Some(x), Some(y)) => quantity::equal(x, y),
                (None, None) => true,
                _ => false,
            })
    };
    same_quantities(&one.limits, &other.limits) && same_quantities(&one.requests, &other.requests)
}
