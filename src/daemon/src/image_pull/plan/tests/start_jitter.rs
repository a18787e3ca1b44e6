use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn requested_spec() -> PullSpec {
    PullSpec {
        requested_at: Some(at(0)),
        ..spec_for("a")
    }
}

fn jitter(seconds: u64) -> StartJitter {
    StartJitter::new(Duration::from_secs(seconds), "node-1")
}

#[test]
fn delayed_pull_reports_its_start_and_starts_then() {
    let specs: BTreeMap<_, _> = [(key("1"), requested_spec())].into();
    let mut board = TaskBoard::with_start_jitter(jitter(60));
    board.sync_spec(&specs, &BTreeMap::new());
    let start = jitter(60).starts_at(&key("1"), &requested_spec()).unwrap();
    let waiting = Plan {
        steps: Vec::new(),
        requeue_at: Some(start),
    };
    assert_eq!(plan(&board, &LIMITS, at(0)), waiting);
    board.end_pauses(at(0));
    let status = tag_status(&board, "1");
    let second = kruise_api::time::truncate_to_second(start);
    assert_eq!(status.phase, ImagePullPhase::Waiting);
    assert_eq!(
        status.message,
        Some(format!(
            "waits for its start at {second} (--image-pull-start-jitter)"
        ))
    );
    board.end_pauses(start);
    assert_eq!(board.get(&key("1")).unwrap().stage, PullStage::Waiting);
    assert_eq!(start_planned(&mut board, &LIMITS, start).len(), 1);
}

#[test]
fn pull_that_started_before_the_daemon_is_not_delayed_again() {
    let specs: BTreeMap<_, _> = [(key("1"), requested_spec())].into();
    let mut board = TaskBoard::default();
    board.sync_spec(&specs, &BTreeMap::new());
    start_planned(&mut board, &LIMITS, at(0));
    let stored = status::by_tag(&status::compose(&board, &LIMITS));
    let mut restarted = TaskBoard::with_start_jitter(jitter(60));
    restarted.sync_spec(&specs, &stored);
    assert_eq!(start_planned(&mut restarted, &LIMITS, at(0)).len(), 1);
}

/// The request may have another clock, and one that was written by hand has no time.
#[test]
fn only_a_plausible_time_of_the_request_delays_a_pull() {
    for requested_at in [None, Some(at(3600)), Some(Timestamp::MAX)] {
        let spec = PullSpec {
            requested_at,
            ..requested_spec()
        };
        let mut board = TaskBoard::with_start_jitter(jitter(60));
        board.sync_spec(&[(key("1"), spec)].into(), &BTreeMap::new());
        assert_eq!(
            start_planned(&mut board, &LIMITS, at(0)).len(),
            1,
            "{requested_at:?}"
        );
    }
}

#[test]
fn nodes_and_tags_start_at_different_times() {
    let start = |node: &str, tag: &str| {
        let jitter = StartJitter::new(Duration::from_secs(60), node);
        jitter.starts_at(&key(tag), &requested_spec())
    };
    let starts: BTreeSet<_> = ["node-1", "node-2"]
        .into_iter()
        .flat_map(|node| ["1", "2"].map(|tag| start(node, tag)))
        .collect();
    assert_eq!(starts.len(), 4);
    assert_eq!(start("node-1", "1"), start("node-1", "1"));
    assert_eq!(jitter(0).starts_at(&key("1"), &requested_spec()), None);
}

proptest! {
    /// No pull is delayed for longer than the flag says, nor for more than half of its deadline.
    #[test]
    fn start_is_within_jitter_and_deadline(
        max in 0..1000u64, node in "[a-z]{1,8}", tag in "[a-z]{1,8}", deadline in prop::option::of(-9..900i64),
    ) {
        let spec = PullSpec {
            active_deadline: deadline.map(SignedDuration::from_secs),
            ..requested_spec()
        };
        let start = StartJitter::new(Duration::from_secs(max), &node).starts_at(&key(&tag), &spec);
        let delay = start.map_or(SignedDuration::ZERO, |start| start.duration_since(at(0)));
        let max = SignedDuration::from_secs(i64::try_from(max).unwrap().min(300));
        prop_assert!(!delay.is_negative() && delay <= max);
        prop_assert!(deadline.is_none_or(|deadline| delay <= SignedDuration::from_secs(deadline.max(0)) / 2));
    }
}
