//! With the manager: admission, the not-ready key, removal of the active label, TTL.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kube::api::PostParams;
use serde_json::{Value, json};
use testbed::cluster::{Node, wait};

use super::fixture::{assert_succeeded, container_statuses, exclusive_cluster};
use super::programs::{self, install};
use super::waits::WAIT_TIMEOUT;
use super::{container, count_steps};

/// The manager as a process of the node; stopped with its webhooks on drop.
pub struct InstalledManager<'a> {
    node: &'a Node,
    _process: super::manager::Manager,
}

impl<'a> InstalledManager<'a> {
    pub fn start(node: &'a Node) -> Self {
        install(node, "webhooks");
        let mut process = programs::manager(node, "kruise-manager", 0);
        process.start().unwrap();
        let probe = request_object("probe", "nobody", json!({}));
        wait::until("admission answers", WAIT_TIMEOUT, || {
            let rejection = node
                .plane
                .apply(&probe.to_string())
                .err()
                .map(|error| error.to_string());
            Ok(rejection.filter(|words| words.contains("there is no such Pod")))
        })
        .unwrap();
        Self {
            node,
            _process: process,
        }
    }
}

impl Drop for InstalledManager<'_> {
    fn drop(&mut self) {
        for kind in ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"] {
            let _ = self.node.plane.kubectl(&["delete", kind, "--all"]);
        }
    }
}

/// A request as a user writes it.
fn request_object(name: &str, pod: &str, spec: Value) -> Value {
    let mut object = json!({
        "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"podName": pod, "containers": [{"name": "main"}]},
    });
    json_patch::merge(&mut object["spec"], &spec);
    object
}

#[tokio::test]
async fn admitted_request_takes_four_writes_and_expires() {
    let test = exclusive_cluster().await;
    let manager = InstalledManager::start(&test.cluster.node);
    let pod = test
        .create_pod("web", json!([container("main", 0)]), json!({}))
        .await;
    let is_closed = |request: &ContainerRecreateRequest| {
        let labels = request.metadata.labels.as_ref();
        let active = labels.is_some_and(|labels| labels.contains_key("crr.apps.kruise.io/active"));
        request
            .status
            .as_ref()
            .is_some_and(|status| status.completion_time.is_some())
            && !active
    };
    let creation = async {
        let request = request_object("plain", "web", json!({"ttlSecondsAfterFinished": 3}));
        let mut request: ContainerRecreateRequest = serde_json::from_value(request).unwrap();
        request.metadata.namespace = Some(test.namespace.clone());
        test.api().create(&PostParams::default(), &request).await.unwrap()
    };
    let watch = test.watch_until_with("plain", "closed by the manager", is_closed, creation);
    let ((request, versions), created) = watch.await;
    assert_eq!(
        created.metadata.labels.as_ref().unwrap()["crr.apps.kruise.io/pod-uid"],
        pod.metadata.uid.clone().unwrap()
    );
    let status = request.status.unwrap();
    assert_succeeded(&status);
    let new = container_statuses(&test.get_pod("web").await)["main"].clone();
    assert_eq!(
        status.container_status_snapshot[0].container_id.as_deref(),
        Some(new.id.as_str())
    );
    assert_eq!(
        count_steps(&versions),
        4,
        "the user's, two of the daemon, one of the manager: {versions:#?}"
    );
    test.poll_until("the request's removal after its TTL", || async {
        let request = test
            .api::<ContainerRecreateRequest>()
            .get_opt("plain")
            .await
            .unwrap();
        request.is_none().then_some(())
    })
    .await;
    drop(manager);
}

#[tokio::test]
async fn manager_marks_pod_unready_before_term() {
    let test = exclusive_cluster().await;
    let manager = InstalledManager::start(&test.cluster.node);
    test.create_service("web").await;
    let gate = json!({"readinessGates": [{"conditionType": "KruisePodReady"}]});
    test.create_pod("web", json!([container("main", 0)]), gate).await;
    test.wait_endpoint("a ready endpoint", true).await;
    let spec = json!({"strategy": {"unreadyGracePeriodSeconds": 10}});
    let mut request: ContainerRecreateRequest =
        serde_json::from_value(request_object("drained", "web", spec)).unwrap();
    request.metadata.namespace = Some(test.namespace.clone());
    test.api().create(&PostParams::default(), &request).await.unwrap();
    let removed_at = test.wait_endpoint("the endpoint's leaving", false).await;
    let term_at = test.wait_for_file("main.term").await;
    assert!(
        removed_at < term_at,
        "the endpoint left at {removed_at:?}, TERM came at {term_at:?}"
    );
    assert_succeeded(&test.wait_completed("drained").await.0);
    test.wait_endpoint("the endpoint's return", true).await;
    let pod: Pod = test.get_pod("web").await;
    assert_eq!(container_statuses(&pod)["main"].restarts, 1);
    drop(manager);
}
