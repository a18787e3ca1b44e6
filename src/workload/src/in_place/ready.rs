//! The readiness gate that keeps a Pod out of its Services while it is updated.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::pod::{Condition, Pod};
use kruise_api::keys;

/// Reason of condition InPlaceUpdateReady while it is false.
const STARTED: &str = "StartInPlaceUpdate";

/// Conditions that take the Pod out of its Services; empty when it lacks the gate, or is out already.
#[must_use]
pub fn not_ready(pod: &Pod, now: Timestamp) -> Vec<Value> {
    let current = pod.condition(keys::IN_PLACE_UPDATE_READY);
    if !pod.gated(keys::IN_PLACE_UPDATE_READY) || current.is_some_and(|c| !c.holds && c.reason == STARTED) {
        return Vec::new();
    }
    let mut conditions = vec![condition(
        keys::IN_PLACE_UPDATE_READY,
        false,
        STARTED,
        "",
        since(current, false, now),
    )];
    conditions.extend(unready(pod, keys::IN_PLACE_UPDATE_READY, now));
    conditions
}

/// Condition Ready after a gate became false, if kubelet's view of the Pod says otherwise as yet.
#[must_use]
pub fn unready(pod: &Pod, gate: &str, now: Timestamp) -> Option<Value> {
    let containers_ready = pod.condition("ContainersReady").is_some_and(|c| c.holds);
    if !containers_ready || !pod.condition_ready() {
        return None;
    }
    let message = keys::unready_message(gate);
    Some(condition("Ready", false, "ReadinessGatesNotReady", &message, now))
}

/// Condition InPlaceUpdateReady of a Pod that nothing holds; `None` when it lacks the gate or has it already.
#[must_use]
pub fn ready(pod: &Pod, now: Timestamp) -> Option<Value> {
    let current = pod.condition(keys::IN_PLACE_UPDATE_READY);
    let done = current.is_some_and(|c| c.holds && c.reason.is_empty() && c.message.is_empty());
    if !pod.gated(keys::IN_PLACE_UPDATE_READY) || done {
        return None;
    }
    Some(condition(
        keys::IN_PLACE_UPDATE_READY,
        true,
        "",
        "",
        since(current, true, now),
    ))
}

/// A Pod condition as it is patched. Empty reasons and messages take off what stood there.
#[must_use]
pub fn condition(type_: &str, holds: bool, reason: &str, message: &str, since: Timestamp) -> Value {
    json!({
        "type": type_,
        "status": if holds { "True" } else { "False" },
        "reason": reason,
        "message": message,
        "lastTransitionTime": seconds(since),
    })
}

/// Since when a condition holds, or does not, if it is made so now.
#[must_use]
pub fn since(current: Option<&Condition>, holds: bool, now: Timestamp) -> Timestamp {
    current
        .filter(|c| c.holds == holds)
        .and_then(|c| c.since)
        .unwrap_or(now)
}

/// A time as Kubernetes writes it, in whole seconds.
#[must_use]
pub fn seconds(time: Timestamp) -> String {
    format!("{time:.0}")
}
