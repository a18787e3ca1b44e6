//! Reconciles one Pod until none of its requests is left.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use super::act::{self, StopTask, TaskEvent, TaskEventKind};
use super::context::RecreateContext;
use super::observe::{self, RuntimeObserver};
use super::plan::{
    self, Clocks, Observed, Plan, PodObservation, RecreateRequest, RecreateState, RuntimeObservation,
    StatusWrite, StopAction, StopAttempt, StopStage,
};
use super::report;
use super::runtime_queue::ObserveLimit;
use super::status_writer::StatusWriter;
use crate::hook;
use crate::pods::STOP_BACKOFF;
use kruise_api::container_recreate_request::{COMPLETE, ContainerRecreateRequest, is_sidecar_termination};
use kruise_api::keys;
use kruise_cluster::{EventType, Key};
use kruise_ops::metrics::metrics;

/// Timeout for the status writes at shutdown; the process has two seconds.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(1500);

/// The reconciler of one Pod.
pub struct PodReconciler {
    shared: Arc<RecreateContext>,
    /// Namespace and name of the Pod.
    key: Key,
    state: RecreateState,
    observer: RuntimeObserver,
    status_writer: StatusWriter,
    stop_tasks: JoinSet<()>,
    abort_handles: BTreeMap<plan::ContainerKey, AbortHandle>,
    event_tx: mpsc::UnboundedSender<TaskEvent>,
    event_rx: mpsc::UnboundedReceiver<TaskEvent>,
    /// When each request was first seen: by the API server's clock, and as monotonic time.
    first_seen: BTreeMap<String, (Timestamp, Duration)>,
    /// Requests with a stop in progress, as last seen: the watch drops a request soon after its end.
    tracked_requests: BTreeMap<String, Arc<RecreateRequest>>,
    /// What the last plan was about.
    last_observed: Option<Observed>,
}

/// The result of a reconcile.
pub enum ReconcileResult {
    /// No request is left, and no stop is in progress.
    Done,
    /// When to requeue without an event.
    RequeueAt(Option<Duration>),
}

impl PodReconciler {
    /// A reconciler for the Pod of that name.
    pub fn new(shared: Arc<RecreateContext>, key: Key) -> Self {
        let (event_tx, event_rx) = mpsc::unbounded_channel();
        Self {
            status_writer: StatusWriter::new(Arc::clone(&shared)),
            shared,
            key,
            state: RecreateState::default(),
            observer: RuntimeObserver::default(),
            stop_tasks: JoinSet::new(),
            abort_handles: BTreeMap::new(),
            event_tx,
            event_rx,
            first_seen: BTreeMap::new(),
            tracked_requests: BTreeMap::new(),
            last_observed: None,
        }
    }

    /// Observes, plans and acts.
    pub async fn reconcile(&mut self) -> ReconcileResult {
        self.handle_events();
        let requests = self.sync_requests();
        // A stop that has begun is finished although its request was deleted.
        let mut attempts = self.state.attempts.values();
        let is_stopping = attempts.any(|attempt| {
            attempt.in_progress && matches!(attempt.stage, StopStage::Hook | StopStage::Stopping)
        });
        if requests.is_empty() && self.status_writer.idle() && !is_stopping && !self.is_watch_behind() {
            report::publish(&self.shared.ctx.live, &self.key, Vec::new());
            return ReconcileResult::Done;
        }
        let observed = self.observe(requests).await;
        ReconcileResult::RequeueAt(self.plan_and_act(observed))
    }

    /// Whether the watch shows an unfinished request. If none is left to do, the API server does not have it any more, and
    /// a new reconciler would execute it.
    fn is_watch_behind(&self) -> bool {
        let watched = self.shared.requests.list();
        let mut watched = watched.iter();
        watched.any(|request| request.pod_key() == self.key && !request.is_finished())
    }

    /// Handles what the tasks have reported.
    fn handle_events(&mut self) {
        while let Ok(event) = self.event_rx.try_recv() {
            self.on_task_event(event);
        }
        while let Some(written) = self.status_writer.try_next_written() {
            if let Some((write, request)) = written {
                self.on_status_written(&write, &request);
            }
        }
        while self.stop_tasks.try_join_next().is_some() {}
    }

    /// The newest versions of the Pod's requests that are not completed or still have a stop in progress.
    fn sync_requests(&mut self) -> Vec<Arc<RecreateRequest>> {
        let mut watched = self.shared.requests.list();
        watched.retain(|request| request.pod_key() == self.key);
        let watched_uids: BTreeSet<String> = watched.iter().map(|request| request.uid.clone()).collect();
        let unwatched = self
            .tracked_requests
            .iter()
            .filter(|(uid, _)| !watched_uids.contains(*uid));
        watched.extend(unwatched.map(|(_, request)| Arc::clone(request)));
        let mut requests = self.status_writer.latest(watched);
        for request in &mut requests {
            // It was deleted, or kruise-manager completed it.
            if !watched_uids.contains(&request.uid) && !request.is_finished() {
                Arc::make_mut(request).terminating = true;
            }
        }
        // The rows of the control API show a stop until its end: meanwhile the container is not restarted for its
        // environment. The result of a stop is only written to a request that exists.
        let is_stopping = |request: &RecreateRequest| {
            let is_deleted = self.status_writer.is_deleted(&request.uid);
            let mut attempts = self.state.attempts.iter();
            attempts
                .any(|(key, attempt)| key.request_uid == request.uid && (attempt.in_progress || !is_deleted))
        };
        requests.retain(|request| !request.is_finished() || is_stopping(request));
        self.tracked_requests = requests
            .iter()
            .filter(|request| self.state.has_attempt(&request.uid))
            .map(|request| (request.uid.clone(), Arc::clone(request)))
            .collect();
        let uids: BTreeSet<&str> = requests.iter().map(|request| request.uid.as_str()).collect();
        let exists = |uid: &str| uids.contains(uid);
        let attempts = &mut self.state.attempts;
        attempts.retain(|key, attempt| attempt.in_progress || exists(&key.request_uid));
        self.state.targets.retain(|key, _| exists(&key.request_uid));
        self.state.unready_observed_at.retain(|uid, _| exists(uid));
        let now = self.shared.now();
        self.first_seen
            .retain(|uid, _| exists(uid) || self.status_writer.is_writing(uid));
        for request in requests.iter().filter(|request| !request.is_finished()) {
            self.first_seen
                .entry(request.uid.clone())
                .or_insert((now.api, now.mono));
            if request.status.unready_since().is_some() {
                self.state
                    .unready_observed_at
                    .entry(request.uid.clone())
                    .or_insert(now.mono);
            }
        }
        requests
    }

    async fn observe(&mut self, requests: Vec<Arc<RecreateRequest>>) -> Observed {
        let limit = ObserveLimit::for_requests(&requests, self.shared.now());
        let mut pod_observation = observe::observe_pod(&self.shared, &self.key, &requests, limit).await;
        let mut runtime_observation = match &pod_observation {
            PodObservation::Present(pod) => self.observer.observe(&self.shared, pod, &requests, limit).await,
            _ => RuntimeObservation::Unknown("the Pod is not known".to_owned()),
        };
        if let (PodObservation::Present(observed_pod), RuntimeObservation::Listed { .. }) =
            (&pod_observation, &runtime_observation)
        {
            let uid = observed_pod.uid.clone();
            pod_observation = observe::observe_pod(&self.shared, &self.key, &requests, limit).await;
            if !matches!(&pod_observation, PodObservation::Present(now) if now.uid == uid) {
                runtime_observation =
                    RuntimeObservation::Unknown("the Pod has changed since the runtime answered".to_owned());
            }
        }
        // Events of the tasks meanwhile may be newer or older than the observation. Either is valid, because a
        // container is identified by its ID. The plan must follow without an await: a stop may begin meanwhile.
        self.handle_events();
        let requests = self.refresh_requests(&requests);
        observe::mark_restarts(&mut runtime_observation, &self.shared.ctx.live.restarts.borrow());
        Observed {
            requests,
            pod: pod_observation,
            runtime: runtime_observation,
            state: self.state.clone(),
        }
    }

    /// The requests after an observation, which may have waited in the queue. New requests are left out because they
    /// were not observed; they have enqueued the Pod again.
    fn refresh_requests(&mut self, observed: &[Arc<RecreateRequest>]) -> Vec<Arc<RecreateRequest>> {
        let mut requests = self.sync_requests();
        let observed: BTreeSet<&str> = observed.iter().map(|request| request.uid.as_str()).collect();
        requests.retain(|request| observed.contains(request.uid.as_str()));
        requests
    }

    /// Plans and acts until nothing is left to do for now; returns when to requeue.
    fn plan_and_act(&mut self, mut observed: Observed) -> Option<Duration> {
        let now = self.shared.now();
        let plan = loop {
            let plan = plan::plan(&observed, now);
            let acted = self.apply(&observed, &plan, now);
            observed.state = self.state.clone();
            if !acted {
                break plan;
            }
        };
        tracing::debug!(
            pod = %self.key,
            steps = ?plan.progress,
            begin = plan.stops.len(),
            writes = plan.writes.len(),
            wake = ?plan.requeue,
            "looked at the requests of a Pod"
        );
        self.publish_status(&observed, &plan);
        self.status_writer.set_pending(&plan.writes, now);
        // Requests without stops are shown no longer, and no event has to follow.
        let requeue_now = self.prune_attempts(&observed, &plan).then_some(now.mono);
        self.last_observed = Some(observed);
        [plan.requeue, self.status_writer.start_due(now), requeue_now]
            .into_iter()
            .flatten()
            .min()
    }

    /// Drops the stops of completed requests that need no more action or write. Returns whether there were any.
    fn prune_attempts(&mut self, observed: &Observed, plan: &Plan) -> bool {
        let finished = |uid: &str| {
            let request = observed.requests.iter().find(|request| request.uid == uid);
            request.is_none_or(|request| request.is_finished())
        };
        let (writer, has_write) = (&self.status_writer, |uid: &str| {
            plan.writes.iter().any(|write| write.request.uid == uid)
        });
        let before = self.state.attempts.len();
        self.state.attempts.retain(|key, attempt| {
            let uid = key.request_uid.as_str();
            attempt.in_progress || !finished(uid) || has_write(uid) || writer.is_writing(uid)
        });
        self.state.attempts.len() < before
    }

    /// Acts on a plan. Returns whether the state has changed, so that a new plan is needed.
    fn apply(&mut self, observed: &Observed, plan: &Plan, now: Clocks) -> bool {
        for key in &plan.cancel {
            if let Some(handle) = self.abort_handles.remove(key) {
                handle.abort();
            }
            if let Some(attempt) = self.state.attempts.get_mut(key) {
                attempt.in_progress = false;
            }
        }
        let (PodObservation::Present(pod), Some(runtime)) = (&observed.pod, self.observer.runtime.clone())
        else {
            return false;
        };
        self.report_recreating(&plan.stops);
        for action in &plan.stops {
            let task = StopTask {
                shared: Arc::clone(&self.shared),
                runtime: Arc::clone(&runtime),
                pod: Arc::clone(pod),
                action: action.clone(),
                event_tx: self.event_tx.clone(),
            };
            self.start_stop(task, now);
        }
        !plan.stops.is_empty()
    }

    /// Logs a request that starts, with an event on it. All stops of a plan are of one request.
    fn report_recreating(&self, stops: &[StopAction]) {
        let Some(first) = stops.first() else { return };
        let (uid, request) = (&first.key.request_uid, &first.request_name);
        if self.state.has_attempt(uid) {
            return;
        }
        let containers: Vec<&str> = stops.iter().map(|stop| stop.key.container.as_str()).collect();
        let containers = containers.join(", ");
        tracing::info!(
            namespace = self.key.namespace,
            request,
            pod = self.key.name,
            containers,
            "recreating containers"
        );
        let note = format!("Recreating containers {containers} of Pod {}", self.key.name);
        self.publish_event(uid, request, EventType::Normal, keys::EVENT_RECREATING, note);
    }

    /// Publishes an event on a request.
    fn publish_event(&self, uid: &str, name: &str, type_: EventType, reason: &str, note: String) {
        let object = ObjectReference {
            api_version: Some(ContainerRecreateRequest::api_version(&()).into_owned()),
            kind: Some(ContainerRecreateRequest::kind(&()).into_owned()),
            namespace: self.key.namespace.clone(),
            name: Some(name.to_owned()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        };
        let events = &self.shared.ctx.cluster.events;
        events.publish(object, type_, reason, "Recreating", note);
    }

    fn start_stop(&mut self, task: StopTask, now: Clocks) {
        let slot = self.shared.ctx.stop_slots.try_acquire(&task.pod.namespace);
        let key = task.action.key.clone();
        let run_hook = task.action.run_hook;
        let previous = self.state.attempts.get(&key);
        let attempt = StopAttempt {
            request_name: task.action.request_name.clone(),
            started_at: previous
                .and_then(|attempt| attempt.started_at)
                .or_else(|| slot.is_some().then_some(now.mono)),
            hook_done: !run_hook,
            grace_spent: previous.map(|attempt| attempt.grace_spent).unwrap_or_default(),
            failures: previous.map(|attempt| attempt.failures).unwrap_or_default(),
            stage: match slot {
                None => StopStage::Queued,
                Some(_) if run_hook => StopStage::Hook,
                Some(_) => StopStage::Stopping,
            },
            in_progress: true,
        };
        self.state.attempts.insert(key.clone(), attempt);
        let handle = self.stop_tasks.spawn(act::run(task, slot));
        self.abort_handles.insert(key, handle);
    }

    /// Handles an event of a task, unless the task was cancelled.
    fn on_task_event(&mut self, TaskEvent { key, kind }: TaskEvent) {
        let now = self.shared.now().mono;
        let Some(attempt) = self
            .state
            .attempts
            .get_mut(&key)
            .filter(|attempt| attempt.in_progress)
        else {
            return;
        };
        if !matches!(kind, TaskEventKind::NotStarted) {
            attempt.started_at.get_or_insert(now);
        }
        attempt.hook_done |=
            matches!(kind, TaskEventKind::StopStarted) || attempt.failures + 1 >= hook::MAX_ATTEMPTS;
        attempt.stage = match kind {
            TaskEventKind::NotStarted => StopStage::Queued,
            TaskEventKind::HookStarted => StopStage::Hook,
            TaskEventKind::StopStarted => StopStage::Stopping,
            TaskEventKind::Stopped => StopStage::Stopped(now),
            TaskEventKind::Failed {
                error,
                retryable,
                grace_spent,
            } => {
                attempt.grace_spent += grace_spent;
                let retry_at = now + STOP_BACKOFF.delay(attempt.failures);
                attempt.failures = attempt.failures.saturating_add(1);
                if retryable {
                    StopStage::Retry { retry_at, error }
                } else {
                    StopStage::Refused(error)
                }
            }
        };
        attempt.in_progress = matches!(attempt.stage, StopStage::Hook | StopStage::Stopping);
        if !attempt.in_progress {
            self.abort_handles.remove(&key);
        }
    }

    /// Publishes the progress of the requests on the control API.
    fn publish_status(&self, observed: &Observed, plan: &Plan) {
        let rows = observed
            .requests
            .iter()
            .map(|request| {
                let first_seen = self.first_seen.get(&request.uid).map(|(at, _)| *at);
                let progress = plan.progress.get(&request.uid);
                report::recreate_status(request, progress, observed, first_seen)
            })
            .collect();
        report::publish(&self.shared.ctx.live, &self.key, rows);
    }

    /// Handles a stored status; counts and logs the request if it completes it.
    fn on_status_written(&mut self, write: &StatusWrite, request: &RecreateRequest) {
        for state in &write.status.container_recreate_states {
            if let Some(target) = &state.container_id {
                self.state
                    .targets
                    .insert(request.container_key(&state.name), target.clone());
            }
        }
        if request.status.completion_time.is_none() {
            return;
        }
        // Removed, so that a later write about a stop that ran at the deadline does not count the request twice.
        let Some((_, since)) = self.first_seen.remove(&request.uid) else {
            return;
        };
        let took = self.shared.now().mono.saturating_sub(since);
        let condition = request.status.final_condition();
        let (type_, result) = match condition {
            Some(condition) if condition.type_ == COMPLETE => (EventType::Normal, "succeeded"),
            Some(condition) if is_sidecar_termination(&request.name, &condition.message) => {
                (EventType::Warning, "succeeded")
            }
            _ => (EventType::Warning, "failed"),
        };
        if let Some(condition) = condition {
            let (reason, note) = (condition.type_.as_str(), condition.message.clone());
            self.publish_event(&request.uid, &request.name, type_, reason, note);
        }
        let recreates = &metrics().recreates;
        let labels = [("result", result.to_owned())];
        recreates.get_or_create(&labels).observe(took.as_secs_f64());
        tracing::info!(
            namespace = request.namespace,
            request = request.name,
            pod = request.pod_name,
            result,
            ?took,
            message = condition.map(|condition| condition.message.as_str()),
            "request completed"
        );
    }

    /// At shutdown: writes the status that would otherwise be lost, as far as the timeout allows.
    pub async fn flush_status(&mut self) {
        self.stop_tasks.abort_all();
        self.handle_events();
        let Some(mut observed) = self.last_observed.take() else {
            return;
        };
        let now = self.shared.now();
        observed.state = self.state.clone();
        observed.requests = self.status_writer.latest(observed.requests);
        let plan = plan::plan(&observed, now);
        self.status_writer.set_pending(&plan.writes, now);
        let until = tokio::time::Instant::now() + FLUSH_TIMEOUT;
        let (stored, all) = self.status_writer.flush(until).await;
        if !all {
            tracing::warn!(pod = %self.key, "could not write the last status before shutdown");
        }
        for (write, request) in &stored {
            self.on_status_written(write, request);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::tests::{node_with_api_response, node_with_panicking_runtime};
    use super::*;
    use kruise_cluster::Store;

    fn attempt(stage: StopStage, in_progress: bool) -> StopAttempt {
        StopAttempt {
            request_name: "again".to_owned(),
            started_at: None,
            hook_done: false,
            grace_spent: Duration::ZERO,
            failures: 0,
            stage,
            in_progress,
        }
    }

    #[tokio::test]
    async fn stop_that_was_not_started_can_be_planned_again() {
        let (shared, _) = node_with_panicking_runtime();
        let mut reconciler = PodReconciler::new(shared, Key::namespaced("team", "web"));
        let key = plan::ContainerKey {
            request_uid: "u".to_owned(),
            container: "main".to_owned(),
        };
        let queued = |in_progress| attempt(StopStage::Queued, in_progress);
        reconciler.state.attempts.insert(key.clone(), queued(true));
        reconciler.on_task_event(TaskEvent {
            key: key.clone(),
            kind: TaskEventKind::NotStarted,
        });
        assert_eq!(reconciler.state.attempts.get(&key), Some(&queued(false)));
    }

    /// A write of the request's status.
    fn status_write(request: &Arc<RecreateRequest>) -> StatusWrite {
        StatusWrite {
            request: Arc::clone(request),
            status: request.status.clone(),
            waiting_reason: None,
            urgency: plan::Urgency::Now,
        }
    }

    /// Writes the status of the request, which the API server does not find.
    async fn write_status(reconciler: &mut PodReconciler, request: &Arc<RecreateRequest>) {
        let now = reconciler.shared.now();
        let writer = &mut reconciler.status_writer;
        writer.set_pending(&[status_write(request)], now);
        writer.start_due(now);
        assert!(writer.next_written().await.is_none());
        assert!(writer.is_deleted(&request.uid));
    }

    /// Otherwise more of its containers would be stopped, for as long as the watch is behind.
    #[tokio::test]
    async fn request_that_the_api_server_does_not_find_ends_before_the_watch_shows_it() {
        let (shared, _) = node_with_api_response(404);
        let mut reconciler = PodReconciler::new(shared, Key::namespaced("team", "web"));
        let request = reconciler.sync_requests().remove(0);
        write_status(&mut reconciler, &request).await;
        assert!(reconciler.sync_requests().is_empty());
        let now = reconciler.shared.now();
        let writer = &mut reconciler.status_writer;
        writer.set_pending(&[status_write(&request)], now);
        assert_eq!(writer.start_due(now), None);
        assert!(writer.idle(), "nothing more is written");
        // Any other event of the Pod would start it with a new reconciler.
        assert!(matches!(
            reconciler.reconcile().await,
            ReconcileResult::RequeueAt(None)
        ));
    }

    /// Otherwise the control API would show it until something else happens to the Pod.
    #[tokio::test]
    async fn deleted_request_is_forgotten_once_its_stop_has_ended() {
        let (mut shared, _) = node_with_panicking_runtime();
        let request = shared.requests.list().remove(0);
        Arc::get_mut(&mut shared).unwrap().requests = Store::from_objects([]);
        let mut reconciler = PodReconciler::new(shared, Key::namespaced("team", "web"));
        let stopped = attempt(StopStage::Stopped(Duration::ZERO), false);
        reconciler
            .state
            .attempts
            .insert(request.container_key("main"), stopped);
        reconciler.tracked_requests.insert(request.uid.clone(), request);
        assert!(matches!(
            reconciler.reconcile().await,
            ReconcileResult::RequeueAt(Some(_))
        ));
        assert!(matches!(reconciler.reconcile().await, ReconcileResult::Done));
    }

    /// The API server has reported its deletion before the watch did.
    #[tokio::test]
    async fn deleted_request_is_shown_until_its_stop_has_ended() {
        let (mut shared, _) = node_with_api_response(404);
        let request = shared.requests.list().remove(0);
        Arc::get_mut(&mut shared).unwrap().requests = Store::from_objects([]);
        let mut reconciler = PodReconciler::new(shared, Key::namespaced("team", "web"));
        write_status(&mut reconciler, &request).await;
        let key = request.container_key("main");
        reconciler.tracked_requests.insert(request.uid.clone(), request);
        for in_progress in [true, false] {
            let stopping = attempt(StopStage::Stopping, in_progress);
            reconciler.state.attempts.insert(key.clone(), stopping);
            let is_shown = !reconciler.sync_requests().is_empty();
            assert_eq!(is_shown, in_progress);
        }
    }
}
