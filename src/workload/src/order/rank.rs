//! Ranks: the more Pods share a domain, the sooner one of them is deleted.

use std::collections::BTreeMap;

use super::compare::{by_assignment, by_rank};
use crate::in_place::Pod;

/// Label with a unique value for each node.
const HOSTNAME: &str = "kubernetes.io/hostname";

/// How Pods should be spread.
#[derive(Clone, Debug, Default)]
pub struct TopologySpread<'a> {
    /// Topology keys of the topology spread constraints.
    pub keys: Vec<String>,
    /// Labels by node name.
    pub nodes: Option<&'a BTreeMap<String, BTreeMap<String, String>>>,
}

/// The rank of each Pod; higher is deleted sooner.
#[must_use]
pub fn ranks(pods: &[&Pod], spread: &TopologySpread<'_>) -> Vec<f64> {
    let same_node = same_node(pods);
    if spread.keys.is_empty() {
        return same_node;
    }
    let mut ranks = vec![0.0; pods.len()];
    for key in &spread.keys {
        let label = |node: &String| spread.nodes?.get(node)?.get(key);
        let mut domains: BTreeMap<&String, Vec<usize>> = BTreeMap::new();
        for (at, pod) in pods.iter().enumerate() {
            if let Some(domain) = pod.node.as_ref().and_then(label) {
                domains.entry(domain).or_default().push(at);
            }
        }
        let weight = to_f64(domains.len() + 2).ln();
        let rank_within = |at: usize| if key == HOSTNAME { 0.0 } else { same_node[at] };
        for mut domain in domains.into_values() {
            sort_by_rank(pods, &mut domain, rank_within);
            let n = domain.len();
            for (i, at) in domain.into_iter().enumerate() {
                ranks[at] += to_f64(n - i) * weight;
            }
        }
    }
    ranks
}

/// Of k Pods on a node, the first k − 1 have ranks k − 1 … 1.
fn same_node(pods: &[&Pod]) -> Vec<f64> {
    let mut nodes: BTreeMap<&String, Vec<usize>> = BTreeMap::new();
    for (at, pod) in pods.iter().enumerate() {
        if let Some(node) = &pod.node {
            nodes.entry(node).or_default().push(at);
        }
    }
    let mut ranks = vec![0.0; pods.len()];
    for mut node in nodes.into_values() {
        sort_by_rank(pods, &mut node, |_| 0.0);
        let k = node.len();
        for (i, at) in node.into_iter().enumerate() {
            ranks[at] = to_f64(k - 1 - i);
        }
    }
    ranks
}

fn sort_by_rank(pods: &[&Pod], indices: &mut [usize], rank: impl Fn(usize) -> f64) {
    indices.sort_by(|a, b| {
        let (one, other) = (pods[*a], pods[*b]);
        by_assignment(one, other).then_with(|| by_rank((one, rank(*a)), (other, rank(*b))))
    });
}

#[allow(clippy::cast_precision_loss)]
fn to_f64(number: usize) -> f64 {
    number as f64
}
