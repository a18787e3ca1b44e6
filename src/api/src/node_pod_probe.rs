//! NodePodProbe (v1alpha1): the probes that a node's daemon runs in the Pods of the node, and their results.
//!
//! Cluster-scoped, named like its node. The manager writes `spec`, the node's daemon writes `status`.

use k8s_openapi::api::core::v1::Probe;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::schemas;
use super::string_enum::string_enum;

string_enum! {
    open
    /// The state of a probe.
    ProbeState {
        /// As many consecutive successes as `successThreshold` requires.
        Succeeded,
        /// As many consecutive failures as `failureThreshold` requires, or a container that does not run.
        Failed,
        /// No result of this container yet.
        Unknown,
    }
}

/// Maximum number of probes of one Pod.
pub const MAX_PROBES_OF_POD: usize = 64;
/// Maximum characters of a probe's message.
pub const MAX_MESSAGE_CHARS: usize = 1024;
/// First part of the names of liveness probes, in place of a PodProbeMarker's: no object can have it as its name.
const LIVENESS: &str = "EnhancedLivenessProbe";

/// Name of the liveness probe of a container.
#[must_use]
pub fn liveness_name(container: &str) -> String {
    format!("{LIVENESS}#{container}")
}

/// The container of a liveness probe of that name; `None` for the name of any other probe.
#[must_use]
pub fn liveness_container(name: &str) -> Option<&str> {
    let (first, container) = name.split_once('#')?;
    (first == LIVENESS).then_some(container)
}

/// Probes of the Pods of a node.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1alpha1",
    kind = "NodePodProbe",
    plural = "nodepodprobes",
    status = "NodePodProbeStatus",
    derive = "PartialEq",
    doc = "Probes that the daemon of one node runs in the node's Pods, and their results. It has the name of its node."
)]
#[serde(rename_all = "camelCase")]
pub struct NodePodProbeSpec {
    /// The probes of each Pod.
    #[serde(
        default,
        deserialize_with = "readable_entries",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub pod_probes: Vec<PodProbe>,
}

/// The probes of one Pod.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodProbe {
    /// Name of the Pod.
    pub name: String,
    /// Namespace of the Pod.
    pub namespace: String,
    /// UID of the Pod.
    pub uid: String,
    /// Address of the Pod.
    #[serde(default, rename = "IP")]
    pub ip: String,
    /// The probes.
    #[serde(
        default,
        deserialize_with = "readable_entries",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub probes: Vec<ContainerProbe>,
}

/// A probe of one container.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerProbe {
    /// MARKER#PROBE: the names of the PodProbeMarker and of its probe; EnhancedLivenessProbe#CONTAINER for a liveness
    /// probe.
    pub name: String,
    /// Name of the container.
    pub container_name: String,
    /// The probe. There is one handler; ports are numbers.
    #[schemars(schema_with = "schemas::probe")]
    pub probe: Probe,
}

/// Results of the probes.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodePodProbeStatus {
    /// The results of each Pod.
    #[serde(
        default,
        deserialize_with = "readable_entries",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub pod_probe_statuses: Vec<PodProbeStatus>,
}

/// The results of one Pod.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodProbeStatus {
    /// Name of the Pod.
    pub name: String,
    /// Namespace of the Pod.
    pub namespace: String,
    /// UID of the Pod.
    pub uid: String,
    /// The results.
    #[serde(
        default,
        deserialize_with = "readable_entries",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub probe_states: Vec<ContainerProbeState>,
}

/// The result of one probe.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerProbeState {
    /// Name of the probe, as in the spec.
    pub name: String,
    /// Succeeded, Failed or Unknown.
    pub state: ProbeState,
    /// When the probe that this is the result of ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_probe_time: Option<Time>,
    /// When the state last changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
    /// What the probe printed or answered, at most 1024 characters.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// ID of the container that the state is of, as `RUNTIME://ID`.
    #[serde(rename = "containerID", default, skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
}

/// The entries of a list that can be read: one that cannot, for example because of a number beyond its type in an object
/// that was stored under a different schema, must not stop the probes of all Pods.
fn readable_entries<'de, D: Deserializer<'de>, T: DeserializeOwned>(from: D) -> Result<Vec<T>, D::Error> {
    let entries: Option<Vec<Value>> = Option::deserialize(from)?;
    let readable = entries.into_iter().flatten().map(serde_json::from_value);
    Ok(readable.filter_map(Result::ok).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn unreadable_probe_does_not_hide_the_others() {
        let probe = |name: &str, period: i64| json!({ "name": name, "containerName": "c", "probe": { "periodSeconds": period } });
        let pod = |uid: Value, probes: Value| json!({ "name": "p", "namespace": "n", "uid": uid, "IP": "", "probes": probes });
        let object = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "NodePodProbe",
            "metadata": { "name": "node" }, "spec": { "podProbes": [
                pod(json!("u"), json!([probe("a#1", i64::MAX), probe("a#2", 1)])),
                pod(json!(7), json!([])),
                pod(json!("w"), Value::Null),
            ] }, "status": { "podProbeStatuses": null } });
        let read: NodePodProbe = serde_json::from_value(object).unwrap();
        let names = read.spec.pod_probes.iter().map(|pod| {
            let probes = pod.probes.iter().map(|probe| probe.name.as_str());
            (pod.uid.as_str(), probes.collect::<Vec<_>>())
        });
        assert_eq!(names.collect::<Vec<_>>(), [("u", vec!["a#2"]), ("w", vec![])]);
    }
}
