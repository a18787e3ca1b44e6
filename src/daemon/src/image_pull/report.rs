//! Reports of the controller: events, metrics, the live view.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;

use super::plan::status::waits_for;
use super::plan::{AttemptResult, PullLimits, PullStage, PullTask, TagKey, TaskBoard};
use crate::live;
use kruise_api::image_reference::join_name_and_tag;
use kruise_api::keys::{DEADLINE_EXCEEDED, EVENT_ATTEMPT_FAILED, EVENT_PULL_FAILED, EVENT_PULL_SUCCEEDED};
use kruise_api::node_image::{ImagePullPhase, ImageTagStatus, NodeImage};
use kruise_cluster::{EventRecorder, EventType};
use kruise_ops::metrics::metrics;
use kruise_ops::traces::Span;

/// Jobs of one image whose traces get its pull, at most.
const MAX_TRACED_OWNERS: usize = 8;
/// Jobs of one image that get the events of its failure, at most: each event is a request of every node, and the queue
/// for events is shared by all images.
const MAX_EVENT_OWNERS: usize = 64;
/// Jobs of one image that a log line names, at most.
const MAX_LOGGED_OWNERS: usize = 8;
/// The span over which transfer rates are measured.
const RATE_WINDOW: Duration = Duration::from_secs(5);

/// Logs the start of an attempt.
pub(super) fn attempt_started(key: &TagKey, task: &PullTask) {
    tracing::info!(
        image = image_reference(key, task),
        jobs = owner_names(task),
        attempt = task.attempts,
        "pulling image"
    );
}

/// Begins a span for an attempt in the traces of its jobs.
pub(super) fn attempt_spans(image: &str, node: &str, task: &PullTask) -> Vec<Span> {
    let owners = task.spec.owners.iter().take(MAX_TRACED_OWNERS);
    let spans = owners.filter_map(|owner| {
        let span = Span::of_trace("pull image", owner.uid.as_deref()?);
        Some(
            span.with("container.image.name", image)
                .with("k8s.node.name", node)
                .with_number("attempt", i64::from(task.attempts)),
        )
    });
    // Without traces there is nothing to keep.
    spans.filter(|span| span.context().is_some()).collect()
}

/// Ends the spans of an attempt.
pub(super) fn end_spans(spans: Vec<Span>, result: &AttemptResult) {
    for mut span in spans {
        if let AttemptResult::Failed { message, .. } = result {
            span.fail(message);
        }
        span.end();
    }
}

/// Logs a failed attempt that will be retried.
pub(super) fn attempt_failed(key: &TagKey, board: &TaskBoard) {
    let Some(task) = board.get(key) else { return };
    let next = match &task.stage {
        PullStage::BackOff { until } => until.to_string(),
        _ => String::new(),
    };
    tracing::warn!(
        image = image_reference(key, task),
        jobs = owner_names(task),
        attempt = task.attempts,
        error = task.last_error,
        next,
        "failed to pull image; will retry"
    );
}

/// Logs a cancelled attempt.
pub(super) fn attempt_cancelled(key: &TagKey) {
    let image = join_name_and_tag(&key.name, &key.tag);
    tracing::info!(image, "cancelled the pull of the image");
}

/// An event about the end of a tag.
#[derive(Debug, PartialEq)]
struct TagEvent {
    type_: EventType,
    reason: &'static str,
    note: String,
    /// Whether the owners of the tag get the event, too: a job over thousands of nodes needs no event for each success.
    to_owners: bool,
}

impl TagEvent {
    /// Exactly OpenKruise's events, plus one for the last error of a tag that was given up at its deadline, which
    /// OpenKruise reports nowhere. The node is the event's host.
    fn for_status(
        status: &ImageTagStatus,
        image: &str,
        last_error: Option<&str>,
        took: Duration,
    ) -> Vec<Self> {
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
        let attempt_event = last_error.filter(|_| error == DEADLINE_EXCEEDED).map(|error| {
            warning(
                EVENT_ATTEMPT_FAILED,
                format!("Image {image}: the last attempt failed: {error}"),
            )
        });
        let failed_event = warning(EVENT_PULL_FAILED, format!("Image {image} {error}"));
        attempt_event.into_iter().chain([failed_event]).collect()
    }
}

/// Reports the end of a tag and its duration, with events on the NodeImage and the owners.
pub(super) fn publish_end(
    events: &EventRecorder,
    (node, uid): (&str, &str),
    key: &TagKey,
    task: &PullTask,
    took: Duration,
) {
    let PullStage::Done(status) = &task.stage else {
        return;
    };
    let image = join_name_and_tag(&key.name, &key.tag);
    let result = log_pull_end(&image, task, status, took);
    metrics()
        .image_pulls
        .get_or_create(&[("result", result.to_owned())])
        .observe(took.as_secs_f64());
    for event in TagEvent::for_status(status, &image, task.last_error.as_deref(), took) {
        let owners = if event.to_owners {
            event_owners(&task.spec.owners)
        } else {
            Vec::new()
        };
        for object in owners
            .into_iter()
            .cloned()
            .chain([node_image_reference(node, uid)])
        {
            events.publish(object, event.type_, event.reason, "PullImage", event.note.clone());
        }
    }
}

/// The owners that get events: of more than [`MAX_EVENT_OWNERS`], one of each namespace in turn.
fn event_owners(owners: &[ObjectReference]) -> Vec<&ObjectReference> {
    let mut earlier_in_namespace: HashMap<&str, usize> = HashMap::new();
    let mut by_turn: Vec<(usize, &ObjectReference)> = Vec::new();
    for owner in owners {
        let namespace = owner.namespace.as_deref().unwrap_or_default();
        let turn = earlier_in_namespace.entry(namespace).or_default();
        by_turn.push((*turn, owner));
        *turn += 1;
    }
    // Owners of the same turn keep their order.
    by_turn.sort_by_key(|(turn, _)| *turn);
    by_turn.truncate(MAX_EVENT_OWNERS);
    by_turn.into_iter().map(|(_, owner)| owner).collect()
}

/// Logs the end of a tag; returns the result label.
fn log_pull_end(image: &str, task: &PullTask, status: &ImageTagStatus, took: Duration) -> &'static str {
    let succeeded = status.phase == ImagePullPhase::Succeeded;
    let result = if succeeded { "succeeded" } else { "failed" };
    tracing::info!(
        image,
        jobs = owner_names(task),
        result = result,
        attempts = task.attempts,
        took_seconds = took.as_secs_f64(),
        message = status.message,
        "pull of the image ended"
    );
    result
}

/// Formats a duration as Go does, to the millisecond: `4.13s`, `1m0.5s`.
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

/// The object of events on the NodeImage.
fn node_image_reference(name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(NodeImage::api_version(&()).into_owned()),
        kind: Some(NodeImage::kind(&()).into_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

/// The full reference of a tag's image.
pub(super) fn image_reference(key: &TagKey, task: &PullTask) -> String {
    let reference = task.spec.image.clone();
    reference.unwrap_or_else(|_| join_name_and_tag(&key.name, &key.tag))
}

/// The first jobs of a tag, as `namespace/name` separated by commas, and how many more there are.
fn owner_names(task: &PullTask) -> String {
    let owners = &task.spec.owners;
    let mut names: Vec<_> = owners.iter().take(MAX_LOGGED_OWNERS).map(owner_name).collect();
    let more = owners.len().saturating_sub(MAX_LOGGED_OWNERS);
    if more > 0 {
        names.push(format!("and {more} more"));
    }
    names.join(",")
}

/// Bytes over time for each pull.
#[derive(Default)]
pub(super) struct TransferRates {
    samples: HashMap<TagKey, VecDeque<(Instant, u64)>>,
}

impl TransferRates {
    /// Records the bytes at `now`.
    pub(super) fn sample(&mut self, key: &TagKey, done: u64, now: Instant) {
        let samples = self.samples.entry(key.clone()).or_default();
        if samples.back().is_some_and(|(_, last)| *last > done) {
            samples.clear();
        }
        samples.push_back((now, done));
        while samples.len() > 2
            && samples
                .front()
                .is_some_and(|(at, _)| now.duration_since(*at) > RATE_WINDOW)
        {
            samples.pop_front();
        }
    }

    /// Removes a pull.
    pub(super) fn forget(&mut self, key: &TagKey) {
        self.samples.remove(key);
    }

    /// Bytes per second; none before two samples.
    fn bytes_per_second(&self, key: &TagKey) -> Option<u64> {
        let samples = self.samples.get(key)?;
        let ((first, from), (last, to)) = (samples.front()?, samples.back()?);
        let millis = u64::try_from(last.duration_since(*first).as_millis())
            .ok()
            .filter(|ms| *ms > 0)?;
        Some((to - from).saturating_mul(1000) / millis)
    }
}

/// The board for the control API; also sets the queue's gauges.
pub(super) fn live_pulls(
    board: &TaskBoard,
    limits: &PullLimits,
    transfer_rates: &TransferRates,
) -> Vec<live::PullStatus> {
    let count = |in_stage: fn(&PullStage) -> bool| {
        i64::try_from(board.tasks().values().filter(|t| in_stage(&t.stage)).count()).unwrap_or(i64::MAX)
    };
    metrics()
        .image_pull_queue
        .set(count(|s| matches!(s, PullStage::Waiting | PullStage::Due)));
    metrics()
        .image_pull_active
        .set(count(|s| matches!(s, PullStage::Running { .. })));
    board
        .tasks()
        .iter()
        .map(|(key, task)| pull_status(key, task, limits, transfer_rates))
        .collect()
}

fn pull_status(
    key: &TagKey,
    task: &PullTask,
    limits: &PullLimits,
    transfer_rates: &TransferRates,
) -> live::PullStatus {
    let (phase, message) = match &task.stage {
        PullStage::Delayed { .. } | PullStage::Waiting => (live::PullPhase::Waiting, task.last_error.clone()),
        PullStage::Running { .. } | PullStage::BackOff { .. } | PullStage::Due => {
            (live::PullPhase::Pulling, task.last_error.clone())
        }
        PullStage::Done(status) => done_phase(status),
    };
    let progress = task.progress.unwrap_or_default();
    live::PullStatus {
        image: image_reference(key, task),
        phase,
        owners: task.spec.owners.iter().map(owner_name).collect(),
        waits_for: waits_for(&task.stage, limits),
        // The last poll of the progress was before the end.
        bytes_done: if phase == live::PullPhase::Succeeded {
            progress.total
        } else {
            progress.done
        },
        bytes_total: task.progress.map(|p| p.total),
        bytes_per_second: transfer_rates.bytes_per_second(key),
        attempt: task.attempts,
        started_at: task.started_at,
        ended_at: match &task.stage {
            PullStage::Done(status) => status.completion_time.as_ref().map(|time| time.0),
            _ => None,
        },
        message: message.unwrap_or_default(),
    }
}

fn done_phase(status: &ImageTagStatus) -> (live::PullPhase, Option<String>) {
    let phase = if status.phase == ImagePullPhase::Succeeded {
        live::PullPhase::Succeeded
    } else {
        live::PullPhase::Failed
    };
    (phase, status.message.clone())
}

fn owner_name(owner: &ObjectReference) -> String {
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

    use super::super::plan::tests::{LIMITS, failed_attempt, pulled_result, spec_in, start_planned};
    use super::super::plan::{AttemptRetry, PullProgress};
    use super::*;
    use kruise_ops::logs::captured_lines;

    fn status(phase: &str, message: Option<&str>) -> ImageTagStatus {
        let status = serde_json::json!({ "tag": "1", "phase": phase, "message": message });
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn pull_events_have_upstream_messages() {
        let events_for = |status: &ImageTagStatus, last_error| {
            let all = TagEvent::for_status(status, "nginx:1", last_error, Duration::from_millis(64_500));
            let parts = all
                .into_iter()
                .map(|event| (event.reason, event.note, event.to_owners));
            parts.collect::<Vec<_>>()
        };
        let event = |reason, note: &str, to_owners| (reason, note.to_owned(), to_owners);
        assert_eq!(
            events_for(&status("Succeeded", None), Some("no such host")),
            [event(
                EVENT_PULL_SUCCEEDED,
                "Image nginx:1, ecalpsedTime 1m4.5s",
                false
            )]
        );
        assert_eq!(
            events_for(&status("Failed", Some("no such tag")), Some("no such tag")),
            [event(EVENT_PULL_FAILED, "Image nginx:1 no such tag", true)]
        );
        let deadline_event = event(
            EVENT_PULL_FAILED,
            "Image nginx:1 pulling exceeds the activeDeadlineSeconds",
            true,
        );
        assert_eq!(
            events_for(&status("Failed", Some(DEADLINE_EXCEEDED)), None),
            std::slice::from_ref(&deadline_event)
        );
        let attempt_event = event(
            EVENT_ATTEMPT_FAILED,
            "Image nginx:1: the last attempt failed: no such host",
            true,
        );
        assert_eq!(
            events_for(&status("Failed", Some(DEADLINE_EXCEEDED)), Some("no such host")),
            [attempt_event, deadline_event]
        );
    }

    #[test]
    fn failure_events_are_bounded_and_reach_every_namespace() {
        let owners_in = |namespace: &str, count: usize| {
            let owner = move |n: usize| ObjectReference {
                namespace: Some(namespace.to_owned()),
                name: Some(n.to_string()),
                ..ObjectReference::default()
            };
            (0..count).map(owner).collect::<Vec<_>>()
        };
        let mut owners = owners_in("many", 2000);
        owners.extend(owners_in("few", 3));
        let chosen = event_owners(&owners);
        let count_in = |namespace: &str| {
            let in_namespace = chosen
                .iter()
                .filter(|owner| owner.namespace.as_deref() == Some(namespace));
            in_namespace.count()
        };
        assert_eq!((count_in("many"), count_in("few")), (MAX_EVENT_OWNERS - 3, 3));
        let all = owners_in("many", MAX_EVENT_OWNERS);
        assert!(event_owners(&all).into_iter().eq(&all), "none is left out");
    }

    #[test]
    fn each_pull_step_is_one_log_line() {
        let key = TagKey {
            name: "nginx".to_owned(),
            tag: "1".to_owned(),
        };
        let mut spec = spec_in("team", "job");
        spec.owners[0].name = Some("job".to_owned());
        let (mut board, now) = (TaskBoard::default(), Timestamp::UNIX_EPOCH);
        board.sync_spec(&[(key.clone(), spec)].into(), &BTreeMap::new());
        let (_, run) = start_planned(&mut board, &LIMITS, now).remove(0);
        let assert_one_line = |work: &dyn Fn(), words: &str, details: &[&str]| {
            let lines = captured_lines(work);
            assert_eq!(lines.len(), 1, "{lines:?}");
            for expected in [words, "nginx:1"].iter().chain(details) {
                assert!(lines[0].contains(expected), "{expected} is not in {lines:?}");
            }
        };
        assert_one_line(
            &|| attempt_started(&key, board.get(&key).unwrap()),
            ": pulling image",
            &["team/job", "attempt=1"],
        );
        assert_one_line(
            &|| attempt_cancelled(&key),
            ": cancelled the pull of the image",
            &[],
        );
        board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Counted), now);
        let details = ["team/job", "no luck", "next="];
        assert_one_line(
            &|| attempt_failed(&key, &board),
            ": failed to pull image; will retry",
            &details,
        );
        let later = Timestamp::from_second(60).unwrap();
        let (_, run) = start_planned(&mut board, &LIMITS, later).remove(0);
        board.on_attempt_ended(&key, run, pulled_result(), later);
        let task = board.get(&key).unwrap();
        let PullStage::Done(status) = &task.stage else {
            unreachable!()
        };
        let log = || {
            log_pull_end("nginx:1", task, status, Duration::from_secs(60));
        };
        let details = ["team/job", "succeeded", "attempts=2", "took_seconds=60"];
        assert_one_line(&log, ": pull of the image ended", &details);
    }

    #[test]
    fn log_line_names_few_jobs() {
        let key = TagKey {
            name: "nginx".to_owned(),
            tag: "1".to_owned(),
        };
        let mut spec = spec_in("team", "job");
        spec.owners = (0..2000)
            .map(|n| ObjectReference {
                namespace: Some("team".to_owned()),
                name: Some(n.to_string()),
                ..ObjectReference::default()
            })
            .collect();
        let mut board = TaskBoard::default();
        board.sync_spec(&[(key.clone(), spec)].into(), &BTreeMap::new());
        let names = owner_names(board.get(&key).unwrap());
        assert!(names.starts_with("team/0,team/1,"), "{names}");
        assert!(names.ends_with(",team/7,and 1992 more"), "{names}");
    }

    #[test]
    fn succeeded_pull_reports_all_bytes() {
        let key = TagKey {
            name: "nginx".to_owned(),
            tag: "1".to_owned(),
        };
        let (mut board, now) = (TaskBoard::default(), Timestamp::UNIX_EPOCH);
        board.sync_spec(&[(key.clone(), spec_in("team", "job"))].into(), &BTreeMap::new());
        let (_, run) = start_planned(&mut board, &LIMITS, now).remove(0);
        let reported_bytes = |board: &TaskBoard| {
            let shown = pull_status(&key, board.get(&key).unwrap(), &LIMITS, &TransferRates::default());
            (shown.bytes_done, shown.bytes_total)
        };
        // The last poll of the progress is before the end.
        board.set_progress(&key, run, PullProgress { done: 96, total: 100 }, now);
        assert_eq!(reported_bytes(&board), (96, Some(100)));
        board.on_attempt_ended(&key, run, pulled_result(), now);
        assert_eq!(reported_bytes(&board), (100, Some(100)));
    }

    #[test]
    fn durations_are_formatted_like_go() {
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
