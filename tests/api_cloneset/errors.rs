//! Failures are shown where users look for them, and are retried with backoff.

use jiff::Timestamp;
use kruise_api::cloneset::CloneSet;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testbed::cluster::wait;

use crate::fake_kubelet::{NO_IMAGE, NO_NODE};
use crate::fixture::Fixture;
use crate::test_cluster::{WAIT_TIMEOUT, shared_cluster, wait_until};

/// Message of a condition; empty if the condition is absent.
pub fn condition_message(set: &CloneSet, type_: &str) -> String {
    let conditions = set
        .status
        .as_ref()
        .map(|s| s.conditions.as_slice())
        .unwrap_or_default();
    let condition = conditions.iter().find(|c| c.type_ == type_);
    condition.map(|c| c.message.clone()).unwrap_or_default()
}

/// Waits until the message of a condition contains `text`.
pub async fn wait_for_condition(fixture: &Fixture, type_: &'static str, text: &'static str) -> CloneSet {
    wait_until(&fixture.sets(), "web", text, move |set: &CloneSet| {
        condition_message(set, type_).contains(text)
    })
    .await
}

/// Creates a quota with `status.used` as its controller would set it. Returns when the API server enforces it.
pub async fn set_quota(fixture: &Fixture, resource: &str, hard: u32) {
    write_quota(fixture, "few", resource, hard).await;
    // The API server receives quotas in order: once it enforces a later change, it enforces this one.
    let maps = fixture.api("", "v1", "ConfigMap");
    let map = serde_json::from_value(json!({ "metadata": { "name": "probe" } })).unwrap();
    let probe = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let refuses = async || maps.create(&probe, &map).await.is_err();
    let refused = refuses().await;
    write_quota(fixture, "later", "count/configmaps", u32::from(refused)).await;
    let in_effect = async || (refuses().await != refused).then_some(());
    fixture.poll_until("the quota is heeded", in_effect).await;
}

async fn write_quota(fixture: &Fixture, name: &str, resource: &str, hard: u32) {
    let quotas = fixture.api("", "v1", "ResourceQuota");
    let spec = json!({ "hard": { resource: hard.to_string() } });
    let object = json!({ "metadata": { "name": name }, "spec": spec });
    if quotas.get_opt(name).await.unwrap().is_none() {
        let object = serde_json::from_value(object).unwrap();
        quotas.create(&PostParams::default(), &object).await.unwrap();
    }
    let params = PatchParams::default();
    quotas
        .patch(name, &params, &Patch::Merge(json!({ "spec": spec })))
        .await
        .unwrap();
    let status = json!({ "status": { "hard": { resource: hard.to_string() }, "used": { resource: "0" } } });
    quotas
        .patch_status(name, &params, &Patch::Merge(status))
        .await
        .unwrap();
}

/// When the manager tried to create a Pod in this namespace and was denied.
pub fn rejected_creations(fixture: &Fixture) -> Vec<Timestamp> {
    let all = fixture.cluster.plane.audited_writes().unwrap();
    let refused = all.iter().filter(|w| {
        w["verb"] == "create"
            && w["objectRef"]["resource"] == "pods"
            && w["objectRef"]["namespace"] == fixture.namespace.as_str()
            && w["responseStatus"]["code"] == 403
    });
    let time = |w: &Value| w["requestReceivedTimestamp"].as_str().unwrap().parse().unwrap();
    refused.map(time).collect()
}

#[tokio::test]
async fn exceeded_quota_is_reported_and_backed_off() {
    let fixture = Fixture::new(shared_cluster(), "quota").await;
    set_quota(&fixture, "pods", 2).await;
    fixture.create_cloneset("web", json!({ "replicas": 4 })).await;
    let set = wait_for_condition(&fixture, "FailedScale", "exceeded quota: few").await;
    assert!(
        condition_message(&set, "FailedScale").contains("\"web-*\""),
        "{}",
        condition_message(&set, "FailedScale")
    );
    let set = wait_for_condition(&fixture, "Waiting", "failed: ").await;
    assert!(condition_message(&set, "Waiting").contains("exceeded quota: few"));
    let event = json!(fixture.wait_event("FailedCreate", "web").await);
    assert_eq!(event["type"], "Warning");
    // The first attempts are concurrent; later ones come one at a time, with growing intervals.
    let attempts = wait::until("three pauses, each twice the one before", WAIT_TIMEOUT, || {
        let all = rejected_creations(&fixture);
        let gaps = all
            .windows(2)
            .map(|two| two[1].duration_since(two[0]).as_secs_f64());
        let gaps: Vec<f64> = gaps.collect();
        let backs_off = gaps.windows(3).any(|g| g[0] > 0.9 && g[1] > 1.9 && g[2] > 3.9);
        Ok(backs_off.then_some(all.len()))
    });
    let attempts = attempts.unwrap();
    assert!(attempts <= 12, "{attempts} tries in eight seconds");
    let count = |resource: &str| {
        fixture
            .accepted_writes()
            .iter()
            .filter(|w| w.1 == resource)
            .count()
    };
    assert!(
        count("clonesets/status") <= 2 * attempts + 4,
        "{:?}",
        fixture.accepted_writes()
    );
    assert!(count("events") <= attempts + 6, "{:?}", fixture.accepted_writes());

    set_quota(&fixture, "pods", 10).await;
    let set = fixture.wait_settled("web").await;
    assert_eq!(condition_message(&set, "FailedScale"), "");
    assert_eq!(condition_message(&set, "Waiting"), "");
}

#[tokio::test]
async fn revision_quota_is_reported_and_retried_on_spec_change() {
    let fixture = Fixture::new(shared_cluster(), "no-revisions").await;
    set_quota(&fixture, "count/controllerrevisions.apps", 0).await;
    fixture.create_cloneset("web", json!({})).await;
    wait_for_condition(&fixture, "FailedUpdate", "exceeded quota: few").await;
    wait_for_condition(&fixture, "Waiting", "CloneSet cannot be updated: ").await;
    fixture.wait_event("FailedUpdate", "web").await;
    set_quota(&fixture, "count/controllerrevisions.apps", 9).await;
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 2 } }))
        .await;
    let set = fixture.wait_settled("web").await;
    assert_eq!(condition_message(&set, "FailedUpdate"), "");
}

#[tokio::test]
async fn missing_storage_class_is_reported_with_scheduler_message() {
    let fixture = Fixture::new(shared_cluster(), "no-class").await;
    let claim = json!({ "metadata": { "name": "data" }, "spec": { "storageClassName": "no-such-class",
        "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } });
    let template = json!({ "spec": { "nodeSelector": { (NO_NODE): "true" } } });
    let spec = json!({ "replicas": 2, "template": template, "volumeClaimTemplates": [claim] });
    fixture.create_cloneset("web", spec).await;
    wait_for_condition(
        &fixture,
        "Waiting",
        "its claim of storage class no-such-class is not bound",
    )
    .await;
    let text = "pod has unbound immediate PersistentVolumeClaims";
    let pods = fixture
        .wait_pods("web", "both there", |pods| pods.len() == 2)
        .await;
    for pod in &pods {
        let condition = json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": format!("0/1 nodes are available: {text}.") });
        let patch = Patch::Strategic(json!({ "status": { "conditions": [condition] } }));
        let name = pod["metadata"]["name"].as_str().unwrap();
        fixture
            .pods()
            .patch_status(name, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
    let names: Vec<&str> = pods
        .iter()
        .filter_map(|p| p["metadata"]["name"].as_str())
        .collect();
    // One of them is reported first.
    let both_pods = format!("{} (a node: 0/1 nodes are available: {text}", names.join(", "));
    wait_until(
        &fixture.sets(),
        "web",
        "condition Waiting names both Pods",
        |set: &CloneSet| condition_message(set, "Waiting").contains(&both_pods),
    )
    .await;
}

#[tokio::test]
async fn image_pull_backoff_is_reported_with_waiting_pods() {
    let fixture = Fixture::new(shared_cluster(), "no-image").await;
    let containers = json!([{ "name": "app", "image": NO_IMAGE }]);
    let template = json!({ "spec": { "containers": containers } });
    let spec = json!({ "replicas": 2, "progressDeadlineSeconds": 3600, "template": template });
    fixture.create_cloneset("web", spec).await;
    let text = "(container app: ImagePullBackOff of image nowhere.example/none:1)";
    let set = wait_for_condition(&fixture, "Waiting", text).await;
    let all = fixture.pods_of("web").await;
    let names: Vec<&str> = all
        .iter()
        .filter_map(|p| p["metadata"]["name"].as_str())
        .collect();
    let waiting_message = condition_message(&set, "Waiting");
    assert!(
        names.iter().any(|name| waiting_message.contains(name)),
        "{names:?} are not in {waiting_message}"
    );
}
