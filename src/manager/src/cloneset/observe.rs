//! What is known of all CloneSets and what belongs to them, by owner, so that a look costs what that one has.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::sync::mpsc;

use super::plan::Job;
use crate::Stores;
use crate::view::{ClaimView, CloneSetView, PodView, RevisionView, matches};
use kruise_api::cloneset::CloneSet;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::keys;
use kruise_api::owner::Owner;
use kruise_cluster::write_cache::{Versioned, WriteCache};
use kruise_cluster::{Change, Intake, Key};
use kruise_workload::claim::Claim;
use kruise_workload::in_place::Pod;

/// All that is known.
#[derive(Default)]
pub struct Index {
    /// CloneSets, by namespace.
    pub sets: WriteCache<CloneSetView>,
    /// Pods, by their controller ([`Owner::group`]), or by their namespace where nobody controls them.
    pub pods: WriteCache<Pod>,
    /// Revisions, as Pods.
    pub revisions: WriteCache<RevisionView>,
    /// Claims, by their owner.
    pub claims: WriteCache<Claim>,
    /// That there are jobs, by their controller.
    pub jobs: WriteCache<()>,
    /// Which CloneSet a group is of.
    names: HashMap<String, Key>,
    /// Pods of nobody that a CloneSet selects, by its UID. There may be thousands that none does.
    strays: HashMap<String, BTreeSet<Key>>,
}

/// What belongs to one CloneSet.
pub struct Belongings {
    /// Its Pods, and those of nobody that it selects.
    pub pods: Vec<Arc<Pod>>,
    /// Its claims.
    pub claims: Vec<Claim>,
    /// The claims that its Pods own, by the Pod's UID, without those that go.
    pub given: BTreeMap<String, Vec<Claim>>,
    /// Its revisions, and those of nobody that it selects; in no order.
    pub revisions: Vec<Arc<RevisionView>>,
    /// Its jobs, without those that go.
    pub jobs: Vec<Job>,
}

/// The group of what nobody controls.
fn nobodys(namespace: Option<&str>) -> String {
    namespace.unwrap_or_default().to_owned()
}

/// The group of what has this controller.
fn controlled(key: &Key, controller: Option<&Owner>) -> String {
    let namespace = key.namespace.as_deref();
    controller.map_or_else(|| nobodys(namespace), |owner| owner.group(namespace))
}

/// The group of what a CloneSet controls.
pub fn group_of(metadata: &ObjectMeta) -> String {
    Owner::clone_set(metadata).group(metadata.namespace.as_deref())
}

/// A Pod as it is kept.
pub fn pod_at(key: &Key, pod: Arc<Pod>) -> Versioned<Pod> {
    Versioned {
        uid: pod.uid.clone(),
        version: pod.resource_version.clone(),
        group: controlled(key, pod.controller.as_ref()),
        deleting: pod.deleting,
        object: pod,
    }
}

/// A claim as it is kept.
pub fn claim_at(key: &Key, view: &ClaimView) -> Versioned<Claim> {
    let owner = view.owner.as_ref();
    Versioned {
        uid: view.claim.uid.clone(),
        version: view.resource_version.clone(),
        group: owner.map_or_else(String::new, |owner| owner.group(key.namespace.as_deref())),
        deleting: view.claim.deleting,
        object: Arc::new(view.claim.clone()),
    }
}

/// A revision as it is kept.
pub fn revision_at(key: &Key, view: Arc<RevisionView>) -> Versioned<RevisionView> {
    Versioned {
        uid: view.uid.clone(),
        version: view.resource_version.clone(),
        group: controlled(key, view.controller.as_ref()),
        deleting: view.deleting,
        object: view,
    }
}

/// A CloneSet as it is kept.
pub fn set_at(set: Arc<CloneSetView>) -> Versioned<CloneSetView> {
    let metadata = &set.metadata;
    Versioned {
        uid: metadata.uid.clone().unwrap_or_default(),
        version: metadata.resource_version.clone().unwrap_or_default(),
        group: metadata.namespace.clone().unwrap_or_default(),
        deleting: metadata.deletion_timestamp.is_some(),
        object: set,
    }
}

/// A job as it is kept.
pub fn job_at(job: &ImagePullJob) -> Versioned<()> {
    let metadata = &job.metadata;
    let controller = Owner::controller(metadata);
    Versioned {
        uid: metadata.uid.clone().unwrap_or_default(),
        version: metadata.resource_version.clone().unwrap_or_default(),
        group: controller.map_or_else(String::new, |owner| owner.group(metadata.namespace.as_deref())),
        deleting: metadata.deletion_timestamp.is_some(),
        object: Arc::new(()),
    }
}

/// Takes in what a watch says of one object.
fn take<T>(known: &mut WriteCache<T>, key: &Key, old: Option<Versioned<T>>, new: Option<Versioned<T>>) {
    match (old, new) {
        (_, Some(new)) => known.watched(key, new),
        (Some(old), None) => known.gone(key, &old.uid),
        (None, None) => {}
    }
}

impl Index {
    /// What belongs to this CloneSet.
    pub fn belongings(&self, set: &CloneSet) -> Belongings {
        let owner = Owner::clone_set(&set.metadata);
        let (group, nobodys) = (
            group_of(&set.metadata),
            nobodys(set.metadata.namespace.as_deref()),
        );
        let selector = &set.spec.selector;
        let own = self.pods.of(&group);
        let strays = self.strays.get(&owner.uid).into_iter().flatten();
        let strays = strays.filter_map(|key| self.pods.find(&nobodys, key));
        let strays = strays.filter(|(_, pod, _)| matches(selector, &pod.labels));
        let pod = |(_, pod, going): (&Key, &Arc<Pod>, bool)| {
            if going && !pod.deleting {
                let mut pod = Pod::clone(pod);
                pod.deleting = true;
                return Arc::new(pod);
            }
            Arc::clone(pod)
        };
        let claim = |(_, claim, going): (&Key, &Arc<Claim>, bool)| Claim {
            deleting: going,
            ..Claim::clone(claim)
        };
        // A Pod that was let go keeps its claims, and its name, for as long as it is there.
        let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
        let taken = |claim: &Claim| {
            let name = format!("{}-{}", owner.name, claim.instance);
            let pod = self.pods.get(&Key::namespaced(namespace, &name));
            pod.is_some_and(|pod| pod.controller.as_ref() != Some(&owner))
        };
        let stray = self.revisions.of(&nobodys);
        let stray = stray.filter(|(_, view, _)| matches(selector, &view.revision.labels));
        let revisions = self.revisions.of(&group).chain(stray);
        Belongings {
            pods: own.chain(strays).map(pod).collect(),
            claims: self.claims.of(&group).map(claim).filter(|c| !taken(c)).collect(),
            given: self.given(set, &group),
            revisions: revisions
                .filter(|(.., going)| !going)
                .map(|(_, view, _)| Arc::clone(view))
                .collect(),
            jobs: self
                .jobs
                .of(&group)
                .filter(|(.., going)| !going)
                .map(|(key, ..)| Job {
                    name: key.name.clone(),
                    uid: self.jobs.uid(key).unwrap_or_default().to_owned(),
                })
                .collect(),
        }
    }

    /// The claims that Pods of the CloneSet own, but for those that were never its own.
    fn given(&self, set: &CloneSet, group: &str) -> BTreeMap<String, Vec<Claim>> {
        // Each Pod is looked at, so not where there is nothing to find.
        if set.spec.volume_claim_templates.is_empty() {
            return BTreeMap::new();
        }
        let once_ours = |pod: &Pod| {
            let id = pod.labels.get(keys::CLONESET_INSTANCE_ID);
            let owner = Owner::pod(&pod.name, &pod.uid).group(set.metadata.namespace.as_deref());
            let claims = self.claims.of(&owner);
            let of_pod = claims.filter(|(_, claim, going)| !going && Some(&claim.instance) == id);
            of_pod
                .map(|(_, claim, _)| Claim::clone(claim))
                .collect::<Vec<_>>()
        };
        let given = self.pods.of(group).map(|(_, pod, _)| (pod, once_ours(pod)));
        given
            .filter(|(_, claims)| !claims.is_empty())
            .map(|(pod, claims)| (pod.uid.clone(), claims))
            .collect()
    }

    /// How long it is until a write of ours has to be looked up, if one is not confirmed.
    pub fn next_look_up(&self, name: &Key, group: &str, now: Instant) -> Option<Duration> {
        let all = [
            self.sets.unconfirmed_for(name, now),
            self.pods.unconfirmed(group, now).1,
            self.claims.unconfirmed(group, now).1,
            self.revisions.unconfirmed(group, now).1,
            self.jobs.unconfirmed(group, now).1,
        ];
        all.into_iter().flatten().min()
    }

    /// CloneSets that a Pod concerns, in its state before or after. A Pod of nobody is, or was, one of their strays.
    fn concerned(&mut self, key: &Key, pod: &Pod, is: bool, wake: &mut BTreeSet<Key>) {
        if pod.controller.is_some() {
            let group = controlled(key, pod.controller.as_ref());
            wake.extend(self.names.get(&group).cloned());
            return;
        }
        let sets = self.sets.of(key.namespace.as_deref().unwrap_or_default());
        for (name, set, _) in sets.filter(|(_, set, _)| matches(&set.selector, &pod.labels)) {
            wake.insert(name.clone());
            let uid = set.metadata.uid.clone().unwrap_or_default();
            let strays = self.strays.entry(uid).or_default();
            if is {
                strays.insert(key.clone());
            } else {
                strays.remove(key);
            }
        }
    }

    /// The Pods of nobody that a CloneSet selects, found once.
    fn find_strays(&mut self, set: &CloneSetView, uid: &str) {
        let nobodys = nobodys(set.metadata.namespace.as_deref());
        let all = self.pods.of(&nobodys);
        let selected = all.filter(|(_, pod, _)| matches(&set.selector, &pod.labels));
        let keys = selected.map(|(key, ..)| key.clone()).collect();
        self.strays.insert(uid.to_owned(), keys);
    }

    fn set(&mut self, change: &Change<CloneSetView>, wake: &mut BTreeSet<Key>) {
        let at = |set: &Option<Arc<CloneSetView>>| set.clone().map(set_at);
        let (old, new) = (at(&change.old), at(&change.new));
        let same = |a: &Versioned<CloneSetView>, b: &Versioned<CloneSetView>| {
            a.uid == b.uid && a.object.selector == b.object.selector
        };
        if let Some(old) = &old {
            self.names.remove(&group_of(&old.object.metadata));
            if new.as_ref().is_none_or(|new| new.uid != old.uid) {
                self.strays.remove(&old.uid);
            }
        }
        if let Some(new) = &new {
            self.names
                .insert(group_of(&new.object.metadata), change.key.clone());
            if !old.as_ref().is_some_and(|old| same(old, new)) {
                self.find_strays(&new.object, &new.uid);
            }
        }
        take(&mut self.sets, &change.key, old, new);
        wake.insert(change.key.clone());
    }

    fn pod(&mut self, change: &Change<PodView>, wake: &mut BTreeSet<Key>) {
        let of = |view: &Option<Arc<PodView>>| view.as_ref().and_then(|v| v.workload.clone());
        let (old, new) = (of(&change.old), of(&change.new));
        for (pod, is) in [(&old, false), (&new, true)] {
            if let Some(pod) = pod {
                self.concerned(&change.key, pod, is, wake);
            }
        }
        // A Pod of others is known where one of ours was to have its name.
        if let (Some(old), None) = (&change.old, &change.new) {
            self.pods.gone(&change.key, &old.uid);
        }
        let at = |pod: Option<Arc<Pod>>| pod.map(|pod| pod_at(&change.key, pod));
        take(&mut self.pods, &change.key, at(old), at(new));
    }

    /// Takes in an orphan as the API server itself knows it.
    pub fn orphan(&mut self, key: &Key, pod: Arc<Pod>) {
        self.concerned(key, &pod, true, &mut BTreeSet::new());
        let at = pod_at(key, pod);
        self.pods.read(key, Some(at), Instant::now());
    }

    fn revision(&mut self, change: &Change<RevisionView>, wake: &mut BTreeSet<Key>) {
        let at = |view: &Option<Arc<RevisionView>>| view.clone().map(|v| revision_at(&change.key, v));
        let (old, new) = (at(&change.old), at(&change.new));
        self.wake_owners(&old, &new, wake);
        take(&mut self.revisions, &change.key, old, new);
    }

    fn claim(&mut self, change: &Change<ClaimView>, wake: &mut BTreeSet<Key>) {
        let at = |view: &Option<Arc<ClaimView>>| view.as_deref().map(|view| claim_at(&change.key, view));
        let (old, new) = (at(&change.old), at(&change.new));
        self.wake_owners(&old, &new, wake);
        take(&mut self.claims, &change.key, old, new);
    }

    fn job(&mut self, change: &Change<ImagePullJob>, wake: &mut BTreeSet<Key>) {
        let at = |job: &Option<Arc<ImagePullJob>>| job.as_deref().map(job_at);
        let (old, new) = (at(&change.old), at(&change.new));
        // How far a job is makes no difference here.
        if old.is_none() || new.as_ref().is_none_or(|new| new.deleting) {
            self.wake_owners(&old, &new, wake);
        }
        take(&mut self.jobs, &change.key, old, new);
    }

    fn wake_owners<T>(
        &self,
        old: &Option<Versioned<T>>,
        new: &Option<Versioned<T>>,
        wake: &mut BTreeSet<Key>,
    ) {
        let owners = [old, new].into_iter().flatten();
        wake.extend(owners.filter_map(|at| self.names.get(&at.group).cloned()));
    }
}

/// What the watches say.
pub struct Changes {
    sets: mpsc::UnboundedReceiver<Change<CloneSetView>>,
    pods: mpsc::UnboundedReceiver<Change<PodView>>,
    revisions: mpsc::UnboundedReceiver<Change<RevisionView>>,
    claims: mpsc::UnboundedReceiver<Change<ClaimView>>,
    jobs: mpsc::UnboundedReceiver<Change<ImagePullJob>>,
    intake: Intake<Said>,
}

/// What one of them says.
pub enum Said {
    Set(Change<CloneSetView>),
    Pod(Change<PodView>),
    Revision(Change<RevisionView>),
    Claim(Change<ClaimView>),
    Job(Change<ImagePullJob>),
}

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Set(change) => write!(f, "CloneSet {}", change.key),
            Self::Pod(change) => write!(f, "Pod {}", change.key),
            Self::Revision(change) => write!(f, "ControllerRevision {}", change.key),
            Self::Claim(change) => write!(f, "PersistentVolumeClaim {}", change.key),
            Self::Job(change) => write!(f, "ImagePullJob {}", change.key),
        }
    }
}

impl Changes {
    /// All that there is already, and every change from now on.
    pub fn new(stores: &Stores) -> Self {
        Self {
            sets: stores.clone_sets.subscribe(),
            pods: stores.pods.subscribe(),
            revisions: stores.revisions.subscribe(),
            claims: stores.claims.subscribe(),
            jobs: stores.jobs.subscribe(),
            intake: Intake::new(super::NAME),
        }
    }

    /// The next change; `None` at the end of the process.
    pub async fn next(&mut self) -> Option<Said> {
        tokio::select! {
            Some(change) = self.sets.recv() => Some(Said::Set(change)),
            Some(change) = self.pods.recv() => Some(Said::Pod(change)),
            Some(change) = self.revisions.recv() => Some(Said::Revision(change)),
            Some(change) = self.claims.recv() => Some(Said::Claim(change)),
            Some(change) = self.jobs.recv() => Some(Said::Job(change)),
            said = self.intake.again(), if self.intake.waits() => Some(said),
            else => None,
        }
    }

    /// Takes in all that has arrived. CloneSets come last, so that none is looked at without its Pods.
    pub fn drain(&mut self, index: &mut Index) -> BTreeSet<Key> {
        let mut wake = BTreeSet::new();
        while let Ok(change) = self.revisions.try_recv() {
            wake.extend(self.apply(index, Said::Revision(change)));
        }
        while let Ok(change) = self.claims.try_recv() {
            wake.extend(self.apply(index, Said::Claim(change)));
        }
        while let Ok(change) = self.jobs.try_recv() {
            wake.extend(self.apply(index, Said::Job(change)));
        }
        while let Ok(change) = self.pods.try_recv() {
            wake.extend(self.apply(index, Said::Pod(change)));
        }
        while let Ok(change) = self.sets.try_recv() {
            wake.extend(self.apply(index, Said::Set(change)));
        }
        wake
    }

    /// Hands one change to the index; the CloneSets that it concerns.
    pub fn apply(&mut self, index: &mut Index, said: Said) -> BTreeSet<Key> {
        let mut wake = BTreeSet::new();
        // One that panicked before goes first, and concerns some, too.
        self.intake.take(said, |said| wake.extend(index.apply(said)));
        wake
    }
}

impl Index {
    /// Takes one change in; the CloneSets that it concerns.
    pub fn apply(&mut self, said: &Said) -> BTreeSet<Key> {
        let mut wake = BTreeSet::new();
        match said {
            Said::Set(change) => self.set(change, &mut wake),
            Said::Pod(change) => self.pod(change, &mut wake),
            Said::Revision(change) => self.revision(change, &mut wake),
            Said::Claim(change) => self.claim(change, &mut wake),
            Said::Job(change) => self.job(change, &mut wake),
        }
        wake
    }
}

#[cfg(test)]
mod tests;
