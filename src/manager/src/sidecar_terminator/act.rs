//! The writes: requests that stop sidecars, and the phase of a Pod.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use serde_json::json;

use super::plan::{EndPhase, Request, Step, ending_job, plan, request_deadline, running};
use crate::Context;
use crate::object_reference::object_reference;
use crate::view::{JobPod, PodView, RawPod};
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestContainer as RequestedContainer,
    ContainerRecreateRequestFailurePolicyType as FailurePolicy, ContainerRecreateRequestSpec,
    ContainerRecreateRequestStrategy,
};
use kruise_api::keys::{self, SIDECAR_TERMINATION_PREFIX};
use kruise_api::owner::Owner;
use kruise_cluster::{Error, EventType, Key, write};
use kruise_workload::in_place::ready::pod_condition;

/// Seconds after its end when a request is deleted. Pods of finished Jobs may stay for long.
const REQUEST_TTL_SECONDS: i32 = 3600;
/// Message of condition `SidecarTerminated`; OpenKruise's.
const TERMINATED_MESSAGE: &str = "Terminated by Sidecar Terminator";

/// Whether a daemon runs on the Pod's node, so that a request is executed; `None` if the node is not known (yet).
pub fn has_daemon(ctx: &Context, pod: &PodView) -> Option<bool> {
    let node = pod.node.as_deref().map(Key::cluster_scoped);
    let node = node.and_then(|node| ctx.stores.nodes.get(&node));
    node.map(|node| !node.is_virtual())
}

/// Name of the Pod's request; OpenKruise's.
fn request_name(uid: &str) -> String {
    format!("{SIDECAR_TERMINATION_PREFIX}{uid}")
}

/// What is known of the request for the Pod.
pub fn request(ctx: &Context, pod: &Key, uid: &str) -> Request {
    let key = Key {
        namespace: pod.namespace.clone(),
        name: request_name(uid),
    };
    let request = ctx.stores.requests.get(&key);
    request.map_or(Request::Missing, |request| Request::from(&*request))
}

/// Creates a request that stops these containers of the Pod.
///
/// # Errors
/// When a request to the API server fails.
pub async fn create_request(
    ctx: &Context,
    pod: &Key,
    uid: &str,
    job: &JobPod,
    containers: &[Box<str>],
) -> Result<(), Error> {
    let owner = OwnerReference {
        controller: Some(true),
        ..Owner::pod_reference(&pod.name, uid)
    };
    let requested = containers.iter().map(|name| RequestedContainer {
        name: name.to_string(),
        ..RequestedContainer::default()
    });
    let spec = ContainerRecreateRequestSpec {
        pod_name: pod.name.clone(),
        containers: requested.collect(),
        strategy: Some(ContainerRecreateRequestStrategy {
            failure_policy: Some(FailurePolicy::Ignore),
            force_recreate: true,
            ..ContainerRecreateRequestStrategy::default()
        }),
        active_deadline_seconds: Some(request_deadline(job)),
        ttl_seconds_after_finished: Some(REQUEST_TTL_SECONDS),
    };
    let request = ContainerRecreateRequest {
        metadata: ObjectMeta {
            name: Some(request_name(uid)),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec,
        status: None,
    };
    match write::create(&ctx.api::<ContainerRecreateRequest>(pod), &request).await {
        // The watch shows it soon.
        Err(error) if error.already_exists() => return Ok(()),
        Err(error) if error.rejected() || error.internal() || error.denied() => {
            let note = format!(
                "Sidecars [{}] cannot be stopped, their ContainerRecreateRequest cannot be created: {}",
                containers.join(" "),
                error.message()
            );
            publish(
                ctx,
                pod,
                uid,
                (EventType::Warning, "SidecarTerminationRefused"),
                note,
            );
            return Err(error);
        }
        result => drop(result?),
    }
    let note = format!(
        "Kruise SidecarTerminator is trying to terminate sidecar [{}] using crr",
        containers.join(" ")
    );
    tracing::info!(%pod, ?containers, "stopping the sidecars of a Pod whose main containers have ended");
    publish(ctx, pod, uid, EVENT, note);
    Ok(())
}

/// Type and reason of OpenKruise's event.
const EVENT: (EventType, &str) = (EventType::Normal, "SidecarTerminator");

fn publish(ctx: &Context, pod: &Key, uid: &str, (type_, reason): (EventType, &str), note: String) {
    let pod = object_reference("v1", "Pod", pod, uid);
    let events = &ctx.cluster.events;
    events.publish(pod, type_, reason, "Terminating", note);
}

/// Sets phase and condition of a Pod that has not ended. Kubelet then stops what still runs.
///
/// # Errors
/// [`Error::conflict`] when the Pod changed in the meantime: retry.
pub async fn set_phase(ctx: &Context, key: &Key, uid: &str, phase: EndPhase) -> Result<(), Error> {
    let api = ctx.api::<RawPod>(key);
    let Some(pod) = write::get(&api, &key.name).await? else {
        return Ok(());
    };
    let view = PodView::from(&pod);
    // The watch may be behind.
    let now = ctx.cluster.clock.now();
    let is_due =
        |job: &&JobPod| plan(job, view.terminal, request(ctx, key, uid), now) == Step::SetPhase(phase);
    let Some(job) = ending_job(&view).filter(is_due) else {
        return Ok(());
    };
    if view.uid != uid {
        return Ok(());
    }
    let phase = match phase {
        EndPhase::Succeeded => "Succeeded",
        EndPhase::Failed => "Failed",
    };
    let condition = pod_condition(keys::SIDECAR_TERMINATED, true, "", TERMINATED_MESSAGE, now);
    // Of a change to the status alone kubelet takes note after up to a minute and a half. Until then, it would replace
    // the phase by one of the exit codes if a sidecar ended.
    let annotations = json!({ keys::SIDECARS_TERMINATED_AT: now });
    let patch = json!({
        "metadata": {
            "uid": uid, "resourceVersion": pod.meta().resource_version, "annotations": annotations,
        },
        "status": { "phase": phase, "conditions": [condition] },
    });
    match write::patch_status_strategic(&api, &key.name, &patch).await {
        Err(error) if error.not_found() => Ok(()),
        result => {
            result?;
            tracing::info!(pod = %key, phase, "set the phase of a Pod whose main containers have ended");
            let left = running(job, |_| true);
            if !left.is_empty() {
                let left = left.join(" ");
                let note =
                    format!("Kruise SidecarTerminator has set phase {phase}, kubelet stops sidecar [{left}]");
                publish(ctx, key, uid, EVENT, note);
            }
            Ok(())
        }
    }
}
