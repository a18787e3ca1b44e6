//! Lifecycle hooks of a workload's Pods, and the state of a Pod.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::schemas;
use super::string_enum::string_enum;

string_enum! {
    open
    /// Value of Pod label [`super::keys::LIFECYCLE_STATE`]. A Pod without it counts as `Normal`.
    LifecycleStateType {
        /// Made, and not yet given to its users.
        PreparingNormal,
        /// In use.
        Normal,
        /// To be updated in place as soon as its hook lets go.
        PreparingUpdate,
        /// Being updated in place.
        Updating,
        /// Updated in place; its hook has not come back yet.
        Updated,
        /// To be deleted as soon as its hook lets go.
        PreparingDelete,
    }
}

/// Hooks by the moment that they hold a Pod at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// Blocks the deletion of a Pod while any item of the hook is on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pre_delete: Option<LifecycleHook>,
    /// Holds a Pod before its update in place while any item of the hook is on it, and after the update until all
    /// are on it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_place_update: Option<LifecycleHook>,
    /// Holds a new Pod until all items of the hook are on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pre_normal: Option<LifecycleHook>,
}

/// What marks a Pod as held.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LifecycleHook {
    /// Labels, each with exactly this value.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schemas::hook_labels")]
    pub labels_handler: BTreeMap<String, String>,
    /// Finalizers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub finalizers_handler: Vec<String>,
    /// Whether a Pod is marked not ready while the hook holds it. Has no effect in `preNormal`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mark_pod_not_ready: bool,
}
