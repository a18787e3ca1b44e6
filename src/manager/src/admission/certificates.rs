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
const LOOK_AGAIN: Duration = Duration::from_secs(3600);
const RETRY: Duration = Duration::from_secs(30);
/// How often another replica may be faster.
const TRIES: u32 = 5;

/// Names that the API server may use for us.
pub(super) fn names(options: &Options) -> BTreeSet<String> {
    let service = format!("{}.{}.svc", keys::WEBHOOK_SERVICE, options.namespace);
    options
        .host
        .iter()
        .cloned()
        .chain([service, "localhost".to_owned()])
        .collect()
}

/// The certificates, made or renewed if that is due and ours to do.
pub(super) async fn obtain(cluster: &Cluster, options: &Options) -> Result<Bundle, Error> {
    let api: Api<Secret> = Api::namespaced(cluster.client.clone(), &options.namespace);
    let (names, mut tries) = (names(options), 0);
    loop {
        let there = write::get(&api, SECRET).await?;
        let kept = there
            .as_ref()
            .and_then(|secret| Bundle::from_data(secret.data.as_ref()?));
        if !options.manage {
            return kept.ok_or_else(|| Error::NoCertificate {
                namespace: options.namespace.clone(),
                secret: SECRET,
            });
        }
        let now = cluster.clock.now();
        let wanted = match &kept {
            None => Bundle::make(&names, now)?,
            Some(bundle) if bundle.serves(&names, now) => return Ok(bundle.clone()),
            Some(bundle) => bundle.renew(&names, now)?,
        };
        match store(&api, there, &wanted, options).await {
            Ok(()) => {
                tracing::info!(
                    secret = SECRET,
                    names = wanted.names(),
                    expires = %wanted.until(),
                    "made certificates for webhooks"
                );
                return Ok(wanted);
            }
            // Another replica was faster: take what it made.
            Err(why) if (why.conflict() || why.already_exists()) && tries < TRIES => tries += 1,
            Err(why) => return Err(why.into()),
        }
    }
}

async fn store(
    api: &Api<Secret>,
    there: Option<Secret>,
    bundle: &Bundle,
    options: &Options,
) -> Result<(), cluster::Error> {
    let data = Some(bundle.to_data());
    if let Some(secret) = there {
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
pub(super) async fn keep(
    cluster: &Cluster,
    options: &Options,
    bundle_tx: &watch::Sender<Bundle>,
    progress: &Progress,
) {
    let api: Api<Secret> = Api::namespaced(cluster.client.clone(), &options.namespace);
    let only = ListParams::default().fields(&format!("metadata.name={SECRET}"));
    // That it changed is enough to know; its keys are not kept.
    let (secret, watching) = cluster.mirror(api, only, |secret: Secret| secret.metadata.resource_version);
    let mut changes = secret.subscribe();
    let work = async {
        let mut pause = LOOK_AGAIN;
        let step = progress.waiting(super::CHECK);
        loop {
            step.idle(Some(pause));
            // Either is a reason to look.
            let _ = tokio::time::timeout(pause, changes.recv()).await;
            step.now(
                "looking after the certificates",
                write::DEADLINE * 2 * (TRIES + 1),
            );
            pause = match obtain(cluster, options).await {
                Ok(bundle) => {
                    publish(bundle_tx, bundle);
                    LOOK_AGAIN
                }
                Err(why) => {
                    tracing::warn!(%why, "cannot renew the webhooks' certificates");
                    RETRY
                }
            };
        }
    };
    tokio::join!(watching, work);
}

/// Shows when the certificate that is served expires.
pub(super) fn show_expiration(bundle: &Bundle) {
    let gauge = &metrics().certificate_expiration;
    gauge.set(bundle.until().as_second());
}

fn publish(bundle_tx: &watch::Sender<Bundle>, bundle: Bundle) {
    show_expiration(&bundle);
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
    fn the_metric_is_when_the_serving_certificate_expires() {
        let now = jiff::Timestamp::from_second(1_800_000_000).unwrap();
        let bundle = Bundle::make(&BTreeSet::from(["name".to_owned()]), now).unwrap();
        show_expiration(&bundle);
        let shown = metrics().render();
        let line = shown
            .lines()
            .find(|line| !line.starts_with('#') && line.contains("certificate_expiration_timestamp_seconds "))
            .unwrap();
        let value: i64 = line.rsplit(' ').next().unwrap().parse().unwrap();
        assert_eq!((value - now.as_second()) / 86_400, 365);
    }
}
