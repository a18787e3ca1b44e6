//! What a job needs before and after its nodes: finalizer and pull secrets, and its end.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Api;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::plan::index::Uid;
use super::plan::job::Job;
use super::secrets::{Secrets, Sources};
use crate::api::image_pull_job::ImagePullJob;
use crate::api::keys;
use crate::api::node_image::ReferenceObject;
use crate::cluster::queue::Again;
use crate::cluster::{Error, EventType, Key, write};
use crate::manager::Context;

/// How it stands with the copies of a job's pull secrets.
pub struct Resolved {
    /// The job.
    pub uid: Uid,
    /// They are in place, or cannot be for this reason.
    pub copies: Result<Vec<ReferenceObject>, String>,
}

/// Jobs looked after at once.
const WORKERS: usize = 8;

/// Runs until shutdown.
pub async fn run(ctx: Context, resolved: mpsc::UnboundedSender<Resolved>) {
    let mut tasks = JoinSet::new();
    let secrets = Secrets::start(&ctx.cluster, &ctx.options.daemon_config_namespace, &mut tasks);
    let (jobs_tx, jobs_rx) = mpsc::unbounded_channel();
    let wake = wake_up(ctx.clone(), secrets.clone(), jobs_tx);
    let work = |key: Key| look_after(ctx.clone(), secrets.clone(), resolved.clone(), key);
    ctx.work("imagepulljob", WORKERS, jobs_rx, wake, work).await;
}

/// Sends the jobs to look after: those that changed, and those whose source or copy did.
async fn wake_up(ctx: Context, secrets: Secrets, jobs: mpsc::UnboundedSender<Key>) {
    let (wake_tx, mut wake_rx) = mpsc::unbounded_channel();
    let mut sources = Sources::new(&ctx.cluster, wake_tx);
    let mut changes = ctx.stores.jobs.subscribe();
    let mut copies = secrets.copies();
    loop {
        let send = |key: &Key| jobs.send(key.clone()).is_ok();
        let alive = tokio::select! {
            Some(change) = changes.recv() => {
                let job = change.new.as_deref().map(Job::read).filter(|j| !j.over());
                let needed = job.map(|j| secrets.sources(&j)).unwrap_or_default();
                sources.need(&change.key, &needed);
                send(&change.key)
            }
            Some(source) = wake_rx.recv() => sources.jobs(&source).all(send),
            Some(change) = copies.recv() => {
                // Whatever somebody did to a copy, its jobs put it right.
                let views = [change.old, change.new];
                let named: Vec<Key> = views.iter().flatten().flat_map(|c| &c.references).filter_map(|r| parse(r)).collect();
                named.iter().all(send)
            }
            else => false,
        };
        if !alive {
            return;
        }
    }
}

fn parse(reference: &str) -> Option<Key> {
    let (namespace, name) = reference.split_once('/')?;
    Some(Key::namespaced(namespace, name))
}

async fn look_after(
    ctx: Context,
    secrets: Secrets,
    resolved: mpsc::UnboundedSender<Resolved>,
    key: Key,
) -> Result<Again, Error> {
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
    if !secrets.sources(&job).is_empty() && !job.finalizer {
        set_finalizer(&ctx, &object, true).await?;
    }
    let provided = secrets.provide(&job).await;
    let copies = match &provided {
        Ok(provided) => {
            for source in &provided.missing {
                let note = format!("secret {source} of spec.pullSecrets does not exist");
                warn(&ctx, &job, "PullSecretNotFound", note);
            }
            Ok(provided.references.clone())
        }
        // Somebody else wrote at the same time; the next look knows more.
        Err(error) if error.conflict() || error.already_exists() => return provided.map(|_| None),
        Err(error) => {
            let why = format!("job waits for its pull secrets to be copied to the daemons: {error}");
            warn(&ctx, &job, "PullSecretsNotCopied", why.clone());
            Err(why)
        }
    };
    // The receiver ends with the process only.
    let uid = Arc::from(job.uid.as_str());
    let _ = resolved.send(Resolved { uid, copies });
    provided.map(|_| None)
}

fn warn(ctx: &Context, job: &Job, reason: &str, note: String) {
    let about = super::plan::entry::owner(job);
    ctx.cluster
        .events
        .publish(about, EventType::Warning, reason, "CopySecrets", note);
}

/// A job that is over: its copies go, then its finalizer, then, at its time, the job.
async fn finish(ctx: &Context, secrets: &Secrets, object: &ImagePullJob, job: &Job) -> Result<Again, Error> {
    if !job.spec.pull_secrets.is_empty() {
        secrets.release(&job.key).await?;
    }
    if job.finalizer {
        set_finalizer(ctx, object, false).await?;
    }
    let (false, Some(expiry)) = (job.deleting, job.expiry()) else {
        return Ok(None);
    };
    let left = left(expiry, ctx.cluster.clock.now());
    if !left.is_zero() {
        return Ok(Some(left));
    }
    write::delete(&api(ctx, object), &job.key.name, Some(&job.uid)).await?;
    Ok(None)
}

fn left(at: Timestamp, now: Timestamp) -> Duration {
    super::until(at, now)
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
