//! What may be done in place, and what is done where it may not.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::cloneset::CloneSet;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::field::{Field, container, holds, in_place, restarted_once, same_container, same_pod, shared};

fn more_environment(template: &mut Value) {
    template["spec"]["containers"][0]["env"] = json!([{"name": "MORE", "value": "yes"}]);
}

fn uids(pods: &[Pod]) -> Vec<Option<String>> {
    pods.iter().map(ResourceExt::uid).collect()
}

#[tokio::test]
async fn in_place_only_refuses_what_needs_new_pods_and_says_what() {
    let test = shared().await;
    let strategy = in_place(json!({"podUpdatePolicy": "InPlaceOnly"}));
    let containers = json!([container("app", "kruise-test/term:1")]);
    test.set("web", 2, containers, json!({"updateStrategy": strategy}))
        .await;
    let before = test.pods_of("web").await;
    let mut template = test.api::<CloneSet>().get("web").await.unwrap().spec.template;
    more_environment(&mut template);
    let patch = Patch::Merge(json!({"spec": {"template": template}}));
    let sets = test.api::<CloneSet>();
    let refused = sets
        .patch("web", &PatchParams::default(), &patch)
        .await
        .unwrap_err();
    let says = refused.to_string();
    assert!(
        says.contains("containers/0/env: Forbidden") && says.contains("InPlaceOnly"),
        "{says}"
    );
    test.image("web", 0, "kruise-test/term:2").await;
    test.settled("web").await;
    for (before, after) in before.iter().zip(&test.pods_of("web").await) {
        same_pod(before, after);
        restarted_once(before, after, "app");
    }
}

#[tokio::test]
async fn in_place_if_possible_replaces_pods_where_it_is_not() {
    let test = shared().await;
    let containers = json!([container("app", "kruise-test/term:1")]);
    test.set("web", 2, containers, json!({})).await;
    let before = uids(&test.pods_of("web").await);
    test.template("web", more_environment).await;
    test.settled("web").await;
    let after = test.pods_of("web").await;
    assert_eq!(after.len(), 2);
    assert!(uids(&after).iter().all(|uid| !before.contains(uid)));
}

#[tokio::test]
async fn metadata_alone_disturbs_nothing() {
    let test = shared().await;
    let containers = json!([container("app", "kruise-test/term:1")]);
    let metadata =
        json!({"labels": {"app": "web", "tier": "one"}, "annotations": {"note": "one", "gone": "yes"}});
    test.set("web", 1, containers, json!({"template": {"metadata": metadata}}))
        .await;
    let before = test.pod_of("web").await;
    let change = |template: &mut Value| {
        template["metadata"] =
            json!({"labels": {"app": "web", "tier": "two"}, "annotations": {"note": "two", "gone": null}});
    };
    let name = before.name_any();
    let history = test.follow(&name, "its metadata changed", |pod: &Pod| {
        pod.labels()["tier"] == "two"
    });
    let ((_, history), _) = tokio::join!(history, test.template("web", change));
    test.settled("web").await;
    let after = test.pod_of("web").await;
    same_pod(&before, &after);
    same_container(&before, &after, "app");
    assert_eq!(after.annotations()["note"], "two");
    assert!(!after.annotations().contains_key("gone"));
    let ready = |pod: &Pod| holds(pod, "Ready") && holds(pod, "InPlaceUpdateReady");
    assert!(
        history.iter().all(ready) && ready(&after),
        "it was in use all the time"
    );
}
