//! The condition of the NodeImage that says whether the node has a container runtime.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use kruise_api::node_image::{MAX_CONDITION_MESSAGE_CHARS, MAX_CONDITIONS, NO_RUNTIME_REASON, RUNTIME_READY};
use kruise_api::time::truncate_to_second;

/// What is known of the node's container runtimes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuntimeState {
    /// None answers so far, and not all sockets were checked.
    Unknown,
    /// One answers; the message describes it.
    Ready(String),
    /// None answers; the message has the reason.
    NotReady(String),
}

/// The conditions that follow the stored ones. They are the same unless the status or the reason of ours changes: a
/// message alone is no reason to write. A runtime that answers only replaces the report that none did, so that nodes
/// whose runtime always answers write nothing.
pub fn next_conditions(stored: &[Condition], runtime: &RuntimeState, now: Timestamp) -> Vec<Condition> {
    let old = stored.iter().find(|condition| condition.type_ == RUNTIME_READY);
    let (status, reason, message) = match runtime {
        RuntimeState::Ready(message) if old.is_some_and(|old| old.status != "True") => {
            ("True", RUNTIME_READY, message)
        }
        RuntimeState::NotReady(message)
            if old.is_none_or(|old| (&*old.status, &*old.reason) != ("False", NO_RUNTIME_REASON)) =>
        {
            ("False", NO_RUNTIME_REASON, message)
        }
        RuntimeState::Unknown | RuntimeState::Ready(_) | RuntimeState::NotReady(_) => return stored.to_vec(),
    };
    let since = old.filter(|old| old.status == status).map_or_else(
        || Time(truncate_to_second(now)),
        |old| old.last_transition_time.clone(),
    );
    let others = stored.iter().filter(|condition| condition.type_ != RUNTIME_READY);
    let mut conditions: Vec<_> = others.take(MAX_CONDITIONS - 1).cloned().collect();
    conditions.push(Condition {
        type_: RUNTIME_READY.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.chars().take(MAX_CONDITION_MESSAGE_CHARS).collect(),
        last_transition_time: since,
        observed_generation: None,
    });
    conditions
}
