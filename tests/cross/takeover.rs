//! Our programs replace a running Go installation, and back; the steps are those of `deploy/README.md`.

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::coordination::v1::Lease;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::keys::SYSTEM_NAMESPACE;
use kruise_api::node_image::{ImageTagStatus, NodeImage};
use kruise_api::pod_webhooks::NAME_SUFFIX;
use kruise_api::webhooks::{MUTATING, VALIDATING, configurations};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use testbed::cluster::{Component, ControlPlane, NODE_NAME, wait};

use crate::interop_cluster::{InteropCluster, WAIT_TIMEOUT, create};
use crate::manager::Manager;
use crate::{
    common_checks, image_lists, launch_priority, partial_updates, pod_probes, rollout, sidecar_termination,
};

async fn lease_holder(cluster: &InteropCluster) -> String {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "kruise-system");
    let lease = leases.get("kruise-manager").await.unwrap();
    lease.spec.unwrap().holder_identity.unwrap_or_default()
}

/// The finished pull of busybox, which must not be repeated.
async fn finished_pull(cluster: &InteropCluster) -> ImageTagStatus {
    let images: Api<NodeImage> = Api::all(cluster.client.clone());
    let image = images.get(NODE_NAME).await.unwrap();
    image.status.unwrap().image_statuses["busybox"].tags[0].clone()
}

/// A job with no parallelism, until that is raised.
async fn create_paused_job(cluster: &InteropCluster, name: &str) {
    let spec = json!({ "image": format!("cross/{name}:1"), "parallelism": 0, "selector": { "names": [NODE_NAME] },
        "completionPolicy": { "type": "Always" } });
    let jobs = cluster.api::<ImagePullJob>();
    create(&jobs, json!({ "metadata": { "name": name }, "spec": spec })).await;
    cluster
        .wait_until(jobs, name, "seen by a manager", |j| {
            j.status.as_ref().is_some_and(|s| s.desired == 1)
        })
        .await;
}

async fn resume_job(cluster: &InteropCluster, name: &str) {
    let image = testbed::cluster::Image::scratch().cmd(["none"]);
    cluster
        .node
        .runtime
        .registry
        .push(&format!("cross/{name}:1"), &image)
        .unwrap();
    let jobs = cluster.api::<ImagePullJob>();
    let patch = Patch::Merge(json!({ "spec": { "parallelism": 1 } }));
    jobs.patch(name, &PatchParams::default(), &patch).await.unwrap();
    cluster
        .wait_until(jobs, name, "succeeded", |j| {
            j.status.as_ref().is_some_and(|s| s.succeeded == 1)
        })
        .await;
}

/// Waits until exactly our webhooks are installed.
async fn wait_for_our_webhooks(cluster: &InteropCluster) {
    let [mutating, validating] = configurations(SYSTEM_NAMESPACE);
    let names = |configuration: &serde_json::Value| -> Vec<String> {
        let all = configuration["webhooks"].as_array().unwrap();
        all.iter()
            .map(|w| w["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let (mutating, validating) = (names(&mutating), names(&validating));
    let found: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
    cluster
        .wait_until(found, MUTATING, "only ours", |c| {
            // Those for Pods are not in the manifest.
            let all = c.webhooks.iter().flatten().map(|w| w.name.clone());
            all.filter(|name| !name.ends_with(NAME_SUFFIX))
                .collect::<Vec<_>>()
                == mutating
        })
        .await;
    let found: Api<ValidatingWebhookConfiguration> = Api::all(cluster.client.clone());
    cluster
        .wait_until(found, VALIDATING, "only ours", |c| {
            let all = c.webhooks.iter().flatten();
            all.map(|w| w.name.clone()).collect::<Vec<_>>() == validating
        })
        .await;
}

/// The Go manager also wrote its URL into its other CRDs, because it runs on the host here; its manifests cannot be
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
async fn takeover_from_go_implementation_and_return() {
    let cluster = InteropCluster::start().await;
    cluster.peer().install().unwrap();
    let manager = cluster.peer().start_manager().unwrap();
    let account = cluster.peer().daemon_account().unwrap();
    let daemon = cluster.peer().start_daemon(&account).unwrap();
    common_checks::run_successful_job(&cluster, "theirs", "busybox:1.36", json!({})).await;
    common_checks::check_recreate(&cluster, "theirs").await;
    let rollout_in_progress = rollout::start_rollout(&cluster, "theirs").await;
    let partial_updates = partial_updates::start_updates(&cluster, "theirs").await;
    let list = image_lists::start_list(&cluster, "theirs-list").await;
    let probed = pod_probes::start_probes(&cluster, "theirs-probed").await;
    let in_between = launch_priority::start_pod(&cluster, "theirs-in-order").await;
    sidecar_termination::start_pod(&cluster, "theirs-job").await;
    let (mut manager, mut daemon) = replace_go_programs(&cluster, manager, daemon).await;
    image_lists::finish_list(&cluster, list).await;
    partial_updates::unblock_updates(&cluster, &partial_updates).await;
    rollout::finish_rollout(&cluster, rollout_in_progress).await;
    partial_updates::finish_updates(&cluster, partial_updates).await;
    launch_priority::finish_pod(&cluster, in_between).await;
    sidecar_termination::finish_pod(&cluster, "theirs-job").await;
    pod_probes::assert_unchanged(&cluster, &probed).await;
    pod_probes::finish_probes(&cluster, probed).await;

    cluster.deploy("apply", "default");
    common_checks::check_recreate(&cluster, "ours").await;
    let always = json!({ "imagePullPolicy": "Always" });
    common_checks::run_successful_job(&cluster, "ours", "busybox:1.36", always).await;
    wait_for_our_webhooks(&cluster).await;
    create_paused_job(&cluster, "back").await;
    let rollout_in_progress = rollout::start_rollout(&cluster, "back").await;
    let partial_updates = partial_updates::start_updates(&cluster, "back").await;
    let list = image_lists::start_list(&cluster, "back-list").await;
    let probed = pod_probes::start_probes(&cluster, "back-probed").await;
    let in_between = launch_priority::start_pod(&cluster, "back-in-order").await;
    sidecar_termination::start_pod(&cluster, "back-job").await;
    let pending_recreate = common_checks::start_recreate(&cluster, "midway-back").await;
    manager.stop().unwrap();
    daemon.stop().unwrap();
    restart_go_programs(&cluster).await;
    image_lists::finish_list(&cluster, list).await;
    partial_updates::unblock_updates(&cluster, &partial_updates).await;
    rollout::finish_rollout(&cluster, rollout_in_progress).await;
    partial_updates::finish_updates(&cluster, partial_updates).await;
    launch_priority::finish_pod(&cluster, in_between).await;
    sidecar_termination::finish_pod(&cluster, "back-job").await;
    pod_probes::finish_probes(&cluster, probed).await;
    resume_job(&cluster, "back").await;
    common_checks::wait_until_recreated(&cluster, &pending_recreate).await;
    common_checks::check_recreate(&cluster, "back").await;
    wait_for_v1alpha1(&cluster);
}

/// Ends the Go programs with these process IDs while they have work, and lets ours finish it.
async fn replace_go_programs(cluster: &InteropCluster, manager: u32, daemon: u32) -> (Manager, Component) {
    create_paused_job(cluster, "taken").await;
    let pulled = finished_pull(cluster).await;
    let go_holder = lease_holder(cluster).await;
    cluster.deploy("apply", "default");
    let rust_manager = cluster.start_manager();
    assert_eq!(lease_holder(cluster).await, go_holder, "two lead");
    cluster.kill(manager);
    wait_for_our_webhooks(cluster).await;
    assert_ne!(lease_holder(cluster).await, go_holder);
    resume_job(cluster, "taken").await;
    let pending_recreate = common_checks::start_recreate(cluster, "midway").await;
    cluster.kill(daemon);
    let daemon = cluster.start_daemon();
    common_checks::wait_until_recreated(cluster, &pending_recreate).await;
    assert_eq!(finished_pull(cluster).await, pulled, "pulled once more");
    (rust_manager, daemon)
}

/// Installs and starts the Go programs after ours have ended.
async fn restart_go_programs(cluster: &InteropCluster) {
    restart_go_manager(cluster).await;
    cluster
        .peer()
        .start_daemon(&cluster.peer().daemon_account().unwrap())
        .unwrap();
}

/// Installs the Go implementation after our manager has ended, and returns when its manager leads.
pub async fn restart_go_manager(cluster: &InteropCluster) {
    let rust_holder = lease_holder(cluster).await;
    for folder in ["manager", "policies", "webhooks"] {
        cluster.deploy("delete", folder);
    }
    cluster.deploy("apply", "crds");
    services_instead_of_urls(&cluster.node.plane);
    cluster.peer().install().unwrap();
    cluster.peer().start_manager().unwrap();
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "kruise-system");
    cluster
        .wait_until(leases, "kruise-manager", "theirs again", |lease| {
            let holder = lease.spec.as_ref().and_then(|s| s.holder_identity.as_ref());
            holder.is_some_and(|h| !h.is_empty() && *h != rust_holder)
        })
        .await;
    let plane = &cluster.node.plane;
    if plane.serves_mutating_policies().unwrap() {
        let kinds = "mutatingadmissionpolicybindings,mutatingadmissionpolicies";
        let delete = ["delete", kinds, "--selector=kruise.io/sidecarset-name"];
        plane.kubectl(&delete).unwrap();
    }
}

fn wait_for_v1alpha1(cluster: &InteropCluster) {
    wait::until("objects are served as v1alpha1", WAIT_TIMEOUT, || {
        let served = |plural: &str| {
            let kind = format!("{plural}.v1alpha1.apps.kruise.io");
            cluster
                .node
                .plane
                .kubectl(&["get", &kind, "--all-namespaces"])
                .is_ok()
        };
        let kinds = [
            "nodeimages",
            "imagepulljobs",
            "imagelistpulljobs",
            "containerrecreaterequests",
        ];
        Ok(kinds.into_iter().all(served).then_some(()))
    })
    .unwrap();
}
