//! Restarts containers whose liveness probe failed, of as many Pods of a workload at once as its budget allows.
//!
//! In:  Pods with annotation `apps.kruise.io/container-probe-context` that a workload of our API group controls,
//!      results in NodePodProbes, CloneSets and ContainerRecreateRequests (watches).
//! Out: ContainerRecreateRequests, and events on the Pods.
//!
//! `pod_probe_marker` distributes the probes to the nodes, whose daemons run them. All of this can be read again from the
//! cluster: a manager that takes over repeats nothing but events.

mod act;
mod observe;
pub mod plan;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::Context;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_api::unconfirmed::Unconfirmed;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key, Store};
use kruise_ops::metrics::metrics;
use observe::{Index, WorkloadKey};

/// Name in logs and metrics.
const NAME: &str = "enhancedliveness";
/// Workloads reconciled in parallel.
const WORKERS: usize = 4;

/// What all reconciles share.
struct ControllerState {
    manager: Context,
    index: Mutex<Index>,
    /// The containers whose restart waits, by UID of the Pod and container ID: each has had its event.
    waiting: Mutex<BTreeMap<WorkloadKey, BTreeSet<(String, String)>>>,
    /// UIDs of the Pods whose annotation has had an event, because a part of it cannot be used.
    reported: Mutex<BTreeMap<WorkloadKey, BTreeSet<String>>>,
    /// Requests that were created and that the watch has not shown yet, by Pod.
    unconfirmed: Mutex<HashMap<Key, Unconfirmed<Key>>>,
    /// Until when restarts that were refused are not tried again, by UID of the Pod and container ID: the budget is for
    /// others until then.
    refused: Mutex<HashMap<(String, String), Instant>>,
    started_at: Instant,
}

impl ControllerState {
    fn new(manager: Context) -> Self {
        Self {
            manager,
            index: Mutex::default(),
            waiting: Mutex::default(),
            reported: Mutex::default(),
            unconfirmed: Mutex::default(),
            refused: Mutex::default(),
            started_at: Instant::now(),
        }
    }
}

impl Drop for ControllerState {
    /// A former leader makes no restart wait.
    fn drop(&mut self) {
        metrics().liveness_restarts_waiting.set(0);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs until shutdown.
pub async fn run(ctx: Context, node_pod_probes: Store<NodePodProbe>) {
    ctx.stores.synced().await;
    let shared = Arc::new(ControllerState::new(ctx.clone()));
    let (work_tx, work_rx) = mpsc::unbounded_channel();
    let enqueue = observe::enqueue_changes(Arc::clone(&shared), node_pod_probes, work_tx);
    let work = |workload| reconcile(Arc::clone(&shared), workload);
    ctx.run_workers(NAME, WORKERS, work_rx, enqueue, work).await;
}

async fn reconcile(shared: Arc<ControllerState>, workload: WorkloadKey) -> Result<RequeueAfter, Error> {
    let (observed, plan) = plan_restarts(&shared, &workload);
    act::report_unusable(&shared, &workload, &observed);
    if observed.pods.iter().all(|pod| pod.failure.is_none()) {
        act::report_waiting(&shared, &workload, &observed, &[]);
        return Ok(observed.requeue_after);
    }
    act::report_waiting(&shared, &workload, &observed, &plan.waiting);
    act::restart(&shared, &observed, &plan.restarts).await?;
    if plan.restarts.len() == plan::MAX_RESTARTS {
        return Ok(Some(Duration::ZERO));
    }
    let mut planning = shared.manager.restarts.plan();
    let requeue_after = observe::observe(&shared, &workload, &mut planning).requeue_after;
    Ok(requeue_after)
}

/// What is there, and what to restart, which counts in the budgets of others from now on.
fn plan_restarts(shared: &ControllerState, workload: &WorkloadKey) -> (observe::Observed, plan::Plan) {
    let mut planning = shared.manager.restarts.plan();
    let observed = observe::observe(shared, workload, &mut planning);
    let budget = act::budget(&shared.manager, workload, observed.pods.len());
    let plan = plan::plan(&observed.pods, budget);
    for (pod, failure) in &plan.restarts {
        let uid = observed.cached.get(pod).map(|cached| cached.view.uid.clone());
        let uid = uid.unwrap_or_default();
        let request = pod.with_name(&plan::request_name(&uid, &failure.container_id));
        planning.record(request, uid, Instant::now());
    }
    (observed, plan)
}
