//! Index of workloads with their Pods, of failed liveness probes, and of requests.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::mpsc::UnboundedSender;

use super::plan::{Failure, LastRequest, WorkloadPod, current_failures, is_restart_pending, request_name};
use super::{ControllerState, NAME, lock};
use crate::restarts::{Planning, counts_until, is_finished};
use crate::view::{CloneSetView, PodView, Workload};
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::keys;
use kruise_api::node_pod_probe::{NodePodProbe, ProbeState, liveness_container};
use kruise_api::owner::{Owner, OwnerKind};
use kruise_cluster::clock::duration_until;
use kruise_cluster::{Change, Key, Store, WatchEvents};

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

/// When the failures of a node that is not ready are looked at again: its readiness is not watched here.
const NODE_RECHECK_DELAY: Duration = Duration::from_secs(10);

/// Failures by UID of the Pod, as one node reports them: a node may only report those of its own Pods.
type NodeFailures = BTreeMap<String, Vec<Failure>>;

/// What events change.
#[derive(Default)]
pub struct Index {
    /// The Pods of each workload.
    pods: BTreeMap<WorkloadKey, BTreeSet<Key>>,
    workload_of: HashMap<Key, WorkloadKey>,
    failures: HashMap<String, NodeFailures>,
    /// The requests for each Pod.
    requests: HashMap<Key, BTreeSet<Key>>,
}

/// The Pods of a workload that have not ended.
#[derive(Default)]
pub struct Observed {
    /// What is planned with.
    pub pods: Vec<WorkloadPod>,
    /// The same Pods as they are cached.
    pub cached: BTreeMap<Key, CachedPod>,
    /// When to look again although nothing changes: a request that was created may have gone.
    pub requeue_after: Option<Duration>,
}

/// A Pod with our requests for it.
pub struct CachedPod {
    /// The Pod.
    pub view: Arc<PodView>,
    /// Its requests that have not ended.
    pub unfinished: Vec<Arc<ContainerRecreateRequest>>,
}

impl Index {
    /// A Pod changed; returns the workloads that this concerns, if `is_waiting` or a probe of it failed.
    fn apply_pod(
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
    fn failures_of(&self, pod: &PodView) -> &[Failure] {
        let node = pod.node.as_ref().and_then(|node| self.failures.get(node));
        let failures = node.and_then(|node| node.get(&pod.uid));
        failures.map(Vec::as_slice).unwrap_or_default()
    }

    fn apply_node_pod_probe(&mut self, change: &Change<NodePodProbe>) -> Vec<WorkloadKey> {
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
    fn apply_request(
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
fn is_ours(name: &str) -> bool {
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

/// Observes the Pods of a workload.
pub fn observe(shared: &ControllerState, workload: &WorkloadKey, planning: &mut Planning<'_>) -> Observed {
    let stores = &shared.manager.stores;
    let now = shared.manager.cluster.clock.now();
    let namespace = Key::namespaced(workload.namespace.as_str(), "");
    let (being_created, first_end) = planning.unseen(&namespace, &stores.requests, Instant::now());
    let index = lock(&shared.index);
    let mut refused = lock(&shared.refused);
    let started = Instant::now();
    refused.retain(|_, until| started < *until);
    let mut observed = Observed {
        requeue_after: first_end,
        ..Observed::default()
    };
    for key in index.pods.get(workload).into_iter().flatten() {
        let Some(pod) = stores.pods.get(key).filter(|pod| !pod.terminal) else {
            continue;
        };
        let requests = index.requests.get(key).into_iter().flatten();
        let requests = requests.filter_map(|request| stores.requests.get(request));
        let (requests, others): (Vec<_>, Vec<_>) = requests.partition(|request| is_of_pod(request, &pod));
        let restarted_until = restarted_until(&requests, &others, &pod).filter(|end| now < *end);
        if let Some(end) = restarted_until {
            requeue_within(&mut observed.requeue_after, duration_until(end, now));
        }
        let unconfirmed = unconfirmed_request(shared, key, &mut observed.requeue_after);
        let in_progress = unconfirmed || requests.iter().any(|request| is_restart_pending(request, &pod));
        let request = match (in_progress, requests.is_empty()) {
            (true, _) => Some(LastRequest::InProgress),
            (false, false) => Some(LastRequest::Ended),
            (false, true) => None,
        };
        let has_request = |container_id: &str| {
            let name = request_name(&pod.uid, container_id);
            requests
                .iter()
                .any(|request| request.metadata.name.as_deref() == Some(&name))
        };
        let node = pod.node.as_deref().map(Key::cluster_scoped);
        let node = node.and_then(|node| stores.nodes.get(&node));
        // Without kubelet and daemon the results are old, and no request is executed.
        let reported = index.failures_of(&pod);
        let failures = match node.is_some_and(|node| node.ready) {
            true => reported,
            false => &[],
        };
        if failures.len() < reported.len() {
            requeue_within(&mut observed.requeue_after, NODE_RECHECK_DELAY);
        }
        let current: Vec<&Failure> = current_failures(&pod, failures).collect();
        let without_request = current
            .iter()
            .filter(|failure| !has_request(&failure.container_id));
        let mut candidates = without_request.filter(|failure| {
            let until = refused.get(&(pod.uid.clone(), failure.container_id.clone()));
            if let Some(until) = until {
                let pause = until.saturating_duration_since(started);
                requeue_within(&mut observed.requeue_after, pause);
            }
            until.is_none()
        });
        let failure = candidates.next().map(|failure| Failure::clone(failure));
        observed.pods.push(WorkloadPod {
            key: key.clone(),
            available: pod.ready
                && !pod.terminating
                && restarted_until.is_none()
                && !being_created.contains(&pod.uid),
            deleting: pod.terminating,
            request,
            failing: !current.is_empty(),
            failure,
        });
        let unfinished = requests.into_iter().filter(|request| !is_finished(request));
        let unfinished = unfinished.collect();
        observed.cached.insert(
            key.clone(),
            CachedPod {
                view: pod,
                unfinished,
            },
        );
    }
    observed
}

/// Whether the request is ours and about this Pod, and not about another one of its name.
fn is_of_pod(request: &ContainerRecreateRequest, pod: &PodView) -> bool {
    if !request.metadata.name.as_deref().is_some_and(is_ours) {
        return false;
    }
    let controller = Owner::controller(&request.metadata);
    controller.is_some_and(|owner| owner.kind == OwnerKind::Pod && owner.uid == pod.uid)
}

/// Until when the Pod counts as restarted although no request of ours is in progress: by another one, or by a stop that
/// goes on after ours.
fn restarted_until(
    ours: &[Arc<ContainerRecreateRequest>],
    others: &[Arc<ContainerRecreateRequest>],
    pod: &PodView,
) -> Option<Timestamp> {
    let ended = ours.iter().filter(|request| is_finished(request));
    let ends = others.iter().chain(ended);
    ends.filter_map(|request| counts_until_of(request, pod)).max()
}

/// Until when a request for this Pod counts.
fn counts_until_of(request: &ContainerRecreateRequest, pod: &PodView) -> Option<Timestamp> {
    let labels = request.metadata.labels.as_ref();
    let uid = labels.and_then(|labels| labels.get(keys::CRR_POD_UID));
    counts_until(request, pod).filter(|_| uid == Some(&pod.uid))
}

fn requeue_within(requeue_after: &mut Option<Duration>, delay: Duration) {
    *requeue_after = Some(requeue_after.map_or(delay, |other| other.min(delay)));
}

/// Whether a request was created for the Pod that the watch has not shown yet.
fn unconfirmed_request(shared: &ControllerState, pod: &Key, requeue_after: &mut Option<Duration>) -> bool {
    let now = shared.started_at.elapsed();
    let mut unconfirmed = lock(&shared.unconfirmed);
    let Some(request) = unconfirmed.get(pod) else {
        return false;
    };
    if request.has_expired(now) || shared.manager.stores.requests.get(request.written()).is_some() {
        unconfirmed.remove(pod);
        return false;
    }
    requeue_within(requeue_after, request.expires_at().saturating_sub(now));
    true
}

/// A change of one object.
enum WatchEvent {
    Pod(Change<PodView>),
    NodePodProbe(Change<NodePodProbe>),
    Request(Change<ContainerRecreateRequest>),
    CloneSet(Change<CloneSetView>),
}

impl fmt::Display for WatchEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(change) => write!(f, "Pod {}", change.key),
            Self::NodePodProbe(change) => write!(f, "NodePodProbe {}", change.key),
            Self::Request(change) => write!(f, "ContainerRecreateRequest {}", change.key),
            Self::CloneSet(change) => write!(f, "CloneSet {}", change.key),
        }
    }
}

/// The workloads that an event concerns.
fn apply(shared: &ControllerState, event: &WatchEvent) -> Vec<WorkloadKey> {
    let mut index = lock(&shared.index);
    let waiting = lock(&shared.waiting);
    match event {
        WatchEvent::Pod(change) => index.apply_pod(change, |workload| waiting.contains_key(workload)),
        WatchEvent::NodePodProbe(change) => index.apply_node_pod_probe(change),
        WatchEvent::Request(change) => {
            let workload = index.apply_request(change, |workload| waiting.contains_key(workload));
            workload.into_iter().collect()
        }
        WatchEvent::CloneSet(change) => {
            let is_same = |workload: &&WorkloadKey| {
                change.key.namespace.as_ref() == Some(&workload.namespace)
                    && workload.workload.owner.name == change.key.name
            };
            waiting.keys().filter(is_same).cloned().collect()
        }
    }
}

/// Enqueues what a change affects, once all lists are there.
pub async fn enqueue_changes(
    shared: Arc<ControllerState>,
    node_pod_probes: Store<NodePodProbe>,
    work: UnboundedSender<WorkloadKey>,
) {
    node_pod_probes.wait_until_synced().await;
    let stores = &shared.manager.stores;
    let events = WatchEvents::new(NAME)
        .with(stores.pods.subscribe(), WatchEvent::Pod)
        .with(stores.requests.subscribe(), WatchEvent::Request)
        .with(node_pod_probes.subscribe(), WatchEvent::NodePodProbe)
        .with(stores.clone_sets.subscribe(), WatchEvent::CloneSet);
    events.send_affected(work, |event| apply(&shared, event)).await;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::view::{ContainerView, RawPod};
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

    #[test]
    fn stop_of_our_own_request_counts_after_its_end() {
        let mut pod = pod("a");
        pod.containers = vec![ContainerView {
            name: "app".to_owned(),
            id: "c://1".to_owned(),
            ready: true,
            running: true,
            restarts: 0,
        }];
        let state = json!({ "name": "app", "phase": "Failed", "isKilled": true, "containerID": "c://1" });
        let ended = json!({ "phase": "Completed", "completionTime": "2026-01-01T00:01:00Z",
            "containerRecreateStates": [state] });
        let until = |status: &Value| {
            let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": { "name": "liveness-u-1", "labels": { keys::CRR_POD_UID: "u" },
                    "creationTimestamp": "2026-01-01T00:00:00Z" },
                "spec": { "podName": "p", "containers": [{ "name": "app" }] }, "status": status });
            restarted_until(&[Arc::new(serde_json::from_value(object).unwrap())], &[], &pod)
        };
        assert_eq!(until(&ended).unwrap().to_string(), "2026-01-01T00:02:00Z");
        // One in progress is counted as such, until its new container runs.
        assert_eq!(until(&json!({ "phase": "Recreating" })), None);
    }

    #[test]
    fn restart_by_another_is_of_the_same_pod() {
        let until = |uid: &str| {
            let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": { "name": "r", "labels": { keys::CRR_POD_UID: uid },
                    "creationTimestamp": "2026-01-01T00:00:00Z" },
                "spec": { "podName": "p", "containers": [] } });
            counts_until_of(&serde_json::from_value(object).unwrap(), &pod("a"))
        };
        assert!(until("u").is_some());
        assert_eq!(until("earlier"), None);
    }
}
