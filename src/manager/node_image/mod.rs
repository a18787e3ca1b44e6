//! Keeps one NodeImage per Node.
//!
//! In:  Nodes, NodeImages, ImagePullJobs (watches), old pull secrets (by name).
//! Out: NodeImages made, labelled, cleaned up and removed; tags failed for daemons that say nothing; events.

mod act;
pub mod plan;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::mpsc;

use super::view::{NodeImageView, Owner};
use super::{Context, Stores};
use crate::api::image_pull_job::{CompletionPolicyType, ImagePullJob};
use crate::cluster::queue::Again;
use crate::cluster::{Change, Error, Key};
use plan::{Interest, Observed, Plan, Rules, plan};

/// When each node's daemon last said anything.
type Heard = Arc<Mutex<HashMap<String, Timestamp>>>;

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    ctx.stores.synced().await;
    let heard = Heard::default();
    let (nodes_tx, nodes_rx) = mpsc::unbounded_channel();
    let wake = wake_up(ctx.clone(), Arc::clone(&heard), nodes_tx);
    let workers = ctx.options.nodeimage_workers;
    let work = |node| look_after(ctx.clone(), Arc::clone(&heard), node);
    ctx.work("nodeimage", workers, nodes_rx, wake, work).await;
}

/// Sends the names of nodes to look at.
async fn wake_up(ctx: Context, heard: Heard, nodes: mpsc::UnboundedSender<String>) {
    let stores = &ctx.stores;
    let mut node_changes = stores.nodes.subscribe();
    let mut image_changes = stores.node_images.subscribe();
    let mut job_changes = stores.jobs.subscribe();
    loop {
        let alive = tokio::select! {
            Some(change) = node_changes.recv() => nodes.send(change.key.name).is_ok(),
            Some(change) = image_changes.recv() => {
                listen(&heard, &change.key.name, change.old.as_deref(), change.new.as_deref(), ctx.cluster.clock.now());
                nodes.send(change.key.name).is_ok()
            }
            Some(change) = job_changes.recv() => {
                match let_go(&change) {
                    Some(job) => owned_by(stores, job).into_iter().all(|n| nodes.send(n).is_ok()),
                    None => true,
                }
            }
            else => false,
        };
        if !alive {
            return;
        }
    }
}

/// The job that has gone, or has just ended: only then does it let go of its tags.
fn let_go(change: &Change<ImagePullJob>) -> Option<&ImagePullJob> {
    let old = change.old.as_deref()?;
    let same = change
        .new
        .as_ref()
        .filter(|new| new.metadata.uid == old.metadata.uid);
    match same {
        Some(new) if over(new) == over(old) => None,
        _ => Some(old),
    }
}

fn over(job: &ImagePullJob) -> bool {
    job.status.as_ref().is_some_and(|s| s.completion_time.is_some())
}

fn owned_by(stores: &Stores, job: &ImagePullJob) -> Vec<String> {
    let uid = job.metadata.uid.as_deref().unwrap_or_default();
    let owns = |view: &NodeImageView| view.tags.iter().flat_map(|t| &t.owners).any(|o| o.uid == uid);
    let all = stores.node_images.entries().into_iter();
    all.filter(|(_, view)| owns(view))
        .map(|(key, _)| key.name)
        .collect()
}

/// Takes note of the moment at which a daemon said something.
fn listen(
    heard: &Heard,
    name: &str,
    old: Option<&NodeImageView>,
    new: Option<&NodeImageView>,
    now: Timestamp,
) {
    let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
    match (old, new) {
        (_, None) => {
            heard.remove(name);
        }
        (Some(old), Some(new)) if old.statuses == new.statuses => {}
        (_, Some(_)) => {
            heard.insert(name.to_owned(), now);
        }
    }
}

/// Observe, plan, act; then say when to look again.
async fn look_after(ctx: Context, heard: Heard, name: String) -> Result<Again, Error> {
    let now = ctx.cluster.clock.now();
    let key = Key::cluster(name.clone());
    let node = ctx.stores.nodes.get(&key);
    let image = ctx.stores.node_images.get(&key);
    let gone = act::vanished(&ctx, image.as_deref()).await?;
    let delay = SignedDuration::try_from(ctx.options.nodeimage_creation_delay);
    let seen = Observed {
        node: node.as_deref(),
        image: image.as_deref(),
        heard: heard
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&name)
            .copied(),
    };
    let Plan { act, wake } = plan(
        seen,
        |owner| interest(&ctx.stores, owner),
        |secret| gone.contains(secret),
        Rules::new(delay.unwrap_or(SignedDuration::MAX)),
        now,
    );
    if let Some(act) = act {
        act::carry_out(&ctx, &name, image.as_deref(), act, now).await?;
    }
    Ok(wake.map(|at| Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO)))
}

/// What is known of an owner.
fn interest(stores: &Stores, owner: &Owner) -> Interest {
    let Some(key) = &owner.job else {
        return Interest::There;
    };
    let job = stores.jobs.get(key);
    let job = job.filter(|j| j.metadata.uid.as_deref() == Some(owner.uid.as_str()));
    match job {
        None => Interest::Gone,
        Some(job) => {
            let never = job.spec.completion_policy.type_ == Some(CompletionPolicyType::Never);
            if never || over(&job) {
                Interest::There
            } else {
                Interest::Counting
            }
        }
    }
}
