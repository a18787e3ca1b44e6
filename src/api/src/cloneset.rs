//! CloneSet (v1beta1): Pods that are all alike, and are updated in place if possible.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use super::in_place::InPlaceUpdateStrategy;
pub use super::lifecycle::{Lifecycle, LifecycleHook};
use super::schemas;
use super::string_enum::string_enum;
pub use super::update_priority::{UpdatePriorityStrategy, UpdateScatterTerm};

/// Why `maxUnavailable` and `maxSurge` cannot both be zero: an update could neither delete a Pod nor create one more.
pub const NO_UPDATE_BUDGET: &str = "maxUnavailable and maxSurge are both 0, so that nothing could be updated; \
    raise one of them to 1 or more";

string_enum! {
    open
    /// When Pods are updated. Absent means `RollingUpdate`.
    CloneSetUpdateStrategyType {
        /// By the CloneSet, within `rollingUpdate`.
        RollingUpdate,
        /// When a user deletes them.
        OnDelete,
    }
}

string_enum! {
    open
    /// How Pods are updated. Absent means `ReCreate`.
    PodUpdateStrategyType {
        /// A new Pod takes the place of the old one.
        ReCreate,
        /// The Pod stays where it can; otherwise as with `ReCreate`.
        InPlaceIfPossible,
        /// The Pod stays; where it cannot, nothing is done.
        InPlaceOnly,
    }
}

/// Which Pods there should be, and how they are made (`S`), updated (`U`) and deleted: in these the versions differ.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1beta1",
    kind = "CloneSet",
    plural = "clonesets",
    shortname = "clone",
    namespaced,
    status = "CloneSetStatus",
    derive = "PartialEq",
    doc = "Manages a set of identical Pods, and updates them in place where possible."
)]
#[serde(rename_all = "camelCase")]
#[schemars(description = "Desired Pods, and how they are created, updated and deleted.")]
pub struct CloneSetSpec<S = CloneSetScaleStrategy, U = CloneSetUpdateStrategy> {
    /// Desired number of Pods, 0 or greater; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Label selector for the Pods; those of `template` must match. Cannot be changed.
    #[schemars(schema_with = "schemas::own_pods")]
    pub selector: LabelSelector,
    /// Template of the Pods, as `core/v1.PodTemplateSpec`. Raw, so that fields of later releases of
    /// Kubernetes stay.
    #[schemars(schema_with = "schemas::pod_template")]
    pub template: Value,
    /// Templates of the PVCs that each Pod gets, each as `core/v1.PersistentVolumeClaim`. Raw too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schemas::claim_templates")]
    pub volume_claim_templates: Vec<Value>,
    /// How Pods are created and deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_strategy: Option<S>,
    /// How Pods are updated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<U>,
    /// Number of unused revisions to keep, 0 or greater; 10 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision_history_limit: Option<i32>,
    /// Seconds that a Pod must be ready for to be available, 0 or greater; 0 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_ready_seconds: Option<i32>,
    /// Seconds after the last update of condition Progressing at which a rollout that has not completed is reported as
    /// failed. A rollout that begins or continues later than that is reported at once. Never when absent, or
    /// 2147483647.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress_deadline_seconds: Option<i32>,
    /// Lifecycle hooks of the Pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<Lifecycle>,
}

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
    /// Whether the PVCs of a Pod that was deleted by others are reused by the Pod that replaces it.
    #[serde(
        default,
        rename = "enablePVCReuse",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub enable_pvc_reuse: bool,
    /// Whether Pods that a preDelete hook holds are not counted, so that they are replaced at once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exclude_preparing_delete: bool,
}

/// How Pods are updated.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CloneSetUpdateStrategy {
    /// RollingUpdate (when absent) or OnDelete.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<CloneSetUpdateStrategyType>,
    /// Partition, limits and order of an update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolling_update: Option<RollingUpdateCloneSetStrategy>,
}

/// How far, how fast and in which order Pods are updated.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RollingUpdateCloneSetStrategy {
    /// ReCreate (when absent), InPlaceIfPossible or InPlaceOnly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_update_policy: Option<PodUpdateStrategyType>,
    /// How many Pods keep the old revision, as a number or as a percentage of `replicas`, rounded up; 0 when
    /// absent. Of several Pods, a percentage below 100 leaves at least one to update.
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
    /// Stops the update while true.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// Pods to update first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_strategy: Option<UpdatePriorityStrategy>,
    /// Labels whose Pods are spread over the whole update. Applied after `priorityStrategy`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scatter_strategy: Vec<UpdateScatterTerm>,
    /// How Pods are updated in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_place_update_strategy: Option<InPlaceUpdateStrategy>,
}

/// Observed state of a CloneSet.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CloneSetStatus {
    /// Generation of the spec that this status was written for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Current number of Pods.
    pub replicas: i32,
    /// Pods that are ready.
    pub ready_replicas: i32,
    /// Pods that were ready for `minReadySeconds`.
    pub available_replicas: i32,
    /// Pods of the update revision.
    pub updated_replicas: i32,
    /// Pods of the update revision that are ready.
    pub updated_ready_replicas: i32,
    /// Pods of the update revision that were ready for `minReadySeconds`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub updated_available_replicas: Option<i32>,
    /// Number of Pods that should have the update revision: `replicas` minus `partition`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_updated_replicas: Option<i32>,
    /// Name of the revision of the current template.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub update_revision: String,
    /// Name of the revision that all Pods had when the last rollout completed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub current_revision: String,
    /// Number of hash collisions of revision names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collision_count: Option<i32>,
    /// Conditions of the CloneSet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<CloneSetCondition>,
    /// `spec.selector` as text, for the scale subresource.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label_selector: String,
}

/// A condition of a CloneSet.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CloneSetCondition {
    /// The condition's type.
    #[serde(rename = "type")]
    pub type_: String,
    /// True, False or Unknown.
    pub status: String,
    /// Last time the condition was updated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_update_time: Option<Time>,
    /// When the status last changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
    /// Reason of the condition, in CamelCase.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Message of the condition, for humans.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl CloneSet {
    /// Whether it has no status yet; only then it adopts orphans.
    #[must_use]
    pub fn is_new(&self) -> bool {
        let status = self.status.as_ref();
        status.and_then(|status| status.observed_generation).is_none()
    }
}

impl CloneSetSpec {
    /// Desired number of Pods, 0 or greater.
    pub fn desired_replicas(&self) -> i32 {
        self.replicas.unwrap_or(1).max(0)
    }

    /// The `rollingUpdate` block, if there is one.
    pub fn rolling_update(&self) -> Option<&RollingUpdateCloneSetStrategy> {
        self.update_strategy.as_ref()?.rolling_update.as_ref()
    }

    /// Labels of the Pod template; values that are not strings are left out.
    pub fn template_labels(&self) -> BTreeMap<String, String> {
        string_map(&self.template["metadata"]["labels"])
    }
}

/// The entries of a JSON map that are strings.
pub fn string_map(map: &Value) -> BTreeMap<String, String> {
    let entries = map.as_object().into_iter().flatten();
    entries
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
        .collect()
}
