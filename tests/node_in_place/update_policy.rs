//! What may be updated in place, and what happens if it may not.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::cloneset::CloneSet;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::clone_set_ops::{
    CloneSetOps, assert_container_untouched, assert_restarted_once, assert_same_pod, condition_is_true,
    container, in_place_strategy, shared_cluster,
};

fn add_env(template: &mut Value) {
    template["spec"]["containers"][0]["env"] = json!([{"name": "MORE", "value": "yes"}]);
}

fn uids(pods: &[Pod]) -> Vec<Option<String>> {
    pods.iter().map(ResourceExt::uid).collect()
}

#[tokio::test]
async fn in_place_only_rejects_changes_that_need_new_pods() {
    let test = shared_cluster().await;
    let strategy = in_place_strategy(json!({"podUpdatePolicy": "InPlaceOnly"}));
    let containers = json!([container("app", "kruise-test/term:1")]);
    test.create_set("web", 2, containers, json!({"updateStrategy": strategy}))
        .await;
    let before = test.pods_of("web").await;
    let mut template = test.api::<CloneSet>().get("web").await.unwrap().spec.template;
    add_env(&mut template);
    let patch = Patch::Merge(json!({"spec": {"template": template}}));
    let sets = test.api::<CloneSet>();
    let error = sets
        .patch("web", &PatchParams::default(), &patch)
        .await
        .unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("containers/0/env: Forbidden") && message.contains("InPlaceOnly"),
        "{message}"
    );
    test.set_image("web", 0, "kruise-test/term:2").await;
    test.wait_settled("web").await;
    for (before, after) in before.iter().zip(&test.pods_of("web").await) {
        assert_same_pod(before, after);
        assert_restarted_once(before, after, "app");
    }
}

#[tokio::test]
async fn in_place_if_possible_falls_back_to_recreate() {
    let test = shared_cluster().await;
    let containers = json!([container("app", "kruise-test/term:1")]);
    test.create_set("web", 2, containers, json!({})).await;
    let before = uids(&test.pods_of("web").await);
    test.update_template("web", add_env).await;
    test.wait_settled("web").await;
    let after = test.pods_of("web").await;
    assert_eq!(after.len(), 2);
    assert!(uids(&after).iter().all(|uid| !before.contains(uid)));
}

#[tokio::test]
async fn metadata_only_update_keeps_pod_ready() {
    let test = shared_cluster().await;
    let containers = json!([container("app", "kruise-test/term:1")]);
    let metadata =
        json!({"labels": {"app": "web", "tier": "one"}, "annotations": {"note": "one", "gone": "yes"}});
    test.create_set("web", 1, containers, json!({"template": {"metadata": metadata}}))
        .await;
    let before = test.single_pod("web").await;
    let change = |template: &mut Value| {
        template["metadata"] =
            json!({"labels": {"app": "web", "tier": "two"}, "annotations": {"note": "two", "gone": null}});
    };
    let name = before.name_any();
    let history = test.watch_until(&name, "its metadata changed", |pod: &Pod| {
        pod.labels()["tier"] == "two"
    });
    let ((_, history), _) = tokio::join!(history, test.update_template("web", change));
    test.wait_settled("web").await;
    let after = test.single_pod("web").await;
    assert_same_pod(&before, &after);
    assert_container_untouched(&before, &after, "app");
    assert_eq!(after.annotations()["note"], "two");
    assert!(!after.annotations().contains_key("gone"));
    let is_in_service =
        |pod: &Pod| condition_is_true(pod, "Ready") && condition_is_true(pod, "InPlaceUpdateReady");
    assert!(
        history.iter().all(is_in_service) && is_in_service(&after),
        "it was in use all the time"
    );
}
