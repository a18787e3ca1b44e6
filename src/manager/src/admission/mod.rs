//! Admission and conversion: what is checked and filled in before an object is stored.
//!
//! In:  reviews from the API server over HTTPS, the Pods and Nodes they speak of, our certificates' Secret.
//! Out: answers; the certificates (made, renewed), and the `caBundle` of our webhooks and CRDs.
//! Every decision is a pure `decide`, one file per kind; what CEL can say is not here but in the CRDs.

mod bundle;
mod certificates;
mod cloneset;
mod connections;
mod container_recreate_request;
mod crd;
mod deletion;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
#[cfg(test)]
mod hostile;
mod image_pull_job;
mod known_fields;
mod look;
mod node_image;
mod review;
mod room;
mod router;
mod sending;
mod server;
mod storage;
mod webhooks;
mod wire;

use std::time::Duration;

use futures::future::OptionFuture;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use kruise_api::Kind;
use kruise_api::backoff::Backoff;
use kruise_cluster::pod_template::Defaults;
use kruise_cluster::{self as cluster, Cluster};
use kruise_ops::{Gate, Gates, Health, http};

/// Name of our check in the process's health.
const CHECK: &str = "admission";

/// What is done about webhooks, and where they are served.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether reviews are answered.
    pub serve: bool,
    /// Whether certificates are made, and the API server is pointed at the webhooks while leading. Who only serves
    /// reads the certificates and writes nothing.
    pub manage: bool,
    /// Namespace of the program, with its Service and the certificates' Secret.
    pub namespace: String,
    /// Host name or address that the API server reaches us at directly (`WEBHOOK_HOST`), instead of
    /// through the Service.
    pub host: Option<String>,
    /// Port to listen on (`WEBHOOK_PORT`), 1 to 65535.
    pub port: u16,
    /// Which defaults CloneSets' templates are stored with.
    pub defaults: Defaults,
    /// Whether CloneSets resize CPU and memory of their Pods in place (gate `InPlaceWorkloadVerticalScaling`).
    pub vertical: bool,
    /// Kinds that are switched off, and the feature gate that does it.
    pub off: Vec<(Kind, Gate)>,
}

/// The kinds that are switched off, and the feature gate that does it.
#[must_use]
pub fn switched_off(gates: &Gates) -> Vec<(Kind, Gate)> {
    let needs = |kind| match kind {
        Kind::CloneSet => None,
        Kind::NodeImage | Kind::ContainerRecreateRequest => Some(Gate::KruiseDaemon),
        Kind::ImagePullJob => Some(Gate::ImagePullJobGate),
    };
    let kinds = Kind::ALL.into_iter();
    let needs = kinds.filter_map(|kind| Some((kind, needs(kind)?)));
    needs.filter(|(_, gate)| !gates.on(*gate)).collect()
}

/// Port that is listened on when nothing else is said.
pub const DEFAULT_PORT: u16 = 9876;

/// Why admission ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The port cannot be had.
    #[error("webhooks: {0}")]
    Listen(#[from] http::Error),
    /// The API server did not do what was asked.
    #[error("admission: {0}")]
    Cluster(#[from] cluster::Error),
    /// Certificates could not be made.
    #[error("cannot make certificates for webhooks: {0}")]
    Certificate(String),
    /// Who makes certificates has not made them yet.
    #[error("Secret {namespace}/{secret} has no certificates yet; kruise-manager makes them")]
    NoCertificate {
        /// Namespace of the Secret.
        namespace: String,
        /// Its name.
        secret: &'static str,
    },
}

impl Error {
    /// Whether the same call may succeed later without anyone changing anything.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Cluster(why) if why.retryable())
    }

    /// The word used as metric label.
    pub fn category(&self) -> &'static str {
        match self {
            Self::Listen(_) => "listen",
            Self::Cluster(why) => why.category(),
            Self::Certificate(_) | Self::NoCertificate { .. } => "certificate",
        }
    }
}

/// Serves and manages, as `options` say, until shutdown. Every replica serves; whichever is first makes each
/// certificate, and only the one that is `leading` points the API server at the webhooks, for replicas may have different
/// hosts; it does so as `leader`, who writes nothing once the Lease may be another's.
///
/// # Errors
/// When the port cannot be had. All else is tried again, and told in the process's health.
pub async fn run(
    cluster: Cluster,
    leader: Cluster,
    options: Options,
    leading: watch::Receiver<bool>,
    health: Health,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    health.unready(CHECK, "no certificate yet");
    let listener = match options.serve {
        true => Some(server::listen(options.port).await?),
        false => None,
    };
    let Some(first) = shutdown
        .run_until_cancelled(Box::pin(first_bundle(&cluster, &options, &health)))
        .await
    else {
        return Ok(());
    };
    certificates::show_expiration(&first);
    let (bundle_tx, bundle_rx) = watch::channel(first);
    health.ready(
        CHECK,
        match options.serve {
            true => format!("serves on port {}", options.port),
            false => "there are certificates".to_owned(),
        },
    );
    let serving = listener.map(|listener| {
        let (look, looking) = look::Look::new(&cluster, &options);
        let router = router::router(look, &options);
        let served = server::serve(listener, router, bundle_rx.clone(), &shutdown);
        // What is asked of the API server for a review is asked to the last of them.
        Box::pin(async {
            tokio::select! {
                () = served => {}
                () = looking => {}
            }
        })
    });
    let managing = options.manage.then(|| {
        Box::pin(webhooks::keep(
            &leader,
            &options,
            bundle_rx.clone(),
            leading,
            &health.progress,
        ))
    });
    let work = async {
        tokio::join!(
            Box::pin(certificates::keep(
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

/// The certificates, as soon as the API server lets us have them.
async fn first_bundle(cluster: &Cluster, options: &Options, health: &Health) -> bundle::Bundle {
    const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
    let mut failures = 0_u32;
    loop {
        match certificates::obtain(cluster, options).await {
            Ok(bundle) => return bundle,
            Err(why) => {
                tracing::warn!(%why, "webhooks cannot be served yet");
                health.unready(CHECK, why.to_string());
            }
        }
        tokio::time::sleep(RETRY.pause(failures)).await;
        failures = failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn feature_gates_switch_kinds_off() {
        let off = |gates: &str| switched_off(&Gates::read(gates).unwrap());
        let job = (Kind::ImagePullJob, Gate::ImagePullJobGate);
        assert_eq!(off(""), []);
        assert_eq!(off("ImagePullJobGate=false"), [job]);
        let daemon = |kind| (kind, Gate::KruiseDaemon);
        let without_daemon = [
            daemon(Kind::NodeImage),
            job,
            daemon(Kind::ContainerRecreateRequest),
        ];
        assert_eq!(off("KruiseDaemon=false"), without_daemon);
    }
}
