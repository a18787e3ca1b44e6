//! A runtime whose every response makes its reader panic, which must end only one piece of work.
#![allow(clippy::panic)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use super::{
    Container, ContainerDetails, ContainerStatus, DownloadProgress, Error, ExecOutput, Image, ImagePins,
    PullRequest, Runtime, Version,
};

/// A runtime of this name.
pub struct PanickingRuntime(pub &'static str);

#[async_trait]
impl Runtime for PanickingRuntime {
    fn name(&self) -> &str {
        self.0
    }

    fn socket(&self) -> &Path {
        Path::new("/run/panicking.sock")
    }

    async fn version(&self) -> Result<Version, Error> {
        panic!("version")
    }

    async fn image_status(&self, _: &str) -> Result<Option<Image>, Error> {
        panic!("image_status")
    }

    async fn pull_image(&self, _: &PullRequest) -> Result<String, Error> {
        panic!("pull_image")
    }

    async fn pull_progress(&self, _: &str) -> Result<Option<DownloadProgress>, Error> {
        panic!("pull_progress")
    }

    async fn image_filesystem(&self) -> Result<Option<PathBuf>, Error> {
        panic!("image_filesystem")
    }

    async fn pin_image(&self, _: &str, _: Timestamp) -> Result<(), Error> {
        panic!("pin_image")
    }

    async fn unpin_ended_images(&self, _: Timestamp) -> Result<ImagePins, Error> {
        panic!("unpin_ended_images")
    }

    async fn list_containers(&self, _: &str) -> Result<Vec<Container>, Error> {
        panic!("containers")
    }

    async fn container_status(&self, _: &str) -> Result<Option<ContainerStatus>, Error> {
        panic!("container_status")
    }

    async fn container_details(&self, _: &str) -> Result<Option<ContainerDetails>, Error> {
        panic!("container_details")
    }

    async fn stop_container(&self, _: &str, _: Duration) -> Result<(), Error> {
        panic!("stop_container")
    }

    async fn exec_sync(
        &self,
        _: &str,
        _: &[String],
        _: Duration,
        _: usize,
    ) -> Result<Option<ExecOutput>, Error> {
        panic!("exec_sync")
    }

    async fn pod_ips(&self, _: &str) -> Result<Vec<String>, Error> {
        panic!("pod_ips")
    }
}
