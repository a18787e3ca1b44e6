//! Updates the containers that SidecarSets have injected into Pods, and reports about them.
//!
//! In:  SidecarSets, Pods that record an injection, Namespaces, ControllerRevisions (watches).
//! Out: images and annotations of injected Pods, ControllerRevisions in Kruise's namespace, policies, status, events.
//!
//! Injection itself is a matter of admission. A reconcile is one pure [`plan()`]; `history` writes its revisions, `act`
//! its Pods, and `report` its status. `policies` lets the API server inject the set itself.

mod act;
mod context;
mod history;
mod injections;
mod observe;
mod policies;
mod report;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::Context;
use context::{ControllerState, SetContext, SetState};
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key};
use kruise_ops::panics::catch_panic_sync;
use kruise_workload::in_place::Pod;
use kruise_workload::sidecarset::plan::{Observed, plan};
use observe::{NAME, watch_events};

/// Shortest time from one reconcile of a set to the next: each looks at all of its Pods, and Pods that start send
/// several changes each.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// For each second of planning, this many seconds are left for everything else.
const PAUSE_PER_COST: u32 = 4;
/// Maximum pause after planning.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// How long a set waits for its next reconcile after planning that took so long.
fn pause_after(cost: Duration) -> Duration {
    cost.saturating_mul(PAUSE_PER_COST).clamp(MIN_INTERVAL, MAX_PAUSE)
}

/// Runs until shutdown.
pub async fn run(mut ctx: Context) {
    // OpenKruise's name of the source of these events; field selectors of clients may contain it.
    ctx.cluster.events = ctx.cluster.events.with_component("sidecarset-controller");
    ctx.stores.synced().await;
    let (sets_tx, sets_rx) = mpsc::unbounded_channel();
    let shared = Arc::new(ControllerState::new(ctx.clone(), &ctx.options.pod_namespace));
    let installing_policies = policies::run(Arc::clone(&shared), sets_tx.clone());
    let enqueue = enqueue_changes(Arc::clone(&shared), sets_tx);
    let work = |key| reconcile(Arc::clone(&shared), key);
    let workers = ctx.options.sidecarset_workers;
    tokio::select! {
        () = ctx.run_workers(NAME, workers, sets_rx, enqueue, work) => {}
        () = installing_policies => {}
    }
}

/// Enqueues the affected sets. All existing objects are indexed before the first one is sent.
async fn enqueue_changes(shared: Arc<ControllerState>, sets: mpsc::UnboundedSender<Key>) {
    let mut events = watch_events(&shared.manager.stores);
    let mut affected = BTreeSet::new();
    loop {
        {
            let mut index = shared.index();
            events.drain(|event| affected.extend(index.apply(event)));
            // After a panic the sets that are due stay without their counts, and all others are reconciled.
            let scanned = catch_panic_sync(NAME, "Pods without sidecars", || {
                index.scan(&shared.manager.stores.pods)
            });
            affected.extend(scanned.unwrap_or_default());
        }
        if !std::mem::take(&mut affected)
            .into_iter()
            .all(|name| sets.send(Key::cluster_scoped(name)).is_ok())
        {
            return;
        }
        let Some(event) = events.next().await else { return };
        events.handle(event, |event| affected.extend(shared.index().apply(event)));
    }
}

/// Reconciles one set.
async fn reconcile(shared: Arc<ControllerState>, key: Key) -> Result<RequeueAfter, Error> {
    let set = shared.index().set(&key.name);
    let Some(set) = set.filter(|set| set.metadata.deletion_timestamp.is_none()) else {
        shared.states().remove(&key.name);
        return Ok(None);
    };
    let uid = set.metadata.uid.as_deref().unwrap_or_default();
    let state = Arc::clone(shared.states().entry(key.name.clone()).or_default());
    let mut state = state.lock().await;
    if state.uid != uid {
        *state = SetState {
            uid: uid.to_owned(),
            ..SetState::default()
        };
    }
    let now = Instant::now();
    if let Some(wait) = state
        .next_reconcile
        .and_then(|due| due.checked_duration_since(now))
        .filter(|wait| !wait.is_zero())
    {
        return Ok(Some(wait));
    }
    let ctx = SetContext {
        shared: &shared,
        set: &set,
        name: &key.name,
        uid,
    };
    state.next_reconcile = Some(now + MIN_INTERVAL);
    sync(&ctx, &mut state).await
}

/// One reconcile. Returns when to requeue.
async fn sync(ctx: &SetContext<'_>, state: &mut SetState) -> Result<RequeueAfter, Error> {
    // Observe.
    act::fetch_unconfirmed(ctx).await?;
    if !ctx.is_current() {
        return Ok(Some(Duration::ZERO));
    }
    let begin = Instant::now();
    let objects = ctx.shared.index().observe(ctx.set);
    let pods: Vec<&Pod> = objects.pods.iter().map(|(_, pod)| &**pod).collect();

    // Plan.
    let none = std::collections::BTreeMap::new();
    let mut status = ctx.set.status.clone().unwrap_or_default();
    status.collision_count = status.collision_count.max(state.collisions);
    let generation = ctx.set.metadata.generation.unwrap_or_default();
    let (refused, failed) = state.take_refused(generation, &pods, Instant::now());
    let observed = Observed {
        name: ctx.name,
        uid: ctx.uid,
        generation,
        resource_version: ctx.set.metadata.resource_version.as_deref().unwrap_or_default(),
        labels: ctx.set.metadata.labels.as_ref().unwrap_or(&none),
        annotations: ctx.set.metadata.annotations.as_ref().unwrap_or(&none),
        spec: &ctx.set.spec,
        status: &status,
        refused: &refused,
        failed: &failed,
    };
    let now = ctx.shared.manager.cluster.clock.now();
    let plan = plan(&observed, &pods, &objects.revisions, now);
    state.next_reconcile = Some(Instant::now() + pause_after(begin.elapsed()));
    tracing::debug!(set = ctx.name, pods = pods.len(), upgrades = plan.upgrades.len(), flips = plan.flips.len(),
        waits = ?plan.waits, "planned");

    // Act.
    if let Some(collisions) = history::write_newest(ctx, &plan.history, state).await? {
        state.collisions = Some(collisions);
        return Ok(Some(Duration::ZERO));
    }
    let view = observed.view(&plan.history.latest);
    let injection = ctx.shared.injections.get(ctx.name);
    let new_status = report::new_status(&view, &status, &plan, &objects, injection, now);
    // A status that cannot be written must not stop the update.
    let status_due = report::update_status(ctx, &new_status, state).await;
    let acted = act::write_pods(ctx, &plan, &objects.pods, state).await;
    if state.take_not_upgradable(&plan.history.latest, plan.not_upgradable_event) {
        report::publish_not_upgradable(ctx, plan.not_upgradable_event);
    }
    report::publish_not_injected(ctx, &objects.not_injected, state);
    history::delete_surplus(ctx, &plan.history, state).await?;
    let (acted, status_due) = (acted?, status_due?);
    let retry_refused = state.next_retry(begin);
    let requeues = [
        retry_refused.map(|at| at.saturating_duration_since(Instant::now())),
        status_due,
        ctx.shared.index().next_fetch(ctx.name, Instant::now()),
        acted.then_some(Duration::ZERO),
    ];
    Ok(requeues.into_iter().flatten().min())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_with_many_pods_leave_time_for_others() {
        let ms = Duration::from_millis;
        for (cost, pause) in [
            (Duration::ZERO, MIN_INTERVAL),
            (ms(25), MIN_INTERVAL),
            (ms(26), ms(104)),
            (ms(200), ms(800)),
            (ms(250), MAX_PAUSE),
            (Duration::MAX, MAX_PAUSE),
        ] {
            assert_eq!(pause_after(cost), pause, "{cost:?}");
        }
    }
}
