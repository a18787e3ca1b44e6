//! Two replicas of the webhook server, one set of certificates.

use kruise_api::webhooks;
use testbed::cluster::{ControlPlane, wait};

use crate::world::{PATIENCE, Replica, install, webhooks_answer};

fn read(plane: &ControlPlane, path: &str) -> String {
    let path = format!("--output=jsonpath={path}");
    plane
        .kubectl(&["get", "crd", "nodeimages.apps.kruise.io", &path])
        .unwrap()
}

const URL: &str = "{.spec.conversion.webhook.clientConfig.url}";
const AUTHORITY: &str = "{.spec.conversion.webhook.clientConfig.caBundle}";

/// Only the leader is pointed at, and its feature gates count; when it goes the next takes over with the same authority; and when the
/// certificates are lost there are new ones, without anyone's help.
#[test]
fn replicas_take_over_and_certificates_come_back() {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "default");
    let (first, second) = (
        Replica::start(&plane),
        Replica::start_with(&plane, "ImagePullJobGate=false"),
    );
    let example = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/examples/imagepulljob.yaml"
    );
    let job = ["create", "--dry-run=server", "-f", example];
    first.leading.send(true).unwrap();
    webhooks_answer(&plane);
    assert!(read(&plane, URL).contains(&format!(":{}/", first.port)));
    let authority = read(&plane, AUTHORITY);
    plane.kubectl(&job).unwrap();

    first.shutdown.cancel();
    second.leading.send(true).unwrap();
    wait::until("the second replica is pointed at", PATIENCE, || {
        Ok(read(&plane, URL)
            .contains(&format!(":{}/", second.port))
            .then_some(()))
    })
    .unwrap();
    webhooks_answer(&plane);
    assert_eq!(read(&plane, AUTHORITY), authority);
    let refused = plane.kubectl(&job).unwrap_err().to_string();
    assert!(
        refused.contains("feature gate ImagePullJobGate of kruise-manager is off"),
        "{refused}"
    );

    let certificates = "secret/kruise-manager-webhook-certs";
    plane
        .kubectl(&["delete", "--namespace=kruise-system", certificates])
        .unwrap();
    wait::until("another authority is announced", PATIENCE, || {
        Ok((read(&plane, AUTHORITY) != authority).then_some(()))
    })
    .unwrap();
    webhooks_answer(&plane);
    let path = "--output=jsonpath={.metadata.generation}";
    let written = plane
        .kubectl(&["get", "mutatingwebhookconfiguration", webhooks::MUTATING, path])
        .unwrap();
    assert!(
        written.parse::<u32>().unwrap() < 10,
        "written {written} times: what is stored is not what is wanted"
    );
    second.shutdown.cancel();
}

/// Where the authority is lost it comes back, and a webhook that another installation left under our name goes.
#[test]
fn the_api_server_is_kept_pointed_at_us() {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "default");
    let replica = Replica::start(&plane);
    replica.leading.send(true).unwrap();
    webhooks_answer(&plane);
    let crd = "nodeimages.apps.kruise.io";
    let authority = |kind: &str, name: &str, path: &str| {
        plane.kubectl(&["get", kind, name, &format!("--output=jsonpath={path}")])
    };
    let of_crd = "{.spec.conversion.webhook.clientConfig.caBundle}";
    let of_hook = "{.webhooks[0].clientConfig.caBundle}";
    let known = authority("crd", crd, of_crd).unwrap();
    assert!(!known.is_empty());
    assert_eq!(
        authority("mutatingwebhookconfiguration", webhooks::MUTATING, of_hook).unwrap(),
        known
    );

    let clear = r#"[{"op":"remove","path":"/spec/conversion/webhook/clientConfig/caBundle"}]"#;
    plane
        .kubectl(&["patch", "crd", crd, "--type=json", "--patch", clear])
        .unwrap();
    let foreign = r#"[{"op":"add","path":"/webhooks/-","value":{"name":"mpod.kb.io","sideEffects":"None",
        "admissionReviewVersions":["v1"],"failurePolicy":"Ignore","clientConfig":{"url":"https://127.0.0.1:1/x"}}}]"#;
    let hook = webhooks::MUTATING;
    plane
        .kubectl(&[
            "patch",
            "mutatingwebhookconfiguration",
            hook,
            "--type=json",
            "--patch",
            foreign,
        ])
        .unwrap();
    wait::until(
        "the authority comes back and the foreign webhook goes",
        PATIENCE,
        || {
            let names = authority("mutatingwebhookconfiguration", hook, "{.webhooks[*].name}")?;
            let back = authority("crd", crd, of_crd)? == known;
            Ok((back && !names.contains("mpod")).then_some(()))
        },
    )
    .unwrap();
    replica.shutdown.cancel();
}
