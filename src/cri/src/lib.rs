//! The one seam to the container runtime.
//!
//! In:  calls of the duties; sockets on the node.
//! Out: what the runtime says, as plain types; image references, parsed.
//!
//! Everything that the node daemon wants of a runtime is one trait, [`Runtime`], spoken over CRI v1 on the
//! runtime's unix socket. The duties see neither gRPC nor protobuf, and their tests can put a server of their own
//! behind the socket.

pub mod client;
mod discovery;
mod error;
#[cfg(any(test, feature = "testing"))]
pub mod panicking;
mod types;

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;

pub use discovery::{DiscoveryOptions, Runtimes, SocketHealth, no_runtime_reason};
pub use error::{Error, PullCause};
pub use types::{
    AuthConfig, Container, ContainerDetails, ContainerState, ContainerStatus, DownloadProgress, Environment,
    ExecOutput, Image, PullRequest, Version,
};

/// A container runtime. Every call has a deadline of its own and is cancelled by dropping its future.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// The runtime's name as it says it itself (`containerd`, `cri-o`, `docker`): the scheme of a Pod's
    /// `containerID`.
    fn name(&self) -> &str;

    /// The socket that this runtime listens on.
    fn socket(&self) -> &Path;

    /// Who answers at the socket; also the cheapest sign of life.
    async fn version(&self) -> Result<Version, Error>;

    /// The one image that `image` (fully qualified, with tag or digest) names, or none if it is not on the node.
    async fn image_status(&self, image: &str) -> Result<Option<Image>, Error>;

    /// Pulls an image and returns the reference that the runtime gave it. Ends after `request.timeout`.
    async fn pull_image(&self, request: &PullRequest) -> Result<String, Error>;

    /// How far the pull of `image` in progress has come; none where the runtime does not say.
    async fn pull_progress(&self, image: &str) -> Result<Option<DownloadProgress>, Error>;

    /// The containers of a Pod in every state, newest first.
    async fn list_containers(&self, pod_uid: &str) -> Result<Vec<Container>, Error>;

    /// One container, or none if the runtime does not know it.
    async fn container_status(&self, id: &str) -> Result<Option<ContainerStatus>, Error>;

    /// One container with what it was made with, or none if the runtime does not know it. A long answer: not for
    /// what is asked often.
    async fn container_details(&self, id: &str) -> Result<Option<ContainerDetails>, Error>;

    /// Stops a container: TERM, and KILL after `grace` (whole seconds, rounded up). A container that the runtime
    /// does not know counts as stopped.
    async fn stop_container(&self, id: &str, grace: Duration) -> Result<(), Error>;

    /// Runs a command in a container and waits for its end, for at most `timeout` (greater than zero). None where it
    /// printed more than `most` bytes: it has ended, but it is not known how. A runtime hands back up to 32 MiB.
    async fn exec_sync(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
        max_output: usize,
    ) -> Result<Option<ExecOutput>, Error>;

    /// The addresses of a Pod, primary first; empty where it uses the host's network or has no ready sandbox.
    async fn pod_ips(&self, pod_uid: &str) -> Result<Vec<String>, Error>;
}
