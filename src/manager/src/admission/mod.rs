//! Admission and conversion: validates and defaults objects before they are stored.
//!
//! In:  reviews from the API server over HTTPS, the Pods and Nodes that they name, our certificates' Secret.
//! Out: answers; the certificates (created, renewed), and the `caBundle` of our webhooks and CRDs.
//! Every decision is a pure `decide`, one file per kind; what CEL can check is in the CRDs, not here.

mod body_limits;
mod bundle;
mod certificates;
mod cloneset;
mod connections;
mod container_recreate_request;
mod crd;
mod deletion;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod image_pull_job;
mod lookups;
#[cfg(test)]
mod malformed;
mod node_image;
mod pod;
mod previous_fields;
mod review;
mod reviews_json;
mod router;
mod server;
mod sidecar_set;
mod storage_migration;
mod webhooks;
mod write_timeout;

use std::time::Duration;

use futures::future::OptionFuture;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use kruise_api::Kind;
use kruise_api::backoff::Backoff;
use kruise_cluster::{self as cluster, Cluster};
use kruise_ops::{FeatureGate, FeatureGates, Health, http};

/// Name of our health check.
const HEALTH_CHECK: &str = "admission";

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

/// The feature gate that disables a kind.
fn disabling_gate(kind: Kind, gates: &FeatureGates) -> Option<FeatureGate> {
    let required = match kind {
        // Objects of the last three are not reviewed.
        Kind::CloneSet
        | Kind::SidecarSet
        | Kind::ContainerRecreateJob
        | Kind::NodePodProbe
        | Kind::PodProbeMarker => return None,
        Kind::NodeImage | Kind::ContainerRecreateRequest => FeatureGate::KruiseDaemon,
        Kind::ImagePullJob | Kind::ImageListPullJob => FeatureGate::ImagePullJobGate,
    };
    (!gates.enabled(required)).then_some(required)
}

/// Default of `WEBHOOK_PORT`.
pub const DEFAULT_PORT: u16 = 9876;

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

/// Serves reviews and manages certificates, as `options` require, until shutdown. Every replica serves, and the first
/// one creates or renews the certificates. Only the replica that is `leading` registers the webhooks, because replicas
/// may have different hosts; it uses `leader_cluster`, which writes nothing once another replica may hold the Lease.
///
/// # Errors
/// When the port cannot be opened. All other failures are retried and reported in the health check.
pub async fn run(
    cluster: Cluster,
    leader_cluster: Cluster,
    options: Options,
    leading: watch::Receiver<bool>,
    health: Health,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    health.set_not_ready(HEALTH_CHECK, "no certificate yet");
    let listener = match options.serve {
        true => Some(server::listen(options.port).await?),
        false => None,
    };
    let Some(first) = shutdown
        .run_until_cancelled(Box::pin(wait_for_bundle(&cluster, &options, &health)))
        .await
    else {
        return Ok(());
    };
    certificates::set_expiration_metric(&first);
    let (bundle_tx, bundle_rx) = watch::channel(first);
    health.set_ready(
        HEALTH_CHECK,
        match options.serve {
            true => format!("serves on port {}", options.port),
            false => "there are certificates".to_owned(),
        },
    );
    let serving = listener.map(|listener| {
        let (lookups, watching) = lookups::Lookups::new(&cluster, &options);
        let router = router::router(lookups, &options);
        let served = server::serve(
            listener,
            router,
            bundle_rx.clone(),
            cluster.clock.clone(),
            &shutdown,
        );
        // The lookups work until the last review is answered.
        Box::pin(async {
            tokio::select! {
                () = served => {}
                () = watching => {}
            }
        })
    });
    let managing = options.manage.then(|| {
        Box::pin(webhooks::run_registration(
            &leader_cluster,
            &options,
            bundle_rx.clone(),
            leading,
            &health.progress,
        ))
    });
    let work = async {
        tokio::join!(
            Box::pin(certificates::run_renewal(
                &cluster,
                &options,
                &bundle_tx,
                &health.progress
            )),
            OptionFuture::from(managing),
        )
    };
    tokio::join!(shutdown.run_until_cancelled(work), OptionFuture::from(serving));
    Ok(())
}

/// Waits until the certificates can be read or created.
async fn wait_for_bundle(cluster: &Cluster, options: &Options, health: &Health) -> bundle::Bundle {
    const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
    let mut failures = 0_u32;
    loop {
        match certificates::ensure(cluster, options, None).await {
            Ok(bundle) => return bundle,
            Err(why) => {
                tracing::warn!(%why, "webhooks cannot be served yet");
                health.set_not_ready(HEALTH_CHECK, why.to_string());
            }
        }
        tokio::time::sleep(RETRY.delay(failures)).await;
        failures = failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn feature_gates_disable_kinds() {
        let disabled = |gates: &str| {
            let gates = FeatureGates::parse(gates).unwrap();
            let kinds = Kind::ALL.into_iter();
            kinds
                .filter_map(|kind| Some((kind, disabling_gate(kind, &gates)?)))
                .collect::<Vec<_>>()
        };
        let jobs = [Kind::ImagePullJob, Kind::ImageListPullJob];
        let [job, list] = jobs.map(|kind| (kind, FeatureGate::ImagePullJobGate));
        assert_eq!(disabled(""), []);
        assert_eq!(disabled("ImagePullJobGate=false"), [job, list]);
        let daemon = |kind| (kind, FeatureGate::KruiseDaemon);
        let without_daemon = [
            daemon(Kind::NodeImage),
            job,
            list,
            daemon(Kind::ContainerRecreateRequest),
        ];
        assert_eq!(disabled("KruiseDaemon=false"), without_daemon);
    }
}
