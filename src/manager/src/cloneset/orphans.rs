//! Before a new CloneSet's first plan: the Pods of nobody that it is to adopt, as the API server itself knows them.
//!
//! Orphans are adopted until the CloneSet has a status, and not later. A watch that is behind may still name the Deployment
//! that they were orphaned by; then others would be made beside them.

use std::sync::Arc;

use kube::api::ListParams;
use kube::core::Selector;

use super::memory::Memory;
use super::work::Work;
use crate::view::RawPod;
use kruise_cluster::{Error, write};
use kruise_workload::in_place::Pod;

/// Pods that are read at a time.
const PAGE: u32 = 100;

/// Takes note of orphans that the watch has not shown as such, once in the life of a CloneSet without a status.
///
/// # Errors
/// When the API server does not say, and may yet.
pub async fn look_for(work: &Work<'_>, memory: &mut Memory) -> Result<(), Error> {
    if memory.orphans_known || !work.set.is_new() {
        return Ok(());
    }
    match all(work).await {
        // With a selector that it does not take no Pod can be made either.
        Err(error) if error.retryable() || error.forbidden() => return Err(error),
        Err(error) => tracing::debug!(set = %work.name, %error, "cannot look for orphans"),
        Ok(()) => {}
    }
    memory.orphans_known = true;
    Ok(())
}

async fn all(work: &Work<'_>) -> Result<(), Error> {
    let Ok(selector) = Selector::try_from(work.set.spec.selector.clone()) else {
        return Ok(());
    };
    let mut params = ListParams::default().labels_from(&selector).limit(PAGE);
    loop {
        let page = write::list::<RawPod>(&work.api(), &params).await?;
        for pod in page.items.iter().map(|pod| Pod::of(pod.json())) {
            let key = work.key(&pod.name);
            let mut index = work.index();
            let known = index
                .pods
                .get(&key)
                .is_some_and(|known| known.controller.is_none());
            if pod.controller.is_none() && !known {
                tracing::info!(set = %work.name, pod = pod.name, "found an orphan that the watch has not shown yet");
                index.orphan(&key, Arc::new(pod));
            }
        }
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(());
        }
    }
}
