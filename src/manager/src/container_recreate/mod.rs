//! The manager's part in ContainerRecreateRequests.
//!
//! In:  ContainerRecreateRequests and Pods (watches).
//! Out: labels, finalizer and conditions of requests, their end where the daemon does not end them, the
//!      not-ready key of their Pods.

mod act;
pub mod plan;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;

use super::Context;
use kruise_cluster::queue::Again;
use kruise_cluster::{Error, Key};
use plan::{Plan, Waiting, plan};

/// What is waited for in each request.
type Waits = Arc<Mutex<HashMap<Key, Waiting>>>;

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    ctx.stores.synced().await;
    let waits = Waits::default();
    let (requests_tx, requests_rx) = mpsc::unbounded_channel();
    let wake = wake_up(ctx.clone(), Arc::clone(&waits), requests_tx);
    let workers = ctx.options.crr_workers;
    let work = |key| look_after(ctx.clone(), Arc::clone(&waits), key);
    ctx.work("containerrecreaterequest", workers, requests_rx, wake, work)
        .await;
}

/// Sends the requests to look at: those that changed, and those whose Pod did.
async fn wake_up(ctx: Context, waits: Waits, requests: mpsc::UnboundedSender<Key>) {
    let mut changes = ctx.stores.requests.subscribe();
    let mut pods = ctx.stores.pods.subscribe();
    let mut of_pod: HashMap<Key, BTreeSet<Key>> = HashMap::new();
    loop {
        let alive = tokio::select! {
            Some(change) = changes.recv() => {
                let request = change.new.as_ref().or(change.old.as_ref());
                let pod = request.map(|r| Key { namespace: change.key.namespace.clone(), name: r.spec.pod_name.clone() });
                if let Some(pod) = pod {
                    if change.new.is_some() {
                        of_pod.entry(pod).or_default().insert(change.key.clone());
                    } else if let Some(keys) = of_pod.get_mut(&pod) {
                        keys.remove(&change.key);
                        if keys.is_empty() {
                            of_pod.remove(&pod);
                        }
                    }
                }
                if change.new.is_none() {
                    waits.lock().unwrap_or_else(PoisonError::into_inner).remove(&change.key);
                }
                requests.send(change.key).is_ok()
            }
            Some(change) = pods.recv() => {
                let keys = of_pod.get(&change.key).into_iter().flatten();
                keys.into_iter().all(|key| requests.send(key.clone()).is_ok())
            }
            else => false,
        };
        if !alive {
            return;
        }
    }
}

/// Observe, plan, act; then say when to look again.
async fn look_after(ctx: Context, waits: Waits, key: Key) -> Result<Again, Error> {
    let Some(request) = ctx.stores.requests.get(&key) else {
        return Ok(None);
    };
    let now = ctx.cluster.clock.now();
    let pod_key = Key {
        namespace: key.namespace.clone(),
        name: request.spec.pod_name.clone(),
    };
    let pod = ctx.stores.pods.get(&pod_key);
    let before = waits
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&key)
        .cloned();
    let plan = plan(&request, pod.as_deref(), before.as_ref(), now);
    let Plan { act, wake, waiting } = plan;
    {
        let mut waits = waits.lock().unwrap_or_else(PoisonError::into_inner);
        match waiting {
            Some(waiting) => waits.insert(key.clone(), waiting),
            None => waits.remove(&key),
        };
    }
    if let Some(act) = act {
        act::carry_out(&ctx, &key, &request, pod.as_deref(), act, now).await?;
    }
    Ok(wake.map(|at| Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO)))
}
