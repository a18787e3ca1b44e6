//! Starts the containers of a Pod one after the other, by their launch priority.
//!
//! In:  Pods whose containers take an environment variable from a ConfigMap of the Pod's own (watch).
//! Out: that ConfigMap, with a key for each priority whose turn has come; an annotation on the Pod when all have.
//!
//! Kubelet holds a container back until its key is there. CloneSets make such Pods, and OpenKruise's webhook did.

mod lift;
pub mod plan;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::mpsc;

use super::Context;
use super::context::wake_up;
use super::view::PodView;
use kruise_cluster::queue::Again;
use kruise_cluster::{Change, Error, Key};
use lift::{complete, lift};
use plan::{LOOK_AGAIN, Lifted, Step, step, turn};

/// Name in logs and metrics.
const NAME: &str = "launchpriority";
/// Pods written to at once.
const WORKERS: usize = 4;
type Done = Arc<Mutex<HashMap<Key, Lifted>>>;

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    let (pods_tx, pods_rx) = mpsc::unbounded_channel();
    let done = Done::default();
    let known = Arc::clone(&done);
    let waits = move |change: &Change<PodView>| {
        let step = change.new.as_deref().map_or(Step::Nothing, step);
        if step == Step::Nothing {
            lock(&known).remove(&change.key);
        }
        step != Step::Nothing
    };
    let wake = wake_up(NAME, ctx.stores.pods.subscribe(), pods_tx, waits);
    let work = |key| look_after(ctx.clone(), Arc::clone(&done), key);
    ctx.work(NAME, WORKERS, pods_rx, wake, work).await;
}

fn lock(done: &Done) -> MutexGuard<'_, HashMap<Key, Lifted>> {
    done.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn look_after(ctx: Context, done: Done, key: Key) -> Result<Again, Error> {
    let Some(pod) = ctx.stores.pods.get(&key) else {
        return Ok(None);
    };
    let turn = turn(&pod, lock(&done).get(&key), Instant::now());
    if let Some(priority) = turn.lift {
        if !lift(&ctx, &key, &pod, priority).await? {
            return Ok(Some(LOOK_AGAIN));
        }
        let (uid, at) = (pod.uid.clone(), Instant::now());
        lock(&done).insert(key.clone(), Lifted { uid, priority, at });
        if ctx.stores.pods.get(&key).is_none() {
            // It went meanwhile, and there is no news of it to come.
            lock(&done).remove(&key);
        }
    }
    if turn.complete {
        complete(&ctx, &key, &pod.uid).await?;
    }
    Ok(turn.again)
}
