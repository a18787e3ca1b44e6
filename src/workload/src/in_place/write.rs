//! One request to change a Pod.
//!
//! All are strategic merge patches, in which containers merge by name and conditions by type. The Pod's UID in
//! them keeps another Pod of the same name safe.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::pod::Pod;
use kruise_api::in_place::InPlaceUpdateState;
use kruise_api::json::set;
use kruise_api::keys;

/// What a patch is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchTarget {
    /// The Pod itself.
    Pod,
    /// Its subresource `status`.
    Status,
    /// Its subresource `resize`.
    Resize,
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct PodWrite {
    /// Where it goes.
    pub target: PatchTarget,
    /// Strategic merge patch.
    pub patch: Value,
    /// What is written instead of a resize that the API server refuses, and of the writes after it.
    pub fallback: Option<Box<Fallback>>,
    /// What this write leads to later: a patch that the API server must accept, in a dry run, before anything is written.
    pub dry_run: Option<Box<Value>>,
    /// Generation of the Pod that it was made for.
    generation: i64,
}

/// What is written where a resize is refused; the refusal is an error where that is nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Fallback {
    /// Where the Pod cannot be resized.
    pub refused: Option<PodWrite>,
    /// Where a quota or a LimitRange refuses the new size, as it would another Pod of that size.
    pub quota: Option<PodWrite>,
}

impl PodWrite {
    /// A patch of this Pod and no other. `patch` is an object.
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

    /// The same with another write instead, whatever the resize is refused for.
    #[must_use]
    pub(super) fn with_fallback(mut self, fallback: Self) -> Self {
        let (refused, quota) = (Some(fallback.clone()), Some(fallback));
        self.fallback = Some(Box::new(Fallback { refused, quota }));
        self
    }

    /// The patch as it is to be sent after a write that came to `stored`. A resize raises the Pod's generation; what is
    /// recorded here is recorded as of then, or kubelet would seem to have seen a change that is yet to be made.
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
        // Those of earlier changes are of earlier generations.
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

    /// The same, refused by the API server when the Pod is not as it was seen.
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

/// JSON as text, as annotations hold it.
pub(super) fn json_text(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
