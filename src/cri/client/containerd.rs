//! Bytes of a pull in progress, from containerd's content store.
//!
//! CRI says nothing between the start and the end of a pull. containerd's own API, on the same socket, does: the
//! manifest, once fetched, carries the repository it came from and the digests of its layers, and each layer in
//! flight is an "ingest" whose name ends in the layer's digest. There is no event for bytes, so whoever wants them
//! asks now and then.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::{
    Info, InfoRequest, ListContentRequest, ListStatusesRequest, ReadContentRequest,
};
use tonic::transport::Channel;

use super::call::Call;
use crate::cri::{Bytes, Error, Reference};

const DEADLINE: Duration = Duration::from_secs(5);
/// Where kubelet's and CRI's images live in containerd.
const NAMESPACE: &str = "k8s.io";
const SOURCE_LABEL: &str = "containerd.io/distribution.source.";
const CONFIG_LABEL: &str = "containerd.io/gc.ref.content.config";
/// Longer manifests than this are not read.
const MAX_MANIFEST: i64 = 4 << 20;

/// containerd's content store, and the pulls whose bytes we count.
pub(super) struct Content {
    socket: PathBuf,
    client: ContentClient<Channel>,
    pulls: Pulls,
}

type Pulls = Arc<Mutex<HashMap<String, Pull>>>;

/// What we know of a pull in progress.
#[derive(Default)]
struct Pull {
    /// How many calls are pulling this image now.
    callers: usize,
    /// Its parts, once its manifest is there.
    parts: Option<Vec<Part>>,
}

/// A layer, or the image's configuration.
#[derive(Clone)]
struct Part {
    digest: String,
    size: u64,
    /// Seen complete; it is not asked for again.
    complete: bool,
}

/// While this lives, the image's bytes are counted.
pub(super) struct Counted {
    image: String,
    pulls: Pulls,
}

impl Drop for Counted {
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

impl Content {
    pub(super) fn new(channel: Channel, socket: PathBuf) -> Self {
        Self {
            socket,
            client: ContentClient::new(channel),
            pulls: Arc::default(),
        }
    }

    /// Begins to count an image's bytes.
    pub(super) fn count(&self, image: &str) -> Counted {
        self.lock().entry(image.to_owned()).or_default().callers += 1;
        Counted {
            image: image.to_owned(),
            pulls: Arc::clone(&self.pulls),
        }
    }

    /// How far the pull of `image` has come. None while its manifest is not there, where two pulls from one
    /// repository cannot be told apart, and where containerd's own API does not answer.
    pub(super) async fn progress(&self, image: &str) -> Result<Option<Bytes>, Error> {
        let Some(known) = self.lock().get(image).map(|pull| pull.parts.clone()) else {
            return Ok(None);
        };
        let found = match known {
            Some(parts) => Some(parts),
            None => self.find(image).await?,
        };
        let Some(mut parts) = found else {
            return Ok(None);
        };
        let bytes = self.measure(&mut parts).await?;
        if let Some(pull) = self.lock().get_mut(image) {
            pull.parts = Some(parts);
        }
        Ok(Some(bytes))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Pull>> {
        self.pulls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, method: &'static str) -> Call<'_> {
        Call {
            socket: &self.socket,
            method,
            deadline: DEADLINE,
        }
    }

    /// The parts of the one manifest of the image's repository that is not complete yet.
    async fn find(&self, image: &str) -> Result<Option<Vec<Part>>, Error> {
        let reference = Reference::parse(image)?;
        let blobs = self.blobs_of(&reference).await?;
        let mut candidates = Vec::new();
        for manifest in blobs
            .iter()
            .filter(|b| b.labels.contains_key(CONFIG_LABEL) && b.size <= MAX_MANIFEST)
        {
            let mut parts = parts(&self.read(&manifest.digest).await?);
            for part in &mut parts {
                part.complete = blobs.iter().any(|b| b.digest == part.digest);
            }
            if parts.iter().any(|p| !p.complete) {
                if reference.digest() == Some(&manifest.digest) {
                    return Ok(Some(parts));
                }
                candidates.push(parts);
            }
        }
        Ok(if candidates.len() == 1 {
            candidates.pop()
        } else {
            None
        })
    }

    /// Everything in the store that came from the image's repository.
    async fn blobs_of(&self, reference: &Reference) -> Result<Vec<Info>, Error> {
        let label = format!("{SOURCE_LABEL}{}", reference.host());
        let filter = format!("labels.\"{label}\"");
        let call = self.call("containerd Content.List");
        let mut client = self.client.clone();
        let request = in_namespace(call.request(ListContentRequest {
            filters: vec![filter],
        }));
        let mut stream = call.run(client.list(request)).await?;
        let mut blobs = Vec::new();
        while let Some(page) = call.next(&mut stream).await? {
            blobs.extend(page.info.into_iter().filter(|blob| {
                let repositories = blob.labels.get(&label).map_or("", String::as_str);
                repositories.split(',').any(|r| r == reference.path())
            }));
        }
        Ok(blobs)
    }

    async fn read(&self, digest: &str) -> Result<Vec<u8>, Error> {
        let call = self.call("containerd Content.Read");
        let mut client = self.client.clone();
        let request = ReadContentRequest {
            digest: digest.to_owned(),
            offset: 0,
            size: 0,
        };
        let mut stream = call.run(client.read(in_namespace(call.request(request)))).await?;
        let mut data = Vec::new();
        while let Some(piece) = call.next(&mut stream).await? {
            data.extend(piece.data);
        }
        Ok(data)
    }

    /// Adds up what is there: whole parts by their size, parts in flight by their offset.
    async fn measure(&self, parts: &mut [Part]) -> Result<Bytes, Error> {
        let call = self.call("containerd Content.ListStatuses");
        let mut client = self.client.clone();
        let request = in_namespace(call.request(ListStatusesRequest { filters: Vec::new() }));
        let in_flight = call.run(client.list_statuses(request)).await?.statuses;
        let mut bytes = Bytes::default();
        for part in parts {
            bytes.total += part.size;
            let ingest = in_flight.iter().find(|s| s.r#ref.ends_with(&part.digest));
            bytes.done += match ingest {
                _ if part.complete => part.size,
                Some(ingest) => u64::try_from(ingest.offset).unwrap_or(0).min(part.size),
                None => {
                    part.complete = self.has(&part.digest).await?;
                    if part.complete { part.size } else { 0 }
                }
            };
        }
        Ok(bytes)
    }

    async fn has(&self, digest: &str) -> Result<bool, Error> {
        let call = self.call("containerd Content.Info");
        let mut client = self.client.clone();
        let request = in_namespace(call.request(InfoRequest {
            digest: digest.to_owned(),
        }));
        call.found(client.info(request))
            .await
            .map(|found| found.is_some())
    }
}

fn in_namespace<T>(mut request: tonic::Request<T>) -> tonic::Request<T> {
    let namespace = tonic::metadata::MetadataValue::from_static(NAMESPACE);
    request.metadata_mut().insert("containerd-namespace", namespace);
    request
}

/// The layers and the configuration that an image manifest (Docker's or OCI's, same shape) names.
fn parts(manifest: &[u8]) -> Vec<Part> {
    #[derive(serde::Deserialize)]
    struct Manifest {
        config: Descriptor,
        #[serde(default)]
        layers: Vec<Descriptor>,
    }
    #[derive(serde::Deserialize)]
    struct Descriptor {
        digest: String,
        size: u64,
    }
    let Ok(Manifest { config, mut layers }) = serde_json::from_slice(manifest) else {
        return Vec::new();
    };
    layers.push(config);
    layers.sort_by(|a, b| a.digest.cmp(&b.digest));
    layers.dedup_by(|a, b| a.digest == b.digest);
    layers
        .into_iter()
        .map(|d| Part {
            digest: d.digest,
            size: d.size,
            complete: false,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn counts_each_blob_of_a_manifest_once() {
        let manifest = br#"{"config":{"digest":"sha256:c","size":7},
            "layers":[{"digest":"sha256:a","size":10},{"digest":"sha256:b","size":20},{"digest":"sha256:a","size":10}]}"#;
        let parts = parts(manifest);
        assert_eq!(parts.iter().map(|p| p.size).sum::<u64>(), 37);
    }

    #[test]
    fn what_is_no_manifest_has_no_parts() {
        assert!(parts(b"not json").is_empty());
        assert!(parts(br#"{"manifests":[]}"#).is_empty());
    }
}
