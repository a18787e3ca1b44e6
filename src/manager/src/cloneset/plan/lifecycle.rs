//! The lifecycle state of a Pod, and the keys that keep it out of its Services while a hook acts.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::view::PlanView;
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::lifecycle::{LifecycleHook, LifecycleStateType as State};
use kruise_workload::in_place::ready::{format_seconds, pod_condition, pod_not_ready, transition_time};
use kruise_workload::in_place::{PatchTarget, Pod, PodWrite, UpdateProgress, progress};
use kruise_workload::not_ready::{NotReadyKey, format_message, parse_message};
use kruise_workload::pods;

/// The state of a Pod after its in-place update.
pub(super) fn state_after_update(view: &PlanView<'_>, pod: &Pod) -> State {
    match view.in_place_update() {
        Some(hook) if !pods::is_all_hooked(hook, pod) => State::Updated,
        _ => State::Normal,
    }
}

/// The state of a Pod whose deletion is cancelled: an incomplete update continues, and so does the hook that must
/// acknowledge an updated Pod.
pub(super) fn state_after_cancel(view: &PlanView<'_>, pod: &Pod) -> State {
    let updated = pod.annotations.contains_key(keys::LIFECYCLE_STATE_BEFORE_DELETE);
    match progress(pod) {
        UpdateProgress::Waiting(_) => State::Updating,
        UpdateProgress::Done if updated && state_after_update(view, pod) == State::Updated => State::Updated,
        UpdateProgress::Done => State::PreparingNormal,
    }
}

/// Label and annotation of a state.
pub(super) fn state_metadata(state: &State, now: Timestamp) -> Value {
    json!({
        "labels": { keys::LIFECYCLE_STATE: state },
        "annotations": { keys::LIFECYCLE_TIMESTAMP: format_seconds(now) },
    })
}

/// The metadata of a state change. For a deletion it records the previous state, to restore it on cancellation.
fn state_change(pod: &Pod, to: &State, now: Timestamp) -> Value {
    let (mut metadata, before) = (state_metadata(to, now), pods::lifecycle_state(pod));
    let key = keys::LIFECYCLE_STATE_BEFORE_DELETE;
    if *to == State::PreparingDelete && [State::Updating, State::Updated].contains(&before) {
        set(&mut metadata, &["annotations", key], json!(before));
    } else if pod.annotations.contains_key(key) {
        set(&mut metadata, &["annotations", key], Value::Null);
    }
    metadata
}

/// The one write that sets a Pod's state and its gates accordingly; `None` if nothing changes.
///
/// `ready` is condition InPlaceUpdateReady, if it should change. The patch of the status changes no metadata except our
/// keys, so the API server accepts the label in it.
pub(super) fn state_write(
    view: &PlanView<'_>,
    pod: &Pod,
    to: Option<State>,
    ready: Option<Value>,
) -> Option<PodWrite> {
    let state = to.clone().unwrap_or_else(|| pods::lifecycle_state(pod));
    let mut conditions: Vec<Value> = ready.into_iter().collect();
    let kruise_ready = not_ready_conditions(view, pod, &state);
    let conditional = !kruise_ready.is_empty() && pod.condition(keys::KRUISE_POD_READY).is_some();
    conditions.extend(kruise_ready);
    let mut patch = json!({});
    if let Some(to) = to.filter(|to| {
        pod.labels
            .get(keys::LIFECYCLE_STATE)
            .is_none_or(|s| s != to.as_str())
    }) {
        set(&mut patch, &["metadata"], state_change(pod, &to, view.now));
    }
    if let Some(hash) = missing_template_hash(pod) {
        set(
            &mut patch,
            &["metadata", "labels", keys::POD_TEMPLATE_HASH],
            json!(hash),
        );
    }
    if conditions.is_empty() {
        return (patch != json!({})).then(|| PodWrite::new(PatchTarget::Pod, pod, patch));
    }
    set(&mut patch, &["status", "conditions"], Value::Array(conditions));
    let write = PodWrite::new(PatchTarget::Status, pod, patch);
    Some(if conditional {
        write.with_resource_version(pod)
    } else {
        write
    })
}

/// The short hash of the Pod's revision, if the Pod lacks the label for it.
fn missing_template_hash(pod: &Pod) -> Option<&str> {
    let revision = pod.labels.get(keys::CONTROLLER_REVISION_HASH)?;
    let missing = !pod.labels.contains_key(keys::POD_TEMPLATE_HASH);
    missing.then(|| kruise_workload::revision::short_hash(revision))
}

/// The conditions to change for the not-ready keys of `state`.
///
/// A Pod that is being updated keeps the keys of its preparation; one in use must have none of ours.
fn not_ready_conditions(view: &PlanView<'_>, pod: &Pod, state: &State) -> Vec<Value> {
    let current = pod.condition(keys::KRUISE_POD_READY);
    if !pod.has_readiness_gate(keys::KRUISE_POD_READY) || (pod.node.is_none() && current.is_none()) {
        return Vec::new();
    }
    let before = current.map(|c| parse_message(&c.message)).unwrap_or_default();
    let mut after = before.clone();
    let marks_not_ready = |hook: Option<&LifecycleHook>| hook.is_some_and(|h| h.mark_pod_not_ready);
    match state {
        State::PreparingDelete => set_not_ready_key(
            &mut after,
            keys::PRE_DELETE_HOOK,
            marks_not_ready(view.pre_delete()),
        ),
        State::PreparingUpdate => set_not_ready_key(
            &mut after,
            keys::PRE_UPDATE_HOOK,
            marks_not_ready(view.in_place_update()),
        ),
        State::Normal | State::PreparingNormal | State::Updated => {
            set_not_ready_key(&mut after, keys::PRE_DELETE_HOOK, false);
            set_not_ready_key(&mut after, keys::PRE_UPDATE_HOOK, false);
        }
        State::Updating | State::Other(_) => {}
    }
    if after == before && current.is_some_and(|c| c.is_true == after.is_empty()) {
        return Vec::new();
    }
    let is_true = after.is_empty();
    let mut conditions = vec![pod_condition(
        keys::KRUISE_POD_READY,
        is_true,
        "",
        &format_message(&after),
        transition_time(current, is_true, view.now),
    )];
    if !is_true {
        conditions.extend(pod_not_ready(pod, keys::KRUISE_POD_READY, view.now));
    }
    conditions
}

fn set_not_ready_key(keys_of_pod: &mut BTreeSet<NotReadyKey>, key: &str, present: bool) {
    let key = NotReadyKey {
        user_agent: keys::LIFECYCLE_USER_AGENT.to_owned(),
        key: key.to_owned(),
    };
    if present {
        keys_of_pod.insert(key);
    } else {
        keys_of_pod.remove(&key);
    }
}

/// Metadata that adds the items of a hook to the Pod again, so that the hook must release it for the update.
pub(super) fn reapply_hook(hook: &LifecycleHook, now: Timestamp) -> Value {
    let mut metadata = state_metadata(&State::PreparingUpdate, now);
    for (key, value) in &hook.labels_handler {
        set(&mut metadata, &["labels", key], json!(value));
    }
    if !hook.finalizers_handler.is_empty() {
        set(&mut metadata, &["finalizers"], json!(hook.finalizers_handler));
    }
    metadata
}
