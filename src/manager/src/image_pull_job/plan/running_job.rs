//! One running job: the state of each of its nodes, and the counts of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use jiff::Timestamp;

use super::job::{NodeTargets, PullJob};
use super::status::JobCounters;
use crate::view::{PodView, matches};
use kruise_api::node_image::ReferenceObject;
use kruise_cluster::Key;

/// Name of a node.
pub type NodeName = Arc<str>;

/// How far a node of a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// Not asked yet.
    Pending,
    /// Being asked since then; the watch has not shown it yet.
    Assigned(Timestamp),
    /// Asked, and not answered.
    Pulling,
    /// It has the image.
    Succeeded,
    /// It gave up.
    Failed,
}

/// What a NodeImage says of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagState {
    /// The job does not own the tag.
    NotOwned,
    /// It does since then, and the daemon has not said anything about it.
    Requested(Option<Timestamp>),
    /// It does, and there is no outcome.
    Pulling,
    /// The tag is there.
    Succeeded,
    /// The tag failed.
    Failed,
}

/// Of how many nodes it is known why they fail or wait.
const MAX_NODE_MESSAGES: usize = 16;

/// One running job and its nodes.
pub struct RunningJob {
    /// The job.
    pub job: Arc<PullJob>,
    /// Copies of its pull secrets, once they are there.
    pub secrets: Option<Vec<ReferenceObject>>,
    /// Why there are no copies yet, where something is in the way.
    pub blocked_reason: Option<String>,
    nodes: BTreeMap<NodeName, NodeState>,
    /// Pending nodes that are ready, and those that are not.
    pending: [BTreeSet<NodeName>; 2],
    active: usize,
    succeeded: usize,
    failed: BTreeSet<NodeName>,
    /// Why nodes failed, or cannot be asked: of some of them.
    node_messages: BTreeMap<NodeName, String>,
    /// Nodes where the end of a pull is waited for that others asked for before, and its version.
    awaited_pulls: BTreeMap<NodeName, i64>,
    /// Nodes whose daemons have not said anything about the image, and since when they are asked for it.
    unresponsive: BTreeMap<NodeName, Timestamp>,
    /// Matching Pods and the node of each; and how many there are on each node.
    pods: HashMap<Key, NodeName>,
    pods_per_node: HashMap<NodeName, usize>,
}

impl RunningJob {
    /// A job that knows of no node yet. A job without pull secrets need not wait for copies.
    #[must_use]
    pub fn new(job: PullJob, secrets: Option<Vec<ReferenceObject>>) -> Self {
        let none_needed = job.spec.pull_secrets.is_empty().then(Vec::new);
        Self {
            secrets: none_needed.or(secrets),
            job: Arc::new(job),
            blocked_reason: None,
            nodes: BTreeMap::new(),
            pending: [BTreeSet::new(), BTreeSet::new()],
            active: 0,
            succeeded: 0,
            failed: BTreeSet::new(),
            node_messages: BTreeMap::new(),
            awaited_pulls: BTreeMap::new(),
            unresponsive: BTreeMap::new(),
            pods: HashMap::new(),
            pods_per_node: HashMap::new(),
        }
    }

    /// Whether the job is for that node.
    #[must_use]
    pub fn includes(&self, name: &NodeName, labels: &BTreeMap<String, String>) -> bool {
        self.pods_per_node.contains_key(name) || self.job.targets.includes(name, labels)
    }

    /// The state of a node.
    #[must_use]
    pub fn state(&self, name: &NodeName) -> Option<NodeState> {
        self.nodes.get(name).copied()
    }

    /// The next state of a node, after what is seen of it now.
    ///
    /// An outcome stays, although its entry expires or another job asks for the tag again, unless the job
    /// never ends. An assigned node stays so until its entry shows.
    #[must_use]
    pub fn next_state(&self, old: Option<NodeState>, tag_state: TagState) -> NodeState {
        match (old, tag_state) {
            (Some(done @ (NodeState::Succeeded | NodeState::Failed)), _) if !self.job.never_ends() => done,
            (Some(assigned @ NodeState::Assigned(_)), TagState::NotOwned) => assigned,
            (_, TagState::NotOwned) => NodeState::Pending,
            (_, TagState::Requested(_) | TagState::Pulling) => NodeState::Pulling,
            (_, TagState::Succeeded) => NodeState::Succeeded,
            (_, TagState::Failed) => NodeState::Failed,
        }
    }

    /// Sets the state of a node, `None` when the job is not for it; true when that is a change.
    pub fn set_state(&mut self, name: &NodeName, new: Option<NodeState>, ready: bool) -> bool {
        let old = match new {
            Some(state) => self.nodes.insert(Arc::clone(name), state),
            None => self.nodes.remove(name),
        };
        if old == new {
            return false;
        }
        self.node_messages.remove(name);
        if !matches!(new, Some(NodeState::Pending | NodeState::Assigned(_))) {
            self.awaited_pulls.remove(name);
        }
        match old {
            Some(NodeState::Pending) => {
                self.pending[0].remove(name);
                self.pending[1].remove(name);
            }
            Some(NodeState::Assigned(_) | NodeState::Pulling) => self.active -= 1,
            Some(NodeState::Succeeded) => self.succeeded -= 1,
            Some(NodeState::Failed) => {
                self.failed.remove(name);
            }
            None => {}
        }
        match new {
            Some(NodeState::Pending) => {
                self.pending[usize::from(!ready)].insert(Arc::clone(name));
            }
            Some(NodeState::Assigned(_) | NodeState::Pulling) => self.active += 1,
            Some(NodeState::Succeeded) => self.succeeded += 1,
            Some(NodeState::Failed) => {
                self.failed.insert(Arc::clone(name));
            }
            None => {}
        }
        true
    }

    /// Why a node failed, or cannot be asked.
    pub fn set_node_message(&mut self, name: &NodeName, why: &str) {
        if self.node_messages.len() < MAX_NODE_MESSAGES || self.node_messages.contains_key(name) {
            self.node_messages.insert(Arc::clone(name), why.to_owned());
        }
    }

    /// Takes note of the pull whose end is waited for on a node, if any is.
    pub fn set_awaited_pull(&mut self, name: &NodeName, version: Option<i64>) {
        match version {
            Some(version) => self.awaited_pulls.insert(Arc::clone(name), version),
            None => self.awaited_pulls.remove(name),
        };
    }

    /// The version of the pull whose end is waited for on a node.
    #[must_use]
    pub fn awaited_pull(&self, name: &NodeName) -> Option<i64> {
        self.awaited_pulls.get(name).copied()
    }

    /// Takes note of whether a node's daemon has said anything; true when that is a change.
    pub fn set_unresponsive(&mut self, name: &NodeName, since: Option<Timestamp>) -> bool {
        let old = match since {
            Some(since) => self.unresponsive.insert(Arc::clone(name), since),
            None => self.unresponsive.remove(name),
        };
        old != since
    }

    /// The nodes whose daemons say nothing, and since when.
    pub fn unresponsive(&self) -> impl Iterator<Item = (&NodeName, Timestamp)> {
        self.unresponsive.iter().map(|(name, since)| (name, *since))
    }

    /// A node became ready or ceased to be.
    pub fn set_ready(&mut self, name: &NodeName, ready: bool) {
        let (to, from) = (usize::from(!ready), usize::from(ready));
        if self.pending[from].remove(name) {
            self.pending[to].insert(Arc::clone(name));
        }
    }

    /// Takes a pending node if one may be asked now, ready ones first, in the order of their names.
    pub fn assign_next(&mut self, now: Timestamp) -> Option<NodeName> {
        let (Ok(_), Ok(limit)) = (&self.job.image, &self.job.parallelism) else {
            return None;
        };
        if self.secrets.is_none() || self.active >= *limit {
            return None;
        }
        let [ready, unready] = &self.pending;
        let name = ready.first().or_else(|| unready.first()).cloned()?;
        self.set_state(&name, Some(NodeState::Assigned(now)), true);
        Some(name)
    }

    /// Takes in a Pod; returns the nodes that have become or ceased to be the job's.
    pub fn update_pod(&mut self, key: &Key, new: Option<&PodView>) -> Vec<NodeName> {
        let NodeTargets::Pods(selector) = &self.job.targets else {
            return Vec::new();
        };
        if key.namespace != self.job.key.namespace {
            return Vec::new();
        }
        let matching = new.filter(|p| p.active() && matches(selector, &p.labels));
        let node: Option<NodeName> = matching.and_then(|p| p.node.as_deref()).map(Into::into);
        let old = match &node {
            Some(node) => self.pods.insert(key.clone(), Arc::clone(node)),
            None => self.pods.remove(key),
        };
        if old == node {
            return Vec::new();
        }
        let mut changed = Vec::new();
        if let Some(previous) = old
            && let Some(count) = self.pods_per_node.get_mut(&previous)
        {
            *count -= 1;
            if *count == 0 {
                self.pods_per_node.remove(&previous);
                changed.push(previous);
            }
        }
        if let Some(node) = node {
            let count = self.pods_per_node.entry(Arc::clone(&node)).or_insert(0);
            *count += 1;
            if *count == 1 {
                changed.push(node);
            }
        }
        changed
    }

    /// How many nodes there are, and how many of them have an outcome.
    #[must_use]
    pub fn desired_and_finished(&self) -> (usize, usize) {
        (self.nodes.len(), self.succeeded + self.failed.len())
    }

    /// How far the job is; with the names of unfinished nodes where asked for.
    #[must_use]
    pub fn counters(&self, with_unfinished: bool) -> JobCounters {
        let unfinished_nodes = self
            .nodes
            .iter()
            .filter(|(_, state)| !matches!(state, NodeState::Succeeded | NodeState::Failed));
        JobCounters {
            desired: self.nodes.len(),
            active: self.active,
            succeeded: self.succeeded,
            failed: self.failed.clone(),
            unfinished: if with_unfinished {
                unfinished_nodes.map(|(name, _)| Arc::clone(name)).collect()
            } else {
                BTreeSet::new()
            },
            node_messages: self.node_messages.clone(),
            awaiting_pull: self.awaited_pulls.keys().cloned().collect(),
            blocked_reason: self.blocked_reason.clone(),
            ..JobCounters::default()
        }
    }

    #[cfg(test)]
    pub(super) fn node_states(&self) -> BTreeMap<NodeName, NodeState> {
        self.nodes.clone()
    }
}
