//! An image registry that sends bytes only when the test allows it, and can send wrong ones.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::watch;

pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const CHUNK: usize = 64 << 10;

/// The server. Stops when dropped.
pub struct FakeRegistry {
    port: u16,
    shared: SharedContents,
    task: tokio::task::JoinHandle<()>,
}

type SharedContents = Arc<Mutex<Contents>>;

#[derive(Default)]
struct Contents {
    /// By `REPOSITORY/TAG-OR-DIGEST`: media type and bytes.
    manifests: HashMap<String, (String, Bytes)>,
    blobs: HashMap<String, Blob>,
    /// Fixed responses for everything in these repositories.
    overrides: HashMap<String, (StatusCode, String)>,
}

#[derive(Clone)]
struct Blob {
    bytes: Bytes,
    /// Number of bytes that may be sent.
    allowed: Arc<watch::Sender<usize>>,
}

/// An image in the registry.
pub struct FakeImage {
    pub digest: String,
    /// Bytes of the layer and the configuration.
    pub total: u64,
    allowed: Arc<watch::Sender<usize>>,
}

impl FakeImage {
    /// Allows this many bytes of the layer.
    pub fn allow(&self, bytes: usize) {
        self.allowed.send_replace(bytes);
    }
}

impl Drop for FakeRegistry {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl FakeRegistry {
    /// Listens on all addresses.
    pub async fn start() -> Self {
        let shared = SharedContents::default();
        let listener = tokio::net::TcpListener::bind(SocketAddr::from(([0, 0, 0, 0], 0)))
            .await
            .unwrap();
        let port = listener.local_addr().unwrap().port();
        let app = Router::new().fallback(handle).with_state(Arc::clone(&shared));
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { port, shared, task }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sets the response for everything in a repository.
    pub fn respond_with(&self, repository: &str, status: StatusCode, body: &str) {
        self.shared
            .lock()
            .unwrap()
            .overrides
            .insert(repository.to_owned(), (status, body.to_owned()));
    }

    /// Adds an image with one layer of that size, of which nothing is sent before [`FakeImage::allow`].
    pub fn image(&self, repository: &str, tag: &str, size: usize, architecture: &str) -> FakeImage {
        let layer = tar(&format!("{repository}-{tag}"), size);
        let descriptor = descriptor(LAYER, &layer);
        self.image_of(repository, tag, None, layer, &descriptor, architecture)
    }

    /// The same upon a base layer of that size, which is always sent; returns the digest of the base, too.
    pub fn image_on_base(
        &self,
        repository: &str,
        tag: &str,
        base_size: usize,
        size: usize,
    ) -> (FakeImage, String) {
        let base = tar("base", base_size);
        let base_digest = digest(&base);
        let layer = tar(&format!("{repository}-{tag}"), size);
        let descriptor = descriptor(LAYER, &layer);
        let image = self.image_of(repository, tag, Some(base), layer, &descriptor, "amd64");
        (image, base_digest)
    }

    /// The same with one small layer, of whose size the manifest says this.
    pub fn image_with_stated_size(&self, repository: &str, tag: &str, bytes: u64) -> FakeImage {
        let layer = tar(&format!("{repository}-{tag}"), 512);
        let mut descriptor = descriptor(LAYER, &layer);
        descriptor["size"] = json!(bytes);
        self.image_of(repository, tag, None, layer, &descriptor, "amd64")
    }

    fn image_of(
        &self,
        repository: &str,
        tag: &str,
        base: Option<Bytes>,
        layer: Bytes,
        layer_descriptor: &Value,
        architecture: &str,
    ) -> FakeImage {
        let diff_ids: Vec<String> = base.iter().chain([&layer]).map(|layer| digest(layer)).collect();
        let mut layers: Vec<Value> = base.iter().map(|base| descriptor(LAYER, base)).collect();
        layers.push(layer_descriptor.clone());
        let config = json!({"architecture": architecture, "os": "linux", "config": {},
            "rootfs": {"type": "layers", "diff_ids": diff_ids}});
        let config = Bytes::from(config.to_string());
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST,
            "config": descriptor(CONFIG, &config), "layers": layers});
        let total = (config.len() + base.as_ref().map_or(0, Bytes::len) + layer.len()) as u64;
        let mut contents = self.shared.lock().unwrap();
        let allowed = contents.blob(layer, 0);
        for bytes in base.into_iter().chain([config]) {
            contents.blob(bytes, usize::MAX);
        }
        let digest = contents.manifest(repository, tag, MANIFEST, &manifest);
        FakeImage {
            digest,
            total,
            allowed,
        }
    }

    /// Adds an index of an image that exists for one platform.
    pub fn index(&self, repository: &str, tag: &str, image: &FakeImage, architecture: &str) {
        let mut contents = self.shared.lock().unwrap();
        let size = contents.manifests[&format!("{repository}/{}", image.digest)]
            .1
            .len();
        let entry = json!({"mediaType": MANIFEST, "digest": image.digest, "size": size,
            "platform": {"architecture": architecture, "os": "linux"}});
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]});
        contents.manifest(repository, tag, INDEX, &index);
    }
}

impl Contents {
    fn blob(&mut self, bytes: Bytes, allowed: usize) -> Arc<watch::Sender<usize>> {
        let allowed = Arc::new(watch::channel(allowed).0);
        self.blobs.insert(
            digest(&bytes),
            Blob {
                bytes,
                allowed: Arc::clone(&allowed),
            },
        );
        allowed
    }

    fn manifest(&mut self, repository: &str, tag: &str, media_type: &str, value: &Value) -> String {
        let bytes = Bytes::from(value.to_string());
        let digest = digest(&bytes);
        for name in [tag, &digest] {
            self.manifests.insert(
                format!("{repository}/{name}"),
                (media_type.to_owned(), bytes.clone()),
            );
        }
        digest
    }
}

fn descriptor(media_type: &str, bytes: &Bytes) -> Value {
    json!({"mediaType": media_type, "digest": digest(bytes), "size": bytes.len()})
}

fn digest(bytes: &[u8]) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, bytes);
    let hex: String = hash.as_ref().iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

/// A tar archive with one file of zeros.
fn tar(name: &str, size: usize) -> Bytes {
    let mut header = [0u8; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..107].copy_from_slice(b"0000644");
    header[108..115].copy_from_slice(b"0000000");
    header[116..123].copy_from_slice(b"0000000");
    header[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    header[136..147].copy_from_slice(b"00000000000");
    header[148..156].copy_from_slice(b"        ");
    header[156] = b'0';
    header[257..262].copy_from_slice(b"ustar");
    header[263..265].copy_from_slice(b"00");
    let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    let mut archive = header.to_vec();
    archive.resize(512 + size.next_multiple_of(512) + 1024, 0);
    Bytes::from(archive)
}

async fn handle(State(shared): State<SharedContents>, method: Method, uri: Uri) -> Response {
    let path = uri.path().strip_prefix("/v2/").unwrap_or_default();
    let contents = shared.lock().unwrap();
    let override_response = contents
        .overrides
        .iter()
        .find(|(repository, _)| path.starts_with(repository.as_str()));
    if let Some((_, (status, body))) = override_response {
        return (*status, body.clone()).into_response();
    }
    let found = path
        .split_once("/manifests/")
        .and_then(|(repo, name)| contents.manifests.get(&format!("{repo}/{name}")));
    if let Some((media_type, bytes)) = found {
        return respond(
            &method,
            media_type,
            bytes.len(),
            Body::from(bytes.clone()),
            &digest(bytes),
        );
    }
    let blob = path
        .split_once("/blobs/")
        .and_then(|(_, digest)| contents.blobs.get(digest));
    match blob.cloned() {
        Some(blob) => {
            let (length, digest) = (blob.bytes.len(), digest(&blob.bytes));
            respond(
                &method,
                "application/octet-stream",
                length,
                throttled_body(blob),
                &digest,
            )
        }
        None if path.is_empty() => StatusCode::OK.into_response(),
        None => (
            StatusCode::NOT_FOUND,
            r#"{"errors":[{"code":"MANIFEST_UNKNOWN"}]}"#,
        )
            .into_response(),
    }
}

fn respond(method: &Method, media_type: &str, length: usize, body: Body, digest: &str) -> Response {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_str(media_type).unwrap());
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    headers.insert("docker-content-digest", HeaderValue::from_str(digest).unwrap());
    let body = if method == Method::HEAD {
        Body::empty()
    } else {
        body
    };
    (headers, body).into_response()
}

/// The blob in chunks, no further than allowed; it fails when nothing more is allowed for a minute.
fn throttled_body(blob: Blob) -> Body {
    let allowed = blob.allowed.subscribe();
    let pieces = futures::stream::unfold(
        (blob.bytes, 0usize, allowed),
        |(bytes, sent, mut allowed)| async move {
            if sent >= bytes.len() {
                return None;
            }
            let wait = allowed.wait_for(|allowed| *allowed > sent);
            let limit = *tokio::time::timeout(Duration::from_secs(60), wait)
                .await
                .ok()?
                .ok()?;
            let end = (sent + CHUNK).min(bytes.len()).min(limit);
            Some((
                Ok::<_, std::io::Error>(bytes.slice(sent..end)),
                (bytes, end, allowed),
            ))
        },
    );
    Body::from_stream(pieces)
}
