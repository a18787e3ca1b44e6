//! The node is drained in the midst of a rollout.

use std::ops::Deref;
use std::process::{Child, Stdio};

use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, NODE_NAME};

use crate::pods::{identities, runs, state};
use crate::workloads::{Bed, Space, shared};

/// No other test's Pods bear it: those are to stay, and wait a little when they are new.
const NAME: &str = "drained";

/// How many evictions the budget would allow now.
fn allowed(budget: &Value) -> Option<i64> {
    let status = &budget["status"];
    let seen = status["observedGeneration"] == budget["metadata"]["generation"];
    status["disruptionsAllowed"].as_i64().filter(|_| seen)
}

/// Makes a budget of one Pod, and waits until it counts them.
async fn guard(space: &Space<impl Deref<Target = Bed>>) {
    // It counts by the CloneSet's scale subresource.
    let budget = json!({ "metadata": { "name": NAME }, "spec": { "maxUnavailable": 1,
        "selector": { "matchLabels": { "app": NAME } } } });
    let budgets = space.api("policy", "v1", "PodDisruptionBudget");
    space.create(&budgets, budget).await;
    let look = || async { json!(budgets.get(NAME).await.unwrap()) };
    let one = || async { allowed(&look().await).filter(|allowed| *allowed == 1) };
    space.until("the budget allows one eviction", one).await;
    let counts = look().await["status"].clone();
    assert_eq!(
        (&counts["expectedPods"], &counts["desiredHealthy"]),
        (&json!(3), &json!(2))
    );
}

/// The node takes Pods again when this goes, whatever became of the test.
struct Cordon<'a>(&'a ControlPlane);

impl Drop for Cordon<'_> {
    fn drop(&mut self) {
        // What fails here is seen by the next Pod that waits for a node.
        let _ = self.0.kubectl(&["uncordon", NODE_NAME]);
    }
}

/// Begins to drain the node, of these Pods alone.
fn begin(space: &Space<impl Deref<Target = Bed>>) -> Child {
    let mut drain = space.bed.node.plane.kubectl_command();
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

/// The one node of the bed: what is evicted has no place until the node takes Pods again.
#[tokio::test]
async fn a_rollout_ends_on_a_node_that_is_drained_meanwhile() {
    let space = shared().await;
    let before = space.settled_set(NAME, json!({ "replicas": 3 })).await;
    guard(&space).await;
    let witness = space.witness(NAME).await;

    space.image(NAME, "kruise-test/term:2").await;
    space
        .until_pods(NAME, "one is being updated", |pods| {
            pods.iter().any(|pod| state(pod) == "Updating")
        })
        .await;
    let cordon = Cordon(&space.bed.node.plane);
    let drain = begin(&space);
    let nowhere = |pod: &&Value| pod["spec"]["nodeName"].is_null();
    let pods = space
        .until_pods(NAME, "one waits for a node", |pods| {
            pods.len() == 3 && pods.iter().any(nowhere)
        })
        .await;
    assert_eq!(
        pods.iter().filter(nowhere).count(),
        1,
        "the budget holds the others: {pods:#?}"
    );
    drop(cordon);
    let ended = tokio::task::spawn_blocking(|| drain.wait_with_output().unwrap())
        .await
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned() + &String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{said}");

    space.settled(NAME).await;
    let pods = space.until_pods(NAME, "three", |pods| pods.len() == 3).await;
    assert!(
        pods.iter().all(|pod| runs(pod, "kruise-test/term:2")),
        "{pods:#?}"
    );
    let after = identities(&pods);
    assert!(
        after.values().all(|uid| !before.values().any(|old| old == uid)),
        "all were evicted: {said}"
    );
    let seen = witness.seen();
    // The eviction and the rollout may each take one, as neither knows of the other in that moment.
    assert!(seen.least_serving >= 1 && seen.most <= 3, "{seen:#?}");
    assert_eq!(
        seen.ever.len(),
        6,
        "one new Pod for each that was evicted: {seen:#?}"
    );
}
