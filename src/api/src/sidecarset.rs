//! SidecarSet (v1beta1): containers that are injected into the Pods of others, and updated there.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::schemas::{self, sidecarset as schema};
use super::string_enum::string_enum;
pub use super::update_priority::{UpdatePriorityStrategy, UpdateScatterTerm};

/// The most memory that a SidecarSet may take as JSON, in bytes: some 10,000 environment variables.
pub const MAX_SET_BYTES: usize = 8 << 20;

string_enum! {
    open
    /// Whether injected Pods are updated. Absent means `RollingUpdate`.
    SidecarSetUpdateStrategyType {
        /// New Pods only.
        NotUpdate,
        /// Injected Pods are updated, within the limits of the strategy.
        RollingUpdate,
    }
}

string_enum! {
    open
    /// Where a container is inserted. Absent means `BeforeAppContainer`, and for init containers `AfterAppContainer`.
    PodInjectPolicy {
        /// In front of the Pod's own containers.
        BeforeAppContainer,
        /// Behind them.
        AfterAppContainer,
    }
}

string_enum! {
    open
    /// How a container is updated. Absent means `ColdUpgrade`.
    SidecarContainerUpgradeType {
        /// It is restarted with the new image.
        ColdUpgrade,
        /// A second container takes over before the first one stops.
        HotUpgrade,
    }
}

string_enum! {
    listed
    /// Which Pods get a revision that `injectionStrategy` names. Absent means `Always`.
    SidecarSetInjectRevisionPolicy {
        /// All new Pods.
        Always,
        /// New Pods that the update strategy would not update.
        Partial,
    }
}

string_enum! {
    open
    /// What happens to an annotation that the Pod has already. Absent means `Retain`.
    SidecarSetPatchPolicy {
        /// The Pod's value is kept.
        Retain,
        /// The value is replaced.
        Overwrite,
        /// The value is JSON, and is merged into the Pod's (RFC 7396).
        MergePatchJson,
    }
}

/// Which Pods get which containers, and how these are updated (v1beta1).
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1beta1",
    kind = "SidecarSet",
    plural = "sidecarsets",
    status = "SidecarSetStatus",
    derive = "PartialEq",
    doc = "Injects containers into the Pods of others, and updates them there."
)]
#[serde(rename_all = "camelCase")]
#[schemars(description = "Which Pods get which containers, and how these are updated.")]
pub struct SidecarSetSpec {
    /// Pods to inject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::injected_pods")]
    pub selector: Option<LabelSelector>,
    /// Namespaces of these Pods; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::namespaces")]
    pub namespace_selector: Option<LabelSelector>,
    /// Init containers. Absent and empty differ in hashes, here and below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::containers::<SidecarContainer>")]
    pub init_containers: Option<Vec<SidecarContainer>>,
    /// Containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::containers::<SidecarContainer>")]
    pub containers: Option<Vec<SidecarContainer>>,
    /// Volumes that the containers may mount, each as `core/v1.Volume`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::volumes")]
    pub volumes: Option<Vec<Value>>,
    /// How injected Pods are updated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<SidecarSetUpdateStrategy>,
    /// Whether, and in which revision, new Pods are injected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub injection_strategy: Option<SidecarSetInjectionStrategy>,
    /// Secrets for the images of the containers, each as `core/v1.LocalObjectReference`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::local_references")]
    pub image_pull_secrets: Option<Vec<Value>>,
    /// Number of revisions to keep; 10 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision_history_limit: Option<i32>,
    /// Annotations for the Pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::metadata_patches::<SidecarSetPatchPodMetadata>")]
    pub patch_pod_metadata: Option<Vec<SidecarSetPatchPodMetadata>>,
    /// Name of the current version, by which it can be injected later.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::label_value")]
    pub custom_version: String,
}

/// A container to inject: a `core/v1.Container` and how it is injected and updated.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
pub struct SidecarContainer {
    /// The fields of the container, raw, so that those of later releases of Kubernetes stay.
    #[serde(flatten)]
    #[schemars(skip)]
    pub container: Map<String, Value>,
    /// Position in the Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::word")]
    pub pod_inject_policy: Option<PodInjectPolicy>,
    /// How it is updated.
    #[serde(default)]
    pub upgrade_strategy: SidecarContainerUpgradeStrategy,
    /// Whether it mounts what the Pod's own containers mount.
    #[serde(default)]
    pub share_volume_policy: ShareVolumePolicy,
    /// The same for block devices. A later addition: absent in the hashes of older sets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_volume_device_policy: Option<ShareVolumePolicy>,
    /// Environment variables that it takes over from containers of the Pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::transfer_env::<TransferEnvVar>")]
    pub transfer_env: Vec<TransferEnvVar>,
    /// Resources computed from those of the Pod's containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources_policy: Option<ResourcesPolicy>,
}

/// How a container is updated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SidecarContainerUpgradeStrategy {
    /// `ColdUpgrade` (when absent) or `HotUpgrade`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::word")]
    pub upgrade_type: Option<SidecarContainerUpgradeType>,
    /// For `HotUpgrade`: image of the container that does not work.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::text")]
    pub hot_upgrade_empty_image: String,
}

/// Whether volumes are shared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct ShareVolumePolicy {
    /// `enabled` or `disabled` (when absent).
    #[serde(default, rename = "type", skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::word")]
    pub type_: String,
}

/// Environment variables to take over from a container of the Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TransferEnvVar {
    /// The container's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::text")]
    pub source_container_name: String,
    /// Where the container's name is read from; comes before `sourceContainerName`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_container_name_from: Option<SourceContainerNameSource>,
    /// Name of a variable.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::text")]
    pub env_name: String,
    /// Names of more variables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::texts")]
    pub env_names: Vec<String>,
}

/// Source of a container's name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SourceContainerNameSource {
    /// A label or an annotation of the Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field_ref: Option<FieldRef>,
}

/// A field of a Pod, as `core/v1.ObjectFieldSelector`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("required" = ["fieldPath"], "x-kubernetes-map-type" = "atomic"))]
pub struct FieldRef {
    /// `v1`, also when absent.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::word")]
    pub api_version: String,
    /// `metadata.labels['KEY']` or `metadata.annotations['KEY']`.
    #[serde(default)]
    #[schemars(schema_with = "schema::text")]
    pub field_path: String,
}

/// Resources computed from those of the Pod's containers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("required" = ["resourcesExpr", "targetContainersMode"]))]
pub struct ResourcesPolicy {
    /// `sum` or `max`.
    #[serde(default)]
    #[schemars(schema_with = "schema::containers_mode")]
    pub target_containers_mode: String,
    /// Regular expression for the names of the containers that count.
    #[serde(default)]
    #[schemars(schema_with = "schema::text")]
    pub target_containers_name_regex: String,
    /// Expressions for the results.
    #[serde(default)]
    pub resources_expr: ResourcesExpr,
}

/// Expressions for limits and requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourcesExpr {
    /// Limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<ResourceExprs>,
    /// Requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<ResourceExprs>,
}

/// An expression for each resource; empty for none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct ResourceExprs {
    /// CPU, in terms of `cpu`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::text")]
    pub cpu: String,
    /// Memory, in terms of `memory`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::text")]
    pub memory: String,
}

/// How injected Pods are updated.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SidecarSetUpdateStrategy {
    /// `RollingUpdate` (when absent) or `NotUpdate`.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::word")]
    pub type_: Option<SidecarSetUpdateStrategyType>,
    /// Stops the update while true.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// Pods to update; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::pods_to_update")]
    pub selector: Option<LabelSelector>,
    /// How many Pods keep the old containers, as a number or as a percentage of the matched Pods; 0 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub partition: Option<IntOrString>,
    /// How many Pods may be unavailable, as a number or as a percentage of the matched Pods; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub max_unavailable: Option<IntOrString>,
    /// Pods to update first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_strategy: Option<UpdatePriorityStrategy>,
    /// Labels whose Pods are spread over the whole update. The value `*` stands for each value of the label.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scatter_strategy: Vec<UpdateScatterTerm>,
}

/// Whether, and in which revision, new Pods are injected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct SidecarSetInjectionStrategy {
    /// Stops the injection of new Pods while true.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// An older revision for new Pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<SidecarSetInjectRevision>,
}

/// A revision of the set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SidecarSetInjectRevision {
    /// The revision's `customVersion`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_value")]
    pub custom_version: Option<String>,
    /// Name of the ControllerRevision; comes before `customVersion`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::text")]
    pub revision_name: Option<String>,
    /// Which new Pods get it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<SidecarSetInjectRevisionPolicy>,
}

/// Annotations for the Pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SidecarSetPatchPodMetadata {
    /// The annotations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::annotations")]
    pub annotations: Option<std::collections::BTreeMap<String, String>>,
    /// What happens to annotations that the Pod has already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::word")]
    pub patch_policy: Option<SidecarSetPatchPolicy>,
}

/// Condition type of ours: whether the API server injects new Pods by a policy.
pub const INJECTED_BY_POLICY: &str = "InjectedByPolicy";

/// Observed state of a SidecarSet.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("required" = ["matchedPods", "readyPods", "updatedPods"]))]
pub struct SidecarSetStatus {
    /// Generation of the spec that this status was written for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Pods that have the set's containers.
    #[serde(default)]
    pub matched_pods: i32,
    /// Pods that have the current ones.
    #[serde(default)]
    pub updated_pods: i32,
    /// Pods that are ready.
    #[serde(default)]
    pub ready_pods: i32,
    /// Pods that have the current containers and are ready.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub updated_ready_pods: i32,
    /// Name of the revision of the current spec.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub latest_revision: String,
    /// Number of hash collisions of revision names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collision_count: Option<i32>,
    /// Selected Pods that were created without the set's containers. Not part of OpenKruise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_injected_pods: Option<i32>,
    /// `Waiting`: what the update waits for. `InjectedByPolicy`: whether the API server injects new Pods itself. Not part
    /// of OpenKruise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schemas::conditions")]
    pub conditions: Vec<Condition>,
}

impl SidecarSetSpec {
    /// Whether new Pods are not injected for now.
    #[must_use]
    pub fn is_injection_paused(&self) -> bool {
        self.injection_strategy
            .as_ref()
            .is_some_and(|injection| injection.paused)
    }

    /// The older revision that new Pods get.
    #[must_use]
    pub fn injected_revision(&self) -> Option<&SidecarSetInjectRevision> {
        self.injection_strategy.as_ref()?.revision.as_ref()
    }
}

impl SidecarSet {
    /// Whether a policy injects its new Pods.
    #[must_use]
    pub fn has_policy(&self) -> bool {
        let conditions = self.status.iter().flat_map(|status| &status.conditions);
        conditions
            .into_iter()
            .any(|condition| condition.type_ == INJECTED_BY_POLICY && condition.status == "True")
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(number: &i32) -> bool {
    *number == 0
}
