//! A Node, reduced.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;

use kruise_api::keys;

/// What the manager caches of a Node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// Labels of the Node.
    pub labels: BTreeMap<String, String>,
    /// Whether condition Ready is true.
    pub ready: bool,
    /// Time of the last change of condition Ready; `None` if kubelet has not reported it yet.
    pub ready_since: Option<Timestamp>,
    /// Whether it is cordoned.
    pub unschedulable: bool,
    /// Whether it has a `deletionTimestamp`.
    pub terminating: bool,
}

impl NodeView {
    /// Whether no daemon can run on it.
    #[must_use]
    pub fn is_virtual(&self) -> bool {
        self.labels
            .get(keys::TYPE)
            .is_some_and(|v| v == keys::TYPE_VIRTUAL_KUBELET)
    }
}

impl From<Node> for NodeView {
    fn from(node: Node) -> Self {
        let unschedulable = node.spec.and_then(|s| s.unschedulable);
        let conditions = node.status.and_then(|s| s.conditions).unwrap_or_default();
        let ready = conditions.into_iter().find(|c| c.type_ == "Ready");
        Self {
            labels: node.metadata.labels.unwrap_or_default(),
            ready: ready.as_ref().is_some_and(|c| c.status == "True"),
            ready_since: ready.and_then(|c| c.last_transition_time).map(|t| t.0),
            unschedulable: unschedulable.unwrap_or_default(),
            terminating: node.metadata.deletion_timestamp.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn cordoned_node_is_unschedulable() {
        for (spec, expected) in [
            (json!({ "unschedulable": true }), true),
            (json!({ "unschedulable": false }), false),
            (json!({}), false),
            (Value::Null, false),
        ] {
            let node: Node = serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap();
            assert_eq!(NodeView::from(node).unschedulable, expected);
        }
    }
}
