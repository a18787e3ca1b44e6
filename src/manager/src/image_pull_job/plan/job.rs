//! An ImagePullJob as input of decisions: references and numbers parsed, errors described.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::view::matches;
use kruise_api::image_list_pull_job::list_of;
use kruise_api::image_pull_job::{ImagePullJob, ImagePullJobSpec, ImagePullJobStatus};
use kruise_api::image_reference::ImageReference;
use kruise_api::keys;
use kruise_api::node_image::ServiceAccountReference;
use kruise_api::schedule::Schedule;
use kruise_api::time::add_seconds;
use kruise_cluster::Key;

/// UID of a job.
pub type Uid = Arc<str>;

/// One job.
#[derive(Clone, Debug)]
pub struct PullJob {
    /// Namespace and name of the job.
    pub key: Key,
    /// UID of the object.
    pub uid: String,
    /// Creation time of the object.
    pub created: Option<Timestamp>,
    /// The image's name and tag as in a NodeImage, or the error in the reference.
    pub image: Result<(String, String), String>,
    /// Host of the image's registry.
    pub registry: Option<Arc<str>>,
    /// How many nodes pull at once, or the error in the field.
    pub parallelism: Result<Parallelism, String>,
    /// When nodes pull again, or the error in the field.
    pub schedule: Result<Option<Schedule>, String>,
    /// The nodes that the job selects.
    pub targets: NodeTargets,
    /// The spec without the selectors, which may be as large as an object and are in `targets`.
    pub spec: ImagePullJobSpec,
    /// The stored status.
    pub status: ImagePullJobStatus,
    /// Whether the job is terminating.
    pub terminating: bool,
    /// Whether the job has our finalizer.
    pub has_finalizer: bool,
    /// Whether it is of an ImageListPullJob, with which it is deleted.
    pub of_list: bool,
}

/// How many nodes of a job pull at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parallelism {
    /// This number.
    Nodes(usize),
    /// This percentage of the job's nodes, at most 100: rounded down, but at least one node unless it is 0.
    Percent(usize),
}

impl Parallelism {
    fn parse(value: Option<&IntOrString>) -> Result<Self, String> {
        let number = |n: i32| usize::try_from(n).ok();
        let (parsed, given) = match value {
            None => return Ok(Self::Nodes(1)),
            Some(IntOrString::Int(n)) => (number(*n).map(Self::Nodes), n.to_string()),
            Some(IntOrString::String(text)) => {
                let parsed = match text.strip_suffix('%') {
                    None => text.parse().ok().and_then(number).map(Self::Nodes),
                    Some(percent) => {
                        let percent = percent.parse().ok().and_then(number);
                        percent.filter(|percent| *percent <= 100).map(Self::Percent)
                    }
                };
                (parsed, text.clone())
            }
        };
        parsed.ok_or_else(|| {
            format!(
                "spec.parallelism: {given:?} is neither a number of nodes, 0 or greater, nor a percentage from 0% to 100%"
            )
        })
    }

    /// The number for a job that selects `nodes` nodes.
    #[must_use]
    pub fn limit(self, nodes: usize) -> usize {
        match self {
            Self::Nodes(limit) => limit,
            Self::Percent(0) => 0,
            Self::Percent(percent) => (nodes.saturating_mul(percent) / 100).max(1),
        }
    }

    /// Whether the job is paused.
    #[must_use]
    pub fn is_zero(self) -> bool {
        matches!(self, Self::Nodes(0) | Self::Percent(0))
    }
}

/// The nodes that a job selects.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeTargets {
    /// All that have a NodeImage.
    All,
    /// These, if they have a NodeImage.
    Names(BTreeSet<String>),
    /// Nodes whose labels match.
    Labels(LabelSelector),
    /// Nodes of Pods in the job's namespace whose labels match.
    Pods(LabelSelector),
}

impl NodeTargets {
    /// Whether a node with that name and labels is selected; the caller checks Pods.
    #[must_use]
    pub fn includes(&self, name: &str, labels: &BTreeMap<String, String>) -> bool {
        match self {
            Self::All => true,
            Self::Names(names) => names.contains(name),
            Self::Labels(selector) => matches(selector, labels),
            Self::Pods(_) => false,
        }
    }
}

impl PullJob {
    /// Parses a job; never fails.
    #[must_use]
    pub fn from_object(object: &ImagePullJob) -> Self {
        let spec = without_selectors(&object.spec);
        let reference = ImageReference::parse(&spec.image);
        let registry = reference.as_ref().ok().map(|r| r.host().into());
        let image = reference
            .map(|r| (r.familiar_name(), r.tag_or_digest().to_owned()))
            .map_err(|e| format!("spec.image: {e}"));
        let finalizers = object.metadata.finalizers.iter().flatten();
        Self {
            key: Key::from_object(object),
            uid: object.metadata.uid.clone().unwrap_or_default(),
            created: object.metadata.creation_timestamp.as_ref().map(|at| at.0),
            image,
            registry,
            parallelism: Parallelism::parse(spec.parallelism.as_ref()),
            schedule: schedule(&spec),
            targets: node_targets(&object.spec),
            status: object.status.clone().unwrap_or_default(),
            terminating: object.metadata.deletion_timestamp.is_some(),
            has_finalizer: finalizers.into_iter().any(|f| f == keys::DELETION_PROTECTION),
            of_list: list_of(object).is_some(),
            spec,
        }
    }

    /// Whether the completion policy is `Never`.
    #[must_use]
    pub fn never_ends(&self) -> bool {
        self.spec.completion_policy.never_ends()
    }

    /// Whether both give a pull the same limits and policy. Image, pull secrets and service account cannot be
    /// changed, and `sandboxConfig` is shared by all tags of the image.
    #[must_use]
    pub fn requests_the_same_as(&self, other: &Self) -> bool {
        let requested = |spec: &ImagePullJobSpec| {
            (
                spec.pull_policy.clone(),
                spec.completion_policy.clone(),
                spec.image_pull_policy.clone(),
                spec.schedule.clone(),
            )
        };
        requested(&self.spec) == requested(&other.spec)
    }

    /// The service account that the job names.
    #[must_use]
    pub fn service_account(&self) -> Option<ServiceAccountReference> {
        Some(ServiceAccountReference {
            namespace: self.key.namespace.clone()?,
            name: self.spec.service_account_name.clone()?,
        })
    }

    /// Whether the job has a completion time.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.terminating || self.status.completion_time.is_some()
    }

    /// The job's deadline, given its start.
    #[must_use]
    pub fn deadline(&self, started: Timestamp) -> Option<Timestamp> {
        let seconds = self.spec.completion_policy.active_deadline_seconds?;
        (!self.never_ends()).then(|| add_seconds(started, seconds))
    }

    /// When the job is deleted, once it is complete. One of an ImageListPullJob has the TTL of that as its own, but
    /// counts for it until it ends.
    #[must_use]
    pub fn expiry(&self) -> Option<Timestamp> {
        let ttl = self.spec.completion_policy.ttl().filter(|_| !self.of_list)?;
        let completed = self.status.completion_time.as_ref()?.0;
        Some(add_seconds(completed, ttl))
    }
}

fn schedule(spec: &ImagePullJobSpec) -> Result<Option<Schedule>, String> {
    let parsed = spec.schedule.as_deref().map(Schedule::parse).transpose();
    parsed.map_err(|why| format!("spec.schedule: {why}"))
}

fn without_selectors(spec: &ImagePullJobSpec) -> ImagePullJobSpec {
    let ImagePullJobSpec {
        image,
        selector: _,
        pod_selector: _,
        parallelism,
        pull_secrets,
        service_account_name,
        pull_policy,
        completion_policy,
        sandbox_config,
        image_pull_policy,
        schedule,
    } = spec;
    ImagePullJobSpec {
        image: image.clone(),
        selector: None,
        pod_selector: None,
        parallelism: parallelism.clone(),
        pull_secrets: pull_secrets.clone(),
        service_account_name: service_account_name.clone(),
        pull_policy: pull_policy.clone(),
        completion_policy: completion_policy.clone(),
        sandbox_config: sandbox_config.clone(),
        image_pull_policy: image_pull_policy.clone(),
        schedule: schedule.clone(),
    }
}

fn node_targets(spec: &ImagePullJobSpec) -> NodeTargets {
    if let Some(pods) = &spec.pod_selector {
        return NodeTargets::Pods(pods.into());
    }
    match &spec.selector {
        None => NodeTargets::All,
        Some(nodes) if !nodes.names.is_empty() => NodeTargets::Names(nodes.names.iter().cloned().collect()),
        Some(nodes) => NodeTargets::Labels(nodes.into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;
    use kruise_api::image_pull_job::ImagePullJobNodeSelector;

    #[test]
    fn selectors_are_kept_only_in_targets() {
        let spec = ImagePullJobSpec {
            selector: Some(ImagePullJobNodeSelector {
                names: vec!["n".into()],
                ..ImagePullJobNodeSelector::default()
            }),
            pod_selector: None,
            ..ImagePullJobSpec::default()
        };
        let job = PullJob::from_object(&ImagePullJob::new("j", spec));
        assert_eq!(job.targets, NodeTargets::Names(["n".to_owned()].into()));
        assert_eq!((job.spec.selector, job.spec.pod_selector), (None, None));
    }

    #[test]
    fn job_of_a_list_is_not_deleted_before_the_list() {
        let job = |owner: Value| -> PullJob {
            let object = json!({ "metadata": { "name": "j", "ownerReferences": [owner] },
                "spec": { "image": "i", "completionPolicy": { "ttlSecondsAfterFinished": 60 } },
                "status": { "desired": 1, "completionTime": "2026-01-01T00:00:00Z" } });
            PullJob::from_object(&serde_json::from_value(object).unwrap())
        };
        let owner = |kind: &str, controller: bool| {
            json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": kind, "name": "o", "uid": "o",
                "controller": controller })
        };
        let expiry = "2026-01-01T00:01:00Z".parse().ok();
        assert_eq!(job(owner("ImageListPullJob", true)).expiry(), None);
        assert_eq!(job(owner("ImageListPullJob", false)).expiry(), expiry);
        assert_eq!(job(owner("CloneSet", true)).expiry(), expiry);
    }

    #[test]
    fn parallelism_is_a_number_or_a_percentage() {
        let int = |n| Parallelism::parse(Some(&IntOrString::Int(n)));
        let text = |t: &str| Parallelism::parse(Some(&IntOrString::String(t.to_owned())));
        assert_eq!(Parallelism::parse(None), Ok(Parallelism::Nodes(1)));
        assert_eq!(int(0), Ok(Parallelism::Nodes(0)));
        assert_eq!(text("7"), Ok(Parallelism::Nodes(7)));
        assert_eq!(text("7%"), Ok(Parallelism::Percent(7)));
        for wrong in [
            int(-1),
            text("-1"),
            text("-1%"),
            text("101%"),
            text("%"),
            text(""),
            text("many"),
        ] {
            assert!(wrong.is_err_and(|e| e.starts_with("spec.parallelism")));
        }
        let of = |percent, nodes| Parallelism::Percent(percent).limit(nodes);
        assert_eq!(
            [
                of(10, 0),
                of(10, 9),
                of(10, 20),
                of(10, 29),
                of(100, 29),
                of(0, 29)
            ],
            [1, 1, 2, 2, 29, 0]
        );
        assert_eq!(of(100, usize::MAX), usize::MAX / 100, "no overflow");
        assert!(Parallelism::Percent(0).is_zero() && !Parallelism::Percent(1).is_zero());
    }
}
