//! ContainerRecreateRequest (v1beta1): restarts containers of one Pod in place.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerPort, LifecycleHandler};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::keys;
use super::schemas;
use super::string_enum::string_enum;

string_enum! {
    listed
    /// What a container's failure means for the request.
    ContainerRecreateRequestFailurePolicyType {
        /// The request ends.
        Fail,
        /// The request goes on with the next container.
        Ignore,
    }
}

string_enum! {
    listed
    /// How far a request or one of its containers is.
    ContainerRecreateRequestPhase {
        /// Not begun.
        Pending,
        /// Being recreated.
        Recreating,
        /// The new container runs (containers only).
        Succeeded,
        /// Given up (containers only).
        Failed,
        /// Ended, well or not (requests only).
        Completed,
    }
}

/// The phase of a request; it may be empty while a request has conditions and no daemon has started it.
fn phase_or_none(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = ContainerRecreateRequestPhase::json_schema(generator);
    if let Some(values) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        values.insert(0, json!(""));
    }
    schema
}

/// Pod and containers to recreate, and how.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1beta1",
    kind = "ContainerRecreateRequest",
    plural = "containerrecreaterequests",
    shortname = "crr",
    namespaced,
    status = "ContainerRecreateRequestStatus",
    derive = "PartialEq",
    doc = "Restarts containers of a Pod in place, without recreating the Pod."
)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestSpec {
    /// Name of the Pod, in the request's namespace. It must be active and on a node.
    pub pod_name: String,
    /// Containers to recreate, in this order if `strategy.orderedRecreate` is true.
    pub containers: Vec<ContainerRecreateRequestContainer>,
    /// How the containers are recreated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<ContainerRecreateRequestStrategy>,
    /// Seconds after its creation when the request ends, done or not; 3 or greater. Never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub active_deadline_seconds: Option<i64>,
    /// Seconds after its end when the request is deleted. Never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ttl_seconds_after_finished: Option<i32>,
}

/// One container to recreate. Everything but the name is filled in when the request is created.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestContainer {
    /// Name of a container, or of an init container that restarts always.
    pub name: String,
    /// The container's preStop hook; the daemon runs the one in the Pod. Read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::lifecycle_handler")]
    pub pre_stop: Option<LifecycleHandler>,
    /// Ports of the container that the hook refers to. Read-only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schemas::container_ports")]
    pub ports: Vec<ContainerPort>,
    /// What ran when the request was created. Read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status_context: Option<ContainerRecreateRequestContainerStatusContext>,
}

/// What ran when the request was created.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestContainerStatusContext {
    /// ID of the container, as `RUNTIME://ID`.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// Restart count at that time.
    pub restart_count: i32,
}

/// How to recreate containers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestStrategy {
    /// What happens after a container fails; Fail when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure_policy: Option<ContainerRecreateRequestFailurePolicyType>,
    /// One container after the other, each when the one before is done.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ordered_recreate: bool,
    /// Stop containers even if they were restarted since the request was created.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force_recreate: bool,
    /// Seconds that a container gets to stop, instead of the Pod's own grace period.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub termination_grace_period_seconds: Option<i64>,
    /// Seconds to wait before containers are stopped. During this time, a Pod with readiness gate KruisePodReady is not
    /// ready; any other Pod stays ready. No wait when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub unready_grace_period_seconds: Option<i64>,
    /// Seconds that a new container must run to count as recreated; 0 when absent.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0))]
    pub min_started_seconds: i32,
}

fn is_zero(number: &i32) -> bool {
    *number == 0
}

/// Observed state of a ContainerRecreateRequest.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestStatus {
    /// Pending, Recreating or Completed; empty until a daemon has taken the request up.
    #[schemars(schema_with = "phase_or_none")]
    pub phase: ContainerRecreateRequestPhase,
    /// When the request ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Why the request waits or failed, for humans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// State of each container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub container_recreate_states: Vec<ContainerRecreateRequestContainerRecreateState>,
    /// Container statuses of the Pod while they were recreated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub container_status_snapshot: Vec<ContainerRecreateRequestSyncContainerStatus>,
    /// Conditions; `PreRecreateGrace` is true once the Pod was made unready. Of ours are `Waiting` while the request
    /// waits, and at its end `Complete` or `Failed`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schemas::conditions")]
    pub conditions: Vec<Condition>,
}

impl Default for ContainerRecreateRequestStatus {
    /// An empty status: the empty phase means that no daemon has started the request.
    fn default() -> Self {
        Self {
            phase: ContainerRecreateRequestPhase::Other(String::new()),
            completion_time: None,
            message: None,
            container_recreate_states: Vec::new(),
            container_status_snapshot: Vec::new(),
            conditions: Vec::new(),
        }
    }
}

/// Condition type of a request that waits; ours.
pub const WAITING: &str = "Waiting";
/// Condition type of a request of which every container was recreated; ours.
pub const COMPLETE: &str = "Complete";
/// Condition type of every other finished request; ours.
pub const FAILED: &str = "Failed";
/// The most memory that the containers of a new request may take as JSON, in bytes: admission copies their `preStop`
/// hooks. With the rest of it, and its status, a request may take twice as much.
pub const MAX_REQUEST_BYTES: usize = 1 << 20;
/// The longest ID of a container, as in the schema of `statusContext`.
pub const MAX_CONTAINER_ID_BYTES: usize = 1024;
/// Message of a request whose Pod is deleted; upstream's.
pub const POD_GONE_MESSAGE: &str = "pod has gone";
/// Message of a request that no daemon has started; upstream's.
pub const NO_RESPONSE_MESSAGE: &str = "daemon has not responded for a long time";
/// Part of the message of a container that has ended for good.
pub const NOT_STARTED_AGAIN: &str = "kubelet does not start it again";

/// Whether the request of that name, which failed with that message, has stopped a sidecar for good. Under
/// `restartPolicy: Never` the sidecar is not started again; that is what such a request is for.
#[must_use]
pub fn is_sidecar_termination(name: &str, failure: &str) -> bool {
    name.starts_with(keys::SIDECAR_TERMINATION_PREFIX) && failure.contains(NOT_STARTED_AGAIN)
}

/// Message of a request that exceeded its deadline; upstream's.
pub const DEADLINE_MESSAGE: &str = "recreating has exceeded the activeDeadlineSeconds";
/// Prefix of the message of a request whose containers belong to no runtime of the node; upstream's.
pub const NO_RUNTIME_PREFIX: &str = "failed to find runtime service: ";
/// Reason of conditions of requests that no daemon has started.
pub const NO_DAEMON_REASON: &str = "NoDaemon";

/// Characters of container results that a condition contains.
const MAX_MESSAGE_CHARS: usize = 2000;

impl ContainerRecreateRequestPhase {
    /// Whether the phase is final.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Completed)
    }
}

impl ContainerRecreateRequest {
    /// States of the containers whose stop the daemon has begun, each with the ID of the container that it stops.
    pub fn stopped_containers(
        &self,
    ) -> impl Iterator<Item = (&ContainerRecreateRequestContainerRecreateState, &str)> {
        let states = self
            .status
            .iter()
            .flat_map(|status| &status.container_recreate_states);
        let killed = states.filter(|state| state.is_killed);
        killed.filter_map(move |state| {
            let mut requested = self.spec.containers.iter();
            let recorded = requested
                .find(|container| container.name == state.name)
                .and_then(|container| container.status_context.as_ref());
            let recorded = recorded.map(|context| &context.container_id);
            let id = state.container_id.as_ref().or(recorded)?;
            Some((state, id.as_str()))
        })
    }
}

impl ContainerRecreateRequestStatus {
    /// The state of a container.
    #[must_use]
    pub fn state(&self, container: &str) -> Option<&ContainerRecreateRequestContainerRecreateState> {
        let mut states = self.container_recreate_states.iter();
        states.find(|state| state.name == container)
    }

    /// Since when the Pod is not ready because of the request.
    #[must_use]
    pub fn unready_since(&self) -> Option<Timestamp> {
        let unready = |condition: &&Condition| {
            condition.type_ == keys::PRE_RECREATE_GRACE && condition.status == "True"
        };
        let unready = self.conditions.iter().find(unready)?;
        Some(unready.last_transition_time.0)
    }

    /// Adds condition `Waiting`, for a request on `node` that no daemon has started at `now`.
    pub fn set_waiting_for_daemon(&mut self, node: &str, now: Timestamp) {
        let message =
            format!("kruise-daemon on node {node} has not started this request; is it running there?");
        self.set_waiting(NO_DAEMON_REASON, message, now);
    }

    /// Adds condition `Waiting`.
    pub fn set_waiting(&mut self, reason: &str, message: String, now: Timestamp) {
        self.set_condition(WAITING, reason, message, now);
    }

    /// Whether condition `Waiting` reports that no daemon has started the request.
    #[must_use]
    pub fn waits_for_daemon(&self) -> bool {
        let is_waiting_for_daemon =
            |condition: &Condition| condition.type_ == WAITING && condition.reason == NO_DAEMON_REASON;
        self.conditions.iter().any(is_waiting_for_daemon)
    }

    /// The condition that reports how the request ended.
    #[must_use]
    pub fn final_condition(&self) -> Option<&Condition> {
        let mut conditions = self.conditions.iter();
        conditions.find(|condition| [COMPLETE, FAILED].contains(&condition.type_.as_str()))
    }

    /// Removes condition `Waiting`, and adds condition `Complete` or `Failed` if the request has finished; `node` is
    /// that of its Pod.
    pub fn set_final_condition(&mut self, node: &str) {
        let waited = self.waits_for_daemon() && self.container_recreate_states.is_empty();
        self.conditions.retain(|condition| condition.type_ != WAITING);
        let Some(Time(now)) = self.completion_time else {
            return;
        };
        let message = self.message.clone().unwrap_or_default();
        let succeeded = |state: &&ContainerRecreateRequestContainerRecreateState| {
            state.phase == ContainerRecreateRequestPhase::Succeeded
        };
        let states = &self.container_recreate_states;
        if message.is_empty() && !states.is_empty() && states.iter().all(|state| succeeded(&state)) {
            let text = states.iter().map(|state| {
                if state.is_killed {
                    format!("{} was recreated", state.name)
                } else {
                    format!(
                        "{} had already been replaced after this request was created; nothing to do",
                        state.name
                    )
                }
            });
            let text = format!("{node}: {}", text.collect::<Vec<_>>().join(", "));
            return self.set_condition(COMPLETE, "Recreated", text, now);
        }
        let reason = match message.as_str() {
            _ if waited => NO_DAEMON_REASON,
            POD_GONE_MESSAGE => "PodGone",
            NO_RESPONSE_MESSAGE => NO_DAEMON_REASON,
            DEADLINE_MESSAGE => "DeadlineExceeded",
            text if text.starts_with(NO_RUNTIME_PREFIX) => "RuntimeNotFound",
            _ => "ContainerFailed",
        };
        let mut text = vec![message.clone()];
        if reason == NO_DAEMON_REASON {
            text.insert(0, "kruise-daemon did not start this request".to_owned());
        }
        let failed = states.iter().filter(|state| !succeeded(state));
        text.extend(failed.filter_map(|state| {
            let why = state.message.as_ref().filter(|why| **why != message)?;
            Some(format!("container {}: {why}", state.name))
        }));
        text.retain(|part| !part.is_empty());
        self.set_condition(FAILED, reason, format!("{node}: {}", text.join("; ")), now);
    }

    /// Sets a condition to True; one that is already True keeps its time.
    fn set_condition(&mut self, type_: &str, reason: &str, message: String, now: Timestamp) {
        let old = self.conditions.iter().find(|condition| condition.type_ == type_);
        let since = old.map_or(Time(now), |condition| condition.last_transition_time.clone());
        self.conditions.retain(|condition| condition.type_ != type_);
        self.conditions.push(Condition {
            type_: type_.to_owned(),
            status: "True".to_owned(),
            reason: reason.to_owned(),
            message: message.chars().take(MAX_MESSAGE_CHARS).collect(),
            last_transition_time: since,
            observed_generation: None,
        });
    }
}

/// State of one container.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestContainerRecreateState {
    /// Name of the container.
    pub name: String,
    /// Pending, Recreating, Succeeded or Failed.
    pub phase: ContainerRecreateRequestPhase,
    /// What the container waits for or why it failed, for humans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Whether the daemon stopped the old container.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_killed: bool,
    /// ID of the container to replace, as `RUNTIME://ID`. Where the request itself does not say it, because it
    /// is forced or nothing was recorded at its creation, it is written before that container is stopped, so
    /// that a restarted daemon does not stop another one. A field of ours that OpenKruise does not have.
    #[serde(default, rename = "containerID", skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
}

/// Status of one container in the Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestSyncContainerStatus {
    /// Name of the container.
    pub name: String,
    /// Whether it is ready.
    pub ready: bool,
    /// Restart count.
    pub restart_count: i32,
    /// ID of the container, as `RUNTIME://ID`.
    #[serde(default, rename = "containerID", skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn completed_status(
        message: &str,
        states: &[(&str, ContainerRecreateRequestPhase, &str, bool)],
    ) -> ContainerRecreateRequestStatus {
        let states =
            states.iter().map(
                |(name, phase, why, killed)| ContainerRecreateRequestContainerRecreateState {
                    name: (*name).to_owned(),
                    phase: phase.clone(),
                    message: (!why.is_empty()).then(|| (*why).to_owned()),
                    is_killed: *killed,
                    container_id: None,
                },
            );
        ContainerRecreateRequestStatus {
            phase: ContainerRecreateRequestPhase::Completed,
            completion_time: Some(Time(Timestamp::UNIX_EPOCH)),
            message: (!message.is_empty()).then(|| message.to_owned()),
            container_recreate_states: states.collect(),
            ..ContainerRecreateRequestStatus::default()
        }
    }

    fn final_condition(mut status: ContainerRecreateRequestStatus) -> (String, String, String) {
        status.set_final_condition("node-1");
        let [condition] = status.conditions.as_slice() else {
            unreachable!("one condition: {:?}", status.conditions)
        };
        (
            condition.type_.clone(),
            condition.reason.clone(),
            condition.message.clone(),
        )
    }

    #[test]
    fn final_condition_names_node_and_cause() {
        use ContainerRecreateRequestPhase::{Failed, Succeeded};
        let text = |a: &str, b: &str, c: &str| (a.to_owned(), b.to_owned(), c.to_owned());
        assert_eq!(
            final_condition(completed_status(
                "",
                &[("a", Succeeded, "", true), ("b", Succeeded, "", false)]
            )),
            text(
                "Complete",
                "Recreated",
                "node-1: a was recreated, b had already been replaced after this request was created; nothing to do"
            )
        );
        assert_eq!(
            final_condition(completed_status(
                DEADLINE_MESSAGE,
                &[("a", Succeeded, "", true), ("b", Failed, "too late", true)]
            )),
            text(
                "Failed",
                "DeadlineExceeded",
                "node-1: recreating has exceeded the activeDeadlineSeconds; container b: too late"
            )
        );
        assert_eq!(
            final_condition(completed_status(
                "",
                &[("a", Succeeded, "", true), ("b", Failed, "no luck", true)]
            )),
            text("Failed", "ContainerFailed", "node-1: container b: no luck")
        );
        assert_eq!(
            final_condition(completed_status(
                POD_GONE_MESSAGE,
                &[("a", Failed, POD_GONE_MESSAGE, false)]
            )),
            text("Failed", "PodGone", "node-1: pod has gone")
        );
        let mut silent = completed_status(DEADLINE_MESSAGE, &[]);
        silent.set_waiting_for_daemon("node-1", Timestamp::UNIX_EPOCH);
        assert_eq!(
            final_condition(silent),
            text(
                "Failed",
                "NoDaemon",
                "node-1: kruise-daemon did not start this request; recreating has exceeded the activeDeadlineSeconds"
            )
        );
    }

    #[test]
    fn waiting_condition_is_removed_once_a_daemon_starts() {
        let mut status = ContainerRecreateRequestStatus::default();
        status.set_waiting_for_daemon("node-1", Timestamp::UNIX_EPOCH);
        assert!(status.waits_for_daemon());
        status.set_final_condition("node-1");
        assert_eq!(status.conditions, []);
    }
}
