//! Containers with a restart policy and rules of their own.

use serde_json::{Value, json};
use testbed::cluster::kubernetes::{at_least, release};

use super::bed::{assert_succeeded, shared, statuses};
use super::container;
use kruise_api::container_recreate_request::ContainerRecreateRequestPhase as Phase;

/// A container that ends with exit code 0 at TERM, with a rule for some exit codes.
fn ruled(name: &str, policy: &str, action: &str, codes: &[i32]) -> Value {
    let mut ruled = container(name, 0);
    ruled["restartPolicy"] = json!(policy);
    ruled["restartPolicyRules"] =
        json!([{ "action": action, "exitCodes": { "operator": "In", "values": codes } }]);
    ruled
}

#[tokio::test]
async fn a_container_that_no_restart_rule_is_for_fails_and_the_others_come_back() {
    if !at_least(release().unwrap(), 35) {
        return;
    }
    let test = shared().await;
    let containers = json!([
        ruled("again", "Never", "Restart", &[0]),
        ruled("ends", "Never", "Restart", &[42]),
        container("plain", 0),
    ]);
    let pod = test.pod("web", containers, json!({})).await;
    let request = json!({ "strategy": { "failurePolicy": "Ignore" } });
    test.request("ruled", &pod, &["again", "ends", "plain"], request)
        .await;
    let (status, _) = test.completed("ruled").await;
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
async fn restart_all_containers_replaces_each_of_them_once() {
    if !at_least(release().unwrap(), 36) {
        return;
    }
    let test = shared().await;
    let containers = json!([
        ruled("first", "Never", "RestartAllContainers", &[0]),
        ruled("second", "Never", "Restart", &[42]),
        container("other", 0),
    ]);
    let more = json!({ "restartPolicy": "Never" });
    let pod = test.pod("web", containers, more).await;
    let old = statuses(&pod);
    let request = json!({ "strategy": { "orderedRecreate": true } });
    test.request("all", &pod, &["first", "second"], request).await;
    let (status, _) = test.completed("all").await;
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
    let new = statuses(&test.get_pod("web").await);
    for name in ["first", "second", "other"] {
        assert_ne!(new[name].id, old[name].id, "{name}");
    }
    // Stopped at the same time, neither waits for what does not come.
    let pod = test.get_pod("web").await;
    test.request("both", &pod, &["second", "first"], json!({})).await;
    let (status, _) = test.completed("both").await;
    assert_succeeded(&status);
}
