//! NodeImage (v1beta1): the images that one node should have, and their state.
//!
//! Cluster-scoped, named like its node. The manager writes `spec`, the node's daemon writes `status`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::byte_size::{format_bytes, percent};
use super::schemas;
use super::string_enum::string_enum;

mod lenient;

string_enum! {
    open
    /// When an image is fetched although it may be present. Absent means `IfNotPresent`.
    ImagePullPolicy {
        /// Ask the registry every time.
        Always,
        /// Do nothing when the image is on the node.
        IfNotPresent,
    }
}

string_enum! {
    open
    /// How far the pull of one tag is.
    ImagePullPhase {
        /// Known to the daemon and queued.
        Waiting,
        /// Being pulled.
        Pulling,
        /// The image is on the node.
        Succeeded,
        /// Given up; the message says why.
        Failed,
    }
}

string_enum! {
    open
    /// How the first synchronisation of a node went. No program writes it today.
    SyncStatusPhase {
        /// All images were pulled.
        Succeeded,
        /// Some image was not pulled.
        Failed,
    }
}

/// Default timeout of one attempt to pull an image, in seconds.
pub const DEFAULT_TIMEOUT_SECONDS: i32 = 600;
/// Default number of retries after a failed attempt.
pub const DEFAULT_BACKOFF_LIMIT: i32 = 3;
/// How long an image can be pinned, in seconds: 30 days. All tenants of a node share its disk.
pub const MAX_PIN_SECONDS: i32 = 30 * 86_400;
/// Maximum bytes of `spec.images`, as etcd stores them, with the keys of sandbox configurations counted twice, because
/// `managedFields` has them too. All tenants of a node share its NodeImage, and etcd accepts 1.5 MiB of one object:
/// what this and [`MAX_STATUS_BYTES`] leave is for `metadata`, which has each image's name for both.
pub const MAX_IMAGES_BYTES: usize = 512 << 10;
/// Maximum bytes of `status`, as etcd stores them: without their messages, the tags that [`MAX_IMAGES_BYTES`] allows
/// fit. The conditions are not counted; they are short.
pub const MAX_STATUS_BYTES: usize = 768 << 10;

/// Maximum number of tags of all images of one node.
pub const MAX_TAGS: usize = 10_000;
/// Maximum characters of an image's name: a name has 255.
pub const MAX_IMAGE_NAME_CHARS: usize = 1024;

/// Condition type of ours: whether a container runtime of the node answers. Absent where one always did. It is also the
/// reason while the condition is true.
pub const RUNTIME_READY: &str = "RuntimeReady";
/// Reason of [`RUNTIME_READY`] while no container runtime answers.
pub const NO_RUNTIME_REASON: &str = "NoRuntime";
/// Maximum number of conditions.
pub const MAX_CONDITIONS: usize = 16;
/// Maximum characters of a condition's message.
pub const MAX_CONDITION_MESSAGE_CHARS: usize = 1024;

/// Images that the node should pull.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1beta1",
    kind = "NodeImage",
    plural = "nodeimages",
    status = "NodeImageStatus",
    derive = "PartialEq",
    doc = "Images that one node should pull. It has the name of its node."
)]
#[serde(rename_all = "camelCase")]
pub struct NodeImageSpec {
    /// Images to keep on the node, by name without tag; at most 256.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub images: BTreeMap<String, ImageSpec>,
}

/// One image and what is requested of it, with `S` for how a version names Secrets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(description = "An image and the tags to pull.")]
pub struct ImageSpec<S = ReferenceObject> {
    /// Secrets with registry credentials, in the daemon's configuration namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pull_secrets: Vec<S>,
    /// Service accounts of the jobs that request tags: credential provider plugins get their tokens. Not part of
    /// OpenKruise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub service_accounts: Vec<ServiceAccountReference>,
    /// Labels and annotations handed to the runtime with the pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_config: Option<SandboxConfig>,
    /// Tags (or digests) of the image.
    pub tags: Vec<ImageTagSpec>,
}

/// A Secret by namespace and name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReferenceObject {
    /// Namespace of the Secret.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Name of the Secret.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// `batch` for copies that jobs share and that go with the image; absent for those of old releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub mode: Option<String>,
}

/// A service account by namespace and name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceAccountReference {
    /// Namespace of the service account.
    pub namespace: String,
    /// Name of the service account.
    pub name: String,
}

/// Labels and annotations handed to the runtime with a pull, as those of a Pod sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxConfig {
    /// Labels of the sandbox.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the sandbox.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// Maximum number of labels, and of annotations, of a [`SandboxConfig`].
pub const MAX_SANDBOX_ENTRIES: usize = 64;
/// Maximum characters of one of its values.
pub const MAX_SANDBOX_VALUE_CHARS: usize = 65_536;

impl SandboxConfig {
    /// The same without entries that the schema would refuse: a runtime works without them, and a pull should not fail
    /// because of them.
    #[must_use]
    pub fn within_schema_limits(&self) -> Self {
        let limited = |texts: &BTreeMap<String, String>| {
            let is_within_limits = |(key, value): &(&String, &String)| {
                key.chars().count() <= schemas::MAX_KEY_CHARS
                    && value.chars().count() <= MAX_SANDBOX_VALUE_CHARS
            };
            let some = texts.iter().filter(is_within_limits).take(MAX_SANDBOX_ENTRIES);
            some.map(|(key, value)| (key.clone(), value.clone())).collect()
        };
        Self {
            labels: limited(&self.labels),
            annotations: limited(&self.annotations),
        }
    }
}

/// One tag (or digest) to pull.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageTagSpec {
    /// The tag, or the digest as `sha256:…`.
    pub tag: String,
    /// Time at which the tag was requested. Set when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Time>,
    /// Limits of the pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<ImageTagPullPolicy>,
    /// Jobs that requested the tag.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schemas::object_references")]
    pub owner_references: Vec<ObjectReference>,
    /// Incremented to pull the tag again; 0 or greater.
    #[serde(default)]
    pub version: i64,
    /// Whether an image that is present is fetched again: Always or IfNotPresent (when absent).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// Why a part of the entry could not be read, where that is so. No field of the API.
    #[serde(skip)]
    pub unreadable: Option<String>,
}

/// Limits of one pull.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageTagPullPolicy {
    /// Seconds that one attempt may take; 600 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<i32>,
    /// Number of retries after a failed attempt; 3 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backoff_limit: Option<i32>,
    /// Seconds after its end when the tag is removed from the NodeImage; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds_after_finished: Option<i32>,
    /// Seconds after its start at which the pull is reported as failed; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_deadline_seconds: Option<i64>,
    /// Seconds after the pull during which the image is pinned; not pinned when absent. Not part of OpenKruise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin_seconds: Option<i32>,
}

/// Observed state of the node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeImageStatus {
    /// Requested tags.
    pub desired: i32,
    /// Tags pulled.
    #[serde(default)]
    pub succeeded: i32,
    /// Tags that failed.
    #[serde(default)]
    pub failed: i32,
    /// Tags being pulled.
    #[serde(default)]
    pub pulling: i32,
    /// Tags that are queued.
    #[serde(default)]
    pub waiting: i32,
    /// State of each image's tags, by image name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub image_statuses: BTreeMap<String, ImageStatus>,
    /// State of the first synchronization of the node. Read for compatibility; not written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_sync_status: Option<SyncStatus>,
    /// `RuntimeReady` is false while no container runtime of the node answers, and true once one answers again. Not
    /// part of OpenKruise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schemas::conditions")]
    pub conditions: Vec<Condition>,
    /// Bytes of the tags that are being pulled together, for humans: `33% of 36.0 MiB`. Absent if they are not known. Not
    /// part of OpenKruise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub progress: Option<String>,
}

/// How the first synchronisation of a node went.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SyncStatus {
    /// Time at which it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sync_at: Option<Time>,
    /// Outcome.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<SyncStatusPhase>,
    /// Why it failed, for humans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// State of the tags of one image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageStatus {
    /// One entry a tag, sorted by tag.
    pub tags: Vec<ImageTagStatus>,
}

/// State of one tag.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageTagStatus {
    /// The tag, or the digest as `sha256:…`.
    pub tag: String,
    /// Waiting, Pulling, Succeeded or Failed.
    pub phase: ImagePullPhase,
    /// Percentage of the bytes that are on the node, 0 to 100; may decrease when an attempt is repeated.
    #[serde(default)]
    pub progress: i32,
    /// When the pull began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Time at which the pull ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Version of the tag in `spec` that this entry answers.
    #[serde(default)]
    pub version: i64,
    /// Image ID in the container runtime.
    #[serde(default, rename = "imageID", skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
    /// Why the tag waits or failed, for humans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Bytes of the pull while it runs, if they are known. Not part of OpenKruise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<PulledBytes>,
}

/// How many bytes of an image were pulled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PulledBytes {
    /// Bytes that are on the node.
    pub done: i64,
    /// All bytes.
    pub total: i64,
}

impl PulledBytes {
    /// From numbers of any size.
    #[must_use]
    pub fn new(done: u64, total: u64) -> Self {
        let number = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        Self {
            done: number(done),
            total: number(total),
        }
    }

    /// In words, with at most this percentage; none if the total is not known.
    #[must_use]
    pub fn in_words(self, max_percent: i32) -> Option<String> {
        let [done, total] = [self.done, self.total].map(|bytes| u64::try_from(bytes).unwrap_or(0));
        let percent = percent(done, total)?.min(max_percent);
        Some(format!("{percent}% of {}", format_bytes(total)))
    }
}

impl std::ops::Add for PulledBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            done: self.done.saturating_add(other.done),
            total: self.total.saturating_add(other.total),
        }
    }
}

impl NodeImageStatus {
    /// Sets [`Self::progress`] as the tags show it. 100 % is reserved for the end.
    pub fn update_progress(&mut self) {
        let tags = self.image_statuses.values().flat_map(|image| &image.tags);
        let bytes = tags.filter_map(|tag| tag.bytes);
        let sum = bytes.fold(PulledBytes::default(), |sum, bytes| sum + bytes);
        self.progress = sum.in_words(99);
    }
}

impl ImagePullPhase {
    /// Whether it is a final phase.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

impl ImageTagStatus {
    /// Whether the pull has ended. The time of the end may be unknown.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.completion_time.is_some() || self.phase.is_terminal()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use serde_json::json;

    #[test]
    fn unknown_phase_round_trips() {
        let wire = json!({ "tag": "1", "phase": "Paused", "progress": 0, "version": 0 });
        let tag: ImageTagStatus = serde_json::from_value(wire.clone()).unwrap();
        assert_eq!(tag.phase, ImagePullPhase::Other("Paused".into()));
        assert_eq!(serde_json::to_value(tag).unwrap(), wire);
    }

    #[test]
    fn progress_is_that_of_all_tags_that_are_pulled() {
        let progress = |tags: serde_json::Value| {
            let status =
                json!({ "desired": 3, "progress": "old", "imageStatuses": { "a": { "tags": tags } } });
            let mut status: NodeImageStatus = serde_json::from_value(status).unwrap();
            status.update_progress();
            status.progress
        };
        let tag = |bytes: serde_json::Value| json!({ "tag": "1", "phase": "Pulling", "bytes": bytes });
        let some = |done: i64, total: i64| tag(json!({ "done": done, "total": total }));
        let mib = 1 << 20;
        assert_eq!(
            progress(json!([
                some(mib, 3 * mib),
                tag(json!(null)),
                some(2 * mib, 6 * mib)
            ]))
            .as_deref(),
            Some("33% of 9.0 MiB")
        );
        assert_eq!(
            progress(json!([some(mib, mib)])).as_deref(),
            Some("99% of 1.0 MiB")
        );
        assert_eq!(progress(json!([some(-1, i64::MIN), tag(json!("x"))])), None);
        let longest = progress(json!([some(i64::MAX, i64::MAX), some(1, 1)])).unwrap();
        assert!(longest.len() <= 64, "{longest}");
    }
}
