//! Ends the sidecars of Pods that run to completion, once their main containers have ended.
//!
//! In:  Pods whose containers are marked as sidecars by environment variables, and ContainerRecreateRequests (watches).
//! Out: ContainerRecreateRequests that stop the sidecars; phase, condition `SidecarTerminated` and an annotation of Pods
//!      that would not end otherwise; events.
//!
//! The marks are OpenKruise's. Native sidecars (restartable init containers) need no marks: kubelet ends them.

mod act;
pub mod plan;

use std::time::Duration;

use tokio::sync::mpsc;

use super::Context;
use super::context::enqueue_changes;
use super::namespace_limit::NamespaceLimit;
use super::view::PodView;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::keys;
use kruise_cluster::clock::duration_until;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Change, Error, Key};
use plan::{Step, ending_job, plan};

/// Name in logs and metrics.
const NAME: &str = "sidecarterminator";
/// Pause until a node that is not known is looked up again.
const NODE_RECHECK_DELAY: Duration = Duration::from_secs(10);

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    ctx.stores.synced().await;
    let (pods_tx, pods_rx) = mpsc::unbounded_channel();
    let is_job =
        |change: &Change<PodView>| change.new.as_deref().is_some_and(|pod| ending_job(pod).is_some());
    let pods = enqueue_changes(NAME, ctx.stores.pods.subscribe(), pods_tx.clone(), is_job);
    let requests = enqueue_pods_of_requests(ctx.stores.requests.subscribe(), pods_tx.clone());
    let enqueue = async {
        tokio::join!(pods, requests);
    };
    let workers = ctx.options.sidecarterminator_workers;
    // One worker is left for the Pods of other namespaces.
    let namespace_limit = NamespaceLimit::new(workers.saturating_sub(1).max(1), pods_tx);
    let work = |key: Key| {
        let (ctx, namespace_limit) = (ctx.clone(), namespace_limit.clone());
        namespace_limit.reconcile(key.clone(), move || reconcile(ctx, key))
    };
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
    let Some(job) = ending_job(&pod) else {
        return Ok(None);
    };
    match act::has_daemon(&ctx, &pod) {
        Some(true) => {}
        Some(false) => return Ok(None),
        // The watch of nodes may be behind that of Pods, and nothing else may change in this Pod.
        None => return Ok(Some(NODE_RECHECK_DELAY)),
    }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use k8s_openapi::api::core::v1::Node;
    use kruise_cluster::Store;
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;
    use crate::view::{NodeView, RawPod};

    /// A Pod whose sidecar is to be stopped.
    fn ending_pod() -> PodView {
        let mark = json!([{ "name": keys::ENV_TERMINATE_SIDECAR, "value": "true" }]);
        let pod = json!({ "metadata": { "name": "p", "namespace": "n", "uid": "u" },
            "spec": { "nodeName": "a", "restartPolicy": "Never",
                "containers": [{ "name": "main" }, { "name": "log", "env": mark }] },
            "status": { "containerStatuses": [
                { "name": "main", "state": { "terminated": { "exitCode": 0 } } },
                { "name": "log", "state": { "running": {} } } ] } });
        PodView::from(&RawPod::from(pod))
    }

    fn node(labels: &Value) -> (Key, NodeView) {
        let node = json!({ "metadata": { "name": "a", "labels": labels } });
        let node: Node = serde_json::from_value(node).unwrap();
        (Key::cluster_scoped("a"), NodeView::from(node))
    }

    #[tokio::test]
    async fn pods_of_one_namespace_take_not_all_workers() {
        let (sent_tx, mut sent) = mpsc::unbounded_channel();
        // No request is answered.
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let _ = sent_tx.send(request.uri().path().to_owned());
            std::future::pending::<Result<http::Response<Body>, tower::BoxError>>()
        });
        let mut ctx = Context::for_test(kube::Client::new(service, "default"));
        let workers = ctx.options.sidecarterminator_workers;
        let crowd = (0..100 * workers).map(|n| Key::namespaced("crowd", n.to_string()));
        let pods = crowd.chain([Key::namespaced("other", "p")]);
        ctx.stores.pods = Store::from_objects(pods.map(|key| (key, ending_pod())));
        ctx.stores.nodes = Store::from_objects([node(&json!({}))]);
        let other_is_served = async { while !sent.recv().await.unwrap().contains("/namespaces/other/") {} };
        tokio::select! {
            () = run(ctx) => unreachable!("it runs until shutdown"),
            served = tokio::time::timeout(Duration::from_secs(60), other_is_served) => served.unwrap(),
        }
    }

    /// When the Pod of a finished job is looked at again, if these nodes are known.
    async fn requeue_after(nodes: Vec<(Key, NodeView)>) -> RequeueAfter {
        let service = tower::service_fn(|_: http::Request<Body>| {
            std::future::ready(http::Response::builder().status(500).body(Body::empty()))
        });
        let mut ctx = Context::for_test(kube::Client::new(service, "default"));
        let key = Key::namespaced("n", "p");
        let pod = ending_pod();
        assert!(ending_job(&pod).is_some());
        ctx.stores.pods = Store::from_objects([(key.clone(), pod)]);
        ctx.stores.nodes = Store::from_objects(nodes);
        reconcile(ctx, key).await.unwrap()
    }

    /// A webhook chooses the code of its denial.
    #[tokio::test]
    async fn denied_request_is_reported_whatever_the_code() {
        let (sent_tx, mut sent) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let sent = sent_tx.clone();
            async move {
                let body = request.into_body().collect_bytes().await.unwrap_or_default();
                let mut body: Value = serde_json::from_slice(&body).unwrap_or_default();
                let _ = sent.send(body["reason"].take());
                let denial = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 503,
                    "reason": "Some", "message": "admission webhook \"w\" denied the request: no" });
                let denial = Body::from(denial.to_string().into_bytes());
                http::Response::builder().status(503).body(denial)
            }
        });
        let mut ctx = Context::for_test(kube::Client::new(service, "default"));
        let key = Key::namespaced("n", "p");
        ctx.stores.pods = Store::from_objects([(key.clone(), ending_pod())]);
        ctx.stores.nodes = Store::from_objects([node(&json!({}))]);
        reconcile(ctx.clone(), key).await.unwrap_err();
        let reported = async { while sent.recv().await.unwrap() != "SidecarTerminationRefused" {} };
        let reported = tokio::time::timeout(Duration::from_secs(60), reported).await;
        reported.unwrap();
    }

    #[tokio::test]
    async fn pod_of_an_unknown_node_is_looked_at_again() {
        assert_eq!(requeue_after(vec![]).await, Some(NODE_RECHECK_DELAY));
        let nodes = vec![node(&json!({ keys::TYPE: keys::TYPE_VIRTUAL_KUBELET }))];
        assert_eq!(requeue_after(nodes).await, None, "no daemon runs there");
    }
}
