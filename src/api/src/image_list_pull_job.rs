//! ImageListPullJob (v1beta1): several images for many nodes, by one ImagePullJob for each.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::image_pull_job::{
    CompletionPolicy, ImagePullJob, ImagePullJobNodeSelector, ImagePullJobPodSelector, ImagePullJobSpec,
    ImagePullPolicy, PullPolicy, SandboxConfig,
};
use super::owner::{Owner, OwnerKind};
use super::schemas;

/// Maximum number of images.
pub const MAX_IMAGES: usize = 255;

/// Images, nodes and limits of the jobs. Except for the images, each ImagePullJob gets the same fields.
#[derive(kube::CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(
    group = "apps.kruise.io",
    version = "v1beta1",
    kind = "ImageListPullJob",
    plural = "imagelistpulljobs",
    namespaced,
    status = "ImageListPullJobStatus",
    derive = "PartialEq",
    doc = "Pulls several images on many nodes, by one ImagePullJob for each."
)]
#[serde(rename_all = "camelCase")]
pub struct ImageListPullJobSpec {
    /// References of the images: NAME[:TAG][@DIGEST], at most 255, each once.
    #[allow(rustdoc::broken_intra_doc_links)]
    pub images: Vec<String>,
    /// Which nodes pull the images; every node when absent. Excludes `podSelector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::node_selector")]
    pub selector: Option<ImagePullJobNodeSelector>,
    /// Pods whose nodes pull the images. Excludes `selector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::pod_selector")]
    pub pod_selector: Option<ImagePullJobPodSelector>,
    /// How many nodes pull one image at a time: 0 or greater, as a number or a string of digits, or a percentage of the
    /// job's nodes such as `10%`, rounded down, but at least one node; 1 when absent, 0 pauses the jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schemas::int_or_string")]
    pub parallelism: Option<IntOrString>,
    /// Names of Secrets with registry credentials, in the job's namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pull_secrets: Vec<String>,
    /// Service account in the job's namespace: credential provider plugins of the nodes get its token, as for a Pod of
    /// that account; they get none when absent. Not part of OpenKruise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
    /// Limits of each node's pull of one image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<PullPolicy>,
    /// When the ImagePullJobs end, and when this job is deleted with them. By default they end when all their nodes
    /// have, and are not deleted.
    #[serde(default)]
    pub completion_policy: CompletionPolicy,
    /// Labels and annotations handed to the runtime with the pulls.
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

impl ImageListPullJobSpec {
    /// The spec of the ImagePullJob for one image.
    #[must_use]
    pub fn job_spec(&self, image: &str) -> ImagePullJobSpec {
        let Self {
            images: _,
            selector,
            pod_selector,
            parallelism,
            pull_secrets,
            service_account_name,
            pull_policy,
            completion_policy,
            sandbox_config,
            image_pull_policy,
            schedule,
        } = self.clone();
        ImagePullJobSpec {
            image: image.to_owned(),
            selector,
            pod_selector,
            parallelism,
            pull_secrets,
            service_account_name,
            pull_policy,
            completion_policy,
            sandbox_config,
            image_pull_policy,
            schedule,
        }
    }
}

/// Observed state of an ImageListPullJob.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageListPullJobStatus {
    /// Time at which the job was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Time at which the last ImagePullJob ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Number of images.
    pub desired: i32,
    /// ImagePullJobs with nodes that pull.
    #[serde(default)]
    pub active: i32,
    /// ImagePullJobs that have ended.
    #[serde(default)]
    pub completed: i32,
    /// ImagePullJobs that have ended with the image on all their nodes.
    #[serde(default)]
    pub succeeded: i32,
    /// ImagePullJobs that failed, wholly or on some nodes, sorted by image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_image_statuses: Vec<FailedImageStatus>,
    /// `Complete` or `Failed` once the job has ended, `Waiting` while it is blocked. Not part of OpenKruise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schemas::conditions")]
    pub conditions: Vec<Condition>,
}

/// An ImagePullJob that failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FailedImageStatus {
    /// Name of the ImagePullJob.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub image_pull_job: String,
    /// The image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Where to look, for humans.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// The ImageListPullJob that controls an ImagePullJob.
#[must_use]
pub fn list_of(job: &ImagePullJob) -> Option<Owner> {
    Owner::controller(&job.metadata).filter(|owner| owner.kind == OwnerKind::ImageListPullJob)
}
