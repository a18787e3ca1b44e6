//! Writes images and annotations of injected Pods, and their conditions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use kube::Api;
use serde_json::{Value, json};

use super::observe::versioned_pod;
use super::{SetContext, SetState, report};
use crate::object_reference::object_reference;
use crate::view::RawPod;
use kruise_api::json::set;
use kruise_cluster::{Error, EventType, Key, write};
use kruise_workload::in_place::Pod;
use kruise_workload::sidecarset::plan::{EVENT_RESET_FAILED, EVENT_RESET_SUCCEEDED, Plan};
use kruise_workload::sidecarset::upgrade::PodChanges;

/// Pods that are written at once for one set.
const MAX_CONCURRENT_WRITES: usize = 32;

/// How long a Pod is left alone whose update the API server refused.
const RETRY_REFUSED: Duration = Duration::from_secs(60);

type ObservedPod = (Key, Arc<Pod>);

impl SetContext<'_> {
    fn pods(&self, key: &Key) -> Api<RawPod> {
        self.shared.manager.api(key)
    }

    fn cache_pod(&self, key: &Key, stored: &RawPod) {
        let pod = Arc::new(Pod::from_json(stored.json()));
        let mut index = self.shared.index();
        index
            .pods
            .apply_write(key, versioned_pod(key, pod), Instant::now());
    }

    async fn fetch_pod(&self, key: &Key) -> Result<(), Error> {
        let found = write::get(&self.pods(key), &key.name).await?;
        let pod = found.map(|found| Arc::new(Pod::from_json(found.json())));
        let entry = pod.map(|pod| versioned_pod(key, pod));
        self.shared.index().pods.apply_read(key, entry, Instant::now());
        Ok(())
    }
}

/// Reads the Pods whose last write had no answer, or was not confirmed by the watch.
pub async fn fetch_unconfirmed(ctx: &SetContext<'_>) -> Result<(), Error> {
    let keys = ctx.shared.index().unconfirmed_pods(ctx.name, Instant::now());
    for key in keys {
        ctx.fetch_pod(&key).await?;
    }
    Ok(())
}

/// Writes the planned changes of Pods; returns whether there were any. Pods that the API server refuses are left alone
/// for a while, so that they stop no others.
///
/// # Errors
/// The first other error, after everything was tried.
pub async fn write_pods(
    ctx: &SetContext<'_>,
    plan: &Plan,
    pods: &[ObservedPod],
    state: &mut SetState,
) -> Result<bool, Error> {
    let at = |at: usize| pods.get(at);
    let flips = plan
        .flips
        .iter()
        .filter_map(|(index, changes)| Some((at(*index)?, Some(changes), None, true)));
    let mut conditions: BTreeMap<usize, &Value> = plan
        .conditions
        .iter()
        .map(|(index, condition)| (*index, condition))
        .collect();
    // That of a Pod that is updated is written after the update.
    let upgrades = plan.upgrades.iter();
    let upgrades = upgrades.map(|(index, changes)| (*index, changes, conditions.remove(index)));
    let upgrades: Vec<_> = upgrades.collect();
    let upgrades = upgrades
        .into_iter()
        .filter_map(|(index, changes, condition)| Some((at(index)?, Some(changes), condition, false)));
    let conditions = conditions.into_iter();
    let conditions =
        conditions.filter_map(|(index, condition)| Some((at(index)?, None, Some(condition), false)));
    let writes: Vec<_> = flips.chain(upgrades).chain(conditions).collect();
    let acted = !writes.is_empty();
    let writes: Vec<_> = writes
        .into_iter()
        .map(async |(pod, changes, condition, flip)| {
            (&pod.1, write_pod(ctx, pod, changes, condition, flip).await)
        })
        .collect();
    let results = stream::iter(writes)
        .buffer_unordered(MAX_CONCURRENT_WRITES)
        .collect::<Vec<_>>()
        .await;
    let generation = ctx.set.metadata.generation.unwrap_or_default();
    let mut result = Ok(acted);
    for (pod, written) in results {
        match written {
            Err(error) if error.rejected() => {
                report::publish_refused(ctx, pod, &error);
                let until = Instant::now() + RETRY_REFUSED;
                state.refused.insert(pod.uid.clone(), (generation, until));
            }
            Err(error) => result = Err(error),
            Ok(()) => {}
        }
    }
    result
}

async fn write_pod(
    ctx: &SetContext<'_>,
    (key, pod): &ObservedPod,
    changes: Option<&PodChanges>,
    condition: Option<&Value>,
    flip: bool,
) -> Result<(), Error> {
    if let Some(changes) = changes {
        let stored = write::patch_strategic(&ctx.pods(key), &key.name, &pod_patch(pod, changes)).await;
        let stored = stored.and_then(|stored| stored.object());
        if flip {
            publish_flip(ctx, key, pod, stored.as_ref().err());
        }
        match stored {
            Ok(stored) => {
                ctx.cache_pod(key, &stored);
                tracing::info!(set = ctx.name, pod = %key, images = ?changes.images, flip, "updated sidecars");
            }
            // It changed or is gone: the next reconcile decides again.
            Err(error) if error.conflict() || error.not_found() => return ctx.fetch_pod(key).await,
            Err(error) => {
                if error.outcome_unknown() {
                    ctx.shared.index().pods.mark_unknown(key);
                }
                tracing::warn!(set = ctx.name, pod = %key, %error, "cannot update sidecars");
                return Err(error);
            }
        }
    }
    if let Some(condition) = condition {
        let patch = json!({ "metadata": { "uid": pod.uid }, "status": { "conditions": [condition] } });
        match write::patch_status_strategic(&ctx.pods(key), &key.name, &patch).await {
            Ok(stored) => ctx.cache_pod(key, &stored.object()?),
            Err(error) if error.conflict() || error.not_found() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The patch of a Pod; it is refused if the Pod has changed.
fn pod_patch(pod: &Pod, changes: &PodChanges) -> Value {
    let mut patch = json!({ "metadata": {
        "uid": pod.uid,
        "resourceVersion": pod.resource_version,
        "annotations": changes.annotations,
    } });
    let images = changes
        .images
        .iter()
        .map(|(name, image)| json!({ "name": name, "image": image }));
    let images: Vec<Value> = images.collect();
    if !images.is_empty() {
        set(&mut patch, &["spec", "containers"], images.into());
    }
    patch
}

fn publish_flip(ctx: &SetContext<'_>, key: &Key, pod: &Pod, error: Option<&Error>) {
    let reference = object_reference("v1", "Pod", key, &pod.uid);
    let (type_, reason, note) = match error {
        None => (
            EventType::Normal,
            EVENT_RESET_SUCCEEDED,
            "reset sidecar container image empty successfully".to_owned(),
        ),
        Some(error) => (
            EventType::Warning,
            EVENT_RESET_FAILED,
            format!("reset sidecar container image empty failed: {}", error.message()),
        ),
    };
    let events = &ctx.shared.manager.cluster.events;
    events.publish(reference, type_, reason, "Updating", note);
}
