//! SidecarSet (v1alpha1).

use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::schemas::sidecarset as schema;
use crate::sidecarset as beta;

/// As in v1beta1, except that the custom version is a label ([`crate::keys::SIDECAR_SET_CUSTOM_VERSION`]).
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1alpha1",
    kind = "SidecarSet",
    plural = "sidecarsets",
    status = "beta::SidecarSetStatus",
    derive = "PartialEq",
    doc = "Injects containers into the Pods of others, and updates them there."
)]
#[schemars(
    description = "Which Pods get which containers, and how these are updated.",
    transform = remove_custom_version
)]
pub struct SidecarSetSpec {
    /// The only namespace of the Pods; comes before `namespaceSelector`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::label_value")]
    pub namespace: String,
    /// The fields that v1beta1 has as well.
    #[serde(flatten)]
    pub common: beta::SidecarSetSpec,
}

fn remove_custom_version(schema: &mut Schema) {
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        properties.remove("customVersion");
    }
}
