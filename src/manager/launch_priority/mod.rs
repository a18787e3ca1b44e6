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
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::Context;
use crate::cluster::queue::Again;
use crate::cluster::{Error, Key};
use lift::{complete, lift};
use plan::{Step, step};

/// Pods written to at once.
const WORKERS: usize = 4;
/// Nobody watches ConfigMaps, so those of Pods that are not complete are looked at again after so long.
const LOOK_AGAIN: Duration = Duration::from_secs(300);

/// What was done for a Pod that is not complete.
struct Done {
    uid: String,
    /// The lowest priority that may start.
    priority: i64,
    at: Instant,
}

type Lifted = Arc<Mutex<HashMap<Key, Done>>>;

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    let (pods_tx, pods_rx) = mpsc::unbounded_channel();
    let mut changes = ctx.stores.pods.subscribe();
    let lifted = Lifted::default();
    let known = Arc::clone(&lifted);
    let wake = async move {
        while let Some(change) = changes.recv().await {
            let step = change.new.as_deref().map_or(Step::Nothing, step);
            if step == Step::Nothing {
                lock(&known).remove(&change.key);
            } else if pods_tx.send(change.key).is_err() {
                return;
            }
        }
    };
    let work = |key| look_after(ctx.clone(), Arc::clone(&lifted), key);
    ctx.work("launchpriority", WORKERS, pods_rx, wake, work).await;
}

fn lock(lifted: &Lifted) -> MutexGuard<'_, HashMap<Key, Done>> {
    lifted.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn look_after(ctx: Context, lifted: Lifted, key: Key) -> Result<Again, Error> {
    let Some(pod) = ctx.stores.pods.get(&key) else {
        return Ok(None);
    };
    match step(&pod) {
        Step::Nothing => return Ok(None),
        Step::Complete => {}
        Step::Lift { priority, last } => {
            let fresh = |done: &&Done| done.uid == pod.uid && done.at.elapsed() < LOOK_AGAIN;
            let done = lock(&lifted).get(&key).filter(fresh).map(|done| done.priority);
            if done.is_none_or(|done| done > priority) {
                if !lift(&ctx, &key, &pod, priority).await? {
                    return Ok(Some(LOOK_AGAIN));
                }
                let (uid, at) = (pod.uid.clone(), Instant::now());
                lock(&lifted).insert(key.clone(), Done { uid, priority, at });
            }
            if !last {
                return Ok(Some(LOOK_AGAIN));
            }
        }
    }
    complete(&ctx, &key, &pod.uid).await?;
    Ok(None)
}
