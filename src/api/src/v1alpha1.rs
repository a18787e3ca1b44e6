//! The older version of each kind, served for clients that support no other.
//!
//! Fields that it lacks are kept in annotations while an object is in this version; see [`super::convert`].

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::container_recreate_request as crr;
pub use super::container_recreate_request::ContainerRecreateRequestContainerRecreateState;
use super::node_image as beta;
use super::schemas;

mod cloneset;
mod sidecarset;

pub use cloneset::{CloneSet, CloneSetScaleStrategy, CloneSetSpec, CloneSetUpdateStrategy};
pub use sidecarset::{SidecarSet, SidecarSetSpec};

/// Images that the node should pull.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1alpha1",
    kind = "NodeImage",
    plural = "nodeimages",
    status = "beta::NodeImageStatus",
    derive = "PartialEq",
    doc = "Images that one node should pull. It has the name of its node."
)]
#[serde(rename_all = "camelCase")]
pub struct NodeImageSpec {
    /// Images to keep on the node, by name without tag; at most 256.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub images: BTreeMap<String, beta::ImageSpec<ReferenceObject>>,
}

/// A Secret by namespace and name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReferenceObject {
    /// Namespace of the Secret.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Name of the Secret.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

/// Image, nodes and limits of the job: the same as in v1beta1.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1alpha1",
    kind = "ImagePullJob",
    plural = "imagepulljobs",
    namespaced,
    status = "super::image_pull_job::ImagePullJobStatus",
    derive = "PartialEq",
    doc = "Pulls one image on many nodes, ahead of the Pods that need it."
)]
#[serde(transparent)]
pub struct ImagePullJobSpec(pub super::image_pull_job::ImagePullJobSpec);

/// Images, nodes and limits of the jobs: the same as in v1beta1.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1alpha1",
    kind = "ImageListPullJob",
    plural = "imagelistpulljobs",
    namespaced,
    status = "super::image_list_pull_job::ImageListPullJobStatus",
    derive = "PartialEq",
    doc = "Pulls several images on many nodes, by one ImagePullJob for each."
)]
#[serde(transparent)]
pub struct ImageListPullJobSpec(pub super::image_list_pull_job::ImageListPullJobSpec);

/// Pod and containers to recreate, and how: the same as in v1beta1.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1alpha1",
    kind = "ContainerRecreateRequest",
    plural = "containerrecreaterequests",
    shortname = "crr",
    namespaced,
    status = "ContainerRecreateRequestStatus",
    derive = "PartialEq",
    doc = "Restarts containers of a Pod in place, without recreating the Pod."
)]
#[serde(transparent)]
pub struct ContainerRecreateRequestSpec(pub crr::ContainerRecreateRequestSpec);

/// Observed state of a ContainerRecreateRequest. The snapshot and the conditions of v1beta1 are annotations here.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecreateRequestStatus {
    /// Pending, Recreating or Completed.
    #[schemars(schema_with = "schemas::text")]
    pub phase: crr::ContainerRecreateRequestPhase,
    /// When the request ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Why the request waits or failed, for humans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// State of each container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "container_states")]
    pub container_recreate_states: Vec<ContainerRecreateRequestContainerRecreateState>,
}

/// The states of containers as in v1beta1, except for the values of the phase, which v1alpha1 does not check.
fn container_states(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = Vec::<ContainerRecreateRequestContainerRecreateState>::json_schema(generator);
    let phase = schema.pointer_mut("/items/properties/phase");
    if let Some(phase) = phase.and_then(Value::as_object_mut) {
        phase.remove("enum");
    }
    schema
}
