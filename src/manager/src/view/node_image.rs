//! A NodeImage, reduced.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use jiff::Timestamp;

use super::pool::Pool;
use kruise_api::keys;
use kruise_api::node_image::{
    ImagePullPhase, ImageTagSpec, ImageTagStatus, NodeImage, PulledBytes, ReferenceObject,
};
use kruise_cluster::Key;

/// What the manager caches of a NodeImage.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeImageView {
    /// UID of the NodeImage.
    pub uid: String,
    /// Version for conditional writes.
    pub resource_version: String,
    /// Labels, copied from those of the Node.
    pub labels: BTreeMap<String, String>,
    /// Whether it has a `deletionTimestamp`.
    pub terminating: bool,
    /// Requested tags, sorted by image and tag.
    pub tags: Vec<TagView>,
    /// Statuses of tags, sorted by image and tag; includes tags that are no longer requested.
    pub statuses: Vec<TagStatusView>,
    /// Secrets that are not removed with their image, each with its image.
    pub non_batch_secrets: Vec<(String, ReferenceObject)>,
}

/// One tag that the node should have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TagView {
    /// What was requested.
    pub request: Arc<TagRequest>,
    /// Version of the request.
    pub version: i64,
    /// Time of the request.
    pub created: Option<Timestamp>,
}

impl Deref for TagView {
    type Target = TagRequest;

    fn deref(&self) -> &TagRequest {
        &self.request
    }
}

/// What was requested. A job requests the same of a thousand nodes, so it is kept once for all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct TagRequest {
    /// Image name.
    pub image: String,
    /// Tag or digest.
    pub tag: String,
    /// Objects that requested it.
    pub owners: Vec<TagOwner>,
    /// Seconds after its end when it is removed.
    pub ttl: Option<i64>,
    /// Seconds after its start when the daemon gives up.
    pub deadline: Option<i64>,
    /// Maximum seconds that a live daemon takes: the timeouts of all attempts and the pauses between them.
    pub budget: i64,
}

/// An object that requested a tag.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct TagOwner {
    /// UID of the object.
    pub uid: String,
    /// The ImagePullJob; `None` for other kinds, which we do not watch.
    pub job: Option<Key>,
}

/// Status of one tag.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TagStatusView {
    /// Image and tag, kept once for all nodes.
    pub name: Arc<ImageTag>,
    /// Version of the request that it answers.
    pub version: i64,
    /// Phase of the pull.
    pub phase: ImagePullPhase,
    /// Time of its end.
    pub completed: Option<Timestamp>,
    /// Time of the first attempt's begin.
    pub started: Option<Timestamp>,
    /// Why it failed; a long error is cut.
    pub error: Option<Box<str>>,
    /// A hash that changes with every report of the daemon: progress, bytes, message, start.
    pub progress_hash: u64,
    /// Bytes of the pull while it runs.
    pub bytes: Option<Box<PulledBytes>>,
}

/// Name of an image and its tag.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ImageTag {
    /// Image name.
    pub image: String,
    /// Tag or digest.
    pub tag: String,
}

impl Deref for TagStatusView {
    type Target = ImageTag;

    fn deref(&self) -> &ImageTag {
        &self.name
    }
}

impl TagStatusView {
    /// Whether the pull has ended. The time of its end may be missing.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.completed.is_some() || self.phase.is_terminal()
    }
}

impl NodeImageView {
    /// The requested tag, if there is one.
    #[must_use]
    pub fn tag(&self, image: &str, tag: &str) -> Option<&TagView> {
        let found = self
            .tags
            .binary_search_by(|t| (t.image.as_str(), t.tag.as_str()).cmp(&(image, tag)));
        found.ok().and_then(|at| self.tags.get(at))
    }

    /// The status of a tag, for any version.
    #[must_use]
    pub fn status(&self, image: &str, tag: &str) -> Option<&TagStatusView> {
        let found = self
            .statuses
            .binary_search_by(|s| (s.image.as_str(), s.tag.as_str()).cmp(&(image, tag)));
        found.ok().and_then(|at| self.statuses.get(at))
    }

    /// The status of exactly the requested version.
    #[must_use]
    pub fn status_of(&self, tag: &TagView) -> Option<&TagStatusView> {
        self.status(&tag.image, &tag.tag)
            .filter(|s| s.version == tag.version)
    }

    /// Whether any tag of that image is requested or has a status.
    #[must_use]
    pub fn mentions_image(&self, image: &str) -> bool {
        self.tags.iter().any(|t| t.image == image) || self.statuses.iter().any(|s| s.image == image)
    }

    /// Whether it may exist without a Node.
    #[must_use]
    pub fn is_fake(&self) -> bool {
        self.labels.contains_key(keys::FAKE_NODE_IMAGE)
    }
}

/// What the NodeImages have in common.
#[derive(Default)]
struct Pools {
    requests: Pool<TagRequest>,
    names: Pool<ImageTag>,
}

static POOLS: LazyLock<Mutex<Pools>> = LazyLock::new(Mutex::default);

impl From<NodeImage> for NodeImageView {
    fn from(object: NodeImage) -> Self {
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tags = Vec::new();
        let mut old_secrets = Vec::new();
        for (image, spec) in object.spec.images {
            tags.extend(
                spec.tags
                    .into_iter()
                    .map(|t| tag_view(&image, t, &mut pools.requests)),
            );
            let old = spec
                .pull_secrets
                .into_iter()
                .filter(|s| s.mode.as_deref() != Some(keys::MODE_BATCH));
            old_secrets.extend(old.map(|s| (image.clone(), s)));
        }
        let mut statuses = Vec::new();
        for (image, status) in object.status.unwrap_or_default().image_statuses {
            statuses.extend(
                status
                    .tags
                    .into_iter()
                    .map(|t| status_view(&image, t, &mut pools.names)),
            );
        }
        drop(pools);
        tags.sort_by(|a, b| (&a.image, &a.tag).cmp(&(&b.image, &b.tag)));
        statuses.sort_by(|a, b| (&a.image, &a.tag).cmp(&(&b.image, &b.tag)));
        tags.shrink_to_fit();
        statuses.shrink_to_fit();
        Self {
            uid: object.metadata.uid.unwrap_or_default(),
            resource_version: object.metadata.resource_version.unwrap_or_default(),
            labels: object.metadata.labels.unwrap_or_default(),
            terminating: object.metadata.deletion_timestamp.is_some(),
            tags,
            statuses,
            non_batch_secrets: old_secrets,
        }
    }
}

/// Default timeout of one attempt, in seconds.
const DEFAULT_PULL_TIMEOUT: i64 = 600;
/// Default number of retries.
const DEFAULT_BACKOFF: i64 = 3;
/// Maximum pause between two attempts, in seconds.
const MAX_BACKOFF: i64 = 30;

fn tag_view(image: &str, tag: ImageTagSpec, requests: &mut Pool<TagRequest>) -> TagView {
    let policy = tag.pull_policy.unwrap_or_default();
    let timeout = policy
        .timeout_seconds
        .map_or(DEFAULT_PULL_TIMEOUT, i64::from)
        .max(0);
    let retries = policy.backoff_limit.map_or(DEFAULT_BACKOFF, i64::from).max(0);
    let owner = |o: k8s_openapi::api::core::v1::ObjectReference| TagOwner {
        job: (o.kind.as_deref() == Some("ImagePullJob")).then(|| Key {
            namespace: o.namespace,
            name: o.name.unwrap_or_default(),
        }),
        uid: o.uid.unwrap_or_default(),
    };
    let request = TagRequest {
        image: image.to_owned(),
        tag: tag.tag,
        owners: tag.owner_references.into_iter().map(owner).collect(),
        ttl: policy.ttl_seconds_after_finished.map(i64::from),
        deadline: policy.active_deadline_seconds,
        budget: (retries + 1).saturating_mul(timeout.saturating_add(MAX_BACKOFF)),
    };
    TagView {
        request: requests.share(request),
        version: tag.version,
        created: tag.created_at.map(|t| t.0),
    }
}

/// A hash that changes with every report of the daemon about a tag: progress, bytes, message, start.
#[must_use]
pub fn progress_hash(status: &ImageTagStatus) -> u64 {
    let mut hasher = DefaultHasher::new();
    (status.progress, status.bytes, &status.message).hash(&mut hasher);
    status.start_time.as_ref().map(|t| t.0).hash(&mut hasher);
    hasher.finish()
}

/// Maximum bytes of an error: the daemon's are shorter, and each job keeps one for many nodes.
const MAX_ERROR_BYTES: usize = 1024;

fn shortened(mut error: String) -> Box<str> {
    error.truncate(error.floor_char_boundary(MAX_ERROR_BYTES));
    error.into_boxed_str()
}

fn status_view(image: &str, status: ImageTagStatus, names: &mut Pool<ImageTag>) -> TagStatusView {
    let progress_hash = progress_hash(&status);
    let failed = status.phase == ImagePullPhase::Failed;
    let name = ImageTag {
        image: image.to_owned(),
        tag: status.tag,
    };
    TagStatusView {
        name: names.share(name),
        version: status.version,
        phase: status.phase,
        completed: status.completion_time.map(|t| t.0),
        error: status.message.filter(|_| failed).map(shortened),
        started: status.start_time.map(|t| t.0),
        progress_hash,
        bytes: status.bytes.map(Box::new),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    #[test]
    fn unreadable_image_tags_are_skipped() {
        const FAR_FUTURE: &str = "9999-12-31T23:59:59Z";
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage",
            "metadata": { "name": "n", "uid": "u", "resourceVersion": "7" },
            "spec": { "images": { "nginx": { "tags": [
                { "tag": "1", "createdAt": FAR_FUTURE },
                { "tag": "2", "createdAt": "2026-01-01T00:00:00Z", "pullPolicy": "x" },
                { "tag": "3", "createdAt": "2026-01-01T00:00:00Z" }] } } },
            "status": { "desired": 1, "imageStatuses": { "nginx": { "tags": [
                { "tag": "1", "phase": "Pulling", "startTime": FAR_FUTURE, "completionTime": FAR_FUTURE }, { "tag": "2" },
                { "tag": "3", "phase": "Succeeded", "completionTime": FAR_FUTURE }] } } } });
        let view = NodeImageView::from(serde_json::from_value::<NodeImage>(object).unwrap());
        let tags: Vec<_> = view.tags.iter().map(|t| (&*t.tag, t.created.is_some())).collect();
        assert_eq!(tags, [("1", false), ("2", false), ("3", true)]);
        let states: Vec<_> = view.statuses.iter().map(|s| (&*s.tag, s.ended())).collect();
        assert_eq!(states, [("1", false), ("3", true)]);
    }
}
