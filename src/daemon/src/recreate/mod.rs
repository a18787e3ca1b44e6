//! Executes ContainerRecreateRequests for the Pods of this node.
//!
//! In:  the node's requests and Pods (watches), the container runtime.
//! Out: hooks and stops, request status, events on the containers, metrics `recreate_*`, the control API's list.
//! One reconcile of a Pod at a time, whenever something about it changes. Stops take [slots](super::stop_slots), and each
//! runtime lists the containers of at most 16 Pods at a time. Every decision is in [`plan`].
//!
//! What a crash of the daemon can repeat: a preStop hook runs again if the container had not stopped yet, and TERM is
//! sent to that same container again. A stopped container is identified by its ID and never mistaken for its successor.

mod act;
mod context;
mod observe;
pub mod plan;
mod pod_reconciler;
mod report;
mod runtime_queue;
mod status_writer;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::join_all;
use kube::Api;
use kube::api::ListParams;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Context;
use super::pods::NodePod;
use context::{NAME, RecreateContext};
use kruise_api::container_recreate_request::{ContainerRecreateRequest, MAX_REQUEST_BYTES};
use kruise_api::keys;
use kruise_cluster::queue::{self, ReconcileError, RequeueAfter};
use kruise_cluster::{Bounded, Change, Key, Store};
use kruise_ops::panics::catch_panic;
use plan::RecreateRequest;
use pod_reconciler::{PodReconciler, ReconcileResult};
use runtime_queue::RuntimeQueue;

/// Pods that are reconciled at once: more than a node has, because each waits for its turn at the runtime.
const WORKERS: usize = 1000;

/// The queue runs one reconcile of a Pod at a time; the lock is for the last status at shutdown.
type SharedReconciler = tokio::sync::Mutex<PodReconciler>;

/// The Pods that have requests.
struct Reconcilers {
    shared: Arc<RecreateContext>,
    by_pod: Mutex<HashMap<Key, Arc<SharedReconciler>>>,
}

impl Reconcilers {
    fn new(shared: Arc<RecreateContext>) -> Self {
        Self {
            shared,
            by_pod: Mutex::default(),
        }
    }

    fn by_pod(&self) -> MutexGuard<'_, HashMap<Key, Arc<SharedReconciler>>> {
        self.by_pod.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues a Pod when its requests change, and one with requests when it changes itself, or a runtime appears or
    /// disappears.
    async fn enqueue_changes(&self) -> Error {
        let shared = &self.shared;
        shared.pods.wait_until_synced().await;
        shared.requests.wait_until_synced().await;
        let mut requests = shared.requests.subscribe();
        let mut pods = shared.pods.subscribe();
        let mut runtimes = shared.ctx.runtimes.subscribe();
        loop {
            tokio::select! {
                change = requests.recv() => {
                    let Some(change) = change else { return Error::WatchEnded("ContainerRecreateRequests") };
                    for pod in changed_pods(change) {
                        shared.enqueue(pod);
                    }
                }
                change = pods.recv() => {
                    let Some(change) = change else { return Error::WatchEnded("Pods") };
                    let has_requests = self.by_pod().contains_key(&change.key);
                    if has_requests {
                        shared.enqueue(change.key);
                    }
                }
                // The sender lives as long as the context that we own.
                Ok(()) = runtimes.changed() => self.by_pod().keys().cloned().for_each(|pod| shared.enqueue(pod)),
            }
        }
    }

    /// Reconciles a Pod; returns when to do it again.
    async fn reconcile(self: Arc<Self>, key: Key) -> RequeueAfter {
        let new = || {
            let reconciler = PodReconciler::new(Arc::clone(&self.shared), key.clone());
            Arc::new(SharedReconciler::new(reconciler))
        };
        let reconciler = Arc::clone(self.by_pod().entry(key.clone()).or_insert_with(new));
        let result = reconciler.lock().await.reconcile().await;
        match result {
            ReconcileResult::RequeueAt(at) => at.map(|at| at.saturating_sub(self.shared.now().mono)),
            ReconcileResult::Done => {
                self.by_pod().remove(&key);
                None
            }
        }
    }

    /// Writes the last status of each Pod; the process waits for that, up to its own shutdown timeout.
    async fn flush_statuses(&self) {
        let last: Vec<_> = self.by_pod().drain().collect();
        let flushes = last.into_iter().map(|(pod, reconciler)| async move {
            let flush = async { reconciler.lock().await.flush_status().await };
            // A panic is logged, and does not keep those of other Pods from being written.
            let _ = catch_panic(NAME, pod, flush).await;
        });
        join_all(flushes).await;
    }
}

/// The Pods whose requests have changed: a request that has replaced one of its name may be for another Pod.
fn changed_pods(change: Change<RecreateRequest>) -> BTreeSet<Key> {
    let requests = [change.old, change.new].into_iter().flatten();
    requests.map(|request| request.pod_key()).collect()
}

/// Why the controller ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A watch ended, although it never should.
    #[error("the watch of {0} ended")]
    WatchEnded(&'static str),
}

/// Runs until shutdown; `pods` is the store of this node's Pods.
///
/// # Errors
/// When a watch ends.
pub async fn run(mut ctx: Context, pods: Store<NodePod>) -> Result<(), Error> {
    // OpenKruise's source component of these events; clients may use it in field selectors.
    ctx.cluster.events = ctx.cluster.events.with_component("kruise-daemon-crr");
    let api: Api<ContainerRecreateRequest> = Api::all(ctx.cluster.client.clone());
    let selector = ListParams::default().labels(&keys::crr_selector(&ctx.node_name));
    let (requests, watch) = ctx.cluster.reflector(
        api,
        selector,
        |o: Bounded<ContainerRecreateRequest, { 2 * MAX_REQUEST_BYTES }>| observe::parse_request(o.object),
    );
    let (queue_tx, queue_rx) = mpsc::unbounded_channel();
    let (progress, shutdown) = (ctx.health.progress.clone(), ctx.shutdown.clone());
    let reconcilers = Arc::new(Reconcilers::new(Arc::new(RecreateContext {
        ctx,
        requests,
        pods,
        started_at: Instant::now(),
        runtime_queue: RuntimeQueue::default(),
        queue_tx,
    })));
    let workers = queue::run(NAME, queue_rx, WORKERS, &progress, shutdown, |key| {
        let reconcile = Arc::clone(&reconcilers).reconcile(key);
        async move { Ok::<_, ReconcileError>(reconcile.await) }
    });
    tokio::select! {
        () = watch => return Err(Error::WatchEnded("ContainerRecreateRequests")),
        error = reconcilers.enqueue_changes() => return Err(error),
        () = workers => {}
    }
    reconcilers.flush_statuses().await;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use kube::client::Body;
    use serde_json::{Value, json};

    use super::act::{StopTask, TaskEventKind};
    use super::plan::{StatusWrite, StopAction, Urgency};
    use super::status_writer::StatusWriter;
    use super::*;
    use kruise_api::container_recreate_request::ContainerRecreateRequestStatus;
    use kruise_ops::panics::injected::inject_panic;

    /// A node with one Pod and one request for it, whose runtime panics; also returns the bodies of all writes.
    pub(super) fn node_with_panicking_runtime() -> (Arc<RecreateContext>, Arc<Mutex<Vec<String>>>) {
        node_with_api_response(500)
    }

    /// The same with an API server that answers every request with that code.
    pub(super) fn node_with_api_response(code: u16) -> (Arc<RecreateContext>, Arc<Mutex<Vec<String>>>) {
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
        let pod = NodePod {
            namespace: "team".to_owned(),
            name: "web".to_owned(),
            ..NodePod::default()
        };
        let request = RecreateRequest {
            uid: "panicking".to_owned(),
            namespace: "team".to_owned(),
            name: "again".to_owned(),
            pod_name: "web".to_owned(),
            ..RecreateRequest::default()
        };
        let shared = RecreateContext {
            ctx: Context::for_test(kube::Client::new(service, "default")),
            requests: Store::from_objects([(Key::namespaced("team", "again"), request)]),
            pods: Store::from_objects([(key, pod)]),
            started_at: Instant::now(),
            runtime_queue: RuntimeQueue::default(),
            queue_tx: mpsc::unbounded_channel().0,
        };
        (Arc::new(shared), written)
    }

    async fn sleep_until(shared: &RecreateContext, mono: Duration) {
        tokio::time::sleep(mono.saturating_sub(shared.now().mono)).await;
    }

    #[tokio::test]
    async fn pod_without_requests_is_forgotten() {
        let (shared, _) = node_with_panicking_runtime();
        let reconcilers = Arc::new(Reconcilers::new(shared));
        let (busy, idle) = (Key::namespaced("team", "web"), Key::namespaced("team", "idle"));
        for pod in [&busy, &idle] {
            Arc::clone(&reconcilers).reconcile(pod.clone()).await;
        }
        assert!(reconcilers.by_pod().keys().eq([&busy]));
    }

    /// Otherwise the first Pod would keep the deleted request until something else happens to it.
    #[test]
    fn request_that_replaces_one_of_its_name_changes_both_pods() {
        let request = |pod: &str| {
            Some(Arc::new(RecreateRequest {
                namespace: "team".to_owned(),
                pod_name: pod.to_owned(),
                ..RecreateRequest::default()
            }))
        };
        let changed = |old, new| {
            let key = Key::namespaced("team", "again");
            let pods = changed_pods(Change { key, old, new });
            pods.into_iter().map(|pod| pod.name).collect::<Vec<_>>()
        };
        assert_eq!(changed(request("a"), request("b")), ["a", "b"]);
        assert_eq!(changed(request("a"), request("a")), ["a"]);
        assert_eq!(changed(request("a"), None), ["a"]);
    }

    #[tokio::test]
    async fn panic_in_the_last_status_of_a_pod_does_not_end_those_of_others() {
        let (shared, written) = node_with_panicking_runtime();
        let reconcilers = Arc::new(Reconcilers::new(Arc::clone(&shared)));
        let (pod, other) = (Key::namespaced("team", "web"), Key::namespaced("team", "other"));
        Arc::clone(&reconcilers).reconcile(pod).await;
        let panicking = SharedReconciler::new(PodReconciler::new(shared, other.clone()));
        reconcilers.by_pod().insert(other, Arc::new(panicking));
        let panics = inject_panic(NAME, "team/other");
        reconcilers.flush_statuses().await;
        assert_eq!(panics.times(), 1);
        assert!(!written.lock().unwrap().is_empty());
    }

    /// A write of an empty status at once.
    fn status_write(request: Arc<RecreateRequest>) -> StatusWrite {
        StatusWrite {
            request,
            status: ContainerRecreateRequestStatus::default(),
            waiting_reason: None,
            urgency: Urgency::Now,
        }
    }

    /// A stop of the Pod's container with this deadline.
    fn stop_task(
        shared: &Arc<RecreateContext>,
        deadline: Option<Duration>,
    ) -> (StopTask, mpsc::UnboundedReceiver<act::TaskEvent>) {
        let (event_tx, event_rx) = mpsc::unbounded_channel();
        let task = StopTask {
            runtime: shared.ctx.runtimes.preferred().unwrap(),
            pod: shared.pods.list().remove(0),
            action: StopAction {
                key: plan::ContainerKey {
                    request_uid: "panicking".to_owned(),
                    container: "main".to_owned(),
                },
                request_name: "again".to_owned(),
                target: "id".to_owned(),
                first_attempt: false,
                deadline,
                run_hook: false,
                grace_period: Duration::from_secs(1),
            },
            event_tx,
            shared: Arc::clone(shared),
        };
        (task, event_rx)
    }

    #[tokio::test(start_paused = true)]
    async fn stop_waits_for_its_slot_until_a_distant_deadline() {
        let (shared, _) = node_with_panicking_runtime();
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        for (deadline, starts) in [(hours(48), true), (hours(24), false)] {
            let slots: Vec<_> = (0..crate::stop_slots::MAX_STOPS_PER_NAMESPACE)
                .map(|_| shared.ctx.stop_slots.try_acquire("team").unwrap())
                .collect();
            let deadline = shared.started_at.elapsed() + deadline;
            let (task, mut event_rx) = stop_task(&shared, Some(deadline));
            let stop = tokio::spawn(act::run(task, None));
            tokio::time::sleep(hours(25)).await;
            drop(slots);
            stop.await.unwrap();
            let event = event_rx.try_recv().unwrap().kind;
            let is_expected = match event {
                TaskEventKind::StopStarted => starts,
                TaskEventKind::NotStarted => !starts,
                _ => false,
            };
            assert!(is_expected, "{deadline:?}: {event:?}");
        }
    }

    #[tokio::test]
    async fn panicking_container_stop_is_retried() {
        let (shared, _) = node_with_panicking_runtime();
        let (task, mut event_rx) = stop_task(&shared, None);
        act::run(task, shared.ctx.stop_slots.try_acquire("team")).await;
        let mut last = None;
        while let Ok(event) = event_rx.try_recv() {
            last = Some(event.kind);
        }
        let Some(TaskEventKind::Failed {
            error,
            retryable,
            grace_spent,
        }) = last
        else {
            panic!("{last:?}");
        };
        assert_eq!(
            (error.as_str(), retryable, grace_spent),
            ("panic: stop_container", true, Duration::ZERO)
        );
        assert!(shared.ctx.stop_slots.try_acquire("team").is_some());
    }

    /// Nothing else reconciles the Pod then.
    #[tokio::test(start_paused = true)]
    async fn pod_is_enqueued_when_a_stop_or_a_status_write_has_ended() {
        let (mut shared, _) = node_with_panicking_runtime();
        let (queue_tx, mut queue_rx) = mpsc::unbounded_channel();
        Arc::get_mut(&mut shared).unwrap().queue_tx = queue_tx;
        let pod = Some(Key::namespaced("team", "web"));
        let (task, mut event_rx) = stop_task(&shared, None);
        act::run(task, shared.ctx.stop_slots.try_acquire("team")).await;
        let mut events = 0;
        while event_rx.try_recv().is_ok() {
            events += 1;
            assert_eq!(queue_rx.try_recv().ok(), pod);
        }
        assert!(events > 0);
        let write = status_write(shared.requests.list().remove(0));
        let mut writer = StatusWriter::new(Arc::clone(&shared));
        writer.set_pending(&[write], shared.now());
        writer.start_due(shared.now());
        assert_eq!(queue_rx.recv().await, pod);
        assert!(writer.try_next_written().is_some());
    }

    /// A starting API server may not have loaded any role yet: a client that waits for the daemon's first status gives
    /// up soon.
    #[tokio::test(start_paused = true)]
    async fn forbidden_recreate_status_write_is_retried_soon() {
        for (code, seconds) in [(401, 6), (403, 6), (422, 61)] {
            let (shared, written) = node_with_api_response(code);
            let requests = shared.requests.list();
            let write = status_write(Arc::clone(&requests[0]));
            let mut writer = StatusWriter::new(Arc::clone(&shared));
            writer.set_pending(&[write], shared.now());
            for _ in 0..8 {
                writer.start_due(shared.now());
                assert!(writer.next_written().await.is_none());
                let retry_at = writer.start_due(shared.now()).unwrap();
                let pause = retry_at.saturating_sub(shared.now().mono);
                let rejected = pause >= Duration::from_secs(59);
                assert_eq!(rejected, code == 422, "{code}: {pause:?}");
                assert!(pause < Duration::from_secs(seconds), "{code}: {pause:?}");
                sleep_until(&shared, retry_at).await;
            }
            assert_eq!(written.lock().unwrap().len(), 8, "{code}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn panicking_recreate_status_write_is_retried() {
        let (shared, written) = node_with_panicking_runtime();
        let requests = shared.requests.list();
        let status = ContainerRecreateRequestStatus {
            message: Some("written after all".to_owned()),
            ..ContainerRecreateRequestStatus::default()
        };
        let write = StatusWrite {
            status,
            ..status_write(Arc::clone(&requests[0]))
        };
        let mut writer = StatusWriter::new(Arc::clone(&shared));
        let panics = inject_panic(NAME, "panicking");
        writer.set_pending(&[write], shared.now());
        writer.start_due(shared.now());
        assert!(writer.next_written().await.is_none());
        assert_eq!(panics.times(), 1);
        drop(panics);
        assert!(written.lock().unwrap().is_empty());
        let retry_at = writer.start_due(shared.now()).unwrap();
        assert!(retry_at > shared.now().mono, "it is not repeated at once");
        sleep_until(&shared, retry_at).await;
        writer.start_due(shared.now());
        assert!(writer.next_written().await.is_none());
        let written = written.lock().unwrap();
        assert!(
            written.iter().any(|body| body.contains("written after all")),
            "{written:?}"
        );
    }

    /// A completed request as the API server has it.
    fn completed_request() -> Value {
        json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
            "metadata": {
                "namespace": "team", "name": "again", "uid": "u", "resourceVersion": "2",
                "creationTimestamp": "2026-01-02T03:04:05Z",
            },
            "spec": {"podName": "web", "containers": [{"name": "main"}]},
            "status": {"phase": "Completed", "completionTime": "2026-01-02T03:04:06Z"},
        })
    }

    /// It would be executed again in the older version that the watch shows. The first read fails, the second one finds
    /// the request and the third one does not.
    #[tokio::test(start_paused = true)]
    async fn completed_request_is_read_until_the_watch_shows_it() {
        let reads = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&reads);
        let service = tower::service_fn(move |call: http::Request<Body>| {
            let is_read = call.method() == http::Method::GET;
            let code: u16 = match is_read.then(|| counted.fetch_add(1, Ordering::Relaxed)) {
                None | Some(1) => 200,
                Some(0) => 500,
                Some(_) => 404,
            };
            let body = if code == 200 {
                completed_request().to_string().into_bytes()
            } else {
                Vec::new()
            };
            std::future::ready(http::Response::builder().status(code).body(Body::from(body)))
        });
        let (mut shared, _) = node_with_panicking_runtime();
        Arc::get_mut(&mut shared).unwrap().ctx = Context::for_test(kube::Client::new(service, "default"));
        let watched = vec![Arc::new(RecreateRequest {
            uid: "u".to_owned(),
            namespace: "team".to_owned(),
            name: "again".to_owned(),
            resource_version: "1".to_owned(),
            ..RecreateRequest::default()
        })];
        let write = status_write(Arc::clone(&watched[0]));
        let mut writer = StatusWriter::new(Arc::clone(&shared));
        writer.set_pending(&[write], shared.now());
        writer.start_due(shared.now());
        assert!(writer.next_written().await.is_some());
        for read in 1..=3 {
            let expires_at = writer.start_due(shared.now()).unwrap();
            sleep_until(&shared, expires_at).await;
            let latest = writer.latest(watched.clone());
            assert!(latest.iter().all(|request| request.is_finished()), "read {read}");
            writer.start_due(shared.now());
            assert!(writer.next_written().await.is_none());
            assert_eq!(reads.load(Ordering::Relaxed), read);
        }
        assert!(writer.latest(watched).iter().all(|request| request.terminating));
    }

    /// The API server does not answer the read.
    #[tokio::test(start_paused = true)]
    async fn last_status_is_written_while_its_request_is_read() {
        let service = tower::service_fn(|call: http::Request<Body>| async move {
            if call.method() == http::Method::GET {
                std::future::pending::<()>().await;
            }
            let body = completed_request().to_string().into_bytes();
            http::Response::builder().body(Body::from(body))
        });
        let (mut shared, _) = node_with_panicking_runtime();
        Arc::get_mut(&mut shared).unwrap().ctx = Context::for_test(kube::Client::new(service, "default"));
        let request = Arc::new(RecreateRequest {
            uid: "u".to_owned(),
            namespace: "team".to_owned(),
            name: "again".to_owned(),
            ..RecreateRequest::default()
        });
        let writes = [status_write(request)];
        let mut writer = StatusWriter::new(Arc::clone(&shared));
        writer.set_pending(&writes, shared.now());
        writer.start_due(shared.now());
        assert!(writer.next_written().await.is_some());
        let expires_at = writer.start_due(shared.now()).unwrap();
        sleep_until(&shared, expires_at).await;
        writer.start_due(shared.now());
        assert!(writer.is_writing("u"));
        writer.set_pending(&writes, shared.now());
        let (stored, _) = writer.flush(Instant::now() + Duration::from_secs(1)).await;
        assert_eq!(stored.len(), 1);
    }

    /// The Pod of all of them has gone, so that all end at once; each write needs a connection.
    #[tokio::test(start_paused = true)]
    async fn few_statuses_are_written_at_once() {
        let in_flight = Arc::new(Mutex::new((0_usize, 0_usize)));
        let counted = Arc::clone(&in_flight);
        let service = tower::service_fn(move |_: http::Request<Body>| {
            let counted = Arc::clone(&counted);
            async move {
                {
                    let mut counted = counted.lock().unwrap();
                    counted.0 += 1;
                    counted.1 = counted.1.max(counted.0);
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
                counted.lock().unwrap().0 -= 1;
                http::Response::builder().status(404).body(Body::empty())
            }
        });
        let (mut shared, _) = node_with_panicking_runtime();
        Arc::get_mut(&mut shared).unwrap().ctx = Context::for_test(kube::Client::new(service, "default"));
        let requests: Vec<_> = (0..100)
            .map(|n| {
                Arc::new(RecreateRequest {
                    uid: format!("u{n}"),
                    namespace: "team".to_owned(),
                    name: format!("r{n}"),
                    ..RecreateRequest::default()
                })
            })
            .collect();
        let writes: Vec<_> = requests
            .iter()
            .map(|request| status_write(Arc::clone(request)))
            .collect();
        for at_shutdown in [false, true] {
            let mut writer = StatusWriter::new(Arc::clone(&shared));
            writer.set_pending(&writes, shared.now());
            if at_shutdown {
                let until = Instant::now() + Duration::from_secs(60);
                assert!(writer.flush(until).await.1);
            } else {
                writer.start_due(shared.now());
                while requests.iter().any(|request| !writer.is_deleted(&request.uid)) {
                    writer.next_written().await;
                    writer.start_due(shared.now());
                }
            }
            assert_eq!(*in_flight.lock().unwrap(), (0, 8), "{at_shutdown}");
        }
    }
}
