//! What these programs were built from.

/// The version of these programs.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The commit that they were built from, or `unknown`.
pub const COMMIT: &str = env!("KRUISE_COMMIT");
/// Both, as `--version` shows them.
pub const VERSION_AND_COMMIT: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("KRUISE_COMMIT"), ")");
