//! Why admission failed.

use kruise_cluster as cluster;
use kruise_ops::http;

/// Why admission failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The port cannot be opened.
    #[error("webhooks: {0}")]
    Listen(#[from] http::Error),
    /// A request to the API server failed.
    #[error("admission: {0}")]
    Cluster(#[from] cluster::Error),
    /// Certificates could not be created.
    #[error("cannot make certificates for webhooks: {0}")]
    Certificate(String),
    /// The process that creates certificates has not created them yet.
    #[error("Secret {namespace}/{secret} has no certificates yet; kruise-manager makes them")]
    NoCertificate {
        /// Namespace of the Secret.
        namespace: String,
        /// Name of the Secret.
        secret: &'static str,
    },
}

impl Error {
    /// Whether the same call may succeed later without any change.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Cluster(why) if why.retryable())
    }

    /// The value of the metric label.
    pub fn category(&self) -> &'static str {
        match self {
            Self::Listen(_) => "listen",
            Self::Cluster(why) => why.category(),
            Self::Certificate(_) | Self::NoCertificate { .. } => "certificate",
        }
    }
}
