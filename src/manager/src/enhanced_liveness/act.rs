//! The writes: requests that restart containers, and events.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::index::WorkloadKey;
use super::observe::{CachedPod, Observed};
use super::plan::{
    Budget, Failure, REQUEST_TTL_SECONDS, WaitReason, default_budget, request_deadline, request_name,
};
use super::state::{ControllerState, lock};
use crate::Context;
use crate::object_reference::object_reference;
use crate::view::PodView;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestContainer as RequestedContainer,
    ContainerRecreateRequestSpec, ContainerRecreateRequestStrategy,
};
use kruise_api::keys;
use kruise_api::owner::Owner;
use kruise_api::unconfirmed::Unconfirmed;
use kruise_cluster::{Error, EventType, Key, write};
use kruise_ops::metrics::metrics;
use kruise_workload::limits::max_unavailable;

/// Pause before a refused restart is tried again: it succeeds after a change of a quota, a policy or a role.
const REFUSED_RETRY: Duration = Duration::from_secs(30);
/// The same after a denial that may end soon: a webhook says so with its code.
const DENIED_RETRY: Duration = Duration::from_secs(5);

/// The limits of a workload with so many Pods.
pub fn budget(ctx: &Context, workload: &WorkloadKey, pods: usize) -> Budget {
    let owner = &workload.workload.owner;
    let key = Key::namespaced(workload.namespace.as_str(), owner.name.as_str());
    let set = ctx.stores.clone_sets.get(&key);
    let set = set.filter(|set| Owner::clone_set(&set.metadata) == *owner);
    let Some(set) = set.and_then(|set| set.parse().ok()) else {
        return default_budget(pods);
    };
    Budget {
        replicas: set.spec.desired_replicas().into(),
        max_unavailable: max_unavailable(&set.spec).max(1),
    }
}

/// Creates the requests. One that cannot be created keeps no other Pod from its restart.
///
/// # Errors
/// The first one, when a request to the API server fails.
pub async fn restart(
    shared: &ControllerState,
    observed: &Observed,
    restarts: &[(Key, Failure)],
) -> Result<(), Error> {
    let mut first = Ok(());
    let (mut all_refused, mut is_unanswered) = (false, false);
    for (key, failure) in restarts {
        let Some(pod) = observed.cached.get(key) else {
            continue;
        };
        let request = key.with_name(&request_name(&pod.view.uid, &failure.container_id));
        let pause = |delay: Duration| {
            let id = (pod.view.uid.clone(), failure.container_id.clone());
            lock(&shared.refused).insert(id, Instant::now() + delay);
        };
        if all_refused {
            shared.manager.restarts.plan().forget(&request);
            pause(REFUSED_RETRY);
            continue;
        }
        if is_unanswered {
            // The next one would wait as long; all are planned again.
            shared.manager.restarts.plan().forget(&request);
            continue;
        }
        let result = async {
            for unfinished in &pod.unfinished {
                let deleted = delete_request(shared, key, unfinished).await;
                deleted.inspect_err(|_| shared.manager.restarts.plan().forget(&request))?;
            }
            create_request(shared, key, &pod.view, failure).await
        };
        let result = result.await;
        match &result {
            // It is about this Pod, whatever its code.
            Err(error) if error.denied() && error.retryable() => pause(DENIED_RETRY),
            Err(error) if error.retryable() => is_unanswered = true,
            Err(error) => {
                pause(REFUSED_RETRY);
                all_refused = error.refuses_all();
            }
            Ok(()) => {}
        }
        first = first.and(result);
    }
    first
}

/// Deletes a request that waits for a container to be ready that will not be: the daemon would not begin another one.
async fn delete_request(
    shared: &ControllerState,
    pod: &Key,
    request: &ContainerRecreateRequest,
) -> Result<(), Error> {
    let name = request.metadata.name.as_deref().unwrap_or_default();
    let uid = request.metadata.uid.as_deref().unwrap_or_default();
    match write::delete(&shared.manager.api::<ContainerRecreateRequest>(pod), name, uid).await {
        Err(error) if error.not_found() || error.conflict() => Ok(()),
        result => result.map(|()| {
            tracing::info!(%pod, request = name, "deleted the request: its container will not be ready");
        }),
    }
}

async fn create_request(
    shared: &ControllerState,
    key: &Key,
    pod: &PodView,
    failure: &Failure,
) -> Result<(), Error> {
    let ctx = &shared.manager;
    let request = request(key, pod, failure);
    let name = request.metadata.name.clone().unwrap_or_default();
    let created = write::create(&ctx.api::<ContainerRecreateRequest>(key), &request).await;
    // The watch shows it soon, also if it existed, or if there was no answer.
    let request_key = key.with_name(&name);
    let may_exist = created.as_ref().map_or_else(
        |error| error.already_exists() || error.outcome_unknown(),
        |_| true,
    );
    if !may_exist {
        ctx.restarts.plan().forget(&request_key);
    }
    if may_exist {
        let request = request_key;
        let now = shared.started_at.elapsed();
        let mut unconfirmed = lock(&shared.unconfirmed);
        unconfirmed.retain(|_, request| !request.has_expired(now));
        unconfirmed.insert(key.clone(), Unconfirmed::new(request, now));
    }
    let is_new = match created {
        Ok(_) => true,
        Err(error) if error.already_exists() => false,
        Err(error) => {
            if error.rejected() || error.internal() || error.denied() {
                report_refused(shared, key, pod, &failure.container, &error);
            }
            return Err(error);
        }
    };
    if is_new {
        metrics().liveness_restarts.inc();
        let container = &failure.container;
        tracing::info!(pod = %key, container, request = name, "restarting a container whose liveness probe failed");
        let note = format!("Container {container} failed liveness probe, will be restarted");
        let reference = container_reference(key, pod, container);
        let events = &ctx.cluster.events;
        events.publish(
            reference,
            EventType::Normal,
            keys::EVENT_KILLING,
            "Restarting",
            note,
        );
    }
    Ok(())
}

fn report_refused(shared: &ControllerState, key: &Key, pod: &PodView, container: &str, error: &Error) {
    let why = error.message();
    let note = format!(
        "Container {container} failed liveness probe; its ContainerRecreateRequest cannot be created: {why}"
    );
    let events = &shared.manager.cluster.events;
    events.publish(
        container_reference(key, pod, container),
        EventType::Warning,
        "LivenessRestartRefused",
        "Restarting",
        note,
    );
}

fn request(key: &Key, pod: &PodView, failure: &Failure) -> ContainerRecreateRequest {
    let liveness = pod.liveness.as_deref();
    let probe = liveness.and_then(|liveness| liveness.probe(&failure.container));
    let own_grace = probe.and_then(|probe| probe.probe.termination_grace_period_seconds);
    // The field of the probe has a wider type than ours in v1alpha1.
    let own_grace = own_grace.map(|grace| grace.clamp(1, i64::from(i32::MAX)));
    let pod_grace = liveness.map_or(0, |liveness| liveness.grace_period_seconds);
    let owner = OwnerReference {
        controller: Some(true),
        ..Owner::pod_reference(&key.name, &pod.uid)
    };
    let annotation = (keys::CRR_CONTAINER_ID.to_owned(), failure.container_id.clone());
    ContainerRecreateRequest {
        metadata: ObjectMeta {
            name: Some(request_name(&pod.uid, &failure.container_id)),
            annotations: Some([annotation].into()),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: ContainerRecreateRequestSpec {
            pod_name: key.name.clone(),
            containers: vec![RequestedContainer {
                name: failure.container.clone(),
                ..RequestedContainer::default()
            }],
            strategy: Some(ContainerRecreateRequestStrategy {
                termination_grace_period_seconds: own_grace,
                ..ContainerRecreateRequestStrategy::default()
            }),
            active_deadline_seconds: Some(request_deadline(own_grace.unwrap_or(pod_grace))),
            ttl_seconds_after_finished: Some(REQUEST_TTL_SECONDS),
        },
        status: None,
    }
}

/// One event for each container whose restart begins to wait, and the metric.
pub fn report_waiting(
    shared: &ControllerState,
    workload: &WorkloadKey,
    observed: &Observed,
    waiting: &[(Key, Failure, WaitReason)],
) {
    let mut now_waiting = BTreeSet::new();
    let mut all = lock(&shared.waiting);
    let before = all.remove(workload).unwrap_or_default();
    for (key, failure, reason) in waiting {
        let Some(CachedPod { view: pod, .. }) = observed.cached.get(key) else {
            continue;
        };
        let id = (pod.uid.clone(), failure.container_id.clone());
        if !before.contains(&id) {
            let container = &failure.container;
            let set = format!("{} {}", workload.workload.kind, workload.workload.owner.name);
            let why = match reason {
                WaitReason::Unavailable(number) => format!("{number} unavailable Pods of {set}"),
                WaitReason::Restarting(number) => format!("{number} Pods of {set} that are being restarted"),
            };
            let note = format!("Container {container} failed liveness probe; its restart waits for {why}");
            let reference = container_reference(key, pod, container);
            let events = &shared.manager.cluster.events;
            events.publish(
                reference,
                EventType::Warning,
                "LivenessRestartWaiting",
                "Waiting",
                note,
            );
        }
        now_waiting.insert(id);
    }
    if !now_waiting.is_empty() {
        all.insert(workload.clone(), now_waiting);
    }
    let number: usize = all.values().map(BTreeSet::len).sum();
    let number = i64::try_from(number).unwrap_or(i64::MAX);
    metrics().liveness_restarts_waiting.set(number);
}

/// One event for each Pod whose annotation cannot be used as a whole.
pub fn report_unusable(shared: &ControllerState, workload: &WorkloadKey, observed: &Observed) {
    let mut all = lock(&shared.reported);
    let before = all.remove(workload).unwrap_or_default();
    let mut reported = BTreeSet::new();
    for (key, CachedPod { view: pod, .. }) in &observed.cached {
        let unusable = pod.liveness.as_ref().map(|liveness| &liveness.unusable);
        let Some(unusable) = unusable.filter(|unusable| !unusable.is_empty()) else {
            continue;
        };
        if !before.contains(&pod.uid) {
            let note = format!("These liveness probes are not run: {}", unusable.join("; "));
            let reference = object_reference("v1", "Pod", key, &pod.uid);
            let events = &shared.manager.cluster.events;
            events.publish(
                reference,
                EventType::Warning,
                "InvalidLivenessProbe",
                "Probing",
                note,
            );
        }
        reported.insert(pod.uid.clone());
    }
    if !reported.is_empty() {
        all.insert(workload.clone(), reported);
    }
}

fn container_reference(key: &Key, pod: &PodView, container: &str) -> ObjectReference {
    ObjectReference {
        field_path: Some(format!("spec.containers{{{container}}}")),
        ..object_reference("v1", "Pod", key, &pod.uid)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kube::client::Body;
    use serde_json::json;

    use super::*;

    /// A webhook chooses the code of its denial: that of one Pod keeps no other from its restart.
    #[tokio::test]
    async fn denial_is_about_one_pod() {
        let denied = "admission webhook \"w\" denied the request: not this Pod";
        for (code, message, tried, paused) in [
            (500_u16, denied, 2, 2),
            (403, denied, 2, 2),
            (403, "exceeded quota: crr, requested: 1", 1, 2),
            (500, "failed calling webhook \"w\": no endpoints", 1, 0),
        ] {
            let count = Arc::new(AtomicUsize::new(0));
            let counter = Arc::clone(&count);
            let answer = json!({ "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code,
                "reason": "Reason", "message": message });
            let service = tower::service_fn(move |request: http::Request<Body>| {
                // The others are events.
                if request.uri().path().ends_with("/containerrecreaterequests") {
                    counter.fetch_add(1, Ordering::Relaxed);
                }
                let response = http::Response::builder().status(code);
                let response = response.body(Body::from(answer.to_string().into_bytes()));
                async { response }
            });
            let shared = ControllerState::new(Context::for_test(kube::Client::new(service, "default")));
            let failure = Failure {
                container: "app".to_owned(),
                container_id: "c://1".to_owned(),
                since: None,
            };
            let keys = ["a", "b"].map(|name| Key::namespaced("n", name));
            let cached = keys.clone().map(|key| {
                let view = PodView {
                    uid: key.name.clone(),
                    ..PodView::default()
                };
                let pod = CachedPod {
                    view: Arc::new(view),
                    unfinished: Vec::new(),
                };
                (key, pod)
            });
            let observed = Observed {
                cached: cached.into(),
                ..Observed::default()
            };
            let restarts = keys.map(|key| (key, failure.clone()));
            restart(&shared, &observed, &restarts).await.unwrap_err();
            assert_eq!(count.load(Ordering::Relaxed), tried, "{code} {message}");
            assert_eq!(lock(&shared.refused).len(), paused, "{code} {message}");
            let is_unknown = !lock(&shared.unconfirmed).is_empty();
            assert_eq!(is_unknown, paused == 0, "{code} {message}");
        }
    }
}
