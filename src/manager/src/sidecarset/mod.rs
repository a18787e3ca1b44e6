//! Updates the containers that SidecarSets have injected into Pods, and reports about them.
//!
//! In:  SidecarSets, Pods that record an injection, Namespaces, ControllerRevisions (watches).
//! Out: images and annotations of injected Pods, ControllerRevisions in Kruise's namespace, policies, status, events.
//!
//! Injection itself is a matter of admission. A reconcile is one pure [`plan()`]; `history` writes its revisions, `act`
//! its Pods, and `report` its status. `policies` lets the API server inject the set itself.

mod act;
mod history;
mod observe;
mod policies;
mod report;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::Context;
use super::status_pacer::StatusPacer;
use kruise_api::sidecarset::SidecarSet;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key};
use kruise_ops::panics::catch_panic_sync;
use kruise_workload::in_place::Pod;
use kruise_workload::sidecarset::plan::{Observed, plan};
use observe::{Index, watch_events};
use policies::Injections;

/// Name in logs and metrics.
const NAME: &str = "sidecarset";
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

/// What all reconciles share.
struct ControllerState {
    manager: Context,
    /// Namespace of the revisions.
    namespace: String,
    index: Mutex<Index>,
    states: Mutex<HashMap<String, Arc<tokio::sync::Mutex<SetState>>>>,
    /// How new Pods are injected.
    injections: Injections,
}

/// What is kept of a set between reconciles.
#[derive(Default)]
struct SetState {
    uid: String,
    status_pacer: StatusPacer,
    /// Earliest time of the next reconcile.
    next_reconcile: Option<Instant>,
    /// Name collisions that the status does not count yet.
    collisions: Option<i32>,
    /// When the adoption of revisions that was refused is tried again.
    adoption_retry_at: Option<Instant>,
    /// The same for the deletion of old ones.
    deletion_retry_at: Option<Instant>,
    /// The revision of the last event about Pods that cannot be updated in place.
    not_upgradable: String,
    /// Pods of the last event about Pods without the containers.
    not_injected: usize,
    /// Pods, by UID, whose update the API server did not accept: the set's generation, and until when they are left alone.
    /// They stay here until their update succeeds.
    refused: HashMap<String, (i64, Instant)>,
}

impl SetState {
    /// Whether to publish that this many Pods cannot be updated to the revision in place: once. A reconcile that switches
    /// containers off counts none.
    fn take_not_upgradable(&mut self, revision: &str, pods: usize) -> bool {
        let is_new = pods > 0 && self.not_upgradable != revision;
        if is_new {
            revision.clone_into(&mut self.not_upgradable);
        }
        is_new
    }

    /// The Pods, by UID, that are left alone now, and those that are tried again after all others. Otherwise a few Pods
    /// that are never updated would take the places of the others in turn, for ever.
    fn take_refused(
        &mut self,
        generation: i64,
        pods: &[&Pod],
        now: Instant,
    ) -> (BTreeSet<String>, BTreeSet<String>) {
        let existing: BTreeSet<&str> = match self.refused.is_empty() {
            true => BTreeSet::new(),
            false => pods.iter().map(|pod| pod.uid.as_str()).collect(),
        };
        self.refused
            .retain(|uid, (of, _)| *of == generation && existing.contains(uid.as_str()));
        let (left_alone, failed) = self
            .refused
            .iter()
            .partition::<Vec<_>, _>(|(_, (_, until))| now < *until);
        let uids =
            |pods: Vec<(&String, &(i64, Instant))>| pods.into_iter().map(|(uid, _)| uid.clone()).collect();
        (uids(left_alone), uids(failed))
    }

    /// When what the API server has refused is tried again, if that is after `now`.
    fn next_retry(&self, now: Instant) -> Option<Instant> {
        let pods = self.refused.values().map(|(_, until)| *until);
        let revisions = self.adoption_retry_at.into_iter().chain(self.deletion_retry_at);
        pods.chain(revisions).filter(|until| *until > now).min()
    }
}

/// One reconcile of a set.
struct SetContext<'a> {
    shared: &'a ControllerState,
    set: &'a SidecarSet,
    name: &'a str,
    uid: &'a str,
}

impl SetContext<'_> {
    /// Whether the set is still the one that is being reconciled.
    fn is_current(&self) -> bool {
        let set = self.shared.index().set(self.name);
        let reconciled = &self.set.metadata;
        set.is_some_and(|set| {
            let now = &set.metadata;
            now.generation == reconciled.generation && now.uid == reconciled.uid
        })
    }
}

impl ControllerState {
    fn new(manager: Context, namespace: &str) -> Self {
        Self {
            manager,
            namespace: namespace.to_owned(),
            index: Mutex::new(Index::new(namespace)),
            states: Mutex::default(),
            injections: Injections::default(),
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn states(&self) -> MutexGuard<'_, HashMap<String, Arc<tokio::sync::Mutex<SetState>>>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
    fn pod_that_failed_is_remembered_until_it_is_updated() {
        let pod = |uid: &str| Pod::from_json(&serde_json::json!({ "metadata": { "name": uid, "uid": uid } }));
        let pods = ["a", "b"].map(pod);
        let pods: Vec<&Pod> = pods.iter().collect();
        let now = Instant::now();
        let soon = now + Duration::from_secs(10);
        let mut state = SetState {
            refused: [
                ("a", (2, soon)),
                ("b", (2, now)),
                ("gone", (2, soon)),
                ("old", (1, soon)),
            ]
            .map(|(uid, entry)| (uid.to_owned(), entry))
            .into(),
            ..SetState::default()
        };
        let set = |uids: &[&str]| uids.iter().map(|uid| (*uid).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(state.take_refused(2, &pods, now), (set(&["a"]), set(&["b"])));
        assert_eq!(state.take_refused(2, &pods, soon), (set(&[]), set(&["a", "b"])));
        assert_eq!(state.refused.len(), 2, "Pods that are gone are forgotten");
        assert_eq!(
            state.take_refused(3, &pods, now),
            (set(&[]), set(&[])),
            "a new spec may be accepted"
        );
    }

    /// Nothing else may change in the set for days.
    #[test]
    fn set_is_reconciled_when_what_was_refused_is_tried_again() {
        let now = Instant::now();
        let after = |seconds| Some(now + Duration::from_secs(seconds));
        let mut state = SetState {
            adoption_retry_at: after(20),
            deletion_retry_at: after(10),
            ..SetState::default()
        };
        assert_eq!(state.next_retry(now), after(10));
        state.deletion_retry_at = Some(now);
        assert_eq!(state.next_retry(now), after(20));
        state
            .refused
            .insert("pod".to_owned(), (1, now + Duration::from_secs(5)));
        assert_eq!(state.next_retry(now), after(5));
    }

    #[test]
    fn pods_that_are_not_upgradable_are_published_once_per_revision() {
        let mut state = SetState::default();
        let published = [
            ("a", 0),
            ("a", 2),
            ("a", 0),
            ("a", 2),
            ("a", 1),
            ("b", 1),
            ("b", 1),
        ]
        .map(|(revision, pods)| state.take_not_upgradable(revision, pods));
        assert_eq!(published, [false, true, false, false, false, true, false]);
    }

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
