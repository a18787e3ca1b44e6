//! Why a reconcile failed.

use kruise_cluster as cluster;
use kruise_cluster::queue::ReconcileError;
use kruise_cri as cri;
use kruise_ops::panics;

/// Why a reconcile failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server did not accept a write.
    #[error(transparent)]
    Cluster(#[from] cluster::Error),
    /// The runtime did not answer.
    #[error(transparent)]
    Runtime(#[from] cri::Error),
    /// The container's runtime is missing.
    #[error("no runtime named {0:?} answers")]
    NoRuntime(String),
    /// The container ID in the Pod's status is malformed.
    #[error("container ID {0:?} is not of the form RUNTIME://ID")]
    InvalidContainerId(String),
    /// The annotation cannot be encoded as JSON.
    #[error("annotation: {0}")]
    Json(String),
    /// The update was rolled back or the Pod was deleted while the restart waited for a slot.
    #[error("the restart is not wanted any more")]
    Withdrawn,
    /// A panic, which is a defect.
    #[error(transparent)]
    Panic(#[from] panics::Panicked),
    /// The watch ended, although it never should.
    #[error("the watch of Pods ended")]
    WatchEnded,
}

impl Error {
    /// Whether the same reconcile may succeed later without a change.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Cluster(error) => error.retryable(),
            Self::Runtime(error) => error.retryable(),
            Self::NoRuntime(_) | Self::Withdrawn | Self::Panic(_) => true,
            Self::InvalidContainerId(_) | Self::Json(_) | Self::WatchEnded => false,
        }
    }

    /// Whether the same reconcile fails until a user changes something.
    pub(super) fn permanent(&self) -> bool {
        match self {
            Self::Cluster(error) => error.permanent(),
            other => !other.retryable(),
        }
    }

    /// The value of the metric label.
    #[must_use]
    pub fn category(&self) -> &'static str {
        match self {
            Self::Cluster(error) => error.category(),
            Self::Runtime(error) => error.category(),
            Self::NoRuntime(_) => "no_runtime",
            Self::InvalidContainerId(_) => "bad_id",
            Self::Json(_) => "json",
            Self::Withdrawn => "withdrawn",
            Self::Panic(_) => "panic",
            Self::WatchEnded => "watch_ended",
        }
    }
}

impl From<Error> for ReconcileError {
    fn from(error: Error) -> Self {
        match error {
            Error::Cluster(error) => error.into(),
            other => Self::new(other.to_string()),
        }
    }
}
