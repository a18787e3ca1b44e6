//! Carries hooks and stops out, each in a task of its own, with an event on the container.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::Shared;
use super::plan::{Act, Begin, Key};
use crate::api::keys;
use crate::cluster::EventType;
use crate::cri::{self, Runtime};
use crate::node::hook;
use crate::node::pods::PodView;

/// What a task says of itself.
#[derive(Debug)]
pub enum News {
    /// It had to wait for a slot, and begins now.
    Started {
        /// Which container.
        key: Key,
        /// Whether with its hook.
        hook: bool,
    },
    /// The hook is over.
    HookDone(Key),
    /// The container has stopped.
    Stopped(Key),
    /// The runtime could not stop it.
    Failed(Key, cri::Error),
}

/// Everything that a hook or a stop needs.
pub struct Job {
    /// What the daemon's Pods share.
    pub shared: Arc<Shared>,
    /// The runtime of the container.
    pub runtime: Arc<dyn Runtime>,
    /// The container's Pod.
    pub pod: Arc<PodView>,
    /// What to do.
    pub begin: Begin,
    /// Where to say what became of it.
    pub news_tx: mpsc::UnboundedSender<News>,
}

/// Does the job; with a slot in hand at once, else when it gets one. Dropping the future breaks it off.
pub async fn run(job: Job, slot: Option<OwnedSemaphorePermit>) {
    let _slot = match slot {
        Some(slot) => slot,
        None => match Arc::clone(&job.shared.slots).acquire_owned().await {
            Ok(slot) => {
                let hook = matches!(job.begin.act, Act::Hook { .. });
                job.tell(News::Started {
                    key: job.begin.key.clone(),
                    hook,
                });
                slot
            }
            // Slots are closed by nobody.
            Err(_) => return,
        },
    };
    if job.begin.first {
        job.killing();
    }
    let (doing, limit) = match &job.begin.act {
        Act::Hook { limit, .. } => ("running the preStop hook of", *limit),
        Act::Stop { grace } => ("stopping", *grace),
    };
    let what = format!(
        "{doing} container {} of Pod {}",
        job.begin.key.container, job.pod.name
    );
    let _step = job.shared.ctx.health.progress.begin(super::NAME, what, limit);
    let news = match &job.begin.act {
        Act::Hook { .. } => job.hook().await,
        Act::Stop { grace } => job.stop(*grace).await,
    };
    job.tell(news);
}

impl Job {
    fn tell(&self, news: News) {
        // Nobody listens any more when the Pod's task has ended.
        let _ = self.news_tx.send(news);
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

    async fn hook(&self) -> News {
        let key = self.begin.key.clone();
        let Act::Hook {
            hook,
            ports,
            host,
            limit,
        } = &self.begin.act
        else {
            return News::HookDone(key);
        };
        let target = hook::Target {
            runtime: self.runtime.as_ref(),
            container: &self.begin.target,
            pod_uid: &self.pod.uid,
            host: host.clone(),
            ports,
        };
        if let Err(error) = hook::run(hook, &target, *limit).await {
            tracing::warn!(pod = %self.pod.name, container = key.container, %error, "preStop hook failed");
            let note = format!("PreStop hook of container {} failed: {error}", key.container);
            self.event(
                EventType::Warning,
                keys::EVENT_FAILED_PRE_STOP_HOOK,
                "PreStop",
                note,
            );
        }
        News::HookDone(key)
    }

    async fn stop(&self, grace: Duration) -> News {
        let key = self.begin.key.clone();
        match self.runtime.stop_container(&self.begin.target, grace).await {
            Ok(()) => News::Stopped(key),
            Err(error) => {
                tracing::warn!(pod = %self.pod.name, container = key.container, %error, "container not stopped");
                News::Failed(key, error)
            }
        }
    }
}
