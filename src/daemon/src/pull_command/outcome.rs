//! The result of the command: each image's outcome, or why nothing was pulled.

use std::path::PathBuf;

use super::plan;
use crate::image_pull::plan::keyring;

/// The outcome of one image.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PullOutcome {
    pub(super) image: String,
    pub(super) succeeded: bool,
    /// The image was already on the node.
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
        /// Path of the file.
        path: PathBuf,
        /// Error of the read.
        why: std::io::Error,
    },
    /// A manifest is invalid.
    #[error("{path}: {why}")]
    Manifest {
        /// Path of the manifest.
        path: PathBuf,
        /// Reason for the rejection.
        why: plan::Error,
    },
    /// The Docker configuration is invalid.
    #[error("{path} cannot be used: {why}")]
    DockerConfig {
        /// Path of the configuration.
        path: PathBuf,
        /// Reason for the rejection.
        why: keyring::Error,
    },
    /// The credential helpers of the Docker configuration are invalid.
    #[error("{path} cannot be used: credsStore is no string, or credHelpers is no map of strings")]
    CredentialHelpers {
        /// Path of the configuration.
        path: PathBuf,
    },
    /// A signal came before the first pull.
    #[error("interrupted")]
    Interrupted,
    /// No runtime answers.
    #[error("no container runtime answers: {0}")]
    NoRuntime(String),
}

impl Error {
    /// Whether the same command may succeed later.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(self, Self::NoRuntime(_) | Self::Interrupted)
    }

    /// The error category in JSON output.
    #[must_use]
    pub fn category(&self) -> &'static str {
        match self {
            Self::File { .. } => "file",
            Self::Manifest { .. } => "manifest",
            Self::DockerConfig { .. } | Self::CredentialHelpers { .. } => "docker_config",
            Self::Interrupted => "interrupted",
            Self::NoRuntime(_) => "no_runtime",
        }
    }
}
