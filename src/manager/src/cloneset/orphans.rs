//! Before a new CloneSet's first plan: the Pods of nobody that it is to adopt, as the API server itself knows them.
//!
//! Orphans are adopted until the CloneSet has a status, and not later. A watch that is behind may still name the Deployment
//! that they were orphaned by; then others would be made beside them.

use std::sync::Arc;

use kube::api::ListParams;
use kube::core::Selector;

use super::context::CloneSetContext;
use super::reconcile_state::ReconcileState;
use crate::view::RawPod;
use kruise_cluster::{Error, write};
use kruise_workload::in_place::Pod;

/// Pods that are read at a time.
const PAGE_SIZE: u32 = 100;

/// Takes note of orphans that the watch has not shown as such, once in the life of a CloneSet without a status.
///
/// # Errors
/// When the API server does not say, and may yet.
pub async fn fetch_orphans(ctx: &CloneSetContext<'_>, state: &mut ReconcileState) -> Result<(), Error> {
    if state.orphans_fetched || !ctx.set.is_new() {
        return Ok(());
    }
    match list_orphans(ctx).await {
        // With a selector that it does not take no Pod can be made either.
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
