//! Reduces the NodeImage, and the state of the runtimes' sockets, to the input of [`super::plan`].

use std::collections::BTreeMap;

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::plan::conditions::RuntimeState;
use super::plan::{PullSpec, TagKey, UNREADABLE_ENTRY};
use kruise_api::image_reference::ImageReference;
use kruise_api::keys::{PULLING_IMAGE_BY, PULLING_IMAGE_BY_DAEMON};
use kruise_api::node_image::{
    DEFAULT_BACKOFF_LIMIT, DEFAULT_TIMEOUT_SECONDS, ImagePullPolicy, ImageSpec, ImageTagSpec,
    MAX_PIN_SECONDS, NodeImage, NodeImageStatus,
};
use kruise_cri::{SocketHealth, no_runtime_reason};
use kruise_ops::panics::catch_panic_sync;

/// The observed NodeImage.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct ObservedNodeImage {
    /// A different UID means a different NodeImage.
    pub(super) uid: String,
    /// The object's resource version as a number, to detect the watch events of our own writes; 0 if it is not a
    /// number.
    pub(super) resource_version: u64,
    /// The requested pulls.
    pub(super) specs: BTreeMap<TagKey, PullSpec>,
    /// The stored status.
    pub(super) status: NodeImageStatus,
}

pub(super) fn observe(object: NodeImage) -> ObservedNodeImage {
    let parse = |(name, image): (String, ImageSpec)| {
        catch_panic_sync("image pull", &name, || tag_specs(&name, &image)).unwrap_or_default()
    };
    ObservedNodeImage {
        resource_version: resource_version(&object.metadata),
        uid: object.metadata.uid.unwrap_or_default(),
        specs: object.spec.images.into_iter().flat_map(parse).collect(),
        status: object.status.unwrap_or_default(),
    }
}

/// What the sockets show of the container runtimes.
pub(super) fn runtime_state(sockets: &[SocketHealth]) -> RuntimeState {
    match sockets.iter().find(|socket| socket.healthy) {
        Some(socket) => RuntimeState::Ready(socket.message.clone()),
        None if sockets.iter().all(|socket| socket.checked) => RuntimeState::NotReady(format!(
            "container runtime is down: {}",
            no_runtime_reason(sockets)
        )),
        None => RuntimeState::Unknown,
    }
}

/// Parses a NodeImage and plans for it.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn parse_and_plan(data: &[u8]) {
    use super::plan::{PullLimits, TaskBoard, plan, status};

    let Ok(object) = serde_json::from_slice::<NodeImage>(data) else {
        return;
    };
    let (observed, mut board, limits) = (
        observe(object),
        TaskBoard::default(),
        PullLimits::for_node(5, true),
    );
    board.sync_spec(&observed.specs, &status::by_tag(&observed.status));
    for now in [jiff::Timestamp::UNIX_EPOCH, jiff::Timestamp::MAX] {
        for step in plan(&board, &limits, now).steps {
            board.apply(&step, now);
        }
        let _ = status::compose(&board, &limits);
    }
}

/// The object's resource version as a number.
pub(super) fn resource_version(metadata: &ObjectMeta) -> u64 {
    let version = metadata.resource_version.as_deref();
    version.and_then(|v| v.parse().ok()).unwrap_or(0)
}

/// The pull specs of one image's tags. A tag that is unreadable, or whose image is, cannot be pulled.
fn tag_specs(name: &str, image: &ImageSpec) -> Vec<(TagKey, PullSpec)> {
    let tag_spec = |tag: &ImageTagSpec| {
        let key = TagKey {
            name: name.to_owned(),
            tag: tag.tag.clone(),
        };
        let mut spec = pull_spec(name, image, tag);
        if let Some(why) = &tag.unreadable {
            spec.image = Err(format!("{UNREADABLE_ENTRY}: {why}"));
        }
        (key, spec)
    };
    image.tags.iter().map(tag_spec).collect()
}

fn pull_spec(name: &str, image: &ImageSpec, tag: &ImageTagSpec) -> PullSpec {
    let policy = tag.pull_policy.clone().unwrap_or_default();
    let sandbox = image.sandbox_config.clone().unwrap_or_default();
    let mut annotations = sandbox.annotations;
    annotations.insert(PULLING_IMAGE_BY.to_owned(), PULLING_IMAGE_BY_DAEMON.to_owned());
    let timeout = policy
        .timeout_seconds
        .filter(|s| *s > 0)
        .unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    PullSpec {
        version: tag.version,
        image: ImageReference::from_name_and_tag(name, &tag.tag)
            .map(|r| r.to_string())
            .map_err(|e| e.to_string()),
        always: tag.image_pull_policy == Some(ImagePullPolicy::Always),
        timeout: SignedDuration::from_secs(i64::from(timeout)),
        retries: policy
            .backoff_limit
            .and_then(|n| u32::try_from(n).ok())
            .unwrap_or(DEFAULT_BACKOFF_LIMIT.unsigned_abs()),
        requested_at: tag.created_at.as_ref().map(|at| at.0),
        active_deadline: policy.active_deadline_seconds.map(SignedDuration::from_secs),
        owners: tag.owner_references.clone(),
        secrets: image
            .pull_secrets
            .iter()
            .map(|s| (s.namespace.clone(), s.name.clone()))
            .collect(),
        service_accounts: image.service_accounts.clone(),
        labels: sandbox.labels,
        annotations,
        pin: policy
            .pin_seconds
            .filter(|seconds| *seconds > 0)
            .map(|seconds| SignedDuration::from_secs(i64::from(seconds.min(MAX_PIN_SECONDS)))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use serde_json::json;

    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn observe_images(images: &serde_json::Value) -> ObservedNodeImage {
        let object = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage",
            "metadata": {"name": "n", "uid": "u", "resourceVersion": "42"},
            "spec": {"images": images},
        });
        observe(serde_json::from_value(object).unwrap())
    }

    fn single_spec(images: &serde_json::Value) -> PullSpec {
        let observed = observe_images(images);
        assert_eq!(
            (
                observed.uid.as_str(),
                observed.resource_version,
                observed.specs.len()
            ),
            ("u", 42, 1)
        );
        observed.specs.into_values().next().unwrap()
    }

    #[test]
    fn panicking_image_entry_hides_no_other() {
        let _panics = kruise_ops::panics::injected::inject_panic("image pull", "observe-panic");
        let tags = json!({ "tags": [{ "tag": "1" }] });
        let observed = observe_images(&json!({ "observe-panic": tags, "nginx": tags }));
        let images: Vec<&str> = observed.specs.keys().map(|key| key.name.as_str()).collect();
        assert_eq!(images, ["nginx"]);
    }

    #[test]
    fn runtime_is_missing_once_every_socket_was_checked() {
        let socket = |path: &str, checked: bool, healthy: bool| SocketHealth {
            socket: path.into(),
            version: None,
            checked,
            present: healthy,
            healthy,
            message: format!("message of {path}"),
        };
        let (missing, unchecked) = (socket("/a", true, false), socket("/b", false, false));
        assert_eq!(
            runtime_state(&[missing.clone(), unchecked.clone()]),
            RuntimeState::Unknown
        );
        let healthy = socket("/c", true, true);
        assert_eq!(
            runtime_state(&[missing.clone(), unchecked, healthy]),
            RuntimeState::Ready("message of /c".to_owned())
        );
        let why = "container runtime is down: no socket at /a, /b";
        assert_eq!(
            runtime_state(&[missing, socket("/b", true, false)]),
            RuntimeState::NotReady(why.to_owned())
        );
    }

    #[test]
    fn pull_policy_defaults_are_those_of_upstream() {
        let spec = single_spec(&json!({"nginx": {"tags": [{"tag": "1", "version": 7}]}}));
        assert_eq!(spec.image.unwrap(), "docker.io/library/nginx:1");
        assert_eq!(
            (spec.timeout.as_secs(), spec.retries, spec.version, spec.always),
            (600, 3, 7, false)
        );
        assert_eq!(spec.active_deadline, None);
        assert_eq!(spec.annotations[PULLING_IMAGE_BY], "kruise-daemon");
    }

    #[test]
    fn credentials_of_the_image_are_those_of_its_tags() {
        let spec = single_spec(&json!({"nginx": {"tags": [{"tag": "1"}],
            "pullSecrets": [{"namespace": "copies", "name": "s"}], "serviceAccounts": [{"namespace": "n", "name": "a"}]}}));
        assert_eq!(spec.secrets, [("copies".to_owned(), "s".to_owned())]);
        let accounts = spec.service_accounts.into_iter();
        let accounts: Vec<_> = accounts
            .map(|account| (account.namespace, account.name))
            .collect();
        assert_eq!(accounts, [("n".to_owned(), "a".to_owned())]);
    }

    #[test]
    fn negative_pull_policy_limits_are_ignored() {
        let tag = |policy| json!({"a/b": {"tags": [{"tag": "1", "imagePullPolicy": "Always", "pullPolicy": policy}]}});
        let spec = single_spec(&tag(
            json!({"timeoutSeconds": 5, "backoffLimit": 0, "activeDeadlineSeconds": 9}),
        ));
        assert_eq!((spec.timeout.as_secs(), spec.retries, spec.always), (5, 0, true));
        assert_eq!(spec.active_deadline, Some(SignedDuration::from_secs(9)));
        let spec = single_spec(&tag(json!({"timeoutSeconds": -5, "backoffLimit": -1})));
        assert_eq!((spec.timeout.as_secs(), spec.retries), (600, 3));
    }

    #[test]
    fn digest_is_joined_and_bad_reference_is_an_error() {
        let spec = single_spec(&json!({"quay.io/a": {"tags": [{"tag": DIGEST}]}}));
        assert_eq!(spec.image.unwrap(), format!("quay.io/a@{DIGEST}"));
        let spec = single_spec(&json!({"Bad": {"tags": [{"tag": "1"}]}}));
        assert!(spec.image.unwrap_err().contains("\"Bad:1\" is not valid"));
    }

    /// The time of an earlier pull is unknown, so the image is pulled again, which records the time.
    #[test]
    fn unreadable_timestamp_does_not_prevent_a_pull() {
        use super::super::plan::{PullLimits, TaskBoard, plan, status};
        const FAR: &str = "9999-12-31T23:59:59Z";
        let object = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": {"name": "n"},
            "spec": {"images": {"nginx": {"tags": [{"tag": "1", "createdAt": FAR}, {"tag": "2"}]}}},
            "status": {"desired": 2, "imageStatuses": {"nginx": {"tags": [
                {"tag": "1", "phase": "Succeeded", "startTime": FAR, "completionTime": FAR},
                {"tag": "2", "phase": "Succeeded", "completionTime": "2026-01-01T00:00:00Z"}]}}},
        });
        let observed = observe(serde_json::from_value(object).unwrap());
        let (mut board, limits) = (TaskBoard::default(), PullLimits::for_node(5, true));
        board.sync_spec(&observed.specs, &status::by_tag(&observed.status));
        let steps = plan(&board, &limits, jiff::Timestamp::UNIX_EPOCH).steps;
        let [super::super::plan::PullStep::Start { key, .. }] = &steps[..] else {
            unreachable!("one pull: {steps:?}")
        };
        assert_eq!(key.tag, "1");
    }

    #[test]
    fn unreadable_node_image_entry_fails_alone() {
        let observed = observe_images(&json!({
            "good": {"tags": [{"tag": "1"}, {"tag": "2", "pullPolicy": {"timeoutSeconds": 99_999_999_999_i64}, "version": 4}]},
            "bad": {"tags": [{"tag": "1"}], "sandboxConfig": "x"},
            "odd": "x",
            "none": {"tags": null},
        }));
        let specs: Vec<_> = observed
            .specs
            .iter()
            .map(|(key, spec)| {
                (
                    key.name.as_str(),
                    key.tag.as_str(),
                    spec.version,
                    spec.image.is_ok(),
                )
            })
            .collect();
        let why = |name: &str, tag: &str| {
            let (_, spec) = observed
                .specs
                .iter()
                .find(|(key, _)| (&*key.name, &*key.tag) == (name, tag))
                .unwrap();
            spec.image.clone().unwrap_err()
        };
        assert!(why("good", "2").starts_with("the NodeImage's entry for it cannot be read: pullPolicy: "));
        assert_eq!(
            specs,
            [
                ("bad", "1", 0, false),
                ("good", "1", 0, true),
                ("good", "2", 4, false)
            ]
        );
    }
}
