//! Keeps one NodeImage per Node.
//!
//! In:  Nodes, NodeImages, ImagePullJobs (watches), old pull secrets (by name).
//! Out: NodeImages created, labelled, cleaned up and deleted; tags failed for daemons that report nothing; events.

mod act;
pub mod plan;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use tokio::sync::mpsc;

use super::repull::{node_seed, repull_at};
use super::view::{NodeImageView, TagOwner, TagStatusView, TagView};
use super::{Context, Stores};
use kruise_api::image_pull_job::{CompletionPolicyType, ImagePullJob};
use kruise_api::image_reference::ImageReference;
use kruise_api::node_image::ReferenceObject;
use kruise_cluster::clock::duration_until;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Change, Error, Key};
use kruise_ops::panics::catch_panic_sync;
use plan::{NodeObservation, OwnerState, Plan, Timeouts, plan};

/// How long the lookup of an old pull secret is cached.
const SECRET_RECHECK: Duration = Duration::from_secs(600);

/// State of nodes that is not in their objects.
#[derive(Default)]
struct NodeCache {
    /// When each node's daemon last wrote its status.
    last_reports: HashMap<String, Timestamp>,
    /// The last lookup of each node's old pull secrets.
    secret_lookups: HashMap<String, SecretLookup>,
}

/// Time, input and result of a lookup.
#[derive(Clone)]
struct SecretLookup {
    looked_up_at: Instant,
    secrets: Vec<(String, ReferenceObject)>,
    missing: HashSet<ReferenceObject>,
}

type SharedNodeCache = Arc<Mutex<NodeCache>>;

fn lock(cache: &SharedNodeCache) -> MutexGuard<'_, NodeCache> {
    cache.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs until shutdown.
pub async fn run(mut ctx: Context) {
    // The reporting component that OpenKruise uses; field selectors of clients may contain it.
    ctx.cluster.events = ctx.cluster.events.with_component("nodeimage-controller");
    ctx.stores.synced().await;
    let cache = SharedNodeCache::default();
    let (nodes_tx, nodes_rx) = mpsc::unbounded_channel();
    let enqueue = enqueue_changes(ctx.clone(), Arc::clone(&cache), nodes_tx);
    let workers = ctx.options.nodeimage_workers;
    let started = ctx.cluster.clock.now();
    let work = |node| reconcile(ctx.clone(), Arc::clone(&cache), node, started);
    ctx.run_workers("nodeimage", workers, nodes_rx, enqueue, work)
        .await;
}

/// Enqueues the names of changed nodes.
async fn enqueue_changes(ctx: Context, cache: SharedNodeCache, queue: mpsc::UnboundedSender<String>) {
    let stores = &ctx.stores;
    let mut node_changes = stores.nodes.subscribe();
    let mut image_changes = stores.node_images.subscribe();
    let mut job_changes = stores.jobs.subscribe();
    loop {
        let queue_is_open = tokio::select! {
            Some(change) = node_changes.recv() => queue.send(change.key.name).is_ok(),
            Some(change) = image_changes.recv() => {
                let (name, now) = (&change.key.name, ctx.cluster.clock.now());
                // A change that panics is skipped: the daemon's next status has the same effect.
                let _ = catch_panic_sync("nodeimage", format_args!("change of {name}"), || {
                    lock(&cache).observe_change(name, change.old.as_deref(), change.new.as_deref(), now);
                });
                queue.send(change.key.name).is_ok()
            }
            Some(change) = job_changes.recv() => {
                let freed = catch_panic_sync("nodeimage", format_args!("change of job {}", change.key), || {
                    released_job(&change).map(|job| nodes_owned_by(stores, job)).unwrap_or_default()
                });
                // After a panic the next change of each node releases the tags.
                freed.unwrap_or_default().into_iter().all(|n| queue.send(n).is_ok())
            }
            else => false,
        };
        if !queue_is_open {
            return;
        }
    }
}

/// The job that was deleted, has just finished or has another schedule: only then may its tags be released.
fn released_job(change: &Change<ImagePullJob>) -> Option<&ImagePullJob> {
    let old = change.old.as_deref()?;
    let same = change
        .new
        .as_deref()
        .filter(|new| new.metadata.uid == old.metadata.uid);
    match same {
        Some(new) if is_finished(new) == is_finished(old) && repeats(new) == repeats(old) => None,
        // Its generation shows whether it was edited.
        Some(new) => Some(new),
        None => Some(old),
    }
}

/// Whether and when it pulls again.
fn repeats(job: &ImagePullJob) -> (Option<&CompletionPolicyType>, Option<&String>) {
    let spec = &job.spec;
    (spec.completion_policy.type_.as_ref(), spec.schedule.as_ref())
}

fn is_finished(job: &ImagePullJob) -> bool {
    job.status.as_ref().is_some_and(|s| s.completion_time.is_some())
}

/// The nodes with a tag of a job. One whose spec was never edited has only the tag of its image: a node may have a
/// thousand others, each with its owners, and thousands of jobs may end at once.
fn nodes_owned_by(stores: &Stores, job: &ImagePullJob) -> Vec<String> {
    let uid = job.metadata.uid.as_deref().unwrap_or_default();
    let image = ImageReference::parse(&job.spec.image).ok();
    let image = image.filter(|_| job.metadata.generation == Some(1));
    let image = image.map(|image| (image.familiar_name(), image.tag_or_digest().to_owned()));
    let owns_tag = |tag: &TagView| tag.owners.iter().any(|owner| owner.uid == uid);
    let owns = |view: &NodeImageView| match &image {
        Some((name, tag)) => view.tag(name, tag).is_some_and(owns_tag),
        None => view.tags.iter().any(owns_tag),
    };
    let all = stores.node_images.entries().into_iter();
    all.filter(|(_, view)| owns(view))
        .map(|(key, _)| key.name)
        .collect()
}

impl NodeCache {
    /// When the node's daemon last wrote its status. One that this process has not seen yet counts from the start of the
    /// process: a new leader must not end pulls that go on.
    fn last_report(&self, name: &str, started: Timestamp) -> Timestamp {
        self.last_reports.get(name).copied().unwrap_or(started)
    }

    /// Records when a daemon wrote its status: something other than that it does not respond, which the manager writes.
    fn observe_change(
        &mut self,
        name: &str,
        old: Option<&NodeImageView>,
        new: Option<&NodeImageView>,
        now: Timestamp,
    ) {
        let Some(new) = new else {
            self.last_reports.remove(name);
            self.secret_lookups.remove(name);
            return;
        };
        let old = old.map_or(&[][..], |old| &old.statuses);
        if old == new.statuses {
            return;
        }
        let known: HashSet<&TagStatusView> = old.iter().collect();
        let is_report = |status: &&TagStatusView| {
            status.error.as_deref() != Some(plan::NO_RESPONSE) && !known.contains(status)
        };
        // Only the daemon removes statuses.
        if new.statuses.len() < old.len() || new.statuses.iter().any(|status| is_report(&status)) {
            self.last_reports.insert(name.to_owned(), now);
        }
    }
}

/// The old pull secrets that were deleted: looked up only if a NodeImage names any, and not for each change of it.
async fn missing_secrets(
    ctx: &Context,
    cache: &SharedNodeCache,
    name: &str,
    image: &NodeImageView,
) -> HashSet<ReferenceObject> {
    if image.non_batch_secrets.is_empty() {
        return HashSet::new();
    }
    let cached = lock(cache).secret_lookups.get(name).cloned();
    if let Some(cached) =
        cached.filter(|k| k.secrets == image.non_batch_secrets && k.looked_up_at.elapsed() < SECRET_RECHECK)
    {
        return cached.missing;
    }
    let missing = act::lookup_missing_secrets(ctx, image).await;
    let lookup = SecretLookup {
        looked_up_at: Instant::now(),
        secrets: image.non_batch_secrets.clone(),
        missing: missing.clone(),
    };
    lock(cache).secret_lookups.insert(name.to_owned(), lookup);
    missing
}

/// Observes, plans and acts; returns when to requeue.
async fn reconcile(
    ctx: Context,
    cache: SharedNodeCache,
    name: String,
    started: Timestamp,
) -> Result<RequeueAfter, Error> {
    let now = ctx.cluster.clock.now();
    let key = Key::cluster_scoped(name.clone());
    let node = ctx.stores.nodes.get(&key);
    let image = ctx.stores.node_images.get(&key);
    let missing = match &image {
        Some(image) => missing_secrets(&ctx, &cache, &name, image).await,
        None => HashSet::new(),
    };
    let delay = SignedDuration::try_from(ctx.options.nodeimage_creation_delay);
    let last_report = Some(lock(&cache).last_report(&name, started));
    let observation = NodeObservation {
        node: node.as_deref(),
        image: image.as_deref(),
        last_report,
    };
    let Plan {
        action: act,
        requeue_at,
    } = plan(
        observation,
        |owner| owner_state(&ctx.stores, owner),
        |secret| missing.contains(secret),
        |owner, completed| {
            let job = owner_job(&ctx.stores, owner)?;
            repull_at(&job.spec, node_seed(&name), completed)
        },
        Timeouts::new(delay.unwrap_or(SignedDuration::MAX)),
        now,
    );
    if let Some(act) = act {
        act::execute(&ctx, &name, image.as_deref(), act, now).await?;
    }
    Ok(requeue_at.map(|at| duration_until(at, now)))
}

/// The job that owns a tag, if it exists.
fn owner_job(stores: &Stores, owner: &TagOwner) -> Option<Arc<ImagePullJob>> {
    let job = stores.jobs.get(owner.job.as_ref()?)?;
    Some(job).filter(|job| job.metadata.uid.as_deref() == Some(owner.uid.as_str()))
}

/// The state of an owner in the stores.
fn owner_state(stores: &Stores, owner: &TagOwner) -> OwnerState {
    if owner.job.is_none() {
        return OwnerState::Present;
    }
    match owner_job(stores, owner) {
        None => OwnerState::Deleted,
        Some(job) => {
            let never = job.spec.completion_policy.type_ == Some(CompletionPolicyType::Never);
            if never || is_finished(&job) {
                OwnerState::Present
            } else {
                OwnerState::Counting
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::client::Body;

    use super::*;
    use crate::view::{ImageTag, TagRequest};
    use kruise_cluster::Store;
    use kruise_ops::panics::injected::inject_panic;

    #[test]
    fn report_that_was_not_seen_counts_from_the_start() {
        let at = |second| Timestamp::from_second(second).unwrap_or_default();
        let mut cache = NodeCache::default();
        assert_eq!(cache.last_report("node", at(100)), at(100));
        let name = |tag: &str| {
            Arc::new(ImageTag {
                image: "nginx".to_owned(),
                tag: tag.to_owned(),
            })
        };
        let status = TagStatusView {
            name: name("1"),
            version: 0,
            phase: kruise_api::node_image::ImagePullPhase::Pulling,
            completed: None,
            started: None,
            error: None,
            progress_hash: 0,
            bytes: None,
        };
        let image = NodeImageView {
            statuses: vec![status],
            ..NodeImageView::default()
        };
        cache.observe_change("node", None, Some(&image), at(200));
        assert_eq!(cache.last_report("node", at(100)), at(200));
        // The manager's mark does not count, but what the daemon reports beside it does.
        let mut marked = image.clone();
        marked.statuses.push(TagStatusView {
            name: name("2"),
            phase: kruise_api::node_image::ImagePullPhase::Failed,
            error: Some(plan::NO_RESPONSE.into()),
            ..image.statuses[0].clone()
        });
        cache.observe_change("node", Some(&image), Some(&marked), at(300));
        assert_eq!(cache.last_report("node", at(100)), at(200));
        let mut progressed = marked.clone();
        progressed.statuses[0].progress_hash = 1;
        cache.observe_change("node", Some(&marked), Some(&progressed), at(400));
        assert_eq!(cache.last_report("node", at(100)), at(400));
        cache.observe_change("node", Some(&progressed), Some(&image), at(500));
        assert_eq!(cache.last_report("node", at(100)), at(500));
    }

    /// An edit of the image leaves the tag of the earlier one behind.
    #[test]
    fn tags_of_an_earlier_image_are_released_after_an_edit() {
        let node_image = |tag: &str| {
            let owner = TagOwner {
                uid: "u".to_owned(),
                job: Some(Key::namespaced("team", "j")),
            };
            let request = TagRequest {
                image: "nginx".to_owned(),
                tag: tag.to_owned(),
                owners: vec![owner],
                ..TagRequest::default()
            };
            let tag = TagView {
                request: Arc::new(request),
                ..TagView::default()
            };
            NodeImageView {
                tags: vec![tag],
                ..NodeImageView::default()
            }
        };
        let images = [("a", "1"), ("b", "2")].map(|(name, tag)| (Key::cluster_scoped(name), node_image(tag)));
        let stores = Stores {
            node_images: Store::from_objects(images),
            ..Stores::empty()
        };
        let mut job = ImagePullJob::new("j", Default::default());
        job.metadata.uid = Some("u".to_owned());
        job.spec.image = "nginx:2".to_owned();
        let nodes = |generation| {
            let mut job = job.clone();
            job.metadata.generation = Some(generation);
            let mut nodes = nodes_owned_by(&stores, &job);
            nodes.sort();
            nodes
        };
        // Only the tag of its image was looked up.
        assert_eq!(nodes(1), ["b"]);
        assert_eq!(nodes(2), ["a", "b"]);
    }

    #[tokio::test]
    async fn panicking_changes_delay_no_node() {
        let service = tower::service_fn(|_: http::Request<Body>| {
            std::future::ready(http::Response::builder().status(500).body(Body::empty()))
        });
        let mut ctx = Context::for_test(kube::Client::new(service, "default"));
        let images = ["panic", "plain"].map(|name| (Key::cluster_scoped(name), NodeImageView::default()));
        let job = ImagePullJob::new("panic", Default::default());
        ctx.stores = Stores {
            node_images: Store::from_objects(images),
            jobs: Store::from_objects([(Key::namespaced("team", "panic"), job)]),
            ..Stores::empty()
        };
        let panics =
            ["change of panic", "change of job team/panic"].map(|object| inject_panic("nodeimage", object));
        let (nodes_tx, mut nodes) = mpsc::unbounded_channel();
        let enqueued = async {
            let mut enqueued = HashSet::new();
            while enqueued.len() < 2 {
                enqueued.extend(nodes.recv().await);
            }
            for panic in &panics {
                panic.wait_for(1).await;
            }
            enqueued
        };
        tokio::select! {
            () = enqueue_changes(ctx, SharedNodeCache::default(), nodes_tx) => unreachable!("its stores last"),
            woken = enqueued => assert_eq!(woken, ["panic", "plain"].map(str::to_owned).into()),
        }
    }
}
