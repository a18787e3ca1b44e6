//! The state of a Pod, and the keys that hold it out of its Services while a hook acts.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::view::View;
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::lifecycle::{LifecycleHook, LifecycleStateType as State};
use kruise_workload::in_place::ready::{condition, seconds, since, unready};
use kruise_workload::in_place::{Pod, Progress, Target, Write, progress};
use kruise_workload::not_ready::{NotReadyKey, holders_of, message_of};
use kruise_workload::pods;

/// The state of a Pod whose update in place is over.
pub(super) fn after_update(view: &View<'_>, pod: &Pod) -> State {
    match view.in_place_update() {
        Some(hook) if !pods::all_hooked(hook, pod) => State::Updated,
        _ => State::Normal,
    }
}

/// The state of a Pod that need not be deleted after all: an update that did not end goes on, and so does the hook that
/// is to take an updated Pod into use.
pub(super) fn after_cancel(view: &View<'_>, pod: &Pod) -> State {
    let updated = pod.annotations.contains_key(keys::LIFECYCLE_STATE_BEFORE_DELETE);
    match progress(pod) {
        Progress::Waiting(_) => State::Updating,
        Progress::Done if updated && after_update(view, pod) == State::Updated => State::Updated,
        Progress::Done => State::PreparingNormal,
    }
}

/// Label and annotation of a state.
pub(super) fn marks(state: &State, now: Timestamp) -> Value {
    json!({
        "labels": { keys::LIFECYCLE_STATE: state },
        "annotations": { keys::LIFECYCLE_TIMESTAMP: seconds(now) },
    })
}

/// The same for a Pod that was in another state: one that is to be deleted is to find its way back.
fn change(pod: &Pod, to: &State, now: Timestamp) -> Value {
    let (mut marks, before) = (marks(to, now), pods::state(pod));
    let key = keys::LIFECYCLE_STATE_BEFORE_DELETE;
    if *to == State::PreparingDelete && [State::Updating, State::Updated].contains(&before) {
        set(&mut marks, &["annotations", key], json!(before));
    } else if pod.annotations.contains_key(key) {
        set(&mut marks, &["annotations", key], Value::Null);
    }
    marks
}

/// The one write that brings a Pod into a state, and its gates to what the state asks for; `None` when they are so.
///
/// `ready` is condition InPlaceUpdateReady, if it is to change. Our keys alone are in a patch of the Pod's status,
/// so the API server takes the label along.
pub(super) fn write(view: &View<'_>, pod: &Pod, to: Option<State>, ready: Option<Value>) -> Option<Write> {
    let state = to.clone().unwrap_or_else(|| pods::state(pod));
    let mut conditions: Vec<Value> = ready.into_iter().collect();
    let held = hold(view, pod, &state);
    let guarded = !held.is_empty() && pod.condition(keys::KRUISE_POD_READY).is_some();
    conditions.extend(held);
    let mut patch = json!({});
    if let Some(to) = to.filter(|to| {
        pod.labels
            .get(keys::LIFECYCLE_STATE)
            .is_none_or(|s| s != to.as_str())
    }) {
        set(&mut patch, &["metadata"], change(pod, &to, view.now));
    }
    if let Some(hash) = template_hash(pod) {
        set(
            &mut patch,
            &["metadata", "labels", keys::POD_TEMPLATE_HASH],
            json!(hash),
        );
    }
    if conditions.is_empty() {
        return (patch != json!({})).then(|| Write::new(Target::Pod, pod, patch));
    }
    set(&mut patch, &["status", "conditions"], Value::Array(conditions));
    let write = Write::new(Target::Status, pod, patch);
    Some(if guarded { write.guarded(pod) } else { write })
}

/// The short hash of the Pod's revision, where its own label lacks.
fn template_hash(pod: &Pod) -> Option<&str> {
    let revision = pod.labels.get(keys::CONTROLLER_REVISION_HASH)?;
    let lacks = !pod.labels.contains_key(keys::POD_TEMPLATE_HASH);
    lacks.then(|| kruise_workload::revision::short(revision))
}

/// Conditions that change for the keys that hold a Pod in `state`.
///
/// A Pod that is being updated keeps what its preparation set; in use, no key of ours may be left.
fn hold(view: &View<'_>, pod: &Pod, state: &State) -> Vec<Value> {
    let current = pod.condition(keys::KRUISE_POD_READY);
    if !pod.gated(keys::KRUISE_POD_READY) || (pod.node.is_none() && current.is_none()) {
        return Vec::new();
    }
    let before = current.map(|c| holders_of(&c.message)).unwrap_or_default();
    let mut after = before.clone();
    let marks = |hook: Option<&LifecycleHook>| hook.is_some_and(|h| h.mark_pod_not_ready);
    match state {
        State::PreparingDelete => mark(&mut after, keys::PRE_DELETE_HOOK, marks(view.pre_delete())),
        State::PreparingUpdate => mark(&mut after, keys::PRE_UPDATE_HOOK, marks(view.in_place_update())),
        State::Normal | State::PreparingNormal | State::Updated => {
            mark(&mut after, keys::PRE_DELETE_HOOK, false);
            mark(&mut after, keys::PRE_UPDATE_HOOK, false);
        }
        State::Updating | State::Other(_) => {}
    }
    if after == before && current.is_some_and(|c| c.holds == after.is_empty()) {
        return Vec::new();
    }
    let holds = after.is_empty();
    let mut conditions = vec![condition(
        keys::KRUISE_POD_READY,
        holds,
        "",
        &message_of(&after),
        since(current, holds, view.now),
    )];
    if !holds {
        conditions.extend(unready(pod, keys::KRUISE_POD_READY, view.now));
    }
    conditions
}

fn mark(holders: &mut BTreeSet<NotReadyKey>, key: &str, held: bool) {
    let key = NotReadyKey {
        user_agent: keys::LIFECYCLE_USER_AGENT.to_owned(),
        key: key.to_owned(),
    };
    if held {
        holders.insert(key);
    } else {
        holders.remove(&key);
    }
}

/// Metadata that puts the items of a hook onto the Pod again, which is to let it be updated.
pub(super) fn hook_again(hook: &LifecycleHook, now: Timestamp) -> Value {
    let mut metadata = marks(&State::PreparingUpdate, now);
    for (key, value) in &hook.labels_handler {
        set(&mut metadata, &["labels", key], json!(value));
    }
    if !hook.finalizers_handler.is_empty() {
        set(&mut metadata, &["finalizers"], json!(hook.finalizers_handler));
    }
    metadata
}
