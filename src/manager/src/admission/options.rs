//! Options of the webhooks and their server.

use kruise_ops::FeatureGates;

/// Name of our health check.
pub(super) const HEALTH_CHECK: &str = "admission";

/// Default of `WEBHOOK_PORT`.
pub const DEFAULT_PORT: u16 = 9876;

/// Options of the webhooks and their server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether this process serves reviews.
    pub serve: bool,
    /// Whether this process creates certificates and, as the leader, registers the webhooks. A process that only serves
    /// reads the certificates and writes nothing.
    pub manage: bool,
    /// Namespace of the program, with its Service and the certificates' Secret.
    pub namespace: String,
    /// Host name or IP address at which the API server reaches us directly (`WEBHOOK_HOST`), instead of through the
    /// Service.
    pub host: Option<String>,
    /// Port to listen on (`WEBHOOK_PORT`), 1 to 65535.
    pub port: u16,
    /// Gates of all kinds and webhooks.
    pub gates: FeatureGates,
}
