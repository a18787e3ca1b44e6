//! The writes: requests that stop sidecars, and the phase of a Pod.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use serde_json::json;

use super::plan::{EndPhase, MAX_REQUESTS, Step, completion, ending_job, plan, request_deadline};
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

/// Whether a daemon runs on the Pod's node, so that a request is executed.
pub fn has_daemon(ctx: &Context, pod: &PodView) -> bool {
    let node = pod.node.as_deref().map(Key::cluster_scoped);
    let node = node.and_then(|node| ctx.stores.nodes.get(&node));
    node.is_some_and(|node| !node.is_virtual())
}

/// Name of the Pod's first request, which is OpenKruise's, or of a later one.
fn request_name(uid: &str, index: usize) -> String {
    match index {
        0 => format!("{SIDECAR_TERMINATION_PREFIX}{uid}"),
        _ => format!("{SIDECAR_TERMINATION_PREFIX}{uid}-{}", index + 1),
    }
}

/// When the requests that were created for the Pod ended, if they have.
pub fn requests(ctx: &Context, pod: &Key, uid: &str) -> Vec<Option<Timestamp>> {
    let find = |index| {
        let key = Key {
            namespace: pod.namespace.clone(),
            name: request_name(uid, index),
        };
        ctx.stores.requests.get(&key)
    };
    (0..MAX_REQUESTS)
        .map_while(find)
        .map(|request| completion(&request))
        .collect()
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
    index: usize,
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
            name: Some(request_name(uid, index)),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec,
        status: None,
    };
    match write::create(&ctx.api::<ContainerRecreateRequest>(pod), &request).await {
        // The watch shows it soon.
        Err(error) if error.already_exists() => return Ok(()),
        result => drop(result?),
    }
    let note = format!(
        "Kruise SidecarTerminator is trying to terminate sidecar [{}] using crr",
        containers.join(" ")
    );
    tracing::info!(%pod, ?containers, "stops the sidecars of a Pod whose main containers have ended");
    ctx.cluster.events.publish(
        object_reference("v1", "Pod", pod, uid),
        EventType::Normal,
        "SidecarTerminator",
        "Terminating",
        note,
    );
    Ok(())
}

/// Sets phase and condition of a Pod that has not ended.
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
    let is_still_due = ending_job(&view).is_some_and(|job| {
        plan(
            job,
            view.terminal,
            &requests(ctx, key, uid),
            ctx.cluster.clock.now(),
        ) == Step::SetPhase(phase)
    });
    if view.uid != uid || !is_still_due {
        return Ok(());
    }
    let phase = match phase {
        EndPhase::Succeeded => "Succeeded",
        EndPhase::Failed => "Failed",
    };
    let now = ctx.cluster.clock.now();
    let condition = pod_condition(keys::SIDECAR_TERMINATED, true, "", TERMINATED_MESSAGE, now);
    let patch = json!({
        "metadata": { "uid": uid, "resourceVersion": pod.meta().resource_version },
        "status": { "phase": phase, "conditions": [condition] },
    });
    match write::patch_status_strategic(&api, &key.name, &patch).await {
        Err(error) if error.not_found() => Ok(()),
        result => {
            result?;
            tracing::info!(pod = %key, phase, "set the phase of a Pod whose main containers have ended");
            Ok(())
        }
    }
}
