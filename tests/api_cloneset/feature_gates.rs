//! Feature gates that are off by default.

use kruise_api::cloneset::CloneSet;
use serde_json::{Value, json};

use crate::fixture::{Fixture, identities};
use crate::manager::Manager;
use crate::pods::{label, lifecycle_state, revision, spec_image, text};
use crate::test_cluster::{TestCluster, shared_cluster};
use crate::version_skew::remove_webhooks;

const GATES: &str =
    "CloneSetShortHash=true,PreparingUpdateAsUpdate=true,RecreatePodWhenChangeVCTInCloneSetGate=true";

fn claim_templates(storage: &str) -> Value {
    json!([{ "metadata": { "name": "data" }, "spec": { "accessModes": ["ReadWriteOnce"],
        "resources": { "requests": { "storage": storage } } } }])
}

/// All Pods have only the short hash of their revision.
async fn check_short_hashes(fixture: &Fixture, set: &CloneSet) {
    let update = set.status.as_ref().unwrap().update_revision.clone();
    let short = update.strip_prefix("web-").unwrap();
    let pods = fixture.pods_of("web").await;
    for pod in &pods {
        assert_eq!([revision(pod), label(pod, "pod-template-hash")], [short, short]);
    }
    let revisions = fixture.api("apps", "v1", "ControllerRevision");
    let labels = revisions.get(&update).await.unwrap().metadata.labels.unwrap();
    assert_eq!(labels["controller.kubernetes.io/hash"], short);
}

/// Requested storage of each claim that belongs to a Pod.
async fn claim_sizes(fixture: &Fixture) -> Vec<String> {
    let all = fixture.owned_claims().await;
    let requested = |claim: &Value| text(&claim["spec"]["resources"]["requests"]["storage"]);
    all.iter().map(requested).collect()
}

/// A new image is updated in place; changed claim templates recreate the Pods.
async fn changed_claim_templates_recreate_pods(fixture: &Fixture) {
    let mut spec = json!({ "volumeClaimTemplates": claim_templates("1Gi") });
    spec["template"] = json!({ "metadata": { "labels": { "app": "web" } } });
    fixture.create_cloneset("web", spec).await;
    let set = fixture.wait_settled("web").await;
    check_short_hashes(fixture, &set).await;
    let before = identities(&fixture.pods_of("web").await);

    fixture.set_image("web", "example.com/app:2").await;
    let set = fixture.wait_settled("web").await;
    check_short_hashes(fixture, &set).await;
    assert_eq!(identities(&fixture.pods_of("web").await), before, "in place");

    let set = fixture
        .patch_set(
            "web",
            json!({ "spec": { "volumeClaimTemplates": claim_templates("2Gi") } }),
        )
        .await;
    fixture.wait_settled("web").await;
    assert_eq!(identities(&fixture.pods_of("web").await), before, "claims alone");
    assert_eq!(claim_sizes(fixture).await, ["1Gi"; 3]);
    assert!(set.status.is_some());

    fixture.set_image("web", "example.com/app:3").await;
    let set = fixture.wait_settled("web").await;
    check_short_hashes(fixture, &set).await;
    let after = identities(&fixture.pods_of("web").await);
    assert!(
        before.iter().all(|one| !after.contains(one)),
        "{before:?} {after:?}"
    );
    assert_eq!(claim_sizes(fixture).await, ["2Gi"; 3]);

    fixture.set_image("web", "example.com/app:4").await;
    fixture.wait_settled("web").await;
    assert_eq!(
        identities(&fixture.pods_of("web").await),
        after,
        "the same claims again"
    );
}

/// An earlier template is requested again, with claims in a form that is never stored.
async fn equivalent_claims_reuse_the_revision(fixture: &Fixture) {
    let after = identities(&fixture.pods_of("web").await);
    remove_webhooks(fixture);
    let respelled = json!({ "volumeClaimTemplates": claim_templates("2048Mi") });
    fixture
        .set_image_and_spec("web", "example.com/app:3", respelled)
        .await;
    fixture.wait_settled("web").await;
    assert_eq!(
        identities(&fixture.pods_of("web").await),
        after,
        "the same claims, back in a revision that is there"
    );
}

/// A Pod that waits for its hook counts as updated, so a new Pod gets the old revision.
async fn prepared_pod_counts_as_updated(fixture: &Fixture) {
    let hook = json!({ "labelsHandler": { "example.com/hold": "yes" } });
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "partition": "90%", "maxUnavailable": 1 });
    let mut spec = json!({ "lifecycle": { "inPlaceUpdate": hook } });
    spec["updateStrategy"] = json!({ "rollingUpdate": rolling });
    spec["template"] = json!({ "metadata": { "labels": { "app": "held", "example.com/hold": "yes" } } });
    fixture.create_cloneset("held", spec).await;
    fixture.wait_settled("held").await;
    fixture.set_image("held", "example.com/app:2").await;
    let prepared = |pods: &[&Value]| {
        pods.iter()
            .filter(|p| lifecycle_state(p) == "PreparingUpdate")
            .count()
            == 1
    };
    fixture.wait_pods("held", "one is prepared", prepared).await;
    fixture
        .patch_set("held", json!({ "spec": { "replicas": 4 } }))
        .await;
    let pods = fixture
        .wait_pods("held", "four", |pods| pods.len() == 4 && prepared(pods))
        .await;
    let old = pods
        .iter()
        .filter(|pod| spec_image(pod, 0) == "example.com/app:1");
    assert_eq!(old.count(), 4, "the prepared one is the one to be updated");
    let name = pods
        .iter()
        .find(|p| lifecycle_state(p) == "PreparingUpdate")
        .unwrap()["metadata"]["name"]
        .clone();
    let remove_hook =
        kube::api::Patch::Merge(json!({ "metadata": { "labels": { "example.com/hold": null } } }));
    let params = kube::api::PatchParams::default();
    fixture
        .pods()
        .patch(name.as_str().unwrap(), &params, &remove_hook)
        .await
        .unwrap();
    let pods = fixture
        .wait_pods("held", "updated", |pods| {
            pods.iter().any(|p| lifecycle_state(p) == "Updated")
        })
        .await;
    let new = pods
        .iter()
        .filter(|pod| spec_image(pod, 0) == "example.com/app:2");
    assert_eq!((new.count(), pods.len()), (1, 4));
}

/// A Pod that is out of its Services for its deletion is not kept and does not count as desired, so a new Pod is
/// created.
async fn preparing_delete_pod_is_excluded(fixture: &Fixture, scale_strategy: Value) {
    let hook = json!({ "labelsHandler": { "example.com/hold": "yes" }, "markPodNotReady": true });
    let template = json!({ "metadata": { "labels": { "app": "going", "example.com/hold": "yes" } } });
    let spec = json!({ "replicas": 2, "lifecycle": { "preDelete": hook }, "template": template,
        "scaleStrategy": scale_strategy });
    fixture.create_cloneset("going", spec).await;
    fixture.wait_settled("going").await;
    let preparing_delete = |pods: &[&Value]| {
        pods.iter()
            .filter(|p| lifecycle_state(p) == "PreparingDelete")
            .count()
            == 1
    };
    fixture
        .patch_set("going", json!({ "spec": { "replicas": 1 } }))
        .await;
    fixture.wait_pods("going", "one is to go", preparing_delete).await;
    fixture
        .patch_set("going", json!({ "spec": { "replicas": 2 } }))
        .await;
    let replaced = |pods: &[&Value]| pods.len() == 3 && preparing_delete(pods);
    fixture.wait_pods("going", "a replacement", replaced).await;
}

#[tokio::test]
async fn exclude_preparing_delete_can_be_set_per_cloneset() {
    let fixture = Fixture::new(shared_cluster(), "exclude").await;
    preparing_delete_pod_is_excluded(&fixture, json!({ "excludePreparingDelete": true })).await;
}

#[tokio::test]
async fn feature_gates_off_by_default_take_effect() {
    let cluster: &'static TestCluster = Box::leak(Box::new(TestCluster::new()));
    let mut manager = Manager::on_free_ports_with(
        &cluster.plane,
        "kruise-manager",
        &[
            format!("--feature-gates={GATES}"),
            "--cloneset-scaling-exclude-preparing-delete".to_owned(),
        ],
    );
    manager.start().unwrap();
    let fixture = Fixture::new(cluster, "gates").await;
    tokio::join!(
        changed_claim_templates_recreate_pods(&fixture),
        prepared_pod_counts_as_updated(&fixture),
        preparing_delete_pod_is_excluded(&fixture, json!({}))
    );
    equivalent_claims_reuse_the_revision(&fixture).await;
}
