//! Tells in a Pod's annotation what its containers were started with, and restarts containers whose environment
//! an update in place has changed.
//!
//! In:  the node's Pods (watch), the container runtime.
//! Out: annotation `apps.kruise.io/runtime-containers-meta`, stops of containers, events on them, metric
//!      `environment_restarts`, what `kruise-daemon status` shows.
//! One pass per Pod at a time, whenever something about it changes. Every decision is in [`plan`].
//!
//! What a crash of the daemon can repeat: a preStop hook runs again where the container had not stopped yet.

mod act;
mod observe;
pub mod plan;
mod report;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Context;
use super::pods::{MetaView, PodView, RestartPolicy};
use kruise_cluster::queue::{self, Again, Failure};
use kruise_cluster::{self as cluster, Change, EventType, Key, Mirror};
use kruise_cri::{self as cri, Runtime};
use kruise_ops::metrics::metrics;
use kruise_ops::{Gate, panics};
use plan::{Memory, Plan, UNSEEN};

/// What the duty calls itself in logs and in liveness.
const NAME: &str = "container meta";
/// How many Pods are looked at and written at once.
const WORKERS: usize = 5;

/// How long until a container that a request is recreating is looked at again.
const REQUEST: Duration = Duration::from_secs(2);
/// The pause after a write that cannot succeed before somebody changes something.
const REFUSED: Duration = Duration::from_secs(300);

/// Why a pass failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server did not take a write.
    #[error(transparent)]
    Cluster(#[from] cluster::Error),
    /// The runtime did not answer.
    #[error(transparent)]
    Runtime(#[from] cri::Error),
    /// The runtime that a container belongs to is not there.
    #[error("no runtime named {0:?} answers")]
    NoRuntime(String),
    /// The Pod's status has something else for a container ID.
    #[error("container ID {0:?} is not of the form RUNTIME://ID")]
    Id(String),
    /// The annotation cannot be written as JSON.
    #[error("annotation: {0}")]
    Json(String),
    /// While it waited for a slot, the update was taken back or the Pod went.
    #[error("the restart is not wanted any more")]
    Withdrawn,
    /// A defect of ours.
    #[error(transparent)]
    Panic(#[from] panics::Panicked),
    /// The watch that never ends did.
    #[error("the watch of Pods ended")]
    WatchEnded,
}

impl Error {
    /// Whether the same pass may succeed later without anyone changing anything.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Cluster(error) => error.retryable(),
            Self::Runtime(error) => error.retryable(),
            Self::NoRuntime(_) | Self::Withdrawn | Self::Panic(_) => true,
            Self::Id(_) | Self::Json(_) | Self::WatchEnded => false,
        }
    }

    /// Whether the same pass fails until somebody changes something.
    fn lasting(&self) -> bool {
        match self {
            Self::Cluster(error) => error.lasting(),
            other => !other.retryable(),
        }
    }

    /// The word used as metric label.
    #[must_use]
    pub fn category(&self) -> &'static str {
        match self {
            Self::Cluster(error) => error.category(),
            Self::Runtime(error) => error.category(),
            Self::NoRuntime(_) => "no_runtime",
            Self::Id(_) => "bad_id",
            Self::Json(_) => "json",
            Self::Withdrawn => "withdrawn",
            Self::Panic(_) => "panic",
            Self::WatchEnded => "watch_ended",
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Cluster(error) => error.into(),
            other => Self::new(other.to_string()),
        }
    }
}

/// What the passes share.
struct Shared {
    ctx: Context,
    pods: Mirror<PodView>,
    /// Whether environment from labels and annotations is looked after.
    env: bool,
    memories: Mutex<HashMap<Key, Memory>>,
    start: Instant,
    keys: mpsc::UnboundedSender<Key>,
}

/// Runs until shutdown; `pods` is the mirror of this node's Pods.
///
/// # Errors
/// When the watch ends by itself.
pub async fn run(mut ctx: Context, pods: Mirror<PodView>) -> Result<(), Error> {
    // OpenKruise's name of the source of these events, which field selectors of clients may hold.
    ctx.cluster.events = ctx.cluster.events.of("kruise-daemon-containermeta");
    let (keys, keys_rx) = mpsc::unbounded_channel();
    let shutdown = ctx.shutdown.clone();
    let shared = Arc::new(Shared {
        env: ctx.options.feature_gates.on(Gate::InPlaceUpdateEnvFromMetadata),
        ctx,
        pods,
        memories: Mutex::default(),
        start: Instant::now(),
        keys,
    });
    let progress = shared.ctx.health.progress.clone();
    let work = queue::run(NAME, keys_rx, WORKERS, &progress, shutdown, |key| {
        Arc::clone(&shared).pass(key)
    });
    tokio::select! {
        () = work => Ok(()),
        error = shared.feed() => Err(error),
    }
}

impl Shared {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn memories(&self) -> MutexGuard<'_, HashMap<Key, Memory>> {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn runtime(&self, scheme: &str) -> Result<Arc<dyn Runtime>, Error> {
        let runtime = self.ctx.runtimes.by_name(scheme);
        runtime.ok_or_else(|| Error::NoRuntime(scheme.to_owned()))
    }

    /// Sends the Pods to look at: those that changed, and all when a runtime has come or gone.
    async fn feed(&self) -> Error {
        let mut pods = self.pods.subscribe();
        let mut runtimes = self.ctx.runtimes.subscribe();
        loop {
            tokio::select! {
                change = pods.recv() => {
                    let Some(change) = change else { return Error::WatchEnded };
                    // The pass that follows takes in what it needs, or panics by itself.
                    let object = format_args!("change of {}", change.key);
                    let _ = panics::isolated_now(NAME, object, || self.notice(&change));
                    if concerns(&change) {
                        // The receiver lives as long as the work beside us.
                        let _ = self.keys.send(change.key);
                    }
                }
                // The sender lives as long as the context that we hold.
                Ok(()) = runtimes.changed() => {
                    for (key, _) in self.pods.entries().into_iter().filter(|(_, pod)| pod.meta.is_some()) {
                        let _ = self.keys.send(key);
                    }
                }
            }
        }
    }

    /// Takes in each change by itself, for passes come less often.
    fn notice(&self, change: &Change<PodView>) {
        let Some((pod, meta)) = change
            .new
            .as_ref()
            .and_then(|pod| Some((pod, pod.meta.as_ref()?)))
        else {
            return;
        };
        let now = self.now();
        let mut memories = self.memories();
        memories
            .entry(change.key.clone())
            .or_default()
            .notice(pod, meta, now);
    }

    /// Looks at one Pod, asks the runtime what is not known yet, restarts and writes.
    async fn pass(self: Arc<Self>, key: Key) -> Result<Again, Error> {
        let pod = self.pods.get(&key);
        let Some((pod, meta)) = pod.as_ref().and_then(|pod| Some((pod, pod.meta.as_deref()?))) else {
            self.memories().remove(&key);
            report::show(&self.ctx.live, &key, Vec::new());
            return Ok(None);
        };
        let mut plan = self.plan(&key, pod, meta);
        let mut failure = None;
        if !plan.read.is_empty() {
            for (name, id) in &plan.read {
                // One container that cannot be read must not hold up what is known of the others.
                if let Err(error) = self.read(&key, pod, meta, name, id).await {
                    failure = Some(error);
                }
            }
            plan = self.plan(&key, pod, meta);
        }
        for (name, id) in &std::mem::take(&mut plan.restart) {
            if self.recreated(id) {
                // The request may yet fail to stop it.
                let later = self.now() + REQUEST;
                plan.wake_at(later);
            } else if let Some(policy) = ends_for_good(pod, name) {
                self.ctx.cluster.events.publish(
                    pod.reference(name),
                    EventType::Warning,
                    "EnvironmentOutdated",
                    "Restarting",
                    format!("Container {name} keeps its old environment: with restartPolicy {policy} it might not start again"),
                );
            } else {
                self.begin_restart(&key, pod, name, id);
            }
        }
        self.show(&key, pod);
        if let Some(set) = plan.write.take() {
            if let Err(error) = act::write(&self, pod, &set).await {
                if !error.lasting() {
                    return Err(error);
                }
                tracing::warn!(pod = %key, %error, pause = ?REFUSED, "the API server rejected the annotation");
                let wake = plan.wake.map(|at| at.saturating_sub(self.now()));
                return Ok(Some(wake.map_or(REFUSED, |wake| wake.min(REFUSED))));
            }
            let now = self.now();
            plan.wake_at(now + UNSEEN);
            self.remember(&key, |memory| memory.written = Some((set, now)));
        }
        match failure {
            // Where there is something else to wake up for, the question is asked again then.
            Some(error) if error.retryable() && plan.wake.is_none() => Err(error),
            failure => {
                if let Some(error) = failure {
                    tracing::warn!(pod = %key, %error, "cannot read the metadata of a container; leaving it out of the annotation");
                }
                Ok(plan.wake.map(|at| at.saturating_sub(self.now())))
            }
        }
    }

    fn plan(&self, key: &Key, pod: &PodView, meta: &MetaView) -> Plan {
        let mut memories = self.memories();
        let memory = memories.entry(key.clone()).or_default();
        let now = self.now();
        memory.look(pod, meta, now);
        let plan = plan::plan(pod, meta, memory, self.env, now);
        memory.waits = plan.waits.clone();
        plan
    }

    /// Whether a ContainerRecreateRequest is at that container, so that its hook must not run once more.
    fn recreated(&self, id: &str) -> bool {
        let requests = self.ctx.live.recreates.borrow();
        let mut containers = requests.iter().flat_map(|request| &request.containers);
        containers.any(|container| {
            container.old_container_id.as_deref() == Some(id) && container.step == "Recreating"
        })
    }

    /// Whether a restart is still wanted: of this very Pod, which is not being deleted, and in an update.
    fn wanted(&self, key: &Key, uid: &str) -> bool {
        let pod = self.pods.get(key).filter(|pod| pod.uid == uid && !pod.deleting);
        pod.is_some_and(|pod| pod.meta.as_ref().is_some_and(|meta| meta.updating))
    }

    /// Ends when the Pod is gone or on its way out.
    async fn pod_ends(&self, key: &Key, uid: &str) {
        let mut changes = self.pods.subscribe();
        while self
            .pods
            .get(key)
            .is_some_and(|pod| pod.uid == uid && !pod.deleting)
        {
            if changes.recv().await.is_none() {
                return std::future::pending().await;
            }
        }
    }

    fn show(&self, key: &Key, pod: &PodView) {
        let rows = self.memories().get(key).map(|memory| report::rows(pod, memory));
        report::show(&self.ctx.live, key, rows.unwrap_or_default());
    }

    /// Changes what is remembered of a Pod, if it is still there.
    fn remember(&self, key: &Key, change: impl FnOnce(&mut Memory)) {
        if let Some(memory) = self.memories().get_mut(key) {
            change(memory);
        }
    }

    async fn read(
        &self,
        key: &Key,
        pod: &PodView,
        meta: &MetaView,
        name: &str,
        id: &str,
    ) -> Result<(), Error> {
        let (scheme, bare) = observe::parts(id)?;
        let runtime = self.runtime(scheme)?;
        let Some(wanted) = meta.containers.iter().find(|wanted| wanted.name == name) else {
            return Ok(());
        };
        if let Some(facts) = observe::facts(runtime.as_ref(), pod, wanted, bare, self.env).await? {
            self.remember(key, |memory| {
                memory.facts.insert(id.to_owned(), facts);
            });
        }
        Ok(())
    }

    /// Restarts a container beside the passes, for its hook may take long.
    fn begin_restart(self: &Arc<Self>, key: &Key, pod: &Arc<PodView>, name: &str, id: &str) {
        self.remember(key, |memory| memory.restarting(id));
        let (shared, pod, key) = (Arc::clone(self), Arc::clone(pod), key.clone());
        let (name, id) = (name.to_owned(), id.to_owned());
        tokio::spawn(async move {
            let shutdown = shared.ctx.shutdown.clone();
            let object = format!("{key}, container {name}");
            let restart = Box::pin(act::restart(&shared, &key, &pod, &name, &id));
            let restart = panics::isolated(NAME, object, restart);
            let done = tokio::select! {
                () = shutdown.cancelled() => return,
                () = shared.pod_ends(&key, &pod.uid) => return,
                done = restart => done.unwrap_or_else(|panic| Err(panic.into())),
            };
            let result = done.as_ref().map_or_else(Error::category, |()| "ok");
            let restarts = &metrics().environment_restarts;
            restarts.get_or_create(&[("result", result.to_owned())]).inc();
            if let Err(error) = &done {
                tracing::warn!(pod = %pod.name, namespace = pod.namespace, container = name, %error, "container not restarted");
            }
            let now = shared.now();
            shared.remember(&key, |memory| memory.restarted(id, done.is_ok(), now));
            let _ = shared.keys.send(key);
        });
    }
}

/// The container's restart policy, where kubelet might not start it again after it was stopped.
fn ends_for_good(pod: &PodView, container: &str) -> Option<RestartPolicy> {
    let policy = pod.policy(pod.container(container)?);
    (policy != RestartPolicy::Always).then_some(policy)
}

/// Whether the Pod is one to tell of, or was: what is remembered of it then has to go.
fn concerns(change: &Change<PodView>) -> bool {
    let either = [&change.new, &change.old];
    either.into_iter().flatten().any(|pod| pod.meta.is_some())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use crate::live;
    use crate::pods::{ContainerView, MetaView, StatusView, Wanted};

    /// What passes over one Pod share, of an API server with that answer to everything.
    fn shared(
        code: u16,
        key: &Key,
        pod: PodView,
        memory: Memory,
        keys: mpsc::UnboundedSender<Key>,
    ) -> Arc<Shared> {
        let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            let answer = http::Response::builder().status(code);
            std::future::ready(answer.body(kube::client::Body::empty()))
        });
        Arc::new(Shared {
            ctx: Context::of(kube::Client::new(service, "default")),
            pods: Mirror::of([(key.clone(), pod)]),
            env: true,
            memories: Mutex::new([(key.clone(), memory)].into()),
            start: Instant::now(),
            keys,
        })
    }

    /// An API server that has just started may know no role yet: that is tried again soon, and what cannot be stored late.
    #[tokio::test(start_paused = true)]
    async fn an_annotation_that_is_forbidden_is_written_again_soon() {
        let (key, id) = (Key::namespaced("team", "web"), "containerd://id");
        let pod = PodView {
            namespace: "team".to_owned(),
            name: "web".to_owned(),
            containers: vec![ContainerView {
                name: "main".to_owned(),
                status: Some(StatusView {
                    container_id: id.to_owned(),
                    ..StatusView::default()
                }),
                ..ContainerView::default()
            }],
            meta: Some(Box::new(MetaView {
                containers: vec![Wanted {
                    name: "main".to_owned(),
                    ..Wanted::default()
                }],
                ..MetaView::default()
            })),
            ..PodView::default()
        };
        let facts = plan::Facts {
            plain_hash: 1,
            env_hash: None,
        };
        let memory = Memory {
            facts: [(id.to_owned(), facts)].into(),
            ..Memory::default()
        };
        for code in [401, 403, 422] {
            let (keys, _again) = mpsc::unbounded_channel();
            let shared = shared(code, &key, pod.clone(), memory.clone(), keys);
            match shared.pass(key.clone()).await {
                Err(error) => assert!(code != 422 && !error.lasting(), "{code}: {error}"),
                Ok(again) => assert_eq!((again, code), (Some(REFUSED), 422)),
            }
        }
    }

    /// The request has the hook run, which must not run once more.
    #[tokio::test]
    async fn a_container_that_a_request_recreates_is_not_restarted() {
        let container = |step: &str| live::RecreateContainer {
            step: step.to_owned(),
            old_container_id: Some("containerd://id".to_owned()),
            ..live::RecreateContainer::default()
        };
        let (keys, _again) = mpsc::unbounded_channel();
        let key = Key::namespaced("team", "web");
        let shared = shared(500, &key, PodView::default(), Memory::default(), keys);
        for (step, recreated) in [("Pending", false), ("Recreating", true), ("Succeeded", false)] {
            shared.ctx.live.recreates.send_replace(vec![live::Recreate {
                containers: vec![container(step)],
                ..live::Recreate::default()
            }]);
            assert_eq!(shared.recreated("containerd://id"), recreated, "{step}");
            assert!(!shared.recreated("containerd://other"), "{step}");
        }
    }

    #[tokio::test]
    async fn a_pod_whose_change_panics_is_looked_at() {
        let panics = panics::injected::panic_at(NAME, "change of team/panic");
        let (keys, mut sent) = mpsc::unbounded_channel();
        let key = Key::namespaced("team", "panic");
        let pod = PodView {
            meta: Some(Box::default()),
            ..PodView::default()
        };
        let shared = shared(500, &key, pod, Memory::default(), keys);
        tokio::select! {
            error = shared.feed() => panic!("{error}"),
            sent = sent.recv() => assert_eq!(sent, Some(key)),
        }
        assert_eq!(panics.times(), 1);
    }

    /// The runtime panics when it is asked for the container: it may be restarted again, after the pause of one that failed.
    #[tokio::test]
    async fn a_restart_that_panics_is_one_that_failed() {
        let (keys, mut again) = mpsc::unbounded_channel();
        let (key, id) = (Key::namespaced("team", "web"), "containerd://id");
        let pod = PodView {
            namespace: "team".to_owned(),
            name: "web".to_owned(),
            meta: Some(Box::new(MetaView {
                updating: true,
                ..MetaView::default()
            })),
            ..PodView::default()
        };
        let shared = shared(500, &key, pod, Memory::default(), keys);
        let pod = shared.pods.get(&key).unwrap();
        let counted = || {
            let result = [("result", "panic".to_owned())];
            metrics().environment_restarts.get_or_create(&result).get()
        };
        let before = counted();
        shared.begin_restart(&key, &pod, "main", id);
        assert_eq!(again.recv().await, Some(key.clone()));
        assert_eq!(counted(), before + 1);
        let memories = shared.memories();
        let restart = memories.get(&key).and_then(|memory| memory.restarts.get(id));
        assert!(
            matches!(restart, Some(plan::Restart::Failed(1, _))),
            "{restart:?}"
        );
    }

    #[test]
    fn a_container_that_might_not_start_again_keeps_its_environment() {
        let container = |name: &str, restart| ContainerView {
            name: name.to_owned(),
            restart,
            ..ContainerView::default()
        };
        let pod = PodView {
            containers: vec![
                container("a", None),
                container("b", Some(RestartPolicy::Never)),
                container("c", Some(RestartPolicy::OnFailure)),
            ],
            ..PodView::default()
        };
        assert_eq!(ends_for_good(&pod, "a"), None);
        assert_eq!(ends_for_good(&pod, "b"), Some(RestartPolicy::Never));
        assert_eq!(ends_for_good(&pod, "c"), Some(RestartPolicy::OnFailure));
        let never = PodView {
            restart: RestartPolicy::Never,
            ..pod
        };
        assert_eq!(ends_for_good(&never, "a"), Some(RestartPolicy::Never));
    }

    #[test]
    fn a_pod_that_is_let_go_is_looked_at_once_more() {
        let pod = |told: bool| {
            let meta = told.then(Box::default);
            Some(Arc::new(PodView {
                meta,
                ..PodView::default()
            }))
        };
        let concerned = |old, new| {
            let key = Key::namespaced("n", "p");
            concerns(&Change { key, old, new })
        };
        assert!(concerned(None, pod(true)));
        assert!(concerned(pod(true), pod(false)));
        assert!(concerned(pod(true), None));
        assert!(!concerned(pod(false), pod(false)));
    }
}
