//! What a runtime is asked and what it answers, without protobuf.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use jiff::Timestamp;

/// Who answers at a runtime's socket.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Version {
    /// `containerd`, `cri-o`, `docker`.
    pub runtime_name: String,
    /// The runtime's own version, such as `1.7.24`.
    pub runtime_version: String,
    /// The version of CRI that it speaks.
    pub runtime_api_version: String,
}

/// An image on the node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Image {
    /// The runtime's own ID, `sha256:…` of the image's configuration.
    pub id: String,
    /// `NAME:TAG` of each tag that points to it.
    pub repo_tags: Vec<String>,
    /// `NAME@sha256:…` of each repository that it was pulled from.
    pub repo_digests: Vec<String>,
    /// Bytes on disk.
    pub size: u64,
    /// `linux/amd64` and the like, where the runtime says it.
    pub platform: Option<String>,
}

/// What to pull, and on whose behalf.
#[derive(Debug, Clone, Default)]
pub struct PullRequest {
    /// Fully qualified name with tag or digest; see [`kruise_api::image_reference::ImageReference`].
    pub image: String,
    /// Credentials; none pulls anonymously.
    pub auth: Option<AuthConfig>,
    /// Labels of the sandbox configuration that goes with the request.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the sandbox configuration that goes with the request.
    pub annotations: BTreeMap<String, String>,
    /// When to give the call up.
    pub timeout: Duration,
}

/// Credentials for a registry. Its `Debug` shows who, never the secret.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct AuthConfig {
    /// User name, or empty.
    pub username: String,
    /// Password, or empty.
    pub password: String,
    /// Base64 of `user:password`, or empty.
    pub auth: String,
    /// The registry that these are for, or empty.
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

/// Bytes of an image that have come, of how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DownloadProgress {
    /// Bytes on the node already; never more than `total`.
    pub downloaded: u64,
    /// Bytes of all layers and the configuration, compressed.
    pub total: u64,
}

/// What a container is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ContainerState {
    /// Made, not started.
    Created,
    /// Its first process runs.
    Running,
    /// Its first process has ended.
    Exited,
    /// The runtime does not know.
    #[default]
    Unknown,
}

/// A container as it appears in a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Container {
    /// The runtime's ID, without scheme.
    pub id: String,
    /// The container's name in its Pod.
    pub name: String,
    /// What it is doing.
    pub state: ContainerState,
    /// When it was made, by the node's clock.
    pub created_at: Option<Timestamp>,
    /// Annotation `io.kubernetes.container.restartCount`; the attempt number where that is absent.
    pub restart_count: u32,
    /// Labels, kubelet's `io.kubernetes.*` among them.
    pub labels: BTreeMap<String, String>,
    /// Annotations, kubelet's `io.kubernetes.*` among them.
    pub annotations: BTreeMap<String, String>,
}

/// A container in detail.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerStatus {
    /// The runtime's ID, without scheme.
    pub id: String,
    /// The container's name in its Pod.
    pub name: String,
    /// What it is doing.
    pub state: ContainerState,
    /// When it was made, by the node's clock.
    pub created_at: Option<Timestamp>,
    /// When it was started; none before that.
    pub started_at: Option<Timestamp>,
    /// When it ended; none before that.
    pub finished_at: Option<Timestamp>,
    /// The exit code of a container that has ended.
    pub exit_code: i32,
    /// One word on why it is as it is, or empty.
    pub reason: String,
    /// More on that, or empty.
    pub message: String,
    /// As in [`Container::restart_count`].
    pub restart_count: u32,
    /// The image as it was asked for.
    pub image: String,
    /// The image as the runtime knows it.
    pub image_ref: String,
    /// Labels, kubelet's `io.kubernetes.*` among them.
    pub labels: BTreeMap<String, String>,
    /// Annotations, kubelet's `io.kubernetes.*` among them.
    pub annotations: BTreeMap<String, String>,
}

/// A container in detail, and what it was made with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerDetails {
    /// Its status.
    pub status: ContainerStatus,
    /// The environment that it was made with; none where the runtime does not say. CRI leaves that open:
    /// containerd and CRI-O do.
    pub environment: Option<Environment>,
}

/// A container's environment: of each name the value that counts. Its `Debug` shows no values, for secrets are
/// among them.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The value of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }
}

/// Of two values of one name the later counts, as for the container itself.
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

/// What a command in a container said.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExecOutput {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// 0 if it succeeded.
    pub exit_code: i32,
}
