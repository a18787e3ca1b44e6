//! Keeps the Pods of CloneSets: how many there are, what they are made of, and how they are updated.
//!
//! In:  CloneSets, Pods, claims, ControllerRevisions, ImagePullJobs and Nodes (watches, reduced).
//! Out: Pods, claims, revisions and jobs; conditions, labels and annotations of Pods; status and events.
//!
//! A pass over one CloneSet reads as: `observe` → `plan` → `act` → `report`. What our own writes returned is
//! known at once (`cluster::write_cache`), so no pass waits for a watch.

mod act;
mod context;
mod defaults;
mod history;
mod observe;
mod orphans;
pub mod plan;
mod reconcile_state;
mod report;
mod revision_error;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::{Semaphore, mpsc};

use super::view::CloneSetView;
use super::{Context, FeatureGate, FeatureGates};
use context::{CloneSetContext, ControllerState};
use history::RevisionHistory;
use kruise_api::cloneset::CloneSet;
use kruise_api::json;
use kruise_api::owner::Owner;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key, write};
use kruise_ops::metrics::metrics;
use kruise_workload::in_place::Pod;
use kruise_workload::in_place::normalize::TemplateStorage;
use observe::{OwnedObjects, WatchEvents};
use plan::{Features, Observed, Plan, TemplateStatus, plan};
use reconcile_state::{ReconcileState, ReconcileStates, time_slice};

/// The controller's name in `/healthz` and in the log.
const NAME: &str = "cloneset";

/// Runs until shutdown.
pub async fn run(mut ctx: Context) {
    // OpenKruise's name of the source of these events, which field selectors of clients may hold.
    ctx.cluster.events = ctx.cluster.events.with_component("cloneset-controller");
    ctx.stores.synced().await;
    let features = features(&ctx.options.feature_gates);
    let shared = Arc::new(ControllerState {
        index: Mutex::default(),
        states: ReconcileStates::default(),
        write_permits: Semaphore::new(act::MAX_CONCURRENT_WRITES),
        features: Features {
            exclude_preparing_delete: ctx.options.cloneset_scaling_exclude_preparing_delete,
            ..features
        },
        rng_seed: RandomState::new(),
        manager: ctx.clone(),
    });
    let (sets_tx, sets_rx) = mpsc::unbounded_channel();
    let enqueue = enqueue_changes(Arc::clone(&shared), sets_tx);
    let handler = |key| reconcile(Arc::clone(&shared), key);
    ctx.run_workers(NAME, ctx.options.cloneset_workers, sets_rx, enqueue, handler)
        .await;
}

/// The plan's switches, as the gates say.
fn features(gates: &FeatureGates) -> Features {
    Features {
        short_hash: gates.enabled(FeatureGate::CloneSetShortHash),
        partition_rollback: gates.enabled(FeatureGate::CloneSetPartitionRollback),
        preparing_update_as_update: gates.enabled(FeatureGate::PreparingUpdateAsUpdate),
        recreate_for_claims: gates.enabled(FeatureGate::RecreatePodWhenChangeVCTInCloneSetGate),
        env_from_metadata: gates.enabled(FeatureGate::InPlaceUpdateEnvFromMetadata),
        vertical: gates.enabled(FeatureGate::InPlaceWorkloadVerticalScaling),
        pre_download: gates.enabled(FeatureGate::PreDownloadImageForInPlaceUpdate),
        template_storage: TemplateStorage::from_gate(gates.enabled(FeatureGate::TemplateNoDefaults)),
        exclude_preparing_delete: false,
    }
}

/// Sends the CloneSets to look at. What is there at the beginning is taken in before the first one is.
async fn enqueue_changes(shared: Arc<ControllerState>, sets: mpsc::UnboundedSender<Key>) {
    let mut changes = WatchEvents::new(&shared.manager.stores);
    loop {
        let keys = changes.drain(&mut shared.index());
        if !keys.into_iter().all(|key| sets.send(key).is_ok()) {
            return;
        }
        let Some(event) = changes.next().await else { return };
        let keys = changes.apply(&mut shared.index(), event);
        if !keys.into_iter().all(|key| sets.send(key).is_ok()) {
            return;
        }
    }
}

/// Works on one CloneSet; what is remembered of it is in nobody else's hands meanwhile.
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
    let ctx = CloneSetContext {
        shared: &shared,
        manager: &shared.manager,
        write_permits: &shared.write_permits,
        name: &key,
        set: &set,
        owner: Owner::clone_set(&set.metadata),
        group: observe::clone_set_group(&set.metadata),
    };
    reconcile_measured(&ctx, &mut state).await
}

/// A pass, and how long it took.
async fn reconcile_measured(
    ctx: &CloneSetContext<'_>,
    state: &mut ReconcileState,
) -> Result<RequeueAfter, Error> {
    let begin = Instant::now();
    let mut outcome = "idle";
    let requeue_after = sync(ctx, state, &mut outcome).await;
    let result = requeue_after.as_ref().map_or_else(Error::category, |_| outcome);
    let passes = &metrics().cloneset_passes;
    let passes = passes.get_or_create(&[("result", result.to_owned())]);
    passes.observe(begin.elapsed().as_secs_f64());
    requeue_after
}

/// Observe, plan, act, report; then say when to look again. `word` is what it came to.
async fn sync(
    ctx: &CloneSetContext<'_>,
    state: &mut ReconcileState,
    result: &mut &'static str,
) -> Result<RequeueAfter, Error> {
    fetch_unconfirmed(ctx).await?;
    orphans::fetch_orphans(ctx, state).await?;
    if !ctx.is_current() {
        return Ok(Some(Duration::ZERO));
    }
    let now = ctx.manager.cluster.clock.now();
    let generation = ctx.set.metadata.generation.unwrap_or_default();
    state.expire_failures(generation, &ctx.set.spec.volume_claim_templates, now);
    let begin = Instant::now();
    let owned = ctx.index().owned_objects(ctx.set);
    state.unfinished.forget_existing(&owned.pods);
    let gather_cost = begin.elapsed();
    let history = history::sync_revisions(ctx, &owned.revisions, state).await;
    let begin = Instant::now();
    let (mut plan, pods) = make_plan(ctx, owned, &history, state, now);
    plan.events.extend(history.warnings());
    let (planned_at, cost) = (Instant::now(), gather_cost + begin.elapsed());
    tracing::debug!(set = %ctx.name, update = history.update_revision, current = history.current_revision, pods = pods.len(),
        acts = plan.actions.len(), wake = ?plan.requeue_at, "planned");
    let requeue_after = plan.requeue_at.map(|at| duration_until(at, now));
    let execution = act::execute_actions(ctx, plan.actions, time_slice(cost), state).await;
    *result = match history.error_category {
        Some(category) => category,
        None if execution.acted => "acted",
        None => "idle",
    };
    state.schedule_next_pass(cost, execution.acted, planned_at);
    report::publish_events(ctx, execution.events, plan.events, state);
    let status = report::update_status(ctx, plan.status, !execution.acted, state).await?;
    if !execution.acted
        && state.may_delete_revisions(Instant::now())
        && let Err(error) = history::delete_surplus(ctx, &history, &pods).await
    {
        tracing::warn!(set = %ctx.name, %error, "cannot delete old revisions; will retry");
        state.revision_deletion_failed(Instant::now());
    }
    let settled = !execution.acted && history.template_status == TemplateStatus::Accepted;
    let defaults = if settled {
        defaults::store_defaults(ctx, state).await
    } else {
        None
    };
    let immediately = execution.acted.then_some(Duration::ZERO);
    let next_fetch = ctx.index().next_fetch(ctx.name, &ctx.group, Instant::now());
    let requeues = [
        requeue_after,
        status,
        defaults,
        immediately,
        next_fetch,
        history.retry_after,
    ];
    Ok(requeues.into_iter().flatten().min())
}

/// The memory that values take, in bytes.
fn estimate_memory(values: &[Value]) -> usize {
    let texts = values.iter().map(Value::to_string);
    texts.map(|text| json::estimate_memory(text.as_bytes())).sum()
}

/// The plan, and the Pods that it is about. What it was made of, parsed revisions above all, is not kept for as long as the
/// plan is acted by.
fn make_plan(
    ctx: &CloneSetContext<'_>,
    owned: OwnedObjects,
    history: &RevisionHistory,
    state: &ReconcileState,
    now: Timestamp,
) -> (Plan, Vec<Arc<Pod>>) {
    let observed = build_observed(ctx, owned, history, state);
    (plan(&observed, now), observed.pods)
}

/// How long it is until then; nothing when it has passed.
fn duration_until(deadline: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(deadline.duration_since(now)).unwrap_or(Duration::ZERO)
}

/// Reads from the API server itself what we wrote and the watch has not brought in all that time, and what we may have
/// written.
async fn fetch_unconfirmed(ctx: &CloneSetContext<'_>) -> Result<(), Error> {
    let now = Instant::now();
    let (set, pods, claims, jobs, revisions) = {
        let index = ctx.index();
        (
            index.sets.confirm_time_left(ctx.name, now),
            index.pods.unconfirmed(&ctx.group, now).0,
            index.claims.unconfirmed(&ctx.group, now).0,
            index.jobs.unconfirmed(&ctx.group, now).0,
            index.revisions.unconfirmed(&ctx.group, now).0,
        )
    };
    if set == Some(Duration::ZERO) {
        let found = write::get(&ctx.api::<CloneSet>(), &ctx.name.name).await?;
        let entry = found.map(|found| observe::versioned_clone_set(Arc::new(CloneSetView::from(&found))));
        ctx.index().sets.apply_read(ctx.name, entry, Instant::now());
    }
    for key in pods {
        tracing::warn!(set = %ctx.name, pod = key.name, "outcome of a write is unknown; reading the Pod again");
        act::fetch_pod(ctx, &key.name).await?;
    }
    for key in claims {
        act::fetch_claim(ctx, &key.name).await?;
    }
    for key in jobs {
        act::fetch_job(ctx, &key.name).await?;
    }
    for key in revisions {
        history::fetch_revision(ctx, &key.name).await?;
    }
    Ok(())
}

/// All that the plan wants to know.
fn build_observed(
    ctx: &CloneSetContext<'_>,
    owned: OwnedObjects,
    history: &RevisionHistory,
    state: &ReconcileState,
) -> Observed {
    let template = &ctx.set.spec.template;
    let spread = template["spec"]["topologySpreadConstraints"].is_array();
    let nodes = owned
        .pods
        .iter()
        .filter_map(|pod| pod.node.as_ref())
        .filter(|_| spread);
    let labels = |name: &String| {
        let node = ctx.manager.stores.nodes.get(&Key::cluster_scoped(name))?;
        Some((name.clone(), node.labels.clone()))
    };
    let nodes: BTreeMap<_, _> = nodes.filter_map(labels).collect();
    let (revisions, unread) = history.plan_revisions(&owned.pods);
    Observed {
        set: Arc::clone(ctx.set),
        revisions,
        unread_revisions: unread,
        pods: owned.pods,
        claims: owned.claims,
        claims_owned_by_pod: owned.claims_owned_by_pod,
        current_revision: history.current_revision.clone(),
        update_revision: history.update_revision.clone(),
        template_status: history.template_status.clone(),
        collision_count: history.collisions,
        max_pod_memory: history.max_revision_memory() + estimate_memory(&ctx.set.spec.volume_claim_templates),
        jobs: owned.jobs,
        nodes,
        failures: state.failures.clone(),
        unfinished: state.unfinished.clone(),
        features: ctx.shared.features,
        rng_seed: ctx.shared.rng_seed.hash_one(Instant::now()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_features_match_openkruise() {
        let expected = Features {
            short_hash: false,
            partition_rollback: false,
            preparing_update_as_update: false,
            recreate_for_claims: false,
            env_from_metadata: true,
            vertical: false,
            pre_download: false,
            template_storage: TemplateStorage::WithDefaults,
            exclude_preparing_delete: false,
        };
        assert_eq!(features(&FeatureGates::default()), expected);
    }
}
