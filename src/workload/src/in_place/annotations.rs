//! The two annotations that an in-place update writes to a Pod.

use serde::de::DeserializeOwned;

use super::pod::Pod;
use super::spec::Spec;
use kruise_api::in_place::InPlaceUpdateState;
use kruise_api::keys;

/// State of the last update; `None` if there was none.
///
/// # Errors
/// If the annotation is invalid.
pub fn update_state(pod: &Pod) -> Result<Option<InPlaceUpdateState>, String> {
    read_annotation(pod, keys::IN_PLACE_UPDATE_STATE, keys::IN_PLACE_UPDATE_STATE_OLD)
}

/// Whether some batches are still pending.
#[must_use]
pub fn has_next_batches(state: &InPlaceUpdateState) -> bool {
    !(state.next_container_images.is_empty()
        && state.next_container_ref_metadata.is_empty()
        && state.next_container_resources.is_empty())
}

/// The update that waits for its grace period; `None` if there is none.
///
/// # Errors
/// If the annotation is invalid.
pub fn grace_spec(pod: &Pod) -> Result<Option<Spec>, String> {
    read_annotation(pod, keys::IN_PLACE_UPDATE_GRACE, keys::IN_PLACE_UPDATE_GRACE_OLD)
}

/// Whether the Pod's update waits for its grace period.
#[must_use]
pub fn in_grace_period(pod: &Pod) -> bool {
    let keys = [keys::IN_PLACE_UPDATE_GRACE, keys::IN_PLACE_UPDATE_GRACE_OLD];
    let mut texts = keys.iter().filter_map(|key| pod.annotations.get(*key));
    texts.any(|text| !text.is_empty())
}

fn read_annotation<T: DeserializeOwned>(pod: &Pod, key: &str, old: &str) -> Result<Option<T>, String> {
    let found = pod.annotations.get(key).or_else(|| pod.annotations.get(old));
    let Some(text) = found.filter(|t| !t.is_empty()) else {
        return Ok(None);
    };
    serde_json::from_str(text)
        .map(Some)
        .map_err(|e| format!("annotation {key} cannot be read: {e}"))
}
