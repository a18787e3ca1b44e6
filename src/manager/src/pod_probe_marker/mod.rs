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
use super::status_pacer::StatusPacer;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_api::pod_probe_marker::PodProbeMarker;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key, Store};
use observe::Index;

/// Name in logs and metrics.
const NAME: &str = "podprobemarker";

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
    index: Mutex<Index>,
    /// For each Pod, the results and markers that its marks are of.
    applied: Mutex<HashMap<Key, plan::Results>>,
    /// UIDs of PodProbeMarkers that are being deleted, and of Pods from which their marks are removed.
    unmarked_pods: Mutex<HashMap<Key, HashSet<(String, String)>>>,
    /// When the status of each PodProbeMarker was written.
    pacers: Mutex<HashMap<Key, StatusPacer>>,
}

impl ControllerState {
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
}

/// Runs until shutdown. Without the CRDs, or the role, there is nothing to do.
pub async fn run(ctx: Context, node_pod_probes: Store<NodePodProbe>) {
    ctx.stores.synced().await;
    let (markers, watch_markers) = ctx.cluster.optional_reflector(
        Api::all(ctx.cluster.client.clone()),
        ListParams::default(),
        Some::<PodProbeMarker>,
    );
    let index = Index::new(&ctx.options.feature_gates);
    let shared = Arc::new(ControllerState {
        manager: ctx.clone(),
        markers: markers.clone(),
        node_pod_probes: node_pod_probes.clone(),
        index: Mutex::new(index),
        applied: Mutex::default(),
        unmarked_pods: Mutex::default(),
        pacers: Mutex::default(),
    });
    let (work_tx, work_rx) = mpsc::unbounded_channel();
    let enqueue = observe::enqueue_changes(Arc::clone(&shared), markers, node_pod_probes, work_tx);
    let workers = ctx.options.podprobemarker_workers;
    let work = |work| reconcile(Arc::clone(&shared), work);
    tokio::select! {
        () = ctx.run_workers(NAME, workers, work_rx, enqueue, work) => {}
        () = watch_markers => {}
    }
}

async fn reconcile(shared: Arc<ControllerState>, work: Work) -> Result<RequeueAfter, Error> {
    match work {
        Work::Marker(key) => act::sync_marker(&shared, &key).await,
        Work::Node(name) => act::sync_node(&shared, &name).await.map(|()| None),
        Work::Pod(key) => act::mark_pod(&shared, &key).await.map(|()| None),
    }
}
