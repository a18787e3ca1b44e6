//! How a pull ended: each image's outcome, or why nothing was pulled.

use std::path::PathBuf;

use super::plan;
use crate::image_pull::plan::keyring;

/// How one image went.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PullOutcome {
    pub(super) image: String,
    pub(super) succeeded: bool,
    /// It was there before.
    pub(super) already_present: bool,
    pub(super) image_id: Option<String>,
    pub(super) message: Option<String>,
    pub(super) attempts: u32,
    pub(super) seconds: f64,
}

/// Why nothing was pulled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("{path}: {why}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        why: std::io::Error,
    },
    /// A manifest is not what it should be.
    #[error("{path}: {why}")]
    Manifest {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        why: plan::Error,
    },
    /// The Docker configuration is not one.
    #[error("{path} cannot be used: {why}")]
    DockerConfig {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        why: keyring::Error,
    },
    /// A signal came before the first pull.
    #[error("interrupted")]
    Interrupted,
    /// There is no runtime to pull with.
    #[error("no container runtime answers: {0}")]
    NoRuntime(String),
}

impl Error {
    /// Whether the same command may succeed later.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(self, Self::NoRuntime(_) | Self::Interrupted)
    }

    /// The word for it in JSON output.
    #[must_use]
    pub fn category(&self) -> &'static str {
        match self {
            Self::File { .. } => "file",
            Self::Manifest { .. } => "manifest",
            Self::DockerConfig { .. } => "docker_config",
            Self::Interrupted => "interrupted",
            Self::NoRuntime(_) => "no_runtime",
        }
    }
}
