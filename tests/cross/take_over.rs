//! Ours in the place of a Go implementation that is installed and runs, and back; the steps are those of
//! `deploy/README.md`.

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::coordination::v1::Lease;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::keys::SYSTEM_NAMESPACE;
use kruise_api::node_image::{ImageTagStatus, NodeImage};
use kruise_api::webhooks::{MUTATING, VALIDATING, configurations};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use testbed::cluster::{Component, ControlPlane, NODE_NAME, wait};

use crate::bed::{Bed, PATIENCE, create};
use crate::manager::Manager;
use crate::{halves, rollout, work};

async fn holder(bed: &Bed) -> String {
    let leases: Api<Lease> = Api::namespaced(bed.client.clone(), "kruise-system");
    let lease = leases.get("kruise-manager").await.unwrap();
    lease.spec.unwrap().holder_identity.unwrap_or_default()
}

/// The finished pull of busybox, which nobody is to repeat.
async fn finished(bed: &Bed) -> ImageTagStatus {
    let images: Api<NodeImage> = Api::all(bed.client.clone());
    let image = images.get(NODE_NAME).await.unwrap();
    image.status.unwrap().image_statuses["busybox"].tags[0].clone()
}

/// A job that works on nothing, until it is let.
async fn paused(bed: &Bed, name: &str) {
    let spec = json!({ "image": format!("cross/{name}:1"), "parallelism": 0, "selector": { "names": [NODE_NAME] },
        "completionPolicy": { "type": "Always" } });
    let jobs = bed.api::<ImagePullJob>();
    create(&jobs, json!({ "metadata": { "name": name }, "spec": spec })).await;
    bed.until(jobs, name, "seen by a manager", |j| {
        j.status.as_ref().is_some_and(|s| s.desired == 1)
    })
    .await;
}

async fn goes_on(bed: &Bed, name: &str) {
    let image = testbed::cluster::Image::scratch().cmd(["none"]);
    bed.node
        .runtime
        .registry
        .push(&format!("cross/{name}:1"), &image)
        .unwrap();
    let jobs = bed.api::<ImagePullJob>();
    let patch = Patch::Merge(json!({ "spec": { "parallelism": 1 } }));
    jobs.patch(name, &PatchParams::default(), &patch).await.unwrap();
    bed.until(jobs, name, "succeeded", |j| {
        j.status.as_ref().is_some_and(|s| s.succeeded == 1)
    })
    .await;
}

/// Whether exactly the webhooks that ours has are installed.
async fn only_our_webhooks(bed: &Bed) {
    let [mutating, validating] = configurations(SYSTEM_NAMESPACE);
    let names = |of: &serde_json::Value| -> Vec<String> {
        let all = of["webhooks"].as_array().unwrap();
        all.iter()
            .map(|w| w["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let (mutating, validating) = (names(&mutating), names(&validating));
    let found: Api<MutatingWebhookConfiguration> = Api::all(bed.client.clone());
    bed.until(found, MUTATING, "only ours", |c| {
        let all = c.webhooks.iter().flatten();
        all.map(|w| w.name.clone()).collect::<Vec<_>>() == mutating
    })
    .await;
    let found: Api<ValidatingWebhookConfiguration> = Api::all(bed.client.clone());
    bed.until(found, VALIDATING, "only ours", |c| {
        let all = c.webhooks.iter().flatten();
        all.map(|w| w.name.clone()).collect::<Vec<_>>() == validating
    })
    .await;
}

/// The Go manager wrote its URL into its other CRDs too, because it runs on the host here; its manifests cannot be
/// applied over that.
pub fn services_instead_of_urls(plane: &ControlPlane) {
    let path = "/spec/conversion/webhook/clientConfig";
    let service =
        json!({ "namespace": "kruise-system", "name": "kruise-webhook-service", "path": "/convert" });
    let patch = json!([
        { "op": "remove", "path": format!("{path}/url") },
        { "op": "add", "path": format!("{path}/service"), "value": service },
    ]);
    let urls = r#"--output=jsonpath={range .items[?(@.spec.conversion.webhook.clientConfig.url)]}{.metadata.name}{"\n"}{end}"#;
    let kubectl = |args: &[&str]| plane.kubectl(args).unwrap();
    for crd in kubectl(&["get", "crd", urls]).lines() {
        kubectl(&["patch", "crd", crd, "--type=json", "--patch", &patch.to_string()]);
    }
}

#[tokio::test]
async fn ours_takes_the_place_of_the_go_implementation_and_gives_it_back() {
    let bed = Bed::start().await;
    bed.peer().install().unwrap();
    let manager = bed.peer().manager().unwrap();
    let account = bed.peer().daemon_account().unwrap();
    let daemon = bed.peer().daemon(&account).unwrap();
    work::succeeds(&bed, "theirs", "busybox:1.36", json!({})).await;
    work::recreates(&bed, "theirs").await;
    let rolling = rollout::begins(&bed, "theirs").await;
    let halves = halves::begin(&bed, "theirs").await;
    let (mut manager, mut daemon) = ours_takes_over(&bed, manager, daemon).await;
    halves::let_go(&bed, &halves).await;
    rollout::ends(&bed, rolling).await;
    halves::end(&bed, halves).await;

    bed.deploy("apply", "default");
    work::recreates(&bed, "ours").await;
    let always = json!({ "imagePullPolicy": "Always" });
    work::succeeds(&bed, "ours", "busybox:1.36", always).await;
    only_our_webhooks(&bed).await;
    paused(&bed, "back").await;
    let rolling = rollout::begins(&bed, "back").await;
    let halves = halves::begin(&bed, "back").await;
    let midway = work::begins(&bed, "midway-back").await;
    manager.stop().unwrap();
    daemon.stop().unwrap();
    theirs_comes_back(&bed).await;
    halves::let_go(&bed, &halves).await;
    rollout::ends(&bed, rolling).await;
    halves::end(&bed, halves).await;
    goes_on(&bed, "back").await;
    work::recreated(&bed, &midway).await;
    work::recreates(&bed, "back").await;
    served_as_v1alpha1(&bed);
}

/// Ends the Go programs of these process IDs while there is work for them, and lets ours finish it.
async fn ours_takes_over(bed: &Bed, manager: u32, daemon: u32) -> (Manager, Component) {
    paused(bed, "taken").await;
    let pulled = finished(bed).await;
    let theirs = holder(bed).await;
    bed.deploy("apply", "default");
    let ours = bed.manager();
    assert_eq!(holder(bed).await, theirs, "two lead");
    bed.end(manager);
    only_our_webhooks(bed).await;
    assert_ne!(holder(bed).await, theirs);
    goes_on(bed, "taken").await;
    let midway = work::begins(bed, "midway").await;
    bed.end(daemon);
    let daemon = bed.daemon();
    work::recreated(bed, &midway).await;
    assert_eq!(finished(bed).await, pulled, "pulled once more");
    (ours, daemon)
}

/// Installs and starts the Go programs where ours have ended.
async fn theirs_comes_back(bed: &Bed) {
    let ours = holder(bed).await;
    for folder in ["manager", "policies", "webhooks"] {
        bed.deploy("delete", folder);
    }
    bed.deploy("apply", "crds");
    services_instead_of_urls(&bed.node.plane);
    bed.peer().install().unwrap();
    bed.peer().manager().unwrap();
    bed.peer().daemon(&bed.peer().daemon_account().unwrap()).unwrap();
    let leases: Api<Lease> = Api::namespaced(bed.client.clone(), "kruise-system");
    bed.until(leases, "kruise-manager", "theirs again", |lease| {
        let holder = lease.spec.as_ref().and_then(|s| s.holder_identity.as_ref());
        holder.is_some_and(|h| !h.is_empty() && *h != ours)
    })
    .await;
}

fn served_as_v1alpha1(bed: &Bed) {
    wait::until("objects are served as v1alpha1", PATIENCE, || {
        let served = |plural: &str| {
            let kind = format!("{plural}.v1alpha1.apps.kruise.io");
            bed.node
                .plane
                .kubectl(&["get", &kind, "--all-namespaces"])
                .is_ok()
        };
        let kinds = ["nodeimages", "imagepulljobs", "containerrecreaterequests"];
        Ok(kinds.into_iter().all(served).then_some(()))
    })
    .unwrap();
}
