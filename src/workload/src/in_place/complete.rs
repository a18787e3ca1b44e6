//! Whether an update in place is done, and how that is proven.
//!
//! The best proof is the daemon's hash for the container ID that runs. Without it, a container other than that of
//! the time of the patch is proof together with another image ID, or with the new image's name; another container
//! alone is none, for it may have crashed and come back with the old image before kubelet saw the patch. Nor is
//! another image ID where the update took the place of one that had not ended, for it may be that one's. And as long
//! as kubelet says that it has not seen the patch, what runs may yet be replaced by what was patched before; where all
//! of that was done, another container with the new image's hash shows that it has seen the patch, whatever number a
//! kubelet of a later release left. What cannot be proven waits, and says what for.

use std::fmt;

use jiff::Timestamp;

use super::pod::{Container, ContainerStatus, Pod, Resources};
use super::{quantity, state};
use kruise_api::container_hash::{env_hash, plain_hash};
use kruise_api::image_reference::Reference;
use kruise_api::in_place::{InPlaceUpdateContainerStatus, InPlaceUpdateState, RuntimeContainerMetaSet};
use kruise_api::keys;

/// How far an update is.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// There is none, or it is done.
    Done,
    /// It is not done.
    Waiting(Waiting),
}

/// What an update waits for.
#[derive(Clone, Debug, PartialEq)]
pub enum Waiting {
    /// An annotation that cannot be read.
    Unreadable(String),
    /// The end of the grace period.
    Grace(Option<Timestamp>),
    /// The daemon's word on the environment of a container.
    Environment(String),
    /// The same in a Pod that cannot be taken out of its Services, so that the daemon does not restart the container.
    NoGate(String),
    /// kubelet's word that a container has the new resources; with what it says of the resize.
    Resources(String, Option<String>),
    /// A container with the new image; with what is there instead.
    NewContainer(String, String),
    /// Readiness of a container, before the next batch.
    Ready(String),
    /// Batches that are still to come.
    NextBatch,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(why) => f.write_str(why),
            Self::Grace(Some(until)) => write!(f, "grace period until {}", super::ready::seconds(*until)),
            Self::Grace(None) => f.write_str("grace period"),
            Self::Environment(name) => write!(
                f,
                "container {name}: the change of its environment is not confirmed yet"
            ),
            Self::NoGate(name) => write!(
                f,
                "container {name}: its environment is renewed only in a Pod with readiness gate {}; delete the Pod \
                 to have one that has it",
                keys::IN_PLACE_UPDATE_READY
            ),
            Self::Resources(name, said) => {
                write!(f, "container {name}: the new resources are not in effect")?;
                said.iter().try_for_each(|said| write!(f, ": {said}"))
            }
            Self::NewContainer(name, why) => write!(f, "container {name}: {why}"),
            Self::Ready(name) => write!(f, "container {name} must be ready before the next containers"),
            Self::NextBatch => f.write_str("the next containers must be updated"),
        }
    }
}

/// How far the last update of a Pod is, as a whole.
#[must_use]
pub fn progress(pod: &Pod) -> Progress {
    match (state::grace(pod), state::state(pod)) {
        (Err(why), _) | (_, Err(why)) => Progress::Waiting(Waiting::Unreadable(why)),
        (Ok(Some(_)), _) => Progress::Waiting(Waiting::Grace(None)),
        (Ok(None), Ok(None)) => Progress::Done,
        (Ok(None), Ok(Some(state))) => match containers(pod, &state) {
            Err(waiting) => Progress::Waiting(waiting),
            Ok(()) if state::has_next(&state) => Progress::Waiting(Waiting::NextBatch),
            Ok(()) => Progress::Done,
        },
    }
}

/// What the daemon says of the containers.
fn meta(pod: &Pod) -> Result<Option<RuntimeContainerMetaSet>, Waiting> {
    let key = keys::RUNTIME_CONTAINERS_META;
    let text = pod.annotations.get(key).map(|text| serde_json::from_str(text));
    let unreadable = |e| Waiting::Unreadable(format!("annotation {key} cannot be read: {e}"));
    text.transpose().map_err(unreadable)
}

/// Whether a container is another than that of the time of the patch, and has the image of the Pod's spec. One that
/// the spec does not have is nobody's concern.
///
/// # Errors
/// What is waited for.
pub fn replaced(pod: &Pod, name: &str, last: &InPlaceUpdateContainerStatus) -> Result<(), Waiting> {
    let Some(container) = pod.containers.iter().find(|c| c.name == name) else {
        return Ok(());
    };
    let proof = proven(pod, container, last, meta(pod)?.as_ref());
    // kubelet's word on why nothing runs says more than what is missing for a proof.
    let stuck = pod.status(name).and_then(|s| s.waiting.clone());
    proof.map_err(|why| Waiting::NewContainer(name.to_owned(), stuck.unwrap_or_else(|| why.to_owned())))
}

/// Whether the containers of the batches so far are the new ones.
///
/// # Errors
/// What is waited for.
pub fn containers(pod: &Pod, state: &InPlaceUpdateState) -> Result<(), Waiting> {
    let meta = meta(pod)?;
    if state.update_env_from_metadata {
        let stale = pod
            .containers
            .iter()
            .find(|c| !environment_is_new(pod, c, meta.as_ref()));
        let waiting = match pod.gated(keys::IN_PLACE_UPDATE_READY) {
            true => Waiting::Environment,
            false => Waiting::NoGate,
        };
        stale.map_or(Ok(()), |c| Err(waiting(c.name.clone())))?;
    }
    if state.update_resources {
        let stale = pod.containers.iter().find(|c| !resources_are_new(pod, c));
        stale.map_or(Ok(()), |c| {
            Err(Waiting::Resources(c.name.clone(), resize_trouble(pod)))
        })?;
    }
    let mut last = state.last_container_statuses.iter();
    last.try_for_each(|(name, last)| replaced(pod, name, last))
}

fn proven(
    pod: &Pod,
    container: &Container,
    last: &InPlaceUpdateContainerStatus,
    meta: Option<&RuntimeContainerMetaSet>,
) -> Result<(), &'static str> {
    let status = pod.status(&container.name).filter(|s| !s.id.is_empty());
    let status = status.ok_or("it has not been started")?;
    let plain = hashes(&status.id, meta).map(|(plain, _)| plain);
    let new = plain.is_some_and(|plain| {
        plain == plain_hash(&container.name, &container.image) || Some(plain) == container.plain_before_131
    });
    let another = last.container_id.as_ref().is_some_and(|id| *id != status.id);
    let unseen = last.generation.zip(pod.observed);
    if unseen.is_some_and(|(before, observed)| observed <= before) && !(new && another && !last.superseded) {
        return Err("kubelet has not seen the new image yet");
    }
    if new {
        return Ok(());
    }
    // A hash of an unknown form is no word at all: kubelet's of another release may be one.
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
    // Where nothing ran yet, kubelet may have started the old image after all.
    let another = !last.image_id.is_empty() && status.image_id != last.image_id && !last.superseded;
    if another || runs(&container.image, status) {
        return Ok(());
    }
    Err("it was restarted, but the new image is not confirmed yet")
}

/// Whether a container is reported to run the image that a Pod's spec names so. Where that is by digest, the image
/// may be reported by a tag, but its ID has the digest.
pub(super) fn runs(wanted: &str, status: &ContainerStatus) -> bool {
    if wanted == status.image {
        return true;
    }
    let digest = |r: &Reference| {
        r.digest()
            .is_some_and(|d| status.image_id.split('@').next_back() == Some(d))
    };
    Reference::parse(wanted).is_ok_and(|r| r.names(&status.image) || digest(&r))
}

/// The daemon's plain hash and environment hash for this container ID.
fn hashes(id: &str, meta: Option<&RuntimeContainerMetaSet>) -> Option<(u64, u64)> {
    let entry = meta?.containers.iter().find(|entry| entry.container_id == id)?;
    Some((
        entry.hashes.plain_hash,
        entry.hashes.extracted_env_from_metadata_hash,
    ))
}

fn environment_is_new(pod: &Pod, container: &Container, meta: Option<&RuntimeContainerMetaSet>) -> bool {
    let metadata = pod.metadata();
    let variables = container
        .env
        .iter()
        .map(|(name, origin)| (name.as_str(), origin.value(&metadata)));
    let status = pod.status(&container.name).filter(|s| !s.id.is_empty());
    let known = status.and_then(|s| hashes(&s.id, meta));
    known.is_some_and(|(_, env)| env == env_hash(variables))
}

/// What kubelet says of a resize that it cannot do, or not yet.
fn resize_trouble(pod: &Pod) -> Option<String> {
    let held = |type_: &str| pod.condition(type_).filter(|c| c.holds && !c.reason.is_empty());
    let condition = held("PodResizePending").or_else(|| held("PodResizeInProgress"))?;
    Some(format!("{}: {}", condition.reason, condition.message))
}

fn resources_are_new(pod: &Pod, container: &Container) -> bool {
    let nothing = Resources::default();
    let given = pod.status(&container.name).and_then(|s| s.resources.as_ref());
    same(given.unwrap_or(&nothing), &container.resources)
}

/// Whether CPU and memory are the same; kubelet reports nothing else for certain.
pub(super) fn same(one: &Resources, other: &Resources) -> bool {
    let alike = |a: &std::collections::BTreeMap<String, String>,
                 b: &std::collections::BTreeMap<String, String>| {
        ["cpu", "memory"]
            .iter()
            .all(|name| match (a.get(*name), b.get(*name)) {
                (Some(x), Some(y)) => quantity::equal(x, y),
                (None, None) => true,
                _ => false,
            })
    };
    alike(&one.limits, &other.limits) && alike(&one.requests, &other.requests)
}
