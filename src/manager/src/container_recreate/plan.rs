//! What the manager does about a ContainerRecreateRequest.
//!
//! The daemon carries requests out. The manager fills in what admission could not, makes the Pod unready,
//! ends requests whose daemon does not, and clears up. What our own daemon does by itself it is given
//! [`PATIENCE`] for, so that the two do not write the same thing.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::view::PodView;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase,
    ContainerRecreateRequestStatus as Status, ContainerRecreateRequestSyncContainerStatus as Snapshot,
    DEADLINE, GONE, NO_RESPONSE,
};
use kruise_api::keys;

/// How long the daemon is given for what it does by itself, if it is ours.
pub const PATIENCE: SignedDuration = SignedDuration::from_secs(1);
/// How long a daemon may take to look at a request.
pub const SILENCE: SignedDuration = SignedDuration::from_mins(1);

/// How long a daemon may take before that is said; one that is there takes a fraction of a second.
pub const UNHEARD: SignedDuration = SignedDuration::from_secs(5);

/// One thing to do. After it the request is looked at again.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// Set labels that admission did not set.
    Label(BTreeMap<String, String>),
    /// End the request: its status.
    Complete(Box<Status>),
    /// Say that no daemon has taken the request up: the conditions.
    Wait(Vec<Condition>),
    /// Say in conditions what another make of daemon says in its own fields alone.
    Conditions(Vec<Condition>),
    /// Add the finalizer that guards the Pod's not-ready key.
    Guard,
    /// Make the Pod unready, then say so.
    Hold,
    /// Say that the grace period runs, for a Pod that cannot be made unready.
    Grace,
    /// Write what the Pod says of the new containers.
    Snapshot(Vec<Snapshot>),
    /// Let the Pod go, then take off the finalizer and the active label, as far as they are there.
    Close {
        /// Whether the Pod is to be let go.
        release: bool,
    },
    /// Delete the request.
    Delete,
}

/// What to do now, and when to look again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// At most one thing.
    pub act: Option<Act>,
    /// When something will have to be done without any change.
    pub wake: Option<Timestamp>,
    /// What is being waited for, since when; given back with the next look.
    pub waiting: Option<Waiting>,
}

/// Something that the daemon is given time for.
#[derive(Clone, Debug, PartialEq)]
pub struct Waiting {
    /// What.
    pub what: What,
    /// Since when it has been so.
    pub since: Timestamp,
}

/// What the daemon is given time for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// To end a request whose Pod has gone.
    Gone,
    /// To write this snapshot.
    Snapshot(Vec<Snapshot>),
}

impl Plan {
    fn act(act: Act) -> Self {
        Self {
            act: Some(act),
            ..Self::default()
        }
    }
    fn at(wake: Option<Timestamp>) -> Self {
        Self {
            wake,
            ..Self::default()
        }
    }
}

/// What to do about one request.
#[must_use]
pub fn plan(
    request: &ContainerRecreateRequest,
    pod: Option<&PodView>,
    before: Option<&Waiting>,
    now: Timestamp,
) -> Plan {
    let status = request.status.clone().unwrap_or_default();
    if request.metadata.deletion_timestamp.is_some() || status.completion_time.is_some() {
        return ended(request, &status, now);
    }
    let Some(pod) = pod.filter(|p| !p.deleting && belongs(request, p)) else {
        return gone(request, &status, before, now);
    };
    let untouched = status.phase.as_str().is_empty();
    if let Some(message) = overdue(request, &status, now) {
        let mut status = status;
        if untouched && !status.unheard() {
            // Before it was time to say so.
            status.no_daemon(node(request), now);
        }
        return Plan::act(complete(request, status, message, now));
    }
    let limits = [silence(request, &status), deadline(request)];
    let wake = limits.into_iter().flatten().min();
    if let Some(labels) = missing_labels(request, pod) {
        return Plan::act(Act::Label(labels));
    }
    if untouched && !status.unheard() {
        let due = add(created(request), UNHEARD);
        if now < due {
            return Plan::at(wake.into_iter().chain([due]).min());
        }
        let mut status = status;
        status.no_daemon(node(request), now);
        return Plan::act(Act::Wait(status.conditions));
    }
    if !untouched && status.unheard() {
        return Plan::act(conclude(request, status));
    }
    if status.phase != Phase::Recreating {
        return Plan::at(wake);
    }
    if wants_grace(request) && !has_grace(&status) {
        return grace(request, pod);
    }
    let new = snapshot(request, &status, pod);
    // A state that names the container to replace is our daemon's, whose own writes carry the snapshot.
    let ours = status
        .container_recreate_states
        .iter()
        .any(|state| state.container_id.is_some());
    if ours || new.is_empty() || new == status.container_status_snapshot {
        return Plan::at(wake);
    }
    let (since, due) = patience(&What::Snapshot(new.clone()), before, now);
    if now >= due {
        return Plan::act(Act::Snapshot(new));
    }
    Plan {
        act: None,
        wake: wake.into_iter().chain([due]).min(),
        waiting: Some(Waiting {
            what: What::Snapshot(new),
            since,
        }),
    }
}

/// Since when something has been waited for, and until when.
fn patience(what: &What, before: Option<&Waiting>, now: Timestamp) -> (Timestamp, Timestamp) {
    let since = before.filter(|w| w.what == *what).map_or(now, |w| w.since);
    (since, add(since, PATIENCE))
}

fn ended(request: &ContainerRecreateRequest, status: &Status, now: Timestamp) -> Plan {
    let guarded = guarded(request);
    let deleting = request.metadata.deletion_timestamp.is_some();
    let closing = !deleting && label(request, keys::CRR_ACTIVE).is_some();
    if closing && (!status.concluded() || status.unheard()) {
        return Plan::act(conclude(request, status.clone()));
    }
    if guarded || closing {
        return Plan::act(Act::Close { release: guarded });
    }
    let ttl = request.spec.ttl_seconds_after_finished.map(i64::from);
    let (false, Some(ttl), Some(completed)) = (deleting, ttl, &status.completion_time) else {
        return Plan::default();
    };
    let expiry = add(completed.0, SignedDuration::from_secs(ttl));
    if now >= expiry {
        Plan::act(Act::Delete)
    } else {
        Plan::at(Some(expiry))
    }
}

fn gone(
    request: &ContainerRecreateRequest,
    status: &Status,
    before: Option<&Waiting>,
    now: Timestamp,
) -> Plan {
    let (since, due) = patience(&What::Gone, before, now);
    if now >= due {
        return Plan::act(complete(request, status.clone(), GONE, now));
    }
    let sooner = deadline(request).into_iter().chain([due]).min();
    Plan {
        act: None,
        wake: sooner.filter(|at| *at > now).or(Some(due)),
        waiting: Some(Waiting {
            what: What::Gone,
            since,
        }),
    }
}

fn grace(request: &ContainerRecreateRequest, pod: &PodView) -> Plan {
    if !pod.gate {
        return Plan::act(Act::Grace);
    }
    if !guarded(request) {
        return Plan::act(Act::Guard);
    }
    Plan::act(Act::Hold)
}

/// Whether the Pod is the one that the request was made for.
#[must_use]
pub fn belongs(request: &ContainerRecreateRequest, pod: &PodView) -> bool {
    label(request, keys::CRR_POD_UID).is_none_or(|uid| uid == pod.uid)
}

fn overdue(request: &ContainerRecreateRequest, status: &Status, now: Timestamp) -> Option<&'static str> {
    if silence(request, status).is_some_and(|at| now >= at) {
        return Some(NO_RESPONSE);
    }
    deadline(request).is_some_and(|at| now >= at).then_some(DEADLINE)
}

/// When a request that no daemon has looked at ends.
fn silence(request: &ContainerRecreateRequest, status: &Status) -> Option<Timestamp> {
    let silent = status.phase.as_str().is_empty();
    silent.then(|| add(created(request), SILENCE))
}

/// When the manager ends a request that takes too long.
fn deadline(request: &ContainerRecreateRequest) -> Option<Timestamp> {
    let seconds = request.spec.active_deadline_seconds?;
    let limit = SignedDuration::from_secs(seconds).saturating_add(PATIENCE);
    Some(add(created(request), limit))
}

fn created(request: &ContainerRecreateRequest) -> Timestamp {
    request
        .metadata
        .creation_timestamp
        .as_ref()
        .map_or(Timestamp::MAX, |t| t.0)
}

/// The status of a request that the manager ends: what was not done has failed.
fn complete(request: &ContainerRecreateRequest, mut status: Status, message: &str, now: Timestamp) -> Act {
    status.phase = Phase::Completed;
    status.completion_time = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now));
    status.message = Some(message.to_owned());
    for state in &mut status.container_recreate_states {
        if !matches!(state.phase, Phase::Succeeded | Phase::Failed) {
            state.phase = Phase::Failed;
            state.message = Some(message.to_owned());
        }
    }
    status.conclude(node(request));
    Act::Complete(Box::new(status))
}

/// The conditions that go with the rest of the status.
fn conclude(request: &ContainerRecreateRequest, mut status: Status) -> Act {
    status.conclude(node(request));
    Act::Conditions(status.conditions)
}

/// The node of the request's Pod, as far as the request tells.
fn node(request: &ContainerRecreateRequest) -> &str {
    label(request, keys::CRR_NODE_NAME).unwrap_or("the node")
}

/// The labels that daemons select requests by, as far as they are missing. They wait for the Pod's node.
fn missing_labels(request: &ContainerRecreateRequest, pod: &PodView) -> Option<BTreeMap<String, String>> {
    let node = pod.node.as_deref()?;
    let wanted = [
        (keys::CRR_ACTIVE, keys::TRUE.to_owned()),
        (keys::CRR_NODE_NAME, keys::node_label(node)),
        (keys::CRR_POD_UID, pod.uid.clone()),
    ];
    let missing: BTreeMap<String, String> = wanted
        .into_iter()
        .filter(|(key, _)| label(request, key).is_none())
        .map(|(key, value)| (key.to_owned(), value))
        .collect();
    (!missing.is_empty()).then_some(missing)
}

fn wants_grace(request: &ContainerRecreateRequest) -> bool {
    let strategy = request.spec.strategy.as_ref();
    strategy.is_some_and(|s| s.unready_grace_period_seconds.is_some())
}

fn has_grace(status: &Status) -> bool {
    status
        .conditions
        .iter()
        .any(|c| c.type_ == keys::PRE_RECREATE_GRACE && c.status == "True")
}

fn guarded(request: &ContainerRecreateRequest) -> bool {
    let finalizers = request.metadata.finalizers.iter().flatten();
    finalizers.into_iter().any(|f| f == keys::CRR_UNREADY_ACQUIRED)
}

fn label<'a>(request: &'a ContainerRecreateRequest, key: &str) -> Option<&'a str> {
    request.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// What the Pod says of containers that are not those of the request's creation, and run.
fn snapshot(request: &ContainerRecreateRequest, status: &Status, pod: &PodView) -> Vec<Snapshot> {
    let force = request.spec.strategy.as_ref().is_some_and(|s| s.force_recreate);
    let is_new = |name: &str, id: &str, restarts: i32| {
        let wanted = request.spec.containers.iter().find(|c| c.name == name)?;
        let state = status.container_recreate_states.iter().find(|s| s.name == name);
        let recorded = wanted.status_context.as_ref();
        // What the daemon noted is what it set out to replace; else it is what admission noted.
        let changed = match state.and_then(|s| s.container_id.as_ref()) {
            Some(target) => target != id,
            None => recorded.is_some_and(|r| r.container_id != id || restarts > r.restart_count),
        };
        // Under force the container may have been another one already before it was stopped.
        let stopped = state.is_some_and(|s| s.is_killed);
        (changed && (!force || stopped)).then_some(())
    };
    let running = pod.containers.iter().filter(|c| c.running && !c.id.is_empty());
    running
        .filter(|c| is_new(&c.name, &c.id, c.restarts).is_some())
        .map(|c| Snapshot {
            name: c.name.clone(),
            ready: c.ready,
            restart_count: c.restarts,
            container_id: Some(c.id.clone()),
        })
        .collect()
}

fn add(at: Timestamp, span: SignedDuration) -> Timestamp {
    at.checked_add(span).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests;
