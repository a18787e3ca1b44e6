//! Two replicas of the webhook server, one set of certificates.

use kruise_api::webhooks;
use testbed::cluster::{ControlPlane, wait};

use crate::webhook_cluster::{WAIT_TIMEOUT, WebhookReplica, install, wait_for_webhooks};

fn crd_field(plane: &ControlPlane, path: &str) -> String {
    let path = format!("--output=jsonpath={path}");
    plane
        .kubectl(&["get", "crd", "nodeimages.apps.kruise.io", &path])
        .unwrap()
}

const URL_PATH: &str = "{.spec.conversion.webhook.clientConfig.url}";
const CA_BUNDLE_PATH: &str = "{.spec.conversion.webhook.clientConfig.caBundle}";

/// The API server calls only the leader, whose feature gates count; when it stops, the next leader takes over with the
/// same authority; lost certificates are created again without manual steps.
#[test]
fn webhook_replica_takes_over_and_certificates_are_renewed() {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "default");
    let (first, second) = (
        WebhookReplica::start(&plane),
        WebhookReplica::start_with(&plane, "ImagePullJobGate=false"),
    );
    let example = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/examples/imagepulljob.yaml"
    );
    let job = ["create", "--dry-run=server", "-f", example];
    first.leading_tx.send(true).unwrap();
    wait_for_webhooks(&plane);
    assert!(crd_field(&plane, URL_PATH).contains(&format!(":{}/", first.port)));
    let ca_bundle = crd_field(&plane, CA_BUNDLE_PATH);
    plane.kubectl(&job).unwrap();

    first.shutdown.cancel();
    second.leading_tx.send(true).unwrap();
    wait::until("the second replica is pointed at", WAIT_TIMEOUT, || {
        Ok(crd_field(&plane, URL_PATH)
            .contains(&format!(":{}/", second.port))
            .then_some(()))
    })
    .unwrap();
    wait_for_webhooks(&plane);
    assert_eq!(crd_field(&plane, CA_BUNDLE_PATH), ca_bundle);
    let refused = plane.kubectl(&job).unwrap_err().to_string();
    assert!(
        refused.contains("feature gate ImagePullJobGate of kruise-manager is off"),
        "{refused}"
    );

    let certificates = "secret/kruise-manager-webhook-certs";
    plane
        .kubectl(&["delete", "--namespace=kruise-system", certificates])
        .unwrap();
    wait::until("another authority is announced", WAIT_TIMEOUT, || {
        Ok((crd_field(&plane, CA_BUNDLE_PATH) != ca_bundle).then_some(()))
    })
    .unwrap();
    wait_for_webhooks(&plane);
    let path = "--output=jsonpath={.metadata.generation}";
    let generation = plane
        .kubectl(&["get", "mutatingwebhookconfiguration", webhooks::MUTATING, path])
        .unwrap();
    assert!(
        generation.parse::<u32>().unwrap() < 10,
        "written {generation} times: what is stored is not what is wanted"
    );
    second.shutdown.cancel();
}

/// A removed authority is restored, and a webhook that another installation left under our name is deleted.
#[test]
fn webhook_client_configs_are_restored() {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "default");
    let replica = WebhookReplica::start(&plane);
    replica.leading_tx.send(true).unwrap();
    wait_for_webhooks(&plane);
    let crd = "nodeimages.apps.kruise.io";
    let ca_bundle = |kind: &str, name: &str, path: &str| {
        plane.kubectl(&["get", kind, name, &format!("--output=jsonpath={path}")])
    };
    let crd_path = "{.spec.conversion.webhook.clientConfig.caBundle}";
    let webhook_path = "{.webhooks[0].clientConfig.caBundle}";
    let ca_before = ca_bundle("crd", crd, crd_path).unwrap();
    assert!(!ca_before.is_empty());
    assert_eq!(
        ca_bundle("mutatingwebhookconfiguration", webhooks::MUTATING, webhook_path).unwrap(),
        ca_before
    );

    let clear = r#"[{"op":"remove","path":"/spec/conversion/webhook/clientConfig/caBundle"}]"#;
    plane
        .kubectl(&["patch", "crd", crd, "--type=json", "--patch", clear])
        .unwrap();
    let add_foreign = r#"[{"op":"add","path":"/webhooks/-","value":{"name":"mpod.kb.io","sideEffects":"None",
        "admissionReviewVersions":["v1"],"failurePolicy":"Ignore","clientConfig":{"url":"https://127.0.0.1:1/x"}}}]"#;
    let hook = webhooks::MUTATING;
    plane
        .kubectl(&[
            "patch",
            "mutatingwebhookconfiguration",
            hook,
            "--type=json",
            "--patch",
            add_foreign,
        ])
        .unwrap();
    wait::until(
        "the authority comes back and the foreign webhook goes",
        WAIT_TIMEOUT,
        || {
            let names = ca_bundle("mutatingwebhookconfiguration", hook, "{.webhooks[*].name}")?;
            let restored = ca_bundle("crd", crd, crd_path)? == ca_before;
            Ok((restored && !names.split(' ').any(|name| name == "mpod.kb.io")).then_some(()))
        },
    )
    .unwrap();
    replica.shutdown.cancel();
}
