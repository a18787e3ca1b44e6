//! Tells the API server, the events, the metrics and the control API what happened.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use jiff::{RoundMode, Timestamp, TimestampRound, Unit};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Api;
use serde_json::{Map, Value, json};

use super::observe;
use super::plan::{Observed, Phase, Plan, PodSight, Request, RuntimeSight, Status, Step, bare};
use crate::live;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestContainerRecreateState, ContainerRecreateRequestPhase,
    ContainerRecreateRequestStatus, ContainerRecreateRequestSyncContainerStatus,
};
use kruise_cluster::write::Stored;
use kruise_cluster::{self as cluster, Cluster, Key, write};

/// What became of a status that was to be written.
pub enum Written {
    /// The API server has it; this is the request now.
    Stored(Box<Request>),
    /// Somebody else has written in between; this is the request now.
    Stale(Box<Request>),
    /// The request does not exist any more.
    Gone,
    /// The API server would not, or could not be reached.
    Failed(cluster::Error),
}

/// Writes a status on top of the version that the decision was made on.
pub async fn write(cluster: &Cluster, node: &str, request: &Request, status: &Status) -> Written {
    let api: Api<ContainerRecreateRequest> = Api::namespaced(cluster.client.clone(), &request.namespace);
    let result = write::patch_status_merge(
        &api,
        &request.name,
        &patch(request, status, node, cluster.clock.now()),
    )
    .await;
    match result.and_then(Stored::object).map(observe::request) {
        Ok(Some(stored)) if stored.uid == request.uid => Written::Stored(Box::new(stored)),
        Ok(_) => Written::Gone,
        Err(error) if error.not_found() => Written::Gone,
        Err(error) if error.conflict() => match write::get(&api, &request.name).await {
            Ok(object) => match object.and_then(observe::request) {
                Some(newer) if newer.uid == request.uid => Written::Stale(Box::new(newer)),
                _ => Written::Gone,
            },
            Err(error) => Written::Failed(error),
        },
        Err(error) => Written::Failed(error),
    }
}

/// The fields that are ours, and the conditions where one of ours changes.
fn patch(request: &Request, status: &Status, node: &str, now: Timestamp) -> Value {
    let states: Vec<_> = status
        .states
        .iter()
        .map(|state| ContainerRecreateRequestContainerRecreateState {
            name: state.name.clone(),
            phase: word(state.phase),
            message: some(&state.message),
            is_killed: state.killed,
            container_id: state.target.clone(),
        })
        .collect();
    let mut fields = Map::new();
    let mut set = |field: &str, value: Value| fields.insert(field.to_owned(), value);
    set("phase", json!(word(status.phase)));
    set("message", json!(some(&status.message)));
    set("containerRecreateStates", json!(states));
    let mut concluded = ContainerRecreateRequestStatus {
        completion_time: status.completed.map(|at| Time(whole_second(at))),
        message: some(&status.message),
        container_recreate_states: states,
        conditions: request.conditions.clone(),
        ..ContainerRecreateRequestStatus::default()
    };
    concluded.conclude(node);
    if let (None, Some(reason)) = (status.completed, status.waits) {
        concluded.wait(reason, status.message.clone(), now);
    }
    if let Some(at) = &concluded.completion_time {
        set("completionTime", json!(at));
    }
    if concluded.conditions != request.conditions {
        set("conditions", json!(concluded.conditions));
    }
    if !status.snapshot.is_empty() {
        let snapshot: Vec<_> = status
            .snapshot
            .iter()
            .map(|entry| ContainerRecreateRequestSyncContainerStatus {
                name: entry.name.clone(),
                ready: entry.ready,
                restart_count: entry.restart_count,
                container_id: some(&entry.container_id),
            })
            .collect();
        set("containerStatusSnapshot", json!(snapshot));
    }
    json!({"metadata": {"resourceVersion": request.resource_version}, "status": fields})
}

/// Other clients of the API keep no fractions of a second.
fn whole_second(at: Timestamp) -> Timestamp {
    at.round(
        TimestampRound::new()
            .smallest(Unit::Second)
            .mode(RoundMode::Trunc),
    )
    .unwrap_or(at)
}

fn some(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

/// The word of a phase on the wire.
pub fn word(phase: Phase) -> ContainerRecreateRequestPhase {
    match phase {
        // The plan writes no empty phase.
        Phase::Empty | Phase::Pending => ContainerRecreateRequestPhase::Pending,
        Phase::Recreating => ContainerRecreateRequestPhase::Recreating,
        Phase::Succeeded => ContainerRecreateRequestPhase::Succeeded,
        Phase::Failed => ContainerRecreateRequestPhase::Failed,
        Phase::Completed => ContainerRecreateRequestPhase::Completed,
    }
}

/// What the control API shows, Pod by Pod.
#[derive(Default)]
pub struct Board {
    pods: Mutex<BTreeMap<Key, Vec<live::Recreate>>>,
}

impl Board {
    /// Shows what the requests for one Pod are at; nothing takes the Pod off.
    pub fn show(&self, live: &live::Live, key: &Key, rows: Vec<live::Recreate>) {
        let mut pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        let old = if rows.is_empty() {
            pods.remove(key)
        } else {
            pods.insert(key.clone(), rows.clone())
        };
        if old.unwrap_or_default() == rows {
            return;
        }
        let all: Vec<live::Recreate> = pods.values().flatten().cloned().collect();
        kruise_ops::metrics::metrics()
            .recreate_active
            .set(i64::try_from(all.len()).unwrap_or(i64::MAX));
        live.recreates.send_replace(all);
    }
}

/// What one request is at, for the control API.
pub fn row(request: &Request, plan: &Plan, seen: &Observed, seen_at: Option<Timestamp>) -> live::Recreate {
    let view = plan.steps.iter().find(|view| view.request == request.uid);
    let phase = match (view, request.status.phase) {
        (Some(view), _) if view.wait.is_none() => Phase::Recreating,
        (_, phase) => phase,
    };
    let steps = view.map(|view| view.containers.as_slice()).unwrap_or_default();
    live::Recreate {
        namespace: request.namespace.clone(),
        name: request.name.clone(),
        pod: request.pod_name.clone(),
        phase: word(phase).to_string(),
        waits_for: view.and_then(|view| view.wait.as_ref()).map(ToString::to_string),
        containers: steps
            .iter()
            .map(|(name, step)| container(request, name, step, seen))
            .collect(),
        seen_at,
        deadline: super::plan::deadline(request),
    }
}

fn container(request: &Request, name: &str, step: &Step, seen: &Observed) -> live::RecreateContainer {
    let recorded = request
        .containers
        .iter()
        .find(|wanted| wanted.name == name)
        .and_then(|w| w.recorded.clone());
    let stored = request
        .status
        .states
        .iter()
        .find(|state| state.name == name)
        .and_then(|s| s.target.clone());
    let old = stored.or(recorded);
    let newest = match (&seen.runtime, &seen.pod) {
        (RuntimeSight::Seen { scheme, containers }, _) => containers
            .iter()
            .find(|seen| seen.name == name)
            .map(|seen| format!("{scheme}://{}", seen.id)),
        (_, PodSight::Here(pod)) => pod
            .container(name)
            .and_then(|view| view.status.as_ref())
            .map(|status| status.container_id.clone()),
        _ => None,
    };
    live::RecreateContainer {
        name: name.to_owned(),
        step: word(step.phase()).to_string(),
        waits_for: (!matches!(step, Step::Succeeded)).then(|| step.to_string()),
        new_container_id: newest.filter(|id| old.as_deref().is_some_and(|old| bare(old) != bare(id))),
        old_container_id: old,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recreate::plan::Wait;

    #[test]
    fn a_request_that_waits_has_a_condition_with_its_message() {
        let wait = Wait::Queued {
            behind: "first".to_owned(),
        };
        let status = Status {
            message: wait.to_string(),
            waits: wait.reason(),
            ..Status::default()
        };
        let written = patch(&Request::default(), &status, "n", Timestamp::UNIX_EPOCH);
        let condition = &written["status"]["conditions"][0];
        assert_eq!(
            (&condition["type"], &condition["reason"]),
            (&json!("Waiting"), &json!("Queued"))
        );
        assert_eq!(condition["message"], written["status"]["message"]);

        let stored = written["status"]["conditions"].clone();
        let waiting = Request {
            conditions: serde_json::from_value(stored).unwrap_or_default(),
            ..Request::default()
        };
        let runs = patch(&waiting, &Status::default(), "n", Timestamp::UNIX_EPOCH);
        assert_eq!(runs["status"]["conditions"], json!([]));
    }
}
