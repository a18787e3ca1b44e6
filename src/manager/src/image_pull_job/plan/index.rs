//! Which job waits for what on which node: updated change by change.
//!
//! A change of a NodeImage's status affects only the jobs that own the changed tag, so its cost does not grow with the
//! number of jobs or nodes. Only a new node, a change of a node's labels, and a new job check all jobs or all nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::entry::{NeededAccounts, NeededSecrets, secret_key};
use super::job::{NodeTargets, PullJob, Uid};
use super::pending_nodes::PendingNodes;
use super::registry_limit::RegistryLimit;
use super::running_job::{NodeGroup, NodeName, NodeState, RunningJob, TagState};
use super::status::JobCounters;
use crate::view::{NodeImageView, NodeView, PodView, TagStatusView};
use kruise_api::node_image::{ImagePullPhase, ReferenceObject};
use kruise_api::time::{add_seconds, is_over};
use kruise_cluster::Key;

/// Pull secrets of one namespace that are used for one image on a node, at most: the daemon reads them one by one.
pub const MAX_SECRETS_OF_NAMESPACE: usize = 64;
/// The same for service accounts: for each, the daemon requests a token and calls plugins.
pub const MAX_ACCOUNTS_OF_NAMESPACE: usize = 4;
/// How long a node may stay assigned without the watch showing it; after that it is assigned again.
const ASSIGNMENT_TIMEOUT: SignedDuration = SignedDuration::from_secs(30);
/// Delay before a node that refused a job that never ends is tried again: its NodeImage may have room by then.
const REFUSED_RETRY_DELAY: SignedDuration = SignedDuration::from_secs(600);
/// Delay of a job whose assignment panicked.
const PANIC_RETRY_DELAY: SignedDuration = SignedDuration::from_secs(5);

/// Seconds after which a daemon without a status of an image is reported. A daemon answers at once, even if the image
/// has to queue or its last status could not be written.
const UNRESPONSIVE_SECONDS: i64 = 10;
/// The same after the job's deadline, when there is no more time to wait.
const UNRESPONSIVE_AT_DEADLINE: i64 = 2;

/// All running jobs and their nodes.
#[derive(Default)]
pub struct JobIndex {
    nodes: HashMap<NodeName, Arc<NodeImageView>>,
    pending_nodes: PendingNodes,
    /// All Nodes.
    node_views: HashMap<NodeName, Arc<NodeView>>,
    pods: HashMap<Key, Arc<PodView>>,
    jobs: HashMap<Uid, RunningJob>,
    /// By image name, then by tag.
    by_tag: HashMap<String, HashMap<String, BTreeSet<Uid>>>,
    /// The copies of pull secrets that an image needs, until one of its jobs changes: each write of a NodeImage needs
    /// them, and an image may have thousands of jobs.
    secrets_of_images: HashMap<String, NeededSecrets>,
    /// The same for service accounts.
    accounts_of_images: HashMap<String, NeededAccounts>,
    /// Jobs whose status may differ from the written one.
    dirty: HashSet<Uid>,
    /// Removed jobs.
    removed: Vec<Uid>,
    /// Jobs that may have nodes to assign.
    assignable: BTreeSet<Uid>,
    /// When jobs were assigned nodes.
    assignments: VecDeque<(Timestamp, Uid)>,
    /// Nodes whose NodeImage has refused a job that never ends, and when; they are tried again.
    refused: VecDeque<(Timestamp, NodeName, Uid)>,
    newly_refused: Vec<(NodeName, Uid)>,
    /// Jobs whose assignment panicked, and when: they are assigned no nodes for a while, and are checked then.
    delayed_jobs: BTreeMap<Uid, Timestamp>,
    registry_limit: RegistryLimit,
}

/// State of a job's tag on a node, from its NodeImage.
fn tag_state(view: &NodeImageView, image: &str, tag: &str, uid: &str) -> TagState {
    let Some(entry) = view.tag(image, tag) else {
        return TagState::NotOwned;
    };
    if !entry.owners.iter().any(|o| o.uid == uid) {
        return TagState::NotOwned;
    }
    match view.status_of(entry).map(|s| &s.phase) {
        Some(ImagePullPhase::Succeeded) => TagState::Succeeded,
        Some(ImagePullPhase::Failed) => TagState::Failed,
        Some(_) => TagState::Pulling,
        None => TagState::Requested(entry.created),
    }
}

/// Whether the pull of that version has ended, or its tag was removed.
fn pull_ended(view: &NodeImageView, image: &str, tag: &str, version: i64) -> bool {
    view.tag(image, tag).is_none_or(|entry| {
        let finished = || view.status_of(entry).is_some_and(TagStatusView::ended);
        entry.version > version || (entry.version == version && finished())
    })
}

impl JobIndex {
    /// An empty index; NodeImages are created when their Nodes have been ready for `delay`.
    #[must_use]
    pub fn new(delay: SignedDuration, registry_limit: RegistryLimit) -> Self {
        let mut index = Self {
            registry_limit,
            ..Self::default()
        };
        index.pending_nodes.delay = delay;
        index
    }

    /// Tells the limit of registries on how many nodes a job pulls now.
    fn count_pulls(&mut self, uid: &Uid) {
        if let Some(work) = self.jobs.get(uid) {
            self.registry_limit.set_pulls(uid, &work.job, work.pulls());
        }
    }

    /// Adds or updates a job. A finished job is removed; one that was not started starts `now`.
    pub fn upsert_job(&mut self, mut job: PullJob, now: Timestamp) {
        let uid: Uid = job.uid.as_str().into();
        if job.is_finished() {
            self.remove_job(&uid);
            return;
        }
        let existing = self.jobs.get_mut(&uid);
        let started = existing.as_ref().and_then(|w| w.job.status.start_time.clone());
        // As it is stored; otherwise the status would differ from the written one for ever.
        let start = Timestamp::from_second(now.as_second()).unwrap_or(now);
        job.status
            .start_time
            .get_or_insert(started.unwrap_or(Time(start)));
        self.dirty.insert(Arc::clone(&uid));
        self.assignable.insert(Arc::clone(&uid));
        let Some(work) = existing else {
            self.insert_job(uid, RunningJob::new(job, None));
            return;
        };
        if work.job.image == job.image && work.job.targets == job.targets {
            work.update(job);
            return;
        }
        let secrets = work.secrets.take();
        self.detach_job(&uid);
        self.insert_job(uid, RunningJob::new(job, secrets));
    }

    fn insert_job(&mut self, uid: Uid, mut work: RunningJob) {
        if let Ok((image, tag)) = &work.job.image {
            self.secrets_of_images.remove(image);
            self.accounts_of_images.remove(image);
            let tags = self.by_tag.entry(image.clone()).or_default();
            tags.entry(tag.clone()).or_default().insert(Arc::clone(&uid));
        }
        if let NodeTargets::Pods(_) = work.job.targets {
            for (key, pod) in &self.pods {
                work.update_pod(key, Some(pod));
            }
        }
        for (name, view) in &self.nodes {
            sync_node(&mut work, name, Some(view), group_of(&self.node_views, name));
        }
        // The view of a NodeImage has no limits to compare with.
        work.set_outdated();
        self.dirty.insert(Arc::clone(&uid));
        self.assignable.insert(Arc::clone(&uid));
        self.jobs.insert(Arc::clone(&uid), work);
        self.count_pulls(&uid);
    }

    /// Removes a job.
    pub fn remove_job(&mut self, uid: &Uid) {
        self.detach_job(uid);
        self.removed.push(Arc::clone(uid));
    }

    fn detach_job(&mut self, uid: &Uid) {
        let Some(work) = self.jobs.remove(uid) else {
            return;
        };
        if let Ok((image, tag)) = &work.job.image
            && let Some(tags) = self.by_tag.get_mut(image)
        {
            self.secrets_of_images.remove(image);
            self.accounts_of_images.remove(image);
            if let Some(jobs) = tags.get_mut(tag) {
                jobs.remove(uid);
            }
            tags.retain(|_, jobs| !jobs.is_empty());
            if tags.is_empty() {
                self.by_tag.remove(image);
            }
        }
        self.dirty.remove(uid);
        self.assignable.remove(uid);
        self.registry_limit.remove(uid);
    }

    /// The copies of a job's pull secrets exist; before this, a job with pull secrets is assigned no nodes.
    pub fn set_secrets(&mut self, uid: &Uid, copies: Vec<ReferenceObject>) {
        if let Some(work) = self.jobs.get_mut(uid) {
            if work.secrets.as_ref().is_some_and(|known| *known != copies) {
                // Nodes that pull already have the earlier references.
                work.set_outdated();
            }
            if let Ok((image, _)) = &work.job.image {
                self.secrets_of_images.remove(image);
            }
            work.secrets = Some(copies);
            if work.blocked_reason.take().is_some() {
                self.dirty.insert(Arc::clone(uid));
            }
            self.assignable.insert(Arc::clone(uid));
        }
    }

    /// The copies of a job's pull secrets cannot be created. Existing copies are still used.
    pub fn block(&mut self, uid: &Uid, why: String) {
        if let Some(work) = self.jobs.get_mut(uid)
            && work.secrets.is_none()
        {
            work.blocked_reason = Some(why);
            self.dirty.insert(Arc::clone(uid));
        }
    }

    /// Processes a NodeImage that is new, changed or deleted.
    pub fn update_node_image(&mut self, name: &str, new: Option<Arc<NodeImageView>>, now: Timestamp) {
        let name: NodeName = name.into();
        let new = new.filter(|v| !v.terminating);
        let old = match &new {
            Some(view) => self.nodes.insert(Arc::clone(&name), Arc::clone(view)),
            None => self.nodes.remove(&name),
        };
        if new.is_some() {
            self.pending_nodes.node_image_created(&name);
        } else {
            // It is created again while its Node is there.
            let node = self.node_views.get(&name).map(AsRef::as_ref);
            self.pending_nodes.observe_node(&name, node, false, now);
        }
        let (Some(old), Some(new)) = (&old, &new) else {
            if old.is_some() || new.is_some() {
                self.sync_node_for_all_jobs(&name, new.as_deref());
            }
            return;
        };
        if old.uid != new.uid {
            // A new object with the same name: the results of the old one are void.
            self.sync_node_for_all_jobs(&name, None);
        }
        if old.uid != new.uid || old.labels != new.labels {
            self.sync_node_for_all_jobs(&name, Some(new));
            return;
        }
        for uid in self.affected_jobs(old, new) {
            self.sync_node_for_job(&uid, &name, Some(new));
        }
    }

    /// The jobs that own a tag which differs between two versions of a NodeImage.
    fn affected_jobs(&self, old: &NodeImageView, new: &NodeImageView) -> BTreeSet<Uid> {
        let changed = new.tags.iter().filter(|tag| {
            old.tag(&tag.image, &tag.tag) != Some(tag) || old.status_of(tag) != new.status_of(tag)
        });
        let removed = old
            .tags
            .iter()
            .filter(|tag| new.tag(&tag.image, &tag.tag).is_none());
        changed
            .chain(removed)
            .filter_map(|tag| self.by_tag.get(&tag.image)?.get(&tag.tag))
            .flatten()
            .cloned()
            .collect()
    }

    fn sync_node_for_all_jobs(&mut self, name: &NodeName, view: Option<&NodeImageView>) {
        let uids: Vec<Uid> = self.jobs.keys().cloned().collect();
        for uid in uids {
            self.sync_node_for_job(&uid, name, view);
        }
    }

    fn sync_node_for_job(&mut self, uid: &Uid, name: &NodeName, view: Option<&NodeImageView>) {
        let group = group_of(&self.node_views, name);
        if let Some(work) = self.jobs.get_mut(uid)
            && sync_node(work, name, view, group)
        {
            self.dirty.insert(Arc::clone(uid));
            self.assignable.insert(Arc::clone(uid));
            self.count_pulls(uid);
        }
    }

    /// Processes a Node that is new, changed or deleted.
    pub fn update_node(&mut self, name: &str, node: Option<&Arc<NodeView>>, now: Timestamp) {
        let name: NodeName = name.into();
        let old = match node {
            Some(node) => self.node_views.insert(Arc::clone(&name), Arc::clone(node)),
            None => self.node_views.remove(&name),
        };
        let node = node.map(AsRef::as_ref);
        let group = NodeGroup::of(node);
        // A node whose Node was deleted keeps its group: its NodeImage is about to be deleted, too.
        if node.is_some() && old.is_none_or(|old| NodeGroup::of(Some(&old)) != group) {
            self.set_group(&name, group);
        }
        let has_image = self.nodes.contains_key(&name);
        if self.pending_nodes.observe_node(&name, node, has_image, now) {
            self.dirty.extend(self.jobs.keys().cloned());
        }
    }

    /// Updates the group of a node for the jobs for which it has not finished: it may have its turn now, or others.
    fn set_group(&mut self, name: &NodeName, group: NodeGroup) {
        for (uid, work) in &mut self.jobs {
            if work.set_group(name, group) {
                self.assignable.insert(Arc::clone(uid));
                self.registry_limit.set_pulls(uid, &work.job, work.pulls());
                // The only state of a node that its group changes in the status.
                if work.unresponsive().any(|(silent, _)| silent == name) {
                    self.dirty.insert(Arc::clone(uid));
                }
            }
        }
    }

    /// Processes a Pod that is new, changed or deleted.
    pub fn update_pod(&mut self, key: &Key, new: Option<Arc<PodView>>) {
        let mut changed = Vec::new();
        for (uid, work) in &mut self.jobs {
            for node in work.update_pod(key, new.as_deref()) {
                changed.push((Arc::clone(uid), node));
            }
        }
        match new {
            Some(pod) => self.pods.insert(key.clone(), pod),
            None => self.pods.remove(key),
        };
        for (uid, node) in changed {
            let view = self.nodes.get(&node).cloned();
            self.sync_node_for_job(&uid, &node, view.as_deref());
        }
    }

    /// The jobs that may have nodes to assign, in the order of their turns; clears the list.
    pub fn take_assignable(&mut self, now: Timestamp) -> Vec<Uid> {
        self.expire_assignments(now);
        self.retry_refused(now);
        for uid in self.registry_limit.take_ready() {
            self.dirty.insert(Arc::clone(&uid));
            self.assignable.insert(uid);
        }
        let assignable = &mut self.assignable;
        self.delayed_jobs.retain(|uid, at| {
            let early = !is_over(*at, PANIC_RETRY_DELAY, now);
            if early {
                assignable.remove(uid);
            } else {
                assignable.insert(Arc::clone(uid));
            }
            early
        });
        let mut jobs: Vec<Uid> = std::mem::take(&mut self.assignable).into_iter().collect();
        jobs.sort_by_cached_key(|uid| self.registry_limit.turn(uid));
        jobs
    }

    /// Delays a job whose assignment panicked.
    pub fn delay_job(&mut self, uid: &Uid, now: Timestamp) {
        self.delayed_jobs.insert(Arc::clone(uid), now);
    }

    /// Assigns nodes to a job, up to its parallelism. They count as active from now on. After an edit of the job, the nodes
    /// that have not finished are among them. Under a limit of registries the job gets one node, and has another turn after
    /// the others.
    pub fn assign(&mut self, uid: &Uid, now: Timestamp) -> Vec<NodeName> {
        let mut nodes = Vec::new();
        let Some(work) = self.jobs.get_mut(uid) else {
            return nodes;
        };
        nodes.extend(work.take_outdated());
        let is_limited = self.registry_limit.max().is_some();
        if self.registry_limit.full(uid).is_some() {
            if work.next_node().is_some() && self.registry_limit.wait(uid) {
                self.dirty.insert(Arc::clone(uid));
            }
            return nodes;
        }
        while let Some(node) = work.assign_next(now) {
            if self.assignments.back() != Some(&(now, Arc::clone(uid))) {
                self.assignments.push_back((now, Arc::clone(uid)));
            }
            self.dirty.insert(Arc::clone(uid));
            nodes.push(node);
            if is_limited {
                self.assignable.insert(Arc::clone(uid));
                break;
            }
        }
        self.count_pulls(uid);
        nodes
    }

    /// Releases nodes whose assignment the watch never showed.
    fn expire_assignments(&mut self, now: Timestamp) {
        while let Some((at, uid)) = self
            .assignments
            .pop_front_if(|(at, _)| is_over(*at, ASSIGNMENT_TIMEOUT, now))
        {
            let Some(work) = self.jobs.get_mut(&uid) else {
                continue;
            };
            for node in work.nodes_assigned_at(at) {
                let group = group_of(&self.node_views, &node);
                work.set_state(&node, Some(NodeState::Pending), group);
                self.assignable.insert(Arc::clone(&uid));
            }
            self.count_pulls(&uid);
        }
    }

    /// Gives nodes that refused a job another turn: it is not called again for them.
    fn retry_refused(&mut self, now: Timestamp) {
        let new = std::mem::take(&mut self.newly_refused).into_iter();
        self.refused.extend(new.map(|(node, uid)| (now, node, uid)));
        while let Some((at, ..)) = self.refused.front()
            && is_over(*at, REFUSED_RETRY_DELAY, now)
        {
            let Some((_, node, uid)) = self.refused.pop_front() else {
                return;
            };
            let state = self.jobs.get(&uid).and_then(|work| work.state(&node));
            if state == Some(NodeState::Failed) {
                // It may have been written meanwhile, and its pull failed.
                let view = self.nodes.get(&node).cloned();
                self.sync_node_for_job(&uid, &node, view.as_deref());
            }
        }
    }

    /// When [`JobIndex::take_assignable`] must be called although nothing has changed.
    #[must_use]
    pub fn next_requeue(&self) -> Option<Timestamp> {
        let next_timeout = self
            .assignments
            .front()
            .and_then(|(at, ..)| at.checked_add(ASSIGNMENT_TIMEOUT).ok());
        let next_retry = self
            .refused
            .front()
            .and_then(|(at, ..)| at.checked_add(REFUSED_RETRY_DELAY).ok());
        let delayed = self.delayed_jobs.values().min();
        let next_delayed = delayed.and_then(|at| at.checked_add(PANIC_RETRY_DELAY).ok());
        next_timeout
            .into_iter()
            .chain(next_retry)
            .chain(next_delayed)
            .min()
    }

    /// Whether a job's request to a node has to be written: it has none yet, or one that may be older than its spec.
    #[must_use]
    pub fn needs_write(&self, uid: &Uid, node: &NodeName) -> bool {
        self.is_assigned(uid, node) || self.is_outdated(uid, node)
    }

    fn is_outdated(&self, uid: &Uid, node: &NodeName) -> bool {
        self.jobs.get(uid).is_some_and(|work| work.is_outdated(node))
    }

    /// Whether a job waits for its entry in a NodeImage.
    #[must_use]
    pub fn is_assigned(&self, uid: &Uid, node: &NodeName) -> bool {
        let state = self.jobs.get(uid).and_then(|work| work.state(node));
        state == Some(NodeState::Assigned)
    }

    /// A job's request to a node cannot be written now, and will be retried.
    pub fn write_delayed(&mut self, uid: &Uid, node: &NodeName, why: &str) {
        if self.is_assigned(uid, node)
            && let Some(work) = self.jobs.get_mut(uid)
        {
            work.set_node_message(node, why);
            self.dirty.insert(Arc::clone(uid));
        }
    }

    /// The request of `job` to a node was written, or waits for the end of the pull of that version.
    pub fn write_succeeded(&mut self, job: &PullJob, node: &NodeName, awaited_pull: Option<i64>) {
        let uid = &Uid::from(job.uid.as_str());
        if let Some(work) = self.jobs.get_mut(uid) {
            work.request_written(node, job);
        }
        let view = self.nodes.get(node);
        let assigned = self.is_assigned(uid, node);
        let Some(work) = self.jobs.get_mut(uid).filter(|_| assigned) else {
            return;
        };
        // What delayed the write is over.
        let was_delayed = work.remove_node_message(node);
        if work.awaited_pull(node) != awaited_pull || was_delayed {
            work.set_awaited_pull(node, awaited_pull);
            self.dirty.insert(Arc::clone(uid));
        }
        // If the watch does not show the tag yet, its pull has not ended.
        if let (Some(_), Some(view), Ok((image, tag))) = (awaited_pull, view, &work.job.image)
            && view.tag(image, tag).is_some()
        {
            let view = Arc::clone(view);
            self.sync_node_for_job(uid, node, Some(&view));
        }
    }

    /// The API server refuses the request of `job` to a node permanently. A pull that was requested before goes on.
    pub fn write_refused(&mut self, job: &PullJob, node: &NodeName, why: &str) {
        let uid = &Uid::from(job.uid.as_str());
        let assigned = self.is_assigned(uid, node);
        let Some(work) = self.jobs.get_mut(uid) else {
            return;
        };
        work.request_written(node, job);
        if assigned {
            work.set_state(node, Some(NodeState::Failed), NodeGroup::Ready);
            work.set_node_message(node, why);
            if work.job.never_ends() {
                self.newly_refused.push((Arc::clone(node), Arc::clone(uid)));
            }
            self.dirty.insert(Arc::clone(uid));
            self.assignable.insert(Arc::clone(uid));
            self.count_pulls(uid);
        }
    }

    /// The jobs whose status may differ from the written one; clears the list.
    pub fn take_dirty(&mut self) -> Vec<Uid> {
        self.dirty.drain().collect()
    }

    /// The removed jobs; clears the list.
    pub fn take_removed(&mut self) -> Vec<Uid> {
        std::mem::take(&mut self.removed)
    }

    /// The job with that UID while it runs.
    #[must_use]
    pub fn job(&self, uid: &Uid) -> Option<Arc<PullJob>> {
        self.jobs.get(uid).map(|w| Arc::clone(&w.job))
    }

    /// Whether every node of the job has an outcome, or the job cannot get any.
    #[must_use]
    pub fn is_finished(&self, uid: &Uid) -> bool {
        self.jobs.get(uid).is_some_and(|work| {
            let (desired, done) = work.desired_and_finished();
            let job = &work.job;
            let is_invalid = job.image.is_err() || job.parallelism.is_err() || job.schedule.is_err();
            (desired == done && desired > 0) || is_invalid
        })
    }

    /// The copies of the job's pull secrets.
    #[must_use]
    pub fn secret_copies(&self, uid: &Uid) -> &[ReferenceObject] {
        let work = self.jobs.get(uid);
        work.and_then(|w| w.secrets.as_deref()).unwrap_or_default()
    }

    /// The copies of pull secrets that the running jobs of an image need, at most [`MAX_SECRETS_OF_NAMESPACE`] of each
    /// namespace; `None` while those of one that pulls are unknown.
    #[must_use]
    pub fn needed_secrets(&mut self, image: &str) -> Option<NeededSecrets> {
        let jobs: Vec<&RunningJob> = self.jobs_of_image(image).collect();
        // One whose secrets are unknown requests nothing before, unless an earlier leader did for it.
        if jobs.iter().any(|work| work.secrets.is_none() && work.is_active()) {
            return None;
        }
        if let Some(needed) = self.secrets_of_images.get(image) {
            return Some(needed.clone());
        }
        let mut by_namespace: BTreeMap<Option<&str>, NeededSecrets> = BTreeMap::new();
        for work in jobs {
            let namespace = work.job.key.namespace.as_deref();
            let secrets = work.secrets.iter().flatten().map(secret_key);
            by_namespace.entry(namespace).or_default().extend(secrets);
        }
        let first = |secrets: NeededSecrets| secrets.into_iter().take(MAX_SECRETS_OF_NAMESPACE);
        let needed: NeededSecrets = by_namespace.into_values().flat_map(first).collect();
        self.secrets_of_images.insert(image.to_owned(), needed.clone());
        Some(needed)
    }

    /// How many of a job's copies are not among the [needed ones](JobIndex::needed_secrets) of its image, because its
    /// namespace has too many; `None` if there are none, or they were returned before.
    pub fn take_excess_secrets(&mut self, uid: &Uid) -> Option<usize> {
        let work = self.jobs.get_mut(uid)?;
        let (image, _) = work.job.image.as_ref().ok()?;
        let needed = self.secrets_of_images.get(image)?;
        if work.excess_secrets_reported || needed.len() < MAX_SECRETS_OF_NAMESPACE {
            return None;
        }
        let copies = work.secrets.iter().flatten();
        let excess = copies.filter(|copy| !needed.contains(&secret_key(copy))).count();
        work.excess_secrets_reported = excess > 0;
        work.excess_secrets_reported.then_some(excess)
    }

    /// The service accounts of the running jobs of an image, at most [`MAX_ACCOUNTS_OF_NAMESPACE`] of each namespace.
    #[must_use]
    pub fn needed_accounts(&mut self, image: &str) -> NeededAccounts {
        if let Some(needed) = self.accounts_of_images.get(image) {
            return needed.clone();
        }
        let mut by_namespace: BTreeMap<String, NeededAccounts> = BTreeMap::new();
        for account in self
            .jobs_of_image(image)
            .filter_map(|work| work.job.service_account())
        {
            let accounts = by_namespace.entry(account.namespace.clone()).or_default();
            accounts.insert(account);
        }
        let first = |accounts: NeededAccounts| accounts.into_iter().take(MAX_ACCOUNTS_OF_NAMESPACE);
        let needed: NeededAccounts = by_namespace.into_values().flat_map(first).collect();
        self.accounts_of_images.insert(image.to_owned(), needed.clone());
        needed
    }

    /// The running jobs of an image, with any tag.
    fn jobs_of_image(&self, image: &str) -> impl Iterator<Item = &RunningJob> {
        let tags = self.by_tag.get(image).into_iter();
        let uids = tags.flat_map(HashMap::values).flatten();
        uids.filter_map(move |uid| self.jobs.get(uid))
    }

    /// The NodeImage of a node.
    #[must_use]
    pub fn node_image_view(&self, name: &str) -> Option<Arc<NodeImageView>> {
        self.nodes.get(name).cloned()
    }

    /// The progress of a job at `now`. With `past_deadline`, it includes the names of unfinished nodes, and daemons
    /// without a status count as unresponsive after a shorter time.
    #[must_use]
    pub fn counters(&self, uid: &Uid, past_deadline: bool, now: Timestamp) -> Option<JobCounters> {
        let work = self.jobs.get(uid)?;
        let mut counters = work.counters(past_deadline);
        if let NodeTargets::Names(names) = &work.job.targets {
            let has_node_image = |n: &&String| self.nodes.contains_key(n.as_str());
            counters.unknown_nodes = names.iter().filter(|n| !has_node_image(n)).cloned().collect();
        }
        if let Ok((image, tag)) = &work.job.image {
            counters.pulled = work.pulled_bytes(|name| {
                self.nodes
                    .get(name)?
                    .status(image, tag)?
                    .bytes
                    .as_deref()
                    .copied()
            });
        }
        let waits = counters.active == 0 && self.registry_limit.is_waiting(uid);
        counters.registry_full = self.registry_limit.full(uid).filter(|_| waits);
        (counters.pending_nodes, counters.pending_until) = self.pending_nodes.pending_for(work, now);
        for (name, since) in work.unresponsive() {
            let deadline = add_seconds(
                since,
                if past_deadline {
                    UNRESPONSIVE_AT_DEADLINE
                } else {
                    UNRESPONSIVE_SECONDS
                },
            );
            if now < deadline {
                counters.next_unresponsive_at = Some(
                    counters
                        .next_unresponsive_at
                        .map_or(deadline, |first| first.min(deadline)),
                );
            } else if group_of(&self.node_views, name) == NodeGroup::NotReady {
                counters.not_ready.insert(Arc::clone(name));
            } else {
                counters.unresponsive.insert(Arc::clone(name));
            }
        }
        Some(counters)
    }
}

/// The group of a node.
fn group_of(nodes: &HashMap<NodeName, Arc<NodeView>>, name: &str) -> NodeGroup {
    NodeGroup::of(nodes.get(name).map(AsRef::as_ref))
}

/// Updates one node of one job; true when anything changed.
fn sync_node(work: &mut RunningJob, name: &NodeName, view: Option<&NodeImageView>, group: NodeGroup) -> bool {
    let member = view.filter(|v| work.includes(name, &v.labels));
    let (Some(view), Ok((image, tag))) = (member, &work.job.image) else {
        let changed = work.set_state(name, member.map(|_| NodeState::Pending), group);
        return work.set_unresponsive(name, None) || changed;
    };
    let tag_state = tag_state(view, image, tag, &work.job.uid);
    let awaited = work.awaited_pull(name);
    let ended = awaited.is_some_and(|version| pull_ended(view, image, tag, version));
    let old = work
        .state(name)
        .map(|old| if ended { NodeState::Pending } else { old });
    let new = work.next_state(old, tag_state);
    let unresponsive_since = match (new, tag_state) {
        (NodeState::Pulling, TagState::Requested(since)) => since,
        _ => None,
    };
    let status = view.status(image, tag);
    let error = status.and_then(|status| status.error.clone());
    if let Some(bytes) = status.and_then(|status| status.bytes.as_deref()) {
        work.set_image_bytes(bytes.total);
    }
    if ended {
        work.set_awaited_pull(name, None);
    }
    let changed = work.set_state(name, Some(new), group);
    if let (true, NodeState::Failed, Some(error)) = (changed, new, error) {
        work.set_node_message(name, &error);
    }
    work.set_unresponsive(name, unresponsive_since) || changed || ended
}

#[cfg(test)]
mod tests;

#[cfg(test)]
impl JobIndex {
    pub(super) fn node_states(&self, uid: &Uid) -> std::collections::BTreeMap<NodeName, NodeState> {
        self.jobs
            .get(uid)
            .map(RunningJob::node_states)
            .unwrap_or_default()
    }
}
