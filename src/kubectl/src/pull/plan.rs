//! What `pull` creates, prints and returns.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kruise_api::image_pull_job::{
    COMPLETE, CompletionPolicy, FAILED, ImagePullJob, ImagePullJobNodeSelector, ImagePullJobSpec, PullPolicy,
    WAITING,
};
use kruise_api::image_reference::{ImageReference, join_name_and_tag};
use kruise_api::names;
use kruise_api::node_image::{ImagePullPhase, NodeImage};
use kruise_api::text::printable;

use crate::conditions::find_true;

/// Seconds after its end when a job of this command is deleted.
pub const TTL_SECONDS: i32 = 24 * 60 * 60;
/// Characters of the image in a generated name.
const MAX_NAME_CHARS: usize = 40;

/// What the user asks for.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub image: String,
    pub labels: BTreeMap<String, String>,
    pub nodes: Vec<String>,
    pub parallelism: Option<IntOrString>,
    pub pull_secrets: Vec<String>,
    pub service_account: Option<String>,
    pub pin_seconds: Option<i32>,
}

/// The job to create. The API server generates its name.
pub fn job(request: &Request) -> ImagePullJob {
    let Request {
        image,
        labels,
        nodes,
        parallelism,
        pull_secrets,
        service_account,
        pin_seconds,
    } = request.clone();
    let selector = ImagePullJobNodeSelector {
        names: nodes,
        match_labels: labels,
        match_expressions: Vec::new(),
    };
    let everywhere = selector == ImagePullJobNodeSelector::default();
    let generate_name = format!("{}-", name_of_image(&image));
    ImagePullJob {
        metadata: ObjectMeta {
            generate_name: Some(generate_name),
            ..ObjectMeta::default()
        },
        spec: ImagePullJobSpec {
            image,
            selector: (!everywhere).then_some(selector),
            parallelism,
            pull_secrets,
            service_account_name: service_account,
            pull_policy: pin_seconds.map(|seconds| PullPolicy {
                pin_seconds: Some(seconds),
                ..PullPolicy::default()
            }),
            completion_policy: CompletionPolicy {
                ttl_seconds_after_finished: Some(TTL_SECONDS),
                ..CompletionPolicy::default()
            },
            ..ImagePullJobSpec::default()
        },
        status: None,
    }
}

/// The job that does again what this one does, on the nodes where it failed; `None` if it names none. It ends, also if
/// that one does not, and is not paused.
pub fn retry(job: &ImagePullJob, parallelism: Option<IntOrString>) -> Option<ImagePullJob> {
    let failed = job.status.as_ref().map(|status| status.failed_nodes.clone());
    let failed: Vec<String> = failed
        .unwrap_or_default()
        .into_iter()
        .filter(|name| names::is_subdomain(name))
        .collect();
    if failed.is_empty() {
        return None;
    }
    let name: String = job
        .metadata
        .name
        .iter()
        .flat_map(|name| name.chars())
        .take(MAX_NAME_CHARS)
        .collect();
    let ImagePullJobSpec {
        image,
        selector: _,
        pod_selector: _,
        parallelism: given,
        pull_secrets,
        service_account_name,
        pull_policy,
        completion_policy,
        sandbox_config,
        image_pull_policy,
        schedule: _,
    } = job.spec.clone();
    let is_zero = |value: &IntOrString| match value {
        IntOrString::Int(number) => *number == 0,
        IntOrString::String(text) => text.trim_end_matches('%').parse() == Ok(0),
    };
    let spec = ImagePullJobSpec {
        image,
        selector: Some(ImagePullJobNodeSelector {
            names: failed,
            ..ImagePullJobNodeSelector::default()
        }),
        pod_selector: None,
        parallelism: parallelism.or(given.filter(|value| !is_zero(value))),
        pull_secrets,
        service_account_name,
        pull_policy,
        completion_policy: CompletionPolicy {
            ttl_seconds_after_finished: Some(TTL_SECONDS),
            active_deadline_seconds: completion_policy.active_deadline_seconds,
            ..CompletionPolicy::default()
        },
        sandbox_config,
        image_pull_policy,
        schedule: None,
    };
    Some(ImagePullJob {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-retry-", name.trim_end_matches(['-', '.']))),
            ..ObjectMeta::default()
        },
        spec,
        status: None,
    })
}

/// The last part of an image's name as a part of an object's name.
fn name_of_image(image: &str) -> String {
    let path = ImageReference::parse(image).map(|reference| reference.path().to_owned());
    let path = path.unwrap_or_default();
    let last = path.rsplit('/').next().unwrap_or_default();
    let name: String = last
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() {
                c.to_ascii_lowercase()
            } else {
                '-'
            }
        })
        .take(MAX_NAME_CHARS)
        .collect();
    match name.trim_matches('-') {
        "" => "pull".to_owned(),
        name => format!("pull-{name}"),
    }
}

/// The progress of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Whether the manager has started it.
    pub started: bool,
    pub desired: i32,
    pub active: i32,
    pub succeeded: i32,
    pub failed: i32,
    /// What it waits for.
    pub waiting: String,
    /// Whether it has ended.
    pub ended: bool,
    /// Names of nodes on which it failed.
    pub failed_nodes: Vec<String>,
    /// Message of condition `Failed`.
    pub failure: Option<String>,
    /// Message of condition `Complete`.
    pub completion: Option<String>,
}

/// Reads the progress of a job.
pub fn progress(job: &ImagePullJob) -> Progress {
    let started = job.status.is_some();
    let status = job.status.clone().unwrap_or_default();
    let failure = find_true(&status.conditions, FAILED).map(|condition| condition.message.to_owned());
    let completion = find_true(&status.conditions, COMPLETE).map(|condition| condition.message.to_owned());
    let waiting = find_true(&status.conditions, WAITING);
    Progress {
        started,
        desired: status.desired.max(0),
        active: status.active.max(0),
        succeeded: status.succeeded.max(0),
        failed: status.failed.max(0),
        waiting: waiting.map_or_else(String::new, |waiting| {
            format!("{}: {}", waiting.reason, waiting.message)
        }),
        ended: status.completion_time.is_some() || completion.is_some() || failure.is_some(),
        failed_nodes: status.failed_nodes,
        failure,
        completion,
    }
}

/// Why a job that is complete has not pulled on all nodes that it names, or on none with its labels; `None` if it has.
pub fn missing_nodes(job: &ImagePullJob, end: &Progress) -> Option<String> {
    let selector = job.spec.selector.as_ref();
    let has_labels = selector.is_some_and(|selector| !selector.match_labels.is_empty());
    if end.is_complete() && end.desired == 0 && has_labels {
        return Some("no node matches the selector; nothing was pulled".to_owned());
    }
    let names = selector.map(|selector| &selector.names);
    let named: BTreeSet<&String> = names.into_iter().flatten().collect();
    let missing = named
        .len()
        .saturating_sub(usize::try_from(end.desired).unwrap_or_default());
    let why = end.completion.as_deref().map(printable).unwrap_or_default();
    (end.is_complete() && missing > 0).then(|| {
        let (image, named) = (&job.spec.image, named.len());
        format!("{missing} of the {named} named node(s) did not pull {image}: {why}")
    })
}

impl Progress {
    /// Whether the job ended with the image on all its nodes.
    pub fn is_complete(&self) -> bool {
        self.ended && self.failed == 0 && self.failed_nodes.is_empty() && self.failure.is_none()
    }

    /// Nodes that have ended.
    pub fn finished(&self) -> i32 {
        self.succeeded.saturating_add(self.failed)
    }

    /// What a retry does: the status does not name all nodes on which a large job failed.
    pub fn retry_hint(&self) -> String {
        let named = self.failed_nodes.len();
        if usize::try_from(self.failed).is_ok_and(|failed| failed > named) {
            return format!("To pull again on the {named} node(s) that the job names");
        }
        "To pull again there".to_owned()
    }

    /// One line for a log.
    pub fn line(&self) -> String {
        let Self {
            desired,
            active,
            succeeded,
            failed,
            waiting,
            ..
        } = self;
        if !self.started {
            return "waiting for kruise-manager to start the job".to_owned();
        }
        let mut line =
            format!("{succeeded} of {desired} node(s) have the image, {active} pull it, {failed} failed");
        if !waiting.is_empty() {
            line += &format!("; waiting: {waiting}");
        }
        line
    }

    /// Whether a log that ends with `last` should have another line: every tenth of the nodes, each change of what the
    /// job waits for, and the first failure.
    pub fn is_news_after(&self, last: Option<&Self>) -> bool {
        let Some(last) = last else { return true };
        let tenth = |progress: &Self| {
            let finished = i64::from(progress.finished()) * 10;
            finished.checked_div(i64::from(progress.desired))
        };
        tenth(self) != tenth(last)
            || self.started != last.started
            || self.desired != last.desired
            || self.waiting != last.waiting
            || (self.failed > 0) != (last.failed > 0)
            || (self.active > 0) != (last.active > 0)
    }
}

/// Why the pull of an image failed on a node.
pub fn cause(node_image: &NodeImage, image: &str) -> Option<String> {
    let wanted = ImageReference::parse(image).ok()?;
    let status = node_image.status.as_ref()?;
    let tags = status
        .image_statuses
        .iter()
        .flat_map(|(name, status)| status.tags.iter().map(move |tag| (name, tag)));
    let mut failed = tags.filter(|(name, tag)| {
        tag.phase == ImagePullPhase::Failed && wanted.is_same_image(&join_name_and_tag(name, &tag.tag))
    });
    let (_, tag) = failed.next()?;
    tag.message.clone().filter(|message| !message.is_empty())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn request(image: &str) -> Request {
        Request {
            image: image.into(),
            ..Request::default()
        }
    }

    #[test]
    fn node_that_does_not_exist_is_a_failure() {
        let object = |names: &[&str], desired: i32| -> ImagePullJob {
            let completion = "pulled on 1 node; no NodeImage named typo";
            let condition = json!({ "type": "Complete", "status": "True", "reason": "Completed",
                "message": completion, "lastTransitionTime": "2026-01-01T00:00:00Z" });
            serde_json::from_value(json!({
                "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "metadata": { "name": "j" },
                "spec": { "image": "nginx:1", "selector": { "names": names }, "completionPolicy": {} },
                "status": { "desired": desired, "active": 0, "succeeded": desired, "failed": 0,
                    "completionTime": "2026-01-01T00:00:00Z", "conditions": [condition] },
            }))
            .unwrap()
        };
        let missing = |names: &[&str], desired| {
            let job = object(names, desired);
            missing_nodes(&job, &progress(&job))
        };
        assert_eq!(missing(&["a", "a"], 1), None);
        assert_eq!(missing(&[], 0), None);
        let why = "1 of the 2 named node(s) did not pull nginx:1: pulled on 1 node; no NodeImage named typo";
        assert_eq!(missing(&["a", "typo"], 1).as_deref(), Some(why));
    }

    #[test]
    fn labels_that_no_node_has_are_a_failure() {
        let missing = |selector: Value, desired: i32| {
            let object = json!({
                "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "metadata": { "name": "j" },
                "spec": { "image": "nginx:1", "selector": selector, "completionPolicy": {} },
                "status": { "desired": desired, "active": 0, "succeeded": desired, "failed": 0,
                    "completionTime": "2026-01-01T00:00:00Z" },
            });
            let job: ImagePullJob = serde_json::from_value(object).unwrap();
            missing_nodes(&job, &progress(&job))
        };
        let labels = json!({ "matchLabels": { "pool": "typo" } });
        let why = "no node matches the selector; nothing was pulled";
        assert_eq!(missing(labels.clone(), 0).as_deref(), Some(why));
        assert_eq!(missing(labels, 1), None);
        // All nodes of a cluster that has none.
        assert_eq!(missing(Value::Null, 0), None);
    }

    #[test]
    fn job_has_only_what_was_given() {
        let everywhere = serde_json::to_value(job(&request("nginx:1"))).unwrap();
        assert_eq!(
            everywhere,
            json!({
                "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
                "metadata": { "generateName": "pull-nginx-" },
                "spec": { "image": "nginx:1", "completionPolicy": { "ttlSecondsAfterFinished": 86400 } },
            })
        );
        let some = Request {
            labels: BTreeMap::from([("a".into(), "b".into())]),
            parallelism: Some(IntOrString::Int(5)),
            pull_secrets: vec!["s".into()],
            service_account: Some("app".into()),
            pin_seconds: Some(3600),
            ..request("nginx:1")
        };
        let some = serde_json::to_value(job(&some)).unwrap();
        assert_eq!(some["spec"]["selector"], json!({ "matchLabels": { "a": "b" } }));
        assert_eq!(
            (&some["spec"]["parallelism"], &some["spec"]["pullSecrets"]),
            (&json!(5), &json!(["s"]))
        );
        assert_eq!(some["spec"]["serviceAccountName"], "app");
        assert_eq!(some["spec"]["pullPolicy"], json!({ "pinSeconds": 3600 }));
        let nodes = Request {
            nodes: vec!["n1".into(), "n2".into()],
            ..request("nginx")
        };
        let nodes = serde_json::to_value(job(&nodes)).unwrap();
        assert_eq!(nodes["spec"]["selector"], json!({ "names": ["n1", "n2"] }));
    }

    #[test]
    fn retry_is_for_the_failed_nodes_alone() {
        let job = |failed: Value| -> ImagePullJob {
            let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
                "metadata": { "name": "release-2026.".repeat(4), "namespace": "apps", "labels": { "a": "b" } },
                "spec": { "image": "nginx:1", "parallelism": 3, "pullSecrets": ["s"], "serviceAccountName": "a",
                    "imagePullPolicy": "Always",
                    "podSelector": { "matchLabels": { "a": "b" } }, "pullPolicy": { "timeoutSeconds": 7 },
                    "completionPolicy": { "type": "Never" }, "schedule": "0 2 * * *" },
                "status": { "desired": 9, "failedNodes": failed } });
            serde_json::from_value(object).unwrap()
        };
        assert_eq!(retry(&job(json!([])), None), None);
        assert_eq!(retry(&job(json!(["../a"])), None), None);
        let mut paused = job(json!(["n1"]));
        paused.spec.parallelism = Some(IntOrString::String("0%".into()));
        assert_eq!(retry(&paused, None).unwrap().spec.parallelism, None);
        let created = retry(&job(json!(["n1", "n7"])), Some(IntOrString::String("50%".into())));
        assert_eq!(
            serde_json::to_value(created).unwrap(),
            json!({
                "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
                "metadata": { "generateName": "release-2026.release-2026.release-2026.r-retry-" },
                "spec": { "image": "nginx:1", "selector": { "names": ["n1", "n7"] }, "parallelism": "50%",
                    "pullSecrets": ["s"], "serviceAccountName": "a", "pullPolicy": { "timeoutSeconds": 7 },
                    "imagePullPolicy": "Always",
                    "completionPolicy": { "ttlSecondsAfterFinished": 86400 } },
            })
        );
    }

    fn observed(status: Value) -> Progress {
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
            "metadata": { "name": "j" }, "spec": { "image": "i", "completionPolicy": {} }, "status": status });
        progress(&serde_json::from_value(object).unwrap())
    }

    #[test]
    fn job_is_complete_only_without_failures() {
        let end = "2026-01-01T00:00:00Z";
        let complete = observed(json!({ "desired": 1, "succeeded": 1, "completionTime": end }));
        assert!(complete.is_complete());
        let failed = observed(
            json!({ "desired": 2, "succeeded": 1, "failed": 1, "completionTime": end,
            "failedNodes": ["n"] }),
        );
        assert!(failed.ended && !failed.is_complete());
        let condition = json!([{ "type": "Failed", "status": "True", "reason": "R", "message": "m",
            "lastTransitionTime": end }]);
        assert!(
            !observed(json!({ "desired": 0, "conditions": condition, "completionTime": end })).is_complete()
        );
        assert!(!observed(json!({ "desired": 1, "succeeded": 1 })).ended);
        assert!(!observed(Value::Null).ended);
    }

    #[test]
    fn retry_hint_promises_only_the_nodes_that_are_named() {
        let hint = |failed: i32| {
            let progress = Progress {
                failed,
                failed_nodes: vec!["n1".into(), "n2".into()],
                ..Progress::default()
            };
            progress.retry_hint()
        };
        assert_eq!(hint(2), "To pull again there");
        assert_eq!(hint(3), "To pull again on the 2 node(s) that the job names");
    }

    #[test]
    fn log_of_a_large_job_is_short() {
        let mut last: Option<Progress> = None;
        let mut lines = 0;
        for succeeded in 0..=1000 {
            let now = Progress {
                started: true,
                desired: 1000,
                active: 1,
                succeeded,
                ..Progress::default()
            };
            if now.is_news_after(last.as_ref()) {
                lines += 1;
                last = Some(now);
            }
        }
        assert_eq!(lines, 11);
    }

    #[test]
    fn cause_is_that_of_the_same_image() {
        let tag = |tag: &str, phase: &str, message: &str| json!({ "tag": tag, "phase": phase, "progress": 0, "version": 0, "message": message });
        let object: NodeImage = serde_json::from_value(json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": { "name": "n" }, "spec": {},
            "status": { "desired": 2, "imageStatuses": {
                "other": { "tags": [tag("1", "Failed", "x")] },
                "nginx": { "tags": [tag("1", "Failed", "no such image"), tag("2", "Succeeded", "")] } } },
        }))
        .unwrap();
        assert_eq!(
            cause(&object, "docker.io/library/nginx:1").as_deref(),
            Some("no such image")
        );
        assert_eq!(cause(&object, "nginx:2"), None);
        assert_eq!(cause(&object, "nginx:3"), None);
    }

    proptest! {
        /// Whatever the image: the generated name is one that the API server accepts.
        #[test]
        fn generated_names_are_valid(image in "[ -~]{0,300}") {
            let name = name_of_image(&image);
            prop_assert!(kruise_api::names::is_label(&format!("{name}-x7k2p")), "{name}");
        }
    }
}
