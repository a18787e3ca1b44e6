//! Keeps one NodeImage per Node.
//!
//! In:  Nodes, NodeImages, ImagePullJobs (watches), old pull secrets (by name).
//! Out: NodeImages made, labelled, cleaned up and removed; tags failed for daemons that say nothing; events.

mod act;
pub mod plan;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use tokio::sync::mpsc;

use super::view::{NodeImageView, Owner};
use super::{Context, Stores};
use kruise_api::image_pull_job::{CompletionPolicyType, ImagePullJob};
use kruise_api::node_image::ReferenceObject;
use kruise_cluster::queue::Again;
use kruise_cluster::{Change, Error, Key};
use kruise_ops::panics::isolated_now;
use plan::{Interest, Observed, Plan, Rules, plan};

/// How long it is believed that an old pull secret is still there.
const ASK_AGAIN: Duration = Duration::from_secs(600);

/// What is known of nodes beyond their objects.
#[derive(Default)]
struct Memory {
    /// When each node's daemon last wrote its status.
    heard: HashMap<String, Timestamp>,
    /// When each node's old pull secrets were looked up, which they were, and which of them have gone.
    secrets: HashMap<String, Looked>,
}

/// What came of looking old pull secrets up.
#[derive(Clone)]
struct Looked {
    at: Instant,
    secrets: Vec<(String, ReferenceObject)>,
    gone: HashSet<ReferenceObject>,
}

type Shared = Arc<Mutex<Memory>>;

fn lock(memory: &Shared) -> MutexGuard<'_, Memory> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs until shutdown.
pub async fn run(mut ctx: Context) {
    // OpenKruise's name of the source of these events, which field selectors of clients may hold.
    ctx.cluster.events = ctx.cluster.events.of("nodeimage-controller");
    ctx.stores.synced().await;
    let memory = Shared::default();
    let (nodes_tx, nodes_rx) = mpsc::unbounded_channel();
    let wake = wake_up(ctx.clone(), Arc::clone(&memory), nodes_tx);
    let workers = ctx.options.nodeimage_workers;
    let work = |node| reconcile(ctx.clone(), Arc::clone(&memory), node);
    ctx.work("nodeimage", workers, nodes_rx, wake, work).await;
}

/// Sends the names of nodes to look at.
async fn wake_up(ctx: Context, memory: Shared, nodes: mpsc::UnboundedSender<String>) {
    let stores = &ctx.stores;
    let mut node_changes = stores.nodes.subscribe();
    let mut image_changes = stores.node_images.subscribe();
    let mut job_changes = stores.jobs.subscribe();
    loop {
        let alive = tokio::select! {
            Some(change) = node_changes.recv() => nodes.send(change.key.name).is_ok(),
            Some(change) = image_changes.recv() => {
                let (name, now) = (&change.key.name, ctx.cluster.clock.now());
                // One that panics is left out: the daemon's next status says the same.
                let _ = isolated_now("nodeimage", format_args!("change of {name}"), || {
                    lock(&memory).listen(name, change.old.as_deref(), change.new.as_deref(), now);
                });
                nodes.send(change.key.name).is_ok()
            }
            Some(change) = job_changes.recv() => {
                let freed = isolated_now("nodeimage", format_args!("change of job {}", change.key), || {
                    released(&change).map(|job| owned_by(stores, job)).unwrap_or_default()
                });
                // After a panic the next change of each node frees the tags.
                freed.unwrap_or_default().into_iter().all(|n| nodes.send(n).is_ok())
            }
            else => false,
        };
        if !alive {
            return;
        }
    }
}

/// The job that has gone, or has just ended: only then are its tags free.
fn released(change: &Change<ImagePullJob>) -> Option<&ImagePullJob> {
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

impl Memory {
    /// Takes note of the moment at which a daemon wrote its status.
    fn listen(
        &mut self,
        name: &str,
        old: Option<&NodeImageView>,
        new: Option<&NodeImageView>,
        now: Timestamp,
    ) {
        let Some(new) = new else {
            self.heard.remove(name);
            self.secrets.remove(name);
            return;
        };
        if old.map_or(&[][..], |old| &old.statuses) != new.statuses {
            self.heard.insert(name.to_owned(), now);
        }
    }
}

/// The old pull secrets that have gone: looked up where a NodeImage names any, and not with every change of it.
async fn secrets_gone(
    ctx: &Context,
    memory: &Shared,
    name: &str,
    image: &NodeImageView,
) -> HashSet<ReferenceObject> {
    if image.old_secrets.is_empty() {
        return HashSet::new();
    }
    let known = lock(memory).secrets.get(name).cloned();
    if let Some(known) = known.filter(|k| k.secrets == image.old_secrets && k.at.elapsed() < ASK_AGAIN) {
        return known.gone;
    }
    let gone = act::vanished(ctx, image).await;
    let looked = Looked {
        at: Instant::now(),
        secrets: image.old_secrets.clone(),
        gone: gone.clone(),
    };
    lock(memory).secrets.insert(name.to_owned(), looked);
    gone
}

/// Observe, plan, act; then say when to look again.
async fn reconcile(ctx: Context, memory: Shared, name: String) -> Result<Again, Error> {
    let now = ctx.cluster.clock.now();
    let key = Key::cluster(name.clone());
    let node = ctx.stores.nodes.get(&key);
    let image = ctx.stores.node_images.get(&key);
    let gone = match &image {
        Some(image) => secrets_gone(&ctx, &memory, &name, image).await,
        None => HashSet::new(),
    };
    let delay = SignedDuration::try_from(ctx.options.nodeimage_creation_delay);
    let heard = lock(&memory).heard.get(&name).copied();
    let seen = Observed {
        node: node.as_deref(),
        image: image.as_deref(),
        heard,
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

#[cfg(test)]
mod tests {
    use kube::client::Body;

    use super::*;
    use kruise_cluster::Mirror;
    use kruise_ops::panics::injected::panic_at;

    #[tokio::test]
    async fn changes_that_panic_hold_up_no_node() {
        let service = tower::service_fn(|_: http::Request<Body>| {
            std::future::ready(http::Response::builder().status(500).body(Body::empty()))
        });
        let mut ctx = Context::of(kube::Client::new(service, "default"));
        let images = ["panic", "plain"].map(|name| (Key::cluster(name), NodeImageView::default()));
        let job = ImagePullJob::new("panic", Default::default());
        ctx.stores = Stores {
            node_images: Mirror::of(images),
            jobs: Mirror::of([(Key::namespaced("team", "panic"), job)]),
            ..Stores::empty()
        };
        let panics =
            ["change of panic", "change of job team/panic"].map(|object| panic_at("nodeimage", object));
        let (nodes_tx, mut nodes) = mpsc::unbounded_channel();
        let woken = async {
            let mut woken = HashSet::new();
            while woken.len() < 2 {
                woken.extend(nodes.recv().await);
            }
            for panic in &panics {
                panic.happened(1).await;
            }
            woken
        };
        tokio::select! {
            () = wake_up(ctx, Shared::default(), nodes_tx) => unreachable!("its stores last"),
            woken = woken => assert_eq!(woken, ["panic", "plain"].map(str::to_owned).into()),
        }
    }
}
