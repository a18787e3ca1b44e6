//! Requests and responses of a runtime, without protobuf.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use jiff::Timestamp;

/// The runtime that answers at a socket.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Version {
    /// `containerd`, `cri-o`, `docker`.
    pub runtime_name: String,
    /// The runtime's own version, such as `1.7.24`.
    pub runtime_version: String,
    /// The version of CRI that it serves.
    pub runtime_api_version: String,
}

/// An image on the node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Image {
    /// The runtime's own ID, `sha256:…` of the image's configuration.
    pub id: String,
    /// `NAME:TAG` of each tag of the image.
    pub repo_tags: Vec<String>,
    /// `NAME@sha256:…` of each repository that it was pulled from.
    pub repo_digests: Vec<String>,
    /// Bytes on disk.
    pub size: u64,
    /// `linux/amd64` and the like, if the runtime returns it.
    pub platform: Option<String>,
    /// Whether kubelet's garbage collection leaves it alone.
    pub pinned: bool,
}

/// The images that are pinned for a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ImagePins {
    /// How many there are.
    pub count: usize,
    /// When the next of them ends.
    pub next_end: Option<Timestamp>,
}

/// What to pull, and for which Pod.
#[derive(Debug, Clone, Default)]
pub struct PullRequest {
    /// Fully qualified name with tag or digest; see [`kruise_api::image_reference::ImageReference`].
    pub image: String,
    /// Credentials; `None` pulls anonymously.
    pub auth: Option<AuthConfig>,
    /// Labels of the sandbox configuration in the request.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the sandbox configuration in the request.
    pub annotations: BTreeMap<String, String>,
    /// The timeout of the call.
    pub timeout: Duration,
    /// The trace that the runtime's own spans belong to, as W3C's header has it.
    pub traceparent: Option<String>,
}

/// Credentials for a registry. Its `Debug` shows the user, never the secret.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct AuthConfig {
    /// User name, or empty.
    pub username: String,
    /// Password, or empty.
    pub password: String,
    /// Base64 of `user:password`, or empty.
    pub auth: String,
    /// The registry of these credentials, or empty.
    pub server_address: String,
    /// A token to exchange for an access token, or empty.
    pub identity_token: String,
    /// A bearer token to send as it is, or empty.
    pub registry_token: String,
}

impl fmt::Debug for AuthConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth")
            .field("username", &self.username)
            .field("server_address", &self.server_address)
            .finish_non_exhaustive()
    }
}

/// Downloaded bytes of an image, and their total.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DownloadProgress {
    /// Bytes that are on the node; never more than `total`.
    pub downloaded: u64,
    /// Bytes of all layers and the configuration, compressed.
    pub total: u64,
}

/// State of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ContainerState {
    /// Created, not started.
    Created,
    /// Its first process runs.
    Running,
    /// Its first process has ended.
    Exited,
    /// The runtime returned no state.
    #[default]
    Unknown,
}

impl ContainerState {
    /// Whether its first process may be running.
    #[must_use]
    pub fn may_run(self) -> bool {
        matches!(self, Self::Running | Self::Unknown)
    }
}

/// A container as it appears in a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Container {
    /// The runtime's ID, without scheme.
    pub id: String,
    /// The container's name in its Pod.
    pub name: String,
    /// State of the container.
    pub state: ContainerState,
    /// When it was created, by the node's clock.
    pub created_at: Option<Timestamp>,
    /// Annotation `io.kubernetes.container.restartCount`; the attempt number if that is absent.
    pub restart_count: u32,
    /// Labels, including kubelet's `io.kubernetes.*`.
    pub labels: BTreeMap<String, String>,
    /// Annotations, including kubelet's `io.kubernetes.*`.
    pub annotations: BTreeMap<String, String>,
}

/// The status of one container.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerStatus {
    /// The runtime's ID, without scheme.
    pub id: String,
    /// The container's name in its Pod.
    pub name: String,
    /// State of the container.
    pub state: ContainerState,
    /// When it was created, by the node's clock.
    pub created_at: Option<Timestamp>,
    /// When it started; `None` before that.
    pub started_at: Option<Timestamp>,
    /// When it ended; `None` before that.
    pub finished_at: Option<Timestamp>,
    /// Exit code, once it has ended.
    pub exit_code: i32,
    /// Reason of the state in one word, or empty.
    pub reason: String,
    /// Details of the reason, or empty.
    pub message: String,
    /// As in [`Container::restart_count`].
    pub restart_count: u32,
    /// The image as it was requested.
    pub image: String,
    /// The image as the runtime names it.
    pub image_ref: String,
    /// Labels, including kubelet's `io.kubernetes.*`.
    pub labels: BTreeMap<String, String>,
    /// Annotations, including kubelet's `io.kubernetes.*`.
    pub annotations: BTreeMap<String, String>,
}

/// A container's status and how it was created.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerDetails {
    /// Status of the container.
    pub status: ContainerStatus,
    /// The environment that it was created with; `None` if the runtime does not return it. CRI leaves that open:
    /// containerd and CRI-O do.
    pub environment: Option<Environment>,
}

/// A container's environment: the effective value of each name. Its `Debug` shows no values, because they may be
/// secrets.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The value of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }
}

/// Of two values of one name the later is effective, as in the container itself.
impl FromIterator<(String, String)> for Environment {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(pairs: I) -> Self {
        Self(pairs.into_iter().collect())
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// The result of a command in a container.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExecOutput {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// Exit code; 0 means success.
    pub exit_code: i32,
}
