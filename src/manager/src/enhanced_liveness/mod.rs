//! Restarts containers whose liveness probe failed, of as many Pods of a workload at once as its budget allows.
//!
//! In:  Pods with annotation `apps.kruise.io/container-probe-context` that a workload of our API group controls,
//!      results in NodePodProbes, CloneSets and ContainerRecreateRequests (watches).
//! Out: ContainerRecreateRequests, and events on the Pods.
//!
//! `pod_probe_marker` distributes the probes to the nodes, whose daemons run them. All of this can be read again from the
//! cluster: a manager that takes over repeats nothing but events.

mod act;
mod index;
mod observe;
pub mod plan;
mod state;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::Context;
use index::WorkloadKey;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Store};
use state::{ControllerState, NAME};

/// Workloads reconciled in parallel.
const WORKERS: usize = 4;

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
