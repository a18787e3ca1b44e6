//! With the manager: admission, the not-ready key, the end of the active label, TTL.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kube::api::PostParams;
use serde_json::{Value, json};
use testbed::cluster::{Node, wait};

use super::bed::{alone, assert_succeeded, statuses};
use super::programs::{self, install};
use super::waits::PATIENCE;
use super::{container, turns};

/// The manager as a process of the node; ends with its webhooks on drop.
struct Manager<'a> {
    node: &'a Node,
    _program: super::manager::Manager,
}

impl<'a> Manager<'a> {
    fn start(node: &'a Node) -> Self {
        install(node, "webhooks");
        let mut program = programs::manager(node, "kruise-manager", 0);
        program.start().unwrap();
        let probe = object("probe", "nobody", json!({}));
        wait::until("admission answers", PATIENCE, || {
            let refused = node
                .plane
                .apply(&probe.to_string())
                .err()
                .map(|error| error.to_string());
            Ok(refused.filter(|words| words.contains("there is no such Pod")))
        })
        .unwrap();
        Self {
            node,
            _program: program,
        }
    }
}

impl Drop for Manager<'_> {
    fn drop(&mut self) {
        for kind in ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"] {
            let _ = self.node.plane.kubectl(&["delete", kind, "--all"]);
        }
    }
}

/// A request as a user writes it.
fn object(name: &str, pod: &str, spec: Value) -> Value {
    let mut object = json!({
        "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"podName": pod, "containers": [{"name": "main"}]},
    });
    json_patch::merge(&mut object["spec"], &spec);
    object
}

#[tokio::test]
async fn a_user_s_request_goes_through_with_four_writes_and_is_cleared_up() {
    let test = alone().await;
    let manager = Manager::start(&test.bed.node);
    let pod = test.pod("web", json!([container("main", 0)]), json!({})).await;
    let closed = |request: &ContainerRecreateRequest| {
        let labels = request.metadata.labels.as_ref();
        let active = labels.is_some_and(|labels| labels.contains_key("crr.apps.kruise.io/active"));
        request
            .status
            .as_ref()
            .is_some_and(|status| status.completion_time.is_some())
            && !active
    };
    let made = async {
        let request = object("plain", "web", json!({"ttlSecondsAfterFinished": 3}));
        let mut request: ContainerRecreateRequest = serde_json::from_value(request).unwrap();
        request.metadata.namespace = Some(test.namespace.clone());
        test.api().create(&PostParams::default(), &request).await.unwrap()
    };
    let watched = test.follow_from("plain", "closed by the manager", closed, made);
    let ((request, versions), made) = watched.await;
    assert_eq!(
        made.metadata.labels.as_ref().unwrap()["crr.apps.kruise.io/pod-uid"],
        pod.metadata.uid.clone().unwrap()
    );
    let status = request.status.unwrap();
    assert_succeeded(&status);
    let new = statuses(&test.get_pod("web").await)["main"].clone();
    assert_eq!(
        status.container_status_snapshot[0].container_id.as_deref(),
        Some(new.id.as_str())
    );
    assert_eq!(
        turns(&versions),
        4,
        "the user's, two of the daemon, one of the manager: {versions:#?}"
    );
    test.until("the request's removal after its TTL", || async {
        let there = test
            .api::<ContainerRecreateRequest>()
            .get_opt("plain")
            .await
            .unwrap();
        there.is_none().then_some(())
    })
    .await;
    drop(manager);
}

#[tokio::test]
async fn the_manager_takes_the_pod_out_of_its_service_before_term() {
    let test = alone().await;
    let manager = Manager::start(&test.bed.node);
    test.service("web").await;
    let gate = json!({"readinessGates": [{"conditionType": "KruisePodReady"}]});
    test.pod("web", json!([container("main", 0)]), gate).await;
    test.until_endpoint("a ready endpoint", true).await;
    let spec = json!({"strategy": {"unreadyGracePeriodSeconds": 10}});
    let mut request: ContainerRecreateRequest =
        serde_json::from_value(object("drained", "web", spec)).unwrap();
    request.metadata.namespace = Some(test.namespace.clone());
    test.api().create(&PostParams::default(), &request).await.unwrap();
    let left = test.until_endpoint("the endpoint's leaving", false).await;
    let term = test.mark("main.term").await;
    assert!(
        left < term,
        "the endpoint left at {left:?}, TERM came at {term:?}"
    );
    assert_succeeded(&test.completed("drained").await.0);
    test.until_endpoint("the endpoint's return", true).await;
    let pod: Pod = test.get_pod("web").await;
    assert_eq!(statuses(&pod)["main"].restarts, 1);
    drop(manager);
}
