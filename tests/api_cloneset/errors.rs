//! What goes wrong is said where users look, and is not tried without end.

use jiff::Timestamp;
use kruise_api::cloneset::CloneSet;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testbed::cluster::wait;

use crate::field::Field;
use crate::kubelet::{NO_IMAGE, NO_NODE};
use crate::world::{PATIENCE, until, world};

/// What a condition says; nothing where it is absent.
pub fn said(set: &CloneSet, type_: &str) -> String {
    let conditions = set
        .status
        .as_ref()
        .map(|s| s.conditions.as_slice())
        .unwrap_or_default();
    let condition = conditions.iter().find(|c| c.type_ == type_);
    condition.map(|c| c.message.clone()).unwrap_or_default()
}

/// Waits until a condition has these words.
pub async fn says(field: &Field, type_: &'static str, words: &'static str) -> CloneSet {
    until(&field.sets(), "web", words, move |set: &CloneSet| {
        said(set, type_).contains(words)
    })
    .await
}

/// A quota, with what is in use as its own controller would have it. The API server heeds it.
pub async fn quota(field: &Field, resource: &str, hard: u32) {
    limit(field, "few", resource, hard).await;
    // It hears of quotas in their order: when it heeds one that was changed later it heeds this one.
    let maps = field.api("", "v1", "ConfigMap");
    let map = serde_json::from_value(json!({ "metadata": { "name": "probe" } })).unwrap();
    let probe = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let refuses = async || maps.create(&probe, &map).await.is_err();
    let refused = refuses().await;
    limit(field, "later", "count/configmaps", u32::from(refused)).await;
    let heeded = async || (refuses().await != refused).then_some(());
    field.until("the quota is heeded", heeded).await;
}

async fn limit(field: &Field, name: &str, resource: &str, hard: u32) {
    let quotas = field.api("", "v1", "ResourceQuota");
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

/// When the manager asked for another Pod of this namespace and was refused.
pub fn refusals(field: &Field) -> Vec<Timestamp> {
    let all = field.world.plane.writes().unwrap();
    let refused = all.iter().filter(|w| {
        w["verb"] == "create"
            && w["objectRef"]["resource"] == "pods"
            && w["objectRef"]["namespace"] == field.namespace.as_str()
            && w["responseStatus"]["code"] == 403
    });
    let time = |w: &Value| w["requestReceivedTimestamp"].as_str().unwrap().parse().unwrap();
    refused.map(time).collect()
}

#[tokio::test]
async fn a_quota_is_told_and_tried_ever_later() {
    let field = Field::new(world(), "quota").await;
    quota(&field, "pods", 2).await;
    field.set("web", json!({ "replicas": 4 })).await;
    let set = says(&field, "FailedScale", "exceeded quota: few").await;
    assert!(
        said(&set, "FailedScale").contains("\"web-*\""),
        "{}",
        said(&set, "FailedScale")
    );
    let set = says(&field, "Waiting", "failed: ").await;
    assert!(said(&set, "Waiting").contains("exceeded quota: few"));
    let event = json!(field.event("FailedCreate", "web").await);
    assert_eq!(event["type"], "Warning");
    // Those of the first moment go together; later ones are alone, and ever later.
    let tries = wait::until("three pauses, each twice the one before", PATIENCE, || {
        let all = refusals(&field);
        let gaps = all
            .windows(2)
            .map(|two| two[1].duration_since(two[0]).as_secs_f64());
        let gaps: Vec<f64> = gaps.collect();
        let paced = gaps.windows(3).any(|g| g[0] > 0.9 && g[1] > 1.9 && g[2] > 3.9);
        Ok(paced.then_some(all.len()))
    });
    let tries = tries.unwrap();
    assert!(tries <= 12, "{tries} tries in eight seconds");
    let count = |resource: &str| field.writes().iter().filter(|w| w.1 == resource).count();
    assert!(count("clonesets/status") <= 2 * tries + 4, "{:?}", field.writes());
    assert!(count("events") <= tries + 6, "{:?}", field.writes());

    quota(&field, "pods", 10).await;
    let set = field.settled("web").await;
    assert_eq!(said(&set, "FailedScale"), "");
    assert_eq!(said(&set, "Waiting"), "");
}

#[tokio::test]
async fn a_quota_of_revisions_is_told_and_another_spec_is_tried_at_once() {
    let field = Field::new(world(), "no-revisions").await;
    quota(&field, "count/controllerrevisions.apps", 0).await;
    field.set("web", json!({})).await;
    says(&field, "FailedUpdate", "exceeded quota: few").await;
    says(&field, "Waiting", "CloneSet cannot be updated: ").await;
    field.event("FailedUpdate", "web").await;
    quota(&field, "count/controllerrevisions.apps", 9).await;
    field.edit("web", json!({ "spec": { "replicas": 2 } })).await;
    let set = field.settled("web").await;
    assert_eq!(said(&set, "FailedUpdate"), "");
}

#[tokio::test]
async fn a_claim_without_a_class_is_told_with_the_scheduler_s_words() {
    let field = Field::new(world(), "no-class").await;
    let claim = json!({ "metadata": { "name": "data" }, "spec": { "storageClassName": "no-such-class",
        "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } });
    let template = json!({ "spec": { "nodeSelector": { (NO_NODE): "true" } } });
    let spec = json!({ "replicas": 2, "template": template, "volumeClaimTemplates": [claim] });
    field.set("web", spec).await;
    says(
        &field,
        "Waiting",
        "its claim of storage class no-such-class is not bound",
    )
    .await;
    let words = "pod has unbound immediate PersistentVolumeClaims";
    let pods = field
        .until_pods("web", "both there", |pods| pods.len() == 2)
        .await;
    for pod in &pods {
        let condition = json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": format!("0/1 nodes are available: {words}.") });
        let patch = Patch::Strategic(json!({ "status": { "conditions": [condition] } }));
        let name = pod["metadata"]["name"].as_str().unwrap();
        field
            .pods()
            .patch_status(name, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
    let names: Vec<&str> = pods
        .iter()
        .filter_map(|p| p["metadata"]["name"].as_str())
        .collect();
    // One of them is told first.
    let both = format!("{} (a node: 0/1 nodes are available: {words}", names.join(", "));
    until(&field.sets(), "web", "both are told", |set: &CloneSet| {
        said(set, "Waiting").contains(&both)
    })
    .await;
}

#[tokio::test]
async fn an_image_that_never_comes_is_told_with_the_pods_that_wait() {
    let field = Field::new(world(), "no-image").await;
    let containers = json!([{ "name": "app", "image": NO_IMAGE }]);
    let template = json!({ "spec": { "containers": containers } });
    let spec = json!({ "replicas": 2, "progressDeadlineSeconds": 3600, "template": template });
    field.set("web", spec).await;
    let words = "(container app: ImagePullBackOff of image nowhere.example/none:1)";
    let set = says(&field, "Waiting", words).await;
    let all = field.pods_of("web").await;
    let names: Vec<&str> = all
        .iter()
        .filter_map(|p| p["metadata"]["name"].as_str())
        .collect();
    let waits = said(&set, "Waiting");
    assert!(
        names.iter().any(|name| waits.contains(name)),
        "{names:?} are not in {waits}"
    );
}
