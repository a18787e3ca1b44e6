//! Keeps the webhook certificates in their Secret: reads, creates and renews them.
//!
//! Replicas may race: the first write wins, and the others use its result.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ListParams, ObjectMeta};
use tokio::sync::watch;

use super::bundle::Bundle;
use super::{Error, Options};
use kruise_api::keys;
use kruise_cluster::{self as cluster, Cluster, write};
use kruise_ops::Progress;
use kruise_ops::metrics::metrics;

pub(super) const SECRET: &str = "kruise-manager-webhook-certs";
/// How often the validity is checked. Certificates are renewed months before they expire, but a clock that was wrong when
/// they were made may be corrected.
const CHECK_INTERVAL: Duration = Duration::from_secs(300);
const RETRY_AFTER: Duration = Duration::from_secs(30);
/// How often a write may conflict with that of another replica.
const MAX_CONFLICTS: u32 = 5;

/// DNS names that the API server may use for us.
pub(super) fn dns_names(options: &Options) -> BTreeSet<String> {
    let service = format!("{}.{}.svc", keys::WEBHOOK_SERVICE, options.namespace);
    options
        .host
        .iter()
        .cloned()
        .chain([service, "localhost".to_owned()])
        .collect()
}

/// The certificates; created or renewed if that is due and `manage` is set. If the Secret was deleted or damaged, they are
/// renewed from `known`, whose CA clients still trust.
pub(super) async fn ensure(
    cluster: &Cluster,
    options: &Options,
    known: Option<&Bundle>,
) -> Result<Bundle, Error> {
    let api: Api<Secret> = Api::namespaced(cluster.client.clone(), &options.namespace);
    let (names, mut conflicts) = (dns_names(options), 0);
    loop {
        let existing = write::get(&api, SECRET).await?;
        let current = existing
            .as_ref()
            .and_then(|secret| Bundle::parse_data(secret.data.as_ref()?));
        if !options.manage {
            return current.ok_or_else(|| Error::NoCertificate {
                namespace: options.namespace.clone(),
                secret: SECRET,
            });
        }
        let now = cluster.clock.now();
        let renewed = match (&current, known) {
            (None, None) => Bundle::generate(&names, now)?,
            (Some(bundle), _) if bundle.is_valid_for(&names, now) => return Ok(bundle.clone()),
            (Some(bundle), _) | (None, Some(bundle)) => bundle.renew(&names, now)?,
        };
        match write_secret(&api, existing, &renewed, options).await {
            Ok(()) => {
                tracing::info!(
                    secret = SECRET,
                    names = renewed.names(),
                    expires = %renewed.expires(),
                    "made certificates for webhooks"
                );
                return Ok(renewed);
            }
            // Another replica was faster: read its certificates.
            Err(why) if (why.conflict() || why.already_exists()) && conflicts < MAX_CONFLICTS => {
                conflicts += 1
            }
            Err(why) => return Err(why.into()),
        }
    }
}

async fn write_secret(
    api: &Api<Secret>,
    existing: Option<Secret>,
    bundle: &Bundle,
    options: &Options,
) -> Result<(), cluster::Error> {
    let data = Some(bundle.to_data());
    if let Some(secret) = existing {
        // The resource version of the read is sent too, so that a change in between is a conflict.
        return write::replace(api, &Secret { data, ..secret }).await.map(drop);
    }
    let metadata = ObjectMeta {
        name: Some(SECRET.to_owned()),
        namespace: Some(options.namespace.clone()),
        ..ObjectMeta::default()
    };
    let secret = Secret {
        metadata,
        data,
        type_: Some("Opaque".to_owned()),
        ..Secret::default()
    };
    write::create(api, &secret).await.map(drop)
}

/// Publishes new certificates when their Secret changes, and renews them when they are due and `manage` is set. Never
/// returns.
pub(super) async fn run_renewal(
    cluster: &Cluster,
    options: &Options,
    bundle_tx: &watch::Sender<Bundle>,
    progress: &Progress,
) {
    let api: Api<Secret> = Api::namespaced(cluster.client.clone(), &options.namespace);
    let params = ListParams::default().fields(&format!("metadata.name={SECRET}"));
    // Only the change matters; the keys are not kept.
    let (secret, watching) =
        cluster.reflector(api, params, |secret: Secret| secret.metadata.resource_version);
    let mut changes = secret.subscribe();
    let renewal = async {
        let mut wait = CHECK_INTERVAL;
        let step = progress.begin_idle(super::HEALTH_CHECK);
        loop {
            step.set_idle(Some(wait));
            // Check after either of them.
            let _ = tokio::time::timeout(wait, changes.recv()).await;
            step.set_activity(
                "checking the certificates",
                write::REQUEST_TIMEOUT * 2 * (MAX_CONFLICTS + 1),
            );
            let known = bundle_tx.borrow().clone();
            wait = match ensure(cluster, options, Some(&known)).await {
                Ok(bundle) => {
                    publish(bundle_tx, bundle);
                    CHECK_INTERVAL
                }
                Err(why) => {
                    tracing::warn!(%why, "cannot renew the webhooks' certificates");
                    RETRY_AFTER
                }
            };
        }
    };
    tokio::join!(watching, renewal);
}

/// Metric of the expiry of the newest certificate.
pub(super) fn set_expiration_metric(bundle: &Bundle) {
    let gauge = &metrics().certificate_expiration;
    gauge.set(bundle.expires().as_second());
}

fn publish(bundle_tx: &watch::Sender<Bundle>, bundle: Bundle) {
    set_expiration_metric(&bundle);
    bundle_tx.send_if_modified(|current| {
        let changed = *current != bundle;
        *current = bundle;
        changed
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn expiration_metric_is_the_not_after_time() {
        let now = jiff::Timestamp::from_second(1_800_000_000).unwrap();
        let bundle = Bundle::generate(&BTreeSet::from(["name".to_owned()]), now).unwrap();
        set_expiration_metric(&bundle);
        let shown = metrics().render();
        let line = shown
            .lines()
            .find(|line| !line.starts_with('#') && line.contains("certificate_expiration_timestamp_seconds "))
            .unwrap();
        let value: i64 = line.rsplit(' ').next().unwrap().parse().unwrap();
        assert_eq!((value - now.as_second()) / 86_400, 365);
    }
}
