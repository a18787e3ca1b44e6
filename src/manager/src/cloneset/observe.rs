//! Index of all CloneSets and their objects, by owner, so that a reconcile costs in proportion to its own objects.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::plan::ImagePullJobRef;
use crate::Stores;
use crate::view::{ClaimView, CloneSetView, PodView, RevisionView};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kruise_api::cloneset::CloneSet;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::owner::Owner;
use kruise_api::selector::CompiledSelector;
use kruise_cluster::write_cache::{Versioned, WriteCache};
use kruise_cluster::{Change, Key, WatchEvents};
use kruise_workload::claim::{self, Claim};
use kruise_workload::in_place::Pod;

/// Controller name in `/healthz` and in the log.
pub const NAME: &str = "cloneset";

/// All observed objects.
#[derive(Default)]
pub struct Index {
    /// CloneSets, by namespace.
    pub sets: WriteCache<CloneSetView>,
    /// Pods, by their controller ([`Owner::group_key`]), or by their namespace if they have none.
    pub pods: WriteCache<Pod>,
    /// Revisions, indexed like Pods.
    pub revisions: WriteCache<RevisionView>,
    /// Claims, by their owner.
    pub claims: WriteCache<Claim>,
    /// Which jobs exist, by their controller.
    pub jobs: WriteCache<()>,
    /// The CloneSet of each group.
    names: HashMap<String, Key>,
    /// Orphans that a CloneSet selects, by its UID. There may be thousands that no CloneSet selects.
    orphans: HashMap<String, BTreeSet<Key>>,
}

/// The objects of one CloneSet.
pub struct OwnedObjects {
    /// Its Pods and the orphans that it selects.
    pub pods: Vec<Arc<Pod>>,
    pub claims: Vec<Claim>,
    /// The claims that its Pods own, by the Pod's UID, without terminating ones.
    pub claims_owned_by_pod: BTreeMap<String, Vec<Claim>>,
    /// Its revisions and the orphaned ones that it selects; unsorted.
    pub revisions: Vec<Arc<RevisionView>>,
    /// Its jobs, without terminating ones.
    pub jobs: Vec<ImagePullJobRef>,
}

/// The group of orphans.
fn orphan_group(namespace: Option<&str>) -> String {
    namespace.unwrap_or_default().to_owned()
}

/// The group of objects with this controller.
fn owner_group(key: &Key, controller: Option<&Owner>) -> String {
    let namespace = key.namespace.as_deref();
    controller.map_or_else(|| orphan_group(namespace), |owner| owner.group_key(namespace))
}

/// The group of objects that a CloneSet controls.
pub fn clone_set_group(metadata: &ObjectMeta) -> String {
    Owner::clone_set(metadata).group_key(metadata.namespace.as_deref())
}

/// The cache entry of a Pod.
pub fn versioned_pod(key: &Key, pod: Arc<Pod>) -> Versioned<Pod> {
    Versioned {
        uid: pod.uid.clone(),
        resource_version: pod.resource_version.clone(),
        group: owner_group(key, pod.controller.as_ref()),
        terminating: pod.terminating,
        object: pod,
    }
}

/// The cache entry of a claim.
pub fn versioned_claim(key: &Key, view: &ClaimView) -> Versioned<Claim> {
    let owner = view.owner.as_ref();
    Versioned {
        uid: view.claim.uid.clone(),
        resource_version: view.resource_version.clone(),
        group: owner.map_or_else(String::new, |owner| owner.group_key(key.namespace.as_deref())),
        terminating: view.claim.terminating,
        object: Arc::new(view.claim.clone()),
    }
}

/// The cache entry of a revision.
pub fn versioned_revision(key: &Key, view: Arc<RevisionView>) -> Versioned<RevisionView> {
    Versioned {
        uid: view.uid.clone(),
        resource_version: view.resource_version.clone(),
        group: owner_group(key, view.controller.as_ref()),
        terminating: view.terminating,
        object: view,
    }
}

/// The cache entry of a CloneSet.
pub fn versioned_clone_set(set: Arc<CloneSetView>) -> Versioned<CloneSetView> {
    let metadata = &set.metadata;
    Versioned {
        uid: metadata.uid.clone().unwrap_or_default(),
        resource_version: metadata.resource_version.clone().unwrap_or_default(),
        group: metadata.namespace.clone().unwrap_or_default(),
        terminating: metadata.deletion_timestamp.is_some(),
        object: set,
    }
}

/// The cache entry of a job.
pub fn versioned_job(job: &ImagePullJob) -> Versioned<()> {
    let metadata = &job.metadata;
    let controller = Owner::controller(metadata);
    Versioned {
        uid: metadata.uid.clone().unwrap_or_default(),
        resource_version: metadata.resource_version.clone().unwrap_or_default(),
        group: controller.map_or_else(String::new, |owner| {
            owner.group_key(metadata.namespace.as_deref())
        }),
        terminating: metadata.deletion_timestamp.is_some(),
        object: Arc::new(()),
    }
}

/// Applies a watch event of one object.
fn apply_change<T>(
    cache: &mut WriteCache<T>,
    key: &Key,
    old: Option<Versioned<T>>,
    new: Option<Versioned<T>>,
) {
    match (old, new) {
        (_, Some(new)) => cache.apply_watch(key, new),
        (Some(old), None) => cache.apply_watch_delete(key, &old.uid),
        (None, None) => {}
    }
}

impl Index {
    /// The objects of this CloneSet.
    pub fn owned_objects(&self, set: &CloneSet) -> OwnedObjects {
        let owner = Owner::clone_set(&set.metadata);
        let (group, orphan_group) = (
            clone_set_group(&set.metadata),
            orphan_group(set.metadata.namespace.as_deref()),
        );
        let selector = CompiledSelector::from(&set.spec.selector);
        let own = self.pods.group_entries(&group);
        let orphans = self.orphans.get(&owner.uid).into_iter().flatten();
        let orphans = orphans.filter_map(|key| self.pods.find_in_group(&orphan_group, key));
        let orphans = orphans.filter(|(_, pod, _)| selector.matches(&pod.labels));
        let pod = |(_, pod, deleting): (&Key, &Arc<Pod>, bool)| {
            if deleting && !pod.terminating {
                let mut pod = Pod::clone(pod);
                pod.terminating = true;
                return Arc::new(pod);
            }
            Arc::clone(pod)
        };
        let claim = |(_, claim, deleting): (&Key, &Arc<Claim>, bool)| Claim {
            terminating: deleting,
            ..Claim::clone(claim)
        };
        // A released Pod keeps its claims and its name as long as it exists.
        let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
        let name_in_use = |claim: &Claim| {
            let name = format!("{}-{}", owner.name, claim.instance_id);
            let pod = self.pods.get(&Key::namespaced(namespace, &name));
            pod.is_some_and(|pod| pod.controller.as_ref() != Some(&owner))
        };
        let orphan_revisions = self.revisions.group_entries(&orphan_group);
        let orphan_revisions =
            orphan_revisions.filter(|(_, view, _)| selector.matches(&view.revision.labels));
        let revisions = self.revisions.group_entries(&group).chain(orphan_revisions);
        OwnedObjects {
            pods: own.chain(orphans).map(pod).collect(),
            claims: self
                .claims
                .group_entries(&group)
                .map(claim)
                .filter(|c| !name_in_use(c))
                .collect(),
            claims_owned_by_pod: self.claims_owned_by_pod(set, &group),
            revisions: revisions
                .filter(|(.., deleting)| !deleting)
                .map(|(_, view, _)| Arc::clone(view))
                .collect(),
            jobs: self
                .jobs
                .group_entries(&group)
                .filter(|(.., deleting)| !deleting)
                .map(|(key, ..)| ImagePullJobRef {
                    name: key.name.clone(),
                    uid: self.jobs.uid(key).unwrap_or_default().to_owned(),
                })
                .collect(),
        }
    }

    /// The claims that Pods of the CloneSet own, without those that were never the CloneSet's.
    fn claims_owned_by_pod(&self, set: &CloneSet, group: &str) -> BTreeMap<String, Vec<Claim>> {
        // This checks each Pod, so skip it if there are no claims. Those of templates that were removed count, too.
        if self.claims.is_empty() {
            return BTreeMap::new();
        }
        let set_name = set.metadata.name.as_deref().unwrap_or_default();
        let claims_of_pod = |pod: &Pod| {
            let id = claim::instance_id(set_name, pod);
            let owner = Owner::pod(&pod.name, &pod.uid).group_key(set.metadata.namespace.as_deref());
            let claims = self.claims.group_entries(&owner);
            let owned =
                claims.filter(|(_, claim, deleting)| !deleting && Some(claim.instance_id.as_str()) == id);
            owned.map(|(_, claim, _)| Claim::clone(claim)).collect::<Vec<_>>()
        };
        let claims_by_pod = self
            .pods
            .group_entries(group)
            .map(|(_, pod, _)| (pod, claims_of_pod(pod)));
        claims_by_pod
            .filter(|(_, claims)| !claims.is_empty())
            .map(|(pod, claims)| (pod.uid.clone(), claims))
            .collect()
    }

    /// The time until an unconfirmed write must be read from the API server.
    pub fn next_fetch(&self, name: &Key, group: &str, now: Instant) -> Option<Duration> {
        let delays = [
            self.sets.confirm_time_left(name, now),
            self.pods.unconfirmed(group, now).1,
            self.claims.unconfirmed(group, now).1,
            self.revisions.unconfirmed(group, now).1,
            self.jobs.unconfirmed(group, now).1,
        ];
        delays.into_iter().flatten().min()
    }

    /// Collects the CloneSets that a Pod affects, in its state before or after. An orphan is added to or removed from
    /// those that select it.
    fn collect_affected(&mut self, key: &Key, pod: &Pod, exists: bool, affected: &mut BTreeSet<Key>) {
        if pod.controller.is_some() {
            let group = owner_group(key, pod.controller.as_ref());
            affected.extend(self.names.get(&group).cloned());
            return;
        }
        let sets = self
            .sets
            .group_entries(key.namespace.as_deref().unwrap_or_default());
        for (name, set, _) in sets.filter(|(_, set, _)| set.selector.matches(&pod.labels)) {
            affected.insert(name.clone());
            let uid = set.metadata.uid.clone().unwrap_or_default();
            let orphans = self.orphans.entry(uid).or_default();
            if exists {
                orphans.insert(key.clone());
            } else {
                orphans.remove(key);
            }
        }
    }

    /// Finds the orphans that a CloneSet selects, once.
    fn index_orphans(&mut self, set: &CloneSetView, uid: &str) {
        let orphan_group = orphan_group(set.metadata.namespace.as_deref());
        let all = self.pods.group_entries(&orphan_group);
        let selected = all.filter(|(_, pod, _)| set.selector.matches(&pod.labels));
        let keys = selected.map(|(key, ..)| key.clone()).collect();
        self.orphans.insert(uid.to_owned(), keys);
    }

    fn apply_clone_set(&mut self, change: &Change<CloneSetView>, affected: &mut BTreeSet<Key>) {
        let versioned = |set: &Option<Arc<CloneSetView>>| set.clone().map(versioned_clone_set);
        let (old, new) = (versioned(&change.old), versioned(&change.new));
        let same_selector = |a: &Versioned<CloneSetView>, b: &Versioned<CloneSetView>| {
            a.uid == b.uid && a.object.selector == b.object.selector
        };
        if let Some(old) = &old {
            self.names.remove(&clone_set_group(&old.object.metadata));
            if new.as_ref().is_none_or(|new| new.uid != old.uid) {
                self.orphans.remove(&old.uid);
            }
        }
        if let Some(new) = &new {
            self.names
                .insert(clone_set_group(&new.object.metadata), change.key.clone());
            if !old.as_ref().is_some_and(|old| same_selector(old, new)) {
                self.index_orphans(&new.object, &new.uid);
            }
        }
        apply_change(&mut self.sets, &change.key, old, new);
        affected.insert(change.key.clone());
    }

    fn apply_pod(&mut self, change: &Change<PodView>, affected: &mut BTreeSet<Key>) {
        let workload_pod = |view: &Option<Arc<PodView>>| view.as_ref().and_then(|v| v.workload_pod.clone());
        let (old, new) = (workload_pod(&change.old), workload_pod(&change.new));
        for (pod, exists) in [(&old, false), (&new, true)] {
            if let Some(pod) = pod {
                self.collect_affected(&change.key, pod, exists, affected);
            }
        }
        // A Pod of another owner is cached if one of ours should have had its name.
        if let (Some(old), None) = (&change.old, &change.new) {
            self.pods.apply_watch_delete(&change.key, &old.uid);
        }
        let versioned = |pod: Option<Arc<Pod>>| pod.map(|pod| versioned_pod(&change.key, pod));
        apply_change(&mut self.pods, &change.key, versioned(old), versioned(new));
    }

    /// Adds an orphan that was read from the API server.
    pub fn insert_orphan(&mut self, key: &Key, pod: Arc<Pod>) {
        self.collect_affected(key, &pod, true, &mut BTreeSet::new());
        let entry = versioned_pod(key, pod);
        self.pods.apply_read(key, Some(entry), Instant::now());
    }

    fn apply_revision(&mut self, change: &Change<RevisionView>, affected: &mut BTreeSet<Key>) {
        let versioned =
            |view: &Option<Arc<RevisionView>>| view.clone().map(|v| versioned_revision(&change.key, v));
        let (old, new) = (versioned(&change.old), versioned(&change.new));
        self.collect_owners(&old, &new, affected);
        apply_change(&mut self.revisions, &change.key, old, new);
    }

    fn apply_claim(&mut self, change: &Change<ClaimView>, affected: &mut BTreeSet<Key>) {
        let versioned =
            |view: &Option<Arc<ClaimView>>| view.as_deref().map(|view| versioned_claim(&change.key, view));
        let (old, new) = (versioned(&change.old), versioned(&change.new));
        self.collect_owners(&old, &new, affected);
        apply_change(&mut self.claims, &change.key, old, new);
    }

    fn apply_job(&mut self, change: &Change<ImagePullJob>, affected: &mut BTreeSet<Key>) {
        let versioned = |job: &Option<Arc<ImagePullJob>>| job.as_deref().map(versioned_job);
        let (old, new) = (versioned(&change.old), versioned(&change.new));
        // A job's progress does not matter here.
        if old.is_none() || new.as_ref().is_none_or(|new| new.terminating) {
            self.collect_owners(&old, &new, affected);
        }
        apply_change(&mut self.jobs, &change.key, old, new);
    }

    fn collect_owners<T>(
        &self,
        old: &Option<Versioned<T>>,
        new: &Option<Versioned<T>>,
        affected: &mut BTreeSet<Key>,
    ) {
        let owners = [old, new].into_iter().flatten();
        affected.extend(owners.filter_map(|at| self.names.get(&at.group).cloned()));
    }
}

/// A change of one object.
pub enum WatchEvent {
    CloneSet(Change<CloneSetView>),
    Pod(Change<PodView>),
    Revision(Change<RevisionView>),
    Claim(Change<ClaimView>),
    Job(Change<ImagePullJob>),
}

impl std::fmt::Display for WatchEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::CloneSet(change) => write!(f, "CloneSet {}", change.key),
            Self::Pod(change) => write!(f, "Pod {}", change.key),
            Self::Revision(change) => write!(f, "ControllerRevision {}", change.key),
            Self::Claim(change) => write!(f, "PersistentVolumeClaim {}", change.key),
            Self::Job(change) => write!(f, "ImagePullJob {}", change.key),
        }
    }
}

/// All existing objects, and every change from now on. CloneSets come last, so that none is reconciled without its Pods.
pub fn watch_events(stores: &Stores) -> WatchEvents<WatchEvent> {
    WatchEvents::new(NAME)
        .with(stores.revisions.subscribe(), WatchEvent::Revision)
        .with(stores.claims.subscribe(), WatchEvent::Claim)
        .with(stores.jobs.subscribe(), WatchEvent::Job)
        .with(stores.pods.subscribe(), WatchEvent::Pod)
        .with(stores.clone_sets.subscribe(), WatchEvent::CloneSet)
}

impl Index {
    /// Applies one change; returns the affected CloneSets.
    pub fn apply(&mut self, event: &WatchEvent) -> BTreeSet<Key> {
        let mut affected = BTreeSet::new();
        match event {
            WatchEvent::CloneSet(change) => self.apply_clone_set(change, &mut affected),
            WatchEvent::Pod(change) => self.apply_pod(change, &mut affected),
            WatchEvent::Revision(change) => self.apply_revision(change, &mut affected),
            WatchEvent::Claim(change) => self.apply_claim(change, &mut affected),
            WatchEvent::Job(change) => self.apply_job(change, &mut affected),
        }
        affected
    }
}

#[cfg(test)]
mod tests;
