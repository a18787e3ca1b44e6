//! The API group, and its versions.

/// API group of all our kinds.
pub const GROUP: &str = "apps.kruise.io";
/// The stored version, used by both programs.
pub const V1BETA1: &str = "v1beta1";
/// The older version, served to clients that support no other.
pub const V1ALPHA1: &str = "v1alpha1";
