//! What to pull, from the command line and from manifests.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use jiff::SignedDuration;
use serde_json::Value;

use crate::image_pull::plan::{Ask, TagKey};
use kruise_api::image_pull_job::{ImagePullJobSpec, ImagePullPolicy};
use kruise_api::keys::{PULLING_IMAGE_BY, PULLING_IMAGE_BY_DAEMON};

const GROUP: &str = "apps.kruise.io";
const VERSIONS: [&str; 2] = ["v1beta1", "v1alpha1"];
const KIND: &str = "ImagePullJob";

/// What is wrong with a manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It is not YAML.
    #[error("not YAML: {0}")]
    Yaml(String),
    /// It holds something else.
    #[error("object {number} is {found}; expected {GROUP}/{} {KIND}", VERSIONS[0])]
    Kind {
        /// Counted from 1.
        number: usize,
        /// `apiVersion` and `kind` as they are.
        found: String,
    },
    /// A field is missing or wrong.
    #[error("object {number}, {KIND} {name:?}: {why}")]
    Spec {
        /// Counted from 1.
        number: usize,
        /// The object's name.
        name: String,
        /// Which field, and why.
        why: String,
    },
    /// There is nothing in it.
    #[error("there is no {KIND} in it")]
    Empty,
}

/// Limits for what has none of its own.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    /// Of one attempt, 1 or more.
    pub timeout_seconds: i32,
    /// After the first attempt.
    pub retries: u32,
    /// Pull what is present too.
    pub always: bool,
}

/// One image to pull.
#[derive(Debug, Clone, PartialEq)]
pub struct Wanted {
    /// As it was written.
    pub given: String,
    /// Name and tag, which tell images apart.
    pub key: TagKey,
    /// How to pull it.
    pub ask: Ask,
    /// What its user should know before.
    pub remark: Option<String>,
}

/// An image of the command line.
pub fn image(given: &str, defaults: &Defaults) -> Wanted {
    let reference = kruise_api::image_reference::Reference::parse(given);
    let key = match &reference {
        Ok(r) => TagKey {
            name: r.familiar_name(),
            tag: r.tag_or_digest().to_owned(),
        },
        Err(_) => TagKey {
            name: given.to_owned(),
            tag: String::new(),
        },
    };
    let mut ask = Ask {
        version: 0,
        image: reference.map(|r| r.to_string()).map_err(|e| e.to_string()),
        always: defaults.always,
        timeout: SignedDuration::from_secs(i64::from(defaults.timeout_seconds)),
        retries: defaults.retries,
        active_deadline: None,
        owners: Vec::new(),
        secrets: Vec::new(),
        labels: BTreeMap::new(),
        annotations: [(PULLING_IMAGE_BY.to_owned(), PULLING_IMAGE_BY_DAEMON.to_owned())].into(),
    };
    limit(&mut ask, None);
    Wanted {
        given: given.to_owned(),
        key,
        ask,
        remark: None,
    }
}

/// The images of a manifest's ImagePullJobs, in order.
pub fn jobs(yaml: &str, defaults: &Defaults) -> Result<Vec<Wanted>, Error> {
    let mut wanted = Vec::new();
    // Words such as yes are texts, as a label's value may be.
    let options = serde_saphyr::options! { strict_booleans: true };
    let documents: Vec<Value> = serde_saphyr::from_multiple_with_options(yaml, options)
        .map_err(|error| Error::Yaml(error.without_snippet().to_string()))?;
    for (index, object) in documents.iter().enumerate() {
        wanted.push(job(index + 1, object, defaults)?);
    }
    if wanted.is_empty() {
        Err(Error::Empty)
    } else {
        Ok(wanted)
    }
}

fn job(number: usize, object: &Value, defaults: &Defaults) -> Result<Wanted, Error> {
    let word = |key: &str| object.get(key).and_then(Value::as_str).filter(|w| !w.is_empty());
    let (api_version, kind) = (word("apiVersion"), word("kind"));
    let ours = |given: &str| VERSIONS.iter().any(|v| given == format!("{GROUP}/{v}"));
    if !api_version.is_some_and(ours) || kind != Some(KIND) {
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
        // Required by the schema, and of no use here.
        spec.entry("completionPolicy")
            .or_insert_with(|| serde_json::json!({}));
    }
    let spec: ImagePullJobSpec = serde_json::from_value(spec).map_err(|e| Error::Spec {
        number,
        name: name.clone(),
        why: format!("spec: {e}"),
    })?;
    Ok(of_spec(&name, spec, defaults))
}

fn of_spec(name: &str, spec: ImagePullJobSpec, defaults: &Defaults) -> Wanted {
    let mut wanted = image(&spec.image, defaults);
    let policy = spec.pull_policy.unwrap_or_default();
    let ask = &mut wanted.ask;
    ask.always = spec
        .image_pull_policy
        .map_or(defaults.always, |p| p == ImagePullPolicy::Always);
    if let Some(seconds) = policy.timeout_seconds.filter(|s| *s > 0) {
        ask.timeout = SignedDuration::from_secs(i64::from(seconds));
    }
    if let Some(retries) = policy.backoff_limit.and_then(|n| u32::try_from(n).ok()) {
        ask.retries = retries;
    }
    let sandbox = spec.sandbox_config.unwrap_or_default();
    ask.labels = sandbox.labels;
    ask.annotations.extend(sandbox.annotations);
    limit(ask, spec.completion_policy.active_deadline_seconds);
    wanted.remark = (!spec.pull_secrets.is_empty()).then(|| {
        let secrets = spec.pull_secrets.join(", ");
        format!("{KIND} {name:?}: its pullSecrets ({secrets}) are in a cluster; give their content with --docker-config")
    });
    wanted
}

/// Without a deadline of its own an image gets one that all its attempts fit in, for a runtime that goes away costs
/// no attempt.
fn limit(ask: &mut Ask, seconds: Option<i64>) {
    let attempts = i32::try_from(ask.retries).unwrap_or(i32::MAX).saturating_add(1);
    let pauses = SignedDuration::from_secs(30).saturating_mul(attempts);
    let all = ask.timeout.saturating_mul(attempts).saturating_add(pauses);
    ask.active_deadline = Some(seconds.map_or(all, SignedDuration::from_secs));
}

/// Each image once, as it was asked for first.
pub fn distinct(wanted: Vec<Wanted>) -> Vec<Wanted> {
    let mut seen = BTreeMap::new();
    let keep = |w: &Wanted| match seen.entry(w.key.clone()) {
        Entry::Vacant(new) => {
            new.insert(());
            true
        }
        Entry::Occupied(_) => false,
    };
    let mut keep = keep;
    wanted.into_iter().filter(|w| keep(w)).collect()
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
    fn jobs_of_both_versions_are_read_with_their_limits() {
        let yaml = "
apiVersion: apps.kruise.io/v1alpha1
kind: ImagePullJob
metadata: {name: one}
spec:
  image: nginx:1.27
  pullPolicy: {timeoutSeconds: 30, backoffLimit: 0}
  imagePullPolicy: Always
  pullSecrets: [s]
  sandboxConfig: {labels: {a: b, on: yes}}
---
apiVersion: apps.kruise.io/v1beta1
kind: ImagePullJob
metadata: {name: two}
spec: {image: quay.io/a/b, completionPolicy: {type: Always, activeDeadlineSeconds: 77}}
";
        let wanted = jobs(yaml, &DEFAULTS).unwrap();
        let [one, two] = &wanted[..] else {
            panic!("{wanted:?}")
        };
        assert_eq!(
            (one.ask.timeout.as_secs(), one.ask.retries, one.ask.always),
            (30, 0, true)
        );
        assert_eq!((&*one.ask.labels["a"], &*one.ask.labels["on"]), ("b", "yes"));
        assert!(one.remark.as_ref().unwrap().contains("--docker-config"));
        assert_eq!(two.ask.image.as_deref(), Ok("quay.io/a/b:latest"));
        assert_eq!(two.ask.active_deadline.unwrap().as_secs(), 77);
        assert_eq!((two.ask.retries, two.ask.always, &two.remark), (3, false, &None));
    }

    #[test]
    fn what_is_no_job_is_named() {
        let error = |yaml: &str| jobs(yaml, &DEFAULTS).unwrap_err().to_string();
        assert!(error("# nothing\n---\n{apiVersion: v1, kind: Pod}").contains("object 1 is v1 Pod"));
        for (yaml, words) in [
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
            assert!(error(yaml).starts_with(words), "{}", error(yaml));
        }
        assert!(error("a: [").contains("not YAML"));
        assert!(error("").contains("no ImagePullJob"));
        let no_image =
            "{apiVersion: apps.kruise.io/v1beta1, kind: ImagePullJob, metadata: {name: x}, spec: {}}";
        let words = error(no_image);
        assert!(words.contains("\"x\"") && words.contains("image"), "{words}");
    }

    #[test]
    fn an_image_is_pulled_once_however_it_is_written() {
        let given = ["nginx", "docker.io/library/nginx:latest", "nginx:1", "Bad", "Bad"];
        let wanted = distinct(given.iter().map(|g| image(g, &DEFAULTS)).collect());
        let kept: Vec<_> = wanted.iter().map(|w| w.given.as_str()).collect();
        assert_eq!(kept, ["nginx", "nginx:1", "Bad"]);
        assert!(wanted[2].ask.image.is_err());
    }
}
