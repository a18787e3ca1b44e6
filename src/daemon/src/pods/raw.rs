//! A Pod as the API server sends it, parsed no further than needed.
//!
//! A user who creates Pods may make them large, and all Pods of a node are read at once. Unused fields are skipped;
//! fields that only some Pods need are kept as text until then.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use kruise_api::restart_policy::RawRestartRule;

#[derive(Deserialize)]
pub struct Pod<'a> {
    #[serde(borrow)]
    pub metadata: Metadata<'a>,
    #[serde(borrow, default)]
    pub spec: Spec<'a>,
    #[serde(borrow, default)]
    pub status: Status<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata<'a> {
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub uid: Option<String>,
    pub resource_version: Option<String>,
    pub deletion_timestamp: Option<IgnoredAny>,
    #[serde(borrow)]
    pub labels: Option<&'a RawValue>,
    pub annotations: Option<BTreeMap<String, String>>,
    pub owner_references: Option<Vec<OwnerReference>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub struct Spec<'a> {
    pub node_name: Option<String>,
    pub host_network: Option<bool>,
    pub restart_policy: Option<String>,
    pub termination_grace_period_seconds: Option<i64>,
    #[serde(borrow)]
    pub init_containers: Option<Vec<&'a RawValue>>,
    #[serde(borrow)]
    pub containers: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Container<'a> {
    pub name: String,
    pub image: Option<String>,
    pub restart_policy: Option<String>,
    pub restart_policy_rules: Option<Vec<RawRestartRule>>,
    #[serde(borrow)]
    pub ports: Option<&'a RawValue>,
    #[serde(borrow)]
    pub lifecycle: Option<Lifecycle<'a>>,
    #[serde(borrow)]
    pub env: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle<'a> {
    #[serde(borrow)]
    pub pre_stop: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Port {
    pub name: Option<String>,
    pub container_port: i32,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub struct Status<'a> {
    pub phase: Option<String>,
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pub pod_ips: Option<Vec<Ip>>,
    pub conditions: Option<Vec<Condition>>,
    #[serde(borrow)]
    pub container_statuses: Option<Vec<&'a RawValue>>,
    #[serde(borrow)]
    pub init_container_statuses: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
pub struct Ip {
    pub ip: String,
}

#[derive(Deserialize)]
pub struct Condition {
    #[serde(rename = "type")]
    pub type_: String,
    pub status: String,
}

impl<'a> Container<'a> {
    /// Its preStop hook.
    pub fn pre_stop(&self) -> Option<&'a RawValue> {
        self.lifecycle.as_ref()?.pre_stop
    }
}

impl Status<'_> {
    /// Whether the condition has that status.
    pub fn has_condition(&self, type_: &str, status: &str) -> bool {
        let mut conditions = self.conditions.iter().flatten();
        conditions.any(|condition| condition.type_ == type_ && condition.status == status)
    }
}
