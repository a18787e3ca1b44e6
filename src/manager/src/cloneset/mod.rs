//! Reconciles CloneSets: the number of their Pods, their creation and their updates.
//!
//! In:  CloneSets, Pods, claims, ControllerRevisions, ImagePullJobs and Nodes (watches, reduced).
//! Out: Pods, claims, revisions and jobs; conditions, labels and annotations of Pods; status and events.
//!
//! One reconcile is `observe` → `plan` → `act` → `report`. The results of our own writes are cached at once
//! (`cluster::write_cache`), so no reconcile waits for a watch.

mod act;
mod context;
mod defaults;
mod fetch;
mod history;
mod inputs;
mod observe;
pub mod plan;
mod reconcile_state;
mod report;
mod revision_error;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::Context;
use context::{CloneSetContext, ControllerState};
use kruise_cluster::clock::duration_until;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key};
use kruise_ops::metrics::metrics;
use observe::{NAME, watch_events};
use plan::TemplateStatus;
use reconcile_state::{ReconcileState, time_slice};

/// Runs until shutdown.
pub async fn run(mut ctx: Context) {
    // OpenKruise's name of the source of these events; field selectors of clients may contain it.
    ctx.cluster.events = ctx.cluster.events.with_component("cloneset-controller");
    ctx.stores.synced().await;
    let shared = Arc::new(ControllerState::new(ctx.clone()));
    let (sets_tx, sets_rx) = mpsc::unbounded_channel();
    let enqueue = enqueue_changes(Arc::clone(&shared), sets_tx);
    let handler = |key| reconcile(Arc::clone(&shared), key);
    ctx.run_workers(NAME, ctx.options.cloneset_workers, sets_rx, enqueue, handler)
        .await;
}

/// Enqueues the affected CloneSets. All existing objects are indexed before the first one is sent.
async fn enqueue_changes(shared: Arc<ControllerState>, sets: mpsc::UnboundedSender<Key>) {
    let events = watch_events(&shared.manager.stores);
    events
        .send_affected(sets, |event| shared.index().apply(event))
        .await;
}

/// Reconciles one CloneSet. Its state is checked out, so no other reconcile uses it meanwhile.
async fn reconcile(shared: Arc<ControllerState>, key: Key) -> Result<RequeueAfter, Error> {
    let view = shared.index().sets.get(&key).cloned();
    let Some(view) = view.filter(|set| set.metadata.deletion_timestamp.is_none()) else {
        shared.states.remove(&key);
        return Ok(None);
    };
    let uid = view.metadata.uid.as_deref().unwrap_or_default();
    let mut state = shared.states.check_out(&key, uid);
    if let Some(requeue_after) = state.requeue_after(Instant::now()) {
        return Ok(Some(requeue_after));
    }
    let set = view
        .parse()
        .map_err(|why| Error::Transport(format!("cannot read the CloneSet: {why}")))?;
    let set = Arc::new(set);
    let ctx = CloneSetContext::new(&shared, &key, &set);
    reconcile_measured(&ctx, &mut state).await
}

/// Runs a reconcile and records its duration.
async fn reconcile_measured(
    ctx: &CloneSetContext<'_>,
    state: &mut ReconcileState,
) -> Result<RequeueAfter, Error> {
    let begin = Instant::now();
    let mut outcome = "idle";
    let result = sync(ctx, state, &mut outcome).await;
    let label = result.as_ref().map_or_else(Error::category, |_| outcome);
    let passes = &metrics().cloneset_passes;
    let passes = passes.get_or_create(&[("result", label.to_owned())]);
    passes.observe(begin.elapsed().as_secs_f64());
    result
}

/// One reconcile. Returns when to requeue; `outcome` is its label in the metric.
async fn sync(
    ctx: &CloneSetContext<'_>,
    state: &mut ReconcileState,
    outcome: &mut &'static str,
) -> Result<RequeueAfter, Error> {
    // Observe.
    fetch::fetch_unconfirmed(ctx).await?;
    fetch::fetch_orphans(ctx, state).await?;
    if !ctx.is_current() {
        return Ok(Some(Duration::ZERO));
    }
    let now = ctx.manager.cluster.clock.now();
    let generation = ctx.set.metadata.generation.unwrap_or_default();
    state.expire_failures(generation, &ctx.set.spec.volume_claim_templates, now);
    let begin = Instant::now();
    let owned = ctx.index().owned_objects(ctx.set);
    state.unfinished.forget_existing(&owned.pods);
    let observe_cost = begin.elapsed();
    let history = history::sync_revisions(ctx, &owned.revisions, state).await;

    // Plan.
    let begin = Instant::now();
    let (mut plan, pods) = inputs::make_plan(ctx, owned, &history, state, now);
    plan.events.extend(history.warnings());
    let (planned_at, cost) = (Instant::now(), observe_cost + begin.elapsed());
    let requeue_after = plan.requeue_at.map(|at| duration_until(at, now));
    tracing::debug!(set = %ctx.name, update = history.update_revision, current = history.current_revision, pods = pods.len(),
        actions = plan.actions.len(), ?requeue_after, "planned");

    // Act.
    let execution = act::execute_actions(ctx, plan.actions, time_slice(cost), state).await;
    state.schedule_next_reconcile(cost, execution.acted, planned_at);
    *outcome = match history.error_category {
        Some(category) => category,
        None if execution.acted => "acted",
        None => "idle",
    };

    // Report.
    report::publish_events(ctx, execution.events, plan.events, state);
    let status_due = report::update_status(ctx, plan.status, !execution.acted, state).await?;

    // Tidy up when there is nothing else to do.
    let mut defaults_due = None;
    if !execution.acted {
        history::prune(ctx, &history, &pods, state).await;
        if history.template_status == TemplateStatus::Accepted {
            defaults_due = defaults::store_defaults(ctx, state).await;
        }
    }
    let immediately = execution.acted.then_some(Duration::ZERO);
    let fetch_due = ctx.index().next_fetch(ctx.name, &ctx.group, Instant::now());
    let requeues = [
        requeue_after,
        status_due,
        defaults_due,
        immediately,
        fetch_due,
        history.retry_after,
    ];
    Ok(requeues.into_iter().flatten().min())
}
