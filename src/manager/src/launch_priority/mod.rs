//! Starts the containers of a Pod in the order of their launch priority.
//!
//! In:  Pods whose containers take an environment variable from a ConfigMap of the Pod's own (watch).
//! Out: that ConfigMap, with a key for each priority that may start; an annotation on the Pod when all may.
//!
//! Kubelet does not start a container until its key exists. CloneSets create such Pods, and the webhook adds barriers
//! to all others, as OpenKruise's does.

mod lift;
pub mod plan;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::mpsc;

use super::Context;
use super::context::enqueue_changes;
use super::namespace_limit::NamespaceLimit;
use super::view::PodView;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Change, Error, Key};
use lift::{lift_barriers, mark_launch_completed};
use plan::{LaunchStep, LiftedBarrier, RESYNC_PERIOD, next_step, plan_launch};

/// Name in logs and metrics.
const NAME: &str = "launchpriority";
/// Pods that are processed at once.
const WORKERS: usize = 4;
/// Of these, those that the Pods of one namespace can take.
const MAX_PER_NAMESPACE: usize = WORKERS - 1;
type LiftedByPod = Arc<Mutex<HashMap<Key, LiftedBarrier>>>;

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    let (pods_tx, pods_rx) = mpsc::unbounded_channel();
    let lifted = LiftedByPod::default();
    let lifted_in_filter = Arc::clone(&lifted);
    let has_barriers = move |change: &Change<PodView>| {
        let step = change.new.as_deref().map_or(LaunchStep::Nothing, next_step);
        if step == LaunchStep::Nothing {
            lock(&lifted_in_filter).remove(&change.key);
        }
        step != LaunchStep::Nothing
    };
    let namespace_limit = NamespaceLimit::new(MAX_PER_NAMESPACE, pods_tx.clone());
    let enqueue = enqueue_changes(NAME, ctx.stores.pods.subscribe(), pods_tx, has_barriers);
    let work = |key: Key| {
        let (ctx, lifted) = (ctx.clone(), Arc::clone(&lifted));
        let namespace_limit = namespace_limit.clone();
        namespace_limit.reconcile(key.clone(), move || reconcile(ctx, lifted, key))
    };
    ctx.run_workers(NAME, WORKERS, pods_rx, enqueue, work).await;
}

fn lock(lifted: &LiftedByPod) -> MutexGuard<'_, HashMap<Key, LiftedBarrier>> {
    lifted.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn reconcile(ctx: Context, lifted: LiftedByPod, key: Key) -> Result<RequeueAfter, Error> {
    let Some(pod) = ctx.stores.pods.get(&key) else {
        return Ok(None);
    };
    let turn = plan_launch(&pod, lock(&lifted).get(&key), Instant::now());
    if let Some(priority) = turn.lift {
        if !lift_barriers(&ctx, &key, &pod, priority).await? {
            return Ok(Some(RESYNC_PERIOD));
        }
        let (uid, at) = (pod.uid.clone(), Instant::now());
        lock(&lifted).insert(
            key.clone(),
            LiftedBarrier {
                uid,
                priority,
                lifted_at: at,
            },
        );
        if ctx.stores.pods.get(&key).is_none() {
            // The Pod was deleted in the meantime, and no event about it will follow.
            lock(&lifted).remove(&key);
        }
    }
    if turn.complete {
        mark_launch_completed(&ctx, &key, &pod.uid).await?;
    }
    Ok(turn.requeue_after)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use kruise_cluster::Store;
    use kube::client::Body;

    use super::*;

    #[tokio::test]
    async fn pods_of_one_namespace_take_not_all_workers() {
        let (sent_tx, mut sent) = mpsc::unbounded_channel();
        // No request is answered.
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let _ = sent_tx.send(request.uri().path().to_owned());
            std::future::pending::<Result<http::Response<Body>, tower::BoxError>>()
        });
        let mut ctx = Context::for_test(kube::Client::new(service, "default"));
        let pod = PodView {
            barriers: vec![("app".to_owned(), 1)],
            ..PodView::default()
        };
        let crowd = (0..100 * WORKERS).map(|n| Key::namespaced("crowd", n.to_string()));
        let keys = crowd.chain([Key::namespaced("other", "p")]);
        ctx.stores.pods = Store::from_objects(keys.map(|key| (key, pod.clone())));
        let other_is_served = async { while !sent.recv().await.unwrap().contains("/namespaces/other/") {} };
        tokio::select! {
            () = run(ctx) => unreachable!("it runs until shutdown"),
            served = tokio::time::timeout(Duration::from_secs(60), other_is_served) => served.unwrap(),
        }
    }
}
