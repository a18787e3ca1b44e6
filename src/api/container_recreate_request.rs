//! ContainerRecreateRequest (v1beta1): restart containers of one Pod where they are.

use k8s_openapi::api::core::v1::{ContainerPort, LifecycleHandler};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::schemas;
use super::words::words;

words! {
    listed
    /// What a container's failure means for the request.
    ContainerRecreateRequestFailurePolicyType {
        /// The request ends.
        Fail,
        /// The request goes on with the next container.
        Ignore,
    }
}

words! {
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

/// Which containers of which Pod, and how.
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
    doc = "Restarts containers of one Pod where they are, without recreating the Pod."
)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestSpec {
    /// Name of the Pod, in the request's namespace. It must be active and on a node.
    pub pod_name: String,
    /// Containers to recreate, in this order where order matters.
    pub containers: Vec<ContainerRecreateRequestContainer>,
    /// How to go about it.
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
    /// The container's preStop hook, for the record; the daemon runs the one in the Pod. Read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::lifecycle_handler")]
    pub pre_stop: Option<LifecycleHandler>,
    /// The container's ports where the hook needs them, for the record. Read-only.
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
    /// How often it had been restarted.
    pub restart_count: i32,
}

/// How to recreate containers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestStrategy {
    /// What a container's failure means for the request; Fail when absent.
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
    /// Seconds that the Pod is unready before its containers are stopped. Not made unready when absent.
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

/// How far a request is.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestStatus {
    /// Pending, Recreating or Completed.
    pub phase: ContainerRecreateRequestPhase,
    /// When the request ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Why the request waits, or why it ended before its time, in a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// How far each container is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub container_recreate_states: Vec<ContainerRecreateRequestContainerRecreateState>,
    /// What the Pod said of its containers while they were recreated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub container_status_snapshot: Vec<ContainerRecreateRequestSyncContainerStatus>,
    /// Conditions; `PreRecreateGrace` is true once the Pod was made unready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schemas::conditions")]
    pub conditions: Vec<Condition>,
}

impl Default for ContainerRecreateRequestStatus {
    /// An empty status: the phase is an empty word, which stands for "not looked at yet".
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

/// How far one container is.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestContainerRecreateState {
    /// Name of the container.
    pub name: String,
    /// Pending, Recreating, Succeeded or Failed.
    pub phase: ContainerRecreateRequestPhase,
    /// Why, in a sentence.
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

/// What the Pod said of one container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestSyncContainerStatus {
    /// Name of the container.
    pub name: String,
    /// Whether it is ready.
    pub ready: bool,
    /// How often it was restarted.
    pub restart_count: i32,
    /// ID of the container, as `RUNTIME://ID`.
    #[serde(default, rename = "containerID", skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
}
