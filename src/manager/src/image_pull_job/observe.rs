//! Turns watch events into what the index knows.

use std::sync::Arc;

use jiff::Timestamp;
use tokio::sync::mpsc::UnboundedReceiver;

use super::keeper::Resolved;
use super::plan::index::{Index, Uid};
use super::plan::job::Job;
use crate::Stores;
use crate::view::{NodeImageView, NodeView, PodView};
use kruise_api::image_pull_job::ImagePullJob;
use kruise_cluster::{Change, Intake};

/// The watches that the index lives from.
pub struct Changes {
    jobs: UnboundedReceiver<Change<ImagePullJob>>,
    node_images: UnboundedReceiver<Change<NodeImageView>>,
    nodes: UnboundedReceiver<Change<NodeView>>,
    pods: UnboundedReceiver<Change<PodView>>,
    secrets: UnboundedReceiver<Resolved>,
    intake: Intake<Any>,
}

/// One change of any kind.
pub enum Any {
    /// Of an ImagePullJob.
    Job(Change<ImagePullJob>),
    /// Of a NodeImage.
    NodeImage(Change<NodeImageView>),
    /// Of a Node.
    Node(Change<NodeView>),
    /// Of a Pod.
    Pod(Change<PodView>),
    /// The copies of a job's pull secrets.
    Secrets(Resolved),
}

impl std::fmt::Display for Any {
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

impl Changes {
    /// Subscribes to all of them; what is known already comes first.
    pub fn new(stores: &Stores, secrets: UnboundedReceiver<Resolved>) -> Self {
        Self {
            jobs: stores.jobs.subscribe(),
            node_images: stores.node_images.subscribe(),
            nodes: stores.nodes.subscribe(),
            pods: stores.pods.subscribe(),
            secrets,
            intake: Intake::new(super::NAME),
        }
    }

    /// The next change; waits for ever when all senders are gone, which is when the process ends.
    pub async fn next(&mut self) -> Any {
        tokio::select! {
            Some(change) = self.nodes.recv() => Any::Node(change),
            Some(change) = self.node_images.recv() => Any::NodeImage(change),
            Some(change) = self.pods.recv() => Any::Pod(change),
            Some(change) = self.jobs.recv() => Any::Job(change),
            Some(resolved) = self.secrets.recv() => Any::Secrets(resolved),
            change = self.intake.again(), if self.intake.waits() => change,
            else => std::future::pending().await,
        }
    }

    /// Takes in all that has arrived, so that one pass acts on the newest state. Nodes come before jobs: at
    /// the start a job must not find an empty cluster.
    pub fn drain(&mut self, index: &mut Index, now: Timestamp) {
        while let Ok(change) = self.nodes.try_recv() {
            self.apply(index, Any::Node(change), now);
        }
        while let Ok(change) = self.node_images.try_recv() {
            self.apply(index, Any::NodeImage(change), now);
        }
        while let Ok(change) = self.pods.try_recv() {
            self.apply(index, Any::Pod(change), now);
        }
        while let Ok(change) = self.jobs.try_recv() {
            self.apply(index, Any::Job(change), now);
        }
        while let Ok(resolved) = self.secrets.try_recv() {
            self.apply(index, Any::Secrets(resolved), now);
        }
    }

    /// Takes in one change.
    pub fn apply(&mut self, index: &mut Index, change: Any, now: Timestamp) {
        self.intake.take(change, |change| take_in(index, change, now));
    }
}

fn take_in(index: &mut Index, change: &Any, now: Timestamp) {
    match change {
        Any::Job(change) => {
            let uid =
                |job: &Arc<ImagePullJob>| -> Uid { job.metadata.uid.as_deref().unwrap_or_default().into() };
            let before = change.old.as_ref().map(uid);
            let after = change.new.as_ref().map(uid);
            if let Some(before) = before.filter(|b| Some(b) != after.as_ref()) {
                index.drop_job(&before);
            }
            if let Some(job) = change.new.as_deref() {
                index.put_job(Job::read(job), now);
            }
        }
        Any::NodeImage(change) => index.node_image(&change.key.name, change.new.clone()),
        Any::Node(change) => index.node_is(&change.key.name, change.new.as_deref(), now),
        Any::Pod(change) => index.pod(&change.key, change.new.clone()),
        Any::Secrets(resolved) => match &resolved.copies {
            Ok(copies) => index.secrets(&resolved.uid, copies.clone()),
            Err(why) => index.hinder(&resolved.uid, why.clone()),
        },
    }
}
