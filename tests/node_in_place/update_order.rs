//! What happens before containers are changed, and in which order they are.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::in_place::InPlaceUpdateState;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::clone_set_ops::{
    CloneSetOps, assert_restarted_once, assert_same_pod, container, container_status, in_place_strategy,
    shared_cluster,
};

#[tokio::test]
async fn pod_leaves_endpoints_before_container_stop() {
    let test = shared_cluster().await;
    let strategy = in_place_strategy(json!({"inPlaceUpdateStrategy": {"gracePeriodSeconds": 12}}));
    let containers = json!([container("app", "kruise-test/term:1")]);
    test.create_service("web").await;
    test.create_set("web", 1, containers, json!({"updateStrategy": strategy}))
        .await;
    test.wait_endpoint("a ready endpoint", true).await;
    let before = test.single_pod("web").await;
    test.set_image("web", 0, "kruise-test/term:2").await;
    let removed_at = test.wait_endpoint("the endpoint's leaving", false).await;
    let during_grace = test.single_pod("web").await;
    assert_eq!(container_image(&during_grace, 0), "kruise-test/term:1");
    let stopped_at = test.wait_for_file("app.term").await;
    assert!(
        removed_at < stopped_at,
        "it left at {removed_at:?}, and was stopped at {stopped_at:?}"
    );
    test.wait_settled("web").await;
    test.wait_endpoint("the endpoint's return", true).await;
    let after = test.single_pod("web").await;
    assert_same_pod(&before, &after);
    assert_restarted_once(&before, &after, "app");
}

fn container_image(pod: &Pod, container: usize) -> String {
    pod.spec.as_ref().unwrap().containers[container]
        .image
        .clone()
        .unwrap()
}

/// A container that is ready a second after its start.
fn container_with_priority(name: &str, priority: &str) -> Value {
    let mut container = container(name, "kruise-test/term:1");
    container["env"] = json!([{"name": "KRUISE_CONTAINER_PRIORITY", "value": priority}]);
    container["readinessProbe"] =
        json!({"exec": {"command": ["true"]}, "initialDelaySeconds": 1, "periodSeconds": 1});
    container
}

#[tokio::test]
async fn launch_priority_orders_start_and_in_place_update() {
    let test = shared_cluster().await;
    let containers = json!([
        container_with_priority("late", "1"),
        container_with_priority("early", "10")
    ]);
    test.create_set("web", 1, containers, json!({})).await;
    let before = test.single_pod("web").await;
    let started_at = |name| {
        let state = container_status(&before, name).state.clone().unwrap();
        state.running.unwrap().started_at.unwrap().0
    };
    // The first is ready a second after its start, and only then may the other start.
    assert!(started_at("late") > started_at("early"), "{:#?}", before.status);
    let completed = "apps.kruise.io/container-launch-priority-completed";
    assert_eq!(before.annotations()[completed], "true");
    let name = before.name_any();
    let has_new_image = |pod: &Pod, at| container_image(pod, at) == "kruise-test/term:2";
    let update_both = |template: &mut Value| {
        for at in 0..2 {
            template["spec"]["containers"][at]["image"] = json!("kruise-test/term:2");
        }
    };
    let history = test.watch_until(&name, "both are changed and ready", |pod: &Pod| {
        let ready = ["late", "early"]
            .iter()
            .all(|name| container_status(pod, name).ready);
        let restarted = container_status(pod, "late").restart_count == 1;
        has_new_image(pod, 0) && has_new_image(pod, 1) && ready && restarted
    });
    let ((after, history), _) = tokio::join!(history, test.update_template("web", update_both));
    let first = history.iter().find(|pod| has_new_image(pod, 1)).unwrap();
    assert!(!has_new_image(first, 0), "both were changed at once");
    for pod in history.iter().filter(|pod| has_new_image(pod, 0)) {
        assert_eq!(container_status(pod, "early").restart_count, 1);
    }
    let second = history.iter().find(|pod| has_new_image(pod, 0)).unwrap();
    assert!(container_status(second, "early").ready);
    test.wait_settled("web").await;
    assert_same_pod(&before, &after);
    for name in ["early", "late"] {
        assert_restarted_once(&before, &after, name);
    }
    assert_eq!(recorded_batches(&after), [["early"], ["late"]]);
}

/// The containers that were changed together, one batch after the other.
fn recorded_batches(pod: &Pod) -> Vec<Vec<String>> {
    let state = &pod.annotations()["apps.kruise.io/inplace-update-state"];
    let state: InPlaceUpdateState = serde_json::from_str(state).unwrap();
    let records = state.container_batches_record.into_iter();
    records.map(|batch| batch.containers).collect()
}
