//! Writes the annotation, and restarts containers.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Error, Shared, observe};
use crate::hook;
use crate::pods::{PodView, seconds};
use kruise_api::in_place::RuntimeContainerMetaSet;
use kruise_api::keys;
use kruise_cluster::{EventType, Key, write};
use kruise_cri::{ContainerState, Runtime};

/// How long the runtime may take to answer, beyond what it is told to wait.
const ANSWER: Duration = Duration::from_secs(12);
/// The least that a container gets to stop.
const LEAST_GRACE: Duration = Duration::from_secs(2);

/// A Pod as the answer to a write: nothing of it is needed, and to read it whole takes memory.
#[derive(kube::Resource, Clone, Debug, Deserialize, Serialize)]
#[resource(inherit = Pod)]
struct Written {
    metadata: ObjectMeta,
}

/// Writes the annotation, on this very Pod and no later one of its name. Through the status, for whoever may
/// write that cannot change what the Pod runs.
///
/// # Errors
/// When the API server refuses or cannot be reached; that the Pod has gone is none.
pub async fn write(shared: &Shared, pod: &PodView, set: &RuntimeContainerMetaSet) -> Result<(), Error> {
    let text = serde_json::to_string(set).map_err(|error| Error::Json(error.to_string()))?;
    let annotations = json!({ keys::RUNTIME_CONTAINERS_META: text });
    let patch = json!({ "metadata": { "uid": pod.uid, "annotations": annotations } });
    let api: Api<Written> = Api::namespaced(shared.ctx.cluster.client.clone(), &pod.namespace);
    match write::patch_status_merge(&api, &pod.name, &patch).await {
        Ok(_) => Ok(()),
        Err(error) if error.not_found() => Ok(()),
        // A conflict is of another Pod of that name, which the watch is about to show, or of a write at the same time.
        Err(error) => Err(error.into()),
    }
}

/// Runs the preStop hook of a container and stops it, so that kubelet starts it again. A container that does not
/// run, or is not the Pod's, is left alone.
///
/// # Errors
/// When the runtime does not answer, or would not stop it.
pub async fn restart(shared: &Shared, key: &Key, pod: &PodView, name: &str, id: &str) -> Result<(), Error> {
    let slot = shared.ctx.stops.take(&pod.namespace).await;
    let slot = slot.ok_or(Error::Withdrawn)?;
    slot.during(Box::pin(stop(shared, key, pod, name, id))).await
}

async fn stop(shared: &Shared, key: &Key, pod: &PodView, name: &str, id: &str) -> Result<(), Error> {
    let (scheme, bare) = observe::parts(id)?;
    let runtime = shared.runtime(scheme)?;
    if !shared.wanted(key, &pod.uid) {
        return Err(Error::Withdrawn);
    }
    let grace = seconds(pod.grace_seconds);
    let limit = grace * 2 + LEAST_GRACE + 3 * ANSWER;
    let what = format!(
        "restart of container {name} of Pod {}/{}",
        pod.namespace, pod.name
    );
    let _step = shared.ctx.health.progress.begin(super::NAME, what, limit);
    let status = runtime.container_status(bare).await?;
    let runs = |state| matches!(state, ContainerState::Running | ContainerState::Unknown);
    if !status.is_some_and(|status| runs(status.state) && observe::belongs(&status, pod, name)) {
        return Ok(());
    }
    tracing::info!(pod = %pod.name, namespace = pod.namespace, container = name, id, "restarting container for its new environment");
    // OpenKruise has the container's name where the ID belongs.
    let note = format!("Stopping containerID {scheme}://{name} by container meta restarter");
    tell(
        shared,
        pod,
        name,
        EventType::Normal,
        keys::EVENT_KILLING,
        "Restarting",
        note,
    );
    let begun = Instant::now();
    run_hook(shared, runtime.as_ref(), pod, name, bare, grace).await;
    let left = grace.saturating_sub(begun.elapsed()).max(LEAST_GRACE);
    runtime.stop_container(bare, left).await?;
    tracing::info!(pod = %pod.name, namespace = pod.namespace, container = name, id, "stopped container");
    Ok(())
}

/// Runs the hook that the container has, for at most its grace period; a failure is told and stops nothing.
async fn run_hook(
    shared: &Shared,
    runtime: &dyn Runtime,
    pod: &PodView,
    name: &str,
    id: &str,
    grace: Duration,
) {
    let Some(container) = pod.container(name) else {
        return;
    };
    let Some(hook) = container.pre_stop.as_ref().filter(|_| !grace.is_zero()) else {
        return;
    };
    let target = hook::Target {
        runtime,
        container: id,
        pod_uid: &pod.runtime_uid,
        host: pod.ips.first().cloned(),
        ports: &container.ports,
    };
    if let Err(error) = hook::run(hook, &target, grace).await {
        tracing::warn!(pod = %pod.name, namespace = pod.namespace, container = name, %error, "preStop hook failed");
        let note = format!("PreStop hook of container {name} failed: {error}");
        let reason = keys::EVENT_FAILED_PRE_STOP_HOOK;
        tell(shared, pod, name, EventType::Warning, reason, "PreStop", note);
    }
}

fn tell(
    shared: &Shared,
    pod: &PodView,
    container: &str,
    type_: EventType,
    reason: &str,
    action: &str,
    note: String,
) {
    let events = &shared.ctx.cluster.events;
    events.publish(pod.reference(container), type_, reason, action, note);
}
