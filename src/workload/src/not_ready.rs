//! The not-ready keys of a Pod: which components keep it out of its Services.
//!
//! The message of condition `KruisePodReady` is upstream's: a sorted JSON list of `{"userAgent","key"}`. While the list
//! has an entry, the condition is False.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::in_place::ready::pod_condition;
use kruise_api::json::set;
use kruise_api::keys;

/// One reason to keep a Pod out of its Services.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NotReadyKey {
    /// The component that set the key.
    pub user_agent: String,
    /// The key, unique for that component.
    pub key: String,
}

/// The condition of a Pod without any key.
#[must_use]
pub fn initial_patch(uid: &str, now: Timestamp) -> Value {
    status_patch(
        uid,
        None,
        vec![pod_condition(keys::KRUISE_POD_READY, true, "", "", now)],
    )
}

/// The status patch that adds or removes `key`; `None` if nothing changes.
#[must_use]
pub fn patch_for_key(pod: &Pod, key: &NotReadyKey, not_ready: bool, now: Timestamp) -> Option<Value> {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
    let find = |type_: &str| conditions.into_iter().flatten().find(|c| c.type_ == type_);
    let current = find(keys::KRUISE_POD_READY);
    let mut entries = entries_of(current);
    let changed = if not_ready {
        entries.insert(key.clone())
    } else {
        entries.remove(key)
    };
    let status_is = |c: &PodCondition, expected: bool| (c.status == "True") == expected;
    if !changed && current.is_none_or(|c| status_is(c, entries.is_empty())) {
        return None;
    }
    let ready = entries.is_empty();
    let message = format_message(&entries);
    let since = current
        .filter(|c| status_is(c, ready))
        .and_then(|c| c.last_transition_time.as_ref());
    let mut new = vec![pod_condition(
        keys::KRUISE_POD_READY,
        ready,
        "",
        &message,
        since.map_or(now, |t| t.0),
    )];
    let containers_ready = find("ContainersReady").is_some_and(|c| c.status == "True");
    if !ready && containers_ready && find("Ready").is_some_and(|c| c.status == "True") {
        let text = keys::readiness_gate_message(keys::KRUISE_POD_READY);
        new.push(pod_condition(
            "Ready",
            false,
            "ReadinessGatesNotReady",
            &text,
            now,
        ));
    }
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    Some(status_patch(uid, pod.metadata.resource_version.as_deref(), new))
}

fn entries_of(condition: Option<&PodCondition>) -> BTreeSet<NotReadyKey> {
    parse_message(condition.and_then(|c| c.message.as_deref()).unwrap_or_default())
}

/// The keys in the condition's message. Any other message counts as no keys.
#[must_use]
pub fn parse_message(message: &str) -> BTreeSet<NotReadyKey> {
    serde_json::from_str(message).unwrap_or_default()
}

/// The condition's message for these keys; empty without keys.
#[must_use]
pub fn format_message(entries: &BTreeSet<NotReadyKey>) -> String {
    if entries.is_empty() {
        return String::new();
    }
    // As text, to keep upstream's order of the fields.
    serde_json::to_string(entries).unwrap_or_default()
}

/// Conditions merge by type in a strategic merge patch. The UID protects another Pod of the same name.
fn status_patch(uid: &str, version: Option<&str>, conditions: Vec<Value>) -> Value {
    let mut metadata = json!({ "uid": uid });
    if let Some(version) = version {
        set(&mut metadata, &["resourceVersion"], json!(version));
    }
    json!({ "metadata": metadata, "status": { "conditions": conditions } })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use k8s_openapi::api::core::v1::PodStatus;
    use proptest::prelude::*;

    fn key(n: u8) -> NotReadyKey {
        NotReadyKey {
            user_agent: ["ContainerRecreateRequest", "Else"][usize::from(n % 2)].into(),
            key: format!("ns/{}", n / 2),
        }
    }

    /// Applies the patch to a Pod as the API server would.
    fn apply(pod: &mut Pod, patch: &Value) {
        let conditions = pod
            .status
            .get_or_insert_with(PodStatus::default)
            .conditions
            .get_or_insert_default();
        for new in patch["status"]["conditions"].as_array().unwrap() {
            let new: PodCondition = serde_json::from_value(new.clone()).unwrap();
            conditions.retain(|c| c.type_ != new.type_);
            conditions.push(new);
        }
    }

    fn kruise_ready(pod: &Pod) -> PodCondition {
        let conditions = pod.status.as_ref().unwrap().conditions.as_ref().unwrap();
        conditions
            .iter()
            .find(|c| c.type_ == keys::KRUISE_POD_READY)
            .unwrap()
            .clone()
    }

    #[test]
    fn not_ready_message_matches_upstream() {
        let mut pod = Pod::default();
        for n in [2, 0] {
            let patch = patch_for_key(&pod, &key(n), true, Timestamp::UNIX_EPOCH).unwrap();
            apply(&mut pod, &patch);
        }
        assert_eq!(
            kruise_ready(&pod).message.as_deref(),
            Some(
                r#"[{"userAgent":"ContainerRecreateRequest","key":"ns/0"},{"userAgent":"ContainerRecreateRequest","key":"ns/1"}]"#
            )
        );
        let patch = patch_for_key(&pod, &key(4), true, Timestamp::UNIX_EPOCH).unwrap();
        assert_eq!(
            patch["status"]["conditions"][0]["lastTransitionTime"],
            "1970-01-01T00:00:00Z"
        );
    }

    proptest! {
        /// The condition is False exactly while a key is set, and nothing is written twice.
        #[test]
        fn condition_is_false_while_any_key_is_set(ops in prop::collection::vec((0_u8..6, any::<bool>()), 1..30)) {
            let mut pod = Pod::default();
            let mut holders = BTreeSet::new();
            for (n, hold) in ops {
                if let Some(patch) = patch_for_key(&pod, &key(n), hold, Timestamp::UNIX_EPOCH) {
                    apply(&mut pod, &patch);
                }
                if hold { holders.insert(n); } else { holders.remove(&n); }
                prop_assert_eq!(patch_for_key(&pod, &key(n), hold, Timestamp::UNIX_EPOCH), None);
                if pod.status.is_some() {
                    prop_assert_eq!(kruise_ready(&pod).status == "True", holders.is_empty());
                } else {
                    prop_assert!(holders.is_empty());
                }
            }
        }
    }
}
