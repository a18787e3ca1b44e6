//! What a job needs before and after its work on nodes: finalizer, pull secrets and deletion.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use jiff::{SignedDuration, Timestamp};
use kube::Api;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::name::NAME;
use super::plan::job::{PullJob, Uid};
use super::secrets::plan::{SourceKind, affected_jobs};
use super::secrets::{self, PullSecretCopies, SourceWatches};
use crate::Context;
use crate::namespace_limit::NamespaceLimit;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::keys;
use kruise_api::node_image::ReferenceObject;
use kruise_api::time::is_over;
use kruise_cluster::clock::duration_until;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Change, Error, EventType, Key, write};
use kruise_ops::panics::catch_panic_sync;

/// State of the copies of a job's pull secrets.
pub struct ResolvedSecrets {
    /// UID of the job.
    pub uid: Uid,
    /// References to the copies, or why there are none.
    pub copies: Result<Vec<ReferenceObject>, String>,
}

impl fmt::Display for ResolvedSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pull secrets of the job with UID {}", self.uid)
    }
}

/// Keys that are processed at once.
const WORKERS: usize = 8;
/// Jobs of one namespace that are processed at once.
const MAX_PER_NAMESPACE: usize = 3;
/// How long the workers wait for the first list of the copies.
const SYNC_TIMEOUT: Duration = Duration::from_secs(5);

/// How often Secrets are read again if the watch limit excludes the job's namespace.
const RESYNC_INTERVAL: Duration = Duration::from_secs(300);
/// How soon the removal of a finished job from its copies is retried if the API server refuses it. Many such jobs may
/// exist for days.
const RELEASE_RETRY: Duration = Duration::from_secs(3600);
/// How long a manager which runs jobs has to release a deleted one, while this one runs none.
const OTHER_MANAGER_TIME: SignedDuration = SignedDuration::from_secs(30);
/// References of one job to copies of Secrets that do not exist: so many appear in the messages of its pulls. Each costs
/// each attempt of each node a request.
const MAX_MISSING_REFERENCES: usize = 4;

/// What is processed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum WorkItem {
    /// A job.
    Job(Key),
    /// The copy with that name, which no job needs.
    Copy(String),
}

impl fmt::Display for WorkItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Job(key) => write!(f, "{key}"),
            Self::Copy(name) => write!(f, "copied Secret {name}"),
        }
    }
}

/// Runs until shutdown.
pub async fn run(ctx: Context, resolved_tx: mpsc::UnboundedSender<ResolvedSecrets>) {
    let mut tasks = JoinSet::new();
    let secrets = PullSecretCopies::start(&ctx.cluster, &ctx.options.daemon_config_namespace, &mut tasks);
    secrets.wait_synced(SYNC_TIMEOUT).await;
    let (items_tx, items_rx) = mpsc::unbounded_channel();
    let (requeue_tx, requeue_rx) = mpsc::unbounded_channel();
    let namespace_limit = NamespaceLimit::new(MAX_PER_NAMESPACE, requeue_tx);
    let enqueue = enqueue_changes(ctx.clone(), secrets.clone(), requeue_rx, items_tx);
    let work = |item: WorkItem| {
        let (ctx, secrets, resolved) = (ctx.clone(), secrets.clone(), resolved_tx.clone());
        let namespace_limit = namespace_limit.clone();
        async move {
            match item {
                WorkItem::Job(key) => match namespace_limit.try_acquire(&key) {
                    Some(_permit) => reconcile(ctx, secrets, resolved, key).await,
                    None => Ok(None),
                },
                WorkItem::Copy(name) => secrets.delete_unused(&name).await,
            }
        }
    };
    ctx.run_workers("imagepulljob", WORKERS, items_rx, enqueue, work)
        .await;
}

/// Removes the finalizer from jobs that are deleted, until shutdown: for a manager that runs no jobs, where otherwise
/// neither they nor their namespaces would go. Their copies of pull secrets stay until one does. OpenKruise has the same
/// finalizer, so that a manager that runs jobs under another Lease gets time to remove the copies first.
pub async fn release_deleted_jobs(ctx: Context) {
    let (keys_tx, keys_rx) = mpsc::unbounded_channel();
    let is_relevant = |change: &Change<ImagePullJob>| change.new.as_deref().is_some_and(is_held);
    let changes = ctx.stores.jobs.subscribe();
    let enqueue = crate::context::enqueue_changes(NAME, changes, keys_tx, is_relevant);
    let work = |key| release_deleted(ctx.clone(), key);
    ctx.run_workers(NAME, WORKERS, keys_rx, enqueue, work).await;
}

async fn release_deleted(ctx: Context, key: Key) -> Result<RequeueAfter, Error> {
    let object = ctx.stores.jobs.get(&key);
    let Some(object) = object.filter(|object| is_held(object)) else {
        return Ok(None);
    };
    let deleted = object.metadata.deletion_timestamp.as_ref().map(|time| time.0);
    let now = ctx.cluster.clock.now();
    if let Some(deleted) = deleted.filter(|deleted| !is_over(*deleted, OTHER_MANAGER_TIME, now)) {
        let release_at = deleted
            .saturating_add(OTHER_MANAGER_TIME)
            .unwrap_or(Timestamp::MAX);
        return Ok(Some(duration_until(release_at, now)));
    }
    set_finalizer(&ctx, &object, false).await?;
    Ok(None)
}

/// Whether a job is being deleted, and has our finalizer.
fn is_held(job: &ImagePullJob) -> bool {
    let mut finalizers = job.metadata.finalizers.iter().flatten();
    job.metadata.deletion_timestamp.is_some() && finalizers.any(|one| one == keys::DELETION_PROTECTION)
}

/// Enqueues jobs that changed, jobs whose source or copy changed, and copies that no job needs.
async fn enqueue_changes(
    ctx: Context,
    secrets: PullSecretCopies,
    mut requeue_rx: mpsc::UnboundedReceiver<Key>,
    items: mpsc::UnboundedSender<WorkItem>,
) {
    let (wake_tx, mut wake_rx) = mpsc::unbounded_channel();
    let mut sources = SourceWatches::new(&ctx.cluster, wake_tx);
    let mut resync = tokio::time::interval(RESYNC_INTERVAL);
    let mut changes = ctx.stores.jobs.subscribe();
    let mut copies = secrets.subscribe();
    loop {
        let send = |key: Key| items.send(WorkItem::Job(key)).is_ok();
        let queue_is_open = tokio::select! {
            Some(change) = changes.recv() => {
                let relevant = catch_panic_sync(NAME, format_args!("pull secrets of {}", change.key), || {
                    if !is_relevant_change(change.old.as_deref(), change.new.as_deref()) {
                        return false;
                    }
                    let job = change.new.as_deref().map(PullJob::from_object).filter(|j| !j.is_finished());
                    let needed = job.map(|j| secrets.sources_of(&j)).unwrap_or_default();
                    sources.set_needed(&change.key, needed);
                    true
                });
                // The job's own reconcile reports the panic, if it panics too.
                if relevant.is_ok_and(|concerned| !concerned) {
                    continue;
                }
                send(change.key)
            }
            Some(key) = requeue_rx.recv() => send(key),
            Some(source) = wake_rx.recv() => sources.jobs_using(&source).all(send),
            _ = resync.tick() => sources.unwatched_jobs().all(send),
            Some(change) = copies.recv() => {
                // After any change of a copy, its jobs restore it.
                let jobs = catch_panic_sync(NAME, format_args!("copy {}", change.key), || {
                    affected_jobs(change.old.as_deref(), change.new.as_deref())
                });
                let jobs = jobs.unwrap_or_default();
                let unused = change.new.is_some_and(|copy| copy.references.is_empty());
                jobs.iter().filter_map(|job| parse_job_key(job)).all(send)
                    && (!unused || items.send(WorkItem::Copy(change.key.name)).is_ok())
            }
        };
        if !queue_is_open {
            return;
        }
    }
}

/// Whether a change of a job affects its pull secrets, finalizer or end. Its progress does not.
fn is_relevant_change(old: Option<&ImagePullJob>, new: Option<&ImagePullJob>) -> bool {
    let (Some(old), Some(new)) = (old, new) else {
        return true;
    };
    let relevant_fields = |job: &ImagePullJob| {
        let (meta, status) = (&job.metadata, job.status.as_ref());
        let ended = status.and_then(|s| s.completion_time.clone());
        (
            meta.uid.clone(),
            meta.finalizers.clone(),
            meta.deletion_timestamp.clone(),
            ended,
        )
    };
    old.spec != new.spec || relevant_fields(old) != relevant_fields(new)
}

fn parse_job_key(reference: &str) -> Option<Key> {
    let (namespace, name) = reference.split_once('/')?;
    Some(Key::namespaced(namespace, name))
}

async fn reconcile(
    ctx: Context,
    secrets: PullSecretCopies,
    resolved_tx: mpsc::UnboundedSender<ResolvedSecrets>,
    key: Key,
) -> Result<RequeueAfter, secrets::Error> {
    let Some(object) = ctx.stores.jobs.get(&key) else {
        // Deleted without our finalizer; release its copies, if there are any.
        if secrets.has_copies(&key) {
            secrets.release(&key).await?;
        }
        return Ok(None);
    };
    let job = PullJob::from_object(&object);
    if job.is_finished() {
        return finish_job(&ctx, &secrets, &object, &job).await;
    }
    if job.spec.pull_secrets.is_empty() {
        return Ok(None);
    }
    let ensured = ensure_copies(&ctx, &secrets, &object, &job).await;
    let (copies, result) = match ensured {
        Ok(references) => (Ok(references), Ok(None)),
        Err(error) if error.is_conflict() => return Err(error),
        Err(error) => {
            let why = format!("cannot copy the pull secrets: {error}");
            publish_warning(&ctx, &job, "PullSecretsNotCopied", why.clone());
            (Err(why), Err(error))
        }
    };
    // The receiver lives as long as the process.
    let uid = Arc::from(job.uid.as_str());
    let _ = resolved_tx.send(ResolvedSecrets { uid, copies });
    result
}

/// Creates the copies for a job, one after the other, because each may have 1 MiB. The finalizer is added first, and
/// only if there will be a copy: it ensures that the job is removed from the copies before it is deleted.
async fn ensure_copies(
    ctx: &Context,
    secrets: &PullSecretCopies,
    object: &ImagePullJob,
    job: &PullJob,
) -> Result<Vec<ReferenceObject>, secrets::Error> {
    let mut references = secrets.uncopied_references(job);
    let (mut missing, mut unusable) = (Vec::new(), Vec::new());
    let mut finalizer = job.has_finalizer;
    let mut plans = pin!(secrets.plan_copies(job));
    while let Some(planned) = plans.next().await {
        let (source, plan) = planned?;
        if plan.source == SourceKind::Credentials && !finalizer {
            set_finalizer(ctx, object, true).await?;
            finalizer = true;
        }
        secrets.execute(&plan).await?;
        // A daemon reads each before a pull, and those of all jobs of the image.
        if plan.source != SourceKind::Missing || missing.len() < MAX_MISSING_REFERENCES {
            references.push(secrets.copy_reference(&plan));
        }
        match plan.source {
            SourceKind::Credentials => {}
            SourceKind::Missing => missing.push(source),
            SourceKind::NoCredentials => unusable.push(source),
        }
    }
    let names = |sources: &[Key]| sources.iter().map(Key::to_string).collect::<Vec<_>>().join(", ");
    if !missing.is_empty() {
        let note = format!(
            "some pull secrets do not exist; pulling the image without them may not succeed: {}",
            names(&missing)
        );
        publish_warning(ctx, job, "PullSecretNotFound", note);
    }
    if !unusable.is_empty() {
        let note = format!(
            "some pull secrets are not of type kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg and are not \
             used: {}",
            names(&unusable)
        );
        publish_warning(ctx, job, "PullSecretNotUsable", note);
    }
    Ok(references)
}

fn publish_warning(ctx: &Context, job: &PullJob, reason: &str, note: String) {
    let reference = super::plan::entry::owner_reference(job);
    ctx.cluster
        .events
        .publish(reference, EventType::Warning, reason, "CopySecrets", note);
}

/// A finished job: removes it from its copies, then removes its finalizer, then deletes it after its TTL.
async fn finish_job(
    ctx: &Context,
    secrets: &PullSecretCopies,
    object: &ImagePullJob,
    job: &PullJob,
) -> Result<RequeueAfter, secrets::Error> {
    let mut still_referenced = false;
    if !job.spec.pull_secrets.is_empty() {
        match secrets.release(&job.key).await {
            // No reason to keep the job: the release is retried while the job exists, and when it is deleted.
            Err(error) if !error.retryable() => {
                tracing::warn!(job = %job.key, %error, pause = ?RELEASE_RETRY, "copies of pull secrets not released");
                still_referenced = true;
            }
            result => result?,
        }
    }
    let retry_release = still_referenced.then_some(RELEASE_RETRY);
    if job.has_finalizer {
        set_finalizer(ctx, object, false).await?;
    }
    let (false, Some(expiry)) = (job.terminating, job.expiry()) else {
        return Ok(retry_release);
    };
    let remaining = duration_until(expiry, ctx.cluster.clock.now());
    if !remaining.is_zero() {
        return Ok(Some(
            retry_release.map_or(remaining, |release| release.min(remaining)),
        ));
    }
    write::delete(&api(ctx, object), &job.key.name, &job.uid).await?;
    tracing::info!(job = %job.key, "ImagePullJob deleted: its ttlSecondsAfterFinished has passed");
    Ok(None)
}

async fn set_finalizer(ctx: &Context, object: &ImagePullJob, present: bool) -> Result<(), Error> {
    let others = object.metadata.finalizers.iter().flatten();
    let mut finalizers: Vec<&str> = others
        .map(String::as_str)
        .filter(|f| *f != keys::DELETION_PROTECTION)
        .collect();
    if present {
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

    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use kube::client::Body;
    use serde_json::Value;

    use super::*;
    use crate::Stores;
    use kruise_cluster::Store;
    use kruise_ops::panics::injected::inject_panic;

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

    /// An API server with that job and a copy that names it; it answers writes of Secrets with this status code.
    fn api_server(job: ImagePullJob, code: Arc<Mutex<u16>>) -> (Context, Key) {
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
        let mut ctx = Context::for_test(kube::Client::new(service, "default"));
        ctx.stores = Stores {
            jobs: Store::from_objects([(key.clone(), job)]),
            ..Stores::empty()
        };
        (ctx, key)
    }

    #[tokio::test(start_paused = true)]
    async fn denied_copy_is_released_once_allowed() {
        let ended = json!({ "status": { "desired": 1, "completionTime": "2026-01-01T00:00:00Z" } });
        let code = Arc::new(Mutex::new(422));
        let (ctx, key) = api_server(job(&ended), Arc::clone(&code));
        let mut tasks = JoinSet::new();
        let secrets = PullSecretCopies::start(&ctx.cluster, "kdc", &mut tasks);
        secrets.wait_synced(SYNC_TIMEOUT).await;
        let reconcile_once = || {
            let (resolved, _) = mpsc::unbounded_channel();
            reconcile(ctx.clone(), secrets.clone(), resolved, key.clone())
        };
        assert_eq!(reconcile_once().await.unwrap(), Some(RELEASE_RETRY));
        *code.lock().unwrap() = 200;
        assert_eq!(reconcile_once().await.unwrap(), None);
    }

    #[tokio::test]
    async fn deleted_jobs_go_while_no_jobs_run() {
        let (sent_tx, mut sent) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let sent = sent_tx.clone();
            async move {
                let body = request.into_body().collect_bytes().await.unwrap_or_default();
                let _ = sent.send(serde_json::from_slice::<Value>(&body).unwrap());
                http::Response::builder().body(Body::from(body.to_vec()))
            }
        });
        let mut ctx = Context::for_test(kube::Client::new(service, "default"));
        let now = Timestamp::now();
        let long_ago = now - OTHER_MANAGER_TIME * 2;
        let jobs = [("running", None), ("new", Some(now)), ("deleted", Some(long_ago))].map(|(name, deleted)| {
            let finalizers = ["example.com/other", keys::DELETION_PROTECTION];
            let metadata = json!({ "name": name, "resourceVersion": name, "deletionTimestamp": deleted.map(Time),
                "finalizers": finalizers });
            let job = job(&json!({ "metadata": metadata }));
            (Key::namespaced("team", name), job)
        });
        ctx.stores = Stores {
            jobs: Store::from_objects(jobs),
            ..Stores::empty()
        };
        let expected = json!({ "resourceVersion": "deleted", "finalizers": ["example.com/other"] });
        let new = Key::namespaced("team", "new");
        assert!(release_deleted(ctx.clone(), new).await.unwrap().is_some());
        tokio::select! {
            () = release_deleted_jobs(ctx) => unreachable!("its stores last"),
            patch = sent.recv() => assert_eq!(patch.unwrap()["metadata"], expected),
        }
    }

    #[tokio::test]
    async fn clock_that_is_set_back_holds_no_deleted_job() {
        let ahead = Timestamp::now() + SignedDuration::from_hours(1);
        let metadata = json!({ "deletionTimestamp": Time(ahead), "finalizers": [keys::DELETION_PROTECTION] });
        let deleted = job(&json!({ "metadata": metadata }));
        let (ctx, key) = api_server(deleted, Arc::new(Mutex::new(200)));
        assert_eq!(release_deleted(ctx, key).await.unwrap(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn panicking_changes_delay_no_job() {
        let (ctx, key) = api_server(job(&json!({})), Arc::new(Mutex::new(200)));
        let mut tasks = JoinSet::new();
        let secrets = PullSecretCopies::start(&ctx.cluster, "kdc", &mut tasks);
        secrets.wait_synced(SYNC_TIMEOUT).await;
        let panics = ["pull secrets of team/keeper", "copy kdc/s-1"].map(|object| inject_panic(NAME, object));
        let (_requeue_tx, none) = mpsc::unbounded_channel();
        let (items_tx, mut items) = mpsc::unbounded_channel();
        let first_item = async {
            for panic in &panics {
                panic.wait_for(1).await;
            }
            items.recv().await
        };
        tokio::select! {
            () = enqueue_changes(ctx.clone(), secrets, none, items_tx) => unreachable!("its stores last"),
            woken = first_item => assert_eq!(woken, Some(WorkItem::Job(key))),
        }
    }
}
