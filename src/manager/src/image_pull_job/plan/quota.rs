//! How much of one NodeImage a namespace may take, so that every tenant gets space.

use std::collections::{BTreeMap, BTreeSet};

use super::entry::owner_namespaces;
use kruise_api::go_json;
use kruise_api::node_image::{ImageSpec, MAX_IMAGES_BYTES as BYTES};

/// Maximum number of images in a NodeImage, as in its CRD.
pub const MAX_IMAGES: usize = 256;
/// A namespace may hold this many times what is free: with 3, a single namespace can take three quarters.
const SHARE_FACTOR: usize = 3;

/// Why a NodeImage takes no more images of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaExceeded {
    /// Nothing is left for any namespace.
    #[error("it holds {held} {unit}, and can hold {limit}")]
    Total {
        /// Current usage.
        held: usize,
        /// The limit of all namespaces.
        limit: usize,
        /// What is counted: images or bytes.
        unit: &'static str,
    },
    /// The rest is reserved for other namespaces.
    #[error(
        "namespace {namespace} would hold {mine} of its {limit} {unit}, and the rest is kept for other namespaces; \
         delete jobs of {namespace}, or wait until their images expire"
    )]
    NamespaceShare {
        /// The namespace that used up its share.
        namespace: String,
        /// Usage of the namespace after the request.
        mine: usize,
        /// The limit of all namespaces.
        limit: usize,
        /// What is counted: images or bytes.
        unit: &'static str,
    },
}

/// The images of one NodeImage: the size of each entry, and the namespaces that own it.
#[derive(Debug, Default)]
pub struct NodeImageQuota {
    entries: BTreeMap<String, EntryUsage>,
}

#[derive(Debug)]
struct EntryUsage {
    bytes: usize,
    namespaces: BTreeSet<String>,
}

impl From<&ImageSpec> for EntryUsage {
    fn from(spec: &ImageSpec) -> Self {
        Self {
            bytes: stored_bytes(spec),
            namespaces: owner_namespaces(spec),
        }
    }
}

/// Usage of all namespaces or of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Usage {
    images: usize,
    bytes: usize,
}

impl NodeImageQuota {
    /// Counts existing images.
    #[must_use]
    pub fn from_images(images: &BTreeMap<String, ImageSpec>) -> Self {
        let entries = images.iter();
        Self {
            entries: entries
                .map(|(name, spec)| (name.clone(), EntryUsage::from(spec)))
                .collect(),
        }
    }

    /// Adds the new entry of an image for namespaces.
    ///
    /// # Errors
    /// When it exceeds the quota; then nothing has changed.
    pub fn try_add<'a>(
        &mut self,
        namespaces: impl IntoIterator<Item = &'a &'a str>,
        image: &str,
        spec: &ImageSpec,
    ) -> Result<(), QuotaExceeded> {
        self.try_replace(namespaces, image, EntryUsage::from(spec))
    }

    /// The same for a namespace that has changed a part of the entry, from `old` to `new`: an entry may have a thousand
    /// tags, and is not measured again for each.
    ///
    /// # Errors
    /// When it exceeds the quota; then nothing has changed.
    pub fn try_change(
        &mut self,
        namespace: &str,
        image: &str,
        spec: &ImageSpec,
        [old, new]: [&ImageSpec; 2],
    ) -> Result<(), QuotaExceeded> {
        let Some(known) = self.entries.get(image) else {
            return self.try_add([&namespace], image, spec);
        };
        // A tag that is not the only one is separated from the others.
        let commas = usize::from(old.tags.is_empty() && spec.tags.len() > new.tags.len());
        let bytes = known.bytes + stored_bytes(new) + commas;
        let usage = EntryUsage {
            bytes: bytes.saturating_sub(stored_bytes(old)),
            namespaces: owner_namespaces(spec),
        };
        self.try_replace([&namespace], image, usage)
    }

    fn try_replace<'a>(
        &mut self,
        namespaces: impl IntoIterator<Item = &'a &'a str>,
        image: &str,
        usage: EntryUsage,
    ) -> Result<(), QuotaExceeded> {
        let previous = self.total_usage();
        let old = self.entries.insert(image.to_owned(), usage);
        let now = self.total_usage();
        let mut namespaces = namespaces.into_iter();
        let result = namespaces.try_for_each(|namespace| {
            check_limits(previous, now, self.namespace_usage(namespace), namespace)
        });
        if result.is_err() {
            match old {
                Some(old) => self.entries.insert(image.to_owned(), old),
                None => self.entries.remove(image),
            };
        }
        result
    }

    fn total_usage(&self) -> Usage {
        Usage {
            images: self.entries.len(),
            bytes: self.entries.values().map(|e| e.bytes).sum(),
        }
    }

    /// The bytes of an entry are divided by the number of namespaces that own it.
    fn namespace_usage(&self, namespace: &str) -> Usage {
        let owned = self.entries.values().filter(|e| e.namespaces.contains(namespace));
        owned.fold(Usage::default(), |usage, entry| Usage {
            images: usage.images + 1,
            bytes: usage.bytes + entry.bytes / entry.namespaces.len().max(1),
        })
    }
}

/// The bytes of an entry in etcd.
fn stored_bytes(spec: &ImageSpec) -> usize {
    let json = serde_json::to_string(spec).unwrap_or_default();
    let sandbox = spec.sandbox_config.iter();
    let keys = sandbox.flat_map(|sandbox| sandbox.labels.keys().chain(sandbox.annotations.keys()));
    // In `managedFields` each is `"f:KEY":{},`.
    let managed =
        keys.map(|key| r#""f:":{},"#.len() + key.chars().map(go_json::encoded_width).sum::<usize>());
    go_json::encoded_length(&json) + managed.sum::<usize>()
}

/// Whether a namespace that has `mine` of `all`, of at most `limit`, leaves enough for others. One more than is free
/// counts, so that the last can be used, too.
#[must_use]
pub fn is_within_share(mine: usize, all: usize, limit: usize) -> bool {
    let free = limit.saturating_sub(all).saturating_add(1);
    mine <= SHARE_FACTOR.saturating_mul(free)
}

/// Whether the usage of a namespace leaves enough for others. Usage that does not grow always fits.
fn check_limits(before: Usage, all: Usage, mine: Usage, namespace: &str) -> Result<(), QuotaExceeded> {
    let kinds = [
        (before.images, all.images, mine.images, MAX_IMAGES, "images"),
        (before.bytes, all.bytes, mine.bytes, BYTES, "bytes"),
    ];
    for (before, all, mine, limit, unit) in kinds {
        if all <= before {
            continue;
        }
        if all > limit {
            return Err(QuotaExceeded::Total {
                held: before,
                limit,
                unit,
            });
        }
        if !is_within_share(mine, all, limit) {
            let namespace = namespace.to_owned();
            return Err(QuotaExceeded::NamespaceShare {
                namespace,
                mine,
                limit,
                unit,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use k8s_openapi::api::core::v1::ObjectReference;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use kruise_api::node_image::{
        ImagePullPhase, ImagePullPolicy, ImageTagPullPolicy, ImageTagSpec, ImageTagStatus, MAX_STATUS_BYTES,
        MAX_TAGS, PulledBytes, SandboxConfig,
    };
    use proptest::prelude::*;
    use serde_json::json;

    fn spec(namespaces: &[&str], bytes: usize) -> ImageSpec {
        let owner = |namespace: &&str| ObjectReference {
            kind: Some("ImagePullJob".to_owned()),
            namespace: Some((*namespace).to_owned()),
            ..ObjectReference::default()
        };
        let sandbox = (bytes > 0).then(|| SandboxConfig {
            annotations: [("a".to_owned(), "x".repeat(bytes))].into(),
            ..SandboxConfig::default()
        });
        ImageSpec {
            sandbox_config: sandbox,
            tags: vec![ImageTagSpec {
                owner_references: namespaces.iter().map(owner).collect(),
                ..ImageTagSpec::default()
            }],
            ..ImageSpec::default()
        }
    }

    #[test]
    fn namespace_leaves_quota_for_others() {
        let mut quota = NodeImageQuota::default();
        let mut fill = |namespace: &str, bytes: usize| {
            let names = (0..300).map(|n| format!("{namespace}-{n}"));
            let accepted = names.take_while(|name| {
                quota
                    .try_add([&namespace], name, &spec(&[namespace], bytes))
                    .is_ok()
            });
            accepted.count()
        };
        assert_eq!(
            [fill("hostile", 0), fill("second", 0), fill("third", 0)],
            [192, 48, 12]
        );
        assert_eq!(fill("plain", 0), 3);
        let refused = quota
            .try_add([&"hostile"], "one-more", &spec(&["hostile"], 0))
            .unwrap_err();
        assert!(
            refused
                .to_string()
                .starts_with("namespace hostile would hold 193 of its 256 images"),
            "{refused}"
        );

        let mut quota = NodeImageQuota::default();
        let large = spec(&["hostile"], 900_000);
        let refused = quota.try_add([&"hostile"], "large", &large).unwrap_err();
        assert!(refused.to_string().ends_with("and can hold 524288"), "{refused}");
        assert!(
            quota
                .try_add([&"hostile"], "large", &spec(&["hostile"], 380_000))
                .is_ok()
        );
        assert!(
            quota
                .try_add([&"hostile"], "more", &spec(&["hostile"], 20_000))
                .is_err()
        );
        assert!(
            quota
                .try_add([&"plain"], "nginx", &spec(&["plain"], 20_000))
                .is_ok()
        );
    }

    #[test]
    fn unchanged_entry_fits_a_full_node_image() {
        let names = (0..MAX_IMAGES).map(|n| (format!("i{n}"), spec(&["a"], 0)));
        let mut quota = NodeImageQuota::from_images(&names.collect());
        assert!(quota.try_add([&"a"], "i0", &spec(&["a"], 0)).is_ok());
        let refused = quota.try_add([&"b"], "new", &spec(&["b"], 0)).unwrap_err();
        assert_eq!(refused.to_string(), "it holds 256 images, and can hold 256");
        assert_eq!(
            quota.total_usage().images,
            MAX_IMAGES,
            "a refused entry leaves nothing behind"
        );
    }

    #[test]
    fn entry_size_is_as_stored_in_etcd() {
        let sandbox = SandboxConfig {
            labels: [("l<".to_owned(), "&".to_owned())].into(),
            ..SandboxConfig::default()
        };
        let entry = |sandbox_config| ImageSpec {
            sandbox_config,
            ..ImageSpec::default()
        };
        let added = r#""sandboxConfig":{"labels":{"l\u003c":"\u0026"}},"#.len() + r#""f:l\u003c":{},"#.len();
        assert_eq!(
            stored_bytes(&entry(Some(sandbox))),
            stored_bytes(&entry(None)) + added
        );
    }

    /// The limits of a NodeImage's spec also bound the size of its status.
    #[test]
    fn status_of_all_tags_fits_without_messages() {
        let now: jiff::Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let tag_spec = ImageTagSpec {
            tag: "t0".to_owned(),
            created_at: Some(Time(now)),
            pull_policy: Some(ImageTagPullPolicy {
                timeout_seconds: Some(1),
                backoff_limit: Some(0),
                ttl_seconds_after_finished: Some(300),
                active_deadline_seconds: None,
                pin_seconds: None,
            }),
            owner_references: vec![ObjectReference {
                api_version: Some("apps.kruise.io/v1beta1".to_owned()),
                kind: Some("ImagePullJob".to_owned()),
                namespace: Some("n".to_owned()),
                name: Some("j".to_owned()),
                uid: Some("00000000-0000-4000-8000-000000000000".to_owned()),
                ..ObjectReference::default()
            }],
            version: 0,
            image_pull_policy: Some(ImagePullPolicy::Always),
            unreadable: None,
        };
        for tag in ["t0".to_owned(), "t".repeat(128)] {
            let mut tag_spec = tag_spec.clone();
            tag_spec.tag = tag;
            let tag_status = ImageTagStatus {
                tag: tag_spec.tag.clone(),
                phase: ImagePullPhase::Succeeded,
                progress: 100,
                start_time: Some(Time(now)),
                completion_time: Some(Time(now)),
                version: 0,
                image_id: Some(format!("{}@sha256:{}", "n".repeat(255), "0".repeat(64))),
                message: None,
                bytes: None,
            };
            let pulling = ImageTagStatus {
                phase: ImagePullPhase::Pulling,
                completion_time: None,
                image_id: None,
                bytes: Some(PulledBytes::new(u64::MAX, u64::MAX)),
                ..tag_status.clone()
            };
            assert!(json!(pulling).to_string().len() < json!(tag_status).to_string().len());
            let [spec_bytes, status_bytes] =
                [json!(tag_spec), json!(tag_status)].map(|entry| entry.to_string().len() + 1);
            let tags = BYTES / spec_bytes;
            assert!(tags < MAX_TAGS, "{tags} tags of {spec_bytes} bytes");
            assert!(
                tags * status_bytes < MAX_STATUS_BYTES,
                "{tags} tags of {spec_bytes} and {status_bytes} bytes"
            );
        }
    }

    proptest! {
        /// After any requests of one namespace, another one has space for an image of usual size.
        #[test]
        fn one_namespace_cannot_fill_a_node_image(asks in prop::collection::vec((0_u16..400, 0_usize..100_000), 0..30)) {
            let mut quota = NodeImageQuota::default();
            for (image, bytes) in asks {
                let _ = quota.try_add([&"hostile"], &format!("h{image}"), &spec(&["hostile"], bytes));
            }
            prop_assert!(quota.total_usage().images <= MAX_IMAGES && quota.total_usage().bytes <= BYTES);
            prop_assert!(quota.try_add([&"plain"], "nginx", &spec(&["plain"], 1000)).is_ok());
        }
    }
}
