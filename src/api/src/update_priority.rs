//! The order in which the Pods of a workload are updated.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::schemas;

/// Which Pods come first: by weight, or by the order of labels. One excludes the other.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UpdatePriorityStrategy {
    /// Terms whose order counts: Pods are compared by the first of these labels that they have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub order_priority: Vec<UpdatePriorityOrderTerm>,
    /// Terms whose weights add up: Pods with the greater sum come first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weight_priority: Vec<UpdatePriorityWeightTerm>,
}

/// A label by whose value Pods are ordered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UpdatePriorityOrderTerm {
    /// Key of the label. Of two Pods that have it, that whose value ends in the greater number comes first.
    pub ordered_key: String,
}

/// A weight for the Pods that a selector matches.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UpdatePriorityWeightTerm {
    /// The weight, 0 to 100.
    pub weight: i32,
    /// Pods that get it.
    #[schemars(schema_with = "schemas::weighted_pods")]
    pub match_selector: LabelSelector,
}

/// Pods that have this label are spread over the whole update, rather than updated one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UpdateScatterTerm {
    /// Key of the label.
    pub key: String,
    /// Value of the label.
    pub value: String,
}
