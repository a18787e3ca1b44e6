//! One manager follows another in the middle of a rollout, and one that starts with nothing to do.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures::StreamExt;
use kube::api::{Api, DynamicObject};
use kube::runtime::watcher;
use serde_json::{Value, json};
use testbed::cluster::ControlPlane;
use tokio::task::JoinHandle;

use crate::fixture::{image, names, record, start_plane};
use crate::manager::Manager;
use crate::manager_requests::{self, ManagerRequest};
use crate::namespace::{SIDECAR, SidecarNamespace, runs_sidecar};
use crate::pods;
use crate::waits::watch_events;

/// Observes every version of the Pods, in the order in which they were written.
struct UnavailableMonitor {
    max: Arc<Mutex<usize>>,
    task: JoinHandle<()>,
}

impl UnavailableMonitor {
    fn start(pods: Api<DynamicObject>) -> Self {
        let max = Arc::new(Mutex::new(0));
        let shared = Arc::clone(&max);
        let task = tokio::spawn(async move {
            let mut current: BTreeMap<String, Value> = BTreeMap::new();
            let mut events = std::pin::pin!(watch_events(pods, watcher::Config::default()));
            while let Some(event) = events.next().await {
                if let watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) = event {
                    let pod = json!(pod);
                    current.insert(pods::name(&pod), pod);
                }
                let unavailable = |pod: &&Value| !runs_sidecar(pod, image(pod, SIDECAR));
                let count = current.values().filter(unavailable).count();
                let mut max = shared.lock().unwrap();
                *max = count.max(*max);
            }
        });
        Self { max, task }
    }

    /// The most Pods that were unavailable at any time.
    fn max(&self) -> usize {
        *self.max.lock().unwrap()
    }
}

impl Drop for UnavailableMonitor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Name and resourceVersion of each Pod.
async fn versions(test: &SidecarNamespace) -> BTreeMap<String, Value> {
    let pods = test.pods_of(&test.namespace).await;
    let version = |pod: &Value| (pods::name(pod), pod["metadata"]["resourceVersion"].clone());
    pods.iter().map(version).collect()
}

/// The manager's writes in the whole cluster, without those of events.
fn writes(plane: &ControlPlane) -> Vec<ManagerRequest> {
    let all = plane.audited_writes().unwrap();
    let by_manager = all.iter().filter(|event| manager_requests::is_by_manager(event));
    by_manager
        .map(manager_requests::parse)
        .filter(|((_, resource, _), _)| resource != "events")
        .collect()
}

#[tokio::test]
async fn next_leader_continues_the_rollout_and_writes_nothing_after_it() {
    let plane: &'static ControlPlane = Box::leak(Box::new(start_plane()));
    let mut leader = Manager::on_free_ports(plane, "manager-one");
    leader.start().unwrap();
    leader.wait_for_readyz_text("leading");
    let mut standby = Manager::on_free_ports(plane, "manager-other");
    standby.start().unwrap();
    standby.wait_for_readyz_text("standing by");
    let mut test = SidecarNamespace::new(plane, "leaders").await;
    let strategy =
        |partition: u8| json!({ "updateStrategy": { "maxUnavailable": 2, "partition": partition } });
    test.create_set(strategy(6)).await;
    let pods = test.create_pods(8).await;
    let monitor = UnavailableMonitor::start(test.pods());
    test.set_image("side:2").await;
    test.wait_counts([8, 2, 8, 0]).await;

    // The next leader finds as many unavailable Pods as there may be.
    test.stop_kubelet();
    test.patch_set(strategy(0)).await;
    let unavailable = |pod: &&&Value| !runs_sidecar(pod, image(pod, SIDECAR));
    let as_many_as_may_be = |pods: &[&Value]| pods.iter().filter(unavailable).count() == 2;
    test.wait_pods("leaders", "two are updated and not ready", as_many_as_may_be)
        .await;
    leader.kill().unwrap();
    standby.wait_for_readyz_text("leading");
    let before = versions(&test).await;
    // When it counts a new Pod, it has reconciled the set. The webhook must point to the new leader.
    test.wait_injected(|pod| names(pod).contains(&SIDECAR)).await;
    test.create_pod("new").await;
    test.wait_set("the new Pod", |set| set["status"]["matchedPods"] == 9)
        .await;
    let mut after = versions(&test).await;
    after.remove("new");
    assert_eq!(after, before, "no other Pod may be unavailable");
    test.restart_kubelet();
    test.wait_sidecars("side:2", &pods).await;
    test.wait_counts([9, 9, 9, 0]).await;
    for pod in &pods {
        assert_eq!(test.updates(pod), 1, "{pod}");
    }
    assert_eq!(monitor.max(), 3, "two that are updated, and the new one");

    // Much to report, and nothing to do.
    test.patch_set(json!({ "updateStrategy": { "partition": 3 },
        "containers": [{ "name": SIDECAR, "image": "side:3" }] }))
        .await;
    test.wait_counts([9, 6, 9, 0]).await;
    let set = test.wait_waiting("Partition", "3 of 9 Pods keep").await;
    // The policy is written once more when the set has its revision.
    let revision = &set["status"]["latestRevision"];
    test.wait_injected(|pod| record(pod, "leaders")["controllerRevision"] == *revision)
        .await;
    standby.stop().unwrap();
    let before = writes(plane);
    standby.start().unwrap();
    standby.wait_for_readyz_text("leading");
    let sentinel = SidecarNamespace::new(plane, "sentinel").await;
    sentinel.create_set(json!({})).await;
    let after = writes(plane).split_off(before.len());
    let (sentinel, others): (Vec<_>, Vec<_>) = after
        .into_iter()
        .partition(|((_, _, name), _)| name.contains("sentinel"));
    assert!(!sentinel.is_empty());
    let names: Vec<&str> = others.iter().map(|((_, _, name), _)| name.as_str()).collect();
    assert_eq!(
        names,
        ["kruise-mutating-webhook-configuration"],
        "for the new set; {others:?}"
    );
}
