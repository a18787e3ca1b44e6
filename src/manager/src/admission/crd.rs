//! CRDs without their schemas. These are the largest part, and nested so deep that parsing one takes a deep stack.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The fields of a CRD that we read.
#[derive(kube::Resource, Clone, Debug, Deserialize, Serialize)]
#[resource(inherit = CustomResourceDefinition)]
pub(super) struct Crd {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct Spec {
    #[serde(default)]
    conversion: Value,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    #[serde(default)]
    stored_versions: Vec<String>,
}

impl Crd {
    /// The versions in which objects may be stored.
    pub fn stored_versions(&self) -> &[String] {
        &self.status.stored_versions
    }
}
