//! Stops containers, each in a task of its own: its preStop hook, TERM and KILL, with an event on the container.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::Shared;
use super::plan::{Begin, Hook, Key, LEAST_GRACE};
use crate::hook;
use crate::pods::PodView;
use crate::slots::Slot;
use kruise_api::keys;
use kruise_cluster::EventType;
use kruise_cri::{self as cri, Runtime};
use kruise_ops::panics;

/// What a task reports of its container.
#[derive(Debug)]
pub struct News {
    /// Which container.
    pub key: Key,
    /// What has happened.
    pub what: What,
}

/// What has happened to a container.
#[derive(Debug)]
pub enum What {
    /// A slot is free, and its preStop hook begins.
    Hook,
    /// The runtime is asked to stop it.
    Stopping,
    /// It has stopped.
    Stopped,
    /// It was not stopped.
    Failed {
        /// What went wrong.
        error: Failure,
        /// How much of the grace period is used up: by the hook, and by the runtime where it tried.
        spent: Duration,
    },
}

/// Why a container was not stopped.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// What the runtime said.
    #[error(transparent)]
    Runtime(#[from] cri::Error),
    /// A defect of ours.
    #[error(transparent)]
    Panic(#[from] panics::Panicked),
}

impl Failure {
    /// Whether the same stop may succeed later without anyone changing anything.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Runtime(error) => error.retryable(),
            Self::Panic(_) => true,
        }
    }
}

/// Everything that a stop needs.
pub struct Job {
    /// What the daemon's Pods share.
    pub shared: Arc<Shared>,
    /// The runtime of the container.
    pub runtime: Arc<dyn Runtime>,
    /// The container's Pod.
    pub pod: Arc<PodView>,
    /// What to do.
    pub begin: Begin,
    /// Where to report what became of it.
    pub news_tx: mpsc::UnboundedSender<News>,
}

/// Does the job; with a slot in hand at once, else when it gets one before the request's deadline. Dropping the future
/// breaks it off.
pub async fn run(job: Job, slot: Option<Slot>) {
    let object = format!(
        "{}/{}, container {}",
        job.pod.namespace, job.pod.name, job.begin.key.container
    );
    let stop = panics::isolated(super::NAME, object, job.run(slot)).await;
    if let Err(panic) = stop {
        let (error, spent) = (panic.into(), Duration::ZERO);
        job.report(What::Failed { error, spent });
    }
}

impl Job {
    async fn run(&self, slot: Option<Slot>) {
        if let Some(slot) = self.slot(slot).await {
            slot.during(Box::pin(self.stop())).await;
        }
    }

    async fn stop(&self) {
        let Begin {
            key,
            target,
            act,
            first,
            ..
        } = &self.begin;
        if *first {
            self.killing();
        }
        let what = format!("stopping container {} of Pod {}", key.container, self.pod.name);
        let limit = act.grace.saturating_add(LEAST_GRACE);
        let _step = self.shared.ctx.health.progress.begin(super::NAME, what, limit);
        let mut spent = Duration::ZERO;
        if let Some(hook) = &act.hook {
            let begun = Instant::now();
            if let Err(error) = self.hook(hook, act.grace).await {
                // Nobody knows how far it came: like kubelet, it gets the time once more.
                let (error, spent) = (error.into(), Duration::ZERO);
                return self.report(What::Failed { error, spent });
            }
            spent = begun.elapsed();
            self.report(What::Stopping);
        }
        let begun = Instant::now();
        let Err(error) = self.runtime.stop_container(target, act.term(spent)).await else {
            tracing::info!(pod = %self.pod.name, namespace = self.pod.namespace, container = key.container, id = target, "stopped container");
            return self.report(What::Stopped);
        };
        tracing::warn!(pod = %self.pod.name, namespace = self.pod.namespace, container = key.container, id = target, %error, "failed to stop container");
        // A runtime that answers has tried, and TERM may be out. Of one that does not, that is not known: like kubelet,
        // the container is given the time once more.
        if matches!(error, cri::Error::Refused { .. }) {
            spent += begun.elapsed();
        }
        let error = error.into();
        self.report(What::Failed { error, spent });
    }

    /// A slot among the stops of this node; none where the request's deadline comes first.
    async fn slot(&self, slot: Option<Slot>) -> Option<Slot> {
        if slot.is_some() {
            return slot;
        }
        let deadline = async {
            match self.begin.until {
                Some(until) => tokio::time::sleep_until(self.shared.instant(until)).await,
                None => std::future::pending().await,
            }
        };
        let slot = tokio::select! {
            biased;
            () = deadline => return None,
            slot = self.shared.ctx.stops.take(&self.pod.namespace) => slot?,
        };
        self.report(if self.begin.act.hook.is_some() {
            What::Hook
        } else {
            What::Stopping
        });
        Some(slot)
    }

    fn report(&self, what: What) {
        let key = self.begin.key.clone();
        // The receiver is gone only when the Pod's task has ended.
        let _ = self.news_tx.send(News { key, what });
    }

    fn event(&self, type_: EventType, reason: &str, action: &str, note: String) {
        let object = self.pod.reference(&self.begin.key.container);
        self.shared
            .ctx
            .cluster
            .events
            .publish(object, type_, reason, action, note);
    }

    fn killing(&self) {
        let Begin {
            key, request, target, ..
        } = &self.begin;
        let container = &key.container;
        tracing::info!(pod = %self.pod.name, namespace = self.pod.namespace, container, id = target, request, "stopping container");
        let note = format!("Stopping container {container} by ContainerRecreateRequest {request}");
        self.event(EventType::Normal, keys::EVENT_KILLING, "Recreating", note);
    }

    /// Runs the hook for at most the grace period; where it fails the container is stopped all the same.
    ///
    /// # Errors
    /// When the runtime went away, so that the hook must run again.
    async fn hook(&self, hook: &Hook, grace: Duration) -> Result<(), cri::Error> {
        let container = &self.begin.key.container;
        let target = hook::Target {
            runtime: self.runtime.as_ref(),
            container: &self.begin.target,
            pod_uid: &self.pod.runtime_uid,
            host: hook.host.clone(),
            ports: &hook.ports,
        };
        let error = match hook::run(&hook.handler, &target, grace).await {
            Ok(()) => {
                tracing::info!(pod = %self.pod.name, namespace = self.pod.namespace, container, "preStop hook succeeded");
                return Ok(());
            }
            Err(hook::Error::Exec(error @ cri::Error::Unreachable { .. })) => {
                tracing::warn!(pod = %self.pod.name, namespace = self.pod.namespace, container, %error, "preStop hook broken off; it runs again");
                return Err(error);
            }
            Err(error) => error,
        };
        tracing::warn!(pod = %self.pod.name, namespace = self.pod.namespace, container, %error, "preStop hook failed");
        let note = format!("PreStop hook of container {container} failed: {error}");
        let reason = keys::EVENT_FAILED_PRE_STOP_HOOK;
        self.event(EventType::Warning, reason, "PreStop", note);
        Ok(())
    }
}
