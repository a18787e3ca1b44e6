//! One running job: the state of each of its nodes, and the counts of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use jiff::Timestamp;

use super::job::{Job, Targets};
use super::status::Tally;
use crate::view::{PodView, matches};
use kruise_api::node_image::ReferenceObject;
use kruise_cluster::Key;

/// Name of a node.
pub type NodeName = Arc<str>;

/// How far a node of a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
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
pub enum Seen {
    /// The job does not own the tag.
    Nothing,
    /// It does since then, and the daemon has not said anything about it.
    Asked(Option<Timestamp>),
    /// It does, and there is no outcome.
    Pulling,
    /// The tag is there.
    Succeeded,
    /// The tag failed.
    Failed,
}

/// Of how many nodes it is known why they fail or wait.
const NOTES: usize = 16;

/// One running job and its nodes.
pub struct Work {
    /// The job.
    pub job: Arc<Job>,
    /// Copies of its pull secrets, once they are there.
    pub secrets: Option<Vec<ReferenceObject>>,
    /// Why there are no copies yet, where something is in the way.
    pub hindrance: Option<String>,
    nodes: BTreeMap<NodeName, State>,
    /// Pending nodes that are ready, and those that are not.
    pending: [BTreeSet<NodeName>; 2],
    active: usize,
    succeeded: usize,
    failed: BTreeSet<NodeName>,
    /// Why nodes failed, or cannot be asked: of some of them.
    notes: BTreeMap<NodeName, String>,
    /// Nodes where the end of a pull is waited for that others asked for before, and its version.
    awaits: BTreeMap<NodeName, i64>,
    /// Nodes whose daemons have not said anything about the image, and since when they are asked for it.
    silent: BTreeMap<NodeName, Timestamp>,
    /// Matching Pods and the node of each; and how many there are on each node.
    pods: HashMap<Key, NodeName>,
    places: HashMap<NodeName, usize>,
}

impl Work {
    /// A job that knows of no node yet. A job without pull secrets need not wait for copies.
    #[must_use]
    pub fn new(job: Job, secrets: Option<Vec<ReferenceObject>>) -> Self {
        let none_needed = job.spec.pull_secrets.is_empty().then(Vec::new);
        Self {
            secrets: none_needed.or(secrets),
            job: Arc::new(job),
            hindrance: None,
            nodes: BTreeMap::new(),
            pending: [BTreeSet::new(), BTreeSet::new()],
            active: 0,
            succeeded: 0,
            failed: BTreeSet::new(),
            notes: BTreeMap::new(),
            awaits: BTreeMap::new(),
            silent: BTreeMap::new(),
            pods: HashMap::new(),
            places: HashMap::new(),
        }
    }

    /// Whether the job is for that node.
    #[must_use]
    pub fn includes(&self, name: &NodeName, labels: &BTreeMap<String, String>) -> bool {
        self.places.contains_key(name) || self.job.targets.include(name, labels)
    }

    /// The state of a node.
    #[must_use]
    pub fn state(&self, name: &NodeName) -> Option<State> {
        self.nodes.get(name).copied()
    }

    /// The next state of a node, after what is seen of it now.
    ///
    /// An outcome stays, although its entry expires or another job asks for the tag again, unless the job
    /// never ends. An assigned node stays so until its entry shows.
    #[must_use]
    pub fn next(&self, old: Option<State>, seen: Seen) -> State {
        match (old, seen) {
            (Some(done @ (State::Succeeded | State::Failed)), _) if !self.job.never_ends() => done,
            (Some(assigned @ State::Assigned(_)), Seen::Nothing) => assigned,
            (_, Seen::Nothing) => State::Pending,
            (_, Seen::Asked(_) | Seen::Pulling) => State::Pulling,
            (_, Seen::Succeeded) => State::Succeeded,
            (_, Seen::Failed) => State::Failed,
        }
    }

    /// Sets the state of a node, `None` when the job is not for it; true when that is a change.
    pub fn set(&mut self, name: &NodeName, new: Option<State>, ready: bool) -> bool {
        let old = match new {
            Some(state) => self.nodes.insert(Arc::clone(name), state),
            None => self.nodes.remove(name),
        };
        if old == new {
            return false;
        }
        self.notes.remove(name);
        if !matches!(new, Some(State::Pending | State::Assigned(_))) {
            self.awaits.remove(name);
        }
        match old {
            Some(State::Pending) => {
                self.pending[0].remove(name);
                self.pending[1].remove(name);
            }
            Some(State::Assigned(_) | State::Pulling) => self.active -= 1,
            Some(State::Succeeded) => self.succeeded -= 1,
            Some(State::Failed) => {
                self.failed.remove(name);
            }
            None => {}
        }
        match new {
            Some(State::Pending) => {
                self.pending[usize::from(!ready)].insert(Arc::clone(name));
            }
            Some(State::Assigned(_) | State::Pulling) => self.active += 1,
            Some(State::Succeeded) => self.succeeded += 1,
            Some(State::Failed) => {
                self.failed.insert(Arc::clone(name));
            }
            None => {}
        }
        true
    }

    /// Why a node failed, or cannot be asked.
    pub fn note(&mut self, name: &NodeName, why: &str) {
        if self.notes.len() < NOTES || self.notes.contains_key(name) {
            self.notes.insert(Arc::clone(name), why.to_owned());
        }
    }

    /// Takes note of the pull whose end is waited for on a node, if any is.
    pub fn wait(&mut self, name: &NodeName, version: Option<i64>) {
        match version {
            Some(version) => self.awaits.insert(Arc::clone(name), version),
            None => self.awaits.remove(name),
        };
    }

    /// The version of the pull whose end is waited for on a node.
    #[must_use]
    pub fn awaits(&self, name: &NodeName) -> Option<i64> {
        self.awaits.get(name).copied()
    }

    /// Takes note of whether a node's daemon has said anything; true when that is a change.
    pub fn heard(&mut self, name: &NodeName, silent: Option<Timestamp>) -> bool {
        let old = match silent {
            Some(since) => self.silent.insert(Arc::clone(name), since),
            None => self.silent.remove(name),
        };
        old != silent
    }

    /// The nodes whose daemons say nothing, and since when.
    pub fn silent(&self) -> impl Iterator<Item = (&NodeName, Timestamp)> {
        self.silent.iter().map(|(name, since)| (name, *since))
    }

    /// A node became ready or ceased to be.
    pub fn ready(&mut self, name: &NodeName, ready: bool) {
        let (to, from) = (usize::from(!ready), usize::from(ready));
        if self.pending[from].remove(name) {
            self.pending[to].insert(Arc::clone(name));
        }
    }

    /// Takes a pending node if one may be asked now, ready ones first, in the order of their names.
    pub fn take(&mut self, now: Timestamp) -> Option<NodeName> {
        let (Ok(_), Ok(limit)) = (&self.job.image, &self.job.parallelism) else {
            return None;
        };
        if self.secrets.is_none() || self.active >= *limit {
            return None;
        }
        let [ready, unready] = &self.pending;
        let name = ready.first().or_else(|| unready.first()).cloned()?;
        self.set(&name, Some(State::Assigned(now)), true);
        Some(name)
    }

    /// Takes in a Pod; returns the nodes that have become or ceased to be the job's.
    pub fn put_pod(&mut self, key: &Key, new: Option<&PodView>) -> Vec<NodeName> {
        let Targets::Pods(selector) = &self.job.targets else {
            return Vec::new();
        };
        if key.namespace != self.job.key.namespace {
            return Vec::new();
        }
        let wanted = new.filter(|p| p.active() && matches(selector, &p.labels));
        let node: Option<NodeName> = wanted.and_then(|p| p.node.as_deref()).map(Into::into);
        let old = match &node {
            Some(node) => self.pods.insert(key.clone(), Arc::clone(node)),
            None => self.pods.remove(key),
        };
        if old == node {
            return Vec::new();
        }
        let mut moved = Vec::new();
        if let Some(left) = old
            && let Some(count) = self.places.get_mut(&left)
        {
            *count -= 1;
            if *count == 0 {
                self.places.remove(&left);
                moved.push(left);
            }
        }
        if let Some(node) = node {
            let count = self.places.entry(Arc::clone(&node)).or_insert(0);
            *count += 1;
            if *count == 1 {
                moved.push(node);
            }
        }
        moved
    }

    /// How many nodes there are, and how many of them have an outcome.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        (self.nodes.len(), self.succeeded + self.failed.len())
    }

    /// How far the job is; with the names of unfinished nodes where asked for.
    #[must_use]
    pub fn tally(&self, unfinished: bool) -> Tally {
        let open = self
            .nodes
            .iter()
            .filter(|(_, state)| !matches!(state, State::Succeeded | State::Failed));
        Tally {
            desired: self.nodes.len(),
            active: self.active,
            succeeded: self.succeeded,
            failed: self.failed.clone(),
            unfinished: if unfinished {
                open.map(|(name, _)| Arc::clone(name)).collect()
            } else {
                BTreeSet::new()
            },
            notes: self.notes.clone(),
            awaits: self.awaits.keys().cloned().collect(),
            hindrance: self.hindrance.clone(),
            ..Tally::default()
        }
    }

    #[cfg(test)]
    pub(super) fn states(&self) -> BTreeMap<NodeName, State> {
        self.nodes.clone()
    }
}
