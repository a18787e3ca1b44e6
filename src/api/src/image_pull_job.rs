//! ImagePullJob (v1beta1): one image for many nodes.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    Condition, LabelSelector, LabelSelectorRequirement, Time,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::node_image::{DEFAULT_BACKOFF_LIMIT, DEFAULT_TIMEOUT_SECONDS};
pub use super::node_image::{ImagePullPolicy, SandboxConfig};
use super::schemas;
use super::string_enum::string_enum;

string_enum! {
    open
    /// Whether a job ends.
    CompletionPolicyType {
        /// The job ends when all its nodes did.
        Always,
        /// The job goes on, for nodes that come later too, and pulls again every day, or as `schedule` says.
        Never,
    }
}

/// Image, nodes and limits of the job.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1beta1",
    kind = "ImagePullJob",
    plural = "imagepulljobs",
    namespaced,
    status = "ImagePullJobStatus",
    derive = "PartialEq",
    doc = "Pulls one image on many nodes, ahead of the Pods that need it."
)]
#[serde(rename_all = "camelCase")]
pub struct ImagePullJobSpec {
    /// Reference of the image: NAME[:TAG][@DIGEST].
    #[allow(rustdoc::broken_intra_doc_links)]
    pub image: String,
    /// Which nodes pull the image; every node when absent. Excludes `podSelector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::node_selector")]
    pub selector: Option<ImagePullJobNodeSelector>,
    /// Pods whose nodes pull the image. Excludes `selector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::pod_selector")]
    pub pod_selector: Option<ImagePullJobPodSelector>,
    /// How many nodes pull at a time: 0 or greater, as a number or a string of digits, or a percentage of the job's
    /// nodes such as `10%`, rounded down, but at least one node; 1 when absent, 0 pauses the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub parallelism: Option<IntOrString>,
    /// Names of Secrets with registry credentials, in the job's namespace. Cannot be changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pull_secrets: Vec<String>,
    /// Service account in the job's namespace: credential provider plugins of the nodes get its token, as for a Pod of
    /// that account; they get none when absent. Cannot be changed. Not part of OpenKruise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
    /// Limits of each node's pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<PullPolicy>,
    /// When the job ends and when it is deleted. By default it ends when all its nodes have, and is not deleted.
    #[serde(default)]
    pub completion_policy: CompletionPolicy,
    /// Labels and annotations handed to the runtime with the pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_config: Option<SandboxConfig>,
    /// Whether an image that is present is fetched again: Always or IfNotPresent (when absent).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// With completion policy `Never`: when each node pulls again, as a cron schedule in UTC (minute, hour, day of month,
    /// month, day of week); a day after its last pull when absent. Not part of OpenKruise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
}

impl ImagePullJobSpec {
    /// The same with the defaults that admission sets, so that two specs can be compared.
    #[must_use]
    pub fn with_defaults(mut self) -> Self {
        let completion = &mut self.completion_policy;
        let timeout = default_timeout(completion.active_deadline_seconds);
        completion.type_.get_or_insert(CompletionPolicyType::Always);
        self.image_pull_policy
            .get_or_insert(ImagePullPolicy::IfNotPresent);
        self.parallelism.get_or_insert(IntOrString::Int(1));
        let pull = self.pull_policy.get_or_insert_default();
        pull.timeout_seconds.get_or_insert(timeout);
        pull.backoff_limit.get_or_insert(DEFAULT_BACKOFF_LIMIT);
        self
    }
}

/// Default timeout of one pull, in seconds: at most the job's deadline.
#[must_use]
pub fn default_timeout(deadline: Option<i64>) -> i32 {
    let deadline = deadline.and_then(|seconds| i32::try_from(seconds).ok());
    let deadline = deadline.filter(|seconds| *seconds > 0);
    deadline
        .unwrap_or(DEFAULT_TIMEOUT_SECONDS)
        .min(DEFAULT_TIMEOUT_SECONDS)
}

/// Nodes by name, or by label.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePullJobNodeSelector {
    /// Names of nodes. Cannot be used together with labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// Labels that must be there with these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements on labels; all must hold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<LabelSelectorRequirement>,
}

/// Pods by label.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePullJobPodSelector {
    /// Labels that must be there with these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements on labels; all must hold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<LabelSelectorRequirement>,
}

fn selector(labels: &BTreeMap<String, String>, expressions: &[LabelSelectorRequirement]) -> LabelSelector {
    LabelSelector {
        match_labels: (!labels.is_empty()).then(|| labels.clone()),
        match_expressions: (!expressions.is_empty()).then(|| expressions.to_vec()),
    }
}

impl From<&ImagePullJobNodeSelector> for LabelSelector {
    fn from(from: &ImagePullJobNodeSelector) -> Self {
        selector(&from.match_labels, &from.match_expressions)
    }
}

impl From<&ImagePullJobPodSelector> for LabelSelector {
    fn from(from: &ImagePullJobPodSelector) -> Self {
        selector(&from.match_labels, &from.match_expressions)
    }
}

/// Limits of each node's pull.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PullPolicy {
    /// Seconds that one attempt may take; 600 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<i32>,
    /// Number of retries after a failed attempt; 3 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backoff_limit: Option<i32>,
    /// Seconds after its pull during which the image is pinned: kubelet does not delete it, although nothing uses it.
    /// From 1 to 2592000 (30 days); not pinned when absent. Not part of OpenKruise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin_seconds: Option<i32>,
}

/// When a job ends and goes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CompletionPolicy {
    /// Always (the default): the job completes when all its nodes have. Never: it keeps running, and pulls on new nodes.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<CompletionPolicyType>,
    /// Seconds after its start when the job is ended, at least the timeout of one pull. For Always only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_deadline_seconds: Option<i64>,
    /// Seconds after its end when the job is deleted; never when absent. For Always only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds_after_finished: Option<i32>,
}

impl CompletionPolicy {
    /// Whether the job goes on for ever.
    #[must_use]
    pub fn never_ends(&self) -> bool {
        self.type_ == Some(CompletionPolicyType::Never)
    }

    /// Seconds after its end when a job is deleted, unless it never ends.
    #[must_use]
    pub fn ttl(&self) -> Option<i64> {
        let ttl = self.ttl_seconds_after_finished.filter(|_| !self.never_ends());
        ttl.map(i64::from)
    }
}

/// Condition of a job that ended with the image on all its nodes. Ours, like the others.
pub const COMPLETE: &str = "Complete";
/// Condition of a job that ended otherwise; its message names nodes and causes.
pub const FAILED: &str = "Failed";
/// Condition of a job that is blocked; its message reports what it waits for. Absent otherwise.
pub const WAITING: &str = "Waiting";

/// Observed state of an ImagePullJob.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImagePullJobStatus {
    /// Time at which the job was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Time at which the job ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Nodes the job is for.
    pub desired: i32,
    /// Nodes that pull.
    #[serde(default)]
    pub active: i32,
    /// Nodes that have the image.
    #[serde(default)]
    pub succeeded: i32,
    /// Nodes on which the pull failed.
    #[serde(default)]
    pub failed: i32,
    /// Progress of the job, for humans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Nodes on which the pull failed, sorted by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_nodes: Vec<String>,
    /// `Complete` or `Failed` once the job has ended, `Waiting` while it is blocked. Not part of OpenKruise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schemas::conditions")]
    pub conditions: Vec<Condition>,
    /// Bytes of the image that the nodes of a running job have together, for humans: `33% of 9.4 GiB`. Written with
    /// another change only. Absent if they are not known. Not part of OpenKruise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub progress: Option<String>,
}
