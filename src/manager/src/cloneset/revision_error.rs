//! Why there is no revision for a template.

use kruise_cluster::Error;

/// Why there is no revision for the template.
#[derive(Debug, thiserror::Error)]
pub enum RevisionError {
    /// There will be none until somebody changes something.
    #[error("{0}")]
    InvalidTemplate(String),
    /// There was no answer, or no revision may be made.
    #[error(transparent)]
    Api(#[from] Error),
}

impl RevisionError {
    /// The word used as metric label.
    pub fn category(&self) -> &'static str {
        match self {
            Self::InvalidTemplate(_) => "mistake",
            Self::Api(error) => error.category(),
        }
    }
}
