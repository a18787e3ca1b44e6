//! Index of PodProbeMarkers, of the Pods that they select, and of Pods with liveness probes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::plan::ProbedPod;
use crate::Stores;
use crate::view::{NodeView, PodView};
use kruise_api::node_pod_probe::{
    MAX_PROBES_OF_POD, NodePodProbe, NodePodProbeSpec, PodProbeStatus, liveness_container,
};
use kruise_api::pod_probe_marker::PodProbeMarker;
use kruise_api::selector::CompiledSelector;
use kruise_cluster::{Change, Key, Store, WatchEvents};
use kruise_ops::{FeatureGate, FeatureGates};

/// Name in logs and metrics.
pub const NAME: &str = "podprobemarker";

/// What is reconciled.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// Status and finalizer of a PodProbeMarker.
    Marker(Key),
    /// The NodePodProbe of a node.
    Node(String),
    /// The marks of a Pod.
    Pod(Key),
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Marker(key) => write!(f, "PodProbeMarker {key}"),
            Self::Node(name) => write!(f, "Node {name}"),
            Self::Pod(key) => write!(f, "Pod {key}"),
        }
    }
}

/// PodProbeMarkers, the Pods that they select, and Pods with liveness probes.
#[derive(Default)]
pub struct Index {
    /// Whether liveness probes are run (gate `EnhancedLivenessProbe`).
    enhanced_liveness: bool,
    /// Whether virtual nodes run probes (gate `EnablePodProbeMarkerOnServerless`).
    virtual_nodes: bool,
    /// Without what does not concern Pods, such as status and resourceVersion.
    markers: BTreeMap<Key, IndexedMarker>,
    pods: HashMap<Key, ProbedPod>,
    by_node: BTreeMap<String, BTreeSet<Key>>,
    by_marker: BTreeMap<Key, BTreeSet<Key>>,
    /// The nodes whose NodePodProbes list probes of a PodProbeMarker.
    listed_on: BTreeMap<Key, BTreeSet<Key>>,
}

/// A PodProbeMarker that can be matched with many Pods.
struct IndexedMarker {
    marker: Arc<PodProbeMarker>,
    selector: CompiledSelector,
}

impl IndexedMarker {
    fn is_active(&self) -> bool {
        self.marker.metadata.deletion_timestamp.is_none()
    }
}

impl Index {
    /// An empty index, according to the gates.
    pub fn new(gates: &FeatureGates) -> Self {
        Self {
            enhanced_liveness: gates.enabled(FeatureGate::EnhancedLivenessProbe),
            virtual_nodes: gates.enabled(FeatureGate::EnablePodProbeMarkerOnServerless),
            ..Self::default()
        }
    }

    /// A Pod with its PodProbeMarkers.
    pub fn pod(&self, key: &Key) -> Option<ProbedPod> {
        self.pods.get(key).cloned()
    }

    /// The Pods of a node that its daemon can probe.
    pub fn reachable_pods_on(&self, node: &str) -> Vec<(Key, ProbedPod)> {
        let mut pods = self.pods_on(node);
        pods.retain(|(_, pod)| !pod.ip.is_empty());
        pods
    }

    /// The Pods of a node.
    fn pods_on(&self, node: &str) -> Vec<(Key, ProbedPod)> {
        let keys = self.by_node.get(node).into_iter().flatten();
        keys.filter_map(|key| Some((key.clone(), self.pod(key)?)))
            .collect()
    }

    /// Number of Pods of a PodProbeMarker that are probed.
    pub fn count(&self, marker: &Key, nodes: &Store<NodeView>) -> usize {
        let keys = self.by_marker.get(marker).into_iter().flatten();
        let pods = keys.filter_map(|key| self.pods.get(key));
        let is_probed = |pod: &&ProbedPod| {
            let node = nodes.get(&Key::cluster_scoped(pod.node.as_str()));
            node.is_some_and(|node| match &pod.reported {
                Some(reported) if node.is_virtual() => reported.has_marker(&marker.name),
                _ => has_daemon(&node),
            })
        };
        pods.filter(is_probed).count()
    }

    /// Whether Pods are marked for a PodProbeMarker.
    pub fn is_active(&self, marker: &Key) -> bool {
        self.markers.get(marker).is_some_and(IndexedMarker::is_active)
    }

    /// The nodes whose NodePodProbes list probes of a PodProbeMarker, as far as was seen.
    pub fn nodes_listing(&self, marker: &Key) -> Vec<Key> {
        let nodes = self.listed_on.get(marker);
        nodes.into_iter().flatten().cloned().collect()
    }

    /// PodProbeMarkers of a namespace that are not being deleted.
    fn active_markers(&self, namespace: &Option<String>) -> impl Iterator<Item = &IndexedMarker> {
        let first = Key {
            namespace: namespace.clone(),
            name: String::new(),
        };
        let markers = self.markers.range(first..);
        let markers = markers.take_while(move |(key, _)| key.namespace == *namespace);
        markers
            .map(|(_, indexed)| indexed)
            .filter(|indexed| indexed.is_active())
    }

    /// A Pod changed; returns what must be reconciled.
    fn apply_pod(&mut self, key: &Key, old: Option<&PodView>, pod: Option<&PodView>) -> Vec<Work> {
        let probed = pod.and_then(|pod| {
            let is_same =
                |old: &PodView| old.uid == pod.uid && old.labels == pod.labels && self.is_probed(old);
            let markers = if old.is_some_and(is_same) {
                self.known_markers(key)
            } else {
                self.selecting_markers(key, pod)
            };
            self.probed_pod(pod, markers)
        });
        self.replace_pod(key, probed)
    }

    fn replace_pod(&mut self, key: &Key, probed: Option<ProbedPod>) -> Vec<Work> {
        let old = self.pods.get(key);
        if old == probed.as_ref() {
            return Vec::new();
        }
        let mut work = vec![Work::Pod(key.clone())];
        for pod in [old, probed.as_ref()].into_iter().flatten() {
            work.push(Work::Node(pod.node.clone()));
            work.extend(marker_work(key, pod));
        }
        if let Some(old) = self.pods.remove(key) {
            remove_from(&mut self.by_node, &old.node, key);
            for marker in marker_keys(key, &old) {
                remove_from(&mut self.by_marker, &marker, key);
            }
        }
        if let Some(pod) = probed {
            for marker in marker_keys(key, &pod) {
                self.by_marker.entry(marker).or_default().insert(key.clone());
            }
            self.by_node
                .entry(pod.node.clone())
                .or_default()
                .insert(key.clone());
            self.pods.insert(key.clone(), pod);
        }
        work
    }

    fn known_markers(&self, pod: &Key) -> Vec<Arc<PodProbeMarker>> {
        self.pods
            .get(pod)
            .map(|pod| pod.markers.clone())
            .unwrap_or_default()
    }

    /// The PodProbeMarkers of a Pod, sorted by name.
    fn selecting_markers(&self, key: &Key, pod: &PodView) -> Vec<Arc<PodProbeMarker>> {
        if !self.is_probed(pod) {
            return Vec::new();
        }
        self.active_markers(&key.namespace)
            .filter(|indexed| indexed.selector.matches(&pod.labels))
            // Each has a probe at least, and no Pod has more.
            .take(MAX_PROBES_OF_POD)
            .map(|indexed| Arc::clone(&indexed.marker))
            .collect()
    }

    fn is_probed(&self, pod: &PodView) -> bool {
        // Before it has an address nothing of it is ready, and the whole object would be written twice.
        let is_reachable = !pod.ip.is_empty() || self.virtual_nodes && pod.reported_probes.is_some();
        pod.active() && pod.initialized && is_reachable && pod.node.is_some()
    }

    fn probed_pod(&self, pod: &PodView, markers: Vec<Arc<PodProbeMarker>>) -> Option<ProbedPod> {
        let node = pod.node.clone().filter(|_| self.is_probed(pod))?;
        let liveness = pod.liveness.as_ref().filter(|_| self.enhanced_liveness);
        let liveness = liveness.map(|liveness| Arc::clone(&liveness.probes));
        let liveness = liveness.unwrap_or_default();
        (!markers.is_empty() || !liveness.is_empty()).then(|| ProbedPod {
            uid: pod.uid.clone(),
            node,
            ip: pod.ip.to_string(),
            ports: pod.ports.to_vec(),
            markers,
            liveness,
            reported: pod.reported_probes.clone().filter(|_| self.virtual_nodes),
        })
    }

    /// A PodProbeMarker changed: its Pods do, too. Only this one is matched, because a namespace may have thousands.
    fn apply_marker(
        &mut self,
        key: &Key,
        marker: Option<&Arc<PodProbeMarker>>,
        pods: &Store<PodView>,
    ) -> Vec<Work> {
        let mut work = vec![Work::Marker(key.clone())];
        let reduced = marker.map(|marker| reduce(marker));
        if self.markers.get(key).map(|old| &*old.marker) == reduced.as_ref() {
            return work;
        }
        let indexed = reduced.map(|marker| IndexedMarker {
            selector: CompiledSelector::from(&marker.spec.selector),
            marker: Arc::new(marker),
        });
        let selected = self.by_marker.get(key).cloned().unwrap_or_default();
        let is_active = indexed.as_ref().is_some_and(|indexed| indexed.is_active());
        match indexed {
            Some(indexed) => self.markers.insert(key.clone(), indexed),
            None => self.markers.remove(key),
        };
        let others = is_active.then(|| pods.entries_of(key.namespace.as_deref()));
        let others = others.into_iter().flatten();
        let others = others.filter(|(pod, _)| !selected.contains(pod));
        let selected = selected
            .iter()
            .filter_map(|pod| Some((pod.clone(), pods.get(pod)?)));
        for (pod_key, pod) in selected.chain(others) {
            let marker = self.markers.get(key);
            let marker = marker.filter(|indexed| {
                indexed.is_active() && self.is_probed(&pod) && indexed.selector.matches(&pod.labels)
            });
            let marker = marker.map(|indexed| Arc::clone(&indexed.marker));
            let Some(markers) = self.with_marker(&pod_key, &pod, &key.name, marker) else {
                continue;
            };
            let probed = self.probed_pod(&pod, markers);
            work.extend(self.replace_pod(&pod_key, probed));
        }
        work
    }

    /// The PodProbeMarkers of a Pod after a change of one, which is `None` if it does not select the Pod; `None` if they
    /// remain as they are.
    fn with_marker(
        &self,
        key: &Key,
        pod: &PodView,
        name: &str,
        marker: Option<Arc<PodProbeMarker>>,
    ) -> Option<Vec<Arc<PodProbeMarker>>> {
        let mut markers = self.known_markers(key);
        let position =
            markers.binary_search_by(|one| one.metadata.name.as_deref().unwrap_or_default().cmp(name));
        match (position, marker) {
            (Ok(at), Some(marker)) => *markers.get_mut(at)? = marker,
            (Err(at), Some(marker)) => {
                markers.insert(at, marker);
                markers.truncate(MAX_PROBES_OF_POD);
            }
            // One beyond the limit may follow.
            (Ok(_), None) if markers.len() >= MAX_PROBES_OF_POD => markers = self.selecting_markers(key, pod),
            (Ok(at), None) => drop(markers.remove(at)),
            (Err(_), None) => return None,
        }
        Some(markers)
    }

    fn apply_node(&self, change: &Change<NodeView>) -> Vec<Work> {
        let state =
            |node: &Option<Arc<NodeView>>| node.as_deref().map(|node| (has_daemon(node), node.is_virtual()));
        if state(&change.old) == state(&change.new) {
            return Vec::new();
        }
        let name = &change.key.name;
        let mut work = vec![Work::Node(name.clone())];
        for (key, pod) in self.pods_on(name) {
            work.extend(marker_work(&key, &pod));
            work.extend(pod.reported.is_some().then_some(Work::Pod(key)));
        }
        work
    }

    fn apply_node_pod_probe(&mut self, change: &Change<NodePodProbe>) -> Vec<Work> {
        let old = change.old.as_deref().map(|object| &object.spec);
        let new = change.new.as_deref().map(|object| &object.spec);
        let mut work = Vec::new();
        if old != new {
            work.push(Work::Node(change.key.name.clone()));
            let (old, new) = (listed_markers(old), listed_markers(new));
            for (namespace, name) in old.difference(&new) {
                let marker = Key::namespaced(*namespace, *name);
                remove_from(&mut self.listed_on, &marker, &change.key);
                // If it is being deleted, it has waited for that.
                let indexed = self.markers.get(&marker);
                if indexed.is_some_and(|indexed| !indexed.is_active()) {
                    work.push(Work::Marker(marker));
                }
            }
            for (namespace, name) in new.difference(&old) {
                let nodes = self.listed_on.entry(Key::namespaced(*namespace, *name));
                nodes.or_default().insert(change.key.clone());
            }
        }
        let old = statuses(change.old.as_deref());
        let changed = statuses(change.new.as_deref())
            .into_iter()
            .filter(|(uid, status)| old.get(uid) != Some(status));
        work.extend(
            changed.map(|(_, pod)| Work::Pod(Key::namespaced(pod.namespace.as_str(), pod.name.as_str()))),
        );
        work
    }

    /// One object changed; returns what must be reconciled.
    pub fn apply(&mut self, event: &WatchEvent, pods: &Store<PodView>) -> Vec<Work> {
        match event {
            WatchEvent::Marker(Change { key, new, .. }) => self.apply_marker(key, new.as_ref(), pods),
            WatchEvent::Node(change) => self.apply_node(change),
            WatchEvent::NodePodProbe(change) => self.apply_node_pod_probe(change),
            WatchEvent::Pod(Change { key, old, new }) => self.apply_pod(key, old.as_deref(), new.as_deref()),
        }
    }
}

/// What of a PodProbeMarker concerns Pods.
fn reduce(marker: &PodProbeMarker) -> PodProbeMarker {
    let metadata = ObjectMeta {
        name: marker.metadata.name.clone(),
        namespace: marker.metadata.namespace.clone(),
        deletion_timestamp: marker.metadata.deletion_timestamp.clone(),
        ..ObjectMeta::default()
    };
    PodProbeMarker {
        metadata,
        spec: marker.spec.clone(),
        status: None,
    }
}

/// The PodProbeMarkers of a Pod.
fn marker_keys(key: &Key, pod: &ProbedPod) -> impl Iterator<Item = Key> {
    let names = pod
        .markers
        .iter()
        .filter_map(|marker| marker.metadata.name.clone());
    names.map(|name| Key {
        namespace: key.namespace.clone(),
        name,
    })
}

fn marker_work(key: &Key, pod: &ProbedPod) -> Vec<Work> {
    marker_keys(key, pod).map(Work::Marker).collect()
}

/// Removes a Pod from a set, and the set if it is empty.
fn remove_from<K: Ord>(sets: &mut BTreeMap<K, BTreeSet<Key>>, of: &K, pod: &Key) {
    if let Some(keys) = sets.get_mut(of) {
        keys.remove(pod);
        if keys.is_empty() {
            sets.remove(of);
        }
    }
}

/// Whether a daemon runs on the node.
pub fn has_daemon(node: &NodeView) -> bool {
    !node.terminating && !node.is_virtual()
}

/// The namespaces and names of the PodProbeMarkers whose probes a NodePodProbe lists.
fn listed_markers(spec: Option<&NodePodProbeSpec>) -> BTreeSet<(&str, &str)> {
    let pods = spec.into_iter().flat_map(|spec| &spec.pod_probes);
    let names = pods.flat_map(|pod| {
        let probes = pod.probes.iter();
        probes.map(move |probe| (pod.namespace.as_str(), probe.name.as_str()))
    });
    let of_markers = names.filter(|(_, name)| liveness_container(name).is_none());
    of_markers
        .filter_map(|(namespace, name)| Some((namespace, name.split_once('#')?.0)))
        .collect()
}

/// The results of a NodePodProbe by the UIDs of the Pods.
fn statuses(object: Option<&NodePodProbe>) -> BTreeMap<&str, &PodProbeStatus> {
    let status = object.and_then(|object| object.status.as_ref());
    let pods = status.into_iter().flat_map(|status| &status.pod_probe_statuses);
    pods.map(|pod| (pod.uid.as_str(), pod)).collect()
}

/// A change of one object.
pub enum WatchEvent {
    Marker(Change<PodProbeMarker>),
    Node(Change<NodeView>),
    NodePodProbe(Change<NodePodProbe>),
    Pod(Change<PodView>),
}

impl fmt::Display for WatchEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Marker(change) => write!(f, "PodProbeMarker {}", change.key),
            Self::Node(change) => write!(f, "Node {}", change.key),
            Self::NodePodProbe(change) => write!(f, "NodePodProbe {}", change.key),
            Self::Pod(change) => write!(f, "Pod {}", change.key),
        }
    }
}

/// All existing objects, and every change from now on.
pub fn watch_events(
    stores: &Stores,
    markers: &Store<PodProbeMarker>,
    node_pod_probes: &Store<NodePodProbe>,
) -> WatchEvents<WatchEvent> {
    WatchEvents::new(NAME)
        .with(markers.subscribe(), WatchEvent::Marker)
        .with(stores.nodes.subscribe(), WatchEvent::Node)
        .with(stores.pods.subscribe(), WatchEvent::Pod)
        .with(node_pod_probes.subscribe(), WatchEvent::NodePodProbe)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::view::RawPod;
    use kruise_api::keys;

    fn pod(ip: &str) -> PodView {
        PodView::from(&RawPod::from(json!({
            "metadata": { "name": "p", "namespace": "n", "uid": "u", "labels": { "app": "a" } },
            "spec": { "nodeName": "node", "containers": [{ "name": "c" }] },
            "status": { "phase": "Running", "podIP": ip,
                "conditions": [{ "type": "Initialized", "status": "True" }] },
        })))
    }

    fn apply_marker(index: &mut Index, name: &str, pods: &Store<PodView>) -> Vec<Work> {
        let marker = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "PodProbeMarker",
            "metadata": { "name": name, "namespace": "n" },
            "spec": { "selector": { "matchLabels": { "app": "a" } }, "probes": [] } });
        let marker: PodProbeMarker = serde_json::from_value(marker).unwrap();
        index.apply_marker(&Key::namespaced("n", name), Some(&Arc::new(marker)), pods)
    }

    /// Otherwise the object would be written twice for each new Pod.
    #[test]
    fn pod_is_probed_once_it_has_an_address() {
        let key = Key::namespaced("n", "p");
        for (ip, probed) in [("", 0), ("10.0.0.1", 1)] {
            let mut index = Index::default();
            apply_marker(&mut index, "m", &Store::from_objects([(key.clone(), pod(ip))]));
            assert_eq!(index.reachable_pods_on("node").len(), probed, "{ip:?}");
        }
    }

    /// One namespace may have thousands.
    #[test]
    fn pod_has_a_limited_number_of_markers() {
        let key = Key::namespaced("n", "p");
        let foreign = Key::namespaced("other", "p");
        let pods = Store::from_objects([(key.clone(), pod("10.0.0.1")), (foreign, pod("10.0.0.2"))]);
        let mut index = Index::default();
        for number in 0..100 {
            apply_marker(&mut index, &format!("m{number:02}"), &pods);
        }
        assert_eq!(index.pods_on("node").len(), 1, "none of another namespace");
        assert_eq!(index.pod(&key).unwrap().markers.len(), MAX_PROBES_OF_POD);
        let node = |labels: BTreeMap<String, String>| {
            let node = NodeView {
                labels,
                ..NodeView::default()
            };
            Store::from_objects([(Key::cluster_scoped("node"), node)])
        };
        let nodes = node(BTreeMap::new());
        let count = |name: &str| index.count(&Key::namespaced("n", name), &nodes);
        assert_eq!((count("m00"), count("m63"), count("m64")), (1, 1, 0));
        let labels = [(keys::TYPE.to_owned(), keys::TYPE_VIRTUAL_KUBELET.to_owned())];
        assert_eq!(index.count(&Key::namespaced("n", "m00"), &node(labels.into())), 0);
        index.apply_pod(&key, None, None);
        assert!(index.by_marker.is_empty() && index.by_node.is_empty());
    }

    /// A node may change its NodePodProbe with each Pod, and a tenant may delete thousands of PodProbeMarkers at once.
    #[test]
    fn deleted_marker_is_reconciled_when_its_probes_are_gone() {
        let mut index = Index::default();
        for name in ["gone", "other"] {
            let marker = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "PodProbeMarker",
                "metadata": { "name": name, "namespace": "n", "deletionTimestamp": "2026-01-01T00:00:00Z" },
                "spec": { "selector": {}, "probes": [] } });
            let marker: PodProbeMarker = serde_json::from_value(marker).unwrap();
            let key = Key::namespaced("n", name);
            index.apply_marker(&key, Some(&Arc::new(marker)), &Store::from_objects([]));
        }
        let object = |probes: &[&str]| -> Arc<NodePodProbe> {
            let probes = probes
                .iter()
                .map(|name| json!({ "name": name, "containerName": "c", "probe": {} }));
            let probes: Vec<_> = probes.collect();
            let pod = json!({ "name": "p", "namespace": "n", "uid": "u", "probes": probes });
            let object = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "NodePodProbe",
                "metadata": { "name": "node" }, "spec": { "podProbes": [pod] } });
            Arc::new(serde_json::from_value(object).unwrap())
        };
        let mut apply = |old: Option<Arc<NodePodProbe>>, new: Option<Arc<NodePodProbe>>| {
            let key = Key::cluster_scoped("node");
            let work = index.apply_node_pod_probe(&Change { key, old, new });
            let is_listed = |name: &str| !index.nodes_listing(&Key::namespaced("n", name)).is_empty();
            (work, ["gone", "other"].map(is_listed))
        };
        let marker = |name: &str| Work::Marker(Key::namespaced("n", name));
        let changed = Work::Node("node".to_owned());
        let (both, one) = (object(&["gone#a", "other#a", "other#b"]), object(&["other#b"]));
        let first = apply(None, Some(Arc::clone(&both)));
        assert_eq!(first, (vec![changed.clone()], [true, true]));
        let second = apply(Some(both), Some(Arc::clone(&one)));
        assert_eq!(second, (vec![changed.clone(), marker("gone")], [false, true]));
        let third = apply(Some(one), None);
        assert_eq!(third, (vec![changed, marker("other")], [false, false]));
        assert!(index.listed_on.is_empty());
    }

    /// One step of a history: a PodProbeMarker or a Pod is created, changed or deleted.
    #[derive(Clone, Debug)]
    enum Step {
        Marker(usize, Option<&'static str>),
        Pod(usize, Option<&'static str>),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        let value = || prop::option::weighted(0.7, prop::sample::select(vec!["a", "b"]));
        prop_oneof![
            (0..70usize, value()).prop_map(|(number, value)| Step::Marker(number, value)),
            (0..3usize, value()).prop_map(|(number, value)| Step::Pod(number, value)),
        ]
    }

    fn marker_for(number: usize, value: &str) -> Arc<PodProbeMarker> {
        let marker = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "PodProbeMarker",
            "metadata": { "name": format!("m{number:02}"), "namespace": "n" },
            "spec": { "selector": { "matchLabels": { "app": value } }, "probes": [] } });
        Arc::new(serde_json::from_value(marker).unwrap())
    }

    proptest! {
        /// Only what changed is matched; the result is as if all were.
        #[test]
        fn index_is_as_if_all_were_matched_again(steps in prop::collection::vec(any_step(), 1..60)) {
            let mut index = Index::default();
            let mut markers: BTreeMap<usize, &str> = (0..66).map(|number| (number, "a")).collect();
            let mut pods: BTreeMap<Key, PodView> = BTreeMap::new();
            for (number, value) in &markers {
                let key = Key::namespaced("n", format!("m{number:02}"));
                index.apply_marker(&key, Some(&marker_for(*number, value)), &Store::from_objects([]));
            }
            for step in steps {
                match step {
                    Step::Marker(number, value) => {
                        match value {
                            Some(value) => markers.insert(number, value),
                            None => markers.remove(&number),
                        };
                        let key = Key::namespaced("n", format!("m{number:02}"));
                        let marker = value.map(|value| marker_for(number, value));
                        index.apply_marker(&key, marker.as_ref(), &Store::from_objects(pods.clone()));
                    }
                    Step::Pod(number, value) => {
                        let key = Key::namespaced("n", format!("p{number}"));
                        let new = value.map(|value| PodView {
                            labels: Arc::new([("app".to_owned(), value.to_owned())].into()),
                            ..pod("10.0.0.1")
                        });
                        let old = match new.clone() {
                            Some(new) => pods.insert(key.clone(), new),
                            None => pods.remove(&key),
                        };
                        index.apply_pod(&key, old.as_ref(), new.as_ref());
                    }
                }
                for (key, pod) in &pods {
                    let matching = markers.iter().filter(|(_, value)| pod.labels["app"] == **value);
                    let names = matching.map(|(number, _)| format!("m{number:02}"));
                    let expected: Vec<String> = names.take(MAX_PROBES_OF_POD).collect();
                    let found = index.known_markers(key);
                    let found = found.iter().map(|marker| marker.metadata.name.clone().unwrap());
                    prop_assert_eq!(found.collect::<Vec<_>>(), expected);
                }
                let listed: usize = index.by_marker.values().map(BTreeSet::len).sum();
                prop_assert_eq!(listed, index.pods.values().map(|pod| pod.markers.len()).sum::<usize>());
                prop_assert!(index.pods.keys().all(|key| pods.contains_key(key)));
            }
        }
    }
}
