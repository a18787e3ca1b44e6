//! One running job: the state of each of its nodes, and their counters.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use jiff::Timestamp;

use super::job::{NodeTargets, PullJob};
use super::status::JobCounters;
use crate::view::{NodeView, PodView, matches};
use kruise_api::node_image::{PulledBytes, ReferenceObject};
use kruise_cluster::Key;

/// Name of a node.
pub type NodeName = Arc<str>;

/// Progress of one node of a job. One byte: a tenant may have thousands of jobs, each with a state for each of a
/// thousand nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// Not requested yet.
    Pending,
    /// The request is being written; the watch has not shown it yet.
    Assigned,
    /// Requested, without an outcome.
    Pulling,
    /// The node has the image.
    Succeeded,
    /// The pull failed.
    Failed,
}

/// State of the job's tag in a NodeImage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagState {
    /// The job does not own the tag.
    NotOwned,
    /// Owned since that time; the daemon has reported nothing.
    Requested(Option<Timestamp>),
    /// Owned, and the daemon has reported no outcome.
    Pulling,
    /// The pull succeeded.
    Succeeded,
    /// The pull failed.
    Failed,
}

/// The order in which a job requests nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeGroup {
    /// Ready, or without a Node.
    Ready,
    /// Ready and cordoned: it works, but may be about to be drained or replaced.
    Cordoned,
    /// Not ready: as far as is known, nothing is pulled there. They are put aside until all others have finished.
    NotReady,
}

impl NodeGroup {
    /// The group of a node.
    #[must_use]
    pub fn of(node: Option<&NodeView>) -> Self {
        match node {
            Some(node) if !node.ready => Self::NotReady,
            Some(node) if node.unschedulable => Self::Cordoned,
            _ => Self::Ready,
        }
    }
}

/// Nodes of later groups.
#[derive(Default)]
struct LaterNodes {
    cordoned: BTreeSet<NodeName>,
    not_ready: BTreeSet<NodeName>,
}

impl LaterNodes {
    fn insert(&mut self, name: &NodeName, group: NodeGroup) {
        self.remove(name);
        match group {
            NodeGroup::Ready => false,
            NodeGroup::Cordoned => self.cordoned.insert(Arc::clone(name)),
            NodeGroup::NotReady => self.not_ready.insert(Arc::clone(name)),
        };
    }

    fn remove(&mut self, name: &NodeName) {
        self.cordoned.remove(name);
        self.not_ready.remove(name);
    }

    fn contains(&self, name: &NodeName) -> bool {
        self.cordoned.contains(name) || self.not_ready.contains(name)
    }

    fn len(&self) -> usize {
        self.cordoned.len() + self.not_ready.len()
    }
}

/// Maximum number of nodes whose reason for failing or waiting is kept.
const MAX_NODE_MESSAGES: usize = 16;

/// One running job and its nodes.
pub struct RunningJob {
    /// Spec and status of the job.
    pub job: Arc<PullJob>,
    /// Copies of its pull secrets, once they exist.
    pub secrets: Option<Vec<ReferenceObject>>,
    /// Whether it was reported that nodes do not use all of them.
    pub excess_secrets_reported: bool,
    /// Why the copies cannot be created.
    pub blocked_reason: Option<String>,
    /// Nodes without an outcome whose request may be older than the spec, and whether there are new ones.
    outdated: BTreeSet<NodeName>,
    has_new_outdated: bool,
    nodes: BTreeMap<NodeName, NodeState>,
    /// Since when the requests of assigned nodes are being written.
    assigned_at: BTreeMap<NodeName, Timestamp>,
    /// The number of pending nodes, which are not listed apart from `nodes`: most nodes of most jobs are pending.
    pending: usize,
    /// Those of them that are not of the first group.
    pending_later: LaterNodes,
    /// No node of the first group with a smaller name is pending.
    search_from: NodeName,
    active: usize,
    /// Those of them that are not ready.
    active_not_ready: BTreeSet<NodeName>,
    succeeded: usize,
    failed: BTreeSet<NodeName>,
    /// Bytes of the image as a node reported them last; 0 if none has.
    image_bytes: i64,
    /// Why nodes failed, or cannot be requested; for some of them.
    node_messages: BTreeMap<NodeName, String>,
    /// Nodes that wait for a pull that others requested before, and its version.
    awaited_pulls: BTreeMap<NodeName, i64>,
    /// Nodes whose daemons have reported nothing about the image, and the time of the request.
    unresponsive: BTreeMap<NodeName, Timestamp>,
    /// Matching Pods with their nodes; and the number of Pods per node.
    pods: HashMap<Key, NodeName>,
    pods_per_node: HashMap<NodeName, usize>,
}

impl RunningJob {
    /// A job without nodes. A job without pull secrets need not wait for copies.
    #[must_use]
    pub fn new(job: PullJob, secrets: Option<Vec<ReferenceObject>>) -> Self {
        let none_needed = job.spec.pull_secrets.is_empty().then(Vec::new);
        Self {
            secrets: none_needed.or(secrets),
            job: Arc::new(job),
            excess_secrets_reported: false,
            blocked_reason: None,
            outdated: BTreeSet::new(),
            has_new_outdated: false,
            nodes: BTreeMap::new(),
            assigned_at: BTreeMap::new(),
            pending: 0,
            pending_later: LaterNodes::default(),
            search_from: NodeName::default(),
            active: 0,
            active_not_ready: BTreeSet::new(),
            succeeded: 0,
            failed: BTreeSet::new(),
            image_bytes: 0,
            node_messages: BTreeMap::new(),
            awaited_pulls: BTreeMap::new(),
            unresponsive: BTreeMap::new(),
            pods: HashMap::new(),
            pods_per_node: HashMap::new(),
        }
    }

    /// Replaces spec and status of the job; image and nodes are the same.
    pub fn update(&mut self, job: PullJob) {
        let is_edited = !self.job.requests_the_same_as(&job);
        self.job = Arc::new(job);
        if is_edited {
            self.set_outdated();
        }
    }

    /// Whether the job selects that node.
    #[must_use]
    pub fn includes(&self, name: &NodeName, labels: &BTreeMap<String, String>) -> bool {
        self.pods_per_node.contains_key(name) || self.job.targets.includes(name, labels)
    }

    /// The state of a node.
    #[must_use]
    pub fn state(&self, name: &NodeName) -> Option<NodeState> {
        self.nodes.get(name).copied()
    }

    /// The next state of a node, given the observed state of its tag.
    ///
    /// An outcome is kept although its entry expires or another job requests the tag again, except under completion
    /// policy `Never`. A failed node can still succeed: its daemon may have continued while it could not report. An
    /// assigned node keeps that state until the watch shows its entry.
    #[must_use]
    pub fn next_state(&self, old: Option<NodeState>, tag_state: TagState) -> NodeState {
        match (old, tag_state) {
            (Some(NodeState::Failed), TagState::Succeeded) => NodeState::Succeeded,
            (Some(done @ (NodeState::Succeeded | NodeState::Failed)), _) if !self.job.never_ends() => done,
            (Some(NodeState::Assigned), TagState::NotOwned) => NodeState::Assigned,
            (_, TagState::NotOwned) => NodeState::Pending,
            (_, TagState::Requested(_) | TagState::Pulling) => NodeState::Pulling,
            (_, TagState::Succeeded) => NodeState::Succeeded,
            (_, TagState::Failed) => NodeState::Failed,
        }
    }

    /// Sets the state of a node, `None` when the job does not select it; true when that is a change.
    pub fn set_state(&mut self, name: &NodeName, new: Option<NodeState>, group: NodeGroup) -> bool {
        let old = match new {
            Some(state) => self.nodes.insert(Arc::clone(name), state),
            None => self.nodes.remove(name),
        };
        if old == new {
            return false;
        }
        // What delays a write is kept while it is tried again.
        let is_unwritten =
            |state: Option<NodeState>| matches!(state, Some(NodeState::Pending | NodeState::Assigned));
        if !(is_unwritten(old) && is_unwritten(new)) {
            self.node_messages.remove(name);
        }
        if !matches!(new, Some(NodeState::Assigned | NodeState::Pulling)) {
            self.outdated.remove(name);
        }
        if !matches!(new, Some(NodeState::Pending | NodeState::Assigned)) {
            self.awaited_pulls.remove(name);
        }
        self.assigned_at.remove(name);
        match old {
            Some(NodeState::Pending) => {
                self.pending -= 1;
                self.pending_later.remove(name);
            }
            Some(NodeState::Assigned | NodeState::Pulling) => {
                self.active -= 1;
                self.active_not_ready.remove(name);
            }
            Some(NodeState::Succeeded) => self.succeeded -= 1,
            Some(NodeState::Failed) => {
                self.failed.remove(name);
            }
            None => {}
        }
        match new {
            Some(NodeState::Pending) => {
                self.pending += 1;
                self.set_group(name, group);
            }
            Some(NodeState::Assigned | NodeState::Pulling) => {
                self.active += 1;
                self.set_group(name, group);
            }
            Some(NodeState::Succeeded) => self.succeeded += 1,
            Some(NodeState::Failed) => {
                self.failed.insert(Arc::clone(name));
            }
            None => {}
        }
        true
    }

    /// Sets why a node failed, or cannot be requested.
    pub fn set_node_message(&mut self, name: &NodeName, why: &str) {
        if self.node_messages.len() < MAX_NODE_MESSAGES || self.node_messages.contains_key(name) {
            self.node_messages.insert(Arc::clone(name), why.to_owned());
        }
    }

    /// Removes that; true when there was any.
    pub fn remove_node_message(&mut self, name: &NodeName) -> bool {
        self.node_messages.remove(name).is_some()
    }

    /// Sets or clears the pull that a node waits for.
    pub fn set_awaited_pull(&mut self, name: &NodeName, version: Option<i64>) {
        match version {
            Some(version) => self.awaited_pulls.insert(Arc::clone(name), version),
            None => self.awaited_pulls.remove(name),
        };
    }

    /// The version of the pull that a node waits for.
    #[must_use]
    pub fn awaited_pull(&self, name: &NodeName) -> Option<i64> {
        self.awaited_pulls.get(name).copied()
    }

    /// Sets or clears since when a node's daemon has reported nothing; true when that is a change.
    pub fn set_unresponsive(&mut self, name: &NodeName, since: Option<Timestamp>) -> bool {
        let old = match since {
            Some(since) => self.unresponsive.insert(Arc::clone(name), since),
            None => self.unresponsive.remove(name),
        };
        old != since
    }

    /// The nodes whose daemons have reported nothing, and since when.
    pub fn unresponsive(&self) -> impl Iterator<Item = (&NodeName, Timestamp)> {
        self.unresponsive.iter().map(|(name, since)| (name, *since))
    }

    /// Sets the group of a node; true when the node has not finished.
    pub fn set_group(&mut self, name: &NodeName, group: NodeGroup) -> bool {
        match self.state(name) {
            Some(NodeState::Pending) => {
                self.pending_later.insert(name, group);
                if group == NodeGroup::Ready && *name < self.search_from {
                    self.search_from = Arc::clone(name);
                }
                true
            }
            Some(NodeState::Assigned | NodeState::Pulling) => {
                if group == NodeGroup::NotReady {
                    self.active_not_ready.insert(Arc::clone(name));
                } else {
                    self.active_not_ready.remove(name);
                }
                true
            }
            Some(NodeState::Succeeded | NodeState::Failed) | None => false,
        }
    }

    /// Sets the bytes of the image.
    pub fn set_image_bytes(&mut self, bytes: i64) {
        self.image_bytes = bytes;
    }

    /// Bytes of the image that its nodes have together, without those that failed; `None` if no node has reported any.
    /// `reported` is what a node that pulls has reported.
    #[must_use]
    pub fn pulled_bytes(&self, reported: impl Fn(&NodeName) -> Option<PulledBytes>) -> Option<PulledBytes> {
        if self.image_bytes <= 0 {
            return None;
        }
        let on_nodes = |count: usize| {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.image_bytes.saturating_mul(count)
        };
        let complete = PulledBytes {
            done: on_nodes(self.succeeded),
            total: on_nodes(self.nodes.len().saturating_sub(self.failed.len())),
        };
        let pulling = self
            .nodes
            .iter()
            .filter(|(_, state)| **state == NodeState::Pulling);
        let partial = pulling
            .filter_map(|(name, _)| reported(name))
            .map(|bytes| PulledBytes {
                done: bytes.done.clamp(0, self.image_bytes),
                total: 0,
            });
        Some(partial.fold(complete, |sum, bytes| sum + bytes))
    }

    /// Whether it has requested its image on nodes that have not ended.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.active > 0
    }

    /// On how many nodes it pulls, as far as is known.
    #[must_use]
    pub fn pulls(&self) -> usize {
        self.active.saturating_sub(self.active_not_ready.len())
    }

    /// The next pending node and its group, if the job may have one more: in the order of the groups, and of the names
    /// in each. The next search begins where this one ended.
    #[must_use]
    pub fn next_node(&mut self) -> Option<(NodeName, NodeGroup)> {
        let (Ok(_), Ok(parallelism), Ok(_)) = (&self.job.image, &self.job.parallelism, &self.job.schedule)
        else {
            return None;
        };
        if self.secrets.is_none() || self.active >= parallelism.limit(self.nodes.len()) {
            return None;
        }
        if self.pending > self.pending_later.len()
            && let Some(name) = self.first_of_first_group()
        {
            self.search_from = Arc::clone(&name);
            return Some((name, NodeGroup::Ready));
        }
        if let Some(name) = self.pending_later.cordoned.first() {
            return Some((Arc::clone(name), NodeGroup::Cordoned));
        }
        if self.pulls() > 0 {
            return None;
        }
        let name = self.pending_later.not_ready.first()?;
        Some((Arc::clone(name), NodeGroup::NotReady))
    }

    /// The first pending node of the first group.
    fn first_of_first_group(&self) -> Option<NodeName> {
        let mut nodes = self.nodes.range(Arc::clone(&self.search_from)..);
        let is_next = |name: &NodeName, state: NodeState| {
            state == NodeState::Pending && !self.pending_later.contains(name)
        };
        let (name, _) = nodes.find(|(name, state)| is_next(name, **state))?;
        Some(Arc::clone(name))
    }

    /// Assigns the next node.
    pub fn assign_next(&mut self, now: Timestamp) -> Option<NodeName> {
        let (name, group) = self.next_node()?;
        self.set_state(&name, Some(NodeState::Assigned), group);
        self.assigned_at.insert(Arc::clone(&name), now);
        Some(name)
    }

    /// The nodes that were assigned at that time, and whose request the watch has not shown yet.
    #[must_use]
    pub fn nodes_assigned_at(&self, at: Timestamp) -> Vec<NodeName> {
        let nodes = self.assigned_at.iter().filter(|(_, since)| **since == at);
        nodes.map(|(name, _)| Arc::clone(name)).collect()
    }

    /// The nodes whose request may be older than the spec of the job, if there are new ones.
    pub fn take_outdated(&mut self) -> Vec<NodeName> {
        if !std::mem::take(&mut self.has_new_outdated) {
            return Vec::new();
        }
        self.outdated.iter().cloned().collect()
    }

    /// Whether the request to a node may be older than the spec of the job.
    #[must_use]
    pub fn is_outdated(&self, name: &NodeName) -> bool {
        self.outdated.contains(name)
    }

    /// The request to a node was written as `job` says, or cannot be written.
    pub fn request_written(&mut self, name: &NodeName, job: &PullJob) {
        if self.job.requests_the_same_as(job) {
            self.outdated.remove(name);
        }
    }

    /// Marks the requests of all nodes without an outcome.
    pub fn set_outdated(&mut self) {
        let requested = |state: &NodeState| matches!(state, NodeState::Assigned | NodeState::Pulling);
        let requested = self.nodes.iter().filter(|(_, state)| requested(state));
        self.outdated.extend(requested.map(|(name, _)| Arc::clone(name)));
        self.has_new_outdated = !self.outdated.is_empty();
    }

    /// Processes a Pod; returns the nodes that the job newly selects or no longer selects.
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

    /// The number of nodes, and how many of them have an outcome.
    #[must_use]
    pub fn desired_and_finished(&self) -> (usize, usize) {
        (self.nodes.len(), self.succeeded + self.failed.len())
    }

    /// The progress of the job, optionally with the names of unfinished nodes.
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
            put_aside: if with_unfinished {
                self.pending_later.not_ready.clone()
            } else {
                BTreeSet::new()
            },
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

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
    use proptest::prelude::*;

    use super::*;
    use kruise_api::image_pull_job::{ImagePullJob, ImagePullJobSpec};

    const NODES: usize = 8;

    #[test]
    fn state_of_a_node_is_one_byte() {
        assert_eq!(size_of::<NodeState>(), 1);
    }

    #[derive(Clone, Copy, Debug)]
    enum Op {
        SetState(usize, Option<NodeState>),
        SetGroup(usize, NodeGroup),
        Assign,
    }

    fn any_op() -> impl Strategy<Value = Op> {
        let states = vec![
            None,
            Some(NodeState::Pending),
            Some(NodeState::Pulling),
            Some(NodeState::Succeeded),
            Some(NodeState::Failed),
        ];
        let groups = vec![NodeGroup::Ready, NodeGroup::Cordoned, NodeGroup::NotReady];
        prop_oneof![
            (0..NODES, prop::sample::select(states)).prop_map(|(node, state)| Op::SetState(node, state)),
            (0..NODES, prop::sample::select(groups)).prop_map(|(node, group)| Op::SetGroup(node, group)),
            Just(Op::Assign),
        ]
    }

    proptest! {
        /// Nodes come in the order of their groups and names, whatever happened to them before, and none that is not ready
        /// before all others have finished.
        #[test]
        fn next_node_is_the_first_pending_one(ops in prop::collection::vec(any_op(), 0..60)) {
            let spec = ImagePullJobSpec {
                image: "nginx:1".to_owned(),
                parallelism: Some(IntOrString::Int(3)),
                ..ImagePullJobSpec::default()
            };
            let mut job = RunningJob::new(PullJob::from_object(&ImagePullJob::new("j", spec)), None);
            let name = |node: usize| -> NodeName { format!("n{node}").into() };
            let (mut states, mut groups) = ([None; NODES], [NodeGroup::Ready; NODES]);
            for op in ops {
                match op {
                    Op::SetState(node, state) => {
                        job.set_state(&name(node), state, groups[node]);
                        states[node] = state;
                    }
                    Op::SetGroup(node, group) => {
                        job.set_group(&name(node), group);
                        groups[node] = group;
                    }
                    Op::Assign => {
                        let is_active = |state: &&Option<NodeState>| {
                            matches!(state, Some(NodeState::Assigned | NodeState::Pulling))
                        };
                        let active = states.iter().filter(is_active).count();
                        let is_pending = |node: usize| states[node] == Some(NodeState::Pending);
                        let is_ready = |node: usize| groups[node] != NodeGroup::NotReady;
                        let pulls = (0..NODES).any(|node| is_active(&&states[node]) && is_ready(node));
                        let pending = (0..NODES).filter(|node| is_pending(*node));
                        let next = pending.min_by_key(|node| (groups[*node], *node));
                        let next = next.filter(|node| active < 3 && (is_ready(*node) || !pulls));
                        prop_assert_eq!(job.assign_next(Timestamp::UNIX_EPOCH), next.map(name));
                        if let Some(node) = next {
                            states[node] = Some(NodeState::Assigned);
                        }
                    }
                }
                let is_assigned = |node: &usize| states[*node] == Some(NodeState::Assigned);
                let assigned: Vec<NodeName> = (0..NODES).filter(is_assigned).map(name).collect();
                prop_assert_eq!(job.assigned_at.keys().cloned().collect::<Vec<_>>(), assigned);
            }
        }
    }
}
