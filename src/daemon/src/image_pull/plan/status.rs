//! Composes the NodeImage's status from the board.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::size_limit::fit_to_size;
use super::{PullLimits, PullStage, PullTask, TagKey, TaskBoard};
use kruise_api::node_image::{
    ImagePullPhase, ImageStatus, ImageTagStatus, MAX_STATUS_BYTES, NodeImageStatus,
};
use kruise_api::time::truncate_to_second;

/// Composes the status, with as many messages as fit. Tags are sorted; `firstSyncStatus` belongs to other writers,
/// and the publisher adds the conditions.
pub fn compose(board: &TaskBoard, limits: &PullLimits) -> NodeImageStatus {
    let mut status = NodeImageStatus::default();
    for (key, task) in board.tasks() {
        let entry = tag_status(key, task, limits);
        status.desired += 1;
        *counter(&mut status, &entry.phase) += 1;
        status
            .image_statuses
            .entry(key.name.clone())
            .or_insert_with(|| ImageStatus { tags: Vec::new() })
            .tags
            .push(entry);
    }
    status.update_progress();
    let namespaces = |key: &TagKey| {
        let owners = board.get(key).into_iter().flat_map(|task| &task.spec.owners);
        owners
            .map(|owner| owner.namespace.as_deref().unwrap_or_default())
            .collect()
    };
    fit_to_size(status, namespaces, MAX_STATUS_BYTES)
}

/// The tags of a status by name and tag.
pub fn by_tag(status: &NodeImageStatus) -> BTreeMap<TagKey, ImageTagStatus> {
    let entries = status
        .image_statuses
        .iter()
        .flat_map(|(name, image)| image.tags.iter().map(move |t| (name, t)));
    entries
        .map(|(name, t)| {
            (
                TagKey {
                    name: name.clone(),
                    tag: t.tag.clone(),
                },
                t.clone(),
            )
        })
        .collect()
}

/// What a task in that stage waits for, as text that follows "waits for"; none if it runs or is finished.
pub fn waits_for(stage: &PullStage, limits: &PullLimits) -> Option<String> {
    match stage {
        PullStage::Running { .. } | PullStage::Done(_) => None,
        PullStage::Delayed { until } => Some(format!(
            "its start at {} (--image-pull-start-jitter)",
            truncate_to_second(*until)
        )),
        PullStage::BackOff { until } => Some(format!("its next attempt at {}", truncate_to_second(*until))),
        PullStage::Waiting | PullStage::Due if !limits.runtime_ready => {
            Some("the container runtime, which does not answer".to_owned())
        }
        PullStage::Waiting | PullStage::Due => {
            let shares = [
                ("namespace", limits.max_per_namespace),
                ("registry", limits.max_per_registry),
            ];
            let shares = shares.into_iter().filter(|(_, max)| *max < limits.max_parallel);
            let shares: Vec<String> = shares
                .map(|(of, max)| format!("one {of} has {max} at most"))
                .collect();
            let slots = format!("one of {} pull slots of this node", limits.max_parallel);
            Some(if shares.is_empty() {
                slots
            } else {
                format!("{slots}, of which {}", shares.join(" and "))
            })
        }
    }
}

fn tag_status(key: &TagKey, task: &PullTask, limits: &PullLimits) -> ImageTagStatus {
    let (phase, message) = match &task.stage {
        PullStage::Done(status) => return (**status).clone(),
        PullStage::Delayed { .. } | PullStage::Waiting => (
            ImagePullPhase::Waiting,
            waits_for(&task.stage, limits).map(|wait| format!("waits for {wait}")),
        ),
        PullStage::Running { .. } => (
            ImagePullPhase::Pulling,
            task.last_error.as_deref().map(|e| last_failure(task, e)),
        ),
        PullStage::BackOff { .. } | PullStage::Due => {
            let error = task.last_error.as_deref().unwrap_or("unknown");
            let wait = waits_for(&task.stage, limits).unwrap_or_default();
            (
                ImagePullPhase::Pulling,
                Some(format!("waits for {wait}; {}", last_failure(task, error))),
            )
        }
    };
    ImageTagStatus {
        tag: key.tag.clone(),
        phase,
        progress: task.percent(),
        start_time: task.started_at.map(|t| Time(truncate_to_second(t))),
        completion_time: None,
        version: task.spec.version,
        image_id: None,
        message,
        bytes: task.bytes(),
    }
}

fn last_failure(task: &PullTask, error: &str) -> String {
    let max_attempts = task.spec.retries.saturating_add(1);
    format!(
        "attempt {} of {max_attempts}; the last one failed: {error}",
        task.attempts.max(1)
    )
}

fn counter<'a>(status: &'a mut NodeImageStatus, phase: &ImagePullPhase) -> &'a mut i32 {
    match phase {
        ImagePullPhase::Succeeded => &mut status.succeeded,
        ImagePullPhase::Failed => &mut status.failed,
        ImagePullPhase::Pulling => &mut status.pulling,
        ImagePullPhase::Waiting | ImagePullPhase::Other(_) => &mut status.waiting,
    }
}
