//! Writes job requests into NodeImages: at most one patch at a time per node, for all jobs that wait for it.
//!
//! A request that the API server refuses, or that the NodeImage has no room for, fails alone, and one that the API
//! server cannot answer waits in the queue, not in a worker.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use kube::Api;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::name::NAME;
use super::plan::batch::{Additions, add_requests};
use super::plan::entry::{EntryOptions, JobRequest, NeededAccounts, NeededSecrets, owner_reference};
use super::plan::index::{JobIndex, MAX_SECRETS_OF_NAMESPACE};
use super::plan::job::{PullJob, Uid};
use super::plan::quota::QuotaExceeded;
use super::plan::running_job::NodeName;
use crate::Context;
use crate::repull::node_seed;
use crate::view::NodeImageView;
use kruise_api::backoff::Backoff;
use kruise_api::json::{replacing_patch, set};
use kruise_api::keys;
use kruise_api::node_image::{NodeImage, ReferenceObject};
use kruise_cluster::{Error, EventRecorder, EventType, write};
use kruise_ops::Progress;
use kruise_ops::panics::{Panicked, catch_panic, catch_panic_sync};
use kruise_ops::progress::ProgressStep;
use kruise_ops::traces::Span;

/// After failed writes.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), MAX_BACKOFF);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// How often a forbidden write is repeated: about 13 s in total.
const MAX_DENIED_RETRIES: u32 = 7;
/// How often a write is repeated at once after a conflict.
const MAX_CONFLICT_RETRIES: u32 = 5;
/// A NodeImage with fewer tags than this has space for more, for every namespace.
const MAX_TAGS_OF_BLIND_PATCH: usize = 64;
/// Size of a sandboxConfig, in bytes, that needs no quota check when there are few tags.
const SMALL_SANDBOX_CONFIG: usize = 4096;

/// A job's request for one node that waits. There may be a thousand jobs, each with a thousand nodes.
#[derive(Clone, Copy)]
struct QueuedWrite {
    /// Number of failed writes.
    failures: u32,
    /// The write does not start earlier.
    not_before: Instant,
}

/// A job's request for one node, with all data that its write needs.
#[derive(Clone)]
struct PendingWrite {
    uid: Uid,
    job: Arc<PullJob>,
    secrets: Vec<ReferenceObject>,
    /// Number of failed writes.
    failures: u32,
}

/// Why a request was not written.
#[derive(Clone, Debug, PartialEq)]
enum WriteError {
    /// The same write would be refused again.
    Permanent(String),
    /// Permissions may be changing right now; the refusal is permanent only after some retries.
    Denied(String),
    /// It may succeed later, after the pause that the API server requests, if any.
    Retryable(String, Option<Duration>),
    /// The API server is unreachable or overloaded: no other write would succeed now.
    Unavailable(String, Option<Duration>),
    /// Not attempted, because another write met [`WriteError::Unavailable`]; it needs the same pause.
    NotAttempted(Option<Duration>),
}

impl WriteError {
    fn message(&self) -> &str {
        match self {
            Self::Permanent(message)
            | Self::Denied(message)
            | Self::Retryable(message, _)
            | Self::Unavailable(message, _) => message,
            Self::NotAttempted(_) => "not attempted: another write failed",
        }
    }
}

impl From<Error> for WriteError {
    fn from(error: Error) -> Self {
        let (message, after) = (error.to_string(), error.retry_after());
        match error {
            Error::Timeout { .. } | Error::Transport(_) => Self::Unavailable(message, after),
            _ if error.throttled() => Self::Unavailable(message, after),
            _ if error.too_large() => Self::Permanent(message),
            _ if error.retryable() => Self::Retryable(message, after),
            _ if matches!(error.category(), "forbidden" | "unauthorized") => Self::Denied(message),
            _ => Self::Permanent(message),
        }
    }
}

impl From<QuotaExceeded> for WriteError {
    fn from(full: QuotaExceeded) -> Self {
        Self::Permanent(full.to_string())
    }
}

impl From<Panicked> for WriteError {
    fn from(panicked: Panicked) -> Self {
        Self::Retryable(panicked.to_string(), None)
    }
}

/// Result of a request: the version of the pull that it waits for, if any.
type WriteResult = Result<Option<i64>, WriteError>;
/// Results of the requests of one write. Those that are not among them need none, because the node was deleted.
type WriteResults = BTreeMap<Uid, WriteResult>;

/// The result of one write.
pub struct FinishedWrite {
    node: NodeName,
    results: Vec<(PendingWrite, WriteResult)>,
}

/// Queued nodes, by the first job that requested each; jobs take turns, so that a small job need not wait for a large
/// one.
#[derive(Default)]
struct FairQueue {
    job_order: VecDeque<Uid>,
    nodes_by_job: HashMap<Uid, VecDeque<NodeName>>,
    queued: HashSet<NodeName>,
}

impl FairQueue {
    fn push(&mut self, uid: &Uid, node: NodeName) {
        if !self.queued.insert(Arc::clone(&node)) {
            return;
        }
        let nodes = self.nodes_by_job.entry(Arc::clone(uid)).or_default();
        if nodes.is_empty() {
            self.job_order.push_back(Arc::clone(uid));
        }
        nodes.push_back(node);
    }

    fn pop(&mut self) -> Option<NodeName> {
        let uid = self.job_order.pop_front()?;
        let nodes = self.nodes_by_job.get_mut(&uid)?;
        let node = nodes.pop_front();
        if nodes.is_empty() {
            self.nodes_by_job.remove(&uid);
        } else {
            self.job_order.push_back(uid);
        }
        node.inspect(|node| {
            self.queued.remove(node);
        })
    }
}

/// Pending and running writes of NodeImages.
pub struct NodeImageWriter {
    api: Api<NodeImage>,
    events: EventRecorder,
    progress: Progress,
    workers: usize,
    default_ttl: i64,
    pending: HashMap<NodeName, BTreeMap<Uid, QueuedWrite>>,
    ready: FairQueue,
    /// Nodes whose next write is delayed.
    delayed: BTreeSet<(Instant, NodeName)>,
    in_flight: HashSet<NodeName>,
    running: JoinSet<FinishedWrite>,
}

impl NodeImageWriter {
    /// A writer with an empty queue.
    pub fn new(ctx: &Context) -> Self {
        Self {
            api: Api::all(ctx.cluster.client.clone()),
            events: ctx.cluster.events.clone(),
            progress: ctx.progress.clone(),
            workers: ctx.options.imagepulljob_workers.max(1),
            default_ttl: i64::from(ctx.options.default_ttlseconds_for_always_nodeimage),
            pending: HashMap::new(),
            ready: FairQueue::default(),
            delayed: BTreeSet::new(),
            in_flight: HashSet::new(),
            running: JoinSet::new(),
        }
    }

    /// Queues a job's request for a node.
    pub fn enqueue(&mut self, node: &NodeName, uid: &Uid) {
        let now = Instant::now();
        let pending = self.pending.entry(Arc::clone(node)).or_default();
        if let Entry::Vacant(place) = pending.entry(Arc::clone(uid)) {
            place.insert(QueuedWrite {
                failures: 0,
                not_before: now,
            });
            self.schedule_node(node, now);
        }
    }

    /// Queues a node, now or when the first of its requests is due.
    fn schedule_node(&mut self, node: &NodeName, now: Instant) {
        if self.in_flight.contains(node) {
            return;
        }
        let Some(pending) = self.pending.get(node) else {
            return;
        };
        let Some((uid, first)) = pending.iter().min_by_key(|(_, write)| write.not_before) else {
            return;
        };
        if first.not_before <= now {
            self.ready.push(uid, Arc::clone(node));
        } else {
            self.delayed.insert((first.not_before, Arc::clone(node)));
        }
    }

    /// Time until the next delayed write.
    pub fn next_requeue(&self) -> Option<Duration> {
        let (at, _) = self.delayed.first()?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    /// Starts as many writes as may run at once.
    pub fn start_writes(&mut self, index: &mut JobIndex, now: Timestamp) {
        let now_instant = Instant::now();
        while self.delayed.first().is_some_and(|(due, _)| *due <= now_instant) {
            if let Some((_, node)) = self.delayed.pop_first() {
                self.schedule_node(&node, now_instant);
            }
        }
        while self.running.len() < self.workers {
            let Some(node) = self.ready.pop() else {
                return;
            };
            let started = catch_panic_sync(NAME, &node, || {
                self.start_write(index, Arc::clone(&node), now, now_instant);
            });
            if started.is_err() {
                // Its jobs assign it again after the assignment timeout.
                self.pending.remove(&node);
                self.in_flight.remove(&node);
            }
        }
    }

    fn start_write(&mut self, index: &mut JobIndex, node: NodeName, now: Timestamp, now_instant: Instant) {
        let mut pending = self.pending.remove(&node).unwrap_or_default();
        // Requests of finished or deleted jobs are dropped.
        pending.retain(|uid, _| index.needs_write(uid, &node));
        let (due_writes, later_writes): (BTreeMap<_, _>, BTreeMap<_, _>) = pending
            .into_iter()
            .partition(|(_, write)| write.not_before <= now_instant);
        if !later_writes.is_empty() {
            self.pending.insert(Arc::clone(&node), later_writes);
        }
        let due_writes = due_writes.into_iter().filter_map(|(uid, queued)| {
            Some(PendingWrite {
                job: index.job(&uid)?,
                secrets: index.secret_copies(&uid).to_vec(),
                failures: queued.failures,
                uid,
            })
        });
        let due_writes: Vec<PendingWrite> = due_writes.collect();
        let (false, Some(view)) = (due_writes.is_empty(), index.node_image_view(&node)) else {
            return self.schedule_node(&node, now_instant);
        };
        let options = EntryOptions {
            default_ttl: self.default_ttl,
            seed: node_seed(&node),
            now,
        };
        let owners = view.tags.iter().flat_map(|tag| &tag.owners);
        let ended = owners.filter(|o| o.job.is_some() && index.job(&o.uid.as_str().into()).is_none());
        let ended_jobs = ended.map(|owner| owner.uid.clone()).collect();
        let with_secrets = due_writes.iter().filter(|write| !write.secrets.is_empty());
        let images = with_secrets.filter_map(|write| Some(&write.job.image.as_ref().ok()?.0));
        // Many jobs may pull the same image.
        let images: BTreeSet<&String> = images.collect();
        let needed = images
            .into_iter()
            .filter_map(|image| Some((image.clone(), index.needed_secrets(image)?)));
        let needed_secrets = needed.collect();
        // Also for jobs without an account: the account of a job that has ended would keep a plugin from them that needs
        // none.
        let images = due_writes
            .iter()
            .filter_map(|write| Some(&write.job.image.as_ref().ok()?.0));
        let images: BTreeSet<&String> = images.collect();
        let needed = images
            .into_iter()
            .map(|image| (image.clone(), index.needed_accounts(image)));
        let node_write = Arc::new(NodeWrite {
            api: self.api.clone(),
            needed_secrets,
            needed_accounts: needed.collect(),
            node: Arc::clone(&node),
            ended_jobs,
            view,
            options,
            last_read: Mutex::default(),
            step: self.progress.begin_idle(NAME),
        });
        for write in &due_writes {
            if let Some(excess) = index.take_excess_secrets(&write.uid) {
                self.report_excess_secrets(&write.job, excess);
            }
        }
        self.in_flight.insert(Arc::clone(&node));
        self.running.spawn(async move {
            let write = |requests| Box::pin(execute(Arc::clone(&node_write), requests));
            let mut spans: HashMap<Uid, Span> = due_writes
                .iter()
                .map(|write| {
                    let span = Span::of_trace("add image to NodeImage", &write.uid);
                    (Arc::clone(&write.uid), span.with("k8s.node.name", &node))
                })
                .collect();
            let results = write_all(&node_write.node, due_writes, write).await;
            for (write, result) in &results {
                if let (Some(span), Err(error)) = (spans.get_mut(&write.uid), result) {
                    span.fail(error.message());
                }
            }
            FinishedWrite { node, results }
        });
    }

    fn report_excess_secrets(&self, job: &PullJob, excess: usize) {
        let note = format!(
            "{excess} pull secret(s) of this job are not used: for one image, nodes use {MAX_SECRETS_OF_NAMESPACE} of a \
             namespace at most"
        );
        let (warning, reason) = (EventType::Warning, "TooManyPullSecrets");
        self.events
            .publish(owner_reference(job), warning, reason, "Assign", note);
    }

    /// The next finished write; `None` while none runs.
    pub async fn next_finished(&mut self) -> Option<FinishedWrite> {
        match self.running.join_next().await? {
            Ok(done) => Some(done),
            Err(error) => {
                tracing::error!(%error, "a write of a NodeImage was cancelled");
                None
            }
        }
    }

    /// Processes the result of a write.
    pub fn on_write_finished(&mut self, index: &mut JobIndex, finished: FinishedWrite) {
        let FinishedWrite { node, results } = finished;
        let now = Instant::now();
        self.in_flight.remove(&node);
        for (mut pending_write, result) in results {
            let label = format!("outcome of {} on {node}", pending_write.job.key);
            let retry_after = catch_panic_sync(NAME, label, || {
                self.handle_result(index, &node, &mut pending_write, result)
            });
            // After a panic the state of the index is unknown; the same write again changes nothing.
            let Some(pause) = retry_after.unwrap_or(Some(MAX_BACKOFF)) else {
                continue;
            };
            let queued = QueuedWrite {
                failures: pending_write.failures,
                not_before: now + pause,
            };
            let pending = self.pending.entry(Arc::clone(&node)).or_default();
            pending.insert(pending_write.uid, queued);
        }
        self.schedule_node(&node, now);
    }

    /// When to write a request again after this result; `None` if not.
    fn handle_result(
        &self,
        index: &mut JobIndex,
        node: &NodeName,
        pending_write: &mut PendingWrite,
        result: WriteResult,
    ) -> Option<Duration> {
        let job = &pending_write.job.key;
        let (message, pause) = match result {
            Ok(awaits) => {
                tracing::debug!(%job, %node, ?awaits, "requested the image in the NodeImage");
                index.write_succeeded(&pending_write.job, node, awaits);
                return None;
            }
            Err(WriteError::NotAttempted(after)) => (None, after),
            Err(WriteError::Retryable(message, after) | WriteError::Unavailable(message, after)) => {
                (Some(message), after)
            }
            Err(WriteError::Denied(message)) if pending_write.failures < MAX_DENIED_RETRIES => {
                (Some(message), None)
            }
            Err(WriteError::Permanent(message) | WriteError::Denied(message)) => {
                self.report_permanent_failure(index, node, pending_write, &message);
                return None;
            }
        };
        if let Some(message) = message {
            pending_write.failures = pending_write.failures.saturating_add(1);
            if pending_write.failures == 1 {
                tracing::warn!(%job, %node, error = message, "NodeImage not written; will retry");
            }
            index.write_delayed(
                &pending_write.uid,
                node,
                &format!("cannot update its NodeImage: {message}"),
            );
        }
        Some(pause.unwrap_or_else(|| RETRY.delay(pending_write.failures.saturating_sub(1))))
    }

    fn report_permanent_failure(
        &self,
        index: &mut JobIndex,
        node: &NodeName,
        pending_write: &PendingWrite,
        message: &str,
    ) {
        tracing::warn!(job = %pending_write.job.key, %node, error = message, "NodeImage refused");
        let note = if index.is_assigned(&pending_write.uid, node) {
            format!("cannot add the image to NodeImage {node}: {message}")
        } else {
            format!("cannot update the image in NodeImage {node}, its pull continues: {message}")
        };
        index.write_refused(&pending_write.job, node, message);
        let reference = owner_reference(&pending_write.job);
        self.events.publish(
            reference,
            EventType::Warning,
            keys::EVENT_NODE_IMAGE_REFUSED,
            "Assign",
            note,
        );
    }
}

/// Writes all requests of a node together. If that fails, and for requests that failed before, each is written
/// separately: a request that cannot be written, or that panics, blocks no other. Those that the NodeImage has no room
/// for are refused without a write of their own.
async fn write_all<F>(
    node: &str,
    pending: Vec<PendingWrite>,
    write: impl Fn(Vec<PendingWrite>) -> F,
) -> Vec<(PendingWrite, WriteResult)>
where
    F: Future<Output = Result<WriteResults, WriteError>>,
{
    let result_for = |write: &PendingWrite, result: &Result<WriteResults, WriteError>| -> WriteResult {
        let results = result.as_ref().map_err(Clone::clone)?;
        results.get(&write.uid).cloned().unwrap_or(Ok(None))
    };
    let (fresh, mut separately): (Vec<_>, Vec<_>) =
        pending.into_iter().partition(|write| write.failures == 0);
    let mut results = Vec::new();
    let mut unavailable = None;
    if fresh.len() > 1 {
        let result = isolated_write(node, write(fresh.clone())).await;
        unavailable = not_attempted(&result);
        if result.is_ok() || unavailable.is_some() {
            results.extend(
                fresh
                    .into_iter()
                    .map(|one| (one.clone(), result_for(&one, &result))),
            );
        } else {
            separately.extend(fresh);
        }
    } else {
        separately.extend(fresh);
    }
    // Requests with the fewest failures first: one that makes the API server fail must not block the others forever.
    separately.sort_by_key(|one| one.failures);
    for one in separately {
        let result = match &unavailable {
            Some(error) => Err(WriteError::clone(error)),
            None => isolated_write(node, write(vec![one.clone()])).await,
        };
        unavailable = unavailable.or_else(|| not_attempted(&result));
        let outcome = result_for(&one, &result);
        results.push((one, outcome));
    }
    results
}

/// The error of all further requests, if the API server is unavailable.
fn not_attempted(result: &Result<WriteResults, WriteError>) -> Option<WriteError> {
    match result {
        Err(WriteError::Unavailable(_, after)) => Some(WriteError::NotAttempted(*after)),
        _ => None,
    }
}

async fn isolated_write(
    node: &str,
    write: impl Future<Output = Result<WriteResults, WriteError>>,
) -> Result<WriteResults, WriteError> {
    catch_panic(NAME, node, write).await?
}

/// Input of one write.
struct NodeWrite {
    api: Api<NodeImage>,
    node: NodeName,
    view: Arc<NodeImageView>,
    /// Finished jobs that own tags of this node.
    ended_jobs: BTreeSet<String>,
    /// By image, for those that a request brings pull secrets for.
    needed_secrets: BTreeMap<String, NeededSecrets>,
    /// Service accounts of the running jobs, by image, for those of all requests.
    needed_accounts: BTreeMap<String, NeededAccounts>,
    options: EntryOptions,
    /// The object as it was read for requests that did not change it, such as those that it has no room for: there may
    /// be a thousand, each decided on its own after other failures.
    last_read: Mutex<Option<NodeImage>>,
    step: ProgressStep,
}

impl NodeWrite {
    /// Keeps another object, or none; returns the one that was kept.
    fn replace_last_read(&self, object: Option<NodeImage>) -> Option<NodeImage> {
        let mut last_read = self.last_read.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *last_read, object)
    }

    /// An object with only what a patch needs: if the node has none of the images and has space, the patch needs
    /// nothing but the resource version.
    fn minimal_object(&self, pending: &[PendingWrite]) -> Option<NodeImage> {
        let new = |write: &PendingWrite| {
            let sandbox = write.job.spec.sandbox_config.as_ref();
            let small = sandbox.is_none_or(|s| json!(s).to_string().len() <= SMALL_SANDBOX_CONFIG);
            small
                && write
                    .job
                    .image
                    .as_ref()
                    .is_ok_and(|(name, _)| !self.view.mentions_image(name))
        };
        let has_room = self.view.tags.len().saturating_add(pending.len()) <= MAX_TAGS_OF_BLIND_PATCH;
        (has_room && pending.iter().all(new)).then(|| {
            let mut object = NodeImage::new(&self.node, kruise_api::node_image::NodeImageSpec::default());
            object.metadata.resource_version = Some(self.view.resource_version.clone());
            object
        })
    }
}

/// Writes the patch; reads the object again after a conflict. Succeeds if the node was deleted.
async fn execute(node_write: Arc<NodeWrite>, pending: Vec<PendingWrite>) -> Result<WriteResults, WriteError> {
    let NodeWrite { api, node, step, .. } = &*node_write;
    let mut minimal = node_write.minimal_object(&pending);
    let mut conflicts = 0;
    loop {
        step.set_activity(format!("writing NodeImage {node}"), write::REQUEST_TIMEOUT * 2);
        let is_minimal = minimal.is_some();
        let object = match minimal.take().or_else(|| node_write.replace_last_read(None)) {
            Some(object) => object,
            None => match write::get(api, node).await? {
                Some(object) => object,
                None => return Ok(WriteResults::new()),
            },
        };
        let (body, results) = build_patch(&node_write, &object, &pending);
        let Some(body) = body else {
            if !is_minimal {
                node_write.replace_last_read(Some(object));
            }
            return Ok(results);
        };
        match write::patch_merge(api, node, &body).await {
            Err(error) if error.conflict() && conflicts < MAX_CONFLICT_RETRIES => conflicts += 1,
            Err(error) if !error.not_found() => return Err(error.into()),
            _ => return Ok(results),
        }
    }
}

/// One patch of all requested entries that the NodeImage has room for, `None` if they exist, and the results of the
/// requests.
fn build_patch(
    node_write: &NodeWrite,
    object: &NodeImage,
    pending: &[PendingWrite],
) -> (Option<Value>, WriteResults) {
    let requests = pending.iter().map(|write| {
        let image = write.job.image.as_ref().ok();
        JobRequest {
            job: &write.job,
            secrets: &write.secrets,
            ended_jobs: &node_write.ended_jobs,
            needed_secrets: image.and_then(|(name, _)| node_write.needed_secrets.get(name)),
            needed_accounts: image.and_then(|(name, _)| node_write.needed_accounts.get(name)),
        }
    });
    let requests: Vec<JobRequest<'_>> = requests.collect();
    let Additions { images, results } = add_requests(object, &requests, node_write.options);
    let results = pending.iter().zip(results);
    let results = results.map(|(write, result)| (Arc::clone(&write.uid), result.map_err(WriteError::from)));
    let results: WriteResults = results.collect();
    if images.is_empty() {
        return (None, results);
    }
    let entries: serde_json::Map<String, Value> = images
        .into_iter()
        .map(|(name, spec)| {
            // What other jobs wrote into it, such as labels of sandboxes, must not remain.
            let current = object
                .spec
                .images
                .get(name)
                .map_or(Value::Null, |spec| json!(spec));
            let mut entry = replacing_patch(&current, &json!(spec));
            // Those of an entry that was not read, either.
            for (field, is_empty) in [
                ("pullSecrets", spec.pull_secrets.is_empty()),
                ("serviceAccounts", spec.service_accounts.is_empty()),
            ] {
                if is_empty {
                    set(&mut entry, &[field], Value::Null);
                }
            }
            (name.to_owned(), entry)
        })
        .collect();
    let body = json!({
        "metadata": { "resourceVersion": object.metadata.resource_version },
        "spec": { "images": entries },
    });
    (Some(body), results)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use kube::client::Body;

    use super::*;
    use kruise_api::image_pull_job::{ImagePullJob, ImagePullJobSpec};
    use kruise_api::node_image::{ImageSpec, ImageTagSpec, NodeImageSpec};

    #[test]
    fn small_job_does_not_wait_for_a_large_one() {
        let mut queue = FairQueue::default();
        for n in 0..100 {
            queue.push(&"large".into(), format!("n{n}").into());
        }
        queue.push(&"small".into(), "s".into());
        let first: Vec<_> = (0..3).filter_map(|_| queue.pop()).collect();
        assert_eq!(first, ["n0".into(), "s".into(), "n1".into()] as [NodeName; 3]);
        assert_eq!(std::iter::from_fn(|| queue.pop()).count(), 98);
        assert!(queue.nodes_by_job.is_empty() && queue.job_order.is_empty() && queue.queued.is_empty());
    }

    fn pending_write(name: &str, failures: u32) -> PendingWrite {
        let mut object = ImagePullJob::new(name, ImagePullJobSpec::default());
        object.metadata.namespace = Some(name.to_owned());
        PendingWrite {
            uid: name.into(),
            job: Arc::new(PullJob::from_object(&object)),
            secrets: Vec::new(),
            failures,
        }
    }

    /// Runs an API server that returns this error when that job's entry is in a write; returns the result of each job,
    /// and the writes.
    async fn write_with_error(
        requests: &[(&str, u32)],
        hostile: Option<WriteError>,
    ) -> (BTreeMap<String, Option<WriteError>>, usize) {
        let count = Mutex::new(0);
        let write = |batch: Vec<PendingWrite>| {
            *count.lock().unwrap() += 1;
            let hostile = hostile.clone();
            async move {
                if batch.iter().all(|write| *write.uid != *"hostile") {
                    return Ok(WriteResults::new());
                }
                Err(hostile.unwrap_or_else(|| panic!("index out of bounds")))
            }
        };
        let requests = requests
            .iter()
            .map(|(name, failures)| pending_write(name, *failures))
            .collect();
        let results = write_all("node-1", requests, write).await;
        let results = results
            .into_iter()
            .map(|(write, result)| (write.uid.to_string(), result.err()));
        (results.collect(), *count.lock().unwrap())
    }

    #[tokio::test]
    async fn refused_write_fails_alone_and_panic_is_retried() {
        let requests = [("plain", 0), ("hostile", 0), ("other", 0)];
        let refused = WriteError::Permanent("etcdserver: request is too large".to_owned());
        let (results, writes) = write_with_error(&requests, Some(refused.clone())).await;
        assert_eq!((&results["hostile"], writes), (&Some(refused), 4));
        assert_eq!((&results["plain"], &results["other"]), (&None, &None));

        let (results, _) = write_with_error(&requests, None).await;
        assert_eq!(
            results["hostile"],
            Some(WriteError::Retryable(
                "panic: index out of bounds".to_owned(),
                None
            ))
        );
        assert_eq!((&results["plain"], &results["other"]), (&None, &None));
    }

    #[tokio::test]
    async fn awaited_pull_is_returned_per_job() {
        for failures in [0, 1] {
            let results = write_all(
                "node-1",
                vec![pending_write("waits", failures), pending_write("plain", 0)],
                |_| async { Ok(WriteResults::from([("waits".into(), Ok(Some(7)))])) },
            );
            let results: BTreeMap<_, _> = results.await.into_iter().map(|(w, r)| (w.uid, r)).collect();
            assert_eq!((&results["waits"], &results["plain"]), (&Ok(Some(7)), &Ok(None)));
        }
    }

    #[tokio::test]
    async fn failed_writes_are_retried_last_and_alone() {
        let later = WriteError::Retryable("HTTP 500".to_owned(), None);
        let (results, writes) =
            write_with_error(&[("hostile", 3), ("plain", 0), ("other", 0)], Some(later.clone())).await;
        assert_eq!((&results["hostile"], writes), (&Some(later), 2));
        assert_eq!((&results["plain"], &results["other"]), (&None, &None));

        // The API server stops answering: the other requests are not attempted then, and come first the next time.
        let pause = Some(Duration::from_secs(20));
        let unavailable = WriteError::Unavailable("slow down".to_owned(), pause);
        let (results, _) = write_with_error(&[("hostile", 1), ("plain", 1)], Some(unavailable.clone())).await;
        assert_eq!(
            (&results["hostile"], &results["plain"]),
            (&Some(unavailable.clone()), &Some(WriteError::NotAttempted(pause)))
        );
        let (results, _) = write_with_error(&[("hostile", 2), ("plain", 1)], Some(unavailable.clone())).await;
        assert_eq!(
            (&results["hostile"], &results["plain"]),
            (&Some(unavailable), &None)
        );
    }

    /// A namespace may have a thousand jobs that a node has no room for.
    #[tokio::test]
    async fn requests_without_room_need_no_request_of_their_own() {
        let tags = vec![ImageTagSpec {
            tag: "1".to_owned(),
            ..ImageTagSpec::default()
        }];
        let image: ImageSpec = ImageSpec {
            tags,
            ..ImageSpec::default()
        };
        let (one, none) = (&["GET", "PATCH"][..], &["GET"][..]);
        for (count, failures, refused, sent) in [
            (255, 0, [false, true, true], one),
            (256, 0, [true; 3], none),
            (256, 1, [true; 3], none),
        ] {
            let named = |n: i32| (format!("i{n}"), image.clone());
            let images = (0..count).map(named).collect();
            let mut object = NodeImage::new("node-1", NodeImageSpec { images });
            object.metadata.resource_version = Some("1".to_owned());
            let (requests, text) = (Arc::new(Mutex::new(Vec::new())), json!(object).to_string());
            let log = Arc::clone(&requests);
            let service = tower::service_fn(move |request: http::Request<Body>| {
                log.lock().unwrap().push(request.method().to_string());
                let answer = Body::from(text.clone().into_bytes());
                std::future::ready(http::Response::builder().body(answer))
            });
            let node_write = Arc::new(NodeWrite {
                api: Api::all(kube::Client::new(service, "default")),
                node: "node-1".into(),
                view: Arc::new(NodeImageView::from(object)),
                ended_jobs: BTreeSet::new(),
                needed_secrets: BTreeMap::new(),
                needed_accounts: BTreeMap::new(),
                options: EntryOptions {
                    default_ttl: 300,
                    seed: 0,
                    now: Timestamp::UNIX_EPOCH,
                },
                last_read: Mutex::default(),
                step: Progress::default().begin_idle("test"),
            });
            let pending = ["c", "b", "a"].map(|name| {
                let mut request = pending_write(name, failures);
                Arc::make_mut(&mut request.job).image = Ok((name.to_owned(), "1".to_owned()));
                request
            });
            let write = |requests| Box::pin(execute(Arc::clone(&node_write), requests));
            let results = write_all("node-1", pending.into(), write).await;
            let is_refused = |result: &WriteResult| matches!(result, Err(WriteError::Permanent(_)));
            let results: Vec<bool> = results.iter().map(|(_, result)| is_refused(result)).collect();
            assert_eq!(results, refused);
            assert_eq!(*requests.lock().unwrap(), sent);
        }
    }

    #[test]
    fn too_large_errors_are_permanent() {
        let answer = |code: u16, message: &str| {
            let status = kube::core::Status {
                code,
                message: message.to_owned(),
                ..kube::core::Status::default()
            };
            WriteError::from(Error::Api(Box::new(status)))
        };
        for (code, message) in [
            (500, "etcdserver: request is too large"),
            (
                500,
                "rpc error: code = ResourceExhausted desc = trying to send message larger than max (2 vs. 1)",
            ),
            (413, "Request entity too large: limit is 3145728"),
            (422, "spec.images: Too many: 257: must have at most 256 items"),
        ] {
            assert!(
                matches!(answer(code, message), WriteError::Permanent(_)),
                "{message}"
            );
        }
        assert!(matches!(
            answer(500, "etcdserver: leader changed"),
            WriteError::Retryable(..)
        ));
        assert!(matches!(answer(429, "slow down"), WriteError::Unavailable(..)));
        assert!(matches!(answer(403, "forbidden"), WriteError::Denied(_)));
    }
}
