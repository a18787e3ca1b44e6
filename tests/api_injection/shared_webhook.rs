//! The webhook that many SidecarSets share, on a real API server.

use std::collections::BTreeMap;

use kruise_api::keys;
use kruise_api::pod_webhooks::{SetWebhook, pod_webhooks};
use kruise_api::sidecarset::SidecarSetSpec;
use serde_json::{Value, json};
use support::waits::poll_until;

use crate::cluster::InjectionCluster;

/// Sets; a hundred of them have a webhook of their own.
const SETS: usize = 400;

/// Nobody answers these webhooks, and their sets have failure policy `Fail`: a Pod is refused only if it would be sent.
#[tokio::test]
async fn pods_that_no_set_selects_are_not_sent_to_the_shared_webhook() {
    let cluster = InjectionCluster::start().await;
    let fail = BTreeMap::from([(keys::SIDECAR_SET_FAILURE_POLICY.to_owned(), "Fail".to_owned())]);
    let sets = (0..SETS).map(|number| {
        let not_in = json!({ "key": "example.com/tier", "operator": "NotIn", "values": ["a", "b"] });
        let expressions: Vec<&Value> = Some(&not_in).filter(|_| number % 2 == 1).into_iter().collect();
        let selector =
            json!({ "matchLabels": { "crowd": number.to_string() }, "matchExpressions": expressions });
        let spec = json!({ "selector": selector, "containers": [{ "name": "side", "image": "i" }] });
        let spec: SidecarSetSpec = serde_json::from_value(spec).unwrap();
        SetWebhook::new("kruise-system", &format!("s{number:03}"), Some(&fail), &spec).unwrap()
    });
    let sets: Vec<SetWebhook> = sets.collect();
    let configuration = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": { "name": "pods" },
        "webhooks": pod_webhooks("kruise-system", &sets, Vec::new()),
    });
    cluster.plane.apply(&configuration.to_string()).unwrap();

    let pod = |labels: Value| json!({ "metadata": { "name": "p", "labels": labels }, "spec": { "containers": [{ "name": "a", "image": "i" }] } });
    let last = (SETS - 1).to_string();
    let refused = async || {
        let why = cluster.create_pod(&pod(json!({ "crowd": last }))).await.err()?;
        why.contains("others.fail.mpod.kb.io").then_some(())
    };
    poll_until("a Pod that a set selects is sent", &String::new, refused).await;
    for labels in [
        json!({}),
        json!({ "crowd": "none" }),
        json!({ "crowd": last, "example.com/tier": "a" }),
    ] {
        let created = cluster.create_pod(&pod(labels.clone())).await;
        assert!(created.is_ok(), "{labels}: {created:?}");
    }
}
