//! From the NodeImage to what [`super::plan`] wants to know.

use std::collections::BTreeMap;

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::plan::{Ask, TagKey};
use kruise_api::image_reference::Reference;
use kruise_api::keys::{PULLING_IMAGE_BY, PULLING_IMAGE_BY_DAEMON};
use kruise_api::node_image::{ImagePullPolicy, ImageSpec, ImageTagSpec, NodeImage, NodeImageStatus};
use kruise_ops::panics::isolated_now;

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
    let read = |(name, image): (String, ImageSpec)| {
        isolated_now("image pull", &name, || asks_of(&name, &image)).unwrap_or_default()
    };
    Seen {
        version: version(&object.metadata),
        uid: object.metadata.uid.unwrap_or_default(),
        asks: object.spec.images.into_iter().flat_map(read).collect(),
        status: object.status.unwrap_or_default(),
    }
}

/// Reads a NodeImage, and plans for it.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn read(data: &[u8]) {
    use super::plan::{Board, Limits, plan, status};

    let Ok(object) = serde_json::from_slice::<NodeImage>(data) else {
        return;
    };
    let (seen, mut board, limits) = (observe(object), Board::default(), Limits::of_node(5, true));
    board.desire(&seen.asks, &status::by_tag(&seen.status));
    for now in [jiff::Timestamp::UNIX_EPOCH, jiff::Timestamp::MAX] {
        for step in plan(&board, &limits, now).steps {
            board.apply(&step, now);
        }
        let _ = status::compose(&board, &limits);
    }
}

/// The object's resource version as a number.
pub(super) fn version(metadata: &ObjectMeta) -> u64 {
    let version = metadata.resource_version.as_deref();
    version.and_then(|v| v.parse().ok()).unwrap_or(0)
}

/// What is asked for the tags of one image. A tag that cannot be read, or whose image cannot, cannot be pulled.
fn asks_of(name: &str, image: &ImageSpec) -> Vec<(TagKey, Ask)> {
    let of_tag = |tag: &ImageTagSpec| {
        let key = TagKey {
            name: name.to_owned(),
            tag: tag.tag.clone(),
        };
        let mut ask = ask(name, image, tag);
        if let Some(why) = &tag.unreadable {
            ask.image = Err(format!("the NodeImage's entry for it cannot be read: {why}"));
        }
        (key, ask)
    };
    image.tags.iter().map(of_tag).collect()
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
    fn an_image_that_panics_when_it_is_read_hides_no_other() {
        let _panics = kruise_ops::panics::injected::panic_at("image pull", "observe-panic");
        let tags = json!({ "tags": [{ "tag": "1" }] });
        let seen = seen(&json!({ "observe-panic": tags, "nginx": tags }));
        let images: Vec<&str> = seen.asks.keys().map(|key| key.name.as_str()).collect();
        assert_eq!(images, ["nginx"]);
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

    /// Nothing is known of when an image was pulled, so it is pulled again, which says when.
    #[test]
    fn a_time_that_cannot_be_read_keeps_no_image_from_being_pulled() {
        use super::super::plan::{Board, Limits, plan, status};
        const FAR: &str = "9999-12-31T23:59:59Z";
        let object = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": {"name": "n"},
            "spec": {"images": {"nginx": {"tags": [{"tag": "1", "createdAt": FAR}, {"tag": "2"}]}}},
            "status": {"desired": 2, "imageStatuses": {"nginx": {"tags": [
                {"tag": "1", "phase": "Succeeded", "startTime": FAR, "completionTime": FAR},
                {"tag": "2", "phase": "Succeeded", "completionTime": "2026-01-01T00:00:00Z"}]}}},
        });
        let seen = observe(serde_json::from_value(object).unwrap());
        let (mut board, limits) = (Board::default(), Limits::of_node(5, true));
        board.desire(&seen.asks, &status::by_tag(&seen.status));
        let steps = plan(&board, &limits, jiff::Timestamp::UNIX_EPOCH).steps;
        let [super::super::plan::Step::Start { key, .. }] = &steps[..] else {
            unreachable!("one pull: {steps:?}")
        };
        assert_eq!(key.tag, "1");
    }

    #[test]
    fn one_unreadable_entry_fails_alone() {
        let seen = seen(&json!({
            "good": {"tags": [{"tag": "1"}, {"tag": "2", "pullPolicy": {"timeoutSeconds": 99_999_999_999_i64}, "version": 4}]},
            "bad": {"tags": [{"tag": "1"}], "sandboxConfig": "x"},
            "odd": "x",
            "none": {"tags": null},
        }));
        let asks: Vec<_> = seen
            .asks
            .iter()
            .map(|(key, ask)| {
                (
                    key.name.as_str(),
                    key.tag.as_str(),
                    ask.version,
                    ask.image.is_ok(),
                )
            })
            .collect();
        let why = |name: &str, tag: &str| {
            let (_, ask) = seen
                .asks
                .iter()
                .find(|(key, _)| (&*key.name, &*key.tag) == (name, tag))
                .unwrap();
            ask.image.clone().unwrap_err()
        };
        assert!(why("good", "2").starts_with("the NodeImage's entry for it cannot be read: pullPolicy: "));
        assert_eq!(
            asks,
            [
                ("bad", "1", 0, false),
                ("good", "1", 0, true),
                ("good", "2", 4, false)
            ]
        );
    }
}
