//! Containers with a restart policy and restart rules of their own.

use serde_json::{Value, json};
use testbed::cluster::kubernetes::{at_least, release};

use super::container;
use super::fixture::{assert_succeeded, container_statuses, shared_cluster};
use kruise_api::container_recreate_request::ContainerRecreateRequestPhase as Phase;

/// A container that exits with code 0 at TERM, with a rule for some exit codes.
fn container_with_rule(name: &str, policy: &str, action: &str, codes: &[i32]) -> Value {
    let mut container = container(name, 0);
    container["restartPolicy"] = json!(policy);
    container["restartPolicyRules"] =
        json!([{ "action": action, "exitCodes": { "operator": "In", "values": codes } }]);
    container
}

#[tokio::test]
async fn container_without_matching_restart_rule_fails() {
    if !at_least(release().unwrap(), 35) {
        return;
    }
    let test = shared_cluster().await;
    let containers = json!([
        container_with_rule("again", "Never", "Restart", &[0]),
        container_with_rule("ends", "Never", "Restart", &[42]),
        container("plain", 0),
    ]);
    let pod = test.create_pod("web", containers, json!({})).await;
    let request = json!({ "strategy": { "failurePolicy": "Ignore" } });
    test.create_request("ruled", &pod, &["again", "ends", "plain"], request)
        .await;
    let (status, _) = test.wait_completed("ruled").await;
    let phases: Vec<_> = status
        .container_recreate_states
        .iter()
        .map(|s| &s.phase)
        .collect();
    assert_eq!(
        phases,
        [&Phase::Succeeded, &Phase::Failed, &Phase::Succeeded],
        "{status:#?}"
    );
    assert_eq!(
        status.container_recreate_states[1].message.as_deref(),
        Some(
            "it ended with exit code 0 and kubelet does not start it again: restartPolicy is Never, and no rule of \
             restartPolicyRules is for that exit code"
        )
    );
}

#[tokio::test]
async fn restart_all_containers_rule_restarts_each_once() {
    if !at_least(release().unwrap(), 36) {
        return;
    }
    let test = shared_cluster().await;
    let containers = json!([
        container_with_rule("first", "Never", "RestartAllContainers", &[0]),
        container_with_rule("second", "Never", "Restart", &[42]),
        container("other", 0),
    ]);
    let pod_spec = json!({ "restartPolicy": "Never" });
    let pod = test.create_pod("web", containers, pod_spec).await;
    let old = container_statuses(&pod);
    let request = json!({ "strategy": { "orderedRecreate": true } });
    test.create_request("all", &pod, &["first", "second"], request)
        .await;
    let (status, _) = test.wait_completed("all").await;
    assert_succeeded(&status);
    let killed: Vec<bool> = status
        .container_recreate_states
        .iter()
        .map(|s| s.is_killed)
        .collect();
    assert_eq!(
        killed,
        [true, false],
        "kubelet has replaced the second one: {status:#?}"
    );
    let new = container_statuses(&test.get_pod("web").await);
    for name in ["first", "second", "other"] {
        assert_ne!(new[name].id, old[name].id, "{name}");
    }
    // Stopped at the same time, neither waits for a restart that never comes.
    let pod = test.get_pod("web").await;
    test.create_request("both", &pod, &["second", "first"], json!({}))
        .await;
    let (status, _) = test.wait_completed("both").await;
    assert_succeeded(&status);
}
