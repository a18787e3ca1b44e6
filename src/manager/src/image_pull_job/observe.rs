//! Applies watch events to the index.

use std::sync::Arc;

use jiff::Timestamp;
use tokio::sync::mpsc::UnboundedReceiver;

use super::job_lifecycle::ResolvedSecrets;
use super::plan::index::{JobIndex, Uid};
use super::plan::job::PullJob;
use crate::Stores;
use crate::view::{NodeImageView, NodeView, PodView};
use kruise_api::image_pull_job::ImagePullJob;
use kruise_cluster::{Change, ChangeHandler};

/// The watches that feed the index.
pub struct WatchEvents {
    jobs: UnboundedReceiver<Change<ImagePullJob>>,
    node_images: UnboundedReceiver<Change<NodeImageView>>,
    nodes: UnboundedReceiver<Change<NodeView>>,
    pods: UnboundedReceiver<Change<PodView>>,
    secrets: UnboundedReceiver<ResolvedSecrets>,
    handler: ChangeHandler<WatchEvent>,
}

/// One change of any kind.
pub enum WatchEvent {
    /// Of an ImagePullJob.
    Job(Change<ImagePullJob>),
    /// Of a NodeImage.
    NodeImage(Change<NodeImageView>),
    /// Of a Node.
    Node(Change<NodeView>),
    /// Of a Pod.
    Pod(Change<PodView>),
    /// The copies of a job's pull secrets.
    Secrets(ResolvedSecrets),
}

impl std::fmt::Display for WatchEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Job(change) => write!(f, "ImagePullJob {}", change.key),
            Self::NodeImage(change) => write!(f, "NodeImage {}", change.key),
            Self::Node(change) => write!(f, "Node {}", change.key),
            Self::Pod(change) => write!(f, "Pod {}", change.key),
            Self::Secrets(resolved) => write!(f, "pull secrets of the job with UID {}", resolved.uid),
        }
    }
}

impl WatchEvents {
    /// Subscribes to all of them; objects in the stores come first.
    pub fn new(stores: &Stores, secrets: UnboundedReceiver<ResolvedSecrets>) -> Self {
        Self {
            jobs: stores.jobs.subscribe(),
            node_images: stores.node_images.subscribe(),
            nodes: stores.nodes.subscribe(),
            pods: stores.pods.subscribe(),
            secrets,
            handler: ChangeHandler::new(super::NAME),
        }
    }

    /// The next change; waits forever when all senders are dropped, which happens at shutdown.
    pub async fn next(&mut self) -> WatchEvent {
        tokio::select! {
            Some(change) = self.nodes.recv() => WatchEvent::Node(change),
            Some(change) = self.node_images.recv() => WatchEvent::NodeImage(change),
            Some(change) = self.pods.recv() => WatchEvent::Pod(change),
            Some(change) = self.jobs.recv() => WatchEvent::Job(change),
            Some(resolved) = self.secrets.recv() => WatchEvent::Secrets(resolved),
            change = self.handler.next_retry(), if self.handler.has_pending() => change,
            else => std::future::pending().await,
        }
    }

    /// Applies all queued events, so that one reconcile acts on the newest state. Nodes come before jobs: at the start
    /// a job must not find an empty cluster.
    pub fn drain(&mut self, index: &mut JobIndex, now: Timestamp) {
        while let Ok(change) = self.nodes.try_recv() {
            self.apply(index, WatchEvent::Node(change), now);
        }
        while let Ok(change) = self.node_images.try_recv() {
            self.apply(index, WatchEvent::NodeImage(change), now);
        }
        while let Ok(change) = self.pods.try_recv() {
            self.apply(index, WatchEvent::Pod(change), now);
        }
        while let Ok(change) = self.jobs.try_recv() {
            self.apply(index, WatchEvent::Job(change), now);
        }
        while let Ok(resolved) = self.secrets.try_recv() {
            self.apply(index, WatchEvent::Secrets(resolved), now);
        }
    }

    /// Applies one change.
    pub fn apply(&mut self, index: &mut JobIndex, change: WatchEvent, now: Timestamp) {
        self.handler
            .handle(change, |change| apply_event(index, change, now));
    }
}

fn apply_event(index: &mut JobIndex, change: &WatchEvent, now: Timestamp) {
    match change {
        WatchEvent::Job(change) => {
            let uid =
                |job: &Arc<ImagePullJob>| -> Uid { job.metadata.uid.as_deref().unwrap_or_default().into() };
            let old_uid = change.old.as_ref().map(uid);
            let new_uid = change.new.as_ref().map(uid);
            if let Some(before) = old_uid.filter(|b| Some(b) != new_uid.as_ref()) {
                index.remove_job(&before);
            }
            if let Some(job) = change.new.as_deref() {
                index.upsert_job(PullJob::from_object(job), now);
            }
        }
        WatchEvent::NodeImage(change) => index.update_node_image(&change.key.name, change.new.clone()),
        WatchEvent::Node(change) => index.update_node(&change.key.name, change.new.as_deref(), now),
        WatchEvent::Pod(change) => index.update_pod(&change.key, change.new.clone()),
        WatchEvent::Secrets(resolved) => match &resolved.copies {
            Ok(copies) => index.set_secrets(&resolved.uid, copies.clone()),
            Err(why) => index.block(&resolved.uid, why.clone()),
        },
    }
}
