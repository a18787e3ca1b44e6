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
use kruise_api::container_recreate_request::{ContainerRecreateRequest, ContainerRecreateRequestPhase};
use kruise_api::keys;
use kruise_cluster::{Key, Mirror};
use machine::Machine;
use plan::{Now, Request};
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
    request.deleting
        || request.status.completion_time.is_some()
        || request.status.phase == ContainerRecreateRequestPhase::Completed
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::sync::Mutex;

    use kube::client::Body;
    use tokio::sync::mpsc;

    use super::act::{Job, What};
    use super::plan::{Act, Begin, Urgency, Write};
    use super::writer::Writer;
    use super::*;
    use kruise_api::container_recreate_request::ContainerRecreateRequestStatus;
    use kruise_ops::panics::injected::panic_at;

    /// A node with one Pod and one request for it, whose runtime panics; and the bodies of what is written.
    fn panicking() -> (Arc<Shared>, Arc<Mutex<Vec<String>>>) {
        answered(500)
    }

    /// The same, of an API server with that answer to everything.
    fn answered(code: u16) -> (Arc<Shared>, Arc<Mutex<Vec<String>>>) {
        let written = Arc::new(Mutex::new(Vec::new()));
        let writes = Arc::clone(&written);
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let writes = Arc::clone(&writes);
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                writes
                    .lock()
                    .unwrap()
                    .push(String::from_utf8_lossy(&body).into_owned());
                http::Response::builder().status(code).body(Body::empty())
            }
        });
        let key = Key::namespaced("team", "web");
        let pod = PodView {
            namespace: "team".to_owned(),
            name: "web".to_owned(),
            ..PodView::default()
        };
        let request = Request {
            uid: "panicking".to_owned(),
            namespace: "team".to_owned(),
            name: "again".to_owned(),
            pod_name: "web".to_owned(),
            ..Request::default()
        };
        let shared = Shared {
            ctx: Context::of(kube::Client::new(service, "default")),
            requests: Mirror::of([(Key::namespaced("team", "again"), request)]),
            pods: Mirror::of([(key, pod)]),
            start: Instant::now(),
            board: Board::default(),
            turns: Turns::default(),
        };
        (Arc::new(shared), written)
    }

    #[tokio::test(start_paused = true)]
    async fn a_round_that_panics_is_made_again_after_growing_pauses() {
        let (shared, _) = panicking();
        let key = Key::namespaced("team", "web");
        let rounds = panic_at(NAME, "team/web");
        let machine = Machine::new(Arc::clone(&shared), key.clone(), Arc::default());
        let machine = tokio::spawn(machine.run());
        rounds.happened(3).await;
        assert!(shared.start.elapsed() >= Duration::from_secs(3));
        shared.ctx.shutdown.cancel();
        assert_eq!(machine.await.unwrap(), key);
    }

    #[tokio::test]
    async fn a_stop_that_panics_is_one_that_failed_and_is_tried_again() {
        let (shared, _) = panicking();
        let (news_tx, mut news) = mpsc::unbounded_channel();
        let job = Job {
            runtime: shared.ctx.runtimes.first().unwrap(),
            pod: shared.pods.list().remove(0),
            begin: Begin {
                key: plan::Key {
                    request: "panicking".to_owned(),
                    container: "main".to_owned(),
                },
                request: "again".to_owned(),
                target: "id".to_owned(),
                first: false,
                until: None,
                act: Act {
                    hook: None,
                    grace: Duration::from_secs(1),
                },
            },
            news_tx,
            shared: Arc::clone(&shared),
        };
        act::run(job, shared.ctx.stops.try_take("team")).await;
        let mut last = None;
        while let Ok(news) = news.try_recv() {
            last = Some(news.what);
        }
        let Some(What::Failed { error, spent }) = last else {
            panic!("{last:?}");
        };
        assert_eq!(
            (error.to_string().as_str(), error.retryable(), spent),
            ("panic: stop_container", true, Duration::ZERO)
        );
        assert!(shared.ctx.stops.try_take("team").is_some());
    }

    /// An API server that has just started may know no role yet: whoever waits for a daemon's first word gives it up soon.
    #[tokio::test(start_paused = true)]
    async fn a_status_that_is_forbidden_is_written_again_within_seconds() {
        for (code, seconds) in [(401, 6), (403, 6), (422, 61)] {
            let (shared, written) = answered(code);
            let requests = shared.requests.list();
            let write = Write {
                request: "panicking".to_owned(),
                status: ContainerRecreateRequestStatus::default(),
                waits: None,
                urgency: Urgency::Now,
            };
            let mut writer = Writer::new(Arc::clone(&shared));
            writer.want(&[write], &requests, shared.now());
            for _ in 0..8 {
                writer.start(shared.now());
                assert!(writer.finished().await.is_none());
                let again = writer.start(shared.now()).unwrap();
                let pause = again.saturating_sub(shared.now().mono);
                let refused = pause >= Duration::from_secs(59);
                assert_eq!(refused, code == 422, "{code}: {pause:?}");
                assert!(pause < Duration::from_secs(seconds), "{code}: {pause:?}");
                tokio::time::sleep_until(shared.instant(again)).await;
            }
            assert_eq!(written.lock().unwrap().len(), 8, "{code}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_while_a_status_is_written_is_a_write_that_failed() {
        let (shared, written) = panicking();
        let requests = shared.requests.list();
        let status = ContainerRecreateRequestStatus {
            message: Some("written after all".to_owned()),
            ..ContainerRecreateRequestStatus::default()
        };
        let write = Write {
            request: "panicking".to_owned(),
            status,
            waits: None,
            urgency: Urgency::Now,
        };
        let mut writer = Writer::new(Arc::clone(&shared));
        let panics = panic_at(NAME, "panicking");
        writer.want(&[write], &requests, shared.now());
        writer.start(shared.now());
        assert!(writer.finished().await.is_none());
        assert_eq!(panics.times(), 1);
        drop(panics);
        assert!(written.lock().unwrap().is_empty());
        let again = writer.start(shared.now()).unwrap();
        assert!(again > shared.now().mono, "it is not repeated at once");
        tokio::time::sleep_until(shared.instant(again)).await;
        writer.start(shared.now());
        assert!(writer.finished().await.is_none());
        let written = written.lock().unwrap();
        assert!(
            written.iter().any(|body| body.contains("written after all")),
            "{written:?}"
        );
    }
}
