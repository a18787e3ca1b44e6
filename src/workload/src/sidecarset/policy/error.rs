//! What policies cannot do.

/// Why a set has no policy: it needs the webhook.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {why}")]
pub struct Unsupported {
    /// Path of the field, as `spec.containers[0].args`.
    pub field: String,
    /// What a policy cannot do, or what is wrong.
    pub why: String,
}

impl Unsupported {
    pub(super) fn new(field: &str, why: impl std::fmt::Display) -> Self {
        Self {
            field: field.to_owned(),
            why: why.to_string(),
        }
    }
}
