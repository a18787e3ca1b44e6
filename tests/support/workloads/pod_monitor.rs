//! One who watches the Pods of a CloneSet through a whole test, for what must never be.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures::StreamExt;
use kube::api::{Api, DynamicObject};
use kube::runtime::watcher;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::super::pods::{is_serving, is_terminating, lifecycle_state, name, uid};
use super::super::waits::watch_events;

/// Every version of the Pods passes by, in the order in which they were written.
pub struct PodMonitor {
    task: JoinHandle<()>,
    observed: Arc<Mutex<ObservedPods>>,
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub struct ObservedPods {
    /// The fewest Pods that served at a time.
    pub min_serving: usize,
    /// The most Pods that nobody was ending at a time.
    pub max_pods: usize,
    /// UIDs of all Pods that there ever were.
    pub all_uids: std::collections::BTreeSet<String>,
    /// How many states of the whole were looked at.
    pub snapshots: usize,
    /// The state at the least: name, whether it serves, state.
    pub pods_at_min: Vec<String>,
}

impl PodMonitor {
    /// Begins to watch; there is a first look when this returns.
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

    /// What was seen up to now.
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
        // Before the first Pod there is none to miss.
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
