//! Observes the Pods of a CloneSet during a whole test, for states that must never occur.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures::StreamExt;
use kube::api::{Api, DynamicObject};
use kube::runtime::watcher;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::super::pods::{is_serving, is_terminating, lifecycle_state, name, uid};
use super::super::waits::watch_events;

/// Observes every version of the Pods, in the order in which they were written.
pub struct PodMonitor {
    task: JoinHandle<()>,
    observed: Arc<Mutex<ObservedPods>>,
}

/// What was observed.
#[derive(Clone, Debug, Default)]
pub struct ObservedPods {
    /// Minimum number of serving Pods at any time.
    pub min_serving: usize,
    /// Maximum number of Pods that were not terminating at any time.
    pub max_pods: usize,
    /// UIDs of all Pods that ever existed.
    pub all_uids: std::collections::BTreeSet<String>,
    /// Number of observed states.
    pub snapshots: usize,
    /// The state at the minimum: name, whether it serves, lifecycle state.
    pub pods_at_min: Vec<String>,
}

impl PodMonitor {
    /// Starts to observe; the initial list is complete when this returns.
    pub async fn new(pods: Api<DynamicObject>, selector: &str) -> Self {
        let observed = Arc::new(Mutex::new(ObservedPods {
            min_serving: usize::MAX,
            ..ObservedPods::default()
        }));
        let (synced_tx, synced_rx) = tokio::sync::oneshot::channel();
        let config = watcher::Config::default().labels(selector);
        let task = tokio::spawn(watch_pods(pods, config, Arc::clone(&observed), synced_tx));
        synced_rx.await.expect("the watch begins");
        Self { task, observed }
    }

    /// What was observed so far.
    pub fn observed(&self) -> ObservedPods {
        self.observed.lock().unwrap().clone()
    }
}

impl Drop for PodMonitor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn watch_pods(
    pods: Api<DynamicObject>,
    config: watcher::Config,
    observed: Arc<Mutex<ObservedPods>>,
    synced: tokio::sync::oneshot::Sender<()>,
) {
    let (mut current, mut listed): (BTreeMap<String, Value>, _) = (BTreeMap::new(), BTreeMap::new());
    let mut synced = Some(synced);
    let mut events = std::pin::pin!(watch_events(pods, config));
    while let Some(event) = events.next().await {
        match event {
            watcher::Event::Init => {
                listed.clear();
                continue;
            }
            watcher::Event::InitApply(pod) => {
                listed.insert(pod.metadata.name.clone().unwrap_or_default(), json!(pod));
                continue;
            }
            watcher::Event::InitDone => current = std::mem::take(&mut listed),
            watcher::Event::Apply(pod) => {
                current.insert(pod.metadata.name.clone().unwrap_or_default(), json!(pod));
            }
            watcher::Event::Delete(pod) => {
                current.remove(&pod.metadata.name.unwrap_or_default());
            }
        }
        // Before the first Pod none can be missing.
        if !current.is_empty() || !observed.lock().unwrap().all_uids.is_empty() {
            observed.lock().unwrap().record(&current);
        }
        if let Some(first) = synced.take() {
            let _ = first.send(());
        }
    }
}

impl ObservedPods {
    fn record(&mut self, pods: &BTreeMap<String, Value>) {
        let serving = pods.values().filter(|pod| is_serving(pod)).count();
        self.snapshots += 1;
        self.max_pods = self
            .max_pods
            .max(pods.values().filter(|pod| !is_terminating(pod)).count());
        self.all_uids.extend(pods.values().map(uid));
        if serving < self.min_serving {
            self.min_serving = serving;
            self.pods_at_min = pods
                .values()
                .map(|pod| {
                    format!(
                        "{}: serves {}, {}",
                        name(pod),
                        is_serving(pod),
                        lifecycle_state(pod)
                    )
                })
                .collect();
        }
    }
}
