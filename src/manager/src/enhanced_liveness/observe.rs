//! What is observed of the Pods of a workload, and which workloads a change concerns.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::mpsc::UnboundedSender;

use super::index::{WorkloadKey, is_ours};
use super::plan::{Failure, LastRequest, WorkloadPod, current_failures, is_restart_pending, request_name};
use super::state::{ControllerState, NAME, lock};
use crate::restarts::{Planning, counts_until, is_finished};
use crate::view::{CloneSetView, PodView};
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::keys;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_cluster::clock::duration_until;
use kruise_cluster::{Change, Key, Store, WatchEvents};

/// When the failures of a node that is not ready are looked at again: its readiness is not watched here.
const NODE_RECHECK_DELAY: Duration = Duration::from_secs(10);

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
    use crate::view::ContainerView;
    use serde_json::{Value, json};

    fn pod() -> PodView {
        PodView {
            uid: "u".to_owned(),
            ..PodView::default()
        }
    }

    #[test]
    fn stop_of_our_own_request_counts_after_its_end() {
        let mut pod = pod();
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
            counts_until_of(&serde_json::from_value(object).unwrap(), &pod())
        };
        assert!(until("u").is_some());
        assert_eq!(until("earlier"), None);
    }
}
