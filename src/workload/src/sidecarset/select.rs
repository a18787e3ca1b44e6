//! Which Pods are updated next.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use kruise_api::selector::matches;
use kruise_api::sidecarset::{SidecarSetUpdateStrategy, UpdateScatterTerm};

use super::limits;
use super::predicates::{is_previous_update_over, is_upgradable};
use super::set::SetView;
use super::status::PodState;
use crate::in_place::Pod;
use crate::order::update_order;

/// Value of a scatter term that stands for each value of the label.
const ANY_VALUE: &str = "*";
/// Maximum number of scatter terms, as in the schema: each costs time for each Pod, and the labels of Pods decide how
/// many values there are.
const MAX_SCATTER_TERMS: usize = 256;

/// What happens to the Pods that are not updated; all are indexes into the matched Pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// To update now, in this order.
    pub upgrade: Vec<usize>,
    /// Their containers differ in more than images, which only new Pods get.
    pub not_upgradable: Vec<usize>,
    /// The selector of the update strategy leaves them out.
    pub not_selected: Vec<usize>,
    /// Their previous update is not over.
    pub in_progress: Vec<usize>,
    /// The API server refused their update a moment ago.
    pub refused: Vec<usize>,
    /// The partition keeps them, in their order.
    pub kept: Vec<usize>,
    /// They wait until fewer Pods are unavailable, in their order.
    pub held: Vec<usize>,
    /// Number of Pods that are unavailable, with those to update now that are ready.
    pub unavailable: usize,
    /// How many may be.
    pub max_unavailable: usize,
}

/// Selects the Pods to update, of all matched ones and their states, without those of the UIDs in `refused`, which the API
/// server refused a moment ago. Those in `failed`, which it refused before, come last.
#[must_use]
pub fn select(
    set: &SetView<'_>,
    pods: &[&Pod],
    states: &[PodState],
    refused: &BTreeSet<String>,
    failed: &BTreeSet<String>,
) -> Selection {
    let default = SidecarSetUpdateStrategy::default();
    let strategy = set.spec.update_strategy.as_ref().unwrap_or(&default);
    let mut selection = Selection::default();
    let mut waiting = Vec::new();
    for (at, (pod, state)) in pods.iter().zip(states).enumerate() {
        if state.updated {
            continue;
        }
        let selected = strategy
            .selector
            .as_ref()
            .is_none_or(|selector| matches(selector, &pod.labels));
        if !selected {
            selection.not_selected.push(at);
        } else if !is_upgradable(set, pod) {
            selection.not_upgradable.push(at);
        } else if !is_previous_update_over(set, pod) {
            selection.in_progress.push(at);
        } else if refused.contains(&pod.uid) {
            selection.refused.push(at);
        } else {
            waiting.push(at);
        }
    }
    let scatter = expand(&strategy.scatter_strategy, pods, &waiting);
    let mut waiting = update_order(pods, waiting, strategy.priority_strategy.as_ref(), &scatter);
    let kept = limits::partition(strategy.partition.as_ref(), pods.len());
    selection.kept = waiting.split_off(waiting.len().saturating_sub(kept));
    // Only now: a failure must not change which Pods the partition keeps.
    if !failed.is_empty() {
        waiting.sort_by_key(|at| pods.get(*at).is_some_and(|pod| failed.contains(&pod.uid)));
    }
    selection.max_unavailable = limits::max_unavailable(strategy.max_unavailable.as_ref(), pods.len());
    let broken = states.iter().filter(|state| state.updated && !state.available());
    selection.unavailable = broken.count();
    let is_ready = |at: usize| states.get(at).is_some_and(|state| state.ready);
    let mut taken = 0;
    for at in &waiting {
        if is_ready(*at) {
            if selection.unavailable >= selection.max_unavailable {
                break;
            }
            selection.unavailable += 1;
        }
        taken += 1;
    }
    selection.held = waiting.split_off(taken);
    selection.upgrade = waiting;
    selection
}

/// The scatter terms without repetitions, and with a term for each value of a label where the value is `*`. Values of
/// fewer than two waiting Pods have no effect and are left out.
fn expand(terms: &[UpdateScatterTerm], pods: &[&Pod], waiting: &[usize]) -> Vec<UpdateScatterTerm> {
    // How many waiting Pods have the value; not counted for explicit terms.
    let mut expanded: Vec<(usize, UpdateScatterTerm)> = Vec::new();
    for term in terms {
        if term.value != ANY_VALUE {
            expanded.push((0, term.clone()));
            continue;
        }
        let value = |pod: &Pod| {
            pod.labels
                .get(&term.key)
                .filter(|value| !value.is_empty())
                .cloned()
        };
        let mut waiting_by_value: BTreeMap<String, usize> = BTreeMap::new();
        for pod in waiting.iter().filter_map(|at| pods.get(*at)) {
            if let Some(value) = value(pod) {
                *waiting_by_value.entry(value).or_default() += 1;
            }
        }
        // In the order of the Pods, which decides between values that are equally frequent.
        for value in pods.iter().filter_map(|pod| value(pod)) {
            if let Some(count) = waiting_by_value.remove(&value).filter(|count| *count > 1) {
                let key = term.key.clone();
                expanded.push((count, UpdateScatterTerm { key, value }));
            }
        }
    }
    let mut seen = BTreeSet::new();
    let is_explicit = |term: &UpdateScatterTerm| terms.contains(term);
    expanded.retain(|(_, term)| seen.insert((term.key.clone(), term.value.clone())));
    if expanded.len() > MAX_SCATTER_TERMS {
        // Stable: equally frequent values stay in the order of the Pods.
        expanded.sort_by_key(|(count, term)| (!is_explicit(term), Reverse(*count)));
        expanded.truncate(MAX_SCATTER_TERMS);
    }
    expanded.into_iter().map(|(_, term)| term).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
    use kruise_api::keys;
    use serde_json::json;

    use super::*;

    #[test]
    fn refused_pod_takes_no_place_of_others() {
        let strings = |value: serde_json::Value| serde_json::from_value(value).unwrap();
        let annotations: BTreeMap<String, String> = strings(json!({
            keys::SIDECAR_SET_HASH: "new", keys::SIDECAR_SET_HASH_WITHOUT_IMAGE: "same" }));
        let spec = json!({ "containers": [{ "name": "log", "image": "log:2" }],
            "selector": { "matchLabels": { "app": "web" } } });
        let set = SetView {
            name: "s",
            resource_version: "1",
            annotations: &annotations,
            latest_revision: "s-2",
            spec: &serde_json::from_value(spec).unwrap(),
        };
        let pods = ["a", "b"].map(|name| {
            Pod::from_json(&json!({
                "metadata": { "name": name, "uid": name, "annotations": {
                    keys::SIDECAR_SET_HASH: r#"{"s":{"hash":"old"}}"#,
                    keys::SIDECAR_SET_HASH_WITHOUT_IMAGE: r#"{"s":{"hash":"same"}}"# } },
                "spec": { "nodeName": "n", "containers": [{ "name": "log", "image": "log:1" }] },
                "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }],
                    "containerStatuses": [{ "name": "log", "image": "log:1", "imageID": "i", "ready": true }] },
            }))
        });
        let pods: Vec<&Pod> = pods.iter().collect();
        let states: Vec<PodState> = pods.iter().map(|pod| PodState::new(&set, pod)).collect();
        let chosen = |refused: &[&str], failed: &[&str]| {
            let uids = |pods: &[&str]| pods.iter().map(|uid| (*uid).to_owned()).collect();
            let Selection { upgrade, refused, .. } =
                select(&set, &pods, &states, &uids(refused), &uids(failed));
            (upgrade, refused)
        };
        assert_eq!(chosen(&[], &[]), (vec![0], Vec::new()));
        assert_eq!(chosen(&["a"], &[]), (vec![1], vec![0]));
        assert_eq!(chosen(&["a", "b"], &[]), (Vec::new(), vec![0, 1]));
        assert_eq!(
            chosen(&[], &["a"]),
            (vec![1], Vec::new()),
            "it is tried after all others"
        );
        assert_eq!(chosen(&["b"], &["a"]), (vec![0], vec![1]));
        let mut partitioned = set.spec.clone();
        partitioned.update_strategy = Some(SidecarSetUpdateStrategy {
            partition: Some(IntOrString::Int(1)),
            ..SidecarSetUpdateStrategy::default()
        });
        let set = SetView {
            spec: &partitioned,
            ..set
        };
        let failed = BTreeSet::from(["a".to_owned()]);
        let selection = select(&set, &pods, &states, &BTreeSet::new(), &failed);
        assert_eq!(
            (selection.upgrade, selection.kept),
            (vec![0], vec![1]),
            "the partition keeps the same"
        );
    }

    #[test]
    fn any_value_becomes_a_limited_number_of_terms() {
        let pods: Vec<Pod> = (0..2000)
            .map(|at| {
                // Two Pods of each value, and 20 of the last one.
                let value = if at < 1980 {
                    format!("v{}", at / 2)
                } else {
                    "last".to_owned()
                };
                Pod::from_json(&json!({ "metadata": { "name": "p", "labels": { "app": value } } }))
            })
            .collect();
        let pods: Vec<&Pod> = pods.iter().collect();
        let waiting: Vec<usize> = (0..pods.len()).collect();
        let term = |key: &str, value: &str| UpdateScatterTerm {
            key: key.into(),
            value: value.into(),
        };
        let expanded = expand(&[term("app", "*"), term("tier", "web")], &pods, &waiting);
        assert_eq!(expanded.len(), MAX_SCATTER_TERMS);
        assert_eq!(
            expanded[0],
            term("tier", "web"),
            "what the spec names is always kept"
        );
        assert_eq!(expanded[1..3], [term("app", "last"), term("app", "v0")]);
    }
}
