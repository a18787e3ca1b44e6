//! What others see of the duty: events, metrics, the live view.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;

use super::plan::status::waits_for;
use super::plan::{Board, Limits, Stage, TagKey, Task};
use crate::live;
use kruise_api::image_reference::join;
use kruise_api::keys::{DEADLINE_EXCEEDED, EVENT_ATTEMPT_FAILED, EVENT_PULL_FAILED, EVENT_PULL_SUCCEEDED};
use kruise_api::node_image::{ImagePullPhase, ImageTagStatus, NodeImage};
use kruise_cluster::{EventType, Events};
use kruise_ops::metrics::metrics;

/// Speed is measured over the last seconds.
const WINDOW: Duration = Duration::from_secs(5);

/// Tells that an attempt begins.
pub(super) fn begun(key: &TagKey, task: &Task) {
    tracing::info!(
        image = image(key, task),
        jobs = owners(task),
        attempt = task.attempts,
        "pulling image"
    );
}

/// Tells that an attempt failed and there will be another.
pub(super) fn failed_attempt(key: &TagKey, board: &Board) {
    let Some(task) = board.get(key) else { return };
    let next = match &task.stage {
        Stage::BackOff { until } => until.to_string(),
        _ => String::new(),
    };
    tracing::warn!(
        image = image(key, task),
        jobs = owners(task),
        attempt = task.attempts,
        error = task.last_error,
        next,
        "failed to pull image; will retry"
    );
}

/// Tells that an attempt was stopped.
pub(super) fn cancelled(key: &TagKey) {
    let image = join(&key.name, &key.tag);
    tracing::info!(image, "cancelled the pull of the image");
}

/// An event about the end of a tag.
#[derive(Debug, PartialEq)]
struct Said {
    type_: EventType,
    reason: &'static str,
    note: String,
    /// Whether those who want the tag are told, too: a job over thousands of nodes needs no event for each success.
    to_owners: bool,
}

impl Said {
    /// OpenKruise's, to the letter, but for the last error of a tag that was given up at its deadline, which is told
    /// nowhere there. The node is the event's host.
    fn of(status: &ImageTagStatus, image: &str, last_error: Option<&str>, took: Duration) -> Vec<Self> {
        if status.phase == ImagePullPhase::Succeeded {
            return vec![Self {
                type_: EventType::Normal,
                reason: EVENT_PULL_SUCCEEDED,
                note: format!("Image {image}, ecalpsedTime {}", go_duration(took)),
                to_owners: false,
            }];
        }
        let warning = |reason, note| Self {
            type_: EventType::Warning,
            reason,
            note,
            to_owners: true,
        };
        let error = status.message.as_deref().unwrap_or("unknown error");
        let attempt = last_error.filter(|_| error == DEADLINE_EXCEEDED).map(|error| {
            warning(
                EVENT_ATTEMPT_FAILED,
                format!("Image {image}: the last attempt failed: {error}"),
            )
        });
        let failed = warning(EVENT_PULL_FAILED, format!("Image {image} {error}"));
        attempt.into_iter().chain([failed]).collect()
    }
}

/// Tells the end of a tag, on the NodeImage and the owners, and how long it took.
pub(super) fn ended(events: &Events, (node, uid): (&str, &str), key: &TagKey, task: &Task, took: Duration) {
    let Stage::Done(status) = &task.stage else { return };
    let image = join(&key.name, &key.tag);
    let word = log_end(&image, task, status, took);
    metrics()
        .image_pulls
        .get_or_create(&[("result", word.to_owned())])
        .observe(took.as_secs_f64());
    for said in Said::of(status, &image, task.last_error.as_deref(), took) {
        let owners = task.ask.owners.iter().filter(|_| said.to_owners);
        for object in owners.cloned().chain([reference(node, uid)]) {
            events.publish(object, said.type_, said.reason, "PullImage", said.note.clone());
        }
    }
}

/// Logs the end of a tag; the word for how it ended.
fn log_end(image: &str, task: &Task, status: &ImageTagStatus, took: Duration) -> &'static str {
    let succeeded = status.phase == ImagePullPhase::Succeeded;
    let word = if succeeded { "succeeded" } else { "failed" };
    tracing::info!(
        image,
        jobs = owners(task),
        result = word,
        attempts = task.attempts,
        took_seconds = took.as_secs_f64(),
        message = status.message,
        "pull of the image ended"
    );
    word
}

/// As Go prints a duration, to the millisecond: `4.13s`, `1m0.5s`.
fn go_duration(took: Duration) -> String {
    let millis = took.as_millis();
    if millis == 0 {
        return "0s".to_owned();
    }
    if millis < 1000 {
        return format!("{millis}ms");
    }
    let (hours, minutes, seconds) = (millis / 3_600_000, millis / 60_000 % 60, millis / 1000 % 60);
    let fraction = format!(".{:03}", millis % 1000);
    let seconds = format!(
        "{seconds}{}s",
        fraction.trim_end_matches('0').trim_end_matches('.')
    );
    match (hours, minutes) {
        (0, 0) => seconds,
        (0, _) => format!("{minutes}m{seconds}"),
        _ => format!("{hours}h{minutes}m{seconds}"),
    }
}

/// Whom events on the NodeImage are about.
fn reference(name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(NodeImage::api_version(&()).into_owned()),
        kind: Some(NodeImage::kind(&()).into_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

/// The full reference of a tag's image.
pub(super) fn image(key: &TagKey, task: &Task) -> String {
    let full = task.ask.image.clone();
    full.unwrap_or_else(|_| join(&key.name, &key.tag))
}

/// The jobs of a tag, as `namespace/name` separated by commas.
fn owners(task: &Task) -> String {
    task.ask.owners.iter().map(owner).collect::<Vec<_>>().join(",")
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
        image: image(key, task),
        phase,
        owners: task.ask.owners.iter().map(owner).collect(),
        waits_for: waits_for(&task.stage, limits),
        // The last look at the bytes was before the end.
        bytes_done: if phase == live::PullPhase::Succeeded {
            progress.total
        } else {
            progress.done
        },
        bytes_total: task.progress.map(|p| p.total),
        bytes_per_second: speeds.of(key),
        attempt: task.attempts,
        started_at: task.started_at,
        ended_at: match &task.stage {
            Stage::Done(status) => status.completion_time.as_ref().map(|time| time.0),
            _ => None,
        },
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;

    use jiff::Timestamp;

    use super::super::plan::tests::{LIMITS, ask_in, failed, go, pulled};
    use super::super::plan::{Again, Progress};
    use super::*;
    use kruise_ops::logs::lines_of;

    fn status(phase: &str, message: Option<&str>) -> ImageTagStatus {
        let status = serde_json::json!({ "tag": "1", "phase": phase, "message": message });
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn events_are_in_upstreams_words() {
        let said = |status: &ImageTagStatus, last_error| {
            let all = Said::of(status, "nginx:1", last_error, Duration::from_millis(64_500));
            let parts = all
                .into_iter()
                .map(|said| (said.reason, said.note, said.to_owners));
            parts.collect::<Vec<_>>()
        };
        let event = |reason, note: &str, to_owners| (reason, note.to_owned(), to_owners);
        assert_eq!(
            said(&status("Succeeded", None), Some("no such host")),
            [event(
                EVENT_PULL_SUCCEEDED,
                "Image nginx:1, ecalpsedTime 1m4.5s",
                false
            )]
        );
        assert_eq!(
            said(&status("Failed", Some("no such tag")), Some("no such tag")),
            [event(EVENT_PULL_FAILED, "Image nginx:1 no such tag", true)]
        );
        let late = event(
            EVENT_PULL_FAILED,
            "Image nginx:1 pulling exceeds the activeDeadlineSeconds",
            true,
        );
        assert_eq!(
            said(&status("Failed", Some(DEADLINE_EXCEEDED)), None),
            std::slice::from_ref(&late)
        );
        let why = event(
            EVENT_ATTEMPT_FAILED,
            "Image nginx:1: the last attempt failed: no such host",
            true,
        );
        assert_eq!(
            said(&status("Failed", Some(DEADLINE_EXCEEDED)), Some("no such host")),
            [why, late]
        );
    }

    #[test]
    fn each_act_of_a_pull_is_one_line_of_the_log() {
        let key = TagKey {
            name: "nginx".to_owned(),
            tag: "1".to_owned(),
        };
        let mut ask = ask_in("team", "job");
        ask.owners[0].name = Some("job".to_owned());
        let (mut board, now) = (Board::default(), Timestamp::UNIX_EPOCH);
        board.desire(&[(key.clone(), ask)].into(), &BTreeMap::new());
        let (_, run) = go(&mut board, &LIMITS, now).remove(0);
        let one = |work: &dyn Fn(), words: &str, details: &[&str]| {
            let lines = lines_of(work);
            assert_eq!(lines.len(), 1, "{lines:?}");
            for words in [words, "nginx:1"].iter().chain(details) {
                assert!(lines[0].contains(words), "{words} is not in {lines:?}");
            }
        };
        one(
            &|| begun(&key, board.get(&key).unwrap()),
            ": pulling image",
            &["team/job", "attempt=1"],
        );
        one(&|| cancelled(&key), ": cancelled the pull of the image", &[]);
        board.ended(&key, run, failed(Again::Counted), now);
        let details = ["team/job", "no luck", "next="];
        one(
            &|| failed_attempt(&key, &board),
            ": failed to pull image; will retry",
            &details,
        );
        let later = Timestamp::from_second(60).unwrap();
        let (_, run) = go(&mut board, &LIMITS, later).remove(0);
        board.ended(&key, run, pulled(), later);
        let task = board.get(&key).unwrap();
        let Stage::Done(status) = &task.stage else {
            unreachable!()
        };
        let log = || {
            log_end("nginx:1", task, status, Duration::from_secs(60));
        };
        let details = ["team/job", "succeeded", "attempts=2", "took_seconds=60"];
        one(&log, ": pull of the image ended", &details);
    }

    #[test]
    fn a_pull_that_succeeded_has_all_of_its_bytes() {
        let key = TagKey {
            name: "nginx".to_owned(),
            tag: "1".to_owned(),
        };
        let (mut board, now) = (Board::default(), Timestamp::UNIX_EPOCH);
        board.desire(&[(key.clone(), ask_in("team", "job"))].into(), &BTreeMap::new());
        let (_, run) = go(&mut board, &LIMITS, now).remove(0);
        let shown = |board: &Board| {
            let shown = pull(&key, board.get(&key).unwrap(), &LIMITS, &Speeds::default());
            (shown.bytes_done, shown.bytes_total)
        };
        // The last look at the bytes is before the end.
        board.advance(&key, run, Progress { done: 96, total: 100 }, now);
        assert_eq!(shown(&board), (96, Some(100)));
        board.ended(&key, run, pulled(), now);
        assert_eq!(shown(&board), (100, Some(100)));
    }

    #[test]
    fn durations_are_printed_as_go_prints_them() {
        for (millis, text) in [
            (0, "0s"),
            (999, "999ms"),
            (4_130, "4.13s"),
            (60_000, "1m0s"),
            (64_500, "1m4.5s"),
            (3_605_007, "1h0m5.007s"),
        ] {
            assert_eq!(go_duration(Duration::from_millis(millis)), text);
        }
    }
}
