//! Stops containers, each in a task of its own: its preStop hook, TERM and KILL, with an event on the container.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::context::{NAME, RecreateContext};
use super::plan::{ContainerKey, StopAction};
use crate::hook;
use crate::pods::{MIN_GRACE_PERIOD, NodePod};
use crate::stop_slots::StopSlot;
use kruise_api::keys;
use kruise_cluster::{EventType, Key};
use kruise_cri::{self as cri, Runtime};
use kruise_ops::panics;

/// An event of a task about its container.
#[derive(Debug)]
pub struct TaskEvent {
    /// The container.
    pub key: ContainerKey,
    /// What has happened.
    pub kind: TaskEventKind,
}

/// What has happened to a container.
#[derive(Debug)]
pub enum TaskEventKind {
    /// There was no free slot before the request's deadline, and nothing was done.
    NotStarted,
    /// A slot is free, and the preStop hook starts.
    HookStarted,
    /// The runtime is called to stop the container.
    StopStarted,
    /// The container has stopped.
    Stopped,
    /// The container was not stopped.
    Failed {
        /// The error of the stop.
        error: String,
        /// Whether the same stop may succeed later without a change.
        retryable: bool,
        /// Used part of the grace period: by the hook, and by the runtime if it tried to stop the container.
        grace_spent: Duration,
    },
}

/// Everything that the stop of a container needs.
pub struct StopTask {
    /// The context shared by all Pods.
    pub shared: Arc<RecreateContext>,
    /// The runtime of the container.
    pub runtime: Arc<dyn Runtime>,
    /// The container's Pod.
    pub pod: Arc<NodePod>,
    /// The stop to execute.
    pub action: StopAction,
    /// Where to send events.
    pub event_tx: mpsc::UnboundedSender<TaskEvent>,
}

/// Runs the stop: at once if there already is a slot, otherwise when it gets one; not after the request's deadline.
/// Dropping the future cancels it.
pub async fn run(task: StopTask, slot: Option<StopSlot>) {
    let object = format!(
        "{}/{}, container {}",
        task.pod.namespace, task.pod.name, task.action.key.container
    );
    let result = panics::catch_panic(NAME, object, task.run(slot)).await;
    if let Err(panic) = result {
        task.send_event(TaskEventKind::Failed {
            error: panic.to_string(),
            retryable: true,
            grace_spent: Duration::ZERO,
        });
    }
}

impl StopTask {
    async fn run(&self, slot: Option<StopSlot>) {
        if let Some(slot) = self.acquire_slot(slot).await {
            slot.run(Box::pin(self.stop_container())).await;
        }
    }

    async fn stop_container(&self) {
        let action = &self.action;
        let StopAction { key, target, .. } = action;
        if action.first_attempt {
            self.report_killing();
        }
        let description = format!("stopping container {} of Pod {}", key.container, self.pod.name);
        let timeout = action.grace_period.saturating_add(MIN_GRACE_PERIOD);
        let _progress = self.shared.ctx.health.progress.begin(NAME, description, timeout);
        let mut grace_spent = Duration::ZERO;
        if action.run_hook {
            if self.may_run().await {
                let started = Instant::now();
                let (runtime, events) = (self.runtime.as_ref(), &self.shared.ctx.cluster.events);
                let (pod, grace) = (&self.pod, action.grace_period);
                let hook = hook::run_pre_stop(runtime, events, pod, &key.container, target, grace);
                if let Err(error) = hook.await {
                    // The progress of the hook is unknown: like kubelet, it gets the full time again.
                    return self.send_failed(&error, Duration::ZERO);
                }
                grace_spent = started.elapsed();
            }
            self.send_event(TaskEventKind::StopStarted);
        }
        let started = Instant::now();
        let Err(error) = self
            .runtime
            .stop_container(target, action.termination_grace(grace_spent))
            .await
        else {
            tracing::info!(pod = %self.pod.name, namespace = self.pod.namespace, container = key.container, id = target, "stopped container");
            return self.send_event(TaskEventKind::Stopped);
        };
        tracing::warn!(pod = %self.pod.name, namespace = self.pod.namespace, container = key.container, id = target, %error, "failed to stop container");
        // A runtime that answers has tried, and may have sent TERM. Without an answer that is unknown: like kubelet,
        // the container gets the full time again.
        if matches!(error, cri::Error::Rejected { .. }) {
            grace_spent += started.elapsed();
        }
        self.send_failed(&error, grace_spent);
    }

    /// Whether the container may still run. While the stop waited for a slot, kubelet may have started its successor, and
    /// a hook over HTTP would reach that one.
    async fn may_run(&self) -> bool {
        match self.runtime.container_status(&self.action.target).await {
            Ok(Some(status)) => status.state.may_run(),
            Ok(None) => false,
            // The hook or the stop says why.
            Err(_) => true,
        }
    }

    /// Waits for a stop slot of this node; none after the request's deadline, at which the plan cancels those that wait.
    async fn acquire_slot(&self, slot: Option<StopSlot>) -> Option<StopSlot> {
        if slot.is_some() {
            return slot;
        }
        let slot = self.shared.ctx.stop_slots.acquire(&self.pod.namespace).await?;
        let now = self.shared.now().mono;
        if self.action.deadline.is_some_and(|deadline| deadline <= now) {
            // If the API server's clock was set back, the deadline is later by now, and the plan stops the container.
            self.send_event(TaskEventKind::NotStarted);
            return None;
        }
        self.send_event(if self.action.run_hook {
            TaskEventKind::HookStarted
        } else {
            TaskEventKind::StopStarted
        });
        Some(slot)
    }

    fn send_event(&self, kind: TaskEventKind) {
        let key = self.action.key.clone();
        // The receiver is dropped only when no stop is in progress.
        let _ = self.event_tx.send(TaskEvent { key, kind });
        let pod = Key::namespaced(&self.pod.namespace, &self.pod.name);
        self.shared.enqueue(pod);
    }

    fn send_failed(&self, error: &cri::Error, grace_spent: Duration) {
        let (error, retryable) = (error.to_string(), error.retryable());
        self.send_event(TaskEventKind::Failed {
            error,
            retryable,
            grace_spent,
        });
    }

    fn report_killing(&self) {
        let StopAction {
            key,
            request_name: request,
            target,
            ..
        } = &self.action;
        let container = &key.container;
        tracing::info!(pod = %self.pod.name, namespace = self.pod.namespace, container, id = target, request, "stopping container");
        let note = format!("Stopping container {container} by ContainerRecreateRequest {request}");
        let (object, reason) = (self.pod.container_reference(container), keys::EVENT_KILLING);
        let events = &self.shared.ctx.cluster.events;
        events.publish(object, EventType::Normal, reason, "Recreating", note);
    }
}
