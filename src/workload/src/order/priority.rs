//! The priority strategy of updates.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use kruise_api::selector::CompiledSelector;
use kruise_api::update_priority::UpdatePriorityStrategy;

/// A strategy by which many Pods are sorted: tenants may list many terms.
#[derive(Debug)]
pub struct CompiledPriority {
    /// Weights, and the labels of the Pods that have them.
    weights: Vec<(i64, CompiledSelector)>,
    /// Keys of labels. They count if there are no weights.
    ordered_keys: Vec<String>,
}

impl From<&UpdatePriorityStrategy> for CompiledPriority {
    fn from(strategy: &UpdatePriorityStrategy) -> Self {
        let weights = strategy.weight_priority.iter();
        let weights = weights.map(|term| (term.weight.into(), (&term.match_selector).into()));
        let keys = strategy.order_priority.iter();
        Self {
            weights: weights.collect(),
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
            candidates.sort_by_cached_key(|candidate| Reverse(self.weight(labels(candidate))));
        }
    }

    /// The sum of the weights of all matching terms.
    fn weight(&self, labels: &BTreeMap<String, String>) -> i64 {
        let matching = self
            .weights
            .iter()
            .filter(|(_, selector)| selector.matches(labels));
        matching.map(|(weight, _)| weight).sum()
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
