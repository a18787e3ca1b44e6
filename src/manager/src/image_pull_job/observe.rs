//! Applies watch events to the index.

use std::sync::Arc;

use jiff::Timestamp;

use super::job_lifecycle::ResolvedSecrets;
use super::name::NAME;
use super::plan::index::JobIndex;
use super::plan::job::{PullJob, Uid};
use crate::Stores;
use crate::view::{NodeImageView, NodeView, PodView};
use kruise_api::image_pull_job::ImagePullJob;
use kruise_cluster::{Change, WatchEvents};

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
}

impl std::fmt::Display for WatchEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Job(change) => write!(f, "ImagePullJob {}", change.key),
            Self::NodeImage(change) => write!(f, "NodeImage {}", change.key),
            Self::Node(change) => write!(f, "Node {}", change.key),
            Self::Pod(change) => write!(f, "Pod {}", change.key),
        }
    }
}

/// The objects that the index is made of; those in the stores come first. Nodes come before jobs: at the start a job must
/// not find an empty cluster.
pub fn watch_events(stores: &Stores) -> WatchEvents<WatchEvent> {
    WatchEvents::new(NAME)
        .with(stores.nodes.subscribe(), WatchEvent::Node)
        .with(stores.node_images.subscribe(), WatchEvent::NodeImage)
        .with(stores.pods.subscribe(), WatchEvent::Pod)
        .with(stores.jobs.subscribe(), WatchEvent::Job)
}

/// Applies one change to the index.
pub fn apply_event(index: &mut JobIndex, change: &WatchEvent, now: Timestamp) {
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
        WatchEvent::NodeImage(change) => {
            index.update_node_image(&change.key.name, change.new.clone(), now);
        }
        WatchEvent::Node(change) => index.update_node(&change.key.name, change.new.as_ref(), now),
        WatchEvent::Pod(change) => index.update_pod(&change.key, change.new.clone()),
    }
}

/// Applies the copies of a job's pull secrets to the index, which ignores those of a job that it does not know.
pub fn apply_secrets(index: &mut JobIndex, resolved: &ResolvedSecrets) {
    match &resolved.copies {
        Ok(copies) => index.set_secrets(&resolved.uid, copies.clone()),
        Err(why) => index.block(&resolved.uid, why.clone()),
    }
}
