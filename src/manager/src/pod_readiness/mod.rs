//! Keeps the condition of readiness gate `KruisePodReady`.
//!
//! In:  Pods (watch).
//! Out: the condition, set to True on Pods with the gate; [`set_not_ready`] sets it to False for another controller.

pub mod plan;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::mpsc;

use super::Context;
use super::context::enqueue_changes;
use super::view::PodView;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Change, Error, Key, write};
use kruise_workload::not_ready::{NotReadyKey, initial_patch, patch_for_key};
use plan::lacks_condition;

/// Name in logs and metrics.
const NAME: &str = "podreadiness";

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    let (pods_tx, pods_rx) = mpsc::unbounded_channel();
    let filter = |change: &Change<PodView>| change.new.as_deref().is_some_and(lacks_condition);
    let enqueue = enqueue_changes(NAME, ctx.stores.pods.subscribe(), pods_tx, filter);
    let workers = ctx.options.podreadiness_workers;
    let work = |key| create_condition(ctx.clone(), key);
    ctx.run_workers(NAME, workers, pods_rx, enqueue, work).await;
}

async fn create_condition(ctx: Context, key: Key) -> Result<RequeueAfter, Error> {
    let Some(pod) = ctx.stores.pods.get(&key).filter(|p| lacks_condition(p)) else {
        return Ok(None);
    };
    let patch = initial_patch(&pod.uid, ctx.cluster.clock.now());
    match write::patch_status_strategic(&ctx.api::<Pod>(&key), &key.name, &patch).await {
        // A different Pod has the name now; its own event enqueues it.
        Err(error) if !error.not_found() && !error.conflict() => Err(error),
        _ => Ok(None),
    }
}

/// Takes a Pod out of its Services for another controller, or releases it. Returns whether the Pod exists.
///
/// # Errors
/// [`Error::conflict`] when the Pod changed in the meantime: retry.
pub async fn set_not_ready(
    ctx: &Context,
    pod: &Key,
    uid: &str,
    holder: &NotReadyKey,
    not_ready: bool,
) -> Result<bool, Error> {
    let api = ctx.api::<Pod>(pod);
    let object = write::get(&api, &pod.name).await?;
    let Some(object) = object.filter(|object| object.metadata.uid.as_deref() == Some(uid)) else {
        return Ok(false);
    };
    let Some(patch) = patch_for_key(&object, holder, not_ready, ctx.cluster.clock.now()) else {
        return Ok(true);
    };
    match write::patch_status_strategic(&api, &pod.name, &patch).await {
        Err(error) if error.not_found() => Ok(false),
        result => result.map(|_| true),
    }
}

#[cfg(test)]
mod tests {
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    /// Otherwise the log says that a Pod is ready again that was deleted.
    #[tokio::test]
    async fn pod_that_was_deleted_is_not_marked() -> Result<(), Error> {
        let service = tower::service_fn(|_: http::Request<Body>| {
            let pod = json!({ "apiVersion": "v1", "kind": "Pod",
                "metadata": { "name": "p", "namespace": "n", "uid": "new" } });
            let body = Body::from(pod.to_string().into_bytes());
            std::future::ready(http::Response::builder().body(body))
        });
        let ctx = Context::for_test(kube::Client::new(service, "default"));
        let pod = Key::namespaced("n", "p");
        let holder = NotReadyKey {
            user_agent: "ContainerRecreateRequest".to_owned(),
            key: "n/r".to_owned(),
        };
        assert!(!set_not_ready(&ctx, &pod, "old", &holder, true).await?);
        assert!(set_not_ready(&ctx, &pod, "new", &holder, true).await?);
        Ok(())
    }
}
