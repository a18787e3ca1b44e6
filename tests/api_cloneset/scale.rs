//! How many Pods there are, which of them go, and what stays of them.

use kube::api::{Patch, PostParams};
use serde_json::{Value, json};

use crate::field::{Field, identities};
use crate::kubelet::NO_NODE;
use crate::world::{until, world};

fn name(pod: &Value) -> String {
    pod["metadata"]["name"].as_str().unwrap().to_owned()
}

fn claims() -> Value {
    json!({ "volumeClaimTemplates": [{
        "metadata": { "name": "data" },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
    }]})
}

/// A CloneSet `db` of two Pods with a claim each, and the Pods.
async fn two_with_claims(namespace: &str, reuse: bool) -> (Field, Vec<Value>) {
    let field = Field::new(world(), namespace).await;
    let mut spec = claims();
    spec["replicas"] = json!(2);
    spec["scaleStrategy"] = json!({ "enablePVCReuse": reuse });
    field.set("db", spec).await;
    field.settled("db").await;
    let pods = field.pods_of("db").await;
    (field, pods)
}

#[tokio::test]
async fn claims_stay_for_the_next_pod_where_that_is_asked() {
    for (namespace, reuse) in [("claims-reused", true), ("claims-not-reused", false)] {
        let (field, pods) = two_with_claims(namespace, reuse).await;
        let before = identities(&field.claims().await);
        assert_eq!(before.len(), 2);
        let victim = name(&pods[0]);
        field.pods().delete(&victim, &Default::default()).await.unwrap();
        let uid = identities(&pods)[0].1.clone();
        let replaced =
            move |now: &[&Value]| now.len() == 2 && now.iter().all(|p| p["metadata"]["uid"] != uid);
        let pods = field.until_pods("db", "complete again", replaced).await;
        field.settled("db").await;
        let names: Vec<String> = pods.iter().map(name).collect();
        assert_eq!(names.contains(&victim), reuse, "the id goes with the claim");
        let after = identities(&field.claims().await);
        let kept = before.iter().filter(|claim| after.contains(claim)).count();
        assert_eq!(kept, if reuse { 2 } else { 1 }, "{before:?} {after:?}");
    }
}

#[tokio::test]
async fn pods_that_somebody_names_are_replaced() {
    let field = Field::new(world(), "named").await;
    field.set("web", json!({})).await;
    field.settled("web").await;
    let pods = field.pods_of("web").await;
    let (first, second) = (name(&pods[0]), name(&pods[1]));
    let label = json!({ "metadata": { "labels": { "apps.kruise.io/specified-delete": "true" } } });
    field
        .pods()
        .patch(&first, &Default::default(), &Patch::Merge(label))
        .await
        .unwrap();
    let list = json!({ "spec": { "replicas": 2, "scaleStrategy": { "podsToDelete": [second] } } });
    field.edit("web", list).await;
    let gone =
        |pods: &[&Value]| pods.len() == 2 && pods.iter().all(|p| ![&first, &second].contains(&&name(p)));
    let left = field.until_pods("web", "without those two", gone).await;
    assert!(left.iter().any(|p| name(p) == name(&pods[2])), "the third stays");
    let empty = |set: &kruise_api::cloneset::CloneSet| {
        let scale = set.spec.scale_strategy.as_ref();
        scale.is_none_or(|s| s.pods_to_delete.is_empty())
    };
    until(&field.sets(), "web", "its list is empty", empty).await;
    field.event("SuccessfulDelete", "web").await;
}

#[tokio::test]
async fn a_hook_holds_a_pod_before_its_deletion_and_gives_it_back() {
    let field = Field::new(world(), "held").await;
    let hook = json!({ "finalizersHandler": ["example.com/busy"] });
    let mut spec = json!({ "replicas": 1, "lifecycle": { "preDelete": hook } });
    spec["template"] = json!({ "metadata": { "finalizers": ["example.com/busy"] } });
    field.set("web", spec).await;
    field.settled("web").await;
    let before = identities(&field.pods_of("web").await);
    let held = |pods: &[&Value]| {
        pods.iter().all(|p| {
            p["metadata"]["labels"]["lifecycle.apps.kruise.io/state"] == "PreparingDelete"
                && p["metadata"]["deletionTimestamp"].is_null()
        })
    };
    field.edit("web", json!({ "spec": { "replicas": 0 } })).await;
    let pods = field.until_pods("web", "held by the hook", held).await;
    assert_eq!(identities(&pods), before);
    field.edit("web", json!({ "spec": { "replicas": 1 } })).await;
    field.settled("web").await;
    assert_eq!(identities(&field.pods_of("web").await), before, "kept after all");

    field.edit("web", json!({ "spec": { "replicas": 0 } })).await;
    field.until_pods("web", "held by the hook", held).await;
    let free = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    field
        .pods()
        .patch(&before[0].0, &Default::default(), &free)
        .await
        .unwrap();
    field.until_pods("web", "gone", |pods| pods.is_empty()).await;
}

#[tokio::test]
async fn a_new_cloneset_adopts_and_counts_orphans() {
    let field = Field::new(world(), "orphans").await;
    let pod = json!({ "metadata": { "name": "stray", "labels": { "app": "web" } },
        "spec": { "terminationGracePeriodSeconds": 0, "containers": [{ "name": "app", "image": "example.com/app:1" }] } });
    let pod = serde_json::from_value(pod).unwrap();
    let pod = field.pods().create(&PostParams::default(), &pod).await.unwrap();
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": "100%", "paused": true });
    field
        .set("web", json!({ "updateStrategy": { "rollingUpdate": rolling } }))
        .await;
    let all = |set: &kruise_api::cloneset::CloneSet| {
        let status = set.status.as_ref();
        status.is_some_and(|s| s.replicas == 3 && s.updated_replicas == 2)
    };
    field.status("web", "three Pods, two of them made", all).await;
    let adopted = field.pods().get("stray").await.unwrap();
    assert_eq!(adopted.metadata.uid, pod.metadata.uid);
    assert_eq!(adopted.metadata.owner_references.unwrap()[0].name, "web");
    assert_eq!(field.pods_of("web").await.len(), 3);
    let event = field.event("SuccessfulAdopt", "web").await;
    assert_eq!(event["message"], "adopted pod stray");

    // Without our gate and revision it cannot be updated where it is.
    field
        .edit(
            "web",
            json!({ "spec": { "updateStrategy": { "rollingUpdate": { "paused": false } } } }),
        )
        .await;
    field.settled("web").await;
    assert!(field.pods_of("web").await.iter().all(|pod| name(pod) != "stray"));
}

#[tokio::test]
async fn what_stops_pods_from_being_made_is_told_until_it_is_over() {
    let field = Field::new(world(), "refused").await;
    let template = json!({ "spec": { "serviceAccountName": "later" } });
    field
        .set("web", json!({ "replicas": 100, "template": template }))
        .await;
    let failed = |set: &kruise_api::cloneset::CloneSet| {
        let conditions = set.status.as_ref().map(|s| s.conditions.clone());
        conditions
            .into_iter()
            .flatten()
            .find(|c| c.type_ == "FailedScale")
    };
    let said = |set: &kruise_api::cloneset::CloneSet| {
        failed(set).is_some_and(|c| c.status == "True" && c.message.contains("later"))
    };
    until(&field.sets(), "web", "says why", said).await;
    field.event("FailedCreate", "web").await;
    let account = serde_json::from_value(json!({ "metadata": { "name": "later" } })).unwrap();
    let accounts = field.api("", "v1", "ServiceAccount");
    accounts.create(&PostParams::default(), &account).await.unwrap();
    let set = field.settled("web").await;
    assert_eq!(failed(&set), None);
    assert_eq!(field.pods_of("web").await.len(), 100);
}

#[tokio::test]
async fn pods_are_made_as_fast_as_they_become_available() {
    let field = Field::new(world(), "stream").await;
    let mut spec = json!({ "replicas": 4, "scaleStrategy": { "maxUnavailable": 2 } });
    spec["template"] = json!({ "spec": { "nodeSelector": { (NO_NODE): "true" } } });
    field.set("web", spec).await;
    field.event("ScaleUpLimited", "web").await;
    let two = |set: &kruise_api::cloneset::CloneSet| set.status.as_ref().is_some_and(|s| s.replicas == 2);
    field.status("web", "two Pods, for none is available", two).await;
    field
        .edit(
            "web",
            json!({ "spec": { "scaleStrategy": { "maxUnavailable": null } } }),
        )
        .await;
    field.until_pods("web", "all there", |pods| pods.len() == 4).await;
}

/// Somebody takes a Pod out to look at it: it keeps its name and its claim, and another takes its place.
#[tokio::test]
async fn a_pod_that_is_let_go_keeps_its_claim() {
    for (namespace, reuse) in [("let-go-reused", true), ("let-go", false)] {
        let (field, pods) = two_with_claims(namespace, reuse).await;
        let (apart, uid) = identities(&pods)[0].clone();
        let label = Patch::Merge(json!({ "metadata": { "labels": { "app": "apart" } } }));
        field
            .pods()
            .patch(&apart, &Default::default(), &label)
            .await
            .unwrap();
        let other = apart.clone();
        let replaced = move |now: &[&Value]| now.len() == 2 && now.iter().all(|p| name(p) != other);
        field.until_pods("db", "complete again", replaced).await;
        field.settled("db").await;
        let pod = field.pods().get(&apart).await.unwrap();
        assert_eq!(pod.metadata.uid, Some(uid));
        let claim = field.api("", "v1", "PersistentVolumeClaim");
        let claim = claim.get(&format!("data-{apart}")).await.unwrap();
        assert!(claim.metadata.deletion_timestamp.is_none(), "{claim:?}");
    }
}
