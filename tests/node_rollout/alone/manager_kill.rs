//! The manager is killed at random moments while Pods are being updated.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::time::Duration;

use serde_json::{Value, json};

use super::push_unique_image;
use crate::pods::{container_status, lifecycle_state, revision, runs_image, uids_by_name};
use crate::workloads::{NodeNamespace, ObservedPods, TestCluster, exclusive_cluster};
use support::seeded_rng::SeededRng;

/// Maximum time between the start of a Pod's update and a kill: about what an update takes.
const MAX_KILL_DELAY_MS: u64 = 2500;

/// How often the manager is killed: 50 times with `cargo xtask test --soak`.
fn kill_count() -> u32 {
    if std::env::var_os("KRUISE_SOAK").is_some() {
        50
    } else {
        5
    }
}

/// Waits until `count` Pods run the image or are being updated to it, then a random time, and until a Pod is being
/// updated. Returns whether one is: otherwise the rollout has ended.
async fn wait_for_update_in_progress(
    ns: &NodeNamespace<impl Deref<Target = TestCluster>>,
    image: &str,
    started_pods: usize,
    wait: Duration,
) -> bool {
    let has_image = |pod: &&&Value| pod["spec"]["containers"][0]["image"] == image;
    ns.wait_pods("web", "some are being updated", |pods| {
        pods.iter().filter(has_image).count() >= started_pods
    })
    .await;
    // A random delay; it waits for nothing.
    tokio::time::sleep(wait).await;
    let is_updating = |pod: &Value| lifecycle_state(pod) == "Updating";
    let pods = ns
        .wait_pods("web", "one is being updated, or all are", |pods| {
            pods.iter().any(|pod| is_updating(pod)) || pods.iter().all(|pod| runs_image(pod, image))
        })
        .await;
    pods.iter().any(is_updating)
}

/// Waits for the end of the rollout: the same Pods, each restarted once for each of the updates.
async fn assert_rollout_complete(
    ns: &NodeNamespace<impl Deref<Target = TestCluster>>,
    image: &str,
    before: &BTreeMap<String, String>,
    updates: u32,
) {
    let status = ns.wait_settled("web").await;
    ns.wait_settled("new").await;
    let pods = ns.pods_of("web").await;
    assert_eq!(uids_by_name(pods.values()), *before, "update {updates}");
    for pod in pods.values() {
        assert!(runs_image(pod, image), "update {updates}: {pod}");
        assert_eq!(container_status(pod, "app").restarts, i64::from(updates), "{pod}");
        assert_eq!(revision(pod), status.update_revision);
    }
}

fn assert_within_budget(web: &ObservedPods, new: &ObservedPods, kill_number: u32) {
    assert!(
        web.min_serving >= 2 && web.max_pods <= 3,
        "kill {kill_number}, one may be unavailable: {web:#?}"
    );
    assert!(
        new.min_serving >= 2 && new.max_pods <= 3,
        "kill {kill_number}, one may be beyond two: {new:#?}"
    );
}

#[tokio::test]
async fn manager_kill_during_rollout_is_recovered() {
    let mut ns = exclusive_cluster().await;
    let mut rng = SeededRng::new();
    let surge_strategy = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 0, "maxSurge": 1 });
    let set = json!({ "replicas": 2, "updateStrategy": { "rollingUpdate": surge_strategy } });
    ns.create_set("web", json!({ "replicas": 3 })).await;
    ns.create_set("new", set).await;
    ns.wait_settled("web").await;
    ns.wait_settled("new").await;
    let before = ns.pod_uids("web").await;
    let (web, new) = (ns.monitor_pods("web").await, ns.monitor_pods("new").await);
    let (mut updates, kills) = (0, kill_count());
    let mut target_image = "kruise-test/term:1".to_owned();
    let mut kill = 0;
    while kill < kills {
        if ns
            .pods_of("web")
            .await
            .values()
            .all(|pod| runs_image(pod, &target_image))
        {
            assert_rollout_complete(&ns, &target_image, &before, updates).await;
            updates += 1;
            target_image = push_unique_image(&ns, &format!("number-{updates}"));
            ns.set_image("web", &target_image).await;
            ns.set_image("new", &target_image).await;
        }
        let started_pods = usize::try_from(1 + rng.below(3)).unwrap();
        let wait = Duration::from_millis(rng.below(MAX_KILL_DELAY_MS));
        if !wait_for_update_in_progress(&ns, &target_image, started_pods, wait).await {
            continue;
        }
        ns.cluster.manager.kill().unwrap();
        kill += 1;
        let states: Vec<String> = ns.pods_of("web").await.values().map(lifecycle_state).collect();
        println!("kill {kill}: {started_pods} begun, {wait:?} later: {states:?}");
        ns.cluster.manager.start().unwrap();
        ns.cluster.manager.wait_for_readyz_text("leading");
        assert_within_budget(&web.observed(), &new.observed(), kill);
    }
    assert_rollout_complete(&ns, &target_image, &before, updates).await;
    assert_within_budget(&web.observed(), &new.observed(), kills);
    let snapshots = web.observed().snapshots;
    println!("{kills} kills in {updates} rollouts; {snapshots} states looked at");
    let created_pods = new.observed().all_uids.len();
    assert_eq!(
        created_pods,
        2 + 2 * usize::try_from(updates).unwrap(),
        "one new Pod for each update"
    );
}
