//! Creates an ImagePullJob for each image of an ImageListPullJob.
//!
//! In:  ImageListPullJobs and the ImagePullJobs that they control (watches).
//! Out: ImagePullJobs; status, events and, after the TTL, deletion of ImageListPullJobs.
//!
//! A reconcile is one pure [`plan()`], and `act` does it.

mod act;
mod observe;
pub mod plan;
mod state;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;
use tokio::sync::mpsc;

use super::Context;
use kruise_api::image_list_pull_job::ImageListPullJob;
use kruise_cluster::clock::duration_until;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key, WatchEvents};
use observe::{NAME, WatchEvent, watch_events};
use plan::plan;
use state::{ControllerState, ListState};

/// Jobs that are processed at once.
const WORKERS: usize = 3;

/// Runs until shutdown. Without the CRD, or the role, there is nothing to do.
pub async fn run(mut ctx: Context) {
    // OpenKruise's name of the source of these events; field selectors of clients may contain it.
    ctx.cluster.events = ctx.cluster.events.with_component("imagelistpulljob-controller");
    ctx.stores.synced().await;
    let api: Api<ImageListPullJob> = Api::all(ctx.cluster.client.clone());
    let (lists, watching) =
        ctx.cluster
            .optional_reflector(api, ListParams::default(), Some::<ImageListPullJob>);
    let shared = Arc::new(ControllerState {
        manager: ctx.clone(),
        index: Mutex::default(),
        states: Mutex::default(),
    });
    let (keys_tx, keys_rx) = mpsc::unbounded_channel();
    let events = watch_events(ctx.stores.jobs.subscribe(), lists.subscribe());
    let enqueue = enqueue_changes(Arc::clone(&shared), events, keys_tx);
    let work = |key| reconcile(Arc::clone(&shared), key);
    tokio::select! {
        () = ctx.run_workers(NAME, WORKERS, keys_rx, enqueue, work) => {}
        () = watching => {}
    }
}

/// Enqueues the affected jobs.
async fn enqueue_changes(
    shared: Arc<ControllerState>,
    events: WatchEvents<WatchEvent>,
    keys: mpsc::UnboundedSender<Key>,
) {
    events
        .send_affected(keys, |event| shared.index().apply(event))
        .await;
}

/// Reconciles one job.
async fn reconcile(shared: Arc<ControllerState>, key: Key) -> Result<RequeueAfter, Error> {
    act::fetch_unconfirmed(&shared, &key).await?;
    let observed = shared.index().observe(&key, Instant::now());
    let Some((observed, next_fetch)) = observed else {
        shared.states().remove(&key);
        return Ok(None);
    };
    let state = Arc::clone(shared.states().entry(key.clone()).or_default());
    let mut state = state.lock().await;
    let uid = observed.list.metadata.uid.as_deref().unwrap_or_default();
    if state.uid != uid {
        *state = ListState {
            uid: uid.to_owned(),
            ..ListState::default()
        };
    }
    let generation = observed.list.metadata.generation;
    state
        .refused
        .retain(|_, refusal| refusal.generation == generation && Instant::now() < refusal.retry_at);
    let refused = state.refused.iter();
    let refused = refused.map(|(image, refusal)| (image.clone(), refusal.message.clone()));
    let now = shared.manager.cluster.clock.now();
    let plan = plan(&observed, &refused.collect(), now);
    // None of these stops the others.
    let status_due = act::update_status(&shared, &key, &observed, &plan, &mut state).await;
    let deleted = act::delete_jobs(&shared, &observed, &plan).await;
    let created = act::create_jobs(&shared, &observed, &plan, &mut state).await;
    if plan.expired {
        act::delete_list(&shared, &key, &observed).await?;
    }
    let status_due = status_due?;
    let report_refusals = created?.then_some(Duration::ZERO);
    let delete_more = match deleted {
        Ok(is_unfinished) => is_unfinished.then_some(Duration::ZERO),
        // A policy that protects one of them does not delay the others.
        Err(_) if !plan.create_later.is_empty() => None,
        Err(error) => return Err(error),
    };
    let next_retry = state.refused.values().map(|refusal| refusal.retry_at).min();
    let requeues = [
        status_due,
        report_refusals,
        delete_more,
        next_fetch,
        plan.requeue_at.map(|at: Timestamp| duration_until(at, now)),
        next_retry.map(|at| at.saturating_duration_since(Instant::now())),
    ];
    Ok(requeues.into_iter().flatten().min())
}
