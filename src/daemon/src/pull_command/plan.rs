//! What to pull, from the command line and from manifests.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use jiff::SignedDuration;
use serde_json::Value;

use crate::image_pull::plan::{PullSpec, TagKey};
use crate::yaml;
use kruise_api::image_pull_job::{ImagePullJobSpec, ImagePullPolicy};
use kruise_api::keys::{PULLING_IMAGE_BY, PULLING_IMAGE_BY_DAEMON};

const GROUP: &str = "apps.kruise.io";
const VERSIONS: [&str; 2] = ["v1beta1", "v1alpha1"];
const KIND: &str = "ImagePullJob";

/// Why a manifest is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It is not YAML.
    #[error("not YAML: {0}")]
    Yaml(String),
    /// It contains a different kind of object.
    #[error("object {number} is {found}; expected {GROUP}/{} {KIND}", VERSIONS[0])]
    Kind {
        /// Number of the document, from 1.
        number: usize,
        /// The actual `apiVersion` and `kind`.
        found: String,
    },
    /// A field is missing or wrong.
    #[error("object {number}, {KIND} {name:?}: {why}")]
    Spec {
        /// Number of the document, from 1.
        number: usize,
        /// Name of the object.
        name: String,
        /// Field and reason.
        why: String,
    },
    /// It contains no object.
    #[error("there is no {KIND} in it")]
    Empty,
}

/// Limits for images without their own.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    /// Timeout of one attempt, at least 1.
    pub timeout_seconds: i32,
    /// Retries after the first attempt.
    pub retries: u32,
    /// Pull images that are already present.
    pub always: bool,
}

/// One image to pull.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageToPull {
    /// The reference as written by the user.
    pub original: String,
    /// Name and tag, which identify an image.
    pub key: TagKey,
    /// The pull for the runtime.
    pub spec: PullSpec,
    /// Warnings for the user before the pull.
    pub warnings: Vec<String>,
}

/// Parses an image reference of the command line.
pub fn parse_image(original: &str, defaults: &Defaults) -> ImageToPull {
    let reference = kruise_api::image_reference::ImageReference::parse(original);
    let key = match &reference {
        Ok(r) => TagKey {
            name: r.familiar_name(),
            tag: r.tag_or_digest().to_owned(),
        },
        Err(_) => TagKey {
            name: original.to_owned(),
            tag: String::new(),
        },
    };
    let mut spec = PullSpec {
        version: 0,
        image: reference.map(|r| r.to_string()).map_err(|e| e.to_string()),
        always: defaults.always,
        timeout: SignedDuration::from_secs(i64::from(defaults.timeout_seconds)),
        retries: defaults.retries,
        requested_at: None,
        active_deadline: None,
        owners: Vec::new(),
        secrets: Vec::new(),
        service_accounts: Vec::new(),
        labels: BTreeMap::new(),
        annotations: [(PULLING_IMAGE_BY.to_owned(), PULLING_IMAGE_BY_DAEMON.to_owned())].into(),
        pin: None,
    };
    set_active_deadline(&mut spec, None);
    ImageToPull {
        original: original.to_owned(),
        key,
        spec,
        warnings: Vec::new(),
    }
}

/// Parses the images of a manifest's ImagePullJobs, in order.
pub fn parse_manifest(text: &str, defaults: &Defaults) -> Result<Vec<ImageToPull>, Error> {
    let mut images = Vec::new();
    let documents = yaml::documents(text).map_err(|error| Error::Yaml(error.message()))?;
    for (index, object) in documents.iter().enumerate() {
        images.push(parse_job(index + 1, object, defaults)?);
    }
    if images.is_empty() {
        Err(Error::Empty)
    } else {
        Ok(images)
    }
}

fn parse_job(number: usize, object: &Value, defaults: &Defaults) -> Result<ImageToPull, Error> {
    let text_field = |key: &str| object.get(key).and_then(Value::as_str).filter(|w| !w.is_empty());
    let (api_version, kind) = (text_field("apiVersion"), text_field("kind"));
    let is_supported = |given: &str| VERSIONS.iter().any(|v| given == format!("{GROUP}/{v}"));
    if !api_version.is_some_and(is_supported) || kind != Some(KIND) {
        let found = match (api_version, kind) {
            (Some(api_version), Some(kind)) => format!("{api_version} {kind}"),
            (None, Some(kind)) => format!("kind {kind} without apiVersion"),
            (Some(api_version), None) => format!("apiVersion {api_version} without kind"),
            (None, None) => "not a Kubernetes object (it has neither apiVersion nor kind)".to_owned(),
        };
        return Err(Error::Kind { number, found });
    }
    let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let mut spec = object["spec"].clone();
    if let Some(spec) = spec.as_object_mut() {
        // The schema requires it, but it is not used here.
        spec.entry("completionPolicy")
            .or_insert_with(|| serde_json::json!({}));
    }
    let spec: ImagePullJobSpec = serde_json::from_value(spec).map_err(|e| Error::Spec {
        number,
        name: name.clone(),
        why: format!("spec: {e}"),
    })?;
    Ok(from_job_spec(&name, spec, defaults))
}

fn from_job_spec(name: &str, spec: ImagePullJobSpec, defaults: &Defaults) -> ImageToPull {
    let mut image_to_pull = parse_image(&spec.image, defaults);
    let policy = spec.pull_policy.unwrap_or_default();
    let pull_spec = &mut image_to_pull.spec;
    pull_spec.always = spec
        .image_pull_policy
        .map_or(defaults.always, |p| p == ImagePullPolicy::Always);
    if let Some(seconds) = policy.timeout_seconds.filter(|s| *s > 0) {
        pull_spec.timeout = SignedDuration::from_secs(i64::from(seconds));
    }
    if let Some(retries) = policy.backoff_limit.and_then(|n| u32::try_from(n).ok()) {
        pull_spec.retries = retries;
    }
    let sandbox = spec.sandbox_config.unwrap_or_default();
    pull_spec.labels = sandbox.labels;
    pull_spec.annotations.extend(sandbox.annotations);
    set_active_deadline(pull_spec, spec.completion_policy.active_deadline_seconds);
    if !spec.pull_secrets.is_empty() {
        let secrets = spec.pull_secrets.join(", ");
        image_to_pull.warnings.push(format!(
            "{KIND} {name:?}: its pullSecrets ({secrets}) are in a cluster; give their content with --docker-config"
        ));
    }
    if let Some(account) = spec.service_account_name {
        image_to_pull.warnings.push(format!(
            "{KIND} {name:?}: its serviceAccountName ({account}) is in a cluster, and no token of it is requested; give \
             the credentials with --docker-config"
        ));
    }
    image_to_pull
}

/// Sets the deadline. Without its own deadline an image gets one that fits all its attempts, because an attempt that
/// loses the runtime does not count.
fn set_active_deadline(spec: &mut PullSpec, seconds: Option<i64>) {
    let attempts = i32::try_from(spec.retries).unwrap_or(i32::MAX).saturating_add(1);
    let pauses = SignedDuration::from_secs(30).saturating_mul(attempts);
    let total = spec.timeout.saturating_mul(attempts).saturating_add(pauses);
    spec.active_deadline = Some(seconds.map_or(total, SignedDuration::from_secs));
}

/// Keeps the first occurrence of each image.
pub fn deduplicate(images: Vec<ImageToPull>) -> Vec<ImageToPull> {
    let mut seen_keys = BTreeMap::new();
    let is_first = |w: &ImageToPull| match seen_keys.entry(w.key.clone()) {
        Entry::Vacant(new) => {
            new.insert(());
            true
        }
        Entry::Occupied(_) => false,
    };
    let mut is_first = is_first;
    images.into_iter().filter(|w| is_first(w)).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    const DEFAULTS: Defaults = Defaults {
        timeout_seconds: 600,
        retries: 3,
        always: false,
    };

    #[test]
    fn pull_jobs_of_both_api_versions_are_parsed() {
        let yaml = "
apiVersion: apps.kruise.io/v1alpha1
kind: ImagePullJob
metadata: {name: one}
spec:
  image: nginx:1.27
  pullPolicy: {timeoutSeconds: 30, backoffLimit: 0}
  imagePullPolicy: Always
  pullSecrets: [s]
  serviceAccountName: app
  sandboxConfig: {labels: {a: b, on: yes}}
---
apiVersion: apps.kruise.io/v1beta1
kind: ImagePullJob
metadata: {name: two}
spec: {image: quay.io/a/b, completionPolicy: {type: Always, activeDeadlineSeconds: 77}}
";
        let images = parse_manifest(yaml, &DEFAULTS).unwrap();
        let [one, two] = &images[..] else {
            panic!("{images:?}")
        };
        assert_eq!(
            (one.spec.timeout.as_secs(), one.spec.retries, one.spec.always),
            (30, 0, true)
        );
        assert_eq!((&*one.spec.labels["a"], &*one.spec.labels["on"]), ("b", "yes"));
        let [secrets, account] = &one.warnings[..] else {
            panic!("{:?}", one.warnings)
        };
        for (warning, field) in [
            (secrets, "pullSecrets (s)"),
            (account, "serviceAccountName (app)"),
        ] {
            assert!(
                warning.contains(field) && warning.contains("--docker-config"),
                "{warning}"
            );
        }
        assert_eq!(two.spec.image.as_deref(), Ok("quay.io/a/b:latest"));
        assert_eq!(two.spec.active_deadline.unwrap().as_secs(), 77);
        assert_eq!(
            (two.spec.retries, two.spec.always, two.warnings.len()),
            (3, false, 0)
        );
    }

    #[test]
    fn manifest_error_names_the_object() {
        let error = |yaml: &str| parse_manifest(yaml, &DEFAULTS).unwrap_err().to_string();
        assert!(error("# nothing\n---\n{apiVersion: v1, kind: Pod}").contains("object 1 is v1 Pod"));
        for (yaml, expected) in [
            (
                "x",
                "object 1 is not a Kubernetes object (it has neither apiVersion nor kind); expected",
            ),
            (
                "kind: ImagePullJob",
                "object 1 is kind ImagePullJob without apiVersion; expected",
            ),
            (
                "apiVersion: v1",
                "object 1 is apiVersion v1 without kind; expected",
            ),
        ] {
            assert!(error(yaml).starts_with(expected), "{}", error(yaml));
        }
        assert!(error("a: [").contains("not YAML"));
        assert!(error("").contains("no ImagePullJob"));
        let no_image =
            "{apiVersion: apps.kruise.io/v1beta1, kind: ImagePullJob, metadata: {name: x}, spec: {}}";
        let message = error(no_image);
        assert!(
            message.contains("\"x\"") && message.contains("image"),
            "{message}"
        );
    }

    #[test]
    fn equal_image_references_are_pulled_once() {
        let given = ["nginx", "docker.io/library/nginx:latest", "nginx:1", "Bad", "Bad"];
        let images = deduplicate(given.iter().map(|g| parse_image(g, &DEFAULTS)).collect());
        let originals: Vec<_> = images.iter().map(|w| w.original.as_str()).collect();
        assert_eq!(originals, ["nginx", "nginx:1", "Bad"]);
        assert!(images[2].spec.image.is_err());
    }
}
