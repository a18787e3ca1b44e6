//! Predicates of a Pod as its workload sees it.

use jiff::{Timestamp, ToSpan};

use crate::in_place::Pod;
use crate::revision::short_hash;
use kruise_api::keys;
use kruise_api::lifecycle::{LifecycleHook, LifecycleStateType as State};

/// The lifecycle state in the Pod's label; Normal if the label is missing or empty.
#[must_use]
pub fn lifecycle_state(pod: &Pod) -> State {
    match pod.labels.get(keys::LIFECYCLE_STATE).map(String::as_str) {
        None | Some("") => State::Normal,
        Some(value) => State::from(value),
    }
}

/// The hash of the Pod's revision.
#[must_use]
pub fn revision_hash(pod: &Pod) -> Option<&str> {
    let label = pod.labels.get(keys::CONTROLLER_REVISION_HASH)?;
    Some(short_hash(label))
}

/// Whether the Pod has this revision.
#[must_use]
pub fn has_revision(pod: &Pod, revision: &str) -> bool {
    revision_hash(pod) == Some(short_hash(revision))
}

/// Whether the Pod is running, has been ready for more than `seconds` (with 0: is ready), and is not being updated.
#[must_use]
pub fn ready(pod: &Pod, seconds: i32, now: Timestamp) -> bool {
    is_serving(pod) && (seconds <= 0 || ready_until(pod, seconds).is_some_and(|until| until < now))
}

/// When the Pod will have been ready for `seconds`, if it is ready.
#[must_use]
pub fn ready_until(pod: &Pod, seconds: i32) -> Option<Timestamp> {
    let since = pod.condition("Ready").filter(|c| c.is_true)?.since?;
    since.checked_add(i64::from(seconds).seconds()).ok()
}

/// Whether the Pod is running, ready, and not being updated.
fn is_serving(pod: &Pod) -> bool {
    let updating = pod
        .condition(keys::IN_PLACE_UPDATE_READY)
        .is_some_and(|c| !c.is_true);
    pod.phase == "Running" && pod.condition_ready() && !updating
}

/// Whether the Pod is Normal and has been ready for `seconds`.
#[must_use]
pub fn available(pod: &Pod, seconds: i32, now: Timestamp) -> bool {
    lifecycle_state(pod) == State::Normal && ready(pod, seconds, now)
}

/// Whether any item of the hook is on the Pod, so that it blocks a deletion or an update.
#[must_use]
pub fn is_hooked(hook: Option<&LifecycleHook>, pod: &Pod) -> bool {
    hook.is_some_and(|hook| {
        hook.finalizers_handler.iter().any(|f| pod.finalizers.contains(f))
            || hook
                .labels_handler
                .iter()
                .any(|(k, v)| pod.labels.get(k) == Some(v))
    })
}

/// Whether all items of the hook are on the Pod.
#[must_use]
pub fn is_all_hooked(hook: &LifecycleHook, pod: &Pod) -> bool {
    hook.finalizers_handler.iter().all(|f| pod.finalizers.contains(f))
        && hook
            .labels_handler
            .iter()
            .all(|(k, v)| pod.labels.get(k) == Some(v))
}

/// Highest restart count of the Pod's containers.
#[must_use]
pub fn restarts(pod: &Pod) -> i64 {
    pod.container_statuses
        .iter()
        .map(|s| s.restarts)
        .max()
        .unwrap_or_default()
}

/// The deletion cost. An invalid number counts as 0, as does one with a leading `+` or zero.
#[must_use]
pub fn deletion_cost(pod: &Pod) -> i32 {
    let Some(text) = pod.annotations.get(keys::POD_DELETION_COST) else {
        return 0;
    };
    let digits = text.strip_prefix('-').unwrap_or(text);
    if text.starts_with('+') || (digits.starts_with('0') && digits.len() > 1) {
        return 0;
    }
    text.parse().unwrap_or_default()
}

/// Whether the Pod is Normal with open gates and all labels, so that it needs no check: nearly all of ten thousand Pods
/// are.
#[must_use]
pub fn is_settled(pod: &Pod) -> bool {
    let has_message = |gate: &str| pod.condition(gate).is_some_and(|c| !c.message.is_empty());
    let open = match pod.condition(keys::KRUISE_POD_READY) {
        Some(condition) => condition.is_true && condition.message.is_empty(),
        None => !pod.has_readiness_gate(keys::KRUISE_POD_READY),
    };
    is_idle(pod)
        && !has_message(keys::IN_PLACE_UPDATE_READY)
        && open
        && pod.labels.contains_key(keys::POD_TEMPLATE_HASH)
}

/// Whether the Pod is Normal with an open gate, so that its annotations need not be read.
#[must_use]
pub fn is_idle(pod: &Pod) -> bool {
    let grace = [keys::IN_PLACE_UPDATE_GRACE, keys::IN_PLACE_UPDATE_GRACE_OLD];
    lifecycle_state(pod) == State::Normal
        && pod
            .condition(keys::IN_PLACE_UPDATE_READY)
            .is_some_and(|c| c.is_true && c.reason.is_empty())
        && !grace.iter().any(|key| pod.annotations.contains_key(*key))
}
