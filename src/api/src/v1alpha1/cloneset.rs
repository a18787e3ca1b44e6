//! CloneSet in v1alpha1: the fields of a rolling update are next to its type, which also sets how Pods are updated.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cloneset as beta;
use crate::json::set;
use crate::schemas;

/// Desired Pods, and how they are created, updated and deleted.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1alpha1",
    kind = "CloneSet",
    plural = "clonesets",
    shortname = "clone",
    namespaced,
    status = "beta::CloneSetStatus",
    derive = "PartialEq",
    doc = "Manages a set of identical Pods, and updates them in place where possible."
)]
#[serde(transparent)]
pub struct CloneSetSpec(pub beta::CloneSetSpec<CloneSetScaleStrategy, CloneSetUpdateStrategy>);

/// How Pods are created and deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CloneSetScaleStrategy {
    /// Names of Pods to delete. Names of deleted Pods are removed from the list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods_to_delete: Vec<String>,
    /// How many Pods may be unavailable while new ones are made, as a number or as a percentage of `replicas`,
    /// rounded up; any number when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub max_unavailable: Option<IntOrString>,
    /// Whether the PVCs of a Pod that was deleted by others are deleted with it, rather than reused by the Pod that replaces it.
    #[serde(
        default,
        rename = "disablePVCReuse",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub disable_pvc_reuse: bool,
}

/// How Pods are updated.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[schemars(transform = as_in_v1alpha1)]
pub struct CloneSetUpdateStrategy {
    /// ReCreate (when absent), InPlaceIfPossible, InPlaceOnly or OnDelete.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
    /// Partition, limits and order of an update. `type` says what `pod_update_policy` says in v1beta1; leave it out.
    #[serde(flatten)]
    pub rolling_update: beta::RollingUpdateCloneSetStrategy,
}

/// Adapts the schema to v1alpha1, where `type` is the policy and annotations take precedence.
fn as_in_v1alpha1(schema: &mut Schema) {
    let Some(Value::Object(properties)) = schema.get_mut("properties") else {
        return;
    };
    properties.remove("podUpdatePolicy");
    if let Some(in_place) = properties.get_mut("inPlaceUpdateStrategy") {
        let description = "How Pods are updated in place. Annotations for pre-downloads take precedence.";
        set(in_place, &["description"], json!(description));
    }
}
