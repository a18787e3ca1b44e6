//! Reads objects from the API server into the index where the watch is not enough.
//!
//! That is after a write that the watch has not confirmed in time or whose outcome is unknown, after a conflict, and
//! before the first plan of a new CloneSet. Orphans are adopted only until the CloneSet has a status: a watch that lags
//! may still show the Deployment that orphaned them as their controller; then other Pods would be created beside them.

use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::ListParams;
use kube::core::Selector;

use super::context::CloneSetContext;
use super::observe::{
    versioned_claim, versioned_clone_set, versioned_job, versioned_pod, versioned_revision,
};
use super::reconcile_state::ReconcileState;
use crate::context::fetch_all;
use crate::view::{ClaimView, CloneSetView, RawPod, RevisionView};
use kruise_api::cloneset::CloneSet;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_cluster::{Error, write};
use kruise_workload::in_place::Pod;

/// Pods per list request.
const PAGE_SIZE: u32 = 100;

/// Reads objects from the API server whose writes the watch has not confirmed in time, or whose writes have an unknown
/// outcome.
///
/// # Errors
/// If the API server does not answer.
pub async fn fetch_unconfirmed(ctx: &CloneSetContext<'_>) -> Result<(), Error> {
    let now = Instant::now();
    let (set, pods, claims, jobs, revisions) = {
        let index = ctx.index();
        (
            index.sets.must_be_read(ctx.name, now),
            index.pods.unconfirmed(&ctx.group, now).0,
            index.claims.unconfirmed(&ctx.group, now).0,
            index.jobs.unconfirmed(&ctx.group, now).0,
            index.revisions.unconfirmed(&ctx.group, now).0,
        )
    };
    if set {
        let found = write::get(&ctx.api::<CloneSet>(), &ctx.name.name).await?;
        let entry = found.map(|found| versioned_clone_set(Arc::new(CloneSetView::from(&found))));
        ctx.index().sets.apply_read(ctx.name, entry, Instant::now());
    }
    let reads = pods.iter().map(|key| {
        tracing::warn!(set = %ctx.name, pod = key.name, "outcome of a write is unknown; reading the Pod again");
        fetch_pod(ctx, &key.name)
    });
    fetch_all(reads.collect::<Vec<_>>()).await?;
    let reads = claims.iter().map(|key| fetch_claim(ctx, &key.name));
    fetch_all(reads.collect::<Vec<_>>()).await?;
    let reads = jobs.iter().map(|key| fetch_job(ctx, &key.name));
    fetch_all(reads.collect::<Vec<_>>()).await?;
    let reads = revisions.iter().map(|key| fetch_revision(ctx, &key.name));
    fetch_all(reads.collect::<Vec<_>>()).await
}

/// Caches orphans that the watch has not shown as such, once for a CloneSet without a status.
///
/// # Errors
/// If the request failed and may succeed later.
pub async fn fetch_orphans(ctx: &CloneSetContext<'_>, state: &mut ReconcileState) -> Result<(), Error> {
    if state.orphans_fetched || !ctx.set.is_new() {
        return Ok(());
    }
    match list_orphans(ctx).await {
        // If the API server refuses the selector, no Pod can be created either.
        Err(error) if error.retryable() || error.forbidden() => return Err(error),
        Err(error) => tracing::debug!(set = %ctx.name, %error, "cannot look for orphans"),
        Ok(()) => {}
    }
    state.orphans_fetched = true;
    Ok(())
}

async fn list_orphans(ctx: &CloneSetContext<'_>) -> Result<(), Error> {
    let Ok(selector) = Selector::try_from(ctx.set.spec.selector.clone()) else {
        return Ok(());
    };
    let mut params = ListParams::default().labels_from(&selector).limit(PAGE_SIZE);
    loop {
        let page = write::list::<RawPod>(&ctx.api(), &params).await?;
        for pod in page.items.iter().map(|pod| Pod::from_json(pod.json())) {
            let key = ctx.key(&pod.name);
            let mut index = ctx.index();
            let cached = index
                .pods
                .get(&key)
                .is_some_and(|known| known.controller.is_none());
            if pod.controller.is_none() && !cached {
                tracing::info!(set = %ctx.name, pod = pod.name, "found an orphan that the watch has not shown yet");
                index.insert_orphan(&key, Arc::new(pod));
            }
        }
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(());
        }
    }
}

/// Reads a Pod from the API server and caches it.
pub async fn fetch_pod(ctx: &CloneSetContext<'_>, name: &str) -> Result<Option<Arc<Pod>>, Error> {
    let found = write::get(&ctx.api::<RawPod>(), name).await?;
    let pod = found.map(|found| Arc::new(Pod::from_json(found.json())));
    let key = ctx.key(name);
    let entry = pod.clone().map(|pod| versioned_pod(&key, pod));
    ctx.index().pods.apply_read(&key, entry, Instant::now());
    Ok(pod)
}

/// Reads a claim from the API server and caches it.
pub async fn fetch_claim(ctx: &CloneSetContext<'_>, name: &str) -> Result<Option<ClaimView>, Error> {
    let found = write::get(&ctx.api::<PersistentVolumeClaim>(), name).await?;
    let view = found.as_ref().map(ClaimView::from_object);
    let key = ctx.key(name);
    let entry = view.as_ref().map(|view| versioned_claim(&key, view));
    ctx.index().claims.apply_read(&key, entry, Instant::now());
    Ok(view)
}

/// Reads a job from the API server and caches it. Returns whether it is usable: it is the CloneSet's and not
/// terminating.
pub async fn fetch_job(ctx: &CloneSetContext<'_>, name: &str) -> Result<bool, Error> {
    let found = write::get(&ctx.api::<ImagePullJob>(), name).await?;
    let entry = found.as_ref().map(versioned_job);
    let usable = entry
        .as_ref()
        .is_none_or(|at| at.group == ctx.group && !at.terminating);
    ctx.index().jobs.apply_read(&ctx.key(name), entry, Instant::now());
    Ok(usable)
}

/// Reads a revision from the API server and caches it.
pub async fn fetch_revision(ctx: &CloneSetContext<'_>, name: &str) -> Result<(), Error> {
    let key = ctx.key(name);
    let found = write::get(&ctx.api::<ControllerRevision>(), name).await?;
    let view = found.as_ref().and_then(RevisionView::from_object);
    let entry = view.map(|view| versioned_revision(&key, Arc::new(view)));
    ctx.index().revisions.apply_read(&key, entry, Instant::now());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kube::client::Body;
    use serde_json::json;

    use super::*;
    use crate::cloneset::context::ControllerState;
    use kruise_cluster::Key;

    /// While the watch of claims does not work, all of thousands are read again, and a reconcile has two minutes.
    #[tokio::test(start_paused = true)]
    async fn unconfirmed_claims_are_read_several_at_a_time() -> Result<(), serde_json::Error> {
        let service = tower::service_fn(|_: http::Request<Body>| async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let status = json!({ "kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound" });
            http::Response::builder()
                .status(404)
                .body(Body::from(status.to_string().into_bytes()))
        });
        let manager = crate::Context::for_test(kube::Client::new(service, "default"));
        let shared = ControllerState::new(manager);
        let set: Arc<CloneSet> = Arc::new(serde_json::from_value(json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
            "metadata": { "name": "web", "namespace": "n", "uid": "set" },
            "spec": { "selector": { "matchLabels": { "app": "web" } }, "template": {} },
        }))?);
        let key = Key::namespaced("n", "web");
        let ctx = CloneSetContext::new(&shared, &key, &set);
        for at in 0..80 {
            let key = ctx.key(&format!("claim-{at}"));
            let view = ClaimView {
                owner: Some(ctx.owner.clone()),
                ..ClaimView::default()
            };
            let mut index = ctx.index();
            index.claims.apply_watch(&key, versioned_claim(&key, &view));
            index.claims.mark_unknown(&key);
        }
        let begin = tokio::time::Instant::now();
        assert!(fetch_unconfirmed(&ctx).await.is_ok());
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
        assert!(ctx.index().claims.is_empty());
        Ok(())
    }
}
