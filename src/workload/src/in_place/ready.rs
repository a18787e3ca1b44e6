//! The readiness gate that keeps a Pod out of its Services during an update.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::pod::{Condition, Pod};
use kruise_api::keys;

/// Reason of condition InPlaceUpdateReady while it is false.
const START_IN_PLACE_UPDATE: &str = "StartInPlaceUpdate";

/// Conditions that take the Pod out of its Services; empty if it lacks the gate or is already out.
#[must_use]
pub fn not_ready_conditions(pod: &Pod, now: Timestamp) -> Vec<Value> {
    let current = pod.condition(keys::IN_PLACE_UPDATE_READY);
    if !pod.has_readiness_gate(keys::IN_PLACE_UPDATE_READY)
        || current.is_some_and(|c| !c.is_true && c.reason == START_IN_PLACE_UPDATE)
    {
        return Vec::new();
    }
    let mut conditions = vec![pod_condition(
        keys::IN_PLACE_UPDATE_READY,
        false,
        START_IN_PLACE_UPDATE,
        "",
        transition_time(current, false, now),
    )];
    conditions.extend(pod_not_ready(pod, keys::IN_PLACE_UPDATE_READY, now));
    conditions
}

/// Condition Ready after a gate became False, if kubelet has not updated it yet.
#[must_use]
pub fn pod_not_ready(pod: &Pod, gate: &str, now: Timestamp) -> Option<Value> {
    let containers_ready = pod.condition("ContainersReady").is_some_and(|c| c.is_true);
    if !containers_ready || !pod.condition_ready() {
        return None;
    }
    let message = keys::readiness_gate_message(gate);
    Some(pod_condition(
        "Ready",
        false,
        "ReadinessGatesNotReady",
        &message,
        now,
    ))
}

/// Condition InPlaceUpdateReady of a Pod that nothing blocks; `None` if it lacks the gate or the condition is already
/// set.
#[must_use]
pub fn ready_condition(pod: &Pod, now: Timestamp) -> Option<Value> {
    let current = pod.condition(keys::IN_PLACE_UPDATE_READY);
    let done = current.is_some_and(|c| c.is_true && c.reason.is_empty() && c.message.is_empty());
    if !pod.has_readiness_gate(keys::IN_PLACE_UPDATE_READY) || done {
        return None;
    }
    Some(pod_condition(
        keys::IN_PLACE_UPDATE_READY,
        true,
        "",
        "",
        transition_time(current, true, now),
    ))
}

/// A Pod condition for a patch. An empty reason or message removes the previous one.
#[must_use]
pub fn pod_condition(type_: &str, is_true: bool, reason: &str, message: &str, since: Timestamp) -> Value {
    json!({
        "type": type_,
        "status": if is_true { "True" } else { "False" },
        "reason": reason,
        "message": message,
        "lastTransitionTime": format_seconds(since),
    })
}

/// `lastTransitionTime` of a condition that gets this status now.
#[must_use]
pub fn transition_time(current: Option<&Condition>, is_true: bool, now: Timestamp) -> Timestamp {
    current
        .filter(|c| c.is_true == is_true)
        .and_then(|c| c.since)
        .unwrap_or(now)
}

/// A time in whole seconds, as Kubernetes writes it.
#[must_use]
pub fn format_seconds(time: Timestamp) -> String {
    format!("{time:.0}")
}
