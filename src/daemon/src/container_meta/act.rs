//! Writes the annotation, and restarts containers.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::context::{MetaController, NAME};
use super::error::Error;
use super::observe;
use crate::hook;
use crate::pods::{MIN_GRACE_PERIOD, NodePod, bounded_seconds};
use kruise_api::in_place::RuntimeContainerMetaSet;
use kruise_api::keys;
use kruise_cluster::{EventType, Key, write};
use kruise_cri as cri;

/// Timeout for an answer of the runtime; of a stop, beyond the time that the runtime waits for the container.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(12);

/// The response to a write of a Pod. No field is needed, and decoding the whole Pod takes memory.
#[derive(kube::Resource, Clone, Debug, Deserialize, Serialize)]
#[resource(inherit = Pod)]
struct PatchedPod {
    metadata: ObjectMeta,
}

/// Writes the annotation to the Pod with this UID, never to a later Pod of the same name. It patches the status
/// subresource: the right to write that does not include changing what the Pod runs.
///
/// # Errors
/// When the API server refuses the write or cannot be reached. A deleted Pod is not an error.
pub async fn write_annotation(
    shared: &MetaController,
    pod: &NodePod,
    meta_set: &RuntimeContainerMetaSet,
) -> Result<(), Error> {
    let text = serde_json::to_string(meta_set).map_err(|error| Error::Json(error.to_string()))?;
    let annotations = json!({ keys::RUNTIME_CONTAINERS_META: text });
    let patch = json!({ "metadata": { "uid": pod.uid, "annotations": annotations } });
    let api: Api<PatchedPod> = Api::namespaced(shared.ctx.cluster.client.clone(), &pod.namespace);
    match write::patch_status_merge(&api, &pod.name, &patch).await {
        Ok(_) => Ok(()),
        Err(error) if error.not_found() => Ok(()),
        // A conflict means a different Pod of that name, which the watch is about to show, or a concurrent write.
        Err(error) => Err(error.into()),
    }
}

/// Runs the preStop hook of a container and stops it, so that kubelet starts it again. A container that does not run,
/// or that does not belong to the Pod, is left alone.
///
/// # Errors
/// When the runtime does not answer or fails to stop the container.
pub async fn restart_container(
    shared: &MetaController,
    key: &Key,
    pod: &NodePod,
    name: &str,
    id: &str,
) -> Result<(), Error> {
    let slot = shared.ctx.stop_slots.acquire(&pod.namespace).await;
    let slot = slot.ok_or(Error::Withdrawn)?;
    slot.run(Box::pin(stop_container(shared, key, pod, name, id)))
        .await
}

async fn stop_container(
    shared: &MetaController,
    key: &Key,
    pod: &NodePod,
    name: &str,
    id: &str,
) -> Result<(), Error> {
    let (scheme, bare_id) = observe::split_container_id(id)?;
    let runtime = shared.runtime(scheme)?;
    if !shared.restart_still_needed(key, &pod.uid, name, id) {
        return Err(Error::Withdrawn);
    }
    let grace = bounded_seconds(pod.grace_period_seconds);
    let timeout = grace * 2 + MIN_GRACE_PERIOD + 3 * RUNTIME_TIMEOUT;
    let description = format!(
        "restart of container {name} of Pod {}/{}",
        pod.namespace, pod.name
    );
    let _progress = shared.ctx.health.progress.begin(NAME, description, timeout);
    let status = runtime.container_status(bare_id).await?;
    if !status.is_some_and(|status| status.state.may_run() && observe::belongs_to_pod(&status, pod, name)) {
        return Ok(());
    }
    let mut progress = shared.hook_progress(key, id);
    let used = if let Some(used) = progress.used_grace {
        used
    } else {
        tracing::info!(pod = %pod.name, namespace = pod.namespace, container = name, id, "restarting container for its new environment");
        // OpenKruise writes the container's name where the ID belongs.
        let note = format!("Stopping containerID {scheme}://{name} by container meta restarter");
        let killing = keys::EVENT_KILLING;
        let (events, object) = (&shared.ctx.cluster.events, pod.container_reference(name));
        events.publish(object, EventType::Normal, killing, "Restarting", note);
        let started = Instant::now();
        let hook = hook::run_pre_stop(runtime.as_ref(), events, pod, name, bare_id, grace);
        if let Err(error) = hook.await {
            progress.interrupted += 1;
            shared.set_hook_progress(key, id, progress);
            if progress.interrupted < hook::MAX_ATTEMPTS {
                return Err(error.into());
            }
        }
        let used = started.elapsed();
        progress.used_grace = Some(used);
        shared.set_hook_progress(key, id, progress);
        used
    };
    let started = Instant::now();
    let stopped = runtime
        .stop_container(bare_id, grace.saturating_sub(used).max(MIN_GRACE_PERIOD))
        .await;
    if let Err(error) = stopped {
        // A runtime that answers has tried, and may have sent TERM.
        if matches!(error, cri::Error::Rejected { .. }) {
            progress.used_grace = Some(used.saturating_add(started.elapsed()));
            shared.set_hook_progress(key, id, progress);
        }
        return Err(error.into());
    }
    tracing::info!(pod = %pod.name, namespace = pod.namespace, container = name, id, "stopped container");
    Ok(())
}
