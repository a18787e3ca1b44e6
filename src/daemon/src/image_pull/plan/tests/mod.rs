#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod conditions;
mod keyring;
mod publish;
mod simulation;
mod size_limit;
mod start_jitter;

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;

use super::board::AttemptOutcome;
use super::start_jitter::StartJitter;
use super::*;
use kruise_api::node_image::{ImagePullPhase, ImageTagStatus};

pub(super) const START: i64 = 1_800_000_000;

pub(in crate::image_pull) fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(START + seconds).unwrap()
}

pub(in crate::image_pull) fn key(tag: &str) -> TagKey {
    TagKey {
        name: "nginx".to_owned(),
        tag: tag.to_owned(),
    }
}

pub(super) fn spec_for(owner: &str) -> PullSpec {
    PullSpec {
        version: 1,
        image: Ok("docker.io/library/nginx:1".to_owned()),
        always: false,
        timeout: SignedDuration::from_secs(60),
        retries: 2,
        requested_at: None,
        active_deadline: None,
        owners: vec![ObjectReference {
            uid: Some(owner.to_owned()),
            ..ObjectReference::default()
        }],
        secrets: Vec::new(),
        service_accounts: Vec::new(),
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        pin: None,
    }
}

/// The pull spec of a job in that namespace.
pub(in crate::image_pull) fn spec_in(namespace: &str, owner: &str) -> PullSpec {
    let mut spec = spec_for(owner);
    spec.owners[0].namespace = Some(namespace.to_owned());
    spec
}

pub(in crate::image_pull) const LIMITS: PullLimits = PullLimits {
    max_parallel: 2,
    max_per_namespace: 2,
    max_per_registry: 2,
    runtime_ready: true,
};

pub(in crate::image_pull) fn failed_attempt(retry: AttemptRetry) -> AttemptResult {
    AttemptResult::Failed {
        message: "no luck".to_owned(),
        retry,
    }
}

pub(in crate::image_pull) fn pulled_result() -> AttemptResult {
    AttemptResult::Pulled {
        image_id: Some("nginx@sha256:0".to_owned()),
        note: None,
    }
}

/// Applies the plan and returns the runs that started.
pub(in crate::image_pull) fn start_planned(
    board: &mut TaskBoard,
    limits: &PullLimits,
    now: Timestamp,
) -> Vec<(TagKey, u64)> {
    let steps = plan(board, limits, now).steps;
    let started = steps.iter().filter_map(|step| {
        let run = board.apply(step, now)?;
        match step {
            PullStep::Start { key, .. } => Some((key.clone(), run)),
            PullStep::GiveUp { .. } => None,
        }
    });
    started.collect()
}

fn board_with(specs: &[(&str, PullSpec)]) -> (TaskBoard, BTreeMap<TagKey, PullSpec>) {
    let specs: BTreeMap<_, _> = specs.iter().map(|(tag, ask)| (key(tag), ask.clone())).collect();
    let mut board = TaskBoard::default();
    assert!(board.sync_spec(&specs, &BTreeMap::new()).is_empty());
    (board, specs)
}

fn tag_status(board: &TaskBoard, tag: &str) -> ImageTagStatus {
    status::by_tag(&status::compose(board, &LIMITS))
        .remove(&key(tag))
        .unwrap()
}

#[test]
fn successful_attempt_finishes_the_tag() {
    let (mut board, _) = board_with(&[("1", spec_for("a"))]);
    let (key, run) = start_planned(&mut board, &LIMITS, at(0)).remove(0);
    assert_eq!(tag_status(&board, "1").phase, ImagePullPhase::Pulling);
    assert_eq!(
        board.on_attempt_ended(&key, run, pulled_result(), at(3)),
        AttemptOutcome::Finished
    );
    let status = tag_status(&board, "1");
    assert_eq!((status.phase, status.progress), (ImagePullPhase::Succeeded, 100));
    assert_eq!(
        status
            .completion_time
            .unwrap()
            .0
            .duration_since(status.start_time.unwrap().0)
            .as_secs(),
        3
    );
    assert_eq!(plan(&board, &LIMITS, at(4)), Plan::default());
}

#[test]
fn backoff_ends_when_the_clock_is_set_back() {
    let (mut board, _) = board_with(&[("1", spec_for("a"))]);
    let (key, run) = start_planned(&mut board, &LIMITS, at(3600)).remove(0);
    board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Counted), at(3600));
    assert!(start_planned(&mut board, &LIMITS, at(3600)).is_empty());
    assert_eq!(start_planned(&mut board, &LIMITS, at(0)).len(), 1);
}

#[test]
fn due_attempt_waits_for_a_slot_or_the_runtime() {
    let (mut board, _) = board_with(&[("1", spec_for("a"))]);
    let (key, run) = start_planned(&mut board, &LIMITS, at(0)).remove(0);
    board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Counted), at(0));
    board.end_pauses(at(0));
    let message = tag_status(&board, "1").message.unwrap();
    assert!(message.starts_with("waits for its next attempt at "), "{message}");
    board.end_pauses(at(1));
    let no_runtime = PullLimits {
        runtime_ready: false,
        ..LIMITS
    };
    for (limits, wait) in [
        (LIMITS, "one of 2 pull slots of this node"),
        (no_runtime, "the container runtime, which does not answer"),
    ] {
        let status = status::compose(&board, &limits);
        let tag = &status.image_statuses["nginx"].tags[0];
        let message = format!("waits for {wait}; attempt 1 of 3; the last one failed: no luck");
        assert_eq!(
            (&tag.phase, tag.message.as_ref()),
            (&ImagePullPhase::Pulling, Some(&message))
        );
    }
    assert_eq!(start_planned(&mut board, &no_runtime, at(1)), []);
    assert_eq!(start_planned(&mut board, &LIMITS, at(1)).len(), 1);
}

#[test]
fn job_that_joins_after_the_pull_gets_its_pin() {
    let (mut board, mut specs) = board_with(&[("1", spec_for("a")), ("2", spec_for("a"))]);
    let pin = |seconds| Some(SignedDuration::from_secs(seconds));
    for spec in specs.values_mut() {
        spec.pin = pin(60);
    }
    assert_eq!(board.late_pins(&specs), [], "the pull is not over");
    let (pulled, run) = start_planned(&mut board, &LIMITS, at(0)).remove(0);
    board.on_attempt_ended(&pulled, run, pulled_result(), at(3));
    let image = specs[&pulled].image.clone().unwrap();
    assert_eq!(board.late_pins(&specs), [(pulled.clone(), image)]);
    board.sync_spec(&specs, &BTreeMap::new());
    specs.get_mut(&pulled).unwrap().pin = pin(30);
    assert_eq!(board.late_pins(&specs), [], "it is pinned longer");
    specs.get_mut(&pulled).unwrap().pin = pin(90);
    specs.get_mut(&pulled).unwrap().version += 1;
    assert_eq!(board.late_pins(&specs), [], "another version is another pull");
}

#[test]
fn failed_attempts_back_off_until_retries_run_out() {
    let (mut board, _) = board_with(&[("1", spec_for("a"))]);
    let mut now = 0;
    for pause in [1, 2] {
        let (key, run) = start_planned(&mut board, &LIMITS, at(now)).remove(0);
        assert_eq!(
            board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Counted), at(now)),
            AttemptOutcome::WillRetry
        );
        let waiting = plan(&board, &LIMITS, at(now));
        assert_eq!(
            (waiting.steps.len(), waiting.requeue_at),
            (0, Some(at(now + pause)))
        );
        let message = tag_status(&board, "1").message.unwrap();
        assert!(
            message.starts_with("waits for its next attempt at ") && message.contains("no luck"),
            "{message}"
        );
        now += pause;
    }
    let (key, run) = start_planned(&mut board, &LIMITS, at(now)).remove(0);
    assert_eq!(
        board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Counted), at(now)),
        AttemptOutcome::Finished
    );
    assert_eq!(tag_status(&board, "1").message.as_deref(), Some("no luck"));
}

#[test]
fn permanent_pull_failure_is_not_retried() {
    let (mut board, _) = board_with(&[("1", spec_for("a"))]);
    let (key, run) = start_planned(&mut board, &LIMITS, at(0)).remove(0);
    assert_eq!(
        board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Never), at(0)),
        AttemptOutcome::Finished
    );
}

#[test]
fn invalid_image_reference_fails_without_an_attempt() {
    let bad = PullSpec {
        image: Err("\"X\" is not valid".to_owned()),
        ..spec_for("a")
    };
    let (mut board, _) = board_with(&[("1", bad)]);
    assert!(
        start_planned(
            &mut board,
            &PullLimits {
                runtime_ready: false,
                ..LIMITS
            },
            at(0)
        )
        .is_empty()
    );
    assert_eq!(
        tag_status(&board, "1").message.as_deref(),
        Some("\"X\" is not valid")
    );
}

/// A user may repair an entry without a new version.
#[test]
fn repaired_entry_is_pulled() {
    let unreadable = PullSpec {
        image: Err(format!("{UNREADABLE_ENTRY}: pullPolicy: no")),
        ..spec_for("a")
    };
    let (mut board, broken) = board_with(&[("1", unreadable)]);
    assert_eq!(start_planned(&mut board, &LIMITS, at(0)), []);
    let stored = status::by_tag(&status::compose(&board, &LIMITS));
    board.sync_spec(&broken, &stored);
    assert_eq!(tag_status(&board, "1").phase, ImagePullPhase::Failed);
    let repaired: BTreeMap<_, _> = [(key("1"), spec_for("a"))].into();
    let mut restarted = TaskBoard::default();
    for board in [&mut board, &mut restarted] {
        assert!(board.sync_spec(&repaired, &stored).is_empty());
        let (key, run) = start_planned(board, &LIMITS, at(9)).remove(0);
        // The watch still shows the old status.
        assert!(board.sync_spec(&repaired, &stored).is_empty());
        board.on_attempt_ended(&key, run, pulled_result(), at(10));
        assert_eq!(tag_status(board, "1").phase, ImagePullPhase::Succeeded);
    }
}

#[test]
fn three_lost_runtime_attempts_in_a_row_are_not_counted() {
    let (mut board, _) = board_with(&[(
        "1",
        PullSpec {
            retries: 0,
            ..spec_for("a")
        },
    )]);
    let mut now = 0;
    for _ in 0..3 {
        let (key, run) = start_planned(&mut board, &LIMITS, at(now)).remove(0);
        assert_eq!(
            board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Uncounted), at(now)),
            AttemptOutcome::WillRetry
        );
        now += 30;
    }
    let (key, run) = start_planned(&mut board, &LIMITS, at(now)).remove(0);
    let last = board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Uncounted), at(now));
    assert_eq!(
        last,
        AttemptOutcome::Finished,
        "the image may be what ends the runtime"
    );
}

/// The API server and the runtime may be unreachable for longer than the backoff of a few attempts.
#[test]
fn prevented_attempts_are_never_counted() {
    let once = PullSpec {
        retries: 0,
        ..spec_for("a")
    };
    let (mut board, _) = board_with(&[("1", once)]);
    let mut now = 0;
    for pause in [1, 2, 4, 8, 16, 30, 30] {
        let (key, run) = start_planned(&mut board, &LIMITS, at(now)).remove(0);
        let ended = board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Prevented), at(now));
        assert_eq!(ended, AttemptOutcome::WillRetry);
        assert_eq!(plan(&board, &LIMITS, at(now)).requeue_at, Some(at(now + pause)));
        now += pause;
    }
    let (key, run) = start_planned(&mut board, &LIMITS, at(now)).remove(0);
    let interrupted = board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Uncounted), at(now));
    assert_eq!(interrupted, AttemptOutcome::WillRetry);
    let (key, run) = start_planned(&mut board, &LIMITS, at(now + 1)).remove(0);
    assert_eq!(
        board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Counted), at(now + 1)),
        AttemptOutcome::Finished
    );
}

/// A Secret may never be readable, and the registry may have no such image.
#[test]
fn attempts_without_a_secret_count_after_an_hour() {
    let twice = PullSpec {
        retries: 1,
        ..spec_for("a")
    };
    let (mut board, _) = board_with(&[("1", twice)]);
    let mut now = 0;
    while let Some((key, run)) = start_planned(&mut board, &LIMITS, at(now)).pop() {
        assert!(now < 2 * 3600, "it never counts");
        board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::SecretError), at(now));
        now += 30;
    }
    assert!(now > 3600, "it counts after {now} s");
    assert_eq!(tag_status(&board, "1").phase, ImagePullPhase::Failed);
}

#[test]
fn active_deadline_ends_a_tag_in_every_stage() {
    let limited = PullSpec {
        active_deadline: Some(SignedDuration::from_secs(5)),
        ..spec_for("a")
    };
    let (mut board, _) = board_with(&[("1", limited.clone()), ("2", limited)]);
    let started = start_planned(&mut board, &LIMITS, at(0));
    board.on_attempt_ended(
        &started[0].0,
        started[0].1,
        failed_attempt(AttemptRetry::Counted),
        at(0),
    );
    board.on_attempt_ended(
        &started[0].0,
        started[0].1,
        failed_attempt(AttemptRetry::Counted),
        at(0),
    );
    let restarted = start_planned(&mut board, &LIMITS, at(4));
    board.on_attempt_ended(
        &restarted[0].0,
        restarted[0].1,
        failed_attempt(AttemptRetry::Counted),
        at(4),
    );
    assert_eq!(plan(&board, &LIMITS, at(4)).requeue_at, Some(at(5)));
    start_planned(&mut board, &LIMITS, at(5));
    for tag in ["1", "2"] {
        let status = tag_status(&board, tag);
        assert_eq!(status.phase, ImagePullPhase::Failed);
        assert!(status.message.unwrap().starts_with(keys::DEADLINE_EXCEEDED));
    }
    assert_eq!(
        board.on_attempt_ended(&started[1].0, started[1].1, pulled_result(), at(5)),
        AttemptOutcome::Stale,
        "nothing changes after the end"
    );
}

#[test]
fn attempt_timeout_ends_at_the_active_deadline() {
    let limited = PullSpec {
        active_deadline: Some(SignedDuration::from_secs(10)),
        ..spec_for("a")
    };
    let (mut board, _) = board_with(&[("1", limited)]);
    let timeout = |board: &TaskBoard, now| match &plan(board, &LIMITS, now).steps[..] {
        [PullStep::Start { timeout, .. }] => timeout.as_secs(),
        other => panic!("{other:?}"),
    };
    assert_eq!(timeout(&board, at(0)), 10);
    let (key, run) = start_planned(&mut board, &LIMITS, at(0)).remove(0);
    board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Counted), at(3));
    assert_eq!(timeout(&board, at(4)), 6);
}

#[test]
fn removed_or_changed_tag_is_stopped() {
    let (mut board, mut specs) = board_with(&[("1", spec_for("a")), ("2", spec_for("a"))]);
    let started = start_planned(&mut board, &LIMITS, at(0));
    assert_eq!(started.len(), 2);
    specs.remove(&key("1"));
    specs.get_mut(&key("2")).unwrap().version = 2;
    assert_eq!(board.sync_spec(&specs, &BTreeMap::new()), [key("1"), key("2")]);
    assert_eq!(
        board.on_attempt_ended(&started[1].0, started[1].1, pulled_result(), at(1)),
        AttemptOutcome::Stale
    );
    assert_eq!(tag_status(&board, "2").version, 2);
    assert_eq!(start_planned(&mut board, &LIMITS, at(1)).len(), 1);
}

#[test]
fn finished_tag_in_status_is_not_pulled_again() {
    let (mut board, specs) = board_with(&[("1", spec_for("a"))]);
    let (key, run) = start_planned(&mut board, &LIMITS, at(0)).remove(0);
    board.on_attempt_ended(&key, run, pulled_result(), at(1));
    let stored = status::by_tag(&status::compose(&board, &LIMITS));

    let mut restarted = TaskBoard::default();
    restarted.sync_spec(&specs, &stored);
    assert_eq!(plan(&restarted, &LIMITS, at(9)), Plan::default());
    assert_eq!(
        status::compose(&restarted, &LIMITS),
        status::compose(&board, &LIMITS)
    );

    let next: BTreeMap<_, _> = specs
        .into_iter()
        .map(|(k, a)| (k, PullSpec { version: 2, ..a }))
        .collect();
    restarted.sync_spec(&next, &stored);
    assert_eq!(
        start_planned(&mut restarted, &LIMITS, at(9)).len(),
        1,
        "another version is another pull"
    );
}

#[test]
fn deadline_after_restart_counts_from_first_start() {
    let limited = PullSpec {
        active_deadline: Some(SignedDuration::from_secs(60)),
        ..spec_for("a")
    };
    let (mut board, specs) = board_with(&[("1", limited)]);
    start_planned(&mut board, &LIMITS, at(0));
    let stored = status::by_tag(&status::compose(&board, &LIMITS));
    let mut restarted = TaskBoard::default();
    restarted.sync_spec(&specs, &stored);
    assert_eq!(restarted.get(&key("1")).unwrap().deadline(), Some(at(60)));
    start_planned(&mut restarted, &LIMITS, at(61));
    assert_eq!(tag_status(&restarted, "1").phase, ImagePullPhase::Failed);
}

#[test]
fn tags_wait_for_the_container_runtime() {
    let (board, _) = board_with(&[("1", spec_for("a"))]);
    let none = PullLimits {
        runtime_ready: false,
        ..LIMITS
    };
    assert_eq!(plan(&board, &none, at(0)), Plan::default());
    let status = status::compose(&board, &none);
    let message = status.image_statuses["nginx"].tags[0].message.clone().unwrap();
    assert!(message.contains("container runtime"), "{message}");
    assert_eq!((status.desired, status.waiting), (1, 1));
}

#[test]
fn small_pull_job_does_not_queue_behind_a_large_one() {
    let mut specs: Vec<(String, PullSpec)> = (0..20)
        .map(|n| (format!("large{n:02}"), spec_for("large")))
        .collect();
    specs.push(("small".to_owned(), spec_for("small")));
    let (mut board, mut all) = board_with(&[]);
    for (tag, ask) in specs {
        all.insert(key(&tag), ask);
        board.sync_spec(&all, &BTreeMap::new());
    }
    let tags: Vec<_> = start_planned(&mut board, &LIMITS, at(0))
        .into_iter()
        .map(|(k, _)| k.tag)
        .collect();
    assert_eq!(tags, ["large00", "small"]);
}

/// A board with these numbers of tags per namespace, added in this order.
fn board_for_namespaces(namespaces: &[(&str, usize)]) -> TaskBoard {
    let mut board = TaskBoard::default();
    let mut all = BTreeMap::new();
    for (namespace, tags) in namespaces {
        for n in 0..*tags {
            let spec = spec_in(namespace, &format!("{namespace}-{n}"));
            all.insert(key(&format!("{namespace}-{n}")), spec);
            board.sync_spec(&all, &BTreeMap::new());
        }
    }
    board
}

/// Three slots, of which a namespace may have two.
const SHARED_LIMITS: PullLimits = PullLimits {
    max_parallel: 3,
    max_per_namespace: 2,
    max_per_registry: 3,
    runtime_ready: true,
};

fn tags(begun: Vec<(TagKey, u64)>) -> Vec<String> {
    begun.into_iter().map(|(key, _)| key.tag).collect()
}

#[test]
fn one_namespace_leaves_a_pull_slot_to_others() {
    let mut board = board_for_namespaces(&[("greedy", 9)]);
    assert_eq!(start_planned(&mut board, &SHARED_LIMITS, at(0)).len(), 2);
    let mut board = board_for_namespaces(&[("greedy", 9), ("plain", 1)]);
    assert_eq!(
        tags(start_planned(&mut board, &SHARED_LIMITS, at(0))),
        ["greedy-0", "plain-0", "greedy-1"]
    );
}

#[test]
fn image_of_two_namespaces_uses_either_share() {
    let mut board = board_for_namespaces(&[("greedy", 3)]);
    start_planned(&mut board, &SHARED_LIMITS, at(0));
    let mut both = spec_in("greedy", "last");
    both.owners.extend(spec_in("plain", "p").owners);
    let mut specs: BTreeMap<_, _> = board
        .tasks()
        .iter()
        .map(|(k, t)| (k.clone(), t.spec.clone()))
        .collect();
    specs.insert(key("both"), both);
    board.sync_spec(&specs, &BTreeMap::new());
    assert_eq!(tags(start_planned(&mut board, &SHARED_LIMITS, at(1))), ["both"]);
    assert_eq!(board.get(&key("both")).unwrap().owner.namespace, "plain");
}

/// Four slots, of which a namespace may have three, and a registry one.
const REGISTRY_LIMITS: PullLimits = PullLimits {
    max_parallel: 4,
    max_per_namespace: 3,
    max_per_registry: 1,
    runtime_ready: true,
};

/// A tag, for a job in that namespace, whose image is at that registry.
fn tag_at(registry: &str, namespace: &str, tag: &str) -> (TagKey, PullSpec) {
    let image = Ok(format!("{registry}/team/nginx:{tag}"));
    let spec = PullSpec {
        image,
        ..spec_in(namespace, namespace)
    };
    (key(tag), spec)
}

#[test]
fn tag_that_waits_for_its_registry_takes_no_slot_of_the_node() {
    let mut specs: BTreeMap<_, _> = (0..9)
        .map(|n| tag_at("full.example:5000", "a", &format!("full-{n}")))
        .collect();
    specs.extend([
        tag_at("other.example", "b", "other"),
        tag_at("third.example", "a", "third"),
    ]);
    let mut board = TaskBoard::default();
    board.sync_spec(&specs, &BTreeMap::new());
    let started = start_planned(&mut board, &REGISTRY_LIMITS, at(0));
    assert_eq!(tags(started.clone()), ["full-0", "other", "third"]);
    let message = "waits for one of 4 pull slots of this node, of which one namespace has 3 at most and one registry \
        has 1 at most";
    let status = status::compose(&board, &REGISTRY_LIMITS);
    assert_eq!(
        status::by_tag(&status)[&key("full-1")].message.as_deref(),
        Some(message)
    );
    assert_eq!((status.pulling, status.waiting), (3, 8));
    board.on_attempt_ended(&started[0].0, started[0].1, pulled_result(), at(1));
    assert_eq!(
        tags(start_planned(&mut board, &REGISTRY_LIMITS, at(1))),
        ["full-1"]
    );
}

/// A namespace with another pull on the node has its turn at a registry that another namespace has many images at.
#[test]
fn namespaces_take_turns_at_a_registry() {
    let mut specs: BTreeMap<_, _> = (0..9)
        .map(|n| tag_at("full.example", "many", &format!("many-{n}")))
        .collect();
    let mut board = TaskBoard::default();
    board.sync_spec(&specs, &BTreeMap::new());
    let mut started = start_planned(&mut board, &REGISTRY_LIMITS, at(0));
    specs.extend([
        tag_at("full.example", "few", "few"),
        tag_at("slow.example", "few", "slow"),
    ]);
    board.sync_spec(&specs, &BTreeMap::new());
    assert_eq!(tags(start_planned(&mut board, &REGISTRY_LIMITS, at(0))), ["slow"]);
    let mut order = Vec::new();
    for second in 1..4 {
        let (key, run) = started.remove(0);
        board.on_attempt_ended(&key, run, pulled_result(), at(second));
        started = start_planned(&mut board, &REGISTRY_LIMITS, at(second));
        order.extend(tags(started.clone()));
    }
    assert_eq!(order, ["many-1", "few", "many-2"]);
}

/// A namespace without a pull is behind one that has two pulls of other registries, while a third one always has more.
#[test]
fn namespace_with_the_fewest_slots_decides_which_registry_is_next() {
    let mut specs: BTreeMap<_, _> = (0..9)
        .map(|n| tag_at(&format!("many-{n}.example"), "many", &format!("many-{n}")))
        .collect();
    specs.extend([
        tag_at("one.example", "busy", "one"),
        tag_at("two.example", "busy", "two"),
    ]);
    let mut board = TaskBoard::default();
    board.sync_spec(&specs, &BTreeMap::new());
    let started = start_planned(&mut board, &REGISTRY_LIMITS, at(0));
    assert_eq!(tags(started.clone()), ["one", "many-0", "two", "many-1"]);
    for namespace in ["busy", "idle"] {
        specs.extend([tag_at("full.example", namespace, &format!("full-{namespace}"))]);
        board.sync_spec(&specs, &BTreeMap::new());
    }
    let (mut key, mut run) = started[1].clone();
    for (second, next) in [(1, "full-busy"), (2, "full-idle")] {
        board.on_attempt_ended(&key, run, pulled_result(), at(second));
        let mut started = start_planned(&mut board, &REGISTRY_LIMITS, at(second));
        assert_eq!(tags(started.clone()), [next]);
        (key, run) = started.remove(0);
    }
}

#[test]
fn stalled_pull_gives_its_registry_slot_to_another_namespace() {
    let slow = tag_at("full.example", "a", "slow");
    let next = tag_at("full.example", "b", "next");
    let mut board = TaskBoard::default();
    board.sync_spec(&[slow.clone()].into(), &BTreeMap::new());
    start_planned(&mut board, &REGISTRY_LIMITS, at(0));
    board.sync_spec(&[slow, next].into(), &BTreeMap::new());
    assert_eq!(
        plan(&board, &REGISTRY_LIMITS, at(599)),
        Plan {
            steps: Vec::new(),
            requeue_at: Some(at(600)),
        }
    );
    assert_eq!(
        tags(start_planned(&mut board, &REGISTRY_LIMITS, at(600))),
        ["next"]
    );
}

#[test]
fn stalled_pulls_give_slots_to_other_namespaces() {
    let mut board = board_for_namespaces(&[("a", 9), ("b", 9)]);
    let started = start_planned(&mut board, &SHARED_LIMITS, at(0));
    assert_eq!(tags(started.clone()), ["a-0", "b-0", "a-1"]);
    let (slow, unpacks) = (&started[0], &started[1]);
    let some = PullProgress { done: 5, total: 9 };
    board.set_progress(&slow.0, slow.1, some, at(100));
    board.set_progress(&slow.0, slow.1, some, at(500));
    let all = PullProgress { done: 9, total: 9 };
    board.set_progress(&unpacks.0, unpacks.1, all, at(100));
    let nothing_until = |seconds| Plan {
        steps: Vec::new(),
        requeue_at: Some(at(seconds)),
    };
    assert_eq!(plan(&board, &SHARED_LIMITS, at(599)), nothing_until(600));
    assert_eq!(
        tags(start_planned(&mut board, &SHARED_LIMITS, at(600))),
        ["b-1"],
        "the first attempt without bytes lends its slot"
    );
    assert_eq!(plan(&board, &SHARED_LIMITS, at(600)), nothing_until(700));
    assert_eq!(
        plan(&board, &SHARED_LIMITS, at(9999)).steps,
        [],
        "each namespace has its share"
    );
}

#[test]
fn long_pulls_give_slots_to_a_namespace_without_any() {
    let mut board = board_for_namespaces(&[("a", 9), ("b", 9)]);
    let started = start_planned(&mut board, &SHARED_LIMITS, at(0));
    let mut specs: BTreeMap<_, _> = board
        .tasks()
        .iter()
        .map(|(k, t)| (k.clone(), t.spec.clone()))
        .collect();
    for namespace in ["c", "d"] {
        specs.insert(key(&format!("{namespace}-0")), spec_in(namespace, namespace));
        specs.insert(key(&format!("{namespace}-1")), spec_in(namespace, namespace));
    }
    board.sync_spec(&specs, &BTreeMap::new());
    for seconds in 1..600 {
        for (key, run) in &started {
            let drip = PullProgress {
                done: u64::try_from(seconds).unwrap(),
                total: 1 << 40,
            };
            board.set_progress(key, *run, drip, at(seconds));
        }
        assert_eq!(
            start_planned(&mut board, &SHARED_LIMITS, at(seconds)),
            [],
            "at {seconds} s"
        );
    }
    assert_eq!(plan(&board, &SHARED_LIMITS, at(599)).requeue_at, Some(at(600)));
    assert_eq!(
        tags(start_planned(&mut board, &SHARED_LIMITS, at(600))),
        ["c-0", "d-0"]
    );
    assert_eq!(start_planned(&mut board, &SHARED_LIMITS, at(601)), [], "one each");
}

#[test]
fn progress_percent_is_below_100_before_the_end() {
    let (mut board, _) = board_with(&[("1", spec_for("a"))]);
    let (key, run) = start_planned(&mut board, &LIMITS, at(0)).remove(0);
    for (done, total, per_cent) in [(0, 0, 0), (1, 3, 33), (3, 3, 99), (u64::MAX, u64::MAX, 99)] {
        board.set_progress(&key, run, PullProgress { done, total }, at(1));
        assert_eq!(tag_status(&board, "1").progress, per_cent);
    }
    board.set_progress(&key, run + 1, PullProgress { done: 1, total: 2 }, at(1));
    assert_eq!(
        tag_status(&board, "1").progress,
        99,
        "bytes of another attempt do not count"
    );
}
