//! The priority strategy of updates.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::in_place::Pod;
use kruise_api::selector::matches;
use kruise_api::update_priority::UpdatePriorityStrategy;

/// Sorts by priority; Pods of equal priority keep their order.
///
/// Pods without any of the listed labels come first, as in upstream.
pub fn sort(pods: &[&Pod], candidates: &mut [usize], strategy: &UpdatePriorityStrategy) {
    sort_by_labels(candidates, |at| &pods[*at].labels, strategy);
}

/// The same for anything with the labels of a Pod.
pub fn sort_by_labels<'a, T>(
    candidates: &mut [T],
    labels: impl Fn(&T) -> &'a BTreeMap<String, String>,
    strategy: &UpdatePriorityStrategy,
) {
    if strategy.weight_priority.is_empty() {
        candidates.sort_by_cached_key(|candidate| order_key(labels(candidate), strategy));
    } else {
        candidates.sort_by_cached_key(|candidate| Reverse(weight(labels(candidate), strategy)));
    }
}

/// The sum of the weights of all matching terms.
fn weight(labels: &BTreeMap<String, String>, strategy: &UpdatePriorityStrategy) -> i64 {
    let terms = strategy.weight_priority.iter();
    let matching = terms.filter(|term| matches(&term.match_selector, labels));
    matching.map(|term| i64::from(term.weight)).sum()
}

/// The index of the first term that the Pod has, and the number at the end of the label's value.
fn order_key(
    labels: &BTreeMap<String, String>,
    strategy: &UpdatePriorityStrategy,
) -> (Option<usize>, Reverse<u64>) {
    let mut terms = strategy.order_priority.iter().enumerate();
    let found = terms.find_map(|(level, term)| Some((level, labels.get(&term.ordered_key)?)));
    match found {
        None => (None, Reverse(0)),
        Some((level, value)) => {
            let digits = value.trim_end_matches(|c: char| c.is_ascii_digit()).len();
            (Some(level), Reverse(value[digits..].parse().unwrap_or_default()))
        }
    }
}
