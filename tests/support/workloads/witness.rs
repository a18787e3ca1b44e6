//! One who watches the Pods of a CloneSet through a whole test, for what must never be.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures::StreamExt;
use kube::api::{Api, DynamicObject};
use kube::runtime::watcher;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::super::pods::{deleting, name, serves, state, uid};
use super::super::waits::events;

/// Every version of the Pods passes by, in the order in which they were written.
pub struct Witness {
    task: JoinHandle<()>,
    seen: Arc<Mutex<Seen>>,
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The fewest Pods that served at a time.
    pub least_serving: usize,
    /// The most Pods that nobody was ending at a time.
    pub most: usize,
    /// UIDs of all Pods that there ever were.
    pub ever: std::collections::BTreeSet<String>,
    /// How many states of the whole were looked at.
    pub looks: usize,
    /// The state at the least: name, whether it serves, state.
    pub at_least: Vec<String>,
}

impl Witness {
    /// Begins to watch; there is a first look when this returns.
    pub async fn new(pods: Api<DynamicObject>, selector: &str) -> Self {
        let seen = Arc::new(Mutex::new(Seen {
            least_serving: usize::MAX,
            ..Seen::default()
        }));
        let (first_tx, first_rx) = tokio::sync::oneshot::channel();
        let config = watcher::Config::default().labels(selector);
        let task = tokio::spawn(follow(pods, config, Arc::clone(&seen), first_tx));
        first_rx.await.expect("the watch begins");
        Self { task, seen }
    }

    /// What was seen up to now.
    pub fn seen(&self) -> Seen {
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn follow(
    pods: Api<DynamicObject>,
    config: watcher::Config,
    seen: Arc<Mutex<Seen>>,
    first: tokio::sync::oneshot::Sender<()>,
) {
    let (mut known, mut listed): (BTreeMap<String, Value>, _) = (BTreeMap::new(), BTreeMap::new());
    let mut first = Some(first);
    let mut events = std::pin::pin!(events(pods, config));
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
            watcher::Event::InitDone => known = std::mem::take(&mut listed),
            watcher::Event::Apply(pod) => {
                known.insert(pod.metadata.name.clone().unwrap_or_default(), json!(pod));
            }
            watcher::Event::Delete(pod) => {
                known.remove(&pod.metadata.name.unwrap_or_default());
            }
        }
        // Before the first Pod there is none to miss.
        if !known.is_empty() || !seen.lock().unwrap().ever.is_empty() {
            seen.lock().unwrap().look(&known);
        }
        if let Some(first) = first.take() {
            let _ = first.send(());
        }
    }
}

impl Seen {
    fn look(&mut self, pods: &BTreeMap<String, Value>) {
        let serving = pods.values().filter(|pod| serves(pod)).count();
        self.looks += 1;
        self.most = self.most.max(pods.values().filter(|pod| !deleting(pod)).count());
        self.ever.extend(pods.values().map(uid));
        if serving < self.least_serving {
            self.least_serving = serving;
            self.at_least = pods
                .values()
                .map(|pod| format!("{}: serves {}, {}", name(pod), serves(pod), state(pod)))
                .collect();
        }
    }
}
