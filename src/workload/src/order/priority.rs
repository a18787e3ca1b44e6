//! The priority strategy of updates.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};

use kruise_api::selector::CompiledSelector;
use kruise_api::update_priority::UpdatePriorityStrategy;

/// Weights of different labels that are kept while Pods are sorted. This limits memory: a Pod may have many labels.
const MAX_KNOWN_WEIGHTS: usize = 1024;

/// The labels of a Pod that weights depend on.
type WeightedLabels<'a> = Vec<(&'a str, &'a str)>;

/// A strategy by which many Pods are sorted: tenants may list many terms.
#[derive(Debug)]
pub struct CompiledPriority {
    /// Weights, and the labels of the Pods that have them.
    weights: Vec<(i64, CompiledSelector)>,
    /// Keys of the labels that weights depend on.
    weighted_keys: HashSet<String>,
    /// Keys of labels. They count if there are no weights.
    ordered_keys: Vec<String>,
}

impl From<&UpdatePriorityStrategy> for CompiledPriority {
    fn from(strategy: &UpdatePriorityStrategy) -> Self {
        let weights = strategy.weight_priority.iter();
        let weights = weights.map(|term| (term.weight.into(), (&term.match_selector).into()));
        let weights: Vec<(i64, CompiledSelector)> = weights.collect();
        let weighted_keys = weights.iter().flat_map(|(_, selector)| selector.keys());
        let weighted_keys = weighted_keys.map(str::to_owned).collect();
        let keys = strategy.order_priority.iter();
        Self {
            weights,
            weighted_keys,
            ordered_keys: keys.map(|term| term.ordered_key.clone()).collect(),
        }
    }
}

impl CompiledPriority {
    /// Sorts by priority; Pods of equal priority keep their order.
    ///
    /// Pods without any of the listed labels come first, as in upstream.
    pub fn sort<'a, T>(&self, candidates: &mut [T], labels: impl Fn(&T) -> &'a BTreeMap<String, String>) {
        if self.weights.is_empty() {
            candidates.sort_by_cached_key(|candidate| self.order_key(labels(candidate)));
        } else {
            let mut known = HashMap::new();
            candidates.sort_by_cached_key(|candidate| Reverse(self.weight(labels(candidate), &mut known)));
        }
    }

    /// The sum of the weights of all matching terms. Pods of one workload mostly have the same labels, so the terms are
    /// matched only with labels that are not `known` yet.
    pub(super) fn weight<'a>(
        &self,
        labels: &'a BTreeMap<String, String>,
        known: &mut HashMap<WeightedLabels<'a>, i64>,
    ) -> i64 {
        let weighted = labels.iter().filter(|(key, _)| self.weighted_keys.contains(*key));
        let weighted = weighted
            .map(|(key, value)| (key.as_str(), value.as_str()))
            .collect();
        if let Some(weight) = known.get(&weighted) {
            return *weight;
        }
        let terms = self.weights.iter();
        let matching = terms.filter(|(_, selector)| selector.matches(labels));
        let weight = matching.map(|(weight, _)| weight).sum();
        if known.len() < MAX_KNOWN_WEIGHTS {
            known.insert(weighted, weight);
        }
        weight
    }

    /// The index of the first term that the Pod has, and the number at the end of the label's value.
    fn order_key(&self, labels: &BTreeMap<String, String>) -> (Option<usize>, Reverse<u64>) {
        let mut keys = self.ordered_keys.iter().enumerate();
        let found = keys.find_map(|(level, key)| Some((level, labels.get(key)?)));
        match found {
            None => (None, Reverse(0)),
            Some((level, value)) => {
                let digits = value.trim_end_matches(|c: char| c.is_ascii_digit()).len();
                (Some(level), Reverse(value[digits..].parse().unwrap_or_default()))
            }
        }
    }
}
