//! Writes what jobs ask for into NodeImages: one patch a node at a time, for all jobs that wait for it.
//!
//! A wish that the API server refuses fails alone, and one that it cannot answer waits in the queue, not in a worker.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Api;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::plan::entry::{Ask, Setting, add, awaits, owner};
use super::plan::index::{Index, Uid};
use super::plan::job::Job;
use super::plan::room::{Full, Room};
use super::plan::work::NodeName;
use crate::Context;
use crate::view::NodeImageView;
use kruise_api::backoff::Backoff;
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::node_image::{ImageSpec, NodeImage, ReferenceObject};
use kruise_cluster::{Error, EventType, Events, write};
use kruise_ops::Progress;
use kruise_ops::panics::{Panicked, isolated, isolated_now};
use kruise_ops::progress::Step;

/// After failed writes.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), LONGEST_PAUSE);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How often a write that is forbidden is repeated: about 13 s in all.
const DENIALS: u32 = 7;
/// How often a write is repeated at once because somebody else wrote at the same time.
const CONFLICTS: u32 = 5;
/// A NodeImage with fewer tags than this has room for more, whoever asks.
const FEW: usize = 64;
/// Bytes of a sandboxConfig that need not be counted where there are few tags.
const SMALL: usize = 4096;

/// A job's wish, with all that is needed to write it.
#[derive(Clone)]
struct Wish {
    uid: Uid,
    job: Arc<Job>,
    secrets: Vec<ReferenceObject>,
    /// How often it could not be written.
    failures: u32,
    /// It is not written before that moment.
    due: Instant,
}

/// Why a wish was not written.
#[derive(Clone, Debug, PartialEq)]
enum Trouble {
    /// The same write would be refused again.
    Refused(String),
    /// Permissions may be being set up or changed; only after some tries is that the answer.
    Denied(String),
    /// It may succeed later, after that pause where the API server asks for one.
    Later(String, Option<Duration>),
    /// The API server cannot be reached, or has too much to do: no other write would succeed now.
    Away(String, Option<Duration>),
    /// It was not tried, for another write met [`Trouble::Away`].
    NotTried,
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        let (words, after) = (error.to_string(), error.retry_after());
        match error {
            Error::Timeout { .. } | Error::Transport(_) => Self::Away(words, after),
            _ if error.throttled() => Self::Away(words, after),
            _ if error.too_large() => Self::Refused(words),
            _ if error.retryable() => Self::Later(words, after),
            _ if matches!(error.category(), "forbidden" | "unauthorized") => Self::Denied(words),
            _ => Self::Refused(words),
        }
    }
}

impl From<Full> for Trouble {
    fn from(full: Full) -> Self {
        Self::Refused(full.to_string())
    }
}

impl From<Panicked> for Trouble {
    fn from(panicked: Panicked) -> Self {
        Self::Later(panicked.to_string(), None)
    }
}

/// The jobs whose wish waits for the end of a pull, and that pull's version.
type Awaits = BTreeMap<Uid, i64>;
/// What came of a wish: the version of the pull whose end it waits for, if it does.
type Outcome = Result<Option<i64>, Trouble>;

/// The end of one write.
pub struct Done {
    node: NodeName,
    results: Vec<(Wish, Outcome)>,
}

/// Nodes that wait, by the job that first wanted them; jobs take turns, so that a small one need not wait for a
/// large one.
#[derive(Default)]
struct Turns {
    jobs: VecDeque<Uid>,
    nodes: HashMap<Uid, VecDeque<NodeName>>,
    waiting: HashSet<NodeName>,
}

impl Turns {
    fn push(&mut self, uid: &Uid, node: NodeName) {
        if !self.waiting.insert(Arc::clone(&node)) {
            return;
        }
        let nodes = self.nodes.entry(Arc::clone(uid)).or_default();
        if nodes.is_empty() {
            self.jobs.push_back(Arc::clone(uid));
        }
        nodes.push_back(node);
    }

    fn pop(&mut self) -> Option<NodeName> {
        let uid = self.jobs.pop_front()?;
        let nodes = self.nodes.get_mut(&uid)?;
        let node = nodes.pop_front();
        if nodes.is_empty() {
            self.nodes.remove(&uid);
        } else {
            self.jobs.push_back(uid);
        }
        node.inspect(|node| {
            self.waiting.remove(node);
        })
    }
}

/// Writes that wait and that run.
pub struct Writer {
    api: Api<NodeImage>,
    events: Events,
    progress: Progress,
    workers: usize,
    default_ttl: i64,
    waiting: HashMap<NodeName, Vec<Wish>>,
    order: Turns,
    /// Nodes whose next write comes later.
    later: BTreeSet<(Instant, NodeName)>,
    busy: HashSet<NodeName>,
    running: JoinSet<Done>,
}

impl Writer {
    /// A writer with nothing to do.
    pub fn new(ctx: &Context) -> Self {
        Self {
            api: Api::all(ctx.cluster.client.clone()),
            events: ctx.cluster.events.clone(),
            progress: ctx.progress.clone(),
            workers: ctx.options.imagepulljob_workers.max(1),
            default_ttl: i64::from(ctx.options.default_ttlseconds_for_always_nodeimage),
            waiting: HashMap::new(),
            order: Turns::default(),
            later: BTreeSet::new(),
            busy: HashSet::new(),
            running: JoinSet::new(),
        }
    }

    /// Queues what a job wants of a node.
    pub fn push(&mut self, index: &Index, node: &NodeName, uid: &Uid) {
        let Some(job) = index.job(uid) else { return };
        let wish = Wish {
            uid: Arc::clone(uid),
            job,
            secrets: index.copies(uid).to_vec(),
            failures: 0,
            due: Instant::now(),
        };
        let wishes = self.waiting.entry(Arc::clone(node)).or_default();
        if wishes.iter().any(|w| w.uid == *uid) {
            return;
        }
        wishes.push(wish);
        self.queue(node, Instant::now());
    }

    /// Gives a node its place in the queue, now or when the first of its wishes is due.
    fn queue(&mut self, node: &NodeName, now: Instant) {
        if self.busy.contains(node) {
            return;
        }
        let Some(wishes) = self.waiting.get(node) else {
            return;
        };
        let Some(first) = wishes.iter().min_by_key(|wish| wish.due) else {
            return;
        };
        if first.due <= now {
            let uid = Arc::clone(&first.uid);
            self.order.push(&uid, Arc::clone(node));
        } else {
            self.later.insert((first.due, Arc::clone(node)));
        }
    }

    /// How long until a write that failed is repeated.
    pub fn wake(&self) -> Option<Duration> {
        let (at, _) = self.later.first()?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    /// Starts as many writes as may run at once.
    pub fn start(&mut self, index: &Index, now: Timestamp) {
        let at = Instant::now();
        while self.later.first().is_some_and(|(due, _)| *due <= at) {
            if let Some((_, node)) = self.later.pop_first() {
                self.queue(&node, at);
            }
        }
        while self.running.len() < self.workers {
            let Some(node) = self.order.pop() else {
                return;
            };
            let started = isolated_now(super::NAME, &node, || {
                self.start_one(index, Arc::clone(&node), now, at);
            });
            if started.is_err() {
                // Its jobs ask again when they have waited for it to show.
                self.waiting.remove(&node);
                self.busy.remove(&node);
            }
        }
    }

    fn start_one(&mut self, index: &Index, node: NodeName, now: Timestamp, at: Instant) {
        let mut wishes = self.waiting.remove(&node).unwrap_or_default();
        // Jobs that have ended or gone meanwhile want nothing any more.
        wishes.retain(|wish| index.wants(&wish.uid, &node));
        for wish in &mut wishes {
            // It may have been changed while it waited.
            if let Some(job) = index.job(&wish.uid) {
                wish.job = job;
                wish.secrets = index.copies(&wish.uid).to_vec();
            }
        }
        let (wishes, rest): (Vec<_>, Vec<_>) = wishes.into_iter().partition(|wish| wish.due <= at);
        if !rest.is_empty() {
            self.waiting.insert(Arc::clone(&node), rest);
        }
        let (false, Some(view)) = (wishes.is_empty(), index.node(&node)) else {
            return self.queue(&node, at);
        };
        let mut seed = DefaultHasher::new();
        node.hash(&mut seed);
        let setting = Setting {
            default_ttl: self.default_ttl,
            seed: seed.finish(),
            now,
        };
        let owners = view.tags.iter().flat_map(|tag| &tag.owners);
        let ended = owners.filter(|o| o.job.is_some() && index.job(&o.uid.as_str().into()).is_none());
        let target = Arc::new(Target {
            api: self.api.clone(),
            node: Arc::clone(&node),
            ended: ended.map(|owner| owner.uid.clone()).collect(),
            view,
            setting,
            step: self.progress.waiting(super::NAME),
        });
        self.busy.insert(Arc::clone(&node));
        self.running.spawn(async move {
            let write = |wishes| Box::pin(carry_out(Arc::clone(&target), wishes));
            let results = write_all(&target.node, wishes, write).await;
            Done { node, results }
        });
    }

    /// The next write that has ended; `None` while none runs.
    pub async fn done(&mut self) -> Option<Done> {
        match self.running.join_next().await? {
            Ok(done) => Some(done),
            Err(error) => {
                tracing::error!(%error, "a write of a NodeImage was cancelled");
                None
            }
        }
    }

    /// Takes note of the end of a write.
    pub fn finished(&mut self, index: &mut Index, done: Done) {
        let Done { node, results } = done;
        let now = Instant::now();
        self.busy.remove(&node);
        for (mut wish, result) in results {
            let about = format!("outcome of {} on {node}", wish.job.key);
            let after = isolated_now(super::NAME, about, || self.after(index, &node, &mut wish, result));
            // After a panic nobody knows what the index has taken in: what is written twice is the same.
            let Some(pause) = after.unwrap_or(Some(LONGEST_PAUSE)) else {
                continue;
            };
            wish.due = now + pause;
            let wishes = self.waiting.entry(Arc::clone(&node)).or_default();
            wishes.retain(|newer| newer.uid != wish.uid);
            wishes.push(wish);
        }
        self.queue(&node, now);
    }

    /// When a wish is to be written again after this result, if it is.
    fn after(
        &self,
        index: &mut Index,
        node: &NodeName,
        wish: &mut Wish,
        result: Outcome,
    ) -> Option<Duration> {
        let job = &wish.job.key;
        let (words, pause) = match result {
            Ok(awaits) => {
                tracing::debug!(%job, %node, ?awaits, "NodeImage asked for the image");
                index.written(&wish.uid, node, awaits);
                return None;
            }
            Err(Trouble::NotTried) => (None, None),
            Err(Trouble::Later(words, after) | Trouble::Away(words, after)) => (Some(words), after),
            Err(Trouble::Denied(words)) if wish.failures < DENIALS => (Some(words), None),
            Err(Trouble::Refused(words) | Trouble::Denied(words)) => {
                self.refuse(index, node, wish, &words);
                return None;
            }
        };
        if let Some(words) = words {
            wish.failures = wish.failures.saturating_add(1);
            if wish.failures == 1 {
                tracing::warn!(%job, %node, error = words, "NodeImage not written; will retry");
            }
            index.delayed(&wish.uid, node, &format!("cannot update its NodeImage: {words}"));
        }
        Some(pause.unwrap_or_else(|| RETRY.pause(wish.failures.saturating_sub(1))))
    }

    fn refuse(&self, index: &mut Index, node: &NodeName, wish: &Wish, words: &str) {
        tracing::warn!(job = %wish.job.key, %node, error = words, "NodeImage refused");
        let note = format!("cannot add the image to NodeImage {node}: {words}");
        index.refused(&wish.uid, node, words);
        let about = owner(&wish.job);
        self.events.publish(
            about,
            EventType::Warning,
            keys::EVENT_NODE_IMAGE_REFUSED,
            "Assign",
            note,
        );
    }
}

/// Writes all wishes of a node together. Where that fails, and where a wish failed before, each is written by itself: one
/// that cannot be written, or that panics, stands in no other's way.
async fn write_all<F>(node: &str, wishes: Vec<Wish>, write: impl Fn(Vec<Wish>) -> F) -> Vec<(Wish, Outcome)>
where
    F: Future<Output = Result<Awaits, Trouble>>,
{
    let of = |wish: &Wish, result: &Result<Awaits, Trouble>| {
        let awaits = result.as_ref().map_err(Clone::clone);
        awaits.map(|awaits| awaits.get(&wish.uid).copied())
    };
    let (fresh, mut alone): (Vec<_>, Vec<_>) = wishes.into_iter().partition(|wish| wish.failures == 0);
    let mut results = Vec::new();
    let mut away = false;
    if fresh.len() > 1 {
        let result = attempt(node, write(fresh.clone())).await;
        away = matches!(result, Err(Trouble::Away(..)));
        if result.is_ok() || away {
            results.extend(fresh.into_iter().map(|wish| (wish.clone(), of(&wish, &result))));
        } else {
            alone.extend(fresh);
        }
    } else {
        alone.extend(fresh);
    }
    // Those that failed least come first: what makes the API server fail must not keep it from the others for ever.
    alone.sort_by_key(|wish| wish.failures);
    for wish in alone {
        let result = if away {
            Err(Trouble::NotTried)
        } else {
            attempt(node, write(vec![wish.clone()])).await
        };
        away |= matches!(result, Err(Trouble::Away(..)));
        let outcome = of(&wish, &result);
        results.push((wish, outcome));
    }
    results
}

async fn attempt(
    node: &str,
    write: impl Future<Output = Result<Awaits, Trouble>>,
) -> Result<Awaits, Trouble> {
    isolated(super::NAME, node, write).await?
}

/// What a write is about.
struct Target {
    api: Api<NodeImage>,
    node: NodeName,
    view: Arc<NodeImageView>,
    /// Owners of tags of this node whose jobs are over.
    ended: BTreeSet<String>,
    setting: Setting,
    step: Step,
}

impl Target {
    /// The object as far as a patch needs it, where that is known: where the node knows nothing of the images, and has
    /// room, the patch needs no other knowledge than the version.
    fn blank(&self, wishes: &[Wish]) -> Option<NodeImage> {
        let new = |wish: &Wish| {
            let sandbox = wish.job.spec.sandbox_config.as_ref();
            let small = sandbox.is_none_or(|s| json!(s).to_string().len() <= SMALL);
            small
                && wish
                    .job
                    .image
                    .as_ref()
                    .is_ok_and(|(name, _)| !self.view.knows(name))
        };
        let few = self.view.tags.len().saturating_add(wishes.len()) <= FEW;
        (few && wishes.iter().all(new)).then(|| {
            let mut object = NodeImage::new(&self.node, kruise_api::node_image::NodeImageSpec::default());
            object.metadata.resource_version = Some(self.view.resource_version.clone());
            object
        })
    }
}

/// Writes; what others wrote at the same time is read once more. A node that has gone is done.
async fn carry_out(target: Arc<Target>, wishes: Vec<Wish>) -> Result<Awaits, Trouble> {
    let Target { api, node, step, .. } = &*target;
    let mut blank = target.blank(&wishes);
    let mut conflicts = 0;
    loop {
        step.now(format!("writing NodeImage {node}"), write::DEADLINE * 2);
        let object = match blank.take() {
            Some(object) => object,
            None => match write::get(api, node).await? {
                Some(object) => object,
                None => return Ok(Awaits::new()),
            },
        };
        let (body, awaits) = patch(&target, &object, &wishes)?;
        let Some(body) = body else {
            return Ok(awaits);
        };
        match write::patch_merge(api, node, &body).await {
            Err(error) if error.conflict() && conflicts < CONFLICTS => conflicts += 1,
            Err(error) if !error.not_found() => return Err(error.into()),
            _ => return Ok(awaits),
        }
    }
}

/// One patch of all entries that the wishes are about; none when all is there. Beside it the wishes that have to wait.
fn patch(target: &Target, object: &NodeImage, wishes: &[Wish]) -> Result<(Option<Value>, Awaits), Full> {
    let mut waiting = Awaits::new();
    let mut images: BTreeMap<&str, ImageSpec> = BTreeMap::new();
    let mut room = Room::of(&object.spec.images);
    for wish in wishes {
        let Ok((name, tag)) = &wish.job.image else {
            continue;
        };
        let known = images.get(name.as_str()).or_else(|| object.spec.images.get(name));
        let ask = Ask {
            job: &wish.job,
            secrets: &wish.secrets,
            ended: &target.ended,
        };
        let statuses = object.status.as_ref().and_then(|s| s.image_statuses.get(name));
        let statuses = statuses.map_or(&[][..], |s| &s.tags);
        if let Some(version) = awaits(known, statuses, tag, ask) {
            waiting.insert(Arc::clone(&wish.uid), version);
        } else if let Some(entry) = add(known, statuses, tag, &[ask], target.setting) {
            let namespace = wish.job.key.namespace.as_deref().unwrap_or_default();
            room.add(namespace, name, &entry)?;
            images.insert(name, entry);
        }
    }
    if images.is_empty() {
        return Ok((None, waiting));
    }
    let entries: serde_json::Map<String, Value> = images
        .into_iter()
        .map(|(name, spec)| {
            let mut entry = json!(spec);
            if spec.pull_secrets.is_empty() {
                // A merge patch keeps what it does not name.
                set(&mut entry, &["pullSecrets"], Value::Null);
            }
            (name.to_owned(), entry)
        })
        .collect();
    let body = json!({
        "metadata": { "resourceVersion": object.metadata.resource_version },
        "spec": { "images": entries },
    });
    Ok((Some(body), waiting))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::sync::Mutex;

    use super::*;
    use kruise_api::image_pull_job::{ImagePullJob, ImagePullJobSpec};

    #[test]
    fn a_small_job_does_not_wait_for_a_large_one() {
        let mut turns = Turns::default();
        for n in 0..100 {
            turns.push(&"large".into(), format!("n{n}").into());
        }
        turns.push(&"small".into(), "s".into());
        let first: Vec<_> = (0..3).filter_map(|_| turns.pop()).collect();
        assert_eq!(first, ["n0".into(), "s".into(), "n1".into()] as [NodeName; 3]);
        assert_eq!(std::iter::from_fn(|| turns.pop()).count(), 98);
        assert!(turns.nodes.is_empty() && turns.jobs.is_empty() && turns.waiting.is_empty());
    }

    fn wish(name: &str, failures: u32) -> Wish {
        let mut object = ImagePullJob::new(name, ImagePullJobSpec::default());
        object.metadata.namespace = Some(name.to_owned());
        Wish {
            uid: name.into(),
            job: Arc::new(Job::read(&object)),
            secrets: Vec::new(),
            failures,
            due: Instant::now(),
        }
    }

    /// Plays an API server that answers so when that job's entry is in a write; what came of each job, and the writes.
    async fn played(
        wishes: &[(&str, u32)],
        hostile: Option<Trouble>,
    ) -> (BTreeMap<String, Option<Trouble>>, usize) {
        let count = Mutex::new(0);
        let write = |batch: Vec<Wish>| {
            *count.lock().unwrap() += 1;
            let hostile = hostile.clone();
            async move {
                if batch.iter().all(|wish| *wish.uid != *"hostile") {
                    return Ok(Awaits::new());
                }
                Err(hostile.unwrap_or_else(|| panic!("index out of bounds")))
            }
        };
        let wishes = wishes
            .iter()
            .map(|(name, failures)| wish(name, *failures))
            .collect();
        let results = write_all("node-1", wishes, write).await;
        let results = results
            .into_iter()
            .map(|(wish, result)| (wish.uid.to_string(), result.err()));
        (results.collect(), *count.lock().unwrap())
    }

    #[tokio::test]
    async fn an_entry_that_is_refused_fails_alone_and_one_that_panics_is_tried_again() {
        let wishes = [("plain", 0), ("hostile", 0), ("other", 0)];
        let refused = Trouble::Refused("etcdserver: request is too large".to_owned());
        let (results, writes) = played(&wishes, Some(refused.clone())).await;
        assert_eq!((&results["hostile"], writes), (&Some(refused), 4));
        assert_eq!((&results["plain"], &results["other"]), (&None, &None));

        let (results, _) = played(&wishes, None).await;
        assert_eq!(
            results["hostile"],
            Some(Trouble::Later("panic: index out of bounds".to_owned(), None))
        );
        assert_eq!((&results["plain"], &results["other"]), (&None, &None));
    }

    #[tokio::test]
    async fn an_entry_that_has_to_wait_is_told_from_those_that_were_written() {
        for failures in [0, 1] {
            let results = write_all(
                "node-1",
                vec![wish("waits", failures), wish("plain", 0)],
                |_| async { Ok(Awaits::from([("waits".into(), 7)])) },
            );
            let results: BTreeMap<_, _> = results.await.into_iter().map(|(w, r)| (w.uid, r)).collect();
            assert_eq!((&results["waits"], &results["plain"]), (&Ok(Some(7)), &Ok(None)));
        }
    }

    #[tokio::test]
    async fn an_entry_that_failed_before_is_written_after_the_others_and_by_itself() {
        let later = Trouble::Later("HTTP 500".to_owned(), None);
        let (results, writes) =
            played(&[("hostile", 3), ("plain", 0), ("other", 0)], Some(later.clone())).await;
        assert_eq!((&results["hostile"], writes), (&Some(later), 2));
        assert_eq!((&results["plain"], &results["other"]), (&None, &None));

        // It makes the API server fall silent: the others are not tried then, and come first next time.
        let away = Trouble::Away("no answer".to_owned(), None);
        let (results, _) = played(&[("hostile", 1), ("plain", 1)], Some(away.clone())).await;
        assert_eq!(
            (&results["hostile"], &results["plain"]),
            (&Some(away.clone()), &Some(Trouble::NotTried))
        );
        let (results, _) = played(&[("hostile", 2), ("plain", 1)], Some(away.clone())).await;
        assert_eq!((&results["hostile"], &results["plain"]), (&Some(away), &None));
    }

    #[test]
    fn what_is_too_large_is_no_reason_to_try_again() {
        let answer = |code: u16, message: &str| {
            let status = kube::core::Status {
                code,
                message: message.to_owned(),
                ..kube::core::Status::default()
            };
            Trouble::from(Error::Api(Box::new(status)))
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
            assert!(matches!(answer(code, message), Trouble::Refused(_)), "{message}");
        }
        assert!(matches!(
            answer(500, "etcdserver: leader changed"),
            Trouble::Later(..)
        ));
        assert!(matches!(answer(429, "slow down"), Trouble::Away(..)));
        assert!(matches!(answer(403, "forbidden"), Trouble::Denied(_)));
    }
}
