//! What a job needs before and after its nodes: finalizer and pull secrets, and its end.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kube::Api;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::plan::index::Uid;
use super::plan::job::Job;
use super::secrets::plan::{Source, affected};
use super::secrets::{self, Secrets, Sources};
use super::turns::Turns;
use crate::Context;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::keys;
use kruise_api::node_image::ReferenceObject;
use kruise_cluster::queue::Again;
use kruise_cluster::{Error, EventType, Key, write};
use kruise_ops::panics::isolated_now;

/// How it stands with the copies of a job's pull secrets.
pub struct Resolved {
    /// The job.
    pub uid: Uid,
    /// They are in place, or cannot be for this reason.
    pub copies: Result<Vec<ReferenceObject>, String>,
}

/// Keys worked on at once.
const WORKERS: usize = 8;
/// Jobs of one namespace that are worked on at once.
const SHARE: usize = 3;
/// How long the work waits for the first list of the copies.
const FIRST_LIST: Duration = Duration::from_secs(5);

/// How often the Secrets of jobs are read again whose namespace is not watched, because too many have jobs.
const REREAD: Duration = Duration::from_secs(300);
/// How soon it is tried again to strike a job that is over off its copies, where the API server does not let us. Many such
/// jobs may stay for days.
const RELEASE: Duration = Duration::from_secs(3600);

/// What is worked on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Item {
    /// A job.
    Job(Key),
    /// The copy of that name, which no job needs.
    Copy(String),
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Job(key) => write!(f, "{key}"),
            Self::Copy(name) => write!(f, "copied Secret {name}"),
        }
    }
}

/// Runs until shutdown.
pub async fn run(ctx: Context, resolved: mpsc::UnboundedSender<Resolved>) {
    let mut tasks = JoinSet::new();
    let secrets = Secrets::start(&ctx.cluster, &ctx.options.daemon_config_namespace, &mut tasks);
    secrets.listed(FIRST_LIST).await;
    let (items_tx, items_rx) = mpsc::unbounded_channel();
    let (turns_tx, turns_rx) = mpsc::unbounded_channel();
    let turns = Turns::new(SHARE, turns_tx);
    let wake = wake_up(ctx.clone(), secrets.clone(), turns_rx, items_tx);
    let work = |item: Item| {
        let (ctx, secrets, resolved) = (ctx.clone(), secrets.clone(), resolved.clone());
        let turns = turns.clone();
        async move {
            match item {
                Item::Job(key) => match turns.take(&key) {
                    Some(_turn) => reconcile(ctx, secrets, resolved, key).await,
                    None => Ok(None),
                },
                Item::Copy(name) => secrets.remove_idle(&name).await,
            }
        }
    };
    ctx.work("imagepulljob", WORKERS, items_rx, wake, work).await;
}

/// Sends what to work on: jobs that changed, those whose source or copy did, and copies that no job needs.
async fn wake_up(
    ctx: Context,
    secrets: Secrets,
    mut turns: mpsc::UnboundedReceiver<Key>,
    items: mpsc::UnboundedSender<Item>,
) {
    let (wake_tx, mut wake_rx) = mpsc::unbounded_channel();
    let mut sources = Sources::new(&ctx.cluster.client, wake_tx);
    let mut reread = tokio::time::interval(REREAD);
    let mut changes = ctx.stores.jobs.subscribe();
    let mut copies = secrets.copies();
    loop {
        let send = |key: Key| items.send(Item::Job(key)).is_ok();
        let alive = tokio::select! {
            Some(change) = changes.recv() => {
                let taken = isolated_now(super::NAME, format_args!("pull secrets of {}", change.key), || {
                    if !concerns(change.old.as_deref(), change.new.as_deref()) {
                        return false;
                    }
                    let job = change.new.as_deref().map(Job::read).filter(|j| !j.over());
                    let needed = job.map(|j| secrets.sources(&j)).unwrap_or_default();
                    sources.need(&change.key, needed);
                    true
                });
                // The job's own pass panics by itself, if it does.
                if taken.is_ok_and(|concerned| !concerned) {
                    continue;
                }
                send(change.key)
            }
            Some(key) = turns.recv() => send(key),
            Some(source) = wake_rx.recv() => sources.jobs(&source).all(send),
            _ = reread.tick() => sources.unwatched().all(send),
            Some(change) = copies.recv() => {
                // Whatever somebody did to a copy, its jobs put it right.
                let jobs = isolated_now(super::NAME, format_args!("copy {}", change.key), || {
                    affected(change.old.as_deref(), change.new.as_deref())
                });
                let jobs = jobs.unwrap_or_default();
                let idle = change.new.is_some_and(|copy| copy.references.is_empty());
                jobs.iter().filter_map(|job| parse(job)).all(send)
                    && (!idle || items.send(Item::Copy(change.key.name)).is_ok())
            }
        };
        if !alive {
            return;
        }
    }
}

/// Whether a change of a job is one that its pull secrets, finalizer or end depend on. Its progress is not.
fn concerns(old: Option<&ImagePullJob>, new: Option<&ImagePullJob>) -> bool {
    let (Some(old), Some(new)) = (old, new) else {
        return true;
    };
    let part = |job: &ImagePullJob| {
        let (meta, status) = (&job.metadata, job.status.as_ref());
        let ended = status.and_then(|s| s.completion_time.clone());
        (
            meta.uid.clone(),
            meta.finalizers.clone(),
            meta.deletion_timestamp.clone(),
            ended,
        )
    };
    old.spec != new.spec || part(old) != part(new)
}

fn parse(reference: &str) -> Option<Key> {
    let (namespace, name) = reference.split_once('/')?;
    Some(Key::namespaced(namespace, name))
}

async fn reconcile(
    ctx: Context,
    secrets: Secrets,
    resolved: mpsc::UnboundedSender<Resolved>,
    key: Key,
) -> Result<Again, secrets::Error> {
    let Some(object) = ctx.stores.jobs.get(&key) else {
        // Deleted without our finalizer; what it may have left behind goes all the same.
        if secrets.holds(&key) {
            secrets.release(&key).await?;
        }
        return Ok(None);
    };
    let job = Job::read(&object);
    if job.over() {
        return finish(&ctx, &secrets, &object, &job).await;
    }
    if job.spec.pull_secrets.is_empty() {
        return Ok(None);
    }
    let provided = provide(&ctx, &secrets, &object, &job).await;
    let (copies, result) = match provided {
        Ok(references) => (Ok(references), Ok(None)),
        Err(error) if error.outrun() => return Err(error),
        Err(error) => {
            let why = format!("cannot copy the pull secrets: {error}");
            warn(&ctx, &job, "PullSecretsNotCopied", why.clone());
            (Err(why), Err(error))
        }
    };
    // The receiver ends with the process only.
    let uid = Arc::from(job.uid.as_str());
    let _ = resolved.send(Resolved { uid, copies });
    result
}

/// Makes the copies for a job, one after the other, for each may have 1 MiB. The finalizer comes first, and only where
/// there will be a copy: it sees to it that the job is struck off the copies before it goes.
async fn provide(
    ctx: &Context,
    secrets: &Secrets,
    object: &ImagePullJob,
    job: &Job,
) -> Result<Vec<ReferenceObject>, secrets::Error> {
    let mut references = secrets.in_place(job);
    let (mut missing, mut unusable) = (Vec::new(), Vec::new());
    let mut finalizer = job.finalizer;
    let mut plans = pin!(secrets.plans(job));
    while let Some(planned) = plans.next().await {
        let (source, plan) = planned?;
        if plan.source == Source::Credentials && !finalizer {
            set_finalizer(ctx, object, true).await?;
            finalizer = true;
        }
        secrets.carry_out(&plan).await?;
        references.push(secrets.copied(&plan));
        match plan.source {
            Source::Credentials => {}
            Source::Missing => missing.push(source),
            Source::Other => unusable.push(source),
        }
    }
    let names = |sources: &[Key]| sources.iter().map(Key::to_string).collect::<Vec<_>>().join(", ");
    if !missing.is_empty() {
        let note = format!(
            "some pull secrets do not exist; pulling the image without them may not succeed: {}",
            names(&missing)
        );
        warn(ctx, job, "PullSecretNotFound", note);
    }
    if !unusable.is_empty() {
        let note = format!(
            "some pull secrets are not of type kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg and are not \
             used: {}",
            names(&unusable)
        );
        warn(ctx, job, "PullSecretNotUsable", note);
    }
    Ok(references)
}

fn warn(ctx: &Context, job: &Job, reason: &str, note: String) {
    let about = super::plan::entry::owner(job);
    ctx.cluster
        .events
        .publish(about, EventType::Warning, reason, "CopySecrets", note);
}

/// A job that is over: it is struck off its copies, then its finalizer goes, then, at its time, the job.
async fn finish(
    ctx: &Context,
    secrets: &Secrets,
    object: &ImagePullJob,
    job: &Job,
) -> Result<Again, secrets::Error> {
    let mut held = false;
    if !job.spec.pull_secrets.is_empty() {
        match secrets.release(&job.key).await {
            // No reason to keep the job: it is tried again while there is one, and when the job has gone.
            Err(error) if !error.retryable() => {
                tracing::warn!(job = %job.key, %error, pause = ?RELEASE, "copies of pull secrets not released");
                held = true;
            }
            result => result?,
        }
    }
    let release = held.then_some(RELEASE);
    if job.finalizer {
        set_finalizer(ctx, object, false).await?;
    }
    let (false, Some(expiry)) = (job.deleting, job.expiry()) else {
        return Ok(release);
    };
    let left = super::until(expiry, ctx.cluster.clock.now());
    if !left.is_zero() {
        return Ok(Some(release.map_or(left, |release| release.min(left))));
    }
    write::delete(&api(ctx, object), &job.key.name, &job.uid).await?;
    tracing::info!(job = %job.key, "ImagePullJob deleted: its ttlSecondsAfterFinished has passed");
    Ok(None)
}

async fn set_finalizer(ctx: &Context, object: &ImagePullJob, on: bool) -> Result<(), Error> {
    let others = object.metadata.finalizers.iter().flatten();
    let mut finalizers: Vec<&str> = others
        .map(String::as_str)
        .filter(|f| *f != keys::DELETION_PROTECTION)
        .collect();
    if on {
        finalizers.push(keys::DELETION_PROTECTION);
    }
    let body = json!({ "metadata": {
        "resourceVersion": object.metadata.resource_version,
        "finalizers": finalizers,
    }});
    let name = object.metadata.name.as_deref().unwrap_or_default();
    match write::patch_merge(&api(ctx, object), name, &body).await {
        Err(error) if !error.not_found() => Err(error),
        _ => Ok(()),
    }
}

fn api(ctx: &Context, object: &ImagePullJob) -> Api<ImagePullJob> {
    let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
    Api::namespaced(ctx.cluster.client.clone(), namespace)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Mutex;

    use kube::client::Body;
    use serde_json::Value;

    use super::*;
    use crate::Stores;
    use kruise_cluster::Mirror;
    use kruise_ops::panics::injected::panic_at;

    /// A job that needs a pull secret.
    fn job(change: &Value) -> ImagePullJob {
        let mut job = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
            "metadata": { "name": "keeper", "namespace": "team", "uid": "u" },
            "spec": { "image": "nginx:1", "pullSecrets": ["s"], "completionPolicy": {} },
        });
        json_patch::merge(&mut job, change);
        serde_json::from_value(job).unwrap()
    }

    /// An API server with that job and a copy that names it, whose writes of Secrets it answers with a code.
    fn world(job: ImagePullJob, code: Arc<Mutex<u16>>) -> (Context, Key) {
        let key = Key::namespaced("team", "keeper");
        let copy = json!({ "metadata": { "name": "s-1", "namespace": "kdc", "uid": "c", "resourceVersion": "1", "annotations": {
            keys::SECRET_SOURCE_KEY: "team/s", keys::SECRET_REFERENCES: "team/keeper" } } });
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let secrets = request.uri().path().contains("/secrets");
            let (code, answer) = match *request.method() {
                http::Method::GET if secrets => (
                    200,
                    json!({ "metadata": { "resourceVersion": "1" }, "items": [copy] }),
                ),
                http::Method::PATCH if secrets => (*code.lock().unwrap(), copy.clone()),
                _ => (200, json!({ "metadata": { "name": "keeper" } })),
            };
            let answer = Body::from(answer.to_string().into_bytes());
            std::future::ready(http::Response::builder().status(code).body(answer))
        });
        let mut ctx = Context::of(kube::Client::new(service, "default"));
        ctx.stores = Stores {
            jobs: Mirror::of([(key.clone(), job)]),
            ..Stores::empty()
        };
        (ctx, key)
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_that_may_not_be_written_is_released_when_it_may() {
        let ended = json!({ "status": { "desired": 1, "completionTime": "2026-01-01T00:00:00Z" } });
        let code = Arc::new(Mutex::new(422));
        let (ctx, key) = world(job(&ended), Arc::clone(&code));
        let mut tasks = JoinSet::new();
        let secrets = Secrets::start(&ctx.cluster, "kdc", &mut tasks);
        secrets.listed(FIRST_LIST).await;
        let pass = || {
            let (resolved, _) = mpsc::unbounded_channel();
            reconcile(ctx.clone(), secrets.clone(), resolved, key.clone())
        };
        assert_eq!(pass().await.unwrap(), Some(RELEASE));
        *code.lock().unwrap() = 200;
        assert_eq!(pass().await.unwrap(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn changes_that_panic_hold_up_no_job() {
        let (ctx, key) = world(job(&json!({})), Arc::new(Mutex::new(200)));
        let mut tasks = JoinSet::new();
        let secrets = Secrets::start(&ctx.cluster, "kdc", &mut tasks);
        secrets.listed(FIRST_LIST).await;
        let panics = ["pull secrets of team/keeper", "copy kdc/s-1"]
            .map(|object| panic_at(super::super::NAME, object));
        let (_turns, none) = mpsc::unbounded_channel();
        let (items_tx, mut items) = mpsc::unbounded_channel();
        let woken = async {
            for panic in &panics {
                panic.happened(1).await;
            }
            items.recv().await
        };
        tokio::select! {
            () = wake_up(ctx.clone(), secrets, none, items_tx) => unreachable!("its stores last"),
            woken = woken => assert_eq!(woken, Some(Item::Job(key))),
        }
    }
}
