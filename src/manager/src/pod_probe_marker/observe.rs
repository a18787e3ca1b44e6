//! Index of PodProbeMarkers, of the Pods that they select, and of Pods with liveness probes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::sync::mpsc::UnboundedSender;

use super::plan::ProbedPod;
use super::{ControllerState, NAME, Work};
use crate::view::{NodeView, PodView, matches};
use kruise_api::node_pod_probe::{MAX_PROBES_OF_POD, NodePodProbe, PodProbeStatus};
use kruise_api::pod_probe_marker::PodProbeMarker;
use kruise_cluster::{Change, Key, Store, WatchEvents};
use kruise_ops::{FeatureGate, FeatureGates};

/// PodProbeMarkers, the Pods that they select, and Pods with liveness probes.
#[derive(Default)]
pub struct Index {
    /// Whether liveness probes are run (gate `EnhancedLivenessProbe`).
    enhanced_liveness: bool,
    /// Whether virtual nodes run probes (gate `EnablePodProbeMarkerOnServerless`).
    virtual_nodes: bool,
    /// Without what does not concern Pods, such as status and resourceVersion.
    markers: BTreeMap<Key, Arc<PodProbeMarker>>,
    pods: HashMap<Key, ProbedPod>,
    by_node: BTreeMap<String, BTreeSet<Key>>,
    by_marker: BTreeMap<Key, BTreeSet<Key>>,
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

    /// PodProbeMarkers of a namespace that are not being deleted.
    fn active_markers(&self, namespace: &Option<String>) -> impl Iterator<Item = &Arc<PodProbeMarker>> {
        let first = Key {
            namespace: namespace.clone(),
            name: String::new(),
        };
        let markers = self.markers.range(first..);
        let markers = markers.take_while(move |(key, _)| key.namespace == *namespace);
        markers
            .map(|(_, marker)| marker)
            .filter(|marker| marker.metadata.deletion_timestamp.is_none())
    }

    /// A Pod changed; returns what must be reconciled.
    fn apply_pod(&mut self, key: &Key, pod: Option<&PodView>) -> Vec<Work> {
        let probed = pod.and_then(|pod| self.probed_pod(key, pod));
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

    fn probed_pod(&self, key: &Key, pod: &PodView) -> Option<ProbedPod> {
        let reported = pod.reported_probes.clone().filter(|_| self.virtual_nodes);
        // Before it has an address nothing of it is ready, and the whole object would be written twice.
        let is_reachable = !pod.ip.is_empty() || reported.is_some();
        let is_probed = pod.active() && pod.initialized && is_reachable;
        let node = pod.node.clone().filter(|_| is_probed)?;
        let markers = self.active_markers(&key.namespace);
        let markers: Vec<_> = markers
            .filter(|marker| matches(&marker.spec.selector, &pod.labels))
            // Each has a probe at least, and no Pod has more.
            .take(MAX_PROBES_OF_POD)
            .cloned()
            .collect();
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
            reported,
        })
    }

    /// A PodProbeMarker changed: its Pods do, too.
    fn apply_marker(
        &mut self,
        key: &Key,
        marker: Option<&Arc<PodProbeMarker>>,
        pods: &Store<PodView>,
    ) -> Vec<Work> {
        let mut work = vec![Work::Marker(key.clone())];
        let reduced = marker.map(|marker| reduce(marker));
        if self.markers.get(key).map(|old| &**old) == reduced.as_ref() {
            return work;
        }
        match reduced {
            Some(marker) => self.markers.insert(key.clone(), Arc::new(marker)),
            None => self.markers.remove(key),
        };
        for (pod_key, pod) in pods.entries_of(key.namespace.as_deref()) {
            work.extend(self.apply_pod(&pod_key, Some(&pod)));
        }
        work
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

    fn apply_node_pod_probe(&self, change: &Change<NodePodProbe>) -> Vec<Work> {
        let spec = |object: &Option<Arc<NodePodProbe>>| object.as_ref().map(|object| object.spec.clone());
        let mut work = Vec::new();
        if spec(&change.old) != spec(&change.new) {
            work.push(Work::Node(change.key.name.clone()));
            // Their probes may have gone.
            let deleting = self
                .markers
                .iter()
                .filter(|(_, marker)| marker.metadata.deletion_timestamp.is_some());
            work.extend(deleting.map(|(key, _)| Work::Marker(key.clone())));
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

    fn apply(&mut self, event: &WatchEvent, pods: &Store<PodView>) -> Vec<Work> {
        match event {
            WatchEvent::Marker(Change { key, new, .. }) => self.apply_marker(key, new.as_ref(), pods),
            WatchEvent::Node(change) => self.apply_node(change),
            WatchEvent::NodePodProbe(change) => self.apply_node_pod_probe(change),
            WatchEvent::Pod(Change { key, new, .. }) => self.apply_pod(key, new.as_deref()),
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

impl std::fmt::Display for WatchEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Marker(change) => write!(f, "PodProbeMarker {}", change.key),
            Self::Node(change) => write!(f, "Node {}", change.key),
            Self::NodePodProbe(change) => write!(f, "NodePodProbe {}", change.key),
            Self::Pod(change) => write!(f, "Pod {}", change.key),
        }
    }
}

/// Enqueues what a change affects. Without a complete list of PodProbeMarkers their probes would seem to be removed, so
/// this begins when all lists are there.
pub async fn enqueue_changes(
    shared: Arc<ControllerState>,
    markers: Store<PodProbeMarker>,
    node_pod_probes: Store<NodePodProbe>,
    work: UnboundedSender<Work>,
) {
    markers.wait_until_synced().await;
    node_pod_probes.wait_until_synced().await;
    let stores = &shared.manager.stores;
    let mut events = WatchEvents::new(NAME)
        .with(markers.subscribe(), WatchEvent::Marker)
        .with(stores.nodes.subscribe(), WatchEvent::Node)
        .with(stores.pods.subscribe(), WatchEvent::Pod)
        .with(node_pod_probes.subscribe(), WatchEvent::NodePodProbe);
    let mut affected = BTreeSet::new();
    loop {
        events.drain(|event| affected.extend(shared.index().apply(event, &stores.pods)));
        let all = std::mem::take(&mut affected);
        if !all.into_iter().all(|key| work.send(key).is_ok()) {
            return;
        }
        let Some(event) = events.next().await else { return };
        events.handle(event, |event| {
            affected.extend(shared.index().apply(event, &stores.pods))
        });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
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
        index.apply_pod(&key, None);
        assert!(index.by_marker.is_empty() && index.by_node.is_empty());
    }
}
