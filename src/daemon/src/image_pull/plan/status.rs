//! The NodeImage's status that says what the board holds.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::board::whole;
use super::fit::fit;
use super::{Board, Limits, Stage, TagKey, Task};
use kruise_api::node_image::{ImagePullPhase, ImageStatus, ImageTagStatus, MOST_STATUS, NodeImageStatus};

/// Composes the status, with messages as far as there is room. Tags are sorted; `firstSyncStatus` is not ours.
pub fn compose(board: &Board, limits: &Limits) -> NodeImageStatus {
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
    let namespaces = |key: &TagKey| {
        let owners = board.get(key).into_iter().flat_map(|task| &task.ask.owners);
        owners
            .map(|owner| owner.namespace.as_deref().unwrap_or_default())
            .collect()
    };
    fit(status, namespaces, MOST_STATUS)
}

/// By name and tag, what a status says.
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

/// What a task in that stage waits for, in words that follow "waits for"; none if it works or is over.
pub fn waits_for(stage: &Stage, limits: &Limits) -> Option<String> {
    match stage {
        Stage::Running { .. } | Stage::Done(_) => None,
        Stage::BackOff { until } => Some(format!("its next attempt at {}", whole(*until))),
        Stage::Waiting if !limits.runtime => Some("the container runtime, which does not answer".to_owned()),
        Stage::Waiting => {
            let Limits {
                max_parallel: all,
                max_per_namespace: share,
                ..
            } = limits;
            let share = (share < all).then(|| format!(", of which one namespace has {share} at most"));
            Some(format!(
                "one of {all} pull slots of this node{}",
                share.unwrap_or_default()
            ))
        }
    }
}

fn tag_status(key: &TagKey, task: &Task, limits: &Limits) -> ImageTagStatus {
    let (phase, message) = match &task.stage {
        Stage::Done(status) => return (**status).clone(),
        Stage::Waiting => (
            ImagePullPhase::Waiting,
            waits_for(&task.stage, limits).map(|wait| format!("waits for {wait}")),
        ),
        Stage::Running { .. } => (
            ImagePullPhase::Pulling,
            task.last_error.as_deref().map(|e| failed(task, e)),
        ),
        Stage::BackOff { .. } => {
            let error = task.last_error.as_deref().unwrap_or("unknown");
            let wait = waits_for(&task.stage, limits).unwrap_or_default();
            (
                ImagePullPhase::Pulling,
                Some(format!("waits for {wait}; {}", failed(task, error))),
            )
        }
    };
    ImageTagStatus {
        tag: key.tag.clone(),
        phase,
        progress: task.percent(),
        start_time: task.started_at.map(|t| Time(whole(t))),
        completion_time: None,
        version: task.ask.version,
        image_id: None,
        message,
    }
}

fn failed(task: &Task, error: &str) -> String {
    let most = task.ask.retries.saturating_add(1);
    format!(
        "attempt {} of {most}; the last one failed: {error}",
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
