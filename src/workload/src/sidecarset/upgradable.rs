//! Pod condition [`keys::SIDECAR_SET_UPGRADABLE`].

use std::collections::BTreeMap;

use jiff::Timestamp;
use kruise_api::{go_json, keys};
use serde_json::{Map, Value};

use crate::in_place::Pod;
use crate::in_place::ready::{pod_condition, transition_time};

const REASON_ALL_UPGRADABLE: &str = "AllSidecarsetUpgradable";
const REASON_IMMUTABLE_FIELD: &str = "UpdateImmutableField";

/// The condition after a set found a Pod upgradable or not; `None` if it says so already.
#[must_use]
pub fn upgradable_condition(set: &str, pod: &Pod, upgradable: bool, now: Timestamp) -> Option<Value> {
    let current = pod.condition(keys::SIDECAR_SET_UPGRADABLE);
    let message = current.map(|c| c.message.as_str()).unwrap_or_default();
    let entries: Map<String, Value> = serde_json::from_str(message).unwrap_or_default();
    let entries = entries.into_iter();
    let mut by_set: BTreeMap<String, bool> = entries
        .filter_map(|(set, value)| Some((set, value.as_bool()?)))
        .collect();
    by_set.insert(set.to_owned(), upgradable);
    let all = by_set.values().all(|upgradable| *upgradable);
    let message = go_json::to_json(&by_set);
    let reason = if all {
        REASON_ALL_UPGRADABLE
    } else {
        REASON_IMMUTABLE_FIELD
    };
    if current.is_some_and(|c| c.is_true == all && c.reason == reason && c.message == message) {
        return None;
    }
    let since = transition_time(current, all, now);
    Some(pod_condition(
        keys::SIDECAR_SET_UPGRADABLE,
        all,
        reason,
        &message,
        since,
    ))
}
