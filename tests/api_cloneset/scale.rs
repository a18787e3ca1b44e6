//! How many Pods there are, which of them are deleted, and what is kept of them.

use kube::api::{Patch, PostParams};
use serde_json::{Value, json};

use crate::fake_kubelet::NO_NODE;
use crate::fixture::{Fixture, identities};
use crate::test_cluster::{shared_cluster, wait_until};

fn name(pod: &Value) -> String {
    pod["metadata"]["name"].as_str().unwrap().to_owned()
}

fn claim_templates() -> Value {
    json!({ "volumeClaimTemplates": [{
        "metadata": { "name": "data" },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
    }]})
}

/// A CloneSet `db` of two Pods with a claim each, and the Pods.
async fn create_two_with_claims(namespace: &str, reuse: bool) -> (Fixture, Vec<Value>) {
    let fixture = Fixture::new(shared_cluster(), namespace).await;
    let mut spec = claim_templates();
    spec["replicas"] = json!(2);
    spec["scaleStrategy"] = json!({ "enablePVCReuse": reuse });
    fixture.create_cloneset("db", spec).await;
    fixture.wait_settled("db").await;
    let pods = fixture.pods_of("db").await;
    (fixture, pods)
}

#[tokio::test]
async fn pvc_reuse_keeps_claims_for_the_next_pod() {
    for (namespace, reuse) in [("claims-reused", true), ("claims-not-reused", false)] {
        let (fixture, pods) = create_two_with_claims(namespace, reuse).await;
        let before = identities(&fixture.owned_claims().await);
        assert_eq!(before.len(), 2);
        let deleted = name(&pods[0]);
        fixture
            .pods()
            .delete(&deleted, &Default::default())
            .await
            .unwrap();
        let uid = identities(&pods)[0].1.clone();
        let replaced = move |current: &[&Value]| {
            current.len() == 2 && current.iter().all(|p| p["metadata"]["uid"] != uid)
        };
        let pods = fixture.wait_pods("db", "complete again", replaced).await;
        fixture.wait_settled("db").await;
        let names: Vec<String> = pods.iter().map(name).collect();
        assert_eq!(names.contains(&deleted), reuse, "the id goes with the claim");
        let after = identities(&fixture.owned_claims().await);
        let kept = before.iter().filter(|claim| after.contains(claim)).count();
        assert_eq!(kept, if reuse { 2 } else { 1 }, "{before:?} {after:?}");
    }
}

#[tokio::test]
async fn specified_pods_are_deleted_and_replaced() {
    let fixture = Fixture::new(shared_cluster(), "named").await;
    fixture.create_cloneset("web", json!({})).await;
    fixture.wait_settled("web").await;
    let pods = fixture.pods_of("web").await;
    let (first, second) = (name(&pods[0]), name(&pods[1]));
    let label = json!({ "metadata": { "labels": { "apps.kruise.io/specified-delete": "true" } } });
    fixture
        .pods()
        .patch(&first, &Default::default(), &Patch::Merge(label))
        .await
        .unwrap();
    let list = json!({ "spec": { "replicas": 2, "scaleStrategy": { "podsToDelete": [second] } } });
    fixture.patch_set("web", list).await;
    let both_deleted =
        |pods: &[&Value]| pods.len() == 2 && pods.iter().all(|p| ![&first, &second].contains(&&name(p)));
    let remaining = fixture.wait_pods("web", "without those two", both_deleted).await;
    assert!(
        remaining.iter().any(|p| name(p) == name(&pods[2])),
        "the third stays"
    );
    let empty = |set: &kruise_api::cloneset::CloneSet| {
        let scale = set.spec.scale_strategy.as_ref();
        scale.is_none_or(|s| s.pods_to_delete.is_empty())
    };
    wait_until(&fixture.sets(), "web", "its list is empty", empty).await;
    fixture.wait_event("SuccessfulDelete", "web").await;
}

#[tokio::test]
async fn pre_delete_hook_holds_pod_and_deletion_is_cancelled() {
    let fixture = Fixture::new(shared_cluster(), "held").await;
    let hook = json!({ "finalizersHandler": ["example.com/busy"] });
    let mut spec = json!({ "replicas": 1, "lifecycle": { "preDelete": hook } });
    spec["template"] = json!({ "metadata": { "finalizers": ["example.com/busy"] } });
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    let before = identities(&fixture.pods_of("web").await);
    let preparing = |pods: &[&Value]| {
        pods.iter().all(|p| {
            p["metadata"]["labels"]["lifecycle.apps.kruise.io/state"] == "PreparingDelete"
                && p["metadata"]["deletionTimestamp"].is_null()
        })
    };
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 0 } }))
        .await;
    let pods = fixture.wait_pods("web", "held by the hook", preparing).await;
    assert_eq!(identities(&pods), before);
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 1 } }))
        .await;
    fixture.wait_settled("web").await;
    assert_eq!(
        identities(&fixture.pods_of("web").await),
        before,
        "kept after all"
    );

    fixture
        .patch_set("web", json!({ "spec": { "replicas": 0 } }))
        .await;
    fixture.wait_pods("web", "held by the hook", preparing).await;
    let remove_finalizer = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    fixture
        .pods()
        .patch(&before[0].0, &Default::default(), &remove_finalizer)
        .await
        .unwrap();
    fixture.wait_pods("web", "gone", |pods| pods.is_empty()).await;
}

#[tokio::test]
async fn new_cloneset_adopts_and_counts_orphans() {
    let fixture = Fixture::new(shared_cluster(), "orphans").await;
    let pod = json!({ "metadata": { "name": "stray", "labels": { "app": "web" } },
        "spec": { "terminationGracePeriodSeconds": 0, "containers": [{ "name": "app", "image": "example.com/app:1" }] } });
    let pod = serde_json::from_value(pod).unwrap();
    let pod = fixture.pods().create(&PostParams::default(), &pod).await.unwrap();
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": "100%", "paused": true });
    fixture
        .create_cloneset("web", json!({ "updateStrategy": { "rollingUpdate": rolling } }))
        .await;
    let all = |set: &kruise_api::cloneset::CloneSet| {
        let status = set.status.as_ref();
        status.is_some_and(|s| s.replicas == 3 && s.updated_replicas == 2)
    };
    fixture
        .wait_status("web", "three Pods, two of them made", all)
        .await;
    let adopted = fixture.pods().get("stray").await.unwrap();
    assert_eq!(adopted.metadata.uid, pod.metadata.uid);
    assert_eq!(adopted.metadata.owner_references.unwrap()[0].name, "web");
    assert_eq!(fixture.pods_of("web").await.len(), 3);
    let event = fixture.wait_event("SuccessfulAdopt", "web").await;
    assert_eq!(event["message"], "adopted pod stray");

    // Without our readiness gate and revision it cannot be updated in place.
    fixture
        .patch_set(
            "web",
            json!({ "spec": { "updateStrategy": { "rollingUpdate": { "paused": false } } } }),
        )
        .await;
    fixture.wait_settled("web").await;
    assert!(
        fixture
            .pods_of("web")
            .await
            .iter()
            .all(|pod| name(pod) != "stray")
    );
}

#[tokio::test]
async fn failed_scale_is_reported_until_it_recovers() {
    let fixture = Fixture::new(shared_cluster(), "refused").await;
    let template = json!({ "spec": { "serviceAccountName": "later" } });
    fixture
        .create_cloneset("web", json!({ "replicas": 100, "template": template }))
        .await;
    let failed = |set: &kruise_api::cloneset::CloneSet| {
        let conditions = set.status.as_ref().map(|s| s.conditions.clone());
        conditions
            .into_iter()
            .flatten()
            .find(|c| c.type_ == "FailedScale")
    };
    let is_reported = |set: &kruise_api::cloneset::CloneSet| {
        failed(set).is_some_and(|c| c.status == "True" && c.message.contains("later"))
    };
    wait_until(&fixture.sets(), "web", "says why", is_reported).await;
    fixture.wait_event("FailedCreate", "web").await;
    let account = serde_json::from_value(json!({ "metadata": { "name": "later" } })).unwrap();
    let accounts = fixture.api("", "v1", "ServiceAccount");
    accounts.create(&PostParams::default(), &account).await.unwrap();
    let set = fixture.wait_settled("web").await;
    assert_eq!(failed(&set), None);
    assert_eq!(fixture.pods_of("web").await.len(), 100);
}

#[tokio::test]
async fn scale_max_unavailable_limits_pod_creation() {
    let fixture = Fixture::new(shared_cluster(), "stream").await;
    let mut spec = json!({ "replicas": 4, "scaleStrategy": { "maxUnavailable": 2 } });
    spec["template"] = json!({ "spec": { "nodeSelector": { (NO_NODE): "true" } } });
    fixture.create_cloneset("web", spec).await;
    fixture.wait_event("ScaleUpLimited", "web").await;
    let two = |set: &kruise_api::cloneset::CloneSet| set.status.as_ref().is_some_and(|s| s.replicas == 2);
    fixture
        .wait_status("web", "two Pods, for none is available", two)
        .await;
    fixture
        .patch_set(
            "web",
            json!({ "spec": { "scaleStrategy": { "maxUnavailable": null } } }),
        )
        .await;
    fixture
        .wait_pods("web", "all there", |pods| pods.len() == 4)
        .await;
}

/// A user removes a Pod's label to debug it: it keeps its name and its claim, and a new Pod replaces it.
#[tokio::test]
async fn released_pod_keeps_its_claim() {
    for (namespace, reuse) in [("let-go-reused", true), ("let-go", false)] {
        let (fixture, pods) = create_two_with_claims(namespace, reuse).await;
        let (released, uid) = identities(&pods)[0].clone();
        let label = Patch::Merge(json!({ "metadata": { "labels": { "app": "apart" } } }));
        fixture
            .pods()
            .patch(&released, &Default::default(), &label)
            .await
            .unwrap();
        let other = released.clone();
        let replaced =
            move |current: &[&Value]| current.len() == 2 && current.iter().all(|p| name(p) != other);
        fixture.wait_pods("db", "complete again", replaced).await;
        fixture.wait_settled("db").await;
        let pod = fixture.pods().get(&released).await.unwrap();
        assert_eq!(pod.metadata.uid, Some(uid));
        let claim = fixture.api("", "v1", "PersistentVolumeClaim");
        let claim = claim.get(&format!("data-{released}")).await.unwrap();
        assert!(claim.metadata.deletion_timestamp.is_none(), "{claim:?}");
    }
}
