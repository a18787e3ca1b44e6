//! Nodes that are about to get their NodeImage: a job that is for one of them does not end without it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

use super::work::{NodeName, Work};
use crate::view::NodeView;

/// How long a NodeImage is waited for beyond the moment at which it should be made.
const PATIENCE: SignedDuration = SignedDuration::from_secs(30);

/// Nodes that are ready and have no NodeImage yet.
#[derive(Default)]
pub struct Awaited {
    /// How long a Node must have been ready before its NodeImage is made.
    pub delay: SignedDuration,
    nodes: BTreeMap<NodeName, Arrival>,
}

struct Arrival {
    labels: BTreeMap<String, String>,
    /// Nobody waits for it from then on, so that a NodeImage that never comes holds up no job for ever.
    until: Timestamp,
}

impl Awaited {
    /// Takes in a Node that is new, has changed, or has gone, and whether it has a NodeImage. True when jobs that
    /// waited for it need not any more, or wait for another reason.
    pub fn node(
        &mut self,
        name: &NodeName,
        node: Option<&NodeView>,
        has_image: bool,
        now: Timestamp,
    ) -> bool {
        let comes = node.filter(|n| n.ready && !n.deleting && !n.is_virtual() && !has_image);
        let Some(node) = comes else {
            return self.nodes.remove(name).is_some();
        };
        let due = node
            .ready_since
            .and_then(|since| since.checked_add(self.delay).ok());
        let until = due.map_or(now, |due| due.max(now));
        let until = until.checked_add(PATIENCE).unwrap_or(Timestamp::MAX);
        let first = self.nodes.get(name).map(|known| known.until);
        let labels = node.labels.clone();
        let arrival = Arrival {
            labels,
            until: first.unwrap_or(until),
        };
        let old = self.nodes.insert(Arc::clone(name), arrival);
        old.is_some_and(|old| old.labels != node.labels)
    }

    /// The NodeImage is there. True when it was waited for.
    pub fn came(&mut self, name: &NodeName) -> bool {
        self.nodes.remove(name).is_some()
    }

    /// The nodes that a job waits for at `now`, and when it does not wait for the first of them any more.
    #[must_use]
    pub fn of(&self, work: &Work, now: Timestamp) -> (BTreeSet<NodeName>, Option<Timestamp>) {
        let of_job = self
            .nodes
            .iter()
            .filter(|(name, node)| now < node.until && work.includes(name, &node.labels));
        let mut names = BTreeSet::new();
        let mut first: Option<Timestamp> = None;
        for (name, node) in of_job {
            names.insert(Arc::clone(name));
            first = Some(first.map_or(node.until, |first| first.min(node.until)));
        }
        (names, first)
    }
}
