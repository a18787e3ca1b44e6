//! Index of workloads with their Pods, of failed liveness probes, and of requests.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use super::plan::Failure;
use crate::view::{PodView, Workload};
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::keys;
use kruise_api::node_pod_probe::{NodePodProbe, ProbeState, liveness_container};
use kruise_cluster::{Change, Key};

/// A workload of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkloadKey {
    /// Its namespace.
    pub namespace: String,
    /// The workload.
    pub workload: Workload,
}

impl fmt::Display for WorkloadKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Workload { kind, owner } = &self.workload;
        write!(f, "{kind} {}/{}", self.namespace, owner.name)
    }
}

/// Failures by UID of the Pod, as one node reports them: a node may only report those of its own Pods.
type NodeFailures = BTreeMap<String, Vec<Failure>>;

/// What events change.
#[derive(Default)]
pub struct Index {
    /// The Pods of each workload.
    pub pods: BTreeMap<WorkloadKey, BTreeSet<Key>>,
    workload_of: HashMap<Key, WorkloadKey>,
    failures: HashMap<String, NodeFailures>,
    /// The requests for each Pod.
    pub requests: HashMap<Key, BTreeSet<Key>>,
}

impl Index {
    /// A Pod changed; returns the workloads that this concerns, if `is_waiting` or a probe of it failed.
    pub fn apply_pod(
        &mut self,
        change: &Change<PodView>,
        is_waiting: impl Fn(&WorkloadKey) -> bool,
    ) -> Vec<WorkloadKey> {
        let key = &change.key;
        let workload = |pod: &Option<Arc<PodView>>| {
            let workload = pod.as_ref()?.workload.as_deref()?;
            Some(WorkloadKey {
                namespace: key.namespace.clone().unwrap_or_default(),
                workload: workload.clone(),
            })
        };
        let new = workload(&change.new);
        let old = self.workload_of.get(key).cloned();
        if old != new {
            if let Some(old) = self.workload_of.remove(key)
                && let Some(pods) = self.pods.get_mut(&old)
            {
                pods.remove(key);
                if pods.is_empty() {
                    self.pods.remove(&old);
                }
            }
            if let Some(new) = &new {
                self.pods.entry(new.clone()).or_default().insert(key.clone());
                self.workload_of.insert(key.clone(), new.clone());
            }
        }
        let new_pod = change.new.as_deref();
        let has_failure = new_pod.is_some_and(|pod| !self.failures_of(pod).is_empty());
        let unusable = |pod: Option<&PodView>| {
            let liveness = pod.and_then(|pod| pod.liveness.as_ref());
            liveness
                .map(|liveness| liveness.unusable.clone())
                .unwrap_or_default()
        };
        let has_news = unusable(new_pod) != unusable(change.old.as_deref());
        let concerned = [old, new].into_iter().flatten();
        let mut concerned: Vec<_> = concerned
            .filter(|workload| has_failure || has_news || is_waiting(workload))
            .collect();
        concerned.dedup();
        concerned
    }

    /// The failures of a Pod, as its node reports them.
    pub fn failures_of(&self, pod: &PodView) -> &[Failure] {
        let node = pod.node.as_ref().and_then(|node| self.failures.get(node));
        let failures = node.and_then(|node| node.get(&pod.uid));
        failures.map(Vec::as_slice).unwrap_or_default()
    }

    pub fn apply_node_pod_probe(&mut self, change: &Change<NodePodProbe>) -> Vec<WorkloadKey> {
        let failures = change.new.as_deref().map(failures).unwrap_or_default();
        let names = pod_names(change.old.as_deref())
            .chain(pod_names(change.new.as_deref()))
            .collect::<BTreeMap<_, _>>();
        let node = &change.key.name;
        let old = match failures.is_empty() {
            true => self.failures.remove(node),
            false => self.failures.insert(node.clone(), failures),
        };
        let old = old.unwrap_or_default();
        let new = self.failures.get(node);
        let changed = names.into_iter().filter(|(uid, _)| {
            let new = new.and_then(|new| new.get(*uid));
            old.get(*uid) != new
        });
        let concerned = changed.filter_map(|(_, key)| self.workload_of.get(&key));
        concerned.cloned().collect()
    }

    /// A request changed; returns the workload that this concerns, if the request is ours or `is_waiting`.
    pub fn apply_request(
        &mut self,
        change: &Change<ContainerRecreateRequest>,
        is_waiting: impl Fn(&WorkloadKey) -> bool,
    ) -> Option<WorkloadKey> {
        let request = change.new.as_ref().or(change.old.as_ref())?;
        let pod = Key {
            namespace: change.key.namespace.clone(),
            name: request.spec.pod_name.clone(),
        };
        let requests = self.requests.entry(pod.clone()).or_default();
        match &change.new {
            Some(_) => requests.insert(change.key.clone()),
            None => requests.remove(&change.key),
        };
        if requests.is_empty() {
            self.requests.remove(&pod);
        }
        let workload = self.workload_of.get(&pod)?;
        (is_ours(&change.key.name) || is_waiting(workload)).then(|| workload.clone())
    }
}

/// Whether a request of that name restarts a container because of its liveness probe.
pub fn is_ours(name: &str) -> bool {
    name.starts_with(keys::LIVENESS_PREFIX)
}

/// UIDs, namespaces and names of the Pods with results.
fn pod_names(object: Option<&NodePodProbe>) -> impl Iterator<Item = (&str, Key)> {
    let status = object.and_then(|object| object.status.as_ref());
    let pods = status.into_iter().flat_map(|status| &status.pod_probe_statuses);
    pods.map(|pod| {
        let key = Key::namespaced(pod.namespace.as_str(), pod.name.as_str());
        (pod.uid.as_str(), key)
    })
}

/// The failures in a NodePodProbe. A state without a container, such as one of OpenKruise's daemon, could be that of an
/// earlier container.
fn failures(object: &NodePodProbe) -> NodeFailures {
    let status = object.status.iter();
    let pods = status.flat_map(|status| &status.pod_probe_statuses);
    let mut all = NodeFailures::new();
    for pod in pods {
        let failed = pod
            .probe_states
            .iter()
            .filter(|state| state.state == ProbeState::Failed);
        let failures: Vec<_> = failed
            .filter_map(|state| {
                Some(Failure {
                    container: liveness_container(&state.name)?.to_owned(),
                    container_id: state.container_id.clone()?,
                    since: state.last_transition_time.as_ref().map(|time| time.0),
                })
            })
            .collect();
        if !failures.is_empty() {
            all.insert(pod.uid.clone(), failures);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::view::RawPod;
    use serde_json::{Value, json};

    fn change<T>(key: Key, old: Option<T>, new: Option<T>) -> Change<T> {
        Change {
            key,
            old: old.map(Arc::new),
            new: new.map(Arc::new),
        }
    }

    fn pod(node: &str) -> PodView {
        let owner = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "web", "uid": "w", "controller": true });
        PodView::from(&RawPod::from(json!({
            "metadata": { "name": "p", "namespace": "n", "uid": "u", "ownerReferences": [owner] },
            "spec": { "nodeName": node },
        })))
    }

    fn node_pod_probe(name: &str, states: &Value) -> NodePodProbe {
        let pods = json!([{ "name": "p", "namespace": "n", "uid": "u", "probeStates": states }]);
        serde_json::from_value(
            json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "NodePodProbe",
            "metadata": { "name": name }, "spec": {}, "status": { "podProbeStatuses": pods } }),
        )
        .unwrap()
    }

    /// The failures of the Pod on `node`, after the object of node `a` has these states, and the workloads to reconcile.
    fn applied(node: &str, states: &Value) -> (usize, usize) {
        let mut index = Index::default();
        let pod = pod(node);
        let event = change(Key::namespaced("n", "p"), None, Some(pod.clone()));
        assert!(index.apply_pod(&event, |_| false).is_empty());
        assert_eq!(index.apply_pod(&event, |_| true).len(), 1);
        let object = change(Key::cluster_scoped("a"), None, Some(node_pod_probe("a", states)));
        let concerned = index.apply_node_pod_probe(&object);
        assert!(
            index.apply_node_pod_probe(&object).is_empty(),
            "nothing has changed"
        );
        let failures = index.failures_of(&pod).len();
        if failures > 0 {
            assert_eq!(index.apply_pod(&event, |_| false), concerned);
            let gone = change(object.key, Some(node_pod_probe("a", states)), None);
            assert_eq!(index.apply_node_pod_probe(&gone), concerned);
            assert!(index.failures_of(&pod).is_empty());
        }
        let gone = change(Key::namespaced("n", "p"), Some(pod), None);
        index.apply_pod(&gone, |_| false);
        assert!(index.pods.is_empty() && index.workload_of.is_empty());
        (failures, concerned.len())
    }

    #[test]
    fn failures_are_those_that_the_node_of_the_pod_reports() {
        let state =
            |name: &str, state: &str, id: Value| json!([{ "name": name, "state": state, "containerID": id }]);
        let failed = state("EnhancedLivenessProbe#app", "Failed", json!("containerd://1"));
        assert_eq!(applied("a", &failed), (1, 1));
        // The token of another node cannot have the container restarted.
        assert_eq!(applied("b", &failed).0, 0);
        for none in [
            state("EnhancedLivenessProbe#app", "Succeeded", json!("containerd://1")),
            state("EnhancedLivenessProbe#app", "Unknown", json!("containerd://1")),
            state("EnhancedLivenessProbe#app", "Failed", Value::Null),
            state("marker#app", "Failed", json!("containerd://1")),
            state("EnhancedLivenessProbe", "Failed", json!("containerd://1")),
        ] {
            assert_eq!(applied("a", &none), (0, 0), "{none}");
        }
    }

    #[test]
    fn only_our_requests_concern_a_workload() {
        let mut index = Index::default();
        index.apply_pod(&change(Key::namespaced("n", "p"), None, Some(pod("a"))), |_| {
            false
        });
        let request = |name: &str| -> Change<ContainerRecreateRequest> {
            let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": { "name": name }, "spec": { "podName": "p", "containers": [] } });
            change(
                Key::namespaced("n", name),
                None,
                Some(serde_json::from_value(object).unwrap()),
            )
        };
        let apply = |index: &mut Index, change: &_, waiting: bool| index.apply_request(change, |_| waiting);
        let other = request("other");
        assert!(apply(&mut index, &other, false).is_none());
        // It may be what a restart waits for.
        assert!(apply(&mut index, &other, true).is_some());
        let ours = request("liveness-u-1");
        assert!(apply(&mut index, &ours, false).is_some());
        assert_eq!(index.requests[&Key::namespaced("n", "p")].len(), 2);
        for request in [ours, other] {
            let gone = Change {
                key: request.key,
                old: request.new,
                new: None,
            };
            assert!(apply(&mut index, &gone, true).is_some());
        }
        assert!(index.requests.is_empty());
    }
}
