//! The readiness gate that keeps a Pod out of its Services while it is updated.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::pod::{Condition, Pod};
use kruise_api::keys;

/// Reason of condition InPlaceUpdateReady while it is false.
const START_IN_PLACE_UPDATE: &str = "StartInPlaceUpdate";

/// Conditions that take the Pod out of its Services; empty when it lacks the gate, or is out already.
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

/// Condition Ready after a gate became false, if kubelet's view of the Pod says otherwise as yet.
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

/// Condition InPlaceUpdateReady of a Pod that nothing holds; `None` when it lacks the gate or has it already.
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

/// A Pod condition as it is patched. Empty reasons and messages take off what stood there.
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

/// Since when a condition holds, or does not, if it is made so now.
#[must_use]
pub fn transition_time(current: Option<&Condition>, is_true: bool, now: Timestamp) -> Timestamp {
    current
        .filter(|c| c.is_true == is_true)
        .and_then(|c| c.since)
        .unwrap_or(now)
}

/// A time as Kubernetes writes it, in whole seconds.
#[must_use]
pub fn format_seconds(time: Timestamp) -> String {
    format!("{time:.0}")
}
