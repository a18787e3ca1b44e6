//! Distributes the probes of PodProbeMarkers to the nodes, and marks Pods with the results. Liveness probes that daemons
//! run are distributed likewise; `enhanced_liveness` acts on their results.
//!
//! In:  PodProbeMarkers, NodePodProbes, Pods and Nodes (watches).
//! Out: the spec of each node's NodePodProbe; conditions, labels and annotations of Pods; status and finalizer of
//!      PodProbeMarkers.
//!
//! The spec of a NodePodProbe is computed from all PodProbeMarkers and Pods, so that what is removed or no longer
//! selected goes, whatever failed before. Nothing is written while one of the watches has no list yet.

mod act;
mod observe;
pub mod plan;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::Api;
use kube::api::ListParams;
use tokio::sync::mpsc;

use super::Context;
use super::namespace_limit::NamespaceLimit;
use super::status_pacer::StatusPacer;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_api::pod_probe_marker::PodProbeMarker;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key, Store};
use observe::Index;
use plan::Part;

/// Name in logs and metrics.
const NAME: &str = "podprobemarker";
/// PodProbeMarkers of one namespace that are processed at once: the removal of the marks of a deleted one takes a worker
/// for up to half a minute, and the probes of all namespaces need the same workers.
const MAX_PER_NAMESPACE: usize = 2;

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

/// What all reconciles share.
struct ControllerState {
    manager: Context,
    markers: Store<PodProbeMarker>,
    node_pod_probes: Store<NodePodProbe>,
    /// What is to be reconciled.
    work: mpsc::UnboundedSender<Work>,
    index: Mutex<Index>,
    /// For each Pod, the results and markers that its marks are of.
    applied: Mutex<HashMap<Key, plan::Results>>,
    /// Marks of Pods that the API server refuses.
    refused: Mutex<HashMap<(Key, Part), act::RefusedMarks>>,
    /// Pods that are being marked, and how often at once.
    being_marked: Mutex<HashMap<Key, usize>>,
    /// UIDs of PodProbeMarkers that are being deleted, and of Pods from which their marks are removed.
    unmarked_pods: Mutex<HashMap<Key, HashSet<(String, String)>>>,
    /// When the status of each PodProbeMarker was written.
    pacers: Mutex<HashMap<Key, StatusPacer>>,
}

impl ControllerState {
    fn new(
        manager: Context,
        markers: Store<PodProbeMarker>,
        node_pod_probes: Store<NodePodProbe>,
        work: mpsc::UnboundedSender<Work>,
    ) -> Arc<Self> {
        let index = Index::new(&manager.options.feature_gates);
        Arc::new(Self {
            manager,
            markers,
            node_pod_probes,
            work,
            index: Mutex::new(index),
            applied: Mutex::default(),
            refused: Mutex::default(),
            being_marked: Mutex::default(),
            unmarked_pods: Mutex::default(),
            pacers: Mutex::default(),
        })
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pacers(&self) -> MutexGuard<'_, HashMap<Key, StatusPacer>> {
        self.pacers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unmarked_pods(&self) -> MutexGuard<'_, HashMap<Key, HashSet<(String, String)>>> {
        self.unmarked_pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn applied(&self) -> MutexGuard<'_, HashMap<Key, plan::Results>> {
        self.applied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a Pod is being marked, until the guard is dropped; its PodProbeMarkers are read after this. The
    /// removal of a deleted one waits for the guard, because they may have been read before the deletion.
    fn begin_marking(&self, key: &Key) -> MarkingGuard<'_> {
        *self.being_marked().entry(key.clone()).or_default() += 1;
        MarkingGuard {
            shared: self,
            key: key.clone(),
        }
    }

    fn is_being_marked(&self, key: &Key) -> bool {
        self.being_marked().contains_key(key)
    }

    fn being_marked(&self) -> MutexGuard<'_, HashMap<Key, usize>> {
        self.being_marked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self) -> MutexGuard<'_, HashMap<(Key, Part), act::RefusedMarks>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A Pod is being marked, also if the reconcile is cancelled meanwhile.
struct MarkingGuard<'a> {
    shared: &'a ControllerState,
    key: Key,
}

impl Drop for MarkingGuard<'_> {
    fn drop(&mut self) {
        let mut all = self.shared.being_marked();
        if let Some(count) = all.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.key);
            }
        }
    }
}

/// Runs until shutdown. Without the CRDs, or the role, there is nothing to do.
pub async fn run(ctx: Context, node_pod_probes: Store<NodePodProbe>) {
    ctx.stores.synced().await;
    let (markers, watch_markers) = ctx.cluster.optional_reflector(
        Api::all(ctx.cluster.client.clone()),
        ListParams::default(),
        Some::<PodProbeMarker>,
    );
    let (work_tx, work_rx) = mpsc::unbounded_channel();
    let (marker_store, results) = (markers.clone(), node_pod_probes.clone());
    let shared = ControllerState::new(ctx.clone(), marker_store, results, work_tx.clone());
    let (requeue_tx, requeue_rx) = mpsc::unbounded_channel();
    let namespace_limit = NamespaceLimit::new(MAX_PER_NAMESPACE, requeue_tx);
    let requeues = enqueue_markers(requeue_rx, work_tx.clone());
    let changes = observe::enqueue_changes(Arc::clone(&shared), markers, node_pod_probes, work_tx);
    let enqueue = async {
        tokio::select! {
            () = requeues => {}
            () = changes => {}
        }
    };
    let workers = ctx.options.podprobemarker_workers;
    let work = |work| reconcile(namespace_limit.clone(), Arc::clone(&shared), work);
    tokio::select! {
        () = ctx.run_workers(NAME, workers, work_rx, enqueue, work) => {}
        () = watch_markers => {}
    }
}

/// Enqueues PodProbeMarkers that have waited for others of their namespace.
async fn enqueue_markers(mut markers: mpsc::UnboundedReceiver<Key>, work: mpsc::UnboundedSender<Work>) {
    while let Some(key) = markers.recv().await {
        if work.send(Work::Marker(key)).is_err() {
            return;
        }
    }
}

/// Does one piece of work. A PodProbeMarker whose namespace has its share of workers comes again after one of these.
async fn reconcile(
    namespace_limit: NamespaceLimit,
    shared: Arc<ControllerState>,
    work: Work,
) -> Result<RequeueAfter, Error> {
    match work {
        Work::Marker(key) => match namespace_limit.try_acquire(&key) {
            Some(_permit) => act::sync_marker(&shared, &key).await,
            None => Ok(None),
        },
        Work::Node(name) => act::sync_node(&shared, &name).await.map(|()| None),
        Work::Pod(key) => act::mark_pod(&shared, &key).await,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kube::client::Body;

    use super::*;

    #[tokio::test]
    async fn markers_of_one_namespace_take_not_all_workers() {
        let service = tower::service_fn(|_: http::Request<Body>| async {
            http::Response::builder().body(Body::empty())
        });
        let manager = Context::for_test(kube::Client::new(service, "default"));
        let (markers, results) = (Store::from_objects([]), Store::from_objects([]));
        let (work_tx, _) = mpsc::unbounded_channel();
        let shared = ControllerState::new(manager, markers, results, work_tx);
        let (requeue_tx, mut requeue_rx) = mpsc::unbounded_channel();
        let limit = NamespaceLimit::new(MAX_PER_NAMESPACE, requeue_tx);
        let key = |namespace: &str| Key::namespaced(namespace, "marker");
        let permits = limit.take_all("crowd").unwrap();
        let is_reconciled = async |key: Key| {
            shared.pacers().insert(key.clone(), StatusPacer::default());
            let ended = reconcile(limit.clone(), Arc::clone(&shared), Work::Marker(key.clone())).await;
            assert_eq!(ended.unwrap(), None);
            // The state of one that does not exist is dropped.
            !shared.pacers().contains_key(&key)
        };
        assert!(!is_reconciled(key("crowd")).await);
        assert!(is_reconciled(key("other")).await);
        drop(permits);
        assert_eq!(requeue_rx.recv().await, Some(key("crowd")));
        assert!(is_reconciled(key("crowd")).await);
    }
}
