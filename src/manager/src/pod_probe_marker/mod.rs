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
mod state;

use std::sync::Arc;

use kube::Api;
use kube::api::ListParams;
use tokio::sync::mpsc;

use super::Context;
use super::namespace_limit::NamespaceLimit;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_api::pod_probe_marker::PodProbeMarker;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key, Store};
use observe::{NAME, Work, watch_events};
use state::ControllerState;

/// PodProbeMarkers of one namespace that are processed at once: the removal of the marks of a deleted one takes a worker
/// for up to half a minute, and the probes of all namespaces need the same workers.
const MAX_PER_NAMESPACE: usize = 2;

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
    let changes = enqueue_changes(Arc::clone(&shared), markers, node_pod_probes, work_tx);
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

/// Enqueues what a change affects. Without a complete list of PodProbeMarkers their probes would seem to be removed, so
/// this begins when all lists are there.
async fn enqueue_changes(
    shared: Arc<ControllerState>,
    markers: Store<PodProbeMarker>,
    node_pod_probes: Store<NodePodProbe>,
    work: mpsc::UnboundedSender<Work>,
) {
    markers.wait_until_synced().await;
    node_pod_probes.wait_until_synced().await;
    let stores = &shared.manager.stores;
    let events = watch_events(stores, &markers, &node_pod_probes);
    events
        .send_affected(work, |event| shared.index().apply(event, &stores.pods))
        .await;
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
    use crate::status_pacer::StatusPacer;

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
