//! Nodes that are about to get their NodeImage: a job that is for one of them does not end without it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

use super::running_job::{NodeName, RunningJob};
use crate::view::NodeView;

/// How long a NodeImage is waited for beyond the moment at which it should be made.
const NODE_IMAGE_TIMEOUT: SignedDuration = SignedDuration::from_secs(30);

/// Nodes that are ready and have no NodeImage yet.
#[derive(Default)]
pub struct PendingNodes {
    /// How long a Node must have been ready before its NodeImage is made.
    pub delay: SignedDuration,
    nodes: BTreeMap<NodeName, PendingNode>,
}

struct PendingNode {
    labels: BTreeMap<String, String>,
    /// Nobody waits for it from then on, so that a NodeImage that never comes holds up no job for ever.
    deadline: Timestamp,
}

impl PendingNodes {
    /// Takes in a Node that is new, has changed, or has gone, and whether it has a NodeImage. True when jobs that
    /// waited for it need not any more, or wait for another reason.
    pub fn observe_node(
        &mut self,
        name: &NodeName,
        node: Option<&NodeView>,
        has_image: bool,
        now: Timestamp,
    ) -> bool {
        let pending = node.filter(|n| n.ready && !n.deleting && !n.is_virtual() && !has_image);
        let Some(node) = pending else {
            return self.nodes.remove(name).is_some();
        };
        let due = node
            .ready_since
            .and_then(|since| since.checked_add(self.delay).ok());
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

    /// The NodeImage is there. True when it was waited for.
    pub fn node_image_created(&mut self, name: &NodeName) -> bool {
        self.nodes.remove(name).is_some()
    }

    /// The nodes that a job waits for at `now`, and when it does not wait for the first of them any more.
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
