//! One request that changes a Pod.
//!
//! All are strategic merge patches, in which containers merge by name and conditions by type. They contain the Pod's
//! UID, so that another Pod of the same name is not changed.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::pod::Pod;
use kruise_api::in_place::InPlaceUpdateState;
use kruise_api::json::set;
use kruise_api::keys;

/// The resource that a patch is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchTarget {
    /// The Pod itself.
    Pod,
    /// Subresource `status` of the Pod.
    Status,
    /// Subresource `resize` of the Pod.
    Resize,
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct PodWrite {
    /// Resource that the patch is sent to.
    pub target: PatchTarget,
    /// Strategic merge patch.
    pub patch: Value,
    /// Written instead of a refused resize and all later writes.
    pub fallback: Option<Box<Fallback>>,
    /// A later patch that the API server must accept in a dry run before anything is written.
    pub dry_run: Option<Box<Value>>,
    /// Generation of the Pod that the write was planned for.
    generation: i64,
}

/// What is written if a resize is refused; without it the refusal is an error.
#[derive(Clone, Debug, PartialEq)]
pub struct Fallback {
    /// If the Pod cannot be resized.
    pub refused: Option<PodWrite>,
    /// If a quota or LimitRange refuses the new size; it would also refuse another Pod of that size.
    pub quota: Option<PodWrite>,
}

impl PodWrite {
    /// A patch of this Pod only. `patch` is an object.
    #[must_use]
    pub fn new(target: PatchTarget, pod: &Pod, mut patch: Value) -> Self {
        set(&mut patch, &["metadata", "uid"], json!(pod.uid));
        let generation = pod.generation;
        Self {
            target,
            patch,
            fallback: None,
            dry_run: None,
            generation,
        }
    }

    /// The same with a fallback, for every reason of refusal.
    #[must_use]
    pub(super) fn with_fallback(mut self, fallback: Self) -> Self {
        let (refused, quota) = (Some(fallback.clone()), Some(fallback));
        self.fallback = Some(Box::new(Fallback { refused, quota }));
        self
    }

    /// The patch to send after a write that returned `stored`. A resize raises the Pod's generation, so records made
    /// here get that generation; otherwise kubelet would seem to have seen a change that is still to be made.
    #[must_use]
    pub fn rebased_on(&self, stored: &Pod) -> Cow<'_, Value> {
        let mut patch = self.with_generation_of(stored);
        if self.patch["metadata"]["resourceVersion"].is_string() {
            set(
                patch.to_mut(),
                &["metadata", "resourceVersion"],
                json!(stored.resource_version),
            );
        }
        patch
    }

    fn with_generation_of(&self, stored: &Pod) -> Cow<'_, Value> {
        const STATE: [&str; 3] = ["metadata", "annotations", keys::IN_PLACE_UPDATE_STATE];
        let state = STATE.iter().try_fold(&self.patch, |at, key| at.get(key));
        let state = state.filter(|_| stored.generation > self.generation);
        let read = |text| serde_json::from_str::<InPlaceUpdateState>(text).ok();
        let Some(mut state) = state.and_then(Value::as_str).and_then(read) else {
            return Cow::Borrowed(&self.patch);
        };
        let records = state.last_container_statuses.values_mut();
        // Records of earlier changes have earlier generations.
        for record in records.filter(|record| record.generation == Some(self.generation)) {
            record.generation = Some(stored.generation);
        }
        let mut patch = self.patch.clone();
        set(
            &mut patch,
            &["metadata", "annotations", keys::IN_PLACE_UPDATE_STATE],
            json!(json_text(&state)),
        );
        Cow::Owned(patch)
    }

    /// The same, but refused by the API server if the Pod has changed since it was observed.
    #[must_use]
    pub fn with_resource_version(mut self, pod: &Pod) -> Self {
        set(
            &mut self.patch,
            &["metadata", "resourceVersion"],
            json!(pod.resource_version),
        );
        self
    }
}

/// JSON as text, for annotations.
pub(super) fn json_text(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
