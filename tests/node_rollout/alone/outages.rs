//! Outages of a rollout's dependencies: the API server, the Lease, admission.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::push_unique_image;
use crate::manager::Manager;
use crate::pods::{container_status, lifecycle_state, runs_image, text, uids_by_name};
use crate::programs::manager;
use crate::workloads::{NodeNamespace, TestCluster, exclusive_cluster};

/// Waits until a Pod of `web` is being updated.
async fn wait_for_update_in_progress<G: std::ops::Deref<Target = TestCluster>>(ns: &NodeNamespace<G>) {
    ns.wait_pods("web", "one is being updated", |pods| {
        pods.iter().any(|pod| lifecycle_state(pod) == "Updating")
    })
    .await;
}

#[tokio::test]
async fn rollout_continues_after_api_server_outage() {
    let mut ns = exclusive_cluster().await;
    let before = ns.create_settled_set("web", json!({ "replicas": 3 })).await;
    let monitor = ns.monitor_pods("web").await;
    ns.set_image("web", "kruise-test/term:2").await;
    wait_for_update_in_progress(&ns).await;
    ns.cluster.node.plane.apiserver.restart().unwrap();
    ns.wait_settled("web").await;
    let last_image = push_unique_image(&ns, "back");
    ns.set_image("web", &last_image).await;
    wait_for_update_in_progress(&ns).await;
    ns.cluster.node.plane.apiserver.kill().unwrap();
    // Longer than a Lease is valid.
    tokio::time::sleep(Duration::from_secs(6)).await;
    ns.cluster.node.plane.apiserver.start().unwrap();
    ns.wait_settled("web").await;
    let pods = ns.pods_of("web").await;
    assert_eq!(uids_by_name(pods.values()), before);
    for pod in pods.values() {
        assert!(runs_image(pod, &last_image), "{pod}");
        assert_eq!(
            container_status(pod, "app").restarts,
            2,
            "one restart for each update: {pod}"
        );
    }
    let observed = monitor.observed();
    assert!(
        observed.min_serving >= 2 && observed.max_pods <= 3,
        "{observed:#?}"
    );
}

/// ID of the kubeconfig file's token in the API server's audit log.
fn credential_id(manager: &Manager) -> String {
    let file: Value = serde_json::from_slice(&std::fs::read(&manager.kubeconfig).unwrap()).unwrap();
    let token = std::fs::read_to_string(text(&file["users"][0]["user"]["tokenFile"])).unwrap();
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap();
    let claims: Value = serde_json::from_slice(&claims).unwrap();
    format!("JTI={}", text(&claims["jti"]))
}

/// The manager's writes since then: time, verb, resource and name.
fn writes_by(
    ns: &NodeNamespace<impl std::ops::Deref<Target = TestCluster>>,
    credential: &str,
    since: Timestamp,
) -> Vec<String> {
    let all = ns.cluster.node.plane.audited_writes().unwrap();
    let is_own_write = |write: &&Value| {
        let received: Timestamp = text(&write["requestReceivedTimestamp"]).parse().unwrap();
        write["user"]["extra"]["authentication.kubernetes.io/credential-id"][0] == credential
            && received >= since
    };
    let describe = |write: &Value| {
        let object = &write["objectRef"];
        format!(
            "{} {} {}/{}",
            write["requestReceivedTimestamp"], write["verb"], object["resource"], object["name"]
        )
    };
    all.iter().filter(is_own_write).map(describe).collect()
}

/// Many Pods without a suitable node: they are created as fast as possible, and cost nothing.
async fn create_unschedulable_pods<G: std::ops::Deref<Target = TestCluster>>(
    ns: &NodeNamespace<G>,
    name: &str,
    pods: i32,
) {
    let unschedulable = json!({ "spec": { "nodeSelector": { "no": "node" } } });
    ns.create_set(name, json!({ "replicas": pods, "template": unschedulable }))
        .await;
}

#[tokio::test]
async fn frozen_leader_writes_nothing_after_lease_loss() {
    let ns = exclusive_cluster().await;
    let mut standby = manager(&ns.cluster.node, "kruise-manager-2", 1);
    standby.start().unwrap();
    standby.wait_for_readyz_text("standing by");
    let (first, second) = (credential_id(&ns.cluster.manager), credential_id(&standby));
    let begin = Timestamp::now();
    let before = ns.create_settled_set("web", json!({ "replicas": 3 })).await;
    let monitor = ns.monitor_pods("web").await;
    ns.set_image("web", "kruise-test/term:2").await;
    wait_for_update_in_progress(&ns).await;
    // Freezes it during many writes; it finds their responses when it continues.
    create_unschedulable_pods(&ns, "many", 200).await;
    ns.wait_pods("many", "some of them", |pods| pods.len() >= 20)
        .await;
    ns.cluster.manager.freeze().unwrap();
    standby.wait_for_readyz_text("leading");
    ns.wait_settled("web").await;
    ns.wait_pods("many", "all of them", |pods| pods.len() >= 200)
        .await;
    // There is work when it continues.
    ns.set_image("web", &push_unique_image(&ns, "woken")).await;
    ns.patch_set("many", json!({ "spec": { "replicas": 180 } })).await;
    wait_for_update_in_progress(&ns).await;
    let thawed_at = Timestamp::now();
    ns.cluster.manager.thaw().unwrap();
    ns.cluster.manager.wait_for_readyz_text("standing by");
    ns.wait_settled("web").await;
    let is_complete = |pods: &[&Value]| pods.len() == 180;
    ns.wait_pods("many", "as many as wanted", is_complete).await;

    assert!(
        !writes_by(&ns, &first, begin).is_empty(),
        "its writes cannot be identified"
    );
    assert!(!writes_by(&ns, &second, thawed_at).is_empty(), "it wrote nothing");
    assert_eq!(writes_by(&ns, &first, thawed_at), Vec::<String>::new());
    let pods = ns.pods_of("web").await;
    assert_eq!(uids_by_name(pods.values()), before);
    assert!(
        pods.values()
            .all(|pod| container_status(pod, "app").restarts == 2),
        "{pods:#?}"
    );
    let observed = monitor.observed();
    assert!(
        observed.min_serving >= 2 && observed.max_pods <= 3,
        "{observed:#?}"
    );
    standby.stop().unwrap();
    ns.cluster.manager.wait_for_readyz_text("leading");
}

#[tokio::test]
async fn rollout_without_admission_happens_once() {
    let mut ns = exclusive_cluster().await;
    let before = ns.create_settled_set("web", json!({ "replicas": 2 })).await;
    ns.cluster.manager.stop().unwrap();
    ns.set_image("web", "kruise-test/term:2").await;
    ns.create_set("born", json!({ "replicas": 1 })).await;
    ns.cluster.manager.start().unwrap();
    let (web, born) = (ns.wait_settled("web").await, ns.wait_settled("born").await);
    let pods = ns.pods_of("web").await;
    assert_eq!(uids_by_name(pods.values()), before);
    assert!(
        pods.values().all(|pod| runs_image(pod, "kruise-test/term:2")),
        "{pods:#?}"
    );
    // Admission sets its defaults at the next write, which must not count as a new template.
    let container_ids = || async {
        let (web, born) = (ns.pods_of("web").await, ns.pods_of("born").await);
        web.into_values()
            .chain(born.into_values())
            .map(|pod| container_status(&pod, "app").id)
            .collect::<Vec<_>>()
    };
    let ids_before = container_ids().await;
    for (name, told) in [("web", web), ("born", born)] {
        ns.patch_set(name, json!({ "metadata": { "annotations": { "example.com/note": "x" } }, "spec": { "minReadySeconds": 1 } })).await;
        let after = ns.wait_settled(name).await;
        assert_eq!(after.update_revision, told.update_revision, "{name}");
    }
    assert_eq!(container_ids().await, ids_before);
    let revisions = ns
        .api("apps", "v1", "ControllerRevision")
        .list(&Default::default())
        .await
        .unwrap();
    assert_eq!(revisions.items.len(), 3, "two of one, one of the other");
}
