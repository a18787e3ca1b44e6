//! Tells the API server, the events, the metrics and the control API what happened.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use jiff::{RoundMode, Timestamp, TimestampRound, Unit};
use kube::Api;
use serde_json::{Map, Value, json};

use super::observe;
use super::plan::{Observed, Plan, PodSight, Request, RuntimeSight, Step, Write, bare};
use crate::live;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase,
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
pub async fn write(cluster: &Cluster, node: &str, request: &Request, write: &Write) -> Written {
    let api: Api<ContainerRecreateRequest> = Api::namespaced(cluster.client.clone(), &request.namespace);
    let result = write::patch_status_merge(
        &api,
        &request.name,
        &patch(request, write, node, cluster.clock.now()),
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
fn patch(request: &Request, write: &Write, node: &str, now: Timestamp) -> Value {
    let mut status = write.status.clone();
    status.conditions.clone_from(&request.status.conditions);
    if let Some(at) = &mut status.completion_time {
        at.0 = whole_second(at.0);
    }
    status.conclude(node);
    if let (None, Some(reason)) = (&status.completion_time, write.waits) {
        status.wait(reason, status.message.clone().unwrap_or_default(), now);
    }
    let mut fields = Map::new();
    let mut set = |field: &str, value: Value| fields.insert(field.to_owned(), value);
    set("phase", json!(status.phase));
    set("message", json!(status.message));
    set("containerRecreateStates", json!(status.container_recreate_states));
    if let Some(at) = &status.completion_time {
        set("completionTime", json!(at));
    }
    if status.conditions != request.status.conditions {
        set("conditions", json!(status.conditions));
    }
    if !status.container_status_snapshot.is_empty() {
        set("containerStatusSnapshot", json!(status.container_status_snapshot));
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
    let phase = match (view, &request.status.phase) {
        (Some(view), _) if view.wait.is_none() => Phase::Recreating,
        (_, Phase::Other(_)) => Phase::Pending,
        (_, phase) => phase.clone(),
    };
    let steps = view.map(|view| view.containers.as_slice()).unwrap_or_default();
    live::Recreate {
        namespace: request.namespace.clone(),
        name: request.name.clone(),
        pod: request.pod_name.clone(),
        phase: phase.to_string(),
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
        .state(name)
        .and_then(|state| state.container_id.clone());
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
        step: step.phase().to_string(),
        waits_for: (!matches!(step, Step::Succeeded)).then(|| step.to_string()),
        new_container_id: newest.filter(|id| old.as_deref().is_some_and(|old| bare(old) != bare(id))),
        old_container_id: old,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recreate::plan::{Urgency, Wait};
    use kruise_api::container_recreate_request::ContainerRecreateRequestStatus;

    #[test]
    fn a_request_that_waits_has_a_condition_with_its_message() {
        let wait = Wait::Queued {
            behind: "first".to_owned(),
        };
        let write = |message: Option<String>, waits| Write {
            request: String::new(),
            status: ContainerRecreateRequestStatus {
                message,
                ..ContainerRecreateRequestStatus::default()
            },
            waits,
            urgency: Urgency::Now,
        };
        let waits = write(Some(wait.to_string()), wait.reason());
        let written = patch(&Request::default(), &waits, "n", Timestamp::UNIX_EPOCH);
        let condition = &written["status"]["conditions"][0];
        assert_eq!(
            (&condition["type"], &condition["reason"]),
            (&json!("Waiting"), &json!("Queued"))
        );
        assert_eq!(condition["message"], written["status"]["message"]);

        let conditions = written["status"]["conditions"].clone();
        let mut runs = write(None, None);
        runs.status.conditions = serde_json::from_value(conditions).unwrap_or_default();
        let waiting = Request {
            status: runs.status.clone(),
            ..Request::default()
        };
        let written = patch(&waiting, &runs, "n", Timestamp::UNIX_EPOCH);
        assert_eq!(written["status"]["conditions"], json!([]));
    }
}
