//! PodProbeMarker (v1alpha1): probes of the Pods that it selects, and the conditions, labels and annotations that their
//! results set on the Pods.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Probe;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::node_pod_probe::ProbeState;
use super::schemas;

/// Maximum number of probes of a PodProbeMarker.
pub const MAX_PROBES: usize = 32;
/// Maximum number of labels, or annotations, of one policy.
pub const MAX_MARKS: usize = 32;

/// Condition types of kubelet, the scheduler, the API server and workloads, which no probe may set.
pub const RESERVED_CONDITION_TYPES: [&str; 14] = [
    "AllContainersRestarting",
    "ContainersReady",
    "DisruptionTarget",
    "InPlaceUpdateReady",
    "Initialized",
    "KruisePodReady",
    "PodHasNetwork",
    "PodReadyToStartContainers",
    "PodResizeInProgress",
    "PodResizePending",
    "PodScheduled",
    "Ready",
    "SidecarSetUpgradable",
    "SidecarTerminated",
];

/// Pods and their probes.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1alpha1",
    kind = "PodProbeMarker",
    plural = "podprobemarkers",
    namespaced,
    status = "PodProbeMarkerStatus",
    derive = "PartialEq",
    doc = "Probes containers of Pods, and marks the Pods with the results."
)]
#[serde(rename_all = "camelCase")]
pub struct PodProbeMarkerSpec {
    /// Label selector for the Pods of the namespace. Cannot be changed.
    #[schemars(schema_with = "schemas::probed_pods")]
    pub selector: LabelSelector,
    /// The probes, at most 32.
    pub probes: Vec<PodContainerProbe>,
}

/// A probe, and what its result sets.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodContainerProbe {
    /// Name of the probe, without `#`.
    pub name: String,
    /// Name of the container.
    pub container_name: String,
    /// The probe. It has one handler; `host` must be absent.
    #[schemars(schema_with = "schemas::probe")]
    pub probe: Probe,
    /// What each state sets on the Pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub marker_policy: Vec<ProbeMarkerPolicy>,
    /// Type of a condition of the Pod: True while the probe succeeds, otherwise False.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod_condition_type: String,
}

/// What one state of a probe sets on the Pod.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProbeMarkerPolicy {
    /// Succeeded or Failed.
    pub state: ProbeState,
    /// Labels; those of the other state are removed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations; those of the other state are removed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// Observed state of a PodProbeMarker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodProbeMarkerStatus {
    /// Generation that the status is of.
    #[serde(default)]
    pub observed_generation: i64,
    /// Pods that are probed: selected, initialized, not ended, on a node with a daemon or by the provider of a virtual node.
    #[serde(default)]
    pub matched_pods: i64,
}

impl PodContainerProbe {
    /// The condition that it sets, unless the type is reserved.
    #[must_use]
    pub fn condition_type(&self) -> Option<&str> {
        let type_ = self.pod_condition_type.as_str();
        (!type_.is_empty() && !RESERVED_CONDITION_TYPES.contains(&type_)).then_some(type_)
    }
}
