//! ContainerRecreateJob (v1alpha1): restarts containers of many Pods, by one ContainerRecreateRequest for each.
//!
//! A kind of ours: OpenKruise has none like it, and leaves its objects alone.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, OwnerReference, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::container_recreate_request::ContainerRecreateRequestStrategy;
use super::update_priority::UpdatePriorityStrategy;
use super::{GROUP, V1ALPHA1, schemas};

/// Maximum number of containers.
pub const MAX_CONTAINERS: usize = 64;
/// Names in `status.failedPods`.
pub const MAX_FAILED_PODS: usize = 100;
/// Default of `podDeadlineSeconds`.
const DEFAULT_POD_DEADLINE_SECONDS: i32 = 600;

/// Pods and containers, and how they are restarted.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1alpha1",
    kind = "ContainerRecreateJob",
    plural = "containerrecreatejobs",
    shortname = "crj",
    namespaced,
    status = "ContainerRecreateJobStatus",
    derive = "PartialEq",
    doc = "Restarts containers of many Pods in place, by one ContainerRecreateRequest for each. Not part of OpenKruise."
)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateJobSpec {
    /// Label selector for the Pods of the namespace. Excludes `targetRef`. Cannot be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::restarted_pods")]
    pub selector: Option<LabelSelector>,
    /// The workload whose Pods are restarted. Excludes `selector`. Cannot be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_ref: Option<TargetRef>,
    /// Containers to restart, at most 64. Of each Pod, those that are running are restarted. Cannot be changed.
    pub containers: Vec<ContainerRecreateJobContainer>,
    /// How the containers of a Pod are restarted, as in a ContainerRecreateRequest. Cannot be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<ContainerRecreateRequestStrategy>,
    /// How many of the Pods may be unavailable, as a number, or as a percentage of them, rounded down to at least 1;
    /// 1 when absent. Pods that are not ready anyway are restarted at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub max_unavailable: Option<IntOrString>,
    /// How many of the Pods are not restarted, as a number, or as a percentage of them, rounded up; 0 when absent.
    /// They are the last ones in the order. The job waits until it is lowered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub partition: Option<IntOrString>,
    /// Which Pods come first. Of Pods with equal priority, those whose name ends in the greater number do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_strategy: Option<UpdatePriorityStrategy>,
    /// Restart no further Pods.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// How many Pods may fail. When more have, no further one is restarted, and the job fails. 0 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_failures: Option<i32>,
    /// Seconds that the restart of one Pod may take, and after it, seconds until the Pod must be ready; else it has
    /// failed. 3 or greater; 600 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_deadline_seconds: Option<i32>,
    /// Seconds after its start when the job restarts no further Pods, and fails. Never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_deadline_seconds: Option<i64>,
    /// Seconds after its end when the job is deleted, with its requests. Never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds_after_finished: Option<i32>,
}

impl ContainerRecreateJobSpec {
    /// Seconds that the restart of one Pod may take.
    #[must_use]
    pub fn pod_deadline(&self) -> i64 {
        self.pod_deadline_seconds
            .unwrap_or(DEFAULT_POD_DEADLINE_SECONDS)
            .into()
    }
}

/// A workload in the namespace of the job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetRef {
    /// `apps/v1`; `apps.kruise.io/v1beta1` or `apps.kruise.io/v1alpha1` for a CloneSet.
    pub api_version: String,
    /// CloneSet, Deployment, ReplicaSet, StatefulSet or DaemonSet.
    pub kind: String,
    /// Name of the workload.
    pub name: String,
}

/// A container to restart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateJobContainer {
    /// Name of a container, or of an init container that restarts always.
    pub name: String,
}

/// Condition of a job that has restarted all its Pods.
pub const COMPLETE: &str = "Complete";
/// Condition of a job that ended otherwise; its message names Pods and causes.
pub const FAILED: &str = "Failed";
/// Condition of a job that waits; absent otherwise.
pub const WAITING: &str = "Waiting";

/// Observed state of a ContainerRecreateJob.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateJobStatus {
    /// Generation that the status is of.
    #[serde(default)]
    pub observed_generation: i64,
    /// Time at which the job was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Time at which the job ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Pods that were or will be restarted.
    #[serde(default)]
    pub desired: i32,
    /// Pods whose request has not ended, or that are not ready again after it.
    #[serde(default)]
    pub active: i32,
    /// Pods that were restarted, and were ready after that.
    #[serde(default)]
    pub restarted: i32,
    /// Pods that could not be restarted, or were not ready after it in time.
    #[serde(default)]
    pub failed: i32,
    /// Names of Pods that failed, sorted; at most 100.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_pods: Vec<String>,
    /// `Complete` or `Failed` once the job has ended, `Waiting` while it waits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schemas::conditions")]
    pub conditions: Vec<Condition>,
}

impl ContainerRecreateJob {
    /// The controller owner reference to it. It does not block the deletion of the job, which would need permission for
    /// its finalizers.
    #[must_use]
    pub fn controller_reference(&self) -> OwnerReference {
        OwnerReference {
            api_version: format!("{GROUP}/{V1ALPHA1}"),
            kind: "ContainerRecreateJob".to_owned(),
            name: self.metadata.name.clone().unwrap_or_default(),
            uid: self.metadata.uid.clone().unwrap_or_default(),
            controller: Some(true),
            block_owner_deletion: None,
        }
    }
}
