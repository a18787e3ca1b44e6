//! Writes what jobs ask for into NodeImages: one patch a node at a time, for all jobs that wait for it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Api;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::plan::entry::{Ask, Setting, add};
use super::plan::index::{Index, NodeName, Uid};
use super::plan::job::Job;
use crate::api::node_image::{ImageSpec, NodeImage, ReferenceObject};
use crate::cluster::{Error, EventType, Events, write};
use crate::manager::Context;
use crate::manager::view::NodeImageView;
use crate::ops::Progress;
use crate::ops::progress::Step;

/// Pause after a failed write; doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How often a write that is forbidden is repeated: about 13 s in all.
const DENIALS: u32 = 7;

/// A job's wish, with all that is needed to write it.
#[derive(Clone)]
struct Wish {
    uid: Uid,
    job: Arc<Job>,
    secrets: Vec<ReferenceObject>,
}

/// The end of one write.
pub struct Done {
    node: NodeName,
    wishes: Vec<Wish>,
    /// What the API server refuses for good.
    refused: Option<Error>,
}

/// Nodes that wait, by the job that first wanted them; jobs take turns, so that a small one need not wait for a
/// large one.
#[derive(Default)]
struct Turns {
    jobs: VecDeque<Uid>,
    nodes: HashMap<Uid, VecDeque<NodeName>>,
}

impl Turns {
    fn push(&mut self, uid: &Uid, node: NodeName) {
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
        node
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
            busy: HashSet::new(),
            running: JoinSet::new(),
        }
    }

    /// Queues what a job wants of a node.
    pub fn push(&mut self, index: &Index, node: NodeName, uid: &Uid) {
        let Some(job) = index.job(uid) else { return };
        let wish = Wish {
            uid: Arc::clone(uid),
            job,
            secrets: index.copies(uid).to_vec(),
        };
        let wishes = self.waiting.entry(Arc::clone(&node)).or_default();
        if wishes.iter().any(|w| w.uid == *uid) {
            return;
        }
        wishes.push(wish);
        if wishes.len() == 1 && !self.busy.contains(&node) {
            self.order.push(uid, node);
        }
    }

    /// Starts as many writes as may run at once.
    pub fn start(&mut self, index: &Index, now: Timestamp) {
        while self.running.len() < self.workers {
            let Some(node) = self.order.pop() else {
                return;
            };
            let Some(mut wishes) = self.waiting.remove(&node) else {
                continue;
            };
            // Jobs that have ended or gone meanwhile want nothing any more.
            wishes.retain(|wish| index.job(&wish.uid).is_some());
            if wishes.is_empty() {
                continue;
            }
            let Some(view) = index.node(&node) else { continue };
            let mut seed = DefaultHasher::new();
            node.hash(&mut seed);
            let setting = Setting {
                default_ttl: self.default_ttl,
                seed: seed.finish(),
                now,
            };
            self.busy.insert(Arc::clone(&node));
            let (api, step) = (self.api.clone(), self.progress.waiting(super::NAME));
            self.running.spawn(async move {
                let refused = carry_out(&api, &node, &view, &wishes, setting, &step).await.err();
                Done {
                    node,
                    wishes,
                    refused,
                }
            });
        }
    }

    /// The next write that has ended; `None` while none runs.
    pub async fn done(&mut self) -> Option<Done> {
        match self.running.join_next().await? {
            Ok(done) => Some(done),
            Err(error) => {
                // Only a panic in a write comes here; its node is freed by the assignment's expiry.
                tracing::error!(%error, "a write of a NodeImage ended badly");
                None
            }
        }
    }

    /// Takes note of the end of a write.
    pub fn settle(&mut self, index: &mut Index, done: Done) {
        let Done {
            node,
            wishes,
            refused,
        } = done;
        self.busy.remove(&node);
        if let Some(first) = self.waiting.get(&node).and_then(|wishes| wishes.first()) {
            self.order.push(&first.uid, Arc::clone(&node));
        }
        let Some(error) = refused else { return };
        tracing::warn!(%node, %error, "NodeImage refused");
        for wish in wishes {
            index.refused(&wish.uid, &node);
            self.events.publish(
                super::plan::entry::owner(&wish.job),
                EventType::Warning,
                crate::api::keys::EVENT_PULL_FAILED,
                "Assign",
                format!("NodeImage {node} cannot be asked for the image: {error}"),
            );
        }
    }
}

/// Writes until it is done or refused for good; a node that has gone is done.
async fn carry_out(
    api: &Api<NodeImage>,
    node: &str,
    view: &NodeImageView,
    wishes: &[Wish],
    setting: Setting,
    step: &Step,
) -> Result<(), Error> {
    // Where the node knows nothing of the images, the patch needs no other knowledge than the version.
    let new = wishes
        .iter()
        .all(|w| w.job.image.as_ref().is_ok_and(|(name, _)| !view.knows(name)));
    let mut blank = new.then(|| {
        let mut object = NodeImage::new(node, crate::api::node_image::NodeImageSpec::default());
        object.metadata.resource_version = Some(view.resource_version.clone());
        object
    });
    let mut pause = FIRST_PAUSE;
    let mut tries = DENIALS;
    loop {
        // A read and a patch; each try begins anew, for it is the API server's fault that there are several.
        step.now(format!("writing NodeImage {node}"), write::DEADLINE * 2);
        let result = match blank.take() {
            Some(object) => patch(api, node, &object, wishes, setting).await,
            None => match write::get(api, node).await {
                Ok(Some(object)) => patch(api, node, &object, wishes, setting).await,
                Ok(None) => return Ok(()),
                Err(error) => Err(error),
            },
        };
        match result {
            Ok(()) => return Ok(()),
            Err(error) if error.not_found() => return Ok(()),
            Err(error) if error.conflict() => {}
            Err(error) if error.retryable() => {
                tokio::time::sleep(error.retry_after().unwrap_or(pause)).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            // Permissions may be being set up or changed; only after some tries is that the answer.
            Err(error) if matches!(error.category(), "forbidden" | "unauthorized") && tries > 0 => {
                tries -= 1;
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
}

/// One patch of all entries that the wishes are about; none when all is there.
async fn patch(
    api: &Api<NodeImage>,
    node: &str,
    object: &NodeImage,
    wishes: &[Wish],
    setting: Setting,
) -> Result<(), Error> {
    let mut images: BTreeMap<&str, ImageSpec> = BTreeMap::new();
    for wish in wishes {
        let Ok((name, tag)) = &wish.job.image else {
            continue;
        };
        let known = images.get(name.as_str()).or_else(|| object.spec.images.get(name));
        let ask = Ask {
            job: &wish.job,
            secrets: &wish.secrets,
        };
        let statuses = object.status.as_ref().and_then(|s| s.image_statuses.get(name));
        let statuses = statuses.map_or(&[][..], |s| &s.tags);
        if let Some(entry) = add(known, statuses, tag, &[ask], setting) {
            images.insert(name, entry);
        }
    }
    if images.is_empty() {
        return Ok(());
    }
    let entries: serde_json::Map<String, Value> = images
        .into_iter()
        .map(|(name, spec)| {
            let mut entry = json!(spec);
            if spec.pull_secrets.is_empty() {
                // A merge patch keeps what it does not name.
                entry["pullSecrets"] = Value::Null;
            }
            (name.to_owned(), entry)
        })
        .collect();
    let body = json!({
        "metadata": { "resourceVersion": object.metadata.resource_version },
        "spec": { "images": entries },
    });
    write::patch_merge(api, node, &body).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(turns.nodes.is_empty() && turns.jobs.is_empty());
    }
}
