//! Nodes that are about to get their NodeImage: a job that selects one of them does not end without it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

use super::running_job::{NodeName, RunningJob};
use crate::view::NodeView;

/// How long jobs wait for a NodeImage after the time at which it should be created.
const NODE_IMAGE_TIMEOUT: SignedDuration = SignedDuration::from_secs(30);

/// Ready nodes without a NodeImage.
#[derive(Default)]
pub struct PendingNodes {
    /// How long a Node must be ready before its NodeImage is created.
    pub delay: SignedDuration,
    nodes: BTreeMap<NodeName, PendingNode>,
}

struct PendingNode {
    labels: BTreeMap<String, String>,
    /// No job waits longer, so that a NodeImage that is never created blocks no job forever.
    deadline: Timestamp,
}

impl PendingNodes {
    /// Processes a Node that is new, changed or deleted, and whether it has a NodeImage. True when jobs that waited for
    /// it need not wait any more, or the node's labels changed.
    pub fn observe_node(
        &mut self,
        name: &NodeName,
        node: Option<&NodeView>,
        has_image: bool,
        now: Timestamp,
    ) -> bool {
        let pending = node.filter(|n| n.ready && !n.terminating && !n.is_virtual() && !has_image);
        let Some(node) = pending else {
            return self.nodes.remove(name).is_some();
        };
        // Kubelet writes that time by the node's clock, which may have been ahead by hours.
        let ready_since = node.ready_since.map(|since| since.min(now));
        let due = ready_since.and_then(|since| since.checked_add(self.delay).ok());
        let deadline = due.map_or(now, |due| due.max(now));
        let deadline = deadline.checked_add(NODE_IMAGE_TIMEOUT).unwrap_or(Timestamp::MAX);
        let first_deadline = self.nodes.get(name).map(|known| known.deadline);
        let labels = node.labels.clone();
        let arrival = PendingNode {
            labels,
            deadline: first_deadline.unwrap_or(deadline),
        };
        let old = self.nodes.insert(Arc::clone(name), arrival);
        old.is_some_and(|old| old.labels != node.labels)
    }

    /// The NodeImage exists. True when jobs waited for it.
    pub fn node_image_created(&mut self, name: &NodeName) -> bool {
        self.nodes.remove(name).is_some()
    }

    /// The nodes that a job waits for at `now`, and the first deadline of these waits.
    #[must_use]
    pub fn pending_for(&self, work: &RunningJob, now: Timestamp) -> (BTreeSet<NodeName>, Option<Timestamp>) {
        let matching = self
            .nodes
            .iter()
            .filter(|(name, node)| now < node.deadline && work.includes(name, &node.labels));
        let mut names = BTreeSet::new();
        let mut next_deadline: Option<Timestamp> = None;
        for (name, node) in matching {
            names.insert(Arc::clone(name));
            next_deadline = Some(next_deadline.map_or(node.deadline, |first| first.min(node.deadline)));
        }
        (names, next_deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_wait_no_longer_for_a_node_whose_clock_was_ahead() {
        let at = |second| Timestamp::UNIX_EPOCH + SignedDuration::from_secs(second);
        for (ready_since, deadline) in [(90, 150), (100, 160), (10_000, 160)] {
            let mut pending = PendingNodes {
                delay: SignedDuration::from_secs(30),
                ..PendingNodes::default()
            };
            let node = NodeView {
                ready: true,
                ready_since: Some(at(ready_since)),
                ..NodeView::default()
            };
            pending.observe_node(&"a".into(), Some(&node), false, at(100));
            let deadlines: Vec<_> = pending.nodes.values().map(|node| node.deadline).collect();
            assert_eq!(deadlines, [at(deadline)]);
        }
    }
}
