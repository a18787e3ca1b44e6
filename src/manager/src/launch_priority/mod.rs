//! Starts the containers of a Pod in the order of their launch priority.
//!
//! In:  Pods whose containers take an environment variable from a ConfigMap of the Pod's own (watch).
//! Out: that ConfigMap, with a key for each priority that may start; an annotation on the Pod when all may.
//!
//! Kubelet does not start a container until its key exists. CloneSets create such Pods, and so did OpenKruise's
//! webhook.

mod lift;
pub mod plan;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::mpsc;

use super::Context;
use super::context::enqueue_changes;
use super::view::PodView;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Change, Error, Key};
use lift::{lift_barriers, mark_launch_completed};
use plan::{LaunchStep, LiftedBarrier, RESYNC_PERIOD, next_step, plan_launch};

/// Name in logs and metrics.
const NAME: &str = "launchpriority";
/// Pods that are processed at once.
const WORKERS: usize = 4;
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
    let enqueue = enqueue_changes(NAME, ctx.stores.pods.subscribe(), pods_tx, has_barriers);
    let work = |key| reconcile(ctx.clone(), Arc::clone(&lifted), key);
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
