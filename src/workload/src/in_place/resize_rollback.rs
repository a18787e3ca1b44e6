//! Restores the size of a Pod to that of its revision, if [`resize`] announced another one.

use std::borrow::Cow;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::pod::Pod;
use super::spec::Spec;
use super::template::Template;
use super::write::{PatchTarget, PodWrite};
use super::{annotations, patch, resize};
use kruise_api::keys;

/// Restores the size of a Pod's revision, whose template is `template`, if the Pod was resized for an update that did
/// not begin, or if its resize was refused. If that restarts a container, the Pod is out of its Services meanwhile.
///
/// `labels` and `annotations` are written with the change, if there is one.
#[must_use]
pub fn restore_size(
    pod: &Pod,
    template: Template<'_>,
    labels: &Map<String, Value>,
    annotations: &Map<String, Value>,
    now: Timestamp,
) -> Vec<PodWrite> {
    if resize::sizes_to_restore(pod, template).is_empty() {
        let clear_annotation =
            json!({ "metadata": { "annotations": { keys::IN_PLACE_UPDATE_RESIZING: null } } });
        // The API server may just be processing a resize whose sender died before recording it.
        return vec![PodWrite::new(PatchTarget::Pod, pod, clear_annotation).with_resource_version(pod)];
    }
    patch::begin(
        &without_priorities(pod),
        &current_revision_spec(pod),
        template,
        labels,
        annotations,
        now,
    )
}

/// The Pod without launch priorities, unless batches of an update are pending: old sizes are restored together.
fn without_priorities(pod: &Pod) -> Cow<'_, Pod> {
    let state = annotations::update_state(pod).ok().flatten();
    if state.is_some_and(|state| annotations::has_next_batches(&state)) {
        return Cow::Borrowed(pod);
    }
    let mut pod = pod.clone();
    pod.containers.iter_mut().for_each(|c| c.priority = None);
    Cow::Owned(pod)
}

/// Whether restoring the size restarts a container.
#[must_use]
pub fn disrupts(pod: &Pod, template: Template<'_>) -> bool {
    !resize::sizes_to_restore(pod, template).is_empty()
        && patch::disrupts(pod, &current_revision_spec(pod), template)
}

/// An update to the revision that the Pod already has.
fn current_revision_spec(pod: &Pod) -> Spec {
    Spec {
        revision: resize::revision_label_of(pod),
        ..Spec::default()
    }
}
