//! Keeps our certificates in their Secret: reads them, makes them when there are none, renews them in time.
//!
//! Replicas race without harm: whoever writes first wins, the others take what is there.

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

/// Name of the Secret.
pub(super) const SECRET: &str = "kruise-manager-webhook-certs";
/// How often it is looked whether certificates are due; they are renewed months before they end.
const CHECK_INTERVAL: Duration = Duration::from_secs(3600);
const RETRY_AFTER: Duration = Duration::from_secs(30);
/// How often another replica may be faster.
const MAX_CONFLICTS: u32 = 5;

/// Names that the API server may use for us.
pub(super) fn dns_names(options: &Options) -> BTreeSet<String> {
    let service = format!("{}.{}.svc", keys::WEBHOOK_SERVICE, options.namespace);
    options
        .host
        .iter()
        .cloned()
        .chain([service, "localhost".to_owned()])
        .collect()
}

/// The certificates, made or renewed if that is due and ours to do.
pub(super) async fn ensure(cluster: &Cluster, options: &Options) -> Result<Bundle, Error> {
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
        let renewed = match &current {
            None => Bundle::generate(&names, now)?,
            Some(bundle) if bundle.is_valid_for(&names, now) => return Ok(bundle.clone()),
            Some(bundle) => bundle.renew(&names, now)?,
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
            // Another replica was faster: take what it made.
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
        // The resource version of what was read goes along, so that a change in between is a conflict.
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

/// Publishes new certificates when their Secret changes, and makes them when they are due, where that is ours to do.
/// Never ends.
pub(super) async fn run_renewal(
    cluster: &Cluster,
    options: &Options,
    bundle_tx: &watch::Sender<Bundle>,
    progress: &Progress,
) {
    let api: Api<Secret> = Api::namespaced(cluster.client.clone(), &options.namespace);
    let params = ListParams::default().fields(&format!("metadata.name={SECRET}"));
    // That it changed is enough to know; its keys are not kept.
    let (secret, watching) =
        cluster.reflector(api, params, |secret: Secret| secret.metadata.resource_version);
    let mut changes = secret.subscribe();
    let renewal = async {
        let mut wait = CHECK_INTERVAL;
        let step = progress.begin_idle(super::HEALTH_CHECK);
        loop {
            step.set_idle(Some(wait));
            // Either is a reason to look.
            let _ = tokio::time::timeout(wait, changes.recv()).await;
            step.set_activity(
                "looking after the certificates",
                write::REQUEST_TIMEOUT * 2 * (MAX_CONFLICTS + 1),
            );
            wait = match ensure(cluster, options).await {
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

/// Shows when the certificate that is served expires.
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
