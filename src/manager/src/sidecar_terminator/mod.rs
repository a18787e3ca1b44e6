//! Ends the sidecars of Pods that run to completion, once their main containers have ended.
//!
//! In:  Pods whose containers are marked as sidecars by environment variables, and ContainerRecreateRequests (watches).
//! Out: ContainerRecreateRequests that stop the sidecars; phase, condition `SidecarTerminated` and an annotation of Pods
//!      that would not end otherwise; events.
//!
//! The marks are OpenKruise's. Native sidecars (restartable init containers) need no marks: kubelet ends them.

mod act;
pub mod plan;

use tokio::sync::mpsc;

use super::Context;
use super::context::enqueue_changes;
use super::view::PodView;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::keys;
use kruise_cluster::clock::duration_until;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Change, Error, Key};
use plan::{Step, ending_job, plan};

/// Name in logs and metrics.
const NAME: &str = "sidecarterminator";

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    ctx.stores.synced().await;
    let (pods_tx, pods_rx) = mpsc::unbounded_channel();
    let is_job =
        |change: &Change<PodView>| change.new.as_deref().is_some_and(|pod| ending_job(pod).is_some());
    let pods = enqueue_changes(NAME, ctx.stores.pods.subscribe(), pods_tx.clone(), is_job);
    let requests = enqueue_pods_of_requests(ctx.stores.requests.subscribe(), pods_tx);
    let enqueue = async {
        tokio::join!(pods, requests);
    };
    let workers = ctx.options.sidecarterminator_workers;
    let work = |key| reconcile(ctx.clone(), key);
    ctx.run_workers(NAME, workers, pods_rx, enqueue, work).await;
}

async fn enqueue_pods_of_requests(
    mut changes: mpsc::UnboundedReceiver<Change<ContainerRecreateRequest>>,
    pods: mpsc::UnboundedSender<Key>,
) {
    while let Some(change) = changes.recv().await {
        let request = change
            .new
            .or(change.old)
            .filter(|_| change.key.name.starts_with(keys::SIDECAR_TERMINATION_PREFIX));
        let Some(request) = request else { continue };
        let pod = Key {
            namespace: change.key.namespace,
            name: request.spec.pod_name.clone(),
        };
        if pods.send(pod).is_err() {
            return;
        }
    }
}

async fn reconcile(ctx: Context, key: Key) -> Result<RequeueAfter, Error> {
    let Some(pod) = ctx.stores.pods.get(&key) else {
        return Ok(None);
    };
    let Some(job) = ending_job(&pod).filter(|_| act::has_daemon(&ctx, &pod)) else {
        return Ok(None);
    };
    let now = ctx.cluster.clock.now();
    let request = act::request(&ctx, &key, &pod.uid);
    match plan(job, pod.terminal, request, now) {
        Step::Wait => Ok(None),
        Step::WaitUntil(time) => Ok(Some(duration_until(time, now))),
        Step::Stop(containers) => {
            act::create_request(&ctx, &key, &pod.uid, job, &containers).await?;
            Ok(None)
        }
        Step::SetPhase(phase) => {
            act::set_phase(&ctx, &key, &pod.uid, phase).await?;
            Ok(None)
        }
    }
}
