//! Why a template has no revision.

use kruise_cluster::Error;

#[derive(Debug, thiserror::Error)]
pub enum RevisionError {
    /// No revision is possible until a user changes something.
    #[error("{0}")]
    InvalidTemplate(String),
    /// No answer, or no revision may be created.
    #[error(transparent)]
    Api(#[from] Error),
}

impl RevisionError {
    /// Value of the metric label.
    pub fn category(&self) -> &'static str {
        match self {
            Self::InvalidTemplate(_) => "mistake",
            Self::Api(error) => error.category(),
        }
    }
}
