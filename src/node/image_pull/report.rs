//! What others see of the duty: events, metrics, the live view.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;

use super::plan::status::waits_for;
use super::plan::{Board, Limits, Stage, TagKey, Task};
use crate::api::keys::{EVENT_PULL_FAILED, EVENT_PULL_SUCCEEDED};
use crate::api::node_image::{ImagePullPhase, ImageTagStatus, NodeImage};
use crate::cluster::{EventType, Events};
use crate::node::live;
use crate::ops::metrics::metrics;

/// Speed is measured over the last seconds.
const WINDOW: Duration = Duration::from_secs(5);

/// Tells the end of a tag: one event on the NodeImage and one on each owner, and how long it took.
pub(super) fn ended(events: &Events, node: &ObjectReference, key: &TagKey, task: &Task, took: Duration) {
    let Stage::Done(status) = &task.stage else { return };
    let image = crate::cri::reference::join(&key.name, &key.tag);
    let (type_, reason, word, note) = if status.phase == ImagePullPhase::Succeeded {
        let note = format!("Image {image}, elapsed time {:.3}s", took.as_secs_f64());
        (EventType::Normal, EVENT_PULL_SUCCEEDED, "succeeded", note)
    } else {
        let error = status.message.as_deref().unwrap_or("unknown error");
        (
            EventType::Warning,
            EVENT_PULL_FAILED,
            "failed",
            format!("Image {image} {error}"),
        )
    };
    tracing::info!(image, result = word, took_seconds = took.as_secs_f64(), "{note}");
    metrics()
        .image_pulls
        .get_or_create(&[("result", word.to_owned())])
        .observe(took.as_secs_f64());
    for object in std::iter::once(node).chain(&task.ask.owners) {
        events.publish(object.clone(), type_, reason, "PullImage", note.clone());
    }
}

/// Whom events on the NodeImage are about.
pub(super) fn reference(name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(NodeImage::api_version(&()).into_owned()),
        kind: Some(NodeImage::kind(&()).into_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

/// Bytes over time, per pull.
#[derive(Default)]
pub(super) struct Speeds {
    samples: HashMap<TagKey, VecDeque<(Instant, u64)>>,
}

impl Speeds {
    /// Takes in that so many bytes were there at `now`.
    pub(super) fn sample(&mut self, key: &TagKey, done: u64, now: Instant) {
        let samples = self.samples.entry(key.clone()).or_default();
        if samples.back().is_some_and(|(_, last)| *last > done) {
            samples.clear();
        }
        samples.push_back((now, done));
        while samples.len() > 2
            && samples
                .front()
                .is_some_and(|(at, _)| now.duration_since(*at) > WINDOW)
        {
            samples.pop_front();
        }
    }

    /// Forgets a pull.
    pub(super) fn forget(&mut self, key: &TagKey) {
        self.samples.remove(key);
    }

    /// Bytes a second; none before two samples.
    fn of(&self, key: &TagKey) -> Option<u64> {
        let samples = self.samples.get(key)?;
        let ((first, from), (last, to)) = (samples.front()?, samples.back()?);
        let millis = u64::try_from(last.duration_since(*first).as_millis())
            .ok()
            .filter(|ms| *ms > 0)?;
        Some((to - from).saturating_mul(1000) / millis)
    }
}

/// The board as the control API shows it; also sets the queue's gauges.
pub(super) fn live(board: &Board, limits: &Limits, speeds: &Speeds) -> Vec<live::Pull> {
    let count = |wanted: fn(&Stage) -> bool| {
        i64::try_from(board.tasks().values().filter(|t| wanted(&t.stage)).count()).unwrap_or(i64::MAX)
    };
    metrics()
        .image_pull_queue
        .set(count(|s| matches!(s, Stage::Waiting)));
    metrics()
        .image_pull_active
        .set(count(|s| matches!(s, Stage::Running { .. })));
    board
        .tasks()
        .iter()
        .map(|(key, task)| pull(key, task, limits, speeds))
        .collect()
}

fn pull(key: &TagKey, task: &Task, limits: &Limits, speeds: &Speeds) -> live::Pull {
    let (phase, message) = match &task.stage {
        Stage::Waiting => (live::PullPhase::Waiting, task.last_error.clone()),
        Stage::Running { .. } | Stage::BackOff { .. } => (live::PullPhase::Pulling, task.last_error.clone()),
        Stage::Done(status) => done(status),
    };
    let progress = task.progress.unwrap_or_default();
    live::Pull {
        image: task
            .ask
            .image
            .clone()
            .unwrap_or_else(|_| crate::cri::reference::join(&key.name, &key.tag)),
        phase,
        owners: task.ask.owners.iter().map(owner).collect(),
        waits_for: waits_for(task, limits),
        bytes_done: progress.done,
        bytes_total: task.progress.map(|p| p.total),
        bytes_per_second: speeds.of(key),
        attempt: task.attempts,
        started_at: task.started_at,
        message: message.unwrap_or_default(),
    }
}

fn done(status: &ImageTagStatus) -> (live::PullPhase, Option<String>) {
    let phase = if status.phase == ImagePullPhase::Succeeded {
        live::PullPhase::Succeeded
    } else {
        live::PullPhase::Failed
    };
    (phase, status.message.clone())
}

fn owner(owner: &ObjectReference) -> String {
    let name = owner.name.as_deref().unwrap_or_default();
    owner
        .namespace
        .as_deref()
        .map_or_else(|| name.to_owned(), |ns| format!("{ns}/{name}"))
}
