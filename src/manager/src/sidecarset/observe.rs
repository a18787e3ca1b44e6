//! Index of SidecarSets, of the Pods that record their injection, and of those that lack it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Stores;
use crate::stores::NamespaceLabels;
use crate::view::{PodView, RevisionView};
use kruise_api::sidecarset::SidecarSet;
use kruise_api::{keys, names};
use kruise_cluster::write_cache::{Versioned, WriteCache};
use kruise_cluster::{Change, Key, Store, WatchEvents};
use kruise_workload::in_place::Pod;
use kruise_workload::revision::Revision;
use kruise_workload::sidecarset::history::ListedRevision;
use kruise_workload::sidecarset::matching::{is_matched, selects_namespace};
use kruise_workload::sidecarset::not_injected::{InjectablePod, should_have_been_injected};
use kruise_workload::sidecarset::recorded::parse_injected_list;
use kruise_workload::sidecarset::set::SetView;

/// Name in logs and metrics.
pub const NAME: &str = "sidecarset";
/// Sets of one Pod that count.
const MAX_RECORDED_SETS: usize = 100;

/// All observed objects.
pub struct Index {
    /// Namespace of the program, whose Pods are never injected.
    system_namespace: String,
    /// SidecarSets, in one group.
    pub sets: WriteCache<SidecarSet>,
    /// Pods that record an injection, by namespace.
    pub pods: WriteCache<Pod>,
    /// Revisions, by the name of their set.
    pub revisions: WriteCache<RevisionView>,
    /// Pods by the names of the sets that they record.
    injected: BTreeMap<String, BTreeSet<Key>>,
    namespaces: BTreeMap<String, Arc<NamespaceLabels>>,
    /// Pods that lack a set, by its name.
    not_injected: BTreeMap<String, BTreeSet<Key>>,
    /// Sets whose Pods without injection must be looked for among all Pods.
    unscanned: BTreeSet<String>,
    /// The same among the Pods of a namespace.
    unscanned_in: BTreeMap<String, BTreeSet<String>>,
}

/// The objects of one set.
pub struct ObservedSet {
    /// Its matched Pods, by namespace and name.
    pub pods: Vec<(Key, Arc<Pod>)>,
    /// Revisions that have its name.
    pub revisions: Vec<ListedRevision<Arc<Revision>>>,
    /// Pods that lack the set, by namespace and name.
    pub not_injected: Vec<Key>,
}

/// What must be read from the API server: its last write had no answer, or was not confirmed by the watch.
#[derive(Debug, PartialEq, Eq)]
pub struct Unconfirmed {
    /// Whether the set itself must be.
    pub set: bool,
    pub pods: Vec<Key>,
    pub revisions: Vec<Key>,
}

/// The cache entry of a Pod.
pub fn versioned_pod(key: &Key, pod: Arc<Pod>) -> Versioned<Pod> {
    Versioned {
        uid: pod.uid.clone(),
        resource_version: pod.resource_version.clone(),
        group: key.namespace.clone().unwrap_or_default(),
        terminating: pod.terminating,
        object: pod,
    }
}

/// The cache entry of a set.
pub fn versioned_set(set: Arc<SidecarSet>) -> Versioned<SidecarSet> {
    Versioned::from_object(set, String::new())
}

/// The cache entry of a revision.
pub fn versioned_revision(view: Arc<RevisionView>) -> Versioned<RevisionView> {
    Versioned {
        uid: view.uid.clone(),
        resource_version: view.resource_version.clone(),
        group: set_of_revision(&view).to_owned(),
        terminating: view.terminating,
        object: view,
    }
}

fn set_of_revision(view: &RevisionView) -> &str {
    let label = view.revision.labels.get(keys::SIDECAR_SET_NAME);
    label.map(String::as_str).unwrap_or_default()
}

/// The sets that a Pod records.
fn recorded_sets(pod: &Pod) -> BTreeSet<&str> {
    let text = pod.annotations.get(keys::SIDECAR_SET_INJECTED_LIST);
    let all = text.map(|text| parse_injected_list(text)).unwrap_or_default();
    // Any user may write the annotation.
    all.into_iter()
        .filter(|name| names::is_label(name))
        .take(MAX_RECORDED_SETS)
        .collect()
}

/// What decides which sets a Pod lacks.
struct Sets<'a> {
    all: Vec<SetView<'a>>,
    /// Those that are injected in the place of another one.
    canaries: Vec<SetView<'a>>,
}

impl<'a> Sets<'a> {
    /// All sets, or only these of them; their canaries are among all of them.
    fn new(sets: &'a [Arc<SidecarSet>], only: Option<&BTreeSet<String>>) -> Self {
        let mut all: Vec<SetView<'a>> = sets.iter().map(|set| SetView::from(&**set)).collect();
        let canaries = all.iter().filter(|set| set.canary_base().is_some());
        let canaries = canaries.copied().collect();
        all.retain(|set| only.is_none_or(|only| only.contains(set.name)));
        Self { all, canaries }
    }
}

/// Whether the same new Pods get both versions of a set, and lack the same other sets.
fn selects_same_pods(old: &SidecarSet, new: &SidecarSet) -> bool {
    let (old, new) = (SetView::from(old), SetView::from(new));
    old.spec.selector == new.spec.selector
        && old.spec.namespace_selector == new.spec.namespace_selector
        && old.spec.is_injection_paused() == new.spec.is_injection_paused()
        && old.canary_base() == new.canary_base()
}

/// The list of sets that a Pod records.
fn injected_list(pod: &PodView) -> Option<&String> {
    let annotations = &pod.workload_pod.as_ref()?.annotations;
    annotations.get(keys::SIDECAR_SET_INJECTED_LIST)
}

/// Whether both versions of a Pod lack the same sets.
fn lack_same_sets(old: &PodView, new: &PodView) -> bool {
    old.active() == new.active() && old.labels == new.labels && injected_list(old) == injected_list(new)
}

impl Index {
    /// An index without objects.
    pub fn new(system_namespace: &str) -> Self {
        Self {
            system_namespace: system_namespace.to_owned(),
            sets: WriteCache::default(),
            pods: WriteCache::default(),
            revisions: WriteCache::default(),
            injected: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            not_injected: BTreeMap::new(),
            unscanned: BTreeSet::new(),
            unscanned_in: BTreeMap::new(),
        }
    }

    /// The set of that name.
    pub fn set(&self, name: &str) -> Option<Arc<SidecarSet>> {
        self.sets.get(&Key::cluster_scoped(name)).cloned()
    }

    /// What must be read again for a set.
    pub fn unconfirmed(&self, set: &str, now: Instant) -> Unconfirmed {
        let pods = self.injected.get(set).into_iter().flatten();
        let pods = pods.filter(|key| self.pods.must_be_read(key, now));
        Unconfirmed {
            set: self.sets.must_be_read(&Key::cluster_scoped(set), now),
            pods: pods.cloned().collect(),
            revisions: self.revisions.unconfirmed(set, now).0,
        }
    }

    /// The time until an unconfirmed write must be read from the API server.
    pub fn next_fetch(&self, set: &str, now: Instant) -> Option<Duration> {
        let pods = self.injected.get(set).into_iter().flatten();
        let pods = pods.filter_map(|key| self.pods.confirm_time_left(key, now));
        let set_left = self.sets.confirm_time_left(&Key::cluster_scoped(set), now);
        let revisions_left = self.revisions.unconfirmed(set, now).1;
        pods.chain(set_left).chain(revisions_left).min()
    }

    /// The objects of a set.
    pub fn observe(&self, set: &SidecarSet) -> ObservedSet {
        let view = SetView::from(set);
        let name = view.name;
        let keys = self.injected.get(name).into_iter().flatten();
        let pods = keys.filter_map(|key| Some((key, self.pods.get(key)?)));
        let pods = pods.filter(|(key, pod)| {
            let labels = self.namespaces.get(key.namespace.as_deref().unwrap_or_default());
            is_matched(&view, pod, labels.map(Arc::as_ref))
        });
        let revisions = self
            .revisions
            .group_entries(name)
            .filter(|(.., deleting)| !deleting);
        ObservedSet {
            pods: pods.map(|(key, pod)| (key.clone(), Arc::clone(pod))).collect(),
            revisions: revisions
                .map(|(_, view, _)| ListedRevision {
                    revision: Arc::clone(&view.revision),
                    controller: view.controller.clone(),
                })
                .collect(),
            not_injected: self
                .not_injected
                .get(name)
                .into_iter()
                .flatten()
                .cloned()
                .collect(),
        }
    }

    /// Notes the sets that a Pod records.
    fn record_sets(&mut self, key: &Key, pod: &Pod) {
        for set in recorded_sets(pod) {
            self.injected
                .entry(set.to_owned())
                .or_default()
                .insert(key.clone());
        }
    }

    fn forget_sets(&mut self, key: &Key, pod: &Pod) {
        for set in recorded_sets(pod) {
            if let Some(keys) = self.injected.get_mut(set) {
                keys.remove(key);
                if keys.is_empty() {
                    self.injected.remove(set);
                }
            }
        }
    }

    /// All sets; a view of them borrows nothing of the index.
    fn all_sets(&self) -> Vec<Arc<SidecarSet>> {
        let sets = self.sets.group_entries("");
        sets.map(|(_, set, _)| Arc::clone(set)).collect()
    }

    /// Notes which of these sets a Pod lacks, which are all or only those of these names; returns those for which that
    /// changed.
    fn note_not_injected(
        &mut self,
        key: &Key,
        pod: Option<&PodView>,
        sets: &Sets<'_>,
        only: Option<&BTreeSet<String>>,
    ) -> BTreeSet<String> {
        static NONE: BTreeMap<String, String> = BTreeMap::new();
        let namespace = key.namespace.as_deref().unwrap_or_default();
        let lacking: BTreeSet<String> = match pod {
            None => BTreeSet::new(),
            Some(pod) => {
                let pod = InjectablePod {
                    labels: &pod.labels,
                    annotations: pod.workload_pod.as_ref().map_or(&NONE, |pod| &pod.annotations),
                    namespace,
                    namespace_labels: self.namespaces.get(namespace).map(Arc::as_ref),
                    active: pod.active(),
                };
                let lacks = |set: &&SetView<'_>| {
                    should_have_been_injected(set, &pod, &sets.canaries, &self.system_namespace)
                };
                let lacking = sets.all.iter().filter(lacks);
                lacking.map(|set| set.name.to_owned()).collect()
            }
        };
        let mut changed = BTreeSet::new();
        let mut forget = |(set, pods): (&String, &mut BTreeSet<Key>)| {
            if !lacking.contains(set) && pods.remove(key) {
                changed.insert(set.clone());
            }
        };
        match only {
            None => self.not_injected.iter_mut().for_each(forget),
            Some(only) => {
                for set in only {
                    if let Some(pods) = self.not_injected.get_mut(set) {
                        forget((set, pods));
                    }
                }
            }
        }
        if !changed.is_empty() {
            self.not_injected.retain(|_, pods| !pods.is_empty());
        }
        for set in lacking {
            if self
                .not_injected
                .entry(set.clone())
                .or_default()
                .insert(key.clone())
            {
                changed.insert(set);
            }
        }
        changed
    }

    /// Looks for the Pods that lack changed sets; returns the sets for which that changed.
    pub fn scan(&mut self, pods: &Store<PodView>) -> BTreeSet<String> {
        let sets = std::mem::take(&mut self.unscanned);
        let in_namespaces = std::mem::take(&mut self.unscanned_in);
        for set in &sets {
            if self.set(set).is_none() {
                self.not_injected.remove(set);
            }
        }
        let mut changed = BTreeSet::new();
        if !sets.is_empty() {
            changed = self.scan_pods(pods.entries(), &sets);
        }
        for (namespace, mut others) in in_namespaces {
            others.retain(|set| !sets.contains(set));
            if !others.is_empty() {
                changed.append(&mut self.scan_pods(pods.entries_of(Some(&namespace)), &others));
            }
        }
        changed
    }

    /// Looks for the Pods of these that lack `sets`.
    fn scan_pods(&mut self, pods: Vec<(Key, Arc<PodView>)>, sets: &BTreeSet<String>) -> BTreeSet<String> {
        let (all, mut changed) = (self.all_sets(), BTreeSet::new());
        let all = Sets::new(&all, Some(sets));
        for (key, pod) in pods {
            changed.extend(self.note_not_injected(&key, Some(&pod), &all, Some(sets)));
        }
        changed
    }

    /// A set changed: its Pods, and those of the set that it is a canary of, must be looked for.
    fn must_scan(&mut self, set: &SidecarSet) {
        let view = SetView::from(set);
        self.unscanned.insert(view.name.to_owned());
        self.unscanned.extend(view.canary_base().map(str::to_owned));
    }

    fn apply_set(&mut self, change: &Change<SidecarSet>, affected: &mut BTreeSet<String>) {
        let unchanged = |old: &SidecarSet, new: &SidecarSet| {
            let (old, new) = (&old.metadata, &new.metadata);
            old.uid == new.uid
                && old.generation == new.generation
                && old.labels == new.labels
                && old.annotations == new.annotations
                && old.deletion_timestamp == new.deletion_timestamp
        };
        match (&change.old, &change.new) {
            (Some(old), Some(new)) if unchanged(old, new) => {}
            _ => drop(affected.insert(change.key.name.clone())),
        }
        match (&change.old, &change.new) {
            (Some(old), Some(new)) if selects_same_pods(old, new) => {}
            (old, new) => [old, new]
                .into_iter()
                .flatten()
                .for_each(|set| self.must_scan(set)),
        }
        match (&change.old, &change.new) {
            (_, Some(new)) => self.sets.apply_watch(&change.key, versioned_set(Arc::clone(new))),
            (Some(old), None) => {
                let uid = old.metadata.uid.as_deref().unwrap_or_default();
                self.sets.apply_watch_delete(&change.key, uid);
            }
            (None, None) => {}
        }
    }

    fn apply_pod(&mut self, change: &Change<PodView>, affected: &mut BTreeSet<String>) {
        let is_same = match (&change.old, &change.new) {
            (Some(old), Some(new)) => lack_same_sets(old, new),
            _ => false,
        };
        // Most changes of Pods are of their statuses, and there may be many sets.
        if !is_same {
            let all = self.all_sets();
            let pod = change.new.as_deref();
            affected.extend(self.note_not_injected(&change.key, pod, &Sets::new(&all, None), None));
        }
        let injected = |view: &Option<Arc<PodView>>| {
            let pod = view.as_ref()?.workload_pod.clone()?;
            (!recorded_sets(&pod).is_empty()).then_some(pod)
        };
        let (old, new) = (injected(&change.old), injected(&change.new));
        for pod in [&old, &new].into_iter().flatten() {
            affected.extend(recorded_sets(pod).into_iter().map(str::to_owned));
        }
        if let Some(old) = &old {
            self.forget_sets(&change.key, old);
        }
        if let Some(new) = new {
            self.record_sets(&change.key, &new);
            self.pods
                .apply_watch(&change.key, versioned_pod(&change.key, new));
        } else if let Some(old) = &change.old {
            self.pods.apply_watch_delete(&change.key, &old.uid);
        }
    }

    fn apply_revision(&mut self, change: &Change<RevisionView>, affected: &mut BTreeSet<String>) {
        if change.key.namespace.as_deref() != Some(&self.system_namespace) {
            return;
        }
        let sets = [&change.old, &change.new]
            .into_iter()
            .flatten()
            .map(|view| set_of_revision(view));
        let sets: BTreeSet<String> = sets.filter(|set| !set.is_empty()).map(str::to_owned).collect();
        if sets.is_empty() {
            return;
        }
        match (&change.old, &change.new) {
            (_, Some(new)) => self
                .revisions
                .apply_watch(&change.key, versioned_revision(Arc::clone(new))),
            (Some(old), None) => self.revisions.apply_watch_delete(&change.key, &old.uid),
            (None, None) => {}
        }
        affected.extend(sets);
    }

    fn apply_namespace(&mut self, change: &Change<NamespaceLabels>, affected: &mut BTreeSet<String>) {
        match &change.new {
            Some(labels) => drop(
                self.namespaces
                    .insert(change.key.name.clone(), Arc::clone(labels)),
            ),
            None => drop(self.namespaces.remove(&change.key.name)),
        }
        let sets = self.sets.group_entries("");
        let selects = |set: &SidecarSet, labels: &Option<Arc<NamespaceLabels>>| {
            selects_namespace(&set.spec, labels.as_deref())
        };
        let selecting = sets.filter(|(_, set, _)| selects(set, &change.old) != selects(set, &change.new));
        let selecting: Vec<_> = selecting
            .map(|(key, set, _)| (key.name.clone(), Arc::clone(set)))
            .collect();
        let bases = selecting
            .iter()
            .filter_map(|(_, set)| Some(SetView::from(&**set).canary_base()?.to_owned()));
        let scanned: Vec<String> = bases
            .chain(selecting.iter().map(|(name, _)| name.clone()))
            .collect();
        if !scanned.is_empty() {
            let namespace = self.unscanned_in.entry(change.key.name.clone()).or_default();
            namespace.extend(scanned);
        }
        affected.extend(selecting.into_iter().map(|(name, _)| name));
    }

    /// Applies one change; returns the affected sets.
    pub fn apply(&mut self, event: &WatchEvent) -> BTreeSet<String> {
        let mut affected = BTreeSet::new();
        match event {
            WatchEvent::SidecarSet(change) => self.apply_set(change, &mut affected),
            WatchEvent::Pod(change) => self.apply_pod(change, &mut affected),
            WatchEvent::Revision(change) => self.apply_revision(change, &mut affected),
            WatchEvent::Namespace(change) => self.apply_namespace(change, &mut affected),
        }
        affected
    }
}

/// A change of one object.
pub enum WatchEvent {
    SidecarSet(Change<SidecarSet>),
    Pod(Change<PodView>),
    Revision(Change<RevisionView>),
    Namespace(Change<NamespaceLabels>),
}

impl std::fmt::Display for WatchEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SidecarSet(change) => write!(f, "SidecarSet {}", change.key),
            Self::Pod(change) => write!(f, "Pod {}", change.key),
            Self::Revision(change) => write!(f, "ControllerRevision {}", change.key),
            Self::Namespace(change) => write!(f, "Namespace {}", change.key),
        }
    }
}

/// All existing objects, and every change from now on. Sets come last, so that none is reconciled without its Pods.
pub fn watch_events(stores: &Stores) -> WatchEvents<WatchEvent> {
    WatchEvents::new(NAME)
        .with(stores.namespaces.subscribe(), WatchEvent::Namespace)
        .with(stores.revisions.subscribe(), WatchEvent::Revision)
        .with(stores.pods.subscribe(), WatchEvent::Pod)
        .with(stores.sidecar_sets.subscribe(), WatchEvent::SidecarSet)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;
    use crate::view::RawPod;
    use kruise_api::unconfirmed::CONFIRM_TIMEOUT;
    use kruise_cluster::write_cache::Written;

    fn set(name: &str, spec: Value) -> Arc<SidecarSet> {
        let mut all = json!({ "selector": { "matchLabels": { "app": "web" } },
            "namespaceSelector": { "matchLabels": { "env": "prod" } }, "containers": [{ "name": "log" }] });
        json_patch::merge(&mut all, &spec);
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet", "spec": all,
            "metadata": { "name": name, "uid": name, "resourceVersion": "1", "generation": 1 } });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn pod(injected: &str) -> Arc<PodView> {
        let pod = json!({ "metadata": { "name": "p", "namespace": "shop", "uid": "p", "resourceVersion": "1",
            "labels": { "app": "web" }, "annotations": { keys::SIDECAR_SET_INJECTED_LIST: injected } },
            "spec": { "containers": [{ "name": "app" }, { "name": "log" }] }, "status": { "phase": "Running" } });
        Arc::new(PodView::from(&RawPod::from(pod)))
    }

    fn change<T>(key: Key, old: Option<Arc<T>>, new: Option<Arc<T>>) -> Change<T> {
        Change { key, old, new }
    }

    struct World {
        index: Index,
        pods: Store<PodView>,
    }

    impl World {
        fn new() -> Self {
            let mut world = Self {
                index: Index::new("kruise-system"),
                pods: Store::from_objects([]),
            };
            world.namespace(json!({ "env": "prod" }));
            world
        }

        fn namespace(&mut self, labels: Value) -> BTreeSet<String> {
            let labels = Arc::new(serde_json::from_value(labels).unwrap());
            let old = self.index.namespaces.get("shop").cloned();
            let event = change(Key::cluster_scoped("shop"), old, Some(labels));
            self.apply(&WatchEvent::Namespace(event))
        }

        fn pod(&mut self, old: Option<Arc<PodView>>, new: Option<Arc<PodView>>) -> BTreeSet<String> {
            let key = Key::namespaced("shop", "p");
            let stored = new.as_deref().map(|pod| (key.clone(), pod.clone()));
            self.pods = Store::from_objects(stored);
            self.apply(&WatchEvent::Pod(change(key, old, new)))
        }

        fn set(&mut self, old: Option<Arc<SidecarSet>>, new: Option<Arc<SidecarSet>>) -> BTreeSet<String> {
            let name = old
                .as_ref()
                .or(new.as_ref())
                .unwrap()
                .metadata
                .name
                .clone()
                .unwrap();
            let event = change(Key::cluster_scoped(name), old, new);
            self.apply(&WatchEvent::SidecarSet(event))
        }

        fn apply(&mut self, event: &WatchEvent) -> BTreeSet<String> {
            let mut affected = self.index.apply(event);
            affected.extend(self.index.scan(&self.pods));
            affected
        }

        fn lacking(&self, set: &SidecarSet) -> usize {
            self.index.observe(set).not_injected.len()
        }
    }

    #[test]
    fn pods_without_sidecars_are_found_whatever_came_first() {
        let log = set("log", json!({}));
        for set_first in [true, false] {
            let mut world = World::new();
            if set_first {
                world.set(None, Some(Arc::clone(&log)));
                assert!(world.pod(None, Some(pod(""))).contains("log"));
            } else {
                world.pod(None, Some(pod("")));
                world.set(None, Some(Arc::clone(&log)));
            }
            assert_eq!(world.lacking(&log), 1);
            assert_eq!(world.pod(Some(pod("")), None), BTreeSet::from(["log".to_owned()]));
            assert_eq!(world.lacking(&log), 0);
        }
    }

    #[test]
    fn injected_and_unselected_pods_lack_nothing() {
        let log = set("log", json!({}));
        let mut world = World::new();
        world.set(None, Some(Arc::clone(&log)));
        assert_eq!(
            world.pod(None, Some(pod("log"))),
            BTreeSet::from(["log".to_owned()])
        );
        assert_eq!(
            (world.lacking(&log), world.index.observe(&log).pods.len()),
            (0, 1)
        );
        world.pod(Some(pod("log")), Some(pod("")));
        assert_eq!(
            (world.lacking(&log), world.index.observe(&log).pods.len()),
            (1, 0)
        );
        assert_eq!(
            world.namespace(json!({ "env": "test" })),
            BTreeSet::from(["log".to_owned()])
        );
        assert_eq!(world.lacking(&log), 0);
        world.namespace(json!({ "env": "prod" }));
        assert_eq!(world.lacking(&log), 1);
        let paused = Arc::new({
            let mut paused =
                SidecarSet::clone(&set("log", json!({ "injectionStrategy": { "paused": true } })));
            paused.metadata.generation = Some(2);
            paused.metadata.resource_version = Some("2".to_owned());
            paused
        });
        world.set(Some(log), Some(Arc::clone(&paused)));
        assert_eq!(world.lacking(&paused), 0);
    }

    #[test]
    fn status_written_by_us_affects_no_set() {
        let before = set("log", json!({}));
        let mut after = SidecarSet::clone(&before);
        after.status = Some(kruise_api::sidecarset::SidecarSetStatus::default());
        after.metadata.resource_version = Some("2".to_owned());
        let mut world = World::new();
        world.set(None, Some(Arc::clone(&before)));
        assert_eq!(world.set(Some(before), Some(Arc::new(after))), BTreeSet::new());
    }

    #[test]
    fn only_changes_of_selection_look_at_all_pods() {
        let log = |spec: Value| {
            let mut set = SidecarSet::clone(&set("log", spec));
            set.metadata.generation = Some(2);
            Arc::new(set)
        };
        let old = set("log", json!({}));
        let selector = json!({ "selector": { "matchLabels": { "app": "api" } } });
        for (spec, scanned) in [
            (json!({ "containers": [{ "name": "log", "image": "log:2" }] }), 0),
            (selector, 1),
            (
                json!({ "namespaceSelector": { "matchLabels": { "env": "test" } } }),
                1,
            ),
            (json!({ "injectionStrategy": { "paused": true } }), 1),
        ] {
            let mut world = World::new();
            world.set(None, Some(Arc::clone(&old)));
            world.pod(None, Some(pod("")));
            let event = change(
                Key::cluster_scoped("log"),
                Some(Arc::clone(&old)),
                Some(log(spec.clone())),
            );
            let affected = world.index.apply(&WatchEvent::SidecarSet(event));
            assert_eq!(affected, BTreeSet::from(["log".to_owned()]), "{spec}");
            assert_eq!(world.index.unscanned.len(), scanned, "{spec}");
            world.index.scan(&world.pods);
            assert_eq!(world.lacking(&old), 1 - scanned, "{spec}");
        }
    }

    #[test]
    fn new_namespace_affects_only_sets_that_select_namespaces() {
        let everywhere = json!({ "namespaceSelector": null });
        for (spec, affected) in [(everywhere, 0), (json!({}), 1)] {
            let mut world = World::new();
            world.set(None, Some(set("log", spec)));
            let labels = Some(Arc::new(NamespaceLabels::from([("env".into(), "prod".into())])));
            let event = change(Key::cluster_scoped("new"), None, labels);
            world.index.scan(&world.pods);
            assert_eq!(world.index.apply(&WatchEvent::Namespace(event)).len(), affected);
            assert_eq!(
                world.index.unscanned.len(),
                0,
                "Pods of other namespaces are not looked at"
            );
            assert_eq!(world.index.unscanned_in.len(), affected);
        }
    }

    #[test]
    fn revisions_of_other_namespaces_do_not_count() {
        let revision = json!({ "metadata": { "name": "log-1", "uid": "r", "resourceVersion": "1",
            "labels": { keys::SIDECAR_SET_NAME: "log" } }, "revision": 7, "data": {} });
        let view = RevisionView::from_object(&serde_json::from_value(revision).unwrap()).map(Arc::new);
        let log = set("log", json!({}));
        for (namespace, counted) in [("shop", 0), ("kruise-system", 1)] {
            let mut world = World::new();
            let event = change(Key::namespaced(namespace, "log-1"), None, view.clone());
            let affected = world.apply(&WatchEvent::Revision(event));
            assert_eq!(affected.len(), counted, "{namespace}");
            assert_eq!(world.index.observe(&log).revisions.len(), counted, "{namespace}");
        }
    }

    /// Otherwise a lost change or deletion would stay unseen for ever.
    #[test]
    fn unconfirmed_writes_are_read_after_a_while() {
        let mut world = World::new();
        world.set(None, Some(set("log", json!({}))));
        world.pod(None, Some(pod("log")));
        let now = Instant::now();
        assert_eq!(world.index.next_fetch("log", now), None);
        let mut written = SidecarSet::clone(&set("log", json!({})));
        written.metadata.resource_version = Some("2".to_owned());
        let key = Key::cluster_scoped("log");
        let entry = versioned_set(Arc::new(written));
        world.index.sets.apply_write(&key, entry, Written::Changed, now);
        let revision = json!({ "metadata": { "name": "log-1", "uid": "r", "resourceVersion": "1",
            "labels": { keys::SIDECAR_SET_NAME: "log" } }, "revision": 7, "data": {} });
        let view = RevisionView::from_object(&serde_json::from_value(revision).unwrap()).unwrap();
        let revision = Key::namespaced("kruise-system", "log-1");
        let entry = versioned_revision(Arc::new(view));
        let later = now + Duration::from_secs(1);
        let revisions = &mut world.index.revisions;
        revisions.apply_write(&revision, entry, Written::Created, later);

        assert_eq!(world.index.next_fetch("log", now), Some(CONFIRM_TIMEOUT));
        let unconfirmed = |set, pods, revisions| Unconfirmed { set, pods, revisions };
        let at = |index: &Index, now| index.unconfirmed("log", now);
        assert_eq!(at(&world.index, now), unconfirmed(false, vec![], vec![]));
        let due = now + CONFIRM_TIMEOUT;
        assert_eq!(at(&world.index, due), unconfirmed(true, vec![], vec![]));
        let pod = Key::namespaced("shop", "p");
        world.index.pods.mark_unknown(&pod);
        let due = later + CONFIRM_TIMEOUT;
        assert_eq!(
            at(&world.index, due),
            unconfirmed(true, vec![pod], vec![revision])
        );
    }

    #[test]
    fn sets_that_a_pod_records_are_bounded() {
        let many: Vec<String> = (0..10_000).map(|n| format!("s{n}")).collect();
        let mut world = World::new();
        let affected = world.pod(None, Some(pod(&format!("a/b,{},?", many.join(",")))));
        assert_eq!(affected.len(), MAX_RECORDED_SETS);
        assert!(affected.iter().all(|set| set.starts_with('s')));
    }
}
