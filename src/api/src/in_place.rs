//! The state of an in-place update on a Pod, in the JSON that OpenKruise reads and writes too.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::schemas;

/// How Pods are updated in place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InPlaceUpdateStrategy {
    /// Seconds between a Pod's being marked not ready and its change; 0 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_period_seconds: Option<i32>,
    /// On how many nodes a new image is pulled at a time ahead of the update: 0 or greater, as a number or a
    /// string of digits; 1 when absent, 0 pauses the pulls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub image_pre_download_parallelism: Option<IntOrString>,
    /// Seconds that one of these pulls may take; 300 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pre_download_timeout_seconds: Option<i32>,
    /// How many Pods must be updated and ready before images are pulled ahead; 0 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pre_download_min_updated_ready_pods: Option<i32>,
}

/// Value of Pod annotation [`super::keys::IN_PLACE_UPDATE_STATE`]: progress of the last in-place update.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InPlaceUpdateState {
    /// Revision that the Pod is updated to.
    pub revision: String,
    /// When the update began.
    #[serde(default)]
    pub update_timestamp: Option<Time>,
    /// What ran before the update, by container name. Only containers whose image changes.
    #[serde(default, deserialize_with = "null_is_empty", serialize_with = "empty_is_null")]
    pub last_container_statuses: BTreeMap<String, InPlaceUpdateContainerStatus>,
    /// Whether environment from labels and annotations changes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub update_env_from_metadata: bool,
    /// Whether resources change.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub update_resources: bool,
    /// Whether images change.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub update_images: bool,
    /// Images of the remaining batches, by container name.
    #[serde(
        default,
        deserialize_with = "null_is_empty",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub next_container_images: BTreeMap<String, String>,
    /// Labels and annotations of the remaining batches, by the name of the container that reads them.
    #[serde(
        default,
        deserialize_with = "null_is_empty",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub next_container_ref_metadata: BTreeMap<String, ContainerRefMetadata>,
    /// Resources of the remaining batches, by container name.
    #[serde(
        default,
        deserialize_with = "null_is_empty",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub next_container_resources: BTreeMap<String, ResourceRequirements>,
    /// What must be true before the next batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pre_check_before_next: Option<InPlaceUpdatePreCheckBeforeNext>,
    /// Batches that have begun, the oldest first.
    #[serde(
        default,
        deserialize_with = "null_is_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub container_batches_record: Vec<InPlaceUpdateContainerBatch>,
    /// Fields of other programs, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// What ran in a container before its update.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InPlaceUpdateContainerStatus {
    /// ID of the image, as the Pod's status had it.
    #[serde(default, rename = "imageID", skip_serializing_if = "String::is_empty")]
    pub image_id: String,
    /// ID of the container, as `RUNTIME://ID`: a field of ours. A container with a different ID started after the
    /// update began, but not necessarily with the new image.
    #[serde(default, rename = "containerID", skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// Image name in the Pod's spec before the update: a field of ours. A container that the daemon reports with that
    /// image is not updated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Generation of the Pod before its image was changed: a field of ours. Once kubelet reports a later one, it has
    /// observed the change, and no container starts any more that was due before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// Whether the previous update had not ended for this container: a field of ours. Its container may still start, so
    /// a different image ID does not distinguish the two updates.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub superseded: bool,
}

/// What must be true before the next batch of containers is updated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InPlaceUpdatePreCheckBeforeNext {
    /// Names of the containers that must be ready, sorted.
    #[serde(
        default,
        deserialize_with = "null_is_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub containers_required_ready: Vec<String>,
}

/// Containers that were updated together.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InPlaceUpdateContainerBatch {
    /// Time of the update.
    #[serde(default)]
    pub timestamp: Option<Time>,
    /// Names of the containers, sorted.
    #[serde(default, deserialize_with = "null_is_empty")]
    pub containers: Vec<String>,
}

/// Value of Pod annotation [`super::keys::IN_PLACE_UPDATE_GRACE`]: an update that waits for its grace period.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InPlaceUpdateGrace {
    /// Revision that the Pod is updated to.
    pub revision: String,
    /// New images, by container name.
    #[serde(
        default,
        deserialize_with = "null_is_empty",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub container_images: BTreeMap<String, String>,
    /// New labels and annotations, by the name of the container that reads them.
    #[serde(
        default,
        deserialize_with = "null_is_empty",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub container_ref_metadata: BTreeMap<String, ContainerRefMetadata>,
    /// New resources, by container name.
    #[serde(
        default,
        deserialize_with = "null_is_empty",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub container_resources: BTreeMap<String, ResourceRequirements>,
    /// Strategic merge patch of the Pod's metadata, in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meta_data_patch: Option<String>,
    /// Whether environment from labels and annotations changes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub update_env_from_metadata: bool,
    /// Seconds that the update waits from its beginning; 0 or less means no wait.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub grace_seconds: i32,
    /// Fields of other programs, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Labels and annotations that a container's environment refers to.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRefMetadata {
    /// Always null; Go writes it.
    #[serde(default)]
    pub creation_timestamp: Option<Time>,
    /// Labels of the Pod.
    #[serde(
        default,
        deserialize_with = "null_is_empty",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the Pod.
    #[serde(
        default,
        deserialize_with = "null_is_empty",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub annotations: BTreeMap<String, String>,
}

/// Value of Pod annotation [`super::keys::RUNTIME_CONTAINERS_META`]: the running containers as the node's daemon
/// observed them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeContainerMetaSet {
    /// One entry per container.
    #[serde(deserialize_with = "null_is_empty")]
    pub containers: Vec<RuntimeContainerMeta>,
}

/// One container as the node's daemon observed it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeContainerMeta {
    /// Name of the container.
    pub name: String,
    /// ID of the container, as `RUNTIME://ID`.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// Restart count.
    pub restart_count: i32,
    /// Hashes of the container's configuration at its start.
    pub hashes: RuntimeContainerHashes,
}

/// Hashes of the configuration that a container was started with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeContainerHashes {
    /// Kubelet's hash of the container.
    pub plain_hash: u64,
    /// Hash of the environment from labels and annotations; 0 means unknown.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub extracted_env_from_metadata_hash: u64,
}

fn is_zero<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}

/// Go writes `null` for an empty map or list.
fn null_is_empty<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

fn empty_is_null<S: Serializer, V: Serialize>(map: &BTreeMap<String, V>, to: S) -> Result<S::Ok, S::Error> {
    if map.is_empty() {
        return to.serialize_none();
    }
    map.serialize(to)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use serde_json::json;

    #[test]
    fn go_json_round_trips() {
        let state = r#"{"revision":"x-new","updateTimestamp":"2024-01-02T03:04:05Z","lastContainerStatuses":{"a":{"imageID":"sha256:1"}},"updateImages":true,"nextContainerImages":{"b":"b:2"},"nextContainerRefMetadata":{"b":{"creationTimestamp":null,"labels":{"v":"2"}}},"nextContainerResources":{"b":{"requests":{"cpu":"1"}}},"preCheckBeforeNext":{"containersRequiredReady":["a"]},"containerBatchesRecord":[{"timestamp":"2024-01-02T03:04:05Z","containers":["a"]}]}"#;
        let typed: InPlaceUpdateState = serde_json::from_str(state).unwrap();
        assert_eq!(serde_json::to_string(&typed).unwrap(), state);
        let grace = r#"{"revision":"x-new","containerImages":{"c0":"c:2"},"containerRefMetadata":{"c0":{"creationTimestamp":null,"annotations":{"v":"2"}}},"containerResources":{"c0":{"limits":{"cpu":"2"}}},"metaDataPatch":"e30=","updateEnvFromMetadata":true,"graceSeconds":10}"#;
        let typed: InPlaceUpdateGrace = serde_json::from_str(grace).unwrap();
        assert_eq!(serde_json::to_string(&typed).unwrap(), grace);
        let meta = r#"{"containers":[{"name":"c","containerID":"containerd://1","restartCount":0,"hashes":{"plainHash":1,"extractedEnvFromMetadataHash":2}}]}"#;
        let typed: RuntimeContainerMetaSet = serde_json::from_str(meta).unwrap();
        assert_eq!(serde_json::to_string(&typed).unwrap(), meta);
    }

    #[test]
    fn null_and_unknown_fields_are_kept() {
        let wire = json!({
            "revision": "r", "updateTimestamp": null, "lastContainerStatuses": null, "later": { "field": 1 },
        });
        let typed: InPlaceUpdateState = serde_json::from_value(wire.clone()).unwrap();
        assert!(typed.last_container_statuses.is_empty());
        assert_eq!(serde_json::to_value(&typed).unwrap(), wire);
    }
}
