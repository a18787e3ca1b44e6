//! From the NodeImage to what [`super::plan`] wants to know.

use std::collections::BTreeMap;

use jiff::SignedDuration;
use kube::ResourceExt;

use super::plan::{Ask, TagKey};
use crate::api::keys::{PULLING_IMAGE_BY, PULLING_IMAGE_BY_DAEMON};
use crate::api::node_image::{ImagePullPolicy, ImageSpec, ImageTagSpec, NodeImage, NodeImageStatus};
use crate::cri::Reference;

const TIMEOUT_SECONDS: i32 = 600;
const BACKOFF_LIMIT: u32 = 3;

/// What we keep of the NodeImage.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Seen {
    /// Another UID is another NodeImage.
    pub(super) uid: String,
    /// The object's version as a number, to tell news from echoes; 0 where it is none.
    pub(super) version: u64,
    /// What is asked.
    pub(super) asks: BTreeMap<TagKey, Ask>,
    /// What the status says.
    pub(super) status: NodeImageStatus,
}

pub(super) fn observe(object: NodeImage) -> Seen {
    Seen {
        uid: object.uid().unwrap_or_default(),
        version: version(&object),
        asks: object
            .spec
            .images
            .iter()
            .flat_map(|(name, image)| asks_of(name, image))
            .collect(),
        status: object.status.unwrap_or_default(),
    }
}

/// The object's resource version as a number.
pub(super) fn version(object: &NodeImage) -> u64 {
    object
        .resource_version()
        .and_then(|v| v.parse().ok())
        .unwrap_or(0)
}

fn asks_of(name: &str, image: &ImageSpec) -> Vec<(TagKey, Ask)> {
    let key = |tag: &ImageTagSpec| TagKey {
        name: name.to_owned(),
        tag: tag.tag.clone(),
    };
    image
        .tags
        .iter()
        .map(|tag| (key(tag), ask(name, image, tag)))
        .collect()
}

fn ask(name: &str, image: &ImageSpec, tag: &ImageTagSpec) -> Ask {
    let policy = tag.pull_policy.clone().unwrap_or_default();
    let sandbox = image.sandbox_config.clone().unwrap_or_default();
    let mut annotations = sandbox.annotations;
    annotations.insert(PULLING_IMAGE_BY.to_owned(), PULLING_IMAGE_BY_DAEMON.to_owned());
    let timeout = policy
        .timeout_seconds
        .filter(|s| *s > 0)
        .unwrap_or(TIMEOUT_SECONDS);
    Ask {
        version: tag.version,
        image: Reference::from_name_and_tag(name, &tag.tag)
            .map(|r| r.to_string())
            .map_err(|e| e.to_string()),
        always: tag.image_pull_policy == Some(ImagePullPolicy::Always),
        timeout: SignedDuration::from_secs(i64::from(timeout)),
        retries: policy
            .backoff_limit
            .and_then(|n| u32::try_from(n).ok())
            .unwrap_or(BACKOFF_LIMIT),
        active_deadline: policy.active_deadline_seconds.map(SignedDuration::from_secs),
        owners: tag.owner_references.clone(),
        secrets: image
            .pull_secrets
            .iter()
            .map(|s| (s.namespace.clone(), s.name.clone()))
            .collect(),
        labels: sandbox.labels,
        annotations,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use serde_json::json;

    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn seen(images: &serde_json::Value) -> Seen {
        let object = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage",
            "metadata": {"name": "n", "uid": "u", "resourceVersion": "42"},
            "spec": {"images": images},
        });
        observe(serde_json::from_value(object).unwrap())
    }

    fn only(images: &serde_json::Value) -> Ask {
        let seen = seen(images);
        assert_eq!((seen.uid.as_str(), seen.version, seen.asks.len()), ("u", 42, 1));
        seen.asks.into_values().next().unwrap()
    }

    #[test]
    fn what_is_absent_has_upstreams_defaults_but_absent_means_if_not_present() {
        let ask = only(&json!({"nginx": {"tags": [{"tag": "1", "version": 7}]}}));
        assert_eq!(ask.image.unwrap(), "docker.io/library/nginx:1");
        assert_eq!(
            (ask.timeout.as_secs(), ask.retries, ask.version, ask.always),
            (600, 3, 7, false)
        );
        assert_eq!(ask.active_deadline, None);
        assert_eq!(ask.annotations[PULLING_IMAGE_BY], "kruise-daemon");
    }

    #[test]
    fn limits_and_policy_are_taken_and_negative_ones_are_not() {
        let tag = |policy| json!({"a/b": {"tags": [{"tag": "1", "imagePullPolicy": "Always", "pullPolicy": policy}]}});
        let ask = only(&tag(
            json!({"timeoutSeconds": 5, "backoffLimit": 0, "activeDeadlineSeconds": 9}),
        ));
        assert_eq!((ask.timeout.as_secs(), ask.retries, ask.always), (5, 0, true));
        assert_eq!(ask.active_deadline, Some(SignedDuration::from_secs(9)));
        let ask = only(&tag(json!({"timeoutSeconds": -5, "backoffLimit": -1})));
        assert_eq!((ask.timeout.as_secs(), ask.retries), (600, 3));
    }

    #[test]
    fn a_digest_is_joined_and_a_bad_reference_is_kept_as_words() {
        let ask = only(&json!({"quay.io/a": {"tags": [{"tag": DIGEST}]}}));
        assert_eq!(ask.image.unwrap(), format!("quay.io/a@{DIGEST}"));
        let ask = only(&json!({"Bad": {"tags": [{"tag": "1"}]}}));
        assert!(ask.image.unwrap_err().contains("\"Bad:1\" is not valid"));
    }
}
