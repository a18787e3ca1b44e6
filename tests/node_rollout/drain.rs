//! The node is drained during a rollout.

use std::ops::Deref;
use std::process::{Child, Stdio};

use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, NODE_NAME};

use crate::pods::{lifecycle_state, runs_image, uids_by_name};
use crate::workloads::{NodeNamespace, TestCluster, shared_cluster};

/// Only this test's Pods have this label: all others must not be evicted.
const NAME: &str = "drained";

/// How many evictions the budget would allow now.
fn disruptions_allowed(budget: &Value) -> Option<i64> {
    let status = &budget["status"];
    let is_observed = status["observedGeneration"] == budget["metadata"]["generation"];
    status["disruptionsAllowed"].as_i64().filter(|_| is_observed)
}

/// Creates a budget of one Pod, and waits until it counts the Pods.
async fn create_disruption_budget(ns: &NodeNamespace<impl Deref<Target = TestCluster>>) {
    // It reads the number of Pods from the CloneSet's scale subresource.
    let budget = json!({ "metadata": { "name": NAME }, "spec": { "maxUnavailable": 1,
        "selector": { "matchLabels": { "app": NAME } } } });
    let budgets = ns.api("policy", "v1", "PodDisruptionBudget");
    ns.create(&budgets, budget).await;
    let get_budget = || async { json!(budgets.get(NAME).await.unwrap()) };
    let allows_one = || async { disruptions_allowed(&get_budget().await).filter(|allowed| *allowed == 1) };
    ns.poll_until("the budget allows one eviction", allows_one).await;
    let budget_status = get_budget().await["status"].clone();
    assert_eq!(
        (&budget_status["expectedPods"], &budget_status["desiredHealthy"]),
        (&json!(3), &json!(2))
    );
}

/// Uncordons the node on drop, even if the test failed.
struct UncordonOnDrop<'a>(&'a ControlPlane);

impl Drop for UncordonOnDrop<'_> {
    fn drop(&mut self) {
        // If this fails, the next Pod stays unscheduled, and its test reports that.
        let _ = self.0.kubectl(&["uncordon", NODE_NAME]);
    }
}

/// Cordons the node, and waits until the scheduler has observed it: after the outages of other tests its watch of nodes
/// may still be backing off, and then an evicted Pod's replacement would be scheduled all the same.
async fn cordon(ns: &NodeNamespace<impl Deref<Target = TestCluster>>) -> UncordonOnDrop<'_> {
    let plane = &ns.cluster.node.plane;
    let cordon = UncordonOnDrop(plane);
    plane.kubectl(&["cordon", NODE_NAME]).unwrap();
    let pods = ns.pods();
    let probe = || async {
        let spec = json!({ "terminationGracePeriodSeconds": 0,
            "containers": [{ "name": "probe", "image": "kruise-test/term:1" }] });
        ns.create(&pods, json!({ "metadata": { "name": "probe" }, "spec": spec }))
            .await;
        let scheduled = ns
            .poll_until("the scheduler has tried the probe", || async {
                let pod = json!(pods.get("probe").await.unwrap());
                let conditions = pod["status"]["conditions"].as_array();
                let tried = conditions.is_some_and(|all| all.iter().any(|c| c["type"] == "PodScheduled"));
                tried.then(|| pod["spec"]["nodeName"].is_string())
            })
            .await;
        ns.kubectl(&["delete", "pod", "probe", "--force", "--wait"]);
        (!scheduled).then_some(())
    };
    ns.poll_until("the scheduler schedules no Pod to the cordoned node", probe)
        .await;
    cordon
}

/// Starts to drain the node, of these Pods only.
fn start_drain(ns: &NodeNamespace<impl Deref<Target = TestCluster>>) -> Child {
    let mut drain = ns.cluster.node.plane.kubectl_command();
    drain.args([
        "drain",
        NODE_NAME,
        &format!("--pod-selector=app={NAME}"),
        "--force",
        "--timeout=600s",
    ]);
    drain
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The bed has one node: an evicted Pod's replacement is not scheduled until the node is uncordoned.
#[tokio::test]
async fn rollout_completes_during_node_drain() {
    let ns = shared_cluster().await;
    let before = ns.create_settled_set(NAME, json!({ "replicas": 3 })).await;
    create_disruption_budget(&ns).await;
    let monitor = ns.monitor_pods(NAME).await;

    let cordon = cordon(&ns).await;
    ns.set_image(NAME, "kruise-test/term:2").await;
    ns.wait_pods(NAME, "one is being updated", |pods| {
        pods.iter().any(|pod| lifecycle_state(pod) == "Updating")
    })
    .await;
    let drain = start_drain(&ns);
    let unscheduled = |pod: &&Value| pod["spec"]["nodeName"].is_null();
    let pods = ns
        .wait_pods(NAME, "one waits for a node", |pods| {
            pods.len() == 3 && pods.iter().any(unscheduled)
        })
        .await;
    assert_eq!(
        pods.iter().filter(unscheduled).count(),
        1,
        "the budget holds the others: {pods:#?}"
    );
    drop(cordon);
    let drain_output = tokio::task::spawn_blocking(|| drain.wait_with_output().unwrap())
        .await
        .unwrap();
    let drain_log = String::from_utf8_lossy(&drain_output.stderr).into_owned()
        + &String::from_utf8_lossy(&drain_output.stdout);
    assert!(drain_output.status.success(), "{drain_log}");

    ns.wait_settled(NAME).await;
    let pods = ns.wait_pods(NAME, "three", |pods| pods.len() == 3).await;
    assert!(
        pods.iter().all(|pod| runs_image(pod, "kruise-test/term:2")),
        "{pods:#?}"
    );
    let after = uids_by_name(&pods);
    assert!(
        after.values().all(|uid| !before.values().any(|old| old == uid)),
        "all were evicted: {drain_log}"
    );
    let observed = monitor.observed();
    // The eviction and the rollout may take one Pod each, as neither observes the other at that moment.
    assert!(
        observed.min_serving >= 1 && observed.max_pods <= 3,
        "{observed:#?}"
    );
    assert_eq!(
        observed.all_uids.len(),
        6,
        "one new Pod for each that was evicted: {observed:#?}"
    );
}
