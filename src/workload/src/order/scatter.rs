//! The scatter strategy: spreads Pods with certain labels over the whole update.

use std::cmp::Reverse;

use crate::in_place::Pod;
use kruise_api::update_priority::UpdateScatterTerm;

/// Applies all terms, beginning with the one that most candidates match.
pub fn sort(pods: &[&Pod], mut candidates: Vec<usize>, terms: &[UpdateScatterTerm]) -> Vec<usize> {
    let count = |term: &UpdateScatterTerm| {
        candidates
            .iter()
            .filter(|at| matches_term(pods[**at], term))
            .count()
    };
    let mut counted: Vec<_> = terms.iter().map(|term| (count(term), term)).collect();
    if terms.len() > 1 {
        counted.retain(|(count, _)| *count > 0);
        counted.sort_by_key(|(count, _)| Reverse(*count));
    }
    for (_, term) in counted {
        candidates = spread(pods, candidates, term);
    }
    candidates
}

fn matches_term(pod: &Pod, term: &UpdateScatterTerm) -> bool {
    pod.labels.get(&term.key) == Some(&term.value)
}

/// Spreads the matching candidates over the others; the last matching one comes last.
fn spread(pods: &[&Pod], candidates: Vec<usize>, term: &UpdateScatterTerm) -> Vec<usize> {
    let (mut scattered, others): (Vec<usize>, Vec<usize>) =
        candidates.iter().partition(|at| matches_term(pods[**at], term));
    if scattered.len() <= 1 || others.len() <= 1 {
        return candidates;
    }
    let last = scattered.pop();
    let all = pods.iter().filter(|pod| matches_term(pod, term)).count();
    let (all_scattered, all_others) = (all - 1, pods.len() - all);
    let (m, u) = (scattered.len(), others.len());
    // Whether the others are at least as frequent among all Pods as among the candidates; compared without fractions.
    let (groups, scattered_each, others_each, first) = if all_others * m >= u * all_scattered {
        let (groups, scattered_each, others_each) = grouping(m, u);
        (groups, scattered_each, others_each, 0)
    } else {
        let (_, scattered_each, others_each) = grouping(all_scattered, all_others);
        let groups = (m / scattered_each.max(1)).min(u / others_each.max(1));
        (groups, scattered_each, others_each, u - groups * others_each)
    };
    let (mut scattered, mut others) = (scattered.into_iter(), others.into_iter());
    let mut order: Vec<usize> = others.by_ref().take(first).collect();
    for _ in 0..groups {
        order.extend(scattered.by_ref().take(scattered_each));
        order.extend(others.by_ref().take(others_each));
    }
    order.extend(scattered);
    order.extend(others);
    order.extend(last);
    order
}

/// The number of groups, and how many of each kind are in a group.
fn grouping(scattered: usize, others: usize) -> (usize, usize, usize) {
    let groups = scattered.min(others).max(1);
    let rounded = |number: usize| (2 * number + groups) / (2 * groups);
    (groups, rounded(scattered), rounded(others))
}
