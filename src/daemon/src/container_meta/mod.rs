//! Publishes in a Pod's annotation what its containers were started with, and restarts containers whose environment an
//! in-place update has changed.
//!
//! In:  the node's Pods (watch), the container runtime.
//! Out: annotation `apps.kruise.io/runtime-containers-meta`, stops of containers, events on them, metric
//!      `environment_restarts`, what `kruise-daemon status` shows.
//! One reconcile per Pod at a time, whenever something about it changes. Every decision is in [`plan`].
//!
//! What a crash of the daemon can repeat: a preStop hook runs again if the container had not stopped yet.

mod act;
mod context;
mod error;
mod observe;
pub mod plan;
mod report;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Context;
use super::pods::{NodePod, PodContainerMeta, RestartPolicy};
use context::{MetaController, NAME};
pub use error::Error;
use kruise_api::unconfirmed::Unconfirmed;
use kruise_cluster::queue::{self, RequeueAfter};
use kruise_cluster::{Change, EventType, Key, Store};
use kruise_ops::metrics::metrics;
use kruise_ops::{FeatureGate, panics};
use plan::Plan;

/// Number of Pods that are reconciled and written concurrently.
const WORKERS: usize = 5;
/// How long a reconcile reads containers; the queue cancels one that takes two minutes.
const INSPECT_TIME: Duration = Duration::from_secs(30);
/// The pause before it reads those that are left, so that other Pods get their turn.
const INSPECT_PAUSE: Duration = Duration::from_secs(5);

/// Delay before a container that a ContainerRecreateRequest is recreating is checked again.
const RECREATE_RECHECK_DELAY: Duration = Duration::from_secs(2);
/// Delay after a write that fails until a user changes something.
const REJECTED_RETRY_DELAY: Duration = Duration::from_secs(300);

/// Runs until shutdown; `pods` is the store of this node's Pods.
///
/// # Errors
/// When the watch ends.
pub async fn run(mut ctx: Context, pods: Store<NodePod>) -> Result<(), Error> {
    // OpenKruise's source component of these events; clients may use it in field selectors.
    ctx.cluster.events = ctx.cluster.events.with_component("kruise-daemon-containermeta");
    let (queue_tx, queue_rx) = mpsc::unbounded_channel();
    let shutdown = ctx.shutdown.clone();
    let shared = Arc::new(MetaController {
        env_from_metadata: ctx
            .options
            .feature_gates
            .enabled(FeatureGate::InPlaceUpdateEnvFromMetadata),
        ctx,
        pods,
        pod_states: Mutex::default(),
        started_at: Instant::now(),
        queue_tx,
    });
    let progress = shared.ctx.health.progress.clone();
    let workers = queue::run(NAME, queue_rx, WORKERS, &progress, shutdown, |key| {
        Arc::clone(&shared).reconcile(key)
    });
    tokio::select! {
        () = workers => Ok(()),
        error = shared.enqueue_changes() => Err(error),
    }
}

impl MetaController {
    /// Enqueues the Pods to reconcile: a Pod when it changes, and all Pods when a runtime appears or disappears.
    async fn enqueue_changes(&self) -> Error {
        let mut pods = self.pods.subscribe();
        let mut runtimes = self.ctx.runtimes.subscribe();
        let mut recreates = self.ctx.live.recreates.subscribe();
        loop {
            tokio::select! {
                change = pods.recv() => {
                    let Some(change) = change else { return Error::WatchEnded };
                    // The reconcile that follows records what it needs, or panics itself.
                    let object = format_args!("change of {}", change.key);
                    let _ = panics::catch_panic_sync(NAME, object, || self.record_change(&change));
                    if is_relevant(&change) {
                        // The receiver lives as long as the workers that run concurrently.
                        let _ = self.queue_tx.send(change.key);
                    }
                }
                // Both senders live as long as the context that we own.
                Ok(()) = runtimes.changed() => {
                    for (key, _) in self.pods.entries().into_iter().filter(|(_, pod)| pod.meta.is_some()) {
                        let _ = self.queue_tx.send(key);
                    }
                }
                Ok(()) = recreates.changed() => self.record_recreate_hooks(),
            }
        }
    }

    /// Records each change individually, because reconciles are less frequent.
    fn record_change(&self, change: &Change<NodePod>) {
        let Some((pod, meta)) = change
            .new
            .as_ref()
            .and_then(|pod| Some((pod, pod.meta.as_ref()?)))
        else {
            return;
        };
        let now = self.now();
        let mut states = self.pod_states();
        states
            .entry(change.key.clone())
            .or_default()
            .record_change(pod, meta, now);
    }

    /// Reconciles one Pod: reads missing facts from the runtime, restarts containers and writes the annotation.
    async fn reconcile(self: Arc<Self>, key: Key) -> Result<RequeueAfter, Error> {
        let pod = self.pods.get(&key);
        let Some((pod, meta)) = pod.as_ref().and_then(|pod| Some((pod, pod.meta.as_deref()?))) else {
            self.pod_states().remove(&key);
            report::publish(&self.ctx.live, &key, Vec::new());
            return Ok(None);
        };
        let mut plan = self.plan(&key, pod, meta);
        let mut failure = None;
        if !plan.inspect.is_empty() {
            let inspect_until = Instant::now() + INSPECT_TIME;
            let turns = self.pod_states().get(&key).map_or(0, |state| state.read_turns);
            let first = turns.checked_rem(plan.inspect.len()).unwrap_or_default();
            plan.inspect.rotate_left(first);
            for (name, id) in &plan.inspect {
                if Instant::now() >= inspect_until {
                    break;
                }
                self.update_state(&key, |state| state.read_turns = state.read_turns.wrapping_add(1));
                // One unreadable container must not delay the facts of the others.
                if let Err(error) = self.read_facts(&key, pod, meta, name, id).await {
                    failure = Some(error);
                }
            }
            plan = self.plan(&key, pod, meta);
            if Instant::now() >= inspect_until && !plan.inspect.is_empty() {
                plan.requeue_by(self.now() + INSPECT_PAUSE);
            }
        }
        for (name, id) in &std::mem::take(&mut plan.restart) {
            if let Some(hook_done) = self.recreate_hook_done(id) {
                if hook_done {
                    self.update_state(&key, |state| state.record_hook_end(id));
                }
                // The request may still fail to stop it.
                let recheck_at = self.now() + RECREATE_RECHECK_DELAY;
                plan.requeue_by(recheck_at);
            } else if let Some(policy) = non_restarting_policy(pod, name) {
                self.ctx.cluster.events.publish(
                    pod.container_reference(name),
                    EventType::Warning,
                    "EnvironmentOutdated",
                    "Restarting",
                    format!("Container {name} keeps its old environment: with restartPolicy {policy} it might not start again"),
                );
            } else {
                self.spawn_restart(&key, pod, name, id);
            }
        }
        self.publish_status(&key, pod);
        if let Some(set) = plan.write.take() {
            if let Err(error) = act::write_annotation(&self, pod, &set).await {
                if !error.permanent() {
                    return Err(error);
                }
                tracing::warn!(pod = %key, %error, pause = ?REJECTED_RETRY_DELAY, "the API server rejected the annotation");
                let requeue_after = plan.requeue_at.map(|at| at.saturating_sub(self.now()));
                return Ok(Some(
                    requeue_after.map_or(REJECTED_RETRY_DELAY, |wake| wake.min(REJECTED_RETRY_DELAY)),
                ));
            }
            let now = self.now();
            let own = Unconfirmed::new(set, now);
            plan.requeue_by(own.expires_at());
            self.update_state(&key, |state| state.unconfirmed_write = Some(own));
        }
        match failure {
            // If a requeue is planned anyway, the runtime is called again then.
            Some(error) if error.retryable() && plan.requeue_at.is_none() => Err(error),
            failure => {
                if let Some(error) = failure {
                    tracing::warn!(pod = %key, %error, "cannot read the metadata of a container; leaving it out of the annotation");
                }
                Ok(plan.requeue_at.map(|at| at.saturating_sub(self.now())))
            }
        }
    }

    fn plan(&self, key: &Key, pod: &NodePod, meta: &PodContainerMeta) -> Plan {
        let mut states = self.pod_states();
        let state = states.entry(key.clone()).or_default();
        let now = self.now();
        state.prune(pod, meta, now);
        let plan = plan::plan(pod, meta, state, self.env_from_metadata, now);
        state.waiting_since = plan.waiting_since.clone();
        plan
    }

    /// Whether the preStop hook of a container that a ContainerRecreateRequest is recreating has ended; none if no
    /// request is recreating it.
    fn recreate_hook_done(&self, id: &str) -> Option<bool> {
        let requests = self.ctx.live.recreates.borrow();
        let mut containers = requests.iter().flat_map(|request| &request.containers);
        let recreated = containers.find(|container| {
            container.old_container_id.as_deref() == Some(id) && container.step == "Recreating"
        });
        recreated.map(|container| container.hook_done)
    }

    /// Records the preStop hooks of ContainerRecreateRequests that have ended in Pods being updated: a request may end
    /// before its container is checked again, and leave it running.
    fn record_recreate_hooks(&self) {
        let requests = self.ctx.live.recreates.borrow();
        for request in requests.iter() {
            let ended = request.containers.iter().filter(|container| container.hook_done);
            for id in ended.filter_map(|container| container.old_container_id.as_deref()) {
                let key = Key::namespaced(&request.namespace, &request.pod);
                let pod = self.pods.get(&key);
                if pod.is_some_and(|pod| pod.meta.as_ref().is_some_and(|meta| meta.updating)) {
                    self.update_state(&key, |state| state.record_hook_end(id));
                }
            }
        }
    }

    /// Returns when the Pod is deleted or terminating.
    async fn wait_for_pod_end(&self, key: &Key, uid: &str) {
        let mut changes = self.pods.subscribe();
        while self
            .pods
            .get(key)
            .is_some_and(|pod| pod.uid == uid && !pod.terminating)
        {
            if changes.recv().await.is_none() {
                return std::future::pending().await;
            }
        }
    }

    fn publish_status(&self, key: &Key, pod: &NodePod) {
        let rows = self
            .pod_states()
            .get(key)
            .map(|memory| report::restart_rows(pod, memory));
        report::publish(&self.ctx.live, key, rows.unwrap_or_default());
    }

    async fn read_facts(
        &self,
        key: &Key,
        pod: &NodePod,
        meta: &PodContainerMeta,
        name: &str,
        id: &str,
    ) -> Result<(), Error> {
        let (scheme, bare_id) = observe::split_container_id(id)?;
        let runtime = self.runtime(scheme)?;
        let Some(desired) = meta.containers.iter().find(|wanted| wanted.name == name) else {
            return Ok(());
        };
        let timeouts = {
            let states = self.pod_states();
            let timeouts = states.get(key).and_then(|state| state.env_timeouts.get(id));
            timeouts.copied().unwrap_or_default() + 1
        };
        let last_try = timeouts >= plan::MAX_ENV_TIMEOUTS;
        let read = observe::read_facts(
            runtime.as_ref(),
            pod,
            desired,
            bare_id,
            (self.env_from_metadata, last_try),
        );
        let read = read.await;
        let hangs = matches!(
            &read,
            Err(kruise_cri::Error::Timeout {
                method: "ExecSync",
                ..
            })
        );
        if hangs || last_try {
            self.update_state(key, |state| {
                state.env_timeouts.insert(id.to_owned(), timeouts);
            });
        }
        if let Some(facts) = read? {
            self.update_state(key, |memory| {
                memory.facts.insert(id.to_owned(), facts);
            });
        }
        Ok(())
    }

    /// Restarts a container in a separate task, because its hook may take long.
    fn spawn_restart(self: &Arc<Self>, key: &Key, pod: &Arc<NodePod>, name: &str, id: &str) {
        self.update_state(key, |memory| memory.begin_restart(id));
        let (shared, pod, key) = (Arc::clone(self), Arc::clone(pod), key.clone());
        let (name, id) = (name.to_owned(), id.to_owned());
        tokio::spawn(async move {
            let shutdown = shared.ctx.shutdown.clone();
            let object = format!("{key}, container {name}");
            let restart = Box::pin(act::restart_container(&shared, &key, &pod, &name, &id));
            let restart = panics::catch_panic(NAME, object, restart);
            let outcome = tokio::select! {
                () = shutdown.cancelled() => return,
                () = shared.wait_for_pod_end(&key, &pod.uid) => return,
                done = restart => done.unwrap_or_else(|panic| Err(panic.into())),
            };
            let result = outcome.as_ref().map_or_else(Error::category, |()| "ok");
            let restarts = &metrics().environment_restarts;
            restarts.get_or_create(&[("result", result.to_owned())]).inc();
            if let Err(error) = &outcome {
                tracing::warn!(pod = %pod.name, namespace = pod.namespace, container = name, %error, "container not restarted");
            }
            let now = shared.now();
            shared.update_state(&key, |memory| memory.finish_restart(id, outcome.is_ok(), now));
            let _ = shared.queue_tx.send(key);
        });
    }
}

/// The container's restart policy, if kubelet might not start it again after a stop.
fn non_restarting_policy(pod: &NodePod, container: &str) -> Option<RestartPolicy> {
    let policy = pod.restart_policy(pod.container(container)?);
    (policy != RestartPolicy::Always).then_some(policy)
}

/// Whether the Pod has metadata to publish, or had: then its state must be dropped.
fn is_relevant(change: &Change<NodePod>) -> bool {
    let either = [&change.new, &change.old];
    either.into_iter().flatten().any(|pod| pod.meta.is_some())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::plan::PodMetaState;
    use super::*;
    use crate::live;
    use crate::pods::{DesiredContainer, PodContainer, PodContainerMeta, PodContainerStatus};

    /// A controller whose API server answers every request with that response.
    fn controller_with_api_response(
        code: u16,
        key: &Key,
        pod: NodePod,
        memory: PodMetaState,
        queue_tx: mpsc::UnboundedSender<Key>,
    ) -> Arc<MetaController> {
        let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            let response = http::Response::builder().status(code);
            std::future::ready(response.body(kube::client::Body::empty()))
        });
        Arc::new(MetaController {
            ctx: Context::for_test(kube::Client::new(service, "default")),
            pods: Store::from_objects([(key.clone(), pod)]),
            env_from_metadata: true,
            pod_states: Mutex::new([(key.clone(), memory)].into()),
            started_at: Instant::now(),
            queue_tx,
        })
    }

    /// A starting API server may not have loaded any role yet, so this is retried soon. A write that it cannot store is
    /// retried late.
    #[tokio::test(start_paused = true)]
    async fn forbidden_annotation_write_is_retried_soon() {
        let (key, id) = (Key::namespaced("team", "web"), "containerd://id");
        let pod = NodePod {
            namespace: "team".to_owned(),
            name: "web".to_owned(),
            containers: vec![PodContainer {
                name: "main".to_owned(),
                status: Some(PodContainerStatus {
                    container_id: id.to_owned(),
                    ..PodContainerStatus::default()
                }),
                ..PodContainer::default()
            }],
            meta: Some(Box::new(PodContainerMeta {
                containers: vec![DesiredContainer {
                    name: "main".to_owned(),
                    ..DesiredContainer::default()
                }],
                ..PodContainerMeta::default()
            })),
            ..NodePod::default()
        };
        let facts = plan::ContainerFacts {
            plain_hash: 1,
            env_hash: None,
        };
        let memory = PodMetaState {
            facts: [(id.to_owned(), facts)].into(),
            ..PodMetaState::default()
        };
        for code in [401, 403, 422] {
            let (queue_tx, _queue_rx) = mpsc::unbounded_channel();
            let shared = controller_with_api_response(code, &key, pod.clone(), memory.clone(), queue_tx);
            match shared.reconcile(key.clone()).await {
                Err(error) => assert!(code != 422 && !error.permanent(), "{code}: {error}"),
                Ok(requeue_after) => assert_eq!((requeue_after, code), (Some(REJECTED_RETRY_DELAY), 422)),
            }
        }
    }

    /// The request runs the hook, which must not run again.
    #[tokio::test]
    async fn container_of_a_recreate_request_is_not_restarted() {
        let container = |step: &str, hook_done| live::RecreateContainerStatus {
            step: step.to_owned(),
            old_container_id: Some("containerd://id".to_owned()),
            hook_done,
            ..live::RecreateContainerStatus::default()
        };
        let (queue_tx, _queue_rx) = mpsc::unbounded_channel();
        let key = Key::namespaced("team", "web");
        let shared =
            controller_with_api_response(500, &key, NodePod::default(), PodMetaState::default(), queue_tx);
        for (step, hook_done, recreated) in [
            ("Pending", false, None),
            ("Recreating", false, Some(false)),
            ("Recreating", true, Some(true)),
            ("Succeeded", true, None),
        ] {
            shared.ctx.live.recreates.send_replace(vec![live::RecreateStatus {
                containers: vec![container(step, hook_done)],
                ..live::RecreateStatus::default()
            }]);
            assert_eq!(shared.recreate_hook_done("containerd://id"), recreated, "{step}");
            assert_eq!(shared.recreate_hook_done("containerd://other"), None, "{step}");
        }
    }

    #[tokio::test]
    async fn hook_of_an_ended_recreate_request_is_not_repeated() {
        let (key, id) = (Key::namespaced("team", "web"), "containerd://id");
        for updating in [true, false] {
            let (queue_tx, _queue_rx) = mpsc::unbounded_channel();
            let pod = NodePod {
                meta: Some(Box::new(PodContainerMeta {
                    updating,
                    ..PodContainerMeta::default()
                })),
                ..NodePod::default()
            };
            let shared = controller_with_api_response(500, &key, pod, PodMetaState::default(), queue_tx);
            let row = live::RecreateStatus {
                namespace: "team".to_owned(),
                pod: "web".to_owned(),
                containers: vec![live::RecreateContainerStatus {
                    old_container_id: Some(id.to_owned()),
                    hook_done: true,
                    ..live::RecreateContainerStatus::default()
                }],
                ..live::RecreateStatus::default()
            };
            let requests = async {
                tokio::task::yield_now().await;
                shared.ctx.live.recreates.send_replace(vec![row]);
                tokio::task::yield_now().await;
                shared.ctx.live.recreates.send_replace(Vec::new());
            };
            tokio::select! {
                biased;
                error = shared.enqueue_changes() => panic!("{error}"),
                () = requests => {}
            }
            let hook = shared.hook_progress(&key, id);
            assert_eq!(hook.used_grace.is_some(), updating);
        }
    }

    #[tokio::test]
    async fn panicking_change_still_enqueues_the_pod() {
        let panics = panics::injected::inject_panic(NAME, "change of team/panic");
        let (queue_tx, mut queue_rx) = mpsc::unbounded_channel();
        let key = Key::namespaced("team", "panic");
        let pod = NodePod {
            meta: Some(Box::default()),
            ..NodePod::default()
        };
        let shared = controller_with_api_response(500, &key, pod, PodMetaState::default(), queue_tx);
        tokio::select! {
            error = shared.enqueue_changes() => panic!("{error}"),
            sent = queue_rx.recv() => assert_eq!(sent, Some(key)),
        }
        assert_eq!(panics.times(), 1);
    }

    /// The runtime panics when the container is inspected: the container may be restarted again after the backoff of a
    /// failed restart.
    #[tokio::test]
    async fn panicking_environment_restart_counts_as_failed() {
        let (queue_tx, mut queue_rx) = mpsc::unbounded_channel();
        let (key, id) = (Key::namespaced("team", "web"), "containerd://id");
        let pod = NodePod {
            namespace: "team".to_owned(),
            name: "web".to_owned(),
            meta: Some(Box::new(PodContainerMeta {
                updating: true,
                ..PodContainerMeta::default()
            })),
            ..NodePod::default()
        };
        let shared = controller_with_api_response(500, &key, pod, PodMetaState::default(), queue_tx);
        let pod = shared.pods.get(&key).unwrap();
        let panic_count = || {
            let result = [("result", "panic".to_owned())];
            metrics().environment_restarts.get_or_create(&result).get()
        };
        let before = panic_count();
        shared.spawn_restart(&key, &pod, "main", id);
        assert_eq!(queue_rx.recv().await, Some(key.clone()));
        assert_eq!(panic_count(), before + 1);
        let states = shared.pod_states();
        let restart = states.get(&key).and_then(|memory| memory.restarts.get(id));
        assert!(
            matches!(restart, Some(plan::RestartState::Failed(1, _))),
            "{restart:?}"
        );
    }

    #[test]
    fn never_restarting_container_keeps_its_environment() {
        let container = |name: &str, restart| PodContainer {
            name: name.to_owned(),
            restart_policy: restart,
            ..PodContainer::default()
        };
        let pod = NodePod {
            containers: vec![
                container("a", None),
                container("b", Some(RestartPolicy::Never)),
                container("c", Some(RestartPolicy::OnFailure)),
            ],
            ..NodePod::default()
        };
        assert_eq!(non_restarting_policy(&pod, "a"), None);
        assert_eq!(non_restarting_policy(&pod, "b"), Some(RestartPolicy::Never));
        assert_eq!(non_restarting_policy(&pod, "c"), Some(RestartPolicy::OnFailure));
        let never = NodePod {
            restart_policy: RestartPolicy::Never,
            ..pod
        };
        assert_eq!(non_restarting_policy(&never, "a"), Some(RestartPolicy::Never));
    }

    #[test]
    fn released_pod_is_reconciled_once_more() {
        let pod = |has_meta: bool| {
            let meta = has_meta.then(Box::default);
            Some(Arc::new(NodePod {
                meta,
                ..NodePod::default()
            }))
        };
        let relevant = |old, new| {
            let key = Key::namespaced("n", "p");
            is_relevant(&Change { key, old, new })
        };
        assert!(relevant(None, pod(true)));
        assert!(relevant(pod(true), pod(false)));
        assert!(relevant(pod(true), None));
        assert!(!relevant(pod(false), pod(false)));
    }
}
