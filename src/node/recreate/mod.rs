//! Carries out ContainerRecreateRequests for the Pods of this node.
//!
//! In:  the node's requests and Pods (watches), the container runtime.
//! Out: hooks and stops, request status, events on the containers, metrics `recreate_*`, the control API's list.
//! One task per Pod that has requests; it looks, plans, acts and reports whenever something happens. Stops take
//! [slots](super::slots), and each runtime is asked for the containers of 16 Pods at a time. Every decision is in [`plan`].
//!
//! What a crash of the daemon can repeat: a preStop hook runs again where the container had not stopped yet,
//! and TERM is sent to that same container once more. A container that was stopped is known by its ID and
//! never mistaken for its successor.

mod act;
mod machine;
mod observe;
pub mod plan;
mod report;
mod turns;
mod writer;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;
use tokio::sync::Notify;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::Instant;

use super::Context;
use super::pods::PodView;
use crate::api::container_recreate_request::ContainerRecreateRequest;
use crate::api::keys;
use crate::cluster::{Key, Mirror};
use machine::Machine;
use plan::{Now, Phase, Request};
use report::Board;
use turns::Turns;

/// The duty's name in `/healthz`.
const NAME: &str = "recreate";

/// What the Pods' tasks share.
struct Shared {
    ctx: Context,
    requests: Mirror<Request>,
    pods: Mirror<PodView>,
    start: Instant,
    board: Board,
    turns: Turns,
}

impl Shared {
    fn now(&self) -> Now {
        Now {
            api: self.ctx.cluster.clock.now(),
            wall: Timestamp::now(),
            mono: self.start.elapsed(),
        }
    }

    /// The moment of the daemon's own count; at most a day ahead.
    fn instant(&self, mono: Duration) -> Instant {
        self.start + mono.min(self.start.elapsed() + Duration::from_secs(86_400))
    }
}

/// Why the duty ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A watch that never ends did.
    #[error("the watch of {0} ended")]
    WatchEnded(&'static str),
}

/// Runs until shutdown; `pods` is the mirror of this node's Pods.
///
/// # Errors
/// When a watch ends by itself.
pub async fn run(mut ctx: Context, pods: Mirror<PodView>) -> Result<(), Error> {
    // OpenKruise's name of the source of these events, which field selectors of clients may hold.
    ctx.cluster.events = ctx.cluster.events.of("kruise-daemon-crr");
    let api: Api<ContainerRecreateRequest> = Api::all(ctx.cluster.client.clone());
    let selected = ListParams::default().labels(&keys::crr_selector(&ctx.node_name));
    let (requests, watch) = ctx.cluster.mirror(api, selected, observe::request);
    let shutdown = ctx.shutdown.clone();
    let shared = Arc::new(Shared {
        ctx,
        requests,
        pods,
        start: Instant::now(),
        board: Board::default(),
        turns: Turns::default(),
    });
    let mut dispatcher = Dispatcher {
        shared,
        bells: HashMap::new(),
        machines: JoinSet::new(),
        tasks: HashMap::new(),
    };
    tokio::select! {
        () = watch => return Err(Error::WatchEnded("ContainerRecreateRequests")),
        ended = dispatcher.run() => ended?,
        () = shutdown.cancelled() => {}
    }
    // Each machine writes what it must; the process waits for that, within its own limit.
    while dispatcher.machines.join_next().await.is_some() {}
    Ok(())
}

fn pod_of(request: &Request) -> Key {
    Key::namespaced(&request.namespace, &request.pod_name)
}

fn over(request: &Request) -> bool {
    request.deleting || request.status.completed.is_some() || request.status.phase == Phase::Completed
}

/// Gives each Pod that has requests a task, and rings its bell when something about it changes.
struct Dispatcher {
    shared: Arc<Shared>,
    bells: HashMap<Key, Arc<Notify>>,
    machines: JoinSet<Key>,
    /// Whose task each of them is.
    tasks: HashMap<Id, Key>,
}

impl Dispatcher {
    async fn run(&mut self) -> Result<(), Error> {
        self.shared.pods.synced().await;
        self.shared.requests.synced().await;
        let mut requests = self.shared.requests.subscribe();
        let mut pods = self.shared.pods.subscribe();
        let mut runtimes = self.shared.ctx.runtimes.subscribe();
        loop {
            tokio::select! {
                change = requests.recv() => {
                    let Some(change) = change else { return Err(Error::WatchEnded("ContainerRecreateRequests")) };
                    let live = change.new.as_ref().is_some_and(|request| !over(request));
                    if let Some(request) = change.new.or(change.old) {
                        self.wake(pod_of(&request), live);
                    }
                }
                change = pods.recv() => {
                    let Some(change) = change else { return Err(Error::WatchEnded("Pods")) };
                    if let Some(bell) = self.bells.get(&change.key) {
                        bell.notify_one();
                    }
                }
                // The sender lives as long as the context that we hold.
                Ok(()) = runtimes.changed() => self.bells.values().for_each(|bell| bell.notify_one()),
                Some(ended) = self.machines.join_next_with_id() => self.ended(ended),
            }
        }
    }

    /// Rings the Pod's bell; where it has no task it gets one if there is something to do.
    fn wake(&mut self, key: Key, live: bool) {
        if let Some(bell) = self.bells.get(&key) {
            return bell.notify_one();
        }
        if !live {
            return;
        }
        let bell = Arc::new(Notify::new());
        self.bells.insert(key.clone(), Arc::clone(&bell));
        let machine = Machine::new(Arc::clone(&self.shared), key.clone(), bell);
        let task = self.machines.spawn(machine.run());
        self.tasks.insert(task.id(), key);
    }

    fn ended(&mut self, ended: Result<(Id, Key), JoinError>) {
        let id = match &ended {
            Ok((id, _)) => *id,
            Err(error) => {
                tracing::error!(%error, "the task for a Pod stopped unexpectedly; restarted it");
                error.id()
            }
        };
        let Some(key) = self.tasks.remove(&id) else { return };
        self.bells.remove(&key);
        // A request may have come between the machine's last look and its end.
        let open = |request: &Arc<Request>| pod_of(request) == key && !over(request);
        if self.shared.requests.list().iter().any(open) {
            self.wake(key, true);
        }
    }
}
