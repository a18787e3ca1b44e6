//! Gives a Pod the size of its revision, where it has another by what [`resize`] announced.

use std::borrow::Cow;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::pod::Pod;
use super::spec::Spec;
use super::template::Template;
use super::write::{Target, Write};
use super::{patch, resize, state};
use kruise_api::keys;

/// Gives a Pod the size of its revision, whose template is `template`: where it was resized for an update that did not
/// begin, or was refused the size. Where a container is restarted for that, the Pod is out of its Services meanwhile.
///
/// `labels` and `annotations` go with the change, if there is any.
#[must_use]
pub fn take_back(
    pod: &Pod,
    template: Template<'_>,
    labels: &Map<String, Value>,
    annotations: &Map<String, Value>,
    now: Timestamp,
) -> Vec<Write> {
    if resize::other_sizes(pod, template).is_empty() {
        let done = json!({ "metadata": { "annotations": { keys::IN_PLACE_UPDATE_RESIZING: null } } });
        // A resize that its sender does not live to record may just be served.
        return vec![Write::new(Target::Pod, pod, done).guarded(pod)];
    }
    patch::begin(
        &unordered(pod),
        &unchanged(pod),
        template,
        labels,
        annotations,
        now,
    )
}

/// The Pod without launch priorities, unless batches of an update are to come: old sizes go back together.
fn unordered(pod: &Pod) -> Cow<'_, Pod> {
    let state = state::state(pod).ok().flatten();
    if state.is_some_and(|state| state::has_next(&state)) {
        return Cow::Borrowed(pod);
    }
    let mut pod = pod.clone();
    pod.containers.iter_mut().for_each(|c| c.priority = None);
    Cow::Owned(pod)
}

/// Whether that restarts a container.
#[must_use]
pub fn disturbs(pod: &Pod, template: Template<'_>) -> bool {
    !resize::other_sizes(pod, template).is_empty() && patch::disturbs(pod, &unchanged(pod), template)
}

/// An update to the revision that the Pod has.
fn unchanged(pod: &Pod) -> Spec {
    Spec {
        revision: resize::revision(pod),
        ..Spec::default()
    }
}
