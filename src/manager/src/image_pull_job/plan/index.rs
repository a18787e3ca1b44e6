//! Which job waits for what on which node: kept up to date change by change.
//!
//! A change of a NodeImage's status touches the jobs that own the changed tag and nothing else, so its cost
//! does not grow with the number of jobs or nodes. Only a new node, a change of a node's labels, and a new
//! job look at all jobs or all nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::awaited::Awaited;
use super::job::{Job, Targets, after};
use super::status::Tally;
use super::work::{NodeName, Seen, State, Work};
use crate::view::{NodeImageView, NodeView, PodView, TagStatusView};
use kruise_api::node_image::{ImagePullPhase, ReferenceObject};
use kruise_cluster::Key;

/// How long a node may stay assigned without the watch showing it; after that it is assigned anew.
const UNSEEN: SignedDuration = SignedDuration::from_secs(30);

/// Seconds after which a daemon that has said nothing about an image is worth a word. It answers at once, also where the
/// image has to queue, and where its last status could not be written.
const SILENCE: i64 = 10;
/// The same where the job's deadline is over, so that there is no more time to wait.
const SILENCE_AT_THE_END: i64 = 2;

/// Identity of a job.
pub type Uid = Arc<str>;

/// All running jobs and the nodes they are for.
#[derive(Default)]
pub struct Index {
    nodes: HashMap<NodeName, Arc<NodeImageView>>,
    unready: HashSet<NodeName>,
    awaited: Awaited,
    pods: HashMap<Key, Arc<PodView>>,
    jobs: HashMap<Uid, Work>,
    by_tag: HashMap<(String, String), BTreeSet<Uid>>,
    /// Jobs whose status may differ from what was written.
    dirty: HashSet<Uid>,
    /// Jobs that were forgotten.
    dropped: Vec<Uid>,
    /// Jobs that may have something to hand out.
    open: BTreeSet<Uid>,
    assigned: VecDeque<(Timestamp, NodeName, Uid)>,
    /// Jobs that are not open before that moment, and are then.
    later: BTreeMap<Uid, Timestamp>,
}

/// How far a node is with a tag that belongs to a job, as its NodeImage says.
fn seen(view: &NodeImageView, image: &str, tag: &str, uid: &str) -> Seen {
    let Some(entry) = view.tag(image, tag) else {
        return Seen::Nothing;
    };
    if !entry.owners.iter().any(|o| o.uid == uid) {
        return Seen::Nothing;
    }
    match view.status_of(entry).map(|s| &s.phase) {
        Some(ImagePullPhase::Succeeded) => Seen::Succeeded,
        Some(ImagePullPhase::Failed) => Seen::Failed,
        Some(_) => Seen::Pulling,
        None => Seen::Asked(entry.created),
    }
}

/// Whether the pull of that version has ended, or its tag has gone.
fn ended(view: &NodeImageView, image: &str, tag: &str, version: i64) -> bool {
    view.tag(image, tag).is_none_or(|entry| {
        let over = || view.status_of(entry).is_some_and(TagStatusView::ended);
        entry.version > version || (entry.version == version && over())
    })
}

impl Index {
    /// An index that knows nothing yet; NodeImages are made when their Nodes have been ready for `delay`.
    #[must_use]
    pub fn new(delay: SignedDuration) -> Self {
        let mut index = Self::default();
        index.awaited.delay = delay;
        index
    }

    /// Takes in a job that is new or has changed. A job that is over is forgotten; one that was not started
    /// starts `now`.
    pub fn put_job(&mut self, mut job: Job, now: Timestamp) {
        let uid: Uid = job.uid.as_str().into();
        if job.over() {
            self.drop_job(&uid);
            return;
        }
        let known = self.jobs.get_mut(&uid);
        let started = known.as_ref().and_then(|w| w.job.status.start_time.clone());
        job.status.start_time.get_or_insert(started.unwrap_or(Time(now)));
        self.dirty.insert(Arc::clone(&uid));
        self.open.insert(Arc::clone(&uid));
        let Some(work) = known else {
            self.insert_job(uid, Work::new(job, None));
            return;
        };
        if work.job.image == job.image && work.job.targets == job.targets {
            work.job = Arc::new(job);
            return;
        }
        let secrets = work.secrets.take();
        self.take_out(&uid);
        self.insert_job(uid, Work::new(job, secrets));
    }

    fn insert_job(&mut self, uid: Uid, mut work: Work) {
        if let Ok(tag) = &work.job.image {
            let jobs = self.by_tag.entry(tag.clone()).or_default();
            jobs.insert(Arc::clone(&uid));
        }
        if let Targets::Pods(_) = work.job.targets {
            for (key, pod) in &self.pods {
                work.put_pod(key, Some(pod));
            }
        }
        for (name, view) in &self.nodes {
            place(&mut work, name, Some(view), !self.unready.contains(name));
        }
        self.dirty.insert(Arc::clone(&uid));
        self.open.insert(Arc::clone(&uid));
        self.jobs.insert(uid, work);
    }

    /// Forgets a job.
    pub fn drop_job(&mut self, uid: &Uid) {
        self.take_out(uid);
        self.dropped.push(Arc::clone(uid));
    }

    fn take_out(&mut self, uid: &Uid) {
        let Some(work) = self.jobs.remove(uid) else {
            return;
        };
        if let Ok(tag) = &work.job.image
            && let Some(jobs) = self.by_tag.get_mut(tag)
        {
            jobs.remove(uid);
            if jobs.is_empty() {
                self.by_tag.remove(tag);
            }
        }
        self.dirty.remove(uid);
        self.open.remove(uid);
    }

    /// The copies of a job's pull secrets are in place; before this a job that has any is not handed out.
    pub fn secrets(&mut self, uid: &Uid, copies: Vec<ReferenceObject>) {
        if let Some(work) = self.jobs.get_mut(uid) {
            work.secrets = Some(copies);
            work.hindrance = None;
            self.open.insert(Arc::clone(uid));
        }
    }

    /// The copies of a job's pull secrets cannot be made. Those that are there serve on.
    pub fn hinder(&mut self, uid: &Uid, why: String) {
        if let Some(work) = self.jobs.get_mut(uid)
            && work.secrets.is_none()
        {
            work.hindrance = Some(why);
            self.dirty.insert(Arc::clone(uid));
        }
    }

    /// Takes in a NodeImage that is new, has changed, or has gone.
    pub fn node_image(&mut self, name: &str, new: Option<Arc<NodeImageView>>) {
        let name: NodeName = name.into();
        let new = new.filter(|v| !v.deleting);
        let old = match &new {
            Some(view) => self.nodes.insert(Arc::clone(&name), Arc::clone(view)),
            None => self.nodes.remove(&name),
        };
        if new.is_some() {
            self.awaited.came(&name);
        }
        let (Some(old), Some(new)) = (&old, &new) else {
            if old.is_some() || new.is_some() {
                self.place_everywhere(&name, new.as_deref());
            }
            return;
        };
        if old.uid != new.uid {
            // Another object of the same name: what the old one had done is gone.
            self.place_everywhere(&name, None);
        }
        if old.uid != new.uid || old.labels != new.labels {
            self.place_everywhere(&name, Some(new));
            return;
        }
        for uid in self.touched(old, new) {
            self.place_one(&uid, &name, Some(new));
        }
    }

    /// The jobs that own a tag which differs between two sights of a NodeImage.
    fn touched(&self, old: &NodeImageView, new: &NodeImageView) -> BTreeSet<Uid> {
        let changed = new.tags.iter().filter(|tag| {
            old.tag(&tag.image, &tag.tag) != Some(tag) || old.status_of(tag) != new.status_of(tag)
        });
        let gone = old
            .tags
            .iter()
            .filter(|tag| new.tag(&tag.image, &tag.tag).is_none());
        let keys = changed
            .chain(gone)
            .map(|tag| (tag.image.clone(), tag.tag.clone()));
        keys.filter_map(|key| self.by_tag.get(&key))
            .flatten()
            .cloned()
            .collect()
    }

    fn place_everywhere(&mut self, name: &NodeName, view: Option<&NodeImageView>) {
        let uids: Vec<Uid> = self.jobs.keys().cloned().collect();
        for uid in uids {
            self.place_one(&uid, name, view);
        }
    }

    fn place_one(&mut self, uid: &Uid, name: &NodeName, view: Option<&NodeImageView>) {
        let ready = !self.unready.contains(name);
        if let Some(work) = self.jobs.get_mut(uid)
            && place(work, name, view, ready)
        {
            self.dirty.insert(Arc::clone(uid));
            self.open.insert(Arc::clone(uid));
        }
    }

    /// Takes in a Node that is new, has changed, or has gone.
    pub fn node_is(&mut self, name: &str, node: Option<&NodeView>, now: Timestamp) {
        self.ready(name, node.is_none_or(|n| n.ready));
        let has_image = self.nodes.contains_key(name);
        if self.awaited.node(&name.into(), node, has_image, now) {
            self.dirty.extend(self.jobs.keys().cloned());
        }
    }

    /// Takes in whether a node is ready; those that are not come last.
    fn ready(&mut self, name: &str, ready: bool) {
        let name: NodeName = name.into();
        let changed = if ready {
            self.unready.remove(&name)
        } else {
            self.unready.insert(Arc::clone(&name))
        };
        if changed {
            for (uid, work) in &mut self.jobs {
                work.ready(&name, ready);
                if work.silent().any(|(silent, _)| *silent == name) {
                    self.dirty.insert(Arc::clone(uid));
                }
            }
        }
    }

    /// Takes in a Pod that is new, has changed, or has gone.
    pub fn pod(&mut self, key: &Key, new: Option<Arc<PodView>>) {
        let mut moved = Vec::new();
        for (uid, work) in &mut self.jobs {
            for node in work.put_pod(key, new.as_deref()) {
                moved.push((Arc::clone(uid), node));
            }
        }
        match new {
            Some(pod) => self.pods.insert(key.clone(), pod),
            None => self.pods.remove(key),
        };
        for (uid, node) in moved {
            let view = self.nodes.get(&node).cloned();
            self.place_one(&uid, &node, view.as_deref());
        }
    }

    /// The jobs that may have something to hand out, each told once.
    pub fn take_open(&mut self, now: Timestamp) -> BTreeSet<Uid> {
        self.take_back(now);
        let open = &mut self.open;
        self.later.retain(|uid, at| {
            let early = now < *at;
            if early {
                open.remove(uid);
            } else {
                open.insert(Arc::clone(uid));
            }
            early
        });
        std::mem::take(&mut self.open)
    }

    /// A job is open again at that moment, and not before.
    pub fn open_at(&mut self, uid: &Uid, at: Timestamp) {
        self.later.insert(Arc::clone(uid), at);
    }

    /// Hands out nodes to a job, as many as it may have at a time. They count as active from now on.
    pub fn assign(&mut self, uid: &Uid, now: Timestamp) -> Vec<NodeName> {
        let mut out = Vec::new();
        let Some(work) = self.jobs.get_mut(uid) else {
            return out;
        };
        while let Some(node) = work.take(now) {
            self.assigned.push_back((now, Arc::clone(&node), Arc::clone(uid)));
            self.dirty.insert(Arc::clone(uid));
            out.push(node);
        }
        out
    }

    /// Frees nodes whose assignment never showed.
    fn take_back(&mut self, now: Timestamp) {
        while let Some((at, _, _)) = self.assigned.front()
            && now.duration_since(*at) >= UNSEEN
        {
            let Some((at, node, uid)) = self.assigned.pop_front() else {
                return;
            };
            if let Some(work) = self.jobs.get_mut(&uid)
                && work.state(&node) == Some(State::Assigned(at))
            {
                work.set(&node, Some(State::Pending), !self.unready.contains(&node));
                self.open.insert(uid);
            }
        }
    }

    /// When [`Index::take_open`] has to be called although nothing has changed.
    #[must_use]
    pub fn wake(&self) -> Option<Timestamp> {
        let unseen = self
            .assigned
            .front()
            .and_then(|(at, ..)| at.checked_add(UNSEEN).ok());
        unseen.into_iter().chain(self.later.values().copied()).min()
    }

    /// Whether a job waits for its entry in a NodeImage.
    #[must_use]
    pub fn wants(&self, uid: &Uid, node: &NodeName) -> bool {
        let state = self.jobs.get(uid).and_then(|work| work.state(node));
        matches!(state, Some(State::Assigned(_)))
    }

    /// What a job asks of a node cannot be written now, and will be tried again.
    pub fn delayed(&mut self, uid: &Uid, node: &NodeName, why: &str) {
        if self.wants(uid, node)
            && let Some(work) = self.jobs.get_mut(uid)
        {
            work.note(node, why);
            self.dirty.insert(Arc::clone(uid));
        }
    }

    /// What a job asks of a node was written, or waits for the end of the pull of that version.
    pub fn written(&mut self, uid: &Uid, node: &NodeName, awaits: Option<i64>) {
        let view = self.nodes.get(node);
        let wants = self.wants(uid, node);
        let Some(work) = self.jobs.get_mut(uid).filter(|_| wants) else {
            return;
        };
        if work.awaits(node) != awaits {
            work.wait(node, awaits);
            self.dirty.insert(Arc::clone(uid));
        }
        // Where the tag does not show yet, its pull has not ended.
        if let (Some(_), Some(view), Ok((image, tag))) = (awaits, view, &work.job.image)
            && view.tag(image, tag).is_some()
        {
            let view = Arc::clone(view);
            self.place_one(uid, node, Some(&view));
        }
    }

    /// The API server refuses for good what a job asks of a node.
    pub fn refused(&mut self, uid: &Uid, node: &NodeName, why: &str) {
        if self.wants(uid, node)
            && let Some(work) = self.jobs.get_mut(uid)
        {
            work.set(node, Some(State::Failed), true);
            work.note(node, why);
            self.dirty.insert(Arc::clone(uid));
            self.open.insert(Arc::clone(uid));
        }
    }

    /// The jobs whose status may differ from what was written, each told once.
    pub fn take_dirty(&mut self) -> Vec<Uid> {
        self.dirty.drain().collect()
    }

    /// The jobs that were forgotten, each told once.
    pub fn take_dropped(&mut self) -> Vec<Uid> {
        std::mem::take(&mut self.dropped)
    }

    /// The job of that UID while it runs.
    #[must_use]
    pub fn job(&self, uid: &Uid) -> Option<Arc<Job>> {
        self.jobs.get(uid).map(|w| Arc::clone(&w.job))
    }

    /// Whether every node of the job has an outcome, or the job has no chance to get any.
    #[must_use]
    pub fn over(&self, uid: &Uid) -> bool {
        self.jobs.get(uid).is_some_and(|work| {
            let (desired, done) = work.counts();
            (desired == done && desired > 0) || work.job.image.is_err() || work.job.parallelism.is_err()
        })
    }

    /// The copies of the job's pull secrets.
    #[must_use]
    pub fn copies(&self, uid: &Uid) -> &[ReferenceObject] {
        let work = self.jobs.get(uid);
        work.and_then(|w| w.secrets.as_deref()).unwrap_or_default()
    }

    /// The NodeImage of a node.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<Arc<NodeImageView>> {
        self.nodes.get(name).cloned()
    }

    /// How far a job is at `now`. Where it is `late`, with the names of unfinished nodes, and those that have not begun count as
    /// silent after a shorter time.
    #[must_use]
    pub fn tally(&self, uid: &Uid, late: bool, now: Timestamp) -> Option<Tally> {
        let work = self.jobs.get(uid)?;
        let mut tally = work.tally(late);
        if let Targets::Names(names) = &work.job.targets {
            let known = |n: &&String| self.nodes.contains_key(n.as_str());
            tally.unknown = names.iter().filter(|n| !known(n)).cloned().collect();
        }
        (tally.awaited, tally.awaited_until) = self.awaited.of(work, now);
        for (name, since) in work.silent() {
            let until = after(since, if late { SILENCE_AT_THE_END } else { SILENCE });
            if now < until {
                tally.silent_from = Some(tally.silent_from.map_or(until, |first| first.min(until)));
            } else if self.unready.contains(name) {
                tally.lost.insert(Arc::clone(name));
            } else {
                tally.silent.insert(Arc::clone(name));
            }
        }
        Some(tally)
    }
}

/// Brings one node of one job up to date; true when anything changed.
fn place(work: &mut Work, name: &NodeName, view: Option<&NodeImageView>, ready: bool) -> bool {
    let member = view.filter(|v| work.includes(name, &v.labels));
    let (Some(view), Ok((image, tag))) = (member, &work.job.image) else {
        let changed = work.set(name, member.map(|_| State::Pending), ready);
        return work.heard(name, None) || changed;
    };
    let seen = seen(view, image, tag, &work.job.uid);
    let awaits = work.awaits(name);
    let ended = awaits.is_some_and(|version| ended(view, image, tag, version));
    let old = work
        .state(name)
        .map(|old| if ended { State::Pending } else { old });
    let new = work.next(old, seen);
    let silent = match (new, seen) {
        (State::Pulling, Seen::Asked(since)) => since,
        _ => None,
    };
    let error = view.status(image, tag).and_then(|status| status.error.clone());
    if ended {
        work.wait(name, None);
    }
    let changed = work.set(name, Some(new), ready);
    if let (true, State::Failed, Some(error)) = (changed, new, error) {
        work.note(name, &error);
    }
    work.heard(name, silent) || changed || ended
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;

#[cfg(test)]
impl Index {
    pub(super) fn states(&self, uid: &Uid) -> std::collections::BTreeMap<NodeName, State> {
        self.jobs.get(uid).map(Work::states).unwrap_or_default()
    }
}
