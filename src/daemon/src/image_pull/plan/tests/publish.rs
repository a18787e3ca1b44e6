use super::super::conditions::{RuntimeState, next_conditions};
use super::super::publish::{StatusPublisher, WriteTime, status_patch};
use super::conditions::{not_ready, ready};
use super::*;
use kruise_api::node_image::NodeImageStatus;
use proptest::prelude::*;
use serde_json::json;

fn at_ms(ms: i64) -> Timestamp {
    Timestamp::from_millisecond(START * 1000 + ms).unwrap()
}

/// A board with one running tag, its key and its run.
fn running_board() -> (TaskBoard, TagKey, u64) {
    let (mut board, _) = board_with(&[("1", spec_for("a"))]);
    let (key, run) = start_planned(&mut board, &LIMITS, at(0)).remove(0);
    (board, key, run)
}

fn composed(board: &TaskBoard) -> NodeImageStatus {
    status::compose(board, &LIMITS)
}

#[test]
fn status_transitions_are_coalesced_and_ends_are_not() {
    let (mut board, key, run) = running_board();
    let mut publisher = StatusPublisher::new(0);
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(0)),
        WriteTime::At(at_ms(100))
    );
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(50)),
        WriteTime::At(at_ms(100)),
        "the first of them sets the time"
    );
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(100)),
        WriteTime::Now
    );
    board.on_attempt_ended(&key, run, pulled_result(), at_ms(60));
    assert_eq!(publisher.next_write(&composed(&board), at_ms(60)), WriteTime::Now);
    publisher.on_written(composed(&board), at_ms(60));
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(61)),
        WriteTime::Never
    );
}

#[test]
fn pull_progress_is_written_every_ten_seconds() {
    let (mut board, key, run) = running_board();
    let mut publisher = StatusPublisher::new(500);
    publisher.on_written(composed(&board), at_ms(0));
    let mut writes = Vec::new();
    for ms in (0..60_000).step_by(500) {
        board.set_progress(
            &key,
            run,
            PullProgress {
                done: u64::try_from(ms).unwrap(),
                total: 60_000,
            },
            at_ms(ms),
        );
        if publisher.next_write(&composed(&board), at_ms(ms)) == WriteTime::Now {
            publisher.on_written(composed(&board), at_ms(ms));
            writes.push(ms);
        }
    }
    assert_eq!(writes, [11_000, 22_000, 33_000, 44_000, 55_000]);
}

#[test]
fn bytes_are_written_with_their_percentage_only() {
    let (mut board, key, run) = running_board();
    let mut publisher = StatusPublisher::new(0);
    publisher.on_written(composed(&board), at_ms(0));
    let mut write_after = |done, ms| {
        let progress = PullProgress { done, total: 1 << 30 };
        board.set_progress(&key, run, progress, at_ms(ms));
        let current = composed(&board);
        let due = publisher.next_write(&current, at_ms(ms));
        let patch = (due == WriteTime::Now).then(|| status_patch(&publisher.stored, &current));
        if patch.is_some() {
            publisher.on_written(current, at_ms(ms));
        }
        (due, patch)
    };
    assert_eq!(write_after(1 << 20, 20_000), (WriteTime::Never, None));
    let (due, patch) = write_after(1 << 29, 30_000);
    assert_eq!(due, WriteTime::Now);
    let patch = patch.unwrap();
    let status = &patch["status"];
    assert_eq!(status["progress"], "50% of 1.0 GiB");
    let bytes = json!({"done": 1 << 29, "total": 1 << 30});
    assert_eq!(status["imageStatuses"]["nginx"]["tags"][0]["bytes"], bytes);
    assert_eq!(write_after((1 << 29) + 1, 50_000), (WriteTime::Never, None));
    board.on_attempt_ended(&key, run, pulled_result(), at_ms(60_000));
    let patch = status_patch(&publisher.stored, &composed(&board));
    let status = &patch["status"];
    assert!(status["progress"].is_null() && status.get("progress").is_some());
    assert!(status["imageStatuses"]["nginx"]["tags"][0]["bytes"].is_null());
}

#[test]
fn failed_status_write_backs_off_or_obeys_retry_after() {
    let (board, ..) = running_board();
    let mut publisher = StatusPublisher::new(0);
    publisher.on_failed(None, at_ms(0));
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(0)),
        WriteTime::At(at_ms(500))
    );
    for _ in 0..10 {
        publisher.on_failed(None, at_ms(0));
    }
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(0)),
        WriteTime::At(at_ms(30_000))
    );
    publisher.on_failed(Some(SignedDuration::from_secs(37)), at_ms(0));
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(0)),
        WriteTime::At(at_ms(37_000))
    );
    publisher.on_failed(Some(SignedDuration::from_secs(1)), at_ms(0));
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(0)),
        WriteTime::At(at_ms(30_000)),
        "it grows although the server asks for less"
    );
}

#[test]
fn status_is_written_after_the_clock_was_set_back() {
    let (mut board, key, run) = running_board();
    let mut publisher = StatusPublisher::new(0);
    let ahead = 3_600_000;
    publisher.on_written(composed(&board), at_ms(ahead));
    let progress = PullProgress { done: 1, total: 2 };
    board.set_progress(&key, run, progress, at_ms(0));
    assert_eq!(publisher.next_write(&composed(&board), at_ms(0)), WriteTime::Now);
    board.on_attempt_ended(&key, run, pulled_result(), at_ms(ahead));
    publisher.on_failed(None, at_ms(ahead));
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(ahead - 1000)),
        WriteTime::At(at_ms(ahead + 500)),
        "the clock is known to the second"
    );
    assert_eq!(publisher.next_write(&composed(&board), at_ms(0)), WriteTime::Now);
}

#[test]
fn failed_status_write_is_retried_on_server_contact() {
    let (board, ..) = running_board();
    let mut publisher = StatusPublisher::new(500);
    (0..20).for_each(|_| publisher.on_failed(None, at_ms(0)));
    publisher.on_server_contact();
    assert_ne!(
        publisher.next_write(&composed(&board), at_ms(0)),
        WriteTime::At(at_ms(45_000))
    );
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(100)),
        WriteTime::Now
    );
    publisher.on_failed(None, at_ms(100));
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(100)),
        WriteTime::At(at_ms(45_100)),
        "it is as unwell as before"
    );

    publisher.on_failed(Some(SignedDuration::from_secs(7)), at_ms(200));
    publisher.on_server_contact();
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(200)),
        WriteTime::At(at_ms(7700)),
        "it asked for that pause itself"
    );
    publisher.on_written(NodeImageStatus::default(), at_ms(300));
    publisher.on_server_contact();
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(300)),
        WriteTime::At(at_ms(400)),
        "a write was taken since"
    );

    publisher.on_rejected(at_ms(0));
    let rejected_retry = publisher.next_write(&composed(&board), at_ms(0));
    publisher.on_server_contact();
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(0)),
        rejected_retry,
        "it was heard of"
    );
    for _ in 0..20 {
        publisher.on_rejected(at_ms(0));
    }
    assert_eq!(
        publisher.next_write(&composed(&board), at_ms(0)),
        WriteTime::At(at_ms(300_500))
    );
}

#[test]
fn rejected_status_is_written_without_messages() {
    let (mut board, key, run) = running_board();
    board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Never), at(0));
    let (full_status, mut publisher) = (composed(&board), StatusPublisher::new(0));
    let message = |publisher: &StatusPublisher, ms| {
        let publishable = publisher.publishable(full_status.clone(), &RuntimeState::Unknown, at_ms(ms));
        status::by_tag(&publishable)[&key].message.clone()
    };
    assert_eq!(message(&publisher, 0).as_deref(), Some("no luck"));
    assert!(publisher.on_rejected(at_ms(0)), "it is news");
    assert_eq!(message(&publisher, 1), None);
    let without_messages = publisher.publishable(full_status.clone(), &RuntimeState::Unknown, at_ms(1));
    assert_eq!(
        (
            without_messages.failed,
            &status::by_tag(&without_messages)[&key].phase
        ),
        (1, &ImagePullPhase::Failed)
    );
    assert_eq!(
        publisher.next_write(&without_messages, at_ms(1)),
        WriteTime::At(at_ms(500))
    );

    for pause in [
        1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000, 256_000, 300_000, 300_000,
    ] {
        assert!(!publisher.on_rejected(at_ms(500)), "not the first rejection");
        assert_eq!(
            publisher.next_write(&without_messages, at_ms(500)),
            WriteTime::At(at_ms(500 + pause))
        );
    }
    publisher.on_written(without_messages.clone(), at_ms(1000));
    let retry_at = 500 + 300_000 + 300_000;
    assert_eq!(
        publisher.next_write(&without_messages, at_ms(1001)),
        WriteTime::At(at_ms(retry_at))
    );
    assert_eq!(message(&publisher, retry_at - 1), None);
    assert_eq!(message(&publisher, retry_at).as_deref(), Some("no luck"));
    assert_eq!(
        publisher.next_write(&full_status, at_ms(retry_at)),
        WriteTime::Now
    );
    assert!(
        !publisher.on_rejected(at_ms(retry_at)),
        "no status with messages was taken since"
    );
    assert_eq!(
        publisher.next_write(&without_messages, at_ms(retry_at)),
        WriteTime::At(at_ms(retry_at + 300_000 + 500))
    );

    publisher.on_written(full_status.clone(), at_ms(2 * retry_at));
    assert_eq!(
        publisher.next_write(&full_status, at_ms(2 * retry_at)),
        WriteTime::Never
    );
    assert!(publisher.on_rejected(at_ms(2 * retry_at)), "it is news again");
}

#[test]
fn status_write_retries_of_nodes_are_jittered() {
    let (board, ..) = running_board();
    let first_retry = |spread| {
        let mut publisher = StatusPublisher::new(spread);
        publisher.on_failed(Some(SignedDuration::from_secs(1)), at_ms(0));
        publisher.next_write(&composed(&board), at_ms(0))
    };
    assert_eq!(
        [first_retry(0), first_retry(300)],
        [1000, 1300].map(|ms| WriteTime::At(at_ms(ms)))
    );
    let late_retry = |spread| {
        let mut publisher = StatusPublisher::new(spread);
        (0..20).for_each(|_| publisher.on_failed(None, at_ms(0)));
        publisher.next_write(&composed(&board), at_ms(0))
    };
    let all = [late_retry(0), late_retry(500), late_retry(999)];
    assert_eq!(all, [30_000, 45_000, 59_970].map(|ms| WriteTime::At(at_ms(ms))));
}

/// When the status of a node without tags is written.
fn next_idle_write(publisher: &mut StatusPublisher, runtime: &RuntimeState, ms: i64) -> WriteTime {
    let current = publisher.publishable(NodeImageStatus::default(), runtime, at_ms(ms));
    publisher.next_write(&current, at_ms(ms))
}

#[test]
fn runtime_that_restarts_causes_no_status_write() {
    let mut publisher = StatusPublisher::new(500);
    let down = not_ready("no socket");
    assert_eq!(
        next_idle_write(&mut publisher, &down, 0),
        WriteTime::At(at_ms(11_000))
    );
    assert_eq!(
        next_idle_write(&mut publisher, &ready(), 10_999),
        WriteTime::Never
    );
    assert_eq!(
        next_idle_write(&mut publisher, &down, 11_000),
        WriteTime::At(at_ms(22_000))
    );
    assert_eq!(next_idle_write(&mut publisher, &down, 22_000), WriteTime::Now);
    let written = publisher.publishable(NodeImageStatus::default(), &down, at_ms(22_000));
    publisher.on_written(written, at_ms(22_000));
    let other_message = not_ready("no answer");
    assert_eq!(
        next_idle_write(&mut publisher, &other_message, 90_000),
        WriteTime::Never
    );
    assert_eq!(
        next_idle_write(&mut publisher, &ready(), 90_000),
        WriteTime::At(at_ms(101_000))
    );
}

#[test]
fn conditions_are_in_the_next_status_write() {
    let (board, ..) = running_board();
    let mut publisher = StatusPublisher::new(0);
    let down = not_ready("no socket");
    let current = publisher.publishable(composed(&board), &down, at_ms(0));
    assert_eq!(
        publisher.next_write(&current, at_ms(0)),
        WriteTime::At(at_ms(100))
    );
    let patch = status_patch(&publisher.stored, &current);
    assert_eq!(patch["status"]["conditions"], json!(current.conditions));
    publisher.on_written(current, at_ms(100));
    let current = publisher.publishable(composed(&board), &down, at_ms(200));
    assert!(status_patch(&publisher.stored, &current)["status"]["conditions"].is_null());
}

/// OpenKruise's CRD does not have the field.
#[test]
fn conditions_that_the_api_server_drops_are_not_written_again() {
    let mut publisher = StatusPublisher::new(0);
    let down = not_ready("no socket");
    assert_ne!(next_idle_write(&mut publisher, &down, 0), WriteTime::Never);
    assert_eq!(next_idle_write(&mut publisher, &down, 10_000), WriteTime::Now);
    publisher.on_failed(None, at_ms(10_000));
    assert_eq!(next_idle_write(&mut publisher, &down, 10_500), WriteTime::Now);
    publisher.on_written(NodeImageStatus::default(), at_ms(10_500));
    assert_eq!(next_idle_write(&mut publisher, &down, 90_000), WriteTime::Never);
    publisher.on_written(NodeImageStatus::default(), at_ms(90_000));
    assert_eq!(next_idle_write(&mut publisher, &down, 180_000), WriteTime::Never);
    publisher.stored.conditions = next_conditions(&[], &down, at_ms(0));
    assert_eq!(
        next_idle_write(&mut publisher, &ready(), 180_000),
        WriteTime::At(at_ms(190_000)),
        "the CRD has it now"
    );
}

/// After a restore of etcd, a status without them answers a write about a tag.
#[test]
fn conditions_that_were_not_in_the_write_are_written_later() {
    let mut publisher = StatusPublisher::new(0);
    let down = not_ready("no socket");
    publisher.stored.conditions = next_conditions(&[], &down, at_ms(0));
    let current = NodeImageStatus {
        desired: 1,
        conditions: publisher.stored.conditions.clone(),
        ..NodeImageStatus::default()
    };
    publisher.next_write(&current, at_ms(0));
    assert_eq!(publisher.next_write(&current, at_ms(100)), WriteTime::Now);
    publisher.on_written(NodeImageStatus::default(), at_ms(100));
    assert_ne!(next_idle_write(&mut publisher, &down, 200), WriteTime::Never);
}

#[test]
fn status_patch_holds_only_the_differences() {
    let status = |value: serde_json::Value| serde_json::from_value::<NodeImageStatus>(value).unwrap();
    let tag = |phase: &str| json!({"tags": [{"tag": "1", "phase": phase, "progress": 0, "version": 0}]});
    let stored = status(
        json!({"desired": 3, "imageStatuses": {"a": tag("Pulling"), "b": tag("Waiting"), "c": tag("Waiting")},
        "firstSyncStatus": {"message": "of another program"}}),
    );
    let current = status(json!({"desired": 2, "succeeded": 1, "waiting": 1,
        "imageStatuses": {"a": tag("Succeeded"), "b": tag("Waiting")}}));
    let patch = status_patch(&stored, &current);
    assert_eq!(
        patch,
        json!({"status": {"desired": 2, "succeeded": 1, "failed": 0, "pulling": 0, "waiting": 1,
        "imageStatuses": {"a": tag("Succeeded"), "c": null}}})
    );
}

/// The status of a board in some state.
fn any_status() -> impl Strategy<Value = NodeImageStatus> {
    let tags = prop::collection::btree_map(("[ab]", "[12]"), 0..4u8, 0..4);
    (tags, prop::option::of(0..2_i64)).prop_map(|(tags, without_runtime_since)| {
        let specs: BTreeMap<_, _> = tags
            .keys()
            .map(|(name, tag)| {
                (
                    TagKey {
                        name: name.clone(),
                        tag: tag.clone(),
                    },
                    spec_for("a"),
                )
            })
            .collect();
        let mut board = TaskBoard::default();
        board.sync_spec(&specs, &BTreeMap::new());
        let started = start_planned(
            &mut board,
            &PullLimits {
                max_parallel: 3,
                ..LIMITS
            },
            at(0),
        );
        for (key, run) in started {
            match tags[&(key.name.clone(), key.tag.clone())] {
                0 => drop(board.on_attempt_ended(&key, run, pulled_result(), at(1))),
                1 => drop(board.on_attempt_ended(&key, run, failed_attempt(AttemptRetry::Never), at(1))),
                2 => board.set_progress(&key, run, PullProgress { done: 1, total: 2 }, at(1)),
                _ => {}
            }
        }
        let mut status = status::compose(&board, &LIMITS);
        if let Some(since) = without_runtime_since {
            status.conditions = next_conditions(&[], &not_ready("no socket"), at(since));
        }
        status
    })
}

proptest! {
    /// Applied to the stored status, the patch gives the current one and keeps the fields of other writers.
    #[test]
    fn status_patch_leads_to_the_current_status(old in any_status(), new in any_status()) {
        let mut object = json!({ "status": old });
        object["status"]["firstSyncStatus"] = json!({"message": "of another program"});
        json_patch::merge(&mut object, &status_patch(&old, &new));
        let mut merged: NodeImageStatus = serde_json::from_value(object["status"].clone()).unwrap();
        prop_assert!(merged.first_sync_status.take().is_some());
        prop_assert_eq!(merged, new);
    }

    /// Whatever was written, nothing is left to write once the current status is written; a change is written within 12
    /// s.
    #[test]
    fn publishing_converges(old in any_status(), new in any_status(), spread in any::<i64>()) {
        let mut publisher = StatusPublisher::new(spread);
        publisher.on_written(old.clone(), at(0));
        match publisher.next_write(&new, at(1)) {
            WriteTime::Never => prop_assert_eq!(&old, &new),
            WriteTime::At(t) => prop_assert!(t > at(1) && t <= at(13)),
            WriteTime::Now => {}
        }
        publisher.on_written(new.clone(), at(1));
        prop_assert_eq!(publisher.next_write(&new, at(2)), WriteTime::Never);
    }
}
