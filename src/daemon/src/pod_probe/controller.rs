//! The reconcile loop: receives events, asks [`super::plan`], runs probes and writes the status.

use std::collections::HashMap;
use std::future::pending;
use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Api;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::handler::{self, ProbeTarget};
use super::plan::{
    Handler, Now, ObservedContainer, Outcome, ProbeBoard, ProbeKey, ProbeStart, StatusChange, Transition,
    status_change,
};
use super::spec::{self, NAME};
use crate::Context;
use crate::pods::NodePod;
use kruise_api::backoff::Backoff;
use kruise_api::node_pod_probe::{NodePodProbe, NodePodProbeStatus, ProbeState, liveness_container};
use kruise_cluster::{Change, Error, EventType, Store, write};
use kruise_ops::metrics::metrics;
use kruise_ops::panics::{catch_panic, catch_panic_sync};

/// From one write of the status to the next, at least: many Pods change together.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// The same if only messages differ: a probe may print something else each time.
const MESSAGE_INTERVAL: Duration = Duration::from_secs(10);
/// Backoff after a write that failed.
const WRITE_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// Pause after a write that the API server rejects until something changes.
const REJECTED_RETRY_DELAY: Duration = Duration::from_secs(300);
/// From a panic to the next reconcile of what panicked.
const PANIC_BACKOFF: Duration = Duration::from_secs(5);

type EndedProbe = (ProbeKey, u64, Outcome, Option<Target>);
/// Kind of the handler, container ID, and address of the Pod: of the last two, each kind uses one, which is all that is
/// confirmed for it.
type Target = (Discriminant<Handler>, String, Option<String>);
type WriteResult = Result<NodePodProbe, Error>;

/// What triggers a reconcile.
enum ProbeEvent {
    NodePodProbe(Option<Arc<NodePodProbe>>),
    Ended(Vec<EndedProbe>),
    Written(Box<WriteResult>),
    /// A Pod changed, or a timer fired.
    Wake,
}

pub(super) struct PodProbeController {
    ctx: Context,
    pods: Store<NodePod>,
    changes: UnboundedReceiver<Change<NodePodProbe>>,
    board: ProbeBoard,
    started_at: Instant,
    running: HashMap<ProbeKey, (u64, AbortHandle)>,
    attempts: JoinSet<EndedProbe>,
    /// What the runtime has confirmed of each probe.
    verified: HashMap<ProbeKey, Target>,
    /// Pods or probes have changed since the last observation.
    must_observe: bool,
    object: Option<StoredObject>,
    /// The stored status has changed since it was compared.
    must_compare: bool,
    /// The status that is not written yet, if any, and how it differs.
    unwritten: Option<(NodePodProbeStatus, StatusChange)>,
    writes: JoinSet<WriteResult>,
    last_write: Option<Instant>,
    retry_at: Option<Instant>,
    failures: u32,
    /// A change that panicked; until it is applied, the probes of the previous object run.
    unapplied: Option<Option<Arc<NodePodProbe>>>,
    /// When what panicked is tried again.
    panic_retry_at: Option<Instant>,
}

/// The NodePodProbe as it is stored.
struct StoredObject {
    uid: String,
    status: NodePodProbeStatus,
}

impl PodProbeController {
    pub(super) fn new(
        ctx: Context,
        pods: Store<NodePod>,
        changes: UnboundedReceiver<Change<NodePodProbe>>,
    ) -> Self {
        Self {
            ctx,
            pods,
            changes,
            board: ProbeBoard::default(),
            started_at: Instant::now(),
            running: HashMap::new(),
            attempts: JoinSet::new(),
            verified: HashMap::new(),
            must_observe: true,
            object: None,
            must_compare: true,
            unwritten: None,
            writes: JoinSet::new(),
            last_write: None,
            retry_at: None,
            failures: 0,
            unapplied: None,
            panic_retry_at: None,
        }
    }

    /// Runs until shutdown. Without a NodePodProbe, nothing wakes it but Pods.
    pub(super) async fn run(mut self) {
        let shutdown = self.ctx.shutdown.clone();
        let mut pods = self.pods.subscribe();
        let step = self.ctx.health.progress.begin_idle(NAME);
        let mut event = ProbeEvent::Wake;
        loop {
            let reconciled = catch_panic_sync(NAME, "reconcile", || self.reconcile(event));
            let wake_at = reconciled.unwrap_or_else(|_| Some(self.back_off_after_panic()));
            step.set_idle(wake_at.map(|at| at.saturating_duration_since(Instant::now())));
            event = tokio::select! {
                Some(change) = self.changes.recv() => ProbeEvent::NodePodProbe(change.new),
                Some(ended) = self.attempts.join_next() => {
                    // Only a probe that no longer counts is cancelled.
                    let mut all: Vec<EndedProbe> = ended.into_iter().collect();
                    while let Some(ended) = self.attempts.try_join_next() {
                        all.extend(ended);
                    }
                    ProbeEvent::Ended(all)
                }
                Some(written) = self.writes.join_next() => match written {
                    Ok(written) => ProbeEvent::Written(Box::new(written)),
                    Err(_) => ProbeEvent::Wake,
                },
                Some(_) = pods.recv() => {
                    while pods.try_recv().is_ok() {}
                    self.must_observe = true;
                    ProbeEvent::Wake
                }
                () = sleep_until_or_pend(wake_at) => ProbeEvent::Wake,
                () = shutdown.cancelled() => return,
            };
        }
    }

    fn now(&self) -> Now {
        Now {
            mono: self.started_at.elapsed(),
            wall: self.ctx.cluster.clock.now(),
            node: Timestamp::now(),
        }
    }

    /// Handles the event, observes, starts what is due and writes; returns when the next reconcile is due. A panic in
    /// the work on one probe affects only that probe.
    fn reconcile(&mut self, event: ProbeEvent) -> Option<Instant> {
        let now = self.now();
        if self.panic_retry_at.take_if(|at| *at <= Instant::now()).is_some() {
            (self.must_observe, self.must_compare) = (true, true);
            if let Some(object) = self.unapplied.take() {
                self.apply(object, now);
            }
        }
        match event {
            ProbeEvent::NodePodProbe(object) => self.apply(object, now),
            ProbeEvent::Ended(ended) => {
                for (key, run, outcome, verified) in ended {
                    self.with_run("result", &key.clone(), run, now, |controller| {
                        controller.on_ended(key, run, outcome, verified, now);
                    });
                }
            }
            ProbeEvent::Written(written) => self.on_written(*written),
            ProbeEvent::Wake => {}
        }
        if std::mem::take(&mut self.must_observe) {
            self.observe(now);
        }
        let board = &self.board;
        self.running.retain(|key, (run, handle)| {
            let counts = board.is_in_progress(key, *run);
            if !counts {
                handle.abort();
            }
            counts
        });
        for start in self.board.start_due(now) {
            let (key, run) = (start.key.clone(), start.run);
            self.with_run("start", &key, run, now, |controller| controller.start(start));
        }
        let waiting = i64::try_from(self.board.waiting()).unwrap_or(i64::MAX);
        metrics().pod_probe_queue.set(waiting);
        let next_probe = self.board.next_due(now).map(|due| self.started_at + due);
        let next_write = self.write_status_with_backoff();
        let due = next_probe.into_iter().chain(next_write);
        due.chain(self.panic_retry_at).min()
    }

    /// Works on a run of a probe. A panic ends it as one that could not be run: it is due again after its period, and
    /// does not keep its slot until then.
    fn with_run(&mut self, what: &str, key: &ProbeKey, run: u64, now: Now, work: impl FnOnce(&mut Self)) {
        if let Err(panicked) = catch_panic_sync(NAME, format_args!("{key}: {what}"), || work(self)) {
            let outcome = Outcome::Error(panicked.to_string());
            self.board.on_ended(key, run, outcome, now);
        }
    }

    /// When what panicked is tried again.
    fn back_off_after_panic(&mut self) -> Instant {
        *self
            .panic_retry_at
            .get_or_insert_with(|| Instant::now() + PANIC_BACKOFF)
    }

    fn on_ended(&mut self, key: ProbeKey, run: u64, outcome: Outcome, verified: Option<Target>, now: Now) {
        if self.running.get(&key).is_some_and(|(current, _)| *current == run) {
            self.running.remove(&key);
        }
        let transition = self.board.on_ended(&key, run, outcome, now);
        self.verified.extend(verified.map(|target| (key, target)));
        self.publish_events(transition);
    }

    fn observe(&mut self, now: Now) {
        for key in self.board.keys() {
            let observed = catch_panic_sync(NAME, format_args!("{key}: container"), || {
                let pods = &self.pods;
                let transition = self
                    .board
                    .observe(&key, now, |container| observe(pods, &key, container));
                self.publish_events(transition);
            });
            if observed.is_err() {
                self.board.forget_container(&key);
                self.back_off_after_panic();
            }
        }
    }

    /// Takes over a change of the object. One that panics is kept for a later reconcile.
    fn apply(&mut self, object: Option<Arc<NodePodProbe>>, now: Now) {
        let applied = catch_panic_sync(NAME, "NodePodProbe", || self.on_object(object.clone(), now));
        self.unapplied = applied.is_err().then_some(object);
        if self.unapplied.is_some() {
            self.back_off_after_panic();
        }
    }

    fn on_object(&mut self, object: Option<Arc<NodePodProbe>>, now: Now) {
        self.must_observe = true;
        let Some(object) = object else {
            self.object = None;
            self.verified.clear();
            self.board
                .sync(Default::default(), &NodePodProbeStatus::default(), now);
            return;
        };
        let status = object.status.clone().unwrap_or_default();
        let probes = spec::parse(&object.spec);
        self.verified.retain(|key, _| probes.contains_key(key));
        self.board.sync(probes, &status, now);
        let uid = object.metadata.uid.clone().unwrap_or_default();
        let is_same = self.object.as_ref().is_some_and(|stored| stored.uid == uid);
        // An event that comes during a write is of an earlier version; the response has the newer one.
        if self.writes.is_empty() || !is_same {
            self.must_compare = true;
            self.object = Some(StoredObject { uid, status });
        }
    }

    fn start(&mut self, start: ProbeStart) {
        let Some(pod) = self.pods.get(&start.key.pod) else {
            return;
        };
        let ProbeStart {
            key,
            run,
            handler,
            timeout,
            container_id,
        } = start;
        let (scheme, id) = container_id.split_once("://").unwrap_or_default();
        let target = ProbeTarget {
            runtime: self.ctx.runtimes.by_name(scheme),
            container_id: id.to_owned(),
            host: pod.ips.first().cloned(),
        };
        let verified = (discriminant(&handler), container_id, target.host.clone());
        let is_verified = self.verified.get(&key) == Some(&verified);
        let probe_key = key.clone();
        let handle = self.attempts.spawn(async move {
            let attempt = async {
                if !is_verified && let Err(why) = handler::verify(&handler, &target, &pod).await {
                    return (Outcome::Error(why), None);
                }
                (handler::run(&handler, &target, timeout).await, Some(verified))
            };
            let outcome = catch_panic(NAME, &probe_key.name, attempt).await;
            let (outcome, verified) =
                outcome.unwrap_or_else(|panicked| (Outcome::Error(panicked.to_string()), None));
            count(&handler, &outcome);
            (probe_key, run, outcome, verified)
        });
        self.running.insert(key, (run, handle));
    }

    /// One event for each transition, on the Pod.
    fn publish_events(&self, transitions: impl IntoIterator<Item = Transition>) {
        for Transition { key, state, message } in transitions {
            tracing::debug!(pod = %key.pod, probe = key.name, %state, message, "probe changed its state");
            let (type_, reason) = match (&state, key.is_liveness()) {
                // As in kubelet.
                (ProbeState::Succeeded, true) => continue,
                (_, true) => (EventType::Warning, "Unhealthy"),
                (ProbeState::Succeeded, false) => (EventType::Normal, "KruiseProbeSucceeded"),
                (_, false) => (EventType::Normal, "KruiseProbeFailed"),
            };
            let container = liveness_container(&key.name);
            let pod = ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                namespace: key.pod.namespace.clone(),
                name: Some(key.pod.name.clone()),
                uid: Some(key.uid.clone()),
                field_path: container.map(|container| format!("spec.containers{{{container}}}")),
                ..ObjectReference::default()
            };
            let note = match (container, message.is_empty()) {
                (Some(_), _) => format!("Liveness probe failed: {message}"),
                (None, true) => format!("Probe {} is {state}", key.name),
                (None, false) => message,
            };
            self.ctx
                .cluster
                .events
                .publish(pod, type_, reason, "Probing", note);
        }
    }

    /// The same as [`Self::write_status`], but not before the back-off is over. A panic counts as a write that failed.
    fn write_status_with_backoff(&mut self) -> Option<Instant> {
        let retry_at = self.retry_at.filter(|at| *at > Instant::now());
        if retry_at.is_some() {
            return retry_at;
        }
        let written = catch_panic_sync(NAME, "status", || self.write_status());
        written.unwrap_or_else(|panicked| {
            self.must_compare = true;
            self.on_written(Err(panicked.into()));
            self.retry_at
        })
    }

    /// Writes the status if it differs and a write is due; returns when one will be.
    fn write_status(&mut self) -> Option<Instant> {
        let object = self.object.as_ref()?;
        if self.board.take_changed() || std::mem::take(&mut self.must_compare) {
            let status = self.board.status();
            let change = status_change(&object.status, &status);
            self.unwritten = change.map(|change| (status, change));
        }
        let (status, change) = self.unwritten.as_ref().filter(|_| self.writes.is_empty())?;
        let interval = match change {
            StatusChange::States => WRITE_INTERVAL,
            StatusChange::Messages => MESSAGE_INTERVAL,
        };
        let due = self.last_write.map(|at| at + interval);
        if let Some(due) = due.filter(|due| *due > Instant::now()) {
            return Some(due);
        }
        self.last_write = Some(Instant::now());
        let body = write::status_patch(&object.uid, status, ["podProbeStatuses"]);
        let api: Api<NodePodProbe> = Api::all(self.ctx.cluster.client.clone());
        let node = self.ctx.node_name.clone();
        self.writes.spawn(async move {
            let write = async { write::patch_status_merge(&api, &node, &body).await?.object() };
            catch_panic(NAME, "write of the status", write).await?
        });
        None
    }

    fn on_written(&mut self, written: WriteResult) {
        match written {
            Ok(stored) => {
                (self.failures, self.retry_at) = (0, None);
                let uid = stored.metadata.uid.unwrap_or_default();
                // The watch may have shown meanwhile that the object was deleted, or is a new one.
                if let Some(object) = self.object.as_mut().filter(|object| object.uid == uid) {
                    object.status = stored.status.unwrap_or_default();
                }
                self.must_compare = true;
            }
            Err(error) => {
                let backoff = match error.permanent() {
                    true => REJECTED_RETRY_DELAY,
                    false => WRITE_BACKOFF.delay(self.failures),
                };
                let pause = error.retry_after().unwrap_or_default().max(backoff);
                if self.failures == 0 {
                    tracing::warn!(%error, ?pause, "could not write the NodePodProbe's status; will retry");
                }
                self.failures = self.failures.saturating_add(1);
                self.retry_at = Some(Instant::now() + pause);
            }
        }
    }
}

/// The container of a probe, from the Pod's status; `None` if the Pod is not the probe's, or has ended.
fn observe(pods: &Store<NodePod>, key: &ProbeKey, container: &str) -> Option<ObservedContainer> {
    let pod = pods
        .get(&key.pod)
        .filter(|pod| pod.uid == key.uid && !pod.terminating && !pod.terminal)?;
    let status = pod.container(container)?.status.as_ref()?;
    Some(ObservedContainer {
        id: status.container_id.clone(),
        running: status.running,
        starting: status.starting,
        started_at: status.started_at,
    })
}

fn count(handler: &Handler, outcome: &Outcome) {
    let handler = match handler {
        Handler::Exec { .. } => "exec",
        Handler::Http { .. } => "http_get",
        Handler::Tcp { .. } => "tcp_socket",
        Handler::Grpc { .. } => "grpc",
        Handler::Invalid(_) => "invalid",
    };
    let result = match outcome {
        Outcome::Success(_) => "succeeded",
        Outcome::Failure(_) => "failed",
        Outcome::Error(_) | Outcome::Unknown(_) => "error",
    };
    let labels = [("handler", handler.to_owned()), ("result", result.to_owned())];
    metrics().pod_probes.get_or_create(&labels).inc();
}

async fn sleep_until_or_pend(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::sync::mpsc::{self, UnboundedReceiver};

    use super::*;
    use kruise_cluster::Key;
    use kruise_ops::panics::injected::inject_panic;

    /// The result of a probe that is run.
    const RUN: &str = "the probe has no exec, httpGet, tcpSocket or grpc";
    const PANICKED: &str = "panic: injected";

    /// A running controller with the probes `m#bad` and `m#good` in Pod `n/p`; returns the messages by probe at each
    /// write of the status, and the guard that stops it.
    fn running_controller() -> (
        UnboundedReceiver<HashMap<String, String>>,
        tokio_util::sync::DropGuard,
    ) {
        let (written_tx, written) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let written_tx = written_tx.clone();
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                let status = serde_json::from_slice::<Value>(&body).unwrap()["status"].take();
                let object = json!({ "metadata": { "name": "n", "uid": "n" }, "spec": {}, "status": status });
                let states = status["podProbeStatuses"][0]["probeStates"].as_array();
                let text = |state: &Value, field: &str| state[field].as_str().unwrap_or_default().to_owned();
                let messages = states
                    .into_iter()
                    .flatten()
                    .map(|state| (text(state, "name"), text(state, "message")));
                let _ = written_tx.send(messages.collect());
                http::Response::builder().body(Body::from(object.to_string().into_bytes()))
            }
        });
        let ctx = Context::for_test(kube::Client::new(service, "default"));
        let shutdown = ctx.shutdown.clone().drop_guard();
        let container = json!({ "name": "c", "containerID": "containerd://1", "image": "", "imageID": "", "ready": true,
            "restartCount": 0, "state": { "running": { "startedAt": "2020-01-01T00:00:00Z" } } });
        let pod = json!({
            "metadata": { "namespace": "n", "name": "p", "uid": "u" },
            "spec": { "nodeName": "n", "containers": [{ "name": "c" }] },
            "status": { "phase": "Running", "podIP": "10.0.0.9", "containerStatuses": [container] },
        });
        let pod: NodePod = serde_json::from_str(&pod.to_string()).unwrap();
        let probe = |name| json!({ "name": name, "containerName": "c", "probe": {} });
        let object: NodePodProbe = serde_json::from_value(json!({
            "metadata": { "name": "n", "uid": "n" },
            "spec": { "podProbes": [{ "name": "p", "namespace": "n", "uid": "u",
                "probes": [probe("m#bad"), probe("m#good")] }] },
        }))
        .unwrap();
        let (changes_tx, changes) = mpsc::unbounded_channel();
        changes_tx
            .send(Change {
                key: Key::cluster_scoped("n"),
                old: None,
                new: Some(Arc::new(object)),
            })
            .unwrap();
        tokio::spawn(async move {
            let pods = Store::from_objects([(Key::namespaced("n", "p"), pod)]);
            PodProbeController::new(ctx, pods, changes).run().await;
            drop(changes_tx);
        });
        (written, shutdown)
    }

    /// Waits until the status has these messages.
    async fn wait_for_messages(
        written: &mut UnboundedReceiver<HashMap<String, String>>,
        what: &str,
        expected: &[(&str, &str)],
    ) {
        let expected = expected
            .iter()
            .map(|(name, message)| ((*name).to_owned(), (*message).to_owned()))
            .collect();
        let mut last = HashMap::new();
        let wait = async {
            while last != expected {
                last = written.recv().await.unwrap();
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(600), wait).await;
        assert!(waited.is_ok(), "{what}: {last:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn probe_that_panics_fails_alone_and_is_run_again() {
        let good = ("m#good", RUN);
        let shown = [("m#bad", PANICKED), good];
        // Until the fourth panic, at least: the first event of the Pods may cause the second one at once.
        for (work, status, seconds) in [
            ("result", &shown[..], 2),
            ("start", &shown[..], 2),
            ("container", &[good][..], 10),
        ] {
            let panics = inject_panic(NAME, &format!("m#bad of Pod n/p: {work}"));
            let started = Instant::now();
            let (mut written, _shutdown) = running_controller();
            wait_for_messages(&mut written, work, status).await;
            panics.wait_for(4).await;
            assert!(started.elapsed() >= Duration::from_secs(seconds), "{work}");
            drop(panics);
            wait_for_messages(&mut written, work, &[("m#bad", RUN), good]).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn probe_whose_spec_panics_is_not_run() {
        let _panics = inject_panic(NAME, "m#bad of Pod n/p: spec");
        let (mut written, _shutdown) = running_controller();
        let expected = [("m#bad", PANICKED), ("m#good", RUN)];
        wait_for_messages(&mut written, "spec", &expected).await;
    }

    #[tokio::test(start_paused = true)]
    async fn panicking_change_and_status_are_retried_after_backoff() {
        for (work, seconds) in [("NodePodProbe", 10), ("status", 3), ("write of the status", 3)] {
            let panics = inject_panic(NAME, work);
            let started = Instant::now();
            let (mut written, _shutdown) = running_controller();
            panics.wait_for(3).await;
            assert!(started.elapsed() >= Duration::from_secs(seconds), "{work}");
            assert!(written.try_recv().is_err(), "{work}");
            drop(panics);
            wait_for_messages(&mut written, work, &[("m#bad", RUN), ("m#good", RUN)]).await;
        }
    }
}
