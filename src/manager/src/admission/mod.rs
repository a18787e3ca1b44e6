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
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod image_pull_job;
mod lookups;
#[cfg(test)]
mod malformed;
mod node_image;
mod options;
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

pub use error::Error;
use kruise_api::backoff::Backoff;
use kruise_cluster::Cluster;
use kruise_ops::Health;
use options::HEALTH_CHECK;
pub use options::{DEFAULT_PORT, Options};

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
