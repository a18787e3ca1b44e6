//! Why there is no revision for a template.

use kruise_cluster::Error;

/// Why there is no revision for the template.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// There will be none until somebody changes something.
    #[error("{0}")]
    Mistake(String),
    /// There was no answer, or no revision may be made.
    #[error(transparent)]
    Failed(#[from] Error),
}

impl Unfit {
    /// The word used as metric label.
    pub fn category(&self) -> &'static str {
        match self {
            Self::Mistake(_) => "mistake",
            Self::Failed(error) => error.category(),
        }
    }
}
