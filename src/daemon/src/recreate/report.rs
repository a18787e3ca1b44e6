//! Reports to the API server, events, metrics and the control API.

use std::sync::Arc;

use jiff::Timestamp;
use kube::Api;
use serde_json::{Value, json};

use super::observe;
use super::plan::{
    ContainerStep, Observed, PodObservation, RecreateRequest, RequestProgress, RuntimeObservation,
    StatusWrite, strip_scheme,
};
use crate::live::{self, LiveState};
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase,
};
use kruise_api::json::set;
use kruise_api::time::truncate_to_second;
use kruise_cluster::write::Stored;
use kruise_cluster::{self as cluster, Cluster, Key, write};

/// The result of a status write.
pub enum StatusWriteResult {
    /// Stored; this is the request now.
    Stored(Arc<RecreateRequest>),
    /// Only read, for example because another writer changed it in between; this is the request now.
    Stale(Arc<RecreateRequest>),
    /// The request no longer exists.
    NotFound,
    /// The API server refused the call or could not be reached.
    Failed(cluster::Error),
}

/// Writes a status on top of the resource version that the decision was based on.
pub async fn write_status(cluster: &Cluster, node: &str, write: &StatusWrite) -> StatusWriteResult {
    let request = &write.request;
    let api: Api<ContainerRecreateRequest> = Api::namespaced(cluster.client.clone(), &request.namespace);
    let patch = status_patch(write, node, cluster.clock.now());
    let result = write::patch_status_merge(&api, &request.name, &patch).await;
    match result.and_then(Stored::object).map(observe::parse_request) {
        Ok(Some(stored)) if stored.uid == request.uid => StatusWriteResult::Stored(Arc::new(stored)),
        Ok(_) => StatusWriteResult::NotFound,
        Err(error) if error.not_found() => StatusWriteResult::NotFound,
        Err(error) if error.conflict() => read_request(cluster, request).await,
        Err(error) => StatusWriteResult::Failed(error),
    }
}

/// Reads the request from the API server.
pub async fn read_request(cluster: &Cluster, request: &RecreateRequest) -> StatusWriteResult {
    let api: Api<ContainerRecreateRequest> = Api::namespaced(cluster.client.clone(), &request.namespace);
    match write::get(&api, &request.name).await {
        Ok(object) => match object.and_then(observe::parse_request) {
            Some(newer) if newer.uid == request.uid => StatusWriteResult::Stale(Arc::new(newer)),
            _ => StatusWriteResult::NotFound,
        },
        Err(error) => StatusWriteResult::Failed(error),
    }
}

/// The status with its conditions, on top of the version that it was decided on.
fn status_patch(write: &StatusWrite, node: &str, now: Timestamp) -> Value {
    let request = &write.request;
    let mut status = write.status.clone();
    status.conditions.clone_from(&request.status.conditions);
    if let Some(at) = &mut status.completion_time {
        at.0 = truncate_to_second(at.0);
    }
    match (&status.completion_time, write.waiting_reason) {
        (None, Some(reason)) => status.set_waiting(reason, status.message.clone().unwrap_or_default(), now),
        _ => status.set_final_condition(node),
    }
    let mut patch = write::status_patch(&request.uid, &status, ["message", "conditions"]);
    let version = json!(request.resource_version);
    set(&mut patch, &["metadata", "resourceVersion"], version);
    patch
}

/// Replaces the rows of a Pod in the control API.
pub fn publish(live: &LiveState, key: &Key, rows: Vec<live::RecreateStatus>) {
    live.recreates.send_if_modified(|all| {
        let changed = live::replace_rows(all, rows, |row| {
            row.pod == key.name && Some(row.namespace.as_str()) == key.namespace.as_deref()
        });
        // The other rows keep their places.
        all.sort_by(|a, b| (&a.namespace, &a.pod).cmp(&(&b.namespace, &b.pod)));
        let active = i64::try_from(all.len()).unwrap_or(i64::MAX);
        kruise_ops::metrics::metrics().recreate_active.set(active);
        changed
    });
}

/// The status of one request for the control API.
pub fn recreate_status(
    request: &RecreateRequest,
    progress: Option<&RequestProgress>,
    observed: &Observed,
    first_seen_at: Option<Timestamp>,
) -> live::RecreateStatus {
    let phase = match (progress, &request.status.phase) {
        (Some(progress), _) if progress.wait_reason.is_none() => Phase::Recreating,
        (_, Phase::Other(_)) => Phase::Pending,
        (_, phase) => phase.clone(),
    };
    let steps = progress
        .map(|progress| progress.containers.as_slice())
        .unwrap_or_default();
    live::RecreateStatus {
        namespace: request.namespace.clone(),
        name: request.name.clone(),
        pod: request.pod_name.clone(),
        phase: phase.to_string(),
        waits_for: progress
            .and_then(|progress| progress.wait_reason.as_ref())
            .map(ToString::to_string),
        containers: steps
            .iter()
            .map(|(name, step)| container_status(request, name, step, observed))
            .collect(),
        first_seen_at,
        deadline: super::plan::deadline(request),
    }
}

fn container_status(
    request: &RecreateRequest,
    name: &str,
    step: &ContainerStep,
    observed: &Observed,
) -> live::RecreateContainerStatus {
    let recorded = request
        .containers
        .iter()
        .find(|container| container.name == name)
        .and_then(|w| w.recorded_id.clone());
    let stored = request
        .status
        .state(name)
        .and_then(|state| state.container_id.clone());
    // OpenKruise's own CRDs drop the ID in the status.
    let target = observed.state.targets.get(&request.container_key(name));
    let old = stored.or_else(|| target.cloned()).or(recorded);
    let newest = match (&observed.runtime, &observed.pod) {
        (RuntimeObservation::Listed { scheme, containers }, _) => containers
            .iter()
            .find(|container| container.name == name)
            .map(|seen| format!("{scheme}://{}", seen.id)),
        (_, PodObservation::Present(pod)) => pod
            .container(name)
            .and_then(|view| view.status.as_ref())
            .map(|status| status.container_id.clone()),
        _ => None,
    };
    let attempt = observed.state.attempt(request, name);
    live::RecreateContainerStatus {
        name: name.to_owned(),
        step: step.phase().to_string(),
        waits_for: (!matches!(step, ContainerStep::Succeeded)).then(|| step.to_string()),
        new_container_id: newest.filter(|id| {
            old.as_deref()
                .is_some_and(|old| strip_scheme(old) != strip_scheme(id))
        }),
        old_container_id: old,
        hook_done: attempt.is_some_and(|attempt| attempt.started_at.is_some() && attempt.hook_done),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use jiff::SignedDuration;

    use super::*;
    use crate::recreate::plan::{
        RecreateState, RequestedContainer, StopAttempt, StopStage, Urgency, WaitReason,
    };
    use kruise_api::container_recreate_request::{
        ContainerRecreateRequestStatus, ContainerRecreateRequestStrategy,
    };

    #[test]
    fn row_of_a_forced_request_has_the_container_that_is_stopped() {
        let request = RecreateRequest {
            strategy: ContainerRecreateRequestStrategy {
                force_recreate: true,
                ..ContainerRecreateRequestStrategy::default()
            },
            containers: vec![RequestedContainer {
                name: "main".to_owned(),
                recorded_id: Some("containerd://older".to_owned()),
            }],
            ..RecreateRequest::default()
        };
        let target = "containerd://newer".to_owned();
        let observed = Observed {
            requests: Vec::new(),
            pod: PodObservation::NotFound,
            runtime: RuntimeObservation::Unknown(String::new()),
            state: RecreateState {
                targets: [(request.container_key("main"), target.clone())].into(),
                ..RecreateState::default()
            },
        };
        let row = container_status(&request, "main", &ContainerStep::Stopping, &observed);
        assert_eq!(row.old_container_id, Some(target));
    }

    #[test]
    fn row_of_a_container_has_the_end_of_its_hook() {
        let request = RecreateRequest::default();
        for (started_at, hook_done) in [(None, false), (Some(Duration::ZERO), true)] {
            let attempt = StopAttempt {
                request_name: String::new(),
                started_at,
                hook_done: true,
                grace_spent: Duration::ZERO,
                failures: 0,
                stage: StopStage::Queued,
                in_progress: true,
            };
            let observed = Observed {
                requests: Vec::new(),
                pod: PodObservation::NotFound,
                runtime: RuntimeObservation::Unknown(String::new()),
                state: RecreateState {
                    attempts: [(request.container_key("main"), attempt)].into(),
                    ..RecreateState::default()
                },
            };
            let row = container_status(&request, "main", &ContainerStep::Stopping, &observed);
            assert_eq!(row.hook_done, hook_done);
        }
    }

    #[test]
    fn waiting_request_has_a_waiting_condition() {
        let wait = WaitReason::Queued {
            behind: Some("first".to_owned()),
        };
        let write = |request: RecreateRequest, message: Option<String>, waits| StatusWrite {
            status: ContainerRecreateRequestStatus {
                message,
                ..request.status.clone()
            },
            request: Arc::new(request),
            waiting_reason: waits,
            urgency: Urgency::Now,
        };
        let reason = Some(wait.condition_reason());
        let waiting_write = write(RecreateRequest::default(), Some(wait.to_string()), reason);
        let written = status_patch(&waiting_write, "n", Timestamp::UNIX_EPOCH);
        let condition = &written["status"]["conditions"][0];
        assert_eq!(
            (&condition["type"], &condition["reason"]),
            (&json!("Waiting"), &json!("Queued"))
        );
        assert_eq!(condition["message"], written["status"]["message"]);

        let conditions = written["status"]["conditions"].clone();
        let mut waiting = RecreateRequest {
            resource_version: "7".to_owned(),
            ..RecreateRequest::default()
        };
        waiting.status.conditions = serde_json::from_value(conditions.clone()).unwrap_or_default();
        let later = Timestamp::UNIX_EPOCH + SignedDuration::from_hours(1);
        let next_write = write(waiting.clone(), Some("behind another one".to_owned()), reason);
        let written = status_patch(&next_write, "n", later);
        let next_condition = &written["status"]["conditions"][0];
        assert_eq!(next_condition["message"], "behind another one");
        assert_eq!(
            next_condition["lastTransitionTime"], conditions[0]["lastTransitionTime"],
            "it has waited since then"
        );

        let written = status_patch(&write(waiting, None, None), "n", Timestamp::UNIX_EPOCH);
        let version_and_conditions = |written: &Value| {
            let version = written["metadata"]["resourceVersion"].clone();
            (version, written["status"].get("conditions").cloned())
        };
        assert_eq!(version_and_conditions(&written), (json!("7"), Some(Value::Null)));
    }
}
