//! What the node daemon needs from a container runtime.

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use super::{
    Container, ContainerDetails, ContainerStatus, DownloadProgress, Error, ExecOutput, Image, ImagePins,
    PullRequest, Version,
};

/// A container runtime. Every call has its own deadline and is cancelled by dropping its future.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// The runtime's name as it reports it (`containerd`, `cri-o`, `docker`): the scheme of a Pod's `containerID`.
    fn name(&self) -> &str;

    /// The socket that this runtime listens on.
    fn socket(&self) -> &Path;

    /// The runtime and its version; also the cheapest health check.
    async fn version(&self) -> Result<Version, Error>;

    /// The image that `image` (fully qualified, with tag or digest) names, or `None` if it is not on the node.
    async fn image_status(&self, image: &str) -> Result<Option<Image>, Error>;

    /// Pulls an image and returns the reference that the runtime gave it. Ends after `request.timeout`.
    async fn pull_image(&self, request: &PullRequest) -> Result<String, Error>;

    /// The progress of the running pull of `image`; `None` if the runtime does not return it.
    async fn pull_progress(&self, image: &str) -> Result<Option<DownloadProgress>, Error>;

    /// The directory of the runtime's images on the node; `None` if the runtime does not return it.
    async fn image_filesystem(&self) -> Result<Option<PathBuf>, Error>;

    /// Keeps kubelet's garbage collection from that image until that time.
    async fn pin_image(&self, image: &str, until: Timestamp) -> Result<(), Error>;

    /// Ends the pins of [`Runtime::pin_image`] whose time has come, and returns the others.
    async fn unpin_ended_images(&self, now: Timestamp) -> Result<ImagePins, Error>;

    /// The containers of a Pod in every state, newest first.
    async fn list_containers(&self, pod_uid: &str) -> Result<Vec<Container>, Error>;

    /// One container, or `None` if the runtime does not have it.
    async fn container_status(&self, id: &str) -> Result<Option<ContainerStatus>, Error>;

    /// One container and how it was created, or `None` if the runtime does not have it. The response is long: do not
    /// call it often.
    async fn container_details(&self, id: &str) -> Result<Option<ContainerDetails>, Error>;

    /// Stops a container: TERM, and KILL after `grace` (whole seconds, rounded up). A container that the runtime does
    /// not have counts as stopped.
    async fn stop_container(&self, id: &str, grace: Duration) -> Result<(), Error>;

    /// Runs a command in a container and waits for its end, for at most `timeout` (greater than zero). `None` if it
    /// printed more than `max_output` bytes: it has ended, but its result is unknown. A runtime returns up to 32 MiB.
    async fn exec_sync(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
        max_output: usize,
    ) -> Result<Option<ExecOutput>, Error>;

    /// The addresses of a Pod, primary first; empty if it uses the host's network or has no ready sandbox.
    async fn pod_ips(&self, pod_uid: &str) -> Result<Vec<String>, Error>;
}
