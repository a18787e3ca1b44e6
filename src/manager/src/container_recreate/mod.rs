//! The manager's part in ContainerRecreateRequests.
//!
//! In:  ContainerRecreateRequests and Pods (watches).
//! Out: labels, finalizer and conditions of requests, their completion if the daemon does not complete them, the
//!      not-ready key of their Pods.

mod act;
pub mod plan;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc;

use super::Context;
use kruise_cluster::clock::duration_until;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key};
use plan::{DaemonWait, Plan, plan};

/// What each request waits for.
type DaemonWaits = Arc<Mutex<HashMap<Key, DaemonWait>>>;

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    ctx.stores.synced().await;
    let waits = DaemonWaits::default();
    let (requests_tx, requests_rx) = mpsc::unbounded_channel();
    let enqueue = enqueue_changes(ctx.clone(), Arc::clone(&waits), requests_tx);
    let workers = ctx.options.crr_workers;
    let work = |key| reconcile(ctx.clone(), Arc::clone(&waits), key);
    ctx.run_workers("containerrecreaterequest", workers, requests_rx, enqueue, work)
        .await;
}

/// Enqueues the requests that changed, and those whose Pod changed.
async fn enqueue_changes(ctx: Context, waits: DaemonWaits, queue: mpsc::UnboundedSender<Key>) {
    let mut changes = ctx.stores.requests.subscribe();
    let mut pods = ctx.stores.pods.subscribe();
    let mut requests_by_pod: HashMap<Key, BTreeSet<Key>> = HashMap::new();
    loop {
        let queue_is_open = tokio::select! {
            Some(change) = changes.recv() => {
                let request = change.new.as_ref().or(change.old.as_ref());
                let pod = request.map(|r| Key { namespace: change.key.namespace.clone(), name: r.spec.pod_name.clone() });
                if let Some(pod) = pod {
                    if change.new.is_some() {
                        requests_by_pod.entry(pod).or_default().insert(change.key.clone());
                    } else if let Some(keys) = requests_by_pod.get_mut(&pod) {
                        keys.remove(&change.key);
                        if keys.is_empty() {
                            requests_by_pod.remove(&pod);
                        }
                    }
                }
                if change.new.is_none() {
                    waits.lock().unwrap_or_else(PoisonError::into_inner).remove(&change.key);
                }
                queue.send(change.key).is_ok()
            }
            Some(change) = pods.recv() => {
                let keys = requests_by_pod.get(&change.key).into_iter().flatten();
                keys.into_iter().all(|key| queue.send(key.clone()).is_ok())
            }
            else => false,
        };
        if !queue_is_open {
            return;
        }
    }
}

/// Observes, plans and acts; returns when to requeue.
async fn reconcile(ctx: Context, waits: DaemonWaits, key: Key) -> Result<RequeueAfter, Error> {
    let Some(request) = ctx.stores.requests.get(&key) else {
        // A reconcile that was in progress when the request was deleted may have recorded it once more.
        waits.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        return Ok(None);
    };
    let now = ctx.cluster.clock.now();
    let pod = ctx.stores.pods.get(&key.with_name(&request.spec.pod_name));
    let previous = waits
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&key)
        .cloned();
    let plan = plan(&request, pod.as_deref(), previous.as_ref(), now);
    let Plan {
        action: act,
        requeue_at,
        waiting,
    } = plan;
    {
        let mut waits = waits.lock().unwrap_or_else(PoisonError::into_inner);
        match waiting {
            Some(waiting) => waits.insert(key.clone(), waiting),
            None => waits.remove(&key),
        };
    }
    if let Some(act) = act {
        act::execute(&ctx, &key, &request, pod.as_deref(), act, now).await?;
    }
    Ok(requeue_at.map(|at| duration_until(at, now)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use jiff::Timestamp;
    use kube::client::Body;

    use super::*;
    use plan::DaemonTask;

    #[tokio::test]
    async fn wait_of_a_deleted_request_is_dropped() {
        let service = tower::service_fn(|_: http::Request<Body>| {
            std::future::ready(http::Response::builder().status(500).body(Body::empty()))
        });
        let ctx = Context::for_test(kube::Client::new(service, "default"));
        let (waits, key) = (DaemonWaits::default(), Key::namespaced("n", "r"));
        let wait = DaemonWait {
            task: DaemonTask::EndRequest,
            since: Timestamp::UNIX_EPOCH,
        };
        waits.lock().unwrap().insert(key.clone(), wait);
        assert_eq!(reconcile(ctx, Arc::clone(&waits), key).await.unwrap(), None);
        assert!(waits.lock().unwrap().is_empty());
    }
}
