//! The reconcile loop: receives events, asks [`super::plan`], runs probes and writes the status.

use std::collections::HashMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Api;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::NAME;
use super::handler::{self, ProbeTarget};
use super::plan::{
    Handler, Now, ObservedContainer, Outcome, ProbeBoard, ProbeKey, ProbeStart, StatusChange, Transition,
    status_change,
};
use super::spec;
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
const WRITE_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300));
/// Delay after a reconcile in which something panicked.
const PANIC_BACKOFF: Duration = Duration::from_secs(5);

type EndedProbe = (ProbeKey, u64, Outcome, Option<Target>);
/// Container ID, and address of the Pod.
type Target = (String, Option<String>);
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
    /// What the runtime has confirmed: the container of each probe, and the address of its Pod.
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
            let wake_at = reconciled.unwrap_or_else(|_| Some(Instant::now() + PANIC_BACKOFF));
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
        }
    }

    /// Handles the event, observes, starts what is due and writes; returns when the next reconcile is due.
    fn reconcile(&mut self, event: ProbeEvent) -> Option<Instant> {
        let now = self.now();
        match event {
            ProbeEvent::NodePodProbe(object) => self.on_object(object, now),
            ProbeEvent::Ended(ended) => {
                for (key, run, outcome, verified) in ended {
                    self.verified.extend(verified.map(|target| (key.clone(), target)));
                    if self.running.get(&key).is_some_and(|(current, _)| *current == run) {
                        self.running.remove(&key);
                    }
                    let transition = self.board.on_ended(&key, run, outcome, now);
                    self.publish_events(transition);
                }
            }
            ProbeEvent::Written(written) => self.on_written(*written),
            ProbeEvent::Wake => {}
        }
        if std::mem::take(&mut self.must_observe) {
            let pods = &self.pods;
            let transitions = self
                .board
                .observe(now, |key, container| observe(pods, key, container));
            self.publish_events(transitions);
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
            self.start(start);
        }
        let waiting = i64::try_from(self.board.waiting()).unwrap_or(i64::MAX);
        metrics().pod_probe_queue.set(waiting);
        let next_probe = self.board.next_due(now).map(|due| self.started_at + due);
        let next_write = self.write_status();
        next_probe.into_iter().chain(next_write).min()
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
        let verified = (container_id, target.host.clone());
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
        let due = self.last_write.map(|at| at + interval).max(self.retry_at);
        if let Some(due) = due.filter(|due| *due > Instant::now()) {
            return Some(due);
        }
        self.last_write = Some(Instant::now());
        let body = write::status_patch(&object.uid, status, ["podProbeStatuses"]);
        let api: Api<NodePodProbe> = Api::all(self.ctx.cluster.client.clone());
        let node = self.ctx.node_name.clone();
        self.writes.spawn(async move {
            let stored = write::patch_status_merge(&api, &node, &body).await?;
            stored.object()
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
                let pause = error
                    .retry_after()
                    .unwrap_or_default()
                    .max(WRITE_BACKOFF.delay(self.failures));
                if self.failures == 0 {
                    tracing::warn!(%error, ?pause, "could not write the NodePodProbe's status; it is repeated");
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
        Outcome::Error(_) => "error",
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
