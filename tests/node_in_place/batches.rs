//! What is done before containers are changed, and in which order they are.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::in_place::InPlaceUpdateState;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::field::{Field, container, in_place, restarted_once, same_pod, shared, status};

#[tokio::test]
async fn a_pod_leaves_its_services_before_its_container_is_stopped() {
    let test = shared().await;
    let strategy = in_place(json!({"inPlaceUpdateStrategy": {"gracePeriodSeconds": 12}}));
    let containers = json!([container("app", "kruise-test/term:1")]);
    test.service("web").await;
    test.set("web", 1, containers, json!({"updateStrategy": strategy}))
        .await;
    test.until_endpoint("a ready endpoint", true).await;
    let before = test.pod_of("web").await;
    test.image("web", 0, "kruise-test/term:2").await;
    let left = test.until_endpoint("the endpoint's leaving", false).await;
    let meanwhile = test.pod_of("web").await;
    assert_eq!(image(&meanwhile, 0), "kruise-test/term:1");
    let stopped = test.mark("app.term").await;
    assert!(
        left < stopped,
        "it left at {left:?}, and was stopped at {stopped:?}"
    );
    test.settled("web").await;
    test.until_endpoint("the endpoint's return", true).await;
    let after = test.pod_of("web").await;
    same_pod(&before, &after);
    restarted_once(&before, &after, "app");
}

fn image(pod: &Pod, container: usize) -> String {
    pod.spec.as_ref().unwrap().containers[container]
        .image
        .clone()
        .unwrap()
}

/// A container that is ready a second after it began.
fn prioritised(name: &str, priority: &str) -> Value {
    let mut container = container(name, "kruise-test/term:1");
    container["env"] = json!([{"name": "KRUISE_CONTAINER_PRIORITY", "value": priority}]);
    container["readinessProbe"] =
        json!({"exec": {"command": ["true"]}, "initialDelaySeconds": 1, "periodSeconds": 1});
    container
}

#[tokio::test]
async fn containers_of_the_highest_launch_priority_are_started_and_changed_first() {
    let test = shared().await;
    let containers = json!([prioritised("late", "1"), prioritised("early", "10")]);
    test.set("web", 1, containers, json!({})).await;
    let before = test.pod_of("web").await;
    let began = |name| {
        let state = status(&before, name).state.clone().unwrap();
        state.running.unwrap().started_at.unwrap().0
    };
    // It is ready a second after it began, and only then the other one may begin.
    assert!(began("late") > began("early"), "{:#?}", before.status);
    let completed = "apps.kruise.io/container-launch-priority-completed";
    assert_eq!(before.annotations()[completed], "true");
    let name = before.name_any();
    let new = |pod: &Pod, at| image(pod, at) == "kruise-test/term:2";
    let both = |template: &mut Value| {
        for at in 0..2 {
            template["spec"]["containers"][at]["image"] = json!("kruise-test/term:2");
        }
    };
    let history = test.follow(&name, "both are changed and ready", |pod: &Pod| {
        let ready = ["late", "early"].iter().all(|name| status(pod, name).ready);
        let restarted = status(pod, "late").restart_count == 1;
        new(pod, 0) && new(pod, 1) && ready && restarted
    });
    let ((after, history), _) = tokio::join!(history, test.template("web", both));
    let first = history.iter().find(|pod| new(pod, 1)).unwrap();
    assert!(!new(first, 0), "both were changed at once");
    for pod in history.iter().filter(|pod| new(pod, 0)) {
        assert_eq!(status(pod, "early").restart_count, 1);
    }
    let second = history.iter().find(|pod| new(pod, 0)).unwrap();
    assert!(status(second, "early").ready);
    test.settled("web").await;
    same_pod(&before, &after);
    for name in ["early", "late"] {
        restarted_once(&before, &after, name);
    }
    assert_eq!(batches(&after), [["early"], ["late"]]);
}

/// The containers that were changed together, one batch after the other.
fn batches(pod: &Pod) -> Vec<Vec<String>> {
    let state = &pod.annotations()["apps.kruise.io/inplace-update-state"];
    let state: InPlaceUpdateState = serde_json::from_str(state).unwrap();
    let records = state.container_batches_record.into_iter();
    records.map(|batch| batch.containers).collect()
}
