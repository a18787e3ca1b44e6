//! The webhook configurations, and how the API server comes to trust and find us.
//!
//! They are made in [`kruise_api::webhooks`] and installed without `clientConfig`'s `caBundle`. The manager fills that in, in the CRDs too, whenever it is missing or old. Webhooks under our
//! configurations' names that are not ours are leftovers of another installation: they are removed,
//! because they would fail closed.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use futures::FutureExt;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::bundle::Bundle;
use super::crd::Crd;
use super::{Options, storage};
use kruise_api::json::set;
use kruise_api::webhooks::{MUTATING, VALIDATING, configurations, without_nulls};
use kruise_api::{Kind, keys};
use kruise_cluster::write::{self, Object};
use kruise_cluster::{Cluster, Key, optional_mirror};
use kruise_ops::Progress;

/// After a patch that failed.
const RETRY: std::time::Duration = std::time::Duration::from_secs(5);

/// How the API server reaches `path` of ours.
fn client_config(options: &Options, ca: &str, path: &str) -> Value {
    let ca = BASE64_STANDARD.encode(ca);
    match &options.host {
        Some(host) => {
            let host = if host.contains(':') {
                format!("[{host}]")
            } else {
                host.clone()
            };
            let url = format!("https://{host}:{}{path}", options.port);
            json!({ "url": url, "service": null, "caBundle": ca })
        }
        None => {
            let (namespace, name) = (&options.namespace, keys::WEBHOOK_SERVICE);
            let service = json!({ "namespace": namespace, "name": name, "path": path, "port": 443 });
            json!({ "service": service, "url": null, "caBundle": ca })
        }
    }
}

/// The merge patch that makes `there` (a configuration's `webhooks`) ours, if it is not.
fn plan_configuration(there: &Value, ours: &Value, options: &Options, ca: &str) -> Option<Value> {
    let there = there.as_array().map(Vec::as_slice).unwrap_or_default();
    let mut wanted = Vec::new();
    for ours in ours["webhooks"].as_array().into_iter().flatten() {
        // What is there keeps what ours says nothing of, such as selectors that somebody added.
        let mut hook = there
            .iter()
            .find(|one| one["name"] == ours["name"])
            .cloned()
            .unwrap_or_default();
        json_patch::merge(&mut hook, ours);
        let path = ours["clientConfig"]["service"]["path"]
            .as_str()
            .unwrap_or_default();
        set(
            &mut hook,
            &["clientConfig"],
            without_nulls(client_config(options, ca, path)),
        );
        wanted.push(hook);
    }
    (there != wanted).then(|| json!({ "webhooks": wanted }))
}

/// The merge patch that makes a CRD's `spec.conversion` come to us, if it does not.
fn plan_conversion(there: &Value, options: &Options, ca: &str) -> Option<Value> {
    let wanted = client_config(options, ca, keys::CONVERT_PATH);
    let good = there["strategy"] == "Webhook"
        && there["webhook"]["clientConfig"] == without_nulls(wanted.clone())
        && there["webhook"]["conversionReviewVersions"] == json!(["v1"]);
    let webhook = json!({ "clientConfig": wanted, "conversionReviewVersions": ["v1"] });
    (!good).then(|| json!({ "spec": { "conversion": { "strategy": "Webhook", "webhook": webhook } } }))
}

/// Keeps configurations and CRDs pointing at us while we lead. Ends with the process only.
pub(super) async fn keep(
    cluster: &Cluster,
    options: &Options,
    bundle: watch::Receiver<Bundle>,
    mut leading: watch::Receiver<bool>,
    progress: &Progress,
) {
    // When who would tell us is gone, the process is ending.
    while leading.wait_for(|leading| *leading).await.is_ok() {
        let lost = async { leading.wait_for(|leading| !*leading).await.is_ok() };
        tokio::select! {
            () = keep_all(cluster, options, &bundle, progress) => {}
            _ = lost => {}
        }
    }
}

/// Keeps configurations and CRDs pointing at us. Never ends.
async fn keep_all(
    cluster: &Cluster,
    options: &Options,
    bundle: &watch::Receiver<Bundle>,
    progress: &Progress,
) {
    let [mutating, validating] = configurations(&options.namespace);
    let hooks = |ours: Value| move |there: &Value, ca: &str| plan_configuration(there, &ours, options, ca);
    let conversion = |there: &Value, ca: &str| plan_conversion(there, options, ca);
    let crds = Kind::ALL.into_iter().filter(|kind| kind.row().converted);
    let crds = crds.map(async |kind| {
        let name = kind.crd_name();
        let at = "/spec/conversion";
        keep_one::<Crd>(cluster, &name, at, conversion, bundle.clone(), progress).await;
    });
    tokio::join!(
        keep_one::<MutatingWebhookConfiguration>(
            cluster,
            MUTATING,
            "/webhooks",
            hooks(mutating),
            bundle.clone(),
            progress,
        ),
        keep_one::<ValidatingWebhookConfiguration>(
            cluster,
            VALIDATING,
            "/webhooks",
            hooks(validating),
            bundle.clone(),
            progress,
        ),
        futures::future::join_all(crds),
        storage::renew(cluster),
    );
}

/// Watches the part at `pointer` of the object of that name, and patches what `plan` finds wrong.
async fn keep_one<K: Object + Send + Sync + 'static>(
    cluster: &Cluster,
    name: &str,
    pointer: &'static str,
    plan: impl Fn(&Value, &str) -> Option<Value>,
    mut bundle: watch::Receiver<Bundle>,
    progress: &Progress,
) {
    let api: Api<K> = Api::all(cluster.client.clone());
    let only = ListParams::default().fields(&format!("metadata.name={name}"));
    let (mirror, watching) = optional_mirror(api.clone(), only, move |object: K| {
        let object = serde_json::to_value(object).ok()?;
        Some(object.pointer(pointer).cloned().unwrap_or_default())
    });
    let key = Key::cluster(name);
    let work = async {
        let step = progress.waiting(super::CHECK);
        let mut changes = mirror.subscribe();
        mirror.synced().await;
        if mirror.get(&key).is_none() {
            tracing::warn!(name, kind = %K::kind(&()), "not found; apply deploy/webhooks and deploy/crds");
        }
        loop {
            let ca = bundle.borrow_and_update().ca.clone();
            let patch = mirror.get(&key).and_then(|there| plan(&there, &ca));
            step.now(format!("patching {name}"), write::DEADLINE);
            let outcome = match &patch {
                Some(patch) => write::patch_merge(&api, name, patch).await.map(drop),
                None => Ok(()),
            };
            let again = match outcome {
                Ok(()) => std::future::pending().left_future(),
                Err(why) => {
                    tracing::warn!(name, kind = %K::kind(&()), %why, "cannot point the API server at our webhooks");
                    tokio::time::sleep(RETRY).right_future()
                }
            };
            step.idle(None);
            tokio::select! {
                _ = changes.recv() => {}
                _ = bundle.changed() => {}
                () = again => {}
            }
        }
    };
    tokio::join!(watching, work);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    fn options(host: Option<&str>) -> Options {
        Options {
            serve: true,
            manage: true,
            namespace: "ns".into(),
            host: host.map(str::to_owned),
            port: 9443,
            defaults: kruise_cluster::pod_template::Defaults::default(),
            vertical: false,
            off: Vec::new(),
        }
    }

    fn merged(mut into: Value, patch: &Value) -> Value {
        json_patch::merge(&mut into, patch);
        into
    }

    /// One patch is enough, whatever was there and whichever way we are reached.
    #[test]
    fn pointing_at_us_converges() {
        for ours in configurations(keys::SYSTEM_NAMESPACE) {
            let foreign = json!({ "webhooks": [
                { "name": "mpod.kb.io", "failurePolicy": "Fail" },
                { "name": ours["webhooks"][0]["name"], "failurePolicy": "Fail", "namespaceSelector": { "matchLabels": { "a": "b" } },
                  "clientConfig": { "url": "https://old", "caBundle": "eA==" } },
            ] });
            for there in [json!({ "webhooks": [] }), ours.clone(), foreign] {
                for options in [options(None), options(Some("127.0.0.1"))] {
                    let patch =
                        plan_configuration(&there["webhooks"], &ours, &options, "ca").expect("a patch");
                    let after = merged(there.clone(), &patch);
                    assert_eq!(
                        plan_configuration(&after["webhooks"], &ours, &options, "ca"),
                        None
                    );
                    assert!(plan_configuration(&after["webhooks"], &ours, &options, "new").is_some());
                    assert!(!after.to_string().contains("mpod"), "a foreign webhook stayed");
                }
            }
        }
    }

    #[test]
    fn another_namespace_of_the_manager_gets_into_match_conditions() {
        let [ours, _] = configurations("other");
        let patch = plan_configuration(
            &configurations(keys::SYSTEM_NAMESPACE)[0]["webhooks"],
            &ours,
            &options(None),
            "ca",
        )
        .unwrap();
        let condition = &patch["webhooks"][0]["matchConditions"][0];
        let want = "request.userInfo.username != 'system:serviceaccount:other:kruise-manager'";
        assert_eq!(condition["expression"], want);
    }

    #[test]
    fn selectors_that_somebody_added_stay() {
        let [ours, _] = configurations(keys::SYSTEM_NAMESPACE);
        let mut there = ours["webhooks"].clone();
        there[0]["namespaceSelector"] = json!({ "matchLabels": { "a": "b" } });
        let patch = plan_configuration(&there, &ours, &options(None), "ca").unwrap();
        assert_eq!(
            patch["webhooks"][0]["namespaceSelector"],
            there[0]["namespaceSelector"]
        );
        assert_eq!(patch["webhooks"][0]["clientConfig"]["caBundle"], "Y2E=");
    }

    #[test]
    fn a_crd_converges_from_either_side() {
        let crd = json!({ "spec": { "conversion": { "strategy": "None" } } });
        let mut at = crd;
        for options in [options(None), options(Some("::1")), options(None)] {
            let patch = plan_conversion(&at["spec"]["conversion"], &options, "ca").expect("a patch");
            at = merged(at, &patch);
            assert_eq!(plan_conversion(&at["spec"]["conversion"], &options, "ca"), None);
        }
        let url = client_config(&options(Some("::1")), "ca", "/convert");
        assert_eq!(url["url"], "https://[::1]:9443/convert");
    }
}
