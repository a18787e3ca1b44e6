//! CloneSet in v1alpha1: the fields of a rolling update stand beside its type, which also says how Pods are
//! updated.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::cloneset::{
    CloneSetStatus, InPlaceUpdateStrategy, Lifecycle, UpdatePriorityStrategy, UpdateScatterTerm,
};
use crate::api::schemas;

/// Which Pods there are to be, and how they are made, updated and deleted.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1alpha1",
    kind = "CloneSet",
    plural = "clonesets",
    shortname = "clone",
    namespaced,
    status = "CloneSetStatus",
    derive = "PartialEq",
    doc = "Keeps a number of Pods that are all alike, and updates them where they are if they can be."
)]
#[serde(rename_all = "camelCase")]
pub struct CloneSetSpec {
    /// How many Pods there are to be, 0 or greater; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Labels that the Pods are known by; those of `template` must match. Cannot be changed.
    #[schemars(schema_with = "schemas::own_pods")]
    pub selector: LabelSelector,
    /// What the Pods are made of, as `core/v1.PodTemplateSpec`. Raw, so that fields of later releases of
    /// Kubernetes stay.
    #[schemars(schema_with = "schemas::pod_template")]
    pub template: Value,
    /// Claims that each Pod gets a volume of its own for, each as `core/v1.PersistentVolumeClaim`. Raw too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schemas::claim_templates")]
    pub volume_claim_templates: Vec<Value>,
    /// How Pods are made and deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_strategy: Option<CloneSetScaleStrategy>,
    /// How Pods are updated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<CloneSetUpdateStrategy>,
    /// How many revisions are kept besides those in use, 0 or greater; 10 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision_history_limit: Option<i32>,
    /// Seconds that a Pod must be ready for to be available, 0 or greater; 0 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_ready_seconds: Option<i32>,
    /// Seconds after which a rollout without progress is told to be stuck; never when absent, or 2147483647.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress_deadline_seconds: Option<i32>,
    /// Hooks in the life of the Pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<Lifecycle>,
}

/// How Pods are made and deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CloneSetScaleStrategy {
    /// Names of Pods to delete. Names of Pods that are gone are taken off the list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods_to_delete: Vec<String>,
    /// How many Pods may be unavailable while new ones are made, as a number or as a percentage of `replicas`,
    /// rounded up; any number when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub max_unavailable: Option<IntOrString>,
    /// Whether claims of a Pod that somebody else deleted go with it, rather than to the Pod that takes its place.
    #[serde(
        default,
        rename = "disablePVCReuse",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub disable_pvc_reuse: bool,
}

/// How Pods are updated.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CloneSetUpdateStrategy {
    /// ReCreate (when absent), InPlaceIfPossible, InPlaceOnly or OnDelete.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
    /// How many Pods keep the old revision, as a number or as a percentage of `replicas`, rounded up; 0 when
    /// absent. A percentage below 100 leaves at least one Pod to update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub partition: Option<IntOrString>,
    /// How many Pods may be unavailable, as a number or as a percentage of `replicas`, which is rounded down,
    /// or up without `maxSurge`; 20% when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub max_unavailable: Option<IntOrString>,
    /// How many Pods there may be beyond `replicas`, as a number or as a percentage of it, rounded up; 0 when
    /// absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub max_surge: Option<IntOrString>,
    /// Whether no Pod is updated.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// Which Pods come first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_strategy: Option<UpdatePriorityStrategy>,
    /// Which Pods are spread over the whole update. Applied after `priorityStrategy`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scatter_strategy: Vec<UpdateScatterTerm>,
    /// How Pods are updated in place. What is said of pre-downloads is overruled by annotations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_place_update_strategy: Option<InPlaceUpdateStrategy>,
}
