//! Bytes of a pull in progress, from containerd's content store.
//!
//! CRI reports nothing between the start and the end of a pull. containerd's own API, on the same socket, does: the
//! manifest, once fetched, has labels with its repository and the digests of its layers, and each layer in flight is an
//! "ingest" whose name ends in the layer's digest. There is no event for bytes, so callers poll.
//!
//! Two tags of one repository cannot be distinguished if the second pull begins before the first one's manifest has been
//! observed. A blob's label has the repository, an ingest's name the digest, and a pull's lease, which references its
//! blobs, has a random name; the digest of a tag is written nowhere before the image's own record, at the end of the
//! pull. Only the order of events would be a hint, and a wrong guess would show one image's bytes as another's. So
//! neither has bytes until the other pull has ended. A pull by digest is identified by that digest.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::{
    Info, InfoRequest, ListContentRequest, ListStatusesRequest, ReadContentRequest, Status,
};
use tonic::transport::Channel;

use super::call::Call;
use crate::{DownloadProgress, Error};
use kruise_api::backoff::Backoff;
use kruise_api::image_reference::ImageReference;

const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// The containerd namespace of kubelet's and CRI's images.
const NAMESPACE: &str = "k8s.io";
const SOURCE_LABEL: &str = "containerd.io/distribution.source.";
const CONFIG_LABEL: &str = "containerd.io/gc.ref.content.config";
/// Longer manifests are not read.
const MAX_MANIFEST: i64 = 4 << 20;
/// Blobs of one repository that are searched for a manifest.
const MAX_BLOBS: usize = 4096;
/// Missing blobs of an image that are looked up again at each look, at most: layers are fetched in order, so that the
/// first of them appear first.
const MAX_REPEATED_LOOKUPS: usize = 32;
/// The pauses between lookups of a manifest that is not there yet.
const LOOKUP_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(10));

/// containerd's content store, and the pulls whose bytes are counted.
pub(super) struct ContentStore {
    socket: PathBuf,
    client: ContentClient<Channel>,
    pulls: Pulls,
}

type Pulls = Arc<Mutex<HashMap<String, TrackedPull>>>;

/// State of a pull in progress.
#[derive(Default)]
struct TrackedPull {
    /// How many calls are pulling this image now.
    callers: usize,
    /// Its manifest, once it is there.
    manifest: Option<Manifest>,
    /// Failed lookups, and when the next one is due: a lookup lists all blobs of the repository.
    misses: u32,
    next_lookup: Option<Instant>,
}

impl TrackedPull {
    fn record_miss(&mut self, now: Instant) {
        self.next_lookup = now.checked_add(LOOKUP_BACKOFF.delay(self.misses));
        self.misses = self.misses.saturating_add(1);
    }
}

/// An image manifest and its blobs.
#[derive(Clone)]
struct Manifest {
    digest: String,
    parts: Vec<ManifestBlob>,
}

/// A different pull from the same repository: its requested digest, and the manifest that is certainly its own.
struct RivalPull {
    digest: Option<String>,
    manifest: Option<String>,
}

impl RivalPull {
    fn owns(&self, digest: &str) -> bool {
        [&self.digest, &self.manifest]
            .into_iter()
            .flatten()
            .any(|d| d == digest)
    }
}

/// A layer, or the image's configuration.
#[derive(Clone)]
struct ManifestBlob {
    digest: String,
    size: u64,
    /// Observed as complete; it is not looked up again.
    complete: bool,
    /// It was looked up before.
    looked_up: bool,
}

impl ManifestBlob {
    /// Whether to look it up at this look: at its first, and then as long as there are repetitions left.
    fn needs_lookup(&mut self, repetitions_left: &mut usize) -> bool {
        if !self.looked_up {
            self.looked_up = true;
            return true;
        }
        let is_left = *repetitions_left > 0;
        *repetitions_left = repetitions_left.saturating_sub(1);
        is_left
    }
}

/// While this exists, the image's bytes are counted.
pub(super) struct PullGuard {
    image: String,
    pulls: Pulls,
}

impl Drop for PullGuard {
    fn drop(&mut self) {
        let mut pulls = self.pulls.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pull) = pulls.get_mut(&self.image) {
            pull.callers -= 1;
            if pull.callers == 0 {
                pulls.remove(&self.image);
            }
        }
    }
}

impl ContentStore {
    pub(super) fn new(channel: Channel, socket: PathBuf) -> Self {
        Self {
            socket,
            client: ContentClient::new(channel),
            pulls: Arc::default(),
        }
    }

    /// Begins to count an image's bytes.
    pub(super) fn track(&self, image: &str) -> PullGuard {
        self.lock().entry(image.to_owned()).or_default().callers += 1;
        PullGuard {
            image: image.to_owned(),
            pulls: Arc::clone(&self.pulls),
        }
    }

    /// The progress of the pull of `image`. `None` while its manifest is not there, if two pulls from one repository
    /// cannot be distinguished, and if containerd's own API does not answer.
    pub(super) async fn progress(&self, image: &str) -> Result<Option<DownloadProgress>, Error> {
        let now = Instant::now();
        let cached = match self.lock().get(image) {
            Some(pull) if pull.next_lookup.is_none_or(|at| now >= at) => pull.manifest.clone(),
            _ => return Ok(None),
        };
        let in_flight = self.active_ingests().await?;
        let found = match cached {
            Some(manifest) => Some(manifest),
            None => self.find_manifest(image, &in_flight).await?,
        };
        let Some(mut manifest) = found else {
            if let Some(pull) = self.lock().get_mut(image) {
                pull.record_miss(now);
            }
            return Ok(None);
        };
        let bytes = self.sum_progress(&mut manifest.parts, &in_flight).await?;
        if let Some(pull) = self.lock().get_mut(image) {
            pull.manifest = Some(manifest);
            pull.next_lookup = None;
        }
        Ok(Some(bytes))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, TrackedPull>> {
        self.pulls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, method: &'static str) -> Call<'_> {
        Call {
            socket: &self.socket,
            method,
            deadline: CALL_TIMEOUT,
        }
    }

    /// The only manifest of the image's repository that has blobs in flight. A digest may name it; without one, and if
    /// a different pull from the repository could own it as well, the result is `None`.
    async fn find_manifest(&self, image: &str, in_flight: &[Status]) -> Result<Option<Manifest>, Error> {
        let reference = ImageReference::parse(image)?;
        let others = self.rival_pulls(image, &reference);
        let blobs = self.list_blobs(&reference).await?;
        let manifests = blobs
            .iter()
            .filter(|b| b.labels.contains_key(CONFIG_LABEL) && b.size <= MAX_MANIFEST);
        let mut candidates = Vec::new();
        for Info { digest, .. } in manifests.filter(|m| !others.iter().any(|o| o.owns(&m.digest))) {
            let parts = parse_manifest(&self.read_blob(digest).await?);
            if !parts
                .iter()
                .any(|p| in_flight.iter().any(|s| s.r#ref.ends_with(&p.digest)))
            {
                continue;
            }
            let manifest = Manifest {
                digest: digest.clone(),
                parts,
            };
            if reference.digest() == Some(digest) {
                return Ok(Some(manifest));
            }
            candidates.push(manifest);
        }
        let ambiguous = others
            .iter()
            .any(|o| o.manifest.is_none() && !blobs.iter().any(|b| o.owns(&b.digest)));
        Ok(if candidates.len() == 1 && !ambiguous {
            candidates.pop()
        } else {
            None
        })
    }

    /// The other pulls in progress from the same repository.
    fn rival_pulls(&self, image: &str, reference: &ImageReference) -> Vec<RivalPull> {
        let pulls = self.lock();
        let others = pulls
            .iter()
            .filter(|(other, _)| other.as_str() != image)
            .filter_map(|(other, pull)| {
                let other = ImageReference::parse(other)
                    .ok()
                    .filter(|o| o.repository() == reference.repository())?;
                let manifest = pull.manifest.as_ref().map(|m| m.digest.clone());
                Some(RivalPull {
                    digest: other.digest().map(str::to_owned),
                    manifest,
                })
            });
        others.collect()
    }

    /// Everything in the store that came from the image's repository.
    async fn list_blobs(&self, reference: &ImageReference) -> Result<Vec<Info>, Error> {
        let label = format!("{SOURCE_LABEL}{}", reference.host());
        // The label is a comma-separated list of repositories. Only the dot of a path is a regex metacharacter.
        let path = reference.path().replace('.', "[.]");
        let filter = format!("labels.\"{label}\"~=\"(^|,){path}(,|$)\"");
        let call = self.call("containerd Content.List");
        let mut client = self.client.clone();
        let request = in_namespace(call.request(ListContentRequest {
            filters: vec![filter],
        }));
        let mut stream = call.run(client.list(request)).await?;
        let mut blobs = Vec::new();
        while let Some(page) = call.next_message(&mut stream).await? {
            blobs.extend(page.info.into_iter().take(MAX_BLOBS - blobs.len()));
            if blobs.len() == MAX_BLOBS {
                break;
            }
        }
        Ok(blobs)
    }

    async fn read_blob(&self, digest: &str) -> Result<Vec<u8>, Error> {
        let call = self.call("containerd Content.Read");
        let mut client = self.client.clone();
        let request = ReadContentRequest {
            digest: digest.to_owned(),
            offset: 0,
            size: 0,
        };
        let mut stream = call.run(client.read(in_namespace(call.request(request)))).await?;
        let mut data = Vec::new();
        while let Some(piece) = call.next_message(&mut stream).await? {
            data.extend(piece.data);
        }
        Ok(data)
    }

    /// Everything that is being fetched now, for any image.
    async fn active_ingests(&self) -> Result<Vec<Status>, Error> {
        let call = self.call("containerd Content.ListStatuses");
        let mut client = self.client.clone();
        let request = in_namespace(call.request(ListStatusesRequest { filters: Vec::new() }));
        Ok(call.run(client.list_statuses(request)).await?.statuses)
    }

    /// Adds up the bytes: complete parts by their size, parts in flight by their offset. The configuration is fetched
    /// first, then the layers in order. containerd leaves out the first layers if they are unpacked already; their blobs
    /// may have been discarded.
    async fn sum_progress(
        &self,
        parts: &mut [ManifestBlob],
        in_flight: &[Status],
    ) -> Result<DownloadProgress, Error> {
        let mut bytes = DownloadProgress::default();
        let ingest_of = |part: &ManifestBlob| in_flight.iter().find(|s| s.r#ref.ends_with(&part.digest));
        let first_in_flight = parts.iter().position(|part| ingest_of(part).is_some());
        let mut repetitions_left = MAX_REPEATED_LOOKUPS;
        for (index, part) in parts.iter_mut().enumerate() {
            bytes.total = bytes.total.saturating_add(part.size);
            let done = match ingest_of(part) {
                _ if part.complete => part.size,
                Some(ingest) => u64::try_from(ingest.offset).unwrap_or(0).min(part.size),
                None => {
                    let was_left_out = first_in_flight.is_some_and(|first| index < first);
                    part.complete = was_left_out
                        || (part.needs_lookup(&mut repetitions_left)
                            && self.blob_exists(&part.digest).await?);
                    if part.complete { part.size } else { 0 }
                }
            };
            bytes.downloaded = bytes.downloaded.saturating_add(done);
        }
        Ok(bytes)
    }

    async fn blob_exists(&self, digest: &str) -> Result<bool, Error> {
        let call = self.call("containerd Content.Info");
        let mut client = self.client.clone();
        let request = in_namespace(call.request(InfoRequest {
            digest: digest.to_owned(),
        }));
        call.run_optional(client.info(request))
            .await
            .map(|found| found.is_some())
    }
}

pub(super) fn in_namespace<T>(mut request: tonic::Request<T>) -> tonic::Request<T> {
    let namespace = tonic::metadata::MetadataValue::from_static(NAMESPACE);
    request.metadata_mut().insert("containerd-namespace", namespace);
    request
}

/// Layers of an image whose progress is looked for: each may be a call at the first look. Runtimes mount some hundred
/// at most.
const MAX_LAYERS: usize = 1000;

/// The configuration and the layers, in order, that an image manifest (Docker's or OCI's, same shape) names; nothing if
/// there are more than [`MAX_LAYERS`].
fn parse_manifest(manifest: &[u8]) -> Vec<ManifestBlob> {
    #[derive(serde::Deserialize)]
    struct Document {
        config: Descriptor,
        #[serde(default)]
        layers: Vec<Descriptor>,
    }
    #[derive(serde::Deserialize)]
    struct Descriptor {
        digest: String,
        size: u64,
    }
    let Ok(Document { config, layers }) = serde_json::from_slice(manifest) else {
        return Vec::new();
    };
    if layers.len() > MAX_LAYERS {
        return Vec::new();
    }
    let mut seen = HashSet::new();
    std::iter::once(config)
        .chain(layers)
        .filter(|blob| seen.insert(blob.digest.clone()))
        .map(|d| ManifestBlob {
            digest: d.digest,
            size: d.size,
            complete: false,
            looked_up: false,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn manifest_lookups_back_off() {
        let (start, mut pull) = (Instant::now(), TrackedPull::default());
        let pauses: Vec<_> = (0..6)
            .map(|_| {
                pull.record_miss(start);
                pull.next_lookup.unwrap().duration_since(start).as_secs()
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 10, 10]);
    }

    #[test]
    fn missing_blobs_are_looked_up_in_small_numbers_again() {
        let blob = ManifestBlob {
            digest: "sha256:a".to_owned(),
            size: 1,
            complete: false,
            looked_up: false,
        };
        let mut parts = vec![blob; MAX_LAYERS];
        let mut lookups = || {
            let mut repetitions_left = MAX_REPEATED_LOOKUPS;
            let needed = parts
                .iter_mut()
                .map(|part| part.needs_lookup(&mut repetitions_left));
            needed.filter(|needed| *needed).count()
        };
        let counts = [lookups(), lookups(), lookups()];
        assert_eq!(counts, [MAX_LAYERS, MAX_REPEATED_LOOKUPS, MAX_REPEATED_LOOKUPS]);
    }

    #[test]
    fn each_blob_of_a_manifest_is_counted_once() {
        let manifest = br#"{"config":{"digest":"sha256:c","size":7},
            "layers":[{"digest":"sha256:a","size":10},{"digest":"sha256:b","size":20},{"digest":"sha256:a","size":10}]}"#;
        let parts = parse_manifest(manifest);
        let sizes: Vec<u64> = parts.iter().map(|part| part.size).collect();
        assert_eq!(sizes, [7, 10, 20], "no layer is before the configuration");
    }

    #[test]
    fn invalid_manifest_has_no_blobs() {
        assert!(parse_manifest(b"not json").is_empty());
        let layers = |count: usize| {
            let layer = |n| format!(r#"{{"digest": "sha256:{n}", "size": 1}}"#);
            let layers: Vec<_> = (0..count).map(layer).collect();
            let text = format!(
                r#"{{"config": {{"digest": "c", "size": 1}}, "layers": [{}]}}"#,
                layers.join(",")
            );
            parse_manifest(text.as_bytes()).len()
        };
        assert_eq!((layers(MAX_LAYERS), layers(MAX_LAYERS + 1)), (MAX_LAYERS + 1, 0));
        assert!(parse_manifest(br#"{"manifests":[]}"#).is_empty());
    }
}
