#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fit;
mod keyring;
mod publish;
mod simulate;

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;

use super::board::Outcome;
use super::*;
use kruise_api::node_image::ImagePullPhase;

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

pub(super) fn ask(owner: &str) -> Ask {
    Ask {
        version: 1,
        image: Ok("docker.io/library/nginx:1".to_owned()),
        always: false,
        timeout: SignedDuration::from_secs(60),
        retries: 2,
        active_deadline: None,
        owners: vec![ObjectReference {
            uid: Some(owner.to_owned()),
            ..ObjectReference::default()
        }],
        secrets: Vec::new(),
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
    }
}

/// What a job of that namespace asks.
pub(in crate::image_pull) fn ask_in(namespace: &str, owner: &str) -> Ask {
    let mut ask = ask(owner);
    ask.owners[0].namespace = Some(namespace.to_owned());
    ask
}

pub(in crate::image_pull) const LIMITS: Limits = Limits {
    max_parallel: 2,
    max_per_namespace: 2,
    runtime: true,
};

pub(in crate::image_pull) fn failed(again: Again) -> Ended {
    Ended::Failed {
        words: "no luck".to_owned(),
        again,
    }
}

pub(in crate::image_pull) fn pulled() -> Ended {
    Ended::Pulled {
        image_id: Some("nginx@sha256:0".to_owned()),
        note: None,
    }
}

/// Applies the plan and returns the runs that began.
pub(in crate::image_pull) fn go(board: &mut Board, limits: &Limits, now: Timestamp) -> Vec<(TagKey, u64)> {
    let steps = plan(board, limits, now).steps;
    let begun = steps.iter().filter_map(|step| {
        let run = board.apply(step, now)?;
        match step {
            Step::Start { key, .. } => Some((key.clone(), run)),
            Step::GiveUp { .. } => None,
        }
    });
    begun.collect()
}

fn board_of(asks: &[(&str, Ask)]) -> (Board, BTreeMap<TagKey, Ask>) {
    let asks: BTreeMap<_, _> = asks.iter().map(|(tag, ask)| (key(tag), ask.clone())).collect();
    let mut board = Board::default();
    assert!(board.desire(&asks, &BTreeMap::new()).is_empty());
    (board, asks)
}

fn said(board: &Board, tag: &str) -> ImageTagStatus {
    status::by_tag(&status::compose(board, &LIMITS))
        .remove(&key(tag))
        .unwrap()
}

#[test]
fn an_attempt_that_succeeds_ends_the_tag() {
    let (mut board, _) = board_of(&[("1", ask("a"))]);
    let (key, run) = go(&mut board, &LIMITS, at(0)).remove(0);
    assert_eq!(said(&board, "1").phase, ImagePullPhase::Pulling);
    assert_eq!(board.ended(&key, run, pulled(), at(3)), Outcome::Over);
    let status = said(&board, "1");
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
fn a_failure_waits_longer_each_time_and_the_last_one_ends_the_tag_at_once() {
    let (mut board, _) = board_of(&[("1", ask("a"))]);
    let mut now = 0;
    for pause in [1, 2] {
        let (key, run) = go(&mut board, &LIMITS, at(now)).remove(0);
        assert_eq!(
            board.ended(&key, run, failed(Again::Counted), at(now)),
            Outcome::Continues
        );
        let waiting = plan(&board, &LIMITS, at(now));
        assert_eq!((waiting.steps.len(), waiting.wake), (0, Some(at(now + pause))));
        let message = said(&board, "1").message.unwrap();
        assert!(
            message.starts_with("waits for its next attempt at ") && message.contains("no luck"),
            "{message}"
        );
        now += pause;
    }
    let (key, run) = go(&mut board, &LIMITS, at(now)).remove(0);
    assert_eq!(
        board.ended(&key, run, failed(Again::Counted), at(now)),
        Outcome::Over
    );
    assert_eq!(said(&board, "1").message.as_deref(), Some("no luck"));
}

#[test]
fn what_cannot_succeed_is_not_repeated() {
    let (mut board, _) = board_of(&[("1", ask("a"))]);
    let (key, run) = go(&mut board, &LIMITS, at(0)).remove(0);
    assert_eq!(board.ended(&key, run, failed(Again::Never), at(0)), Outcome::Over);
}

#[test]
fn an_invalid_reference_ends_the_tag_without_an_attempt() {
    let bad = Ask {
        image: Err("\"X\" is not valid".to_owned()),
        ..ask("a")
    };
    let (mut board, _) = board_of(&[("1", bad)]);
    assert!(
        go(
            &mut board,
            &Limits {
                runtime: false,
                ..LIMITS
            },
            at(0)
        )
        .is_empty()
    );
    assert_eq!(said(&board, "1").message.as_deref(), Some("\"X\" is not valid"));
}

#[test]
fn a_runtime_that_goes_away_costs_no_attempt_three_times_in_a_row() {
    let (mut board, _) = board_of(&[(
        "1",
        Ask {
            retries: 0,
            ..ask("a")
        },
    )]);
    let mut now = 0;
    for _ in 0..3 {
        let (key, run) = go(&mut board, &LIMITS, at(now)).remove(0);
        assert_eq!(
            board.ended(&key, run, failed(Again::Uncounted), at(now)),
            Outcome::Continues
        );
        now += 30;
    }
    let (key, run) = go(&mut board, &LIMITS, at(now)).remove(0);
    let last = board.ended(&key, run, failed(Again::Uncounted), at(now));
    assert_eq!(last, Outcome::Over, "the image may be what ends the runtime");
}

/// Neither the API server nor the runtime has to be back within the pauses of a few attempts.
#[test]
fn an_attempt_that_is_prevented_costs_none_however_often() {
    let once = Ask {
        retries: 0,
        ..ask("a")
    };
    let (mut board, _) = board_of(&[("1", once)]);
    let mut now = 0;
    for pause in [1, 2, 4, 8, 16, 30, 30] {
        let (key, run) = go(&mut board, &LIMITS, at(now)).remove(0);
        let ended = board.ended(&key, run, failed(Again::Prevented), at(now));
        assert_eq!(ended, Outcome::Continues);
        assert_eq!(plan(&board, &LIMITS, at(now)).wake, Some(at(now + pause)));
        now += pause;
    }
    let (key, run) = go(&mut board, &LIMITS, at(now)).remove(0);
    let interrupted = board.ended(&key, run, failed(Again::Uncounted), at(now));
    assert_eq!(interrupted, Outcome::Continues);
    let (key, run) = go(&mut board, &LIMITS, at(now + 1)).remove(0);
    assert_eq!(
        board.ended(&key, run, failed(Again::Counted), at(now + 1)),
        Outcome::Over
    );
}

#[test]
fn the_deadline_ends_a_tag_in_every_stage() {
    let limited = Ask {
        active_deadline: Some(SignedDuration::from_secs(5)),
        ..ask("a")
    };
    let (mut board, _) = board_of(&[("1", limited.clone()), ("2", limited)]);
    let begun = go(&mut board, &LIMITS, at(0));
    board.ended(&begun[0].0, begun[0].1, failed(Again::Counted), at(0));
    board.ended(&begun[0].0, begun[0].1, failed(Again::Counted), at(0));
    let again = go(&mut board, &LIMITS, at(4));
    board.ended(&again[0].0, again[0].1, failed(Again::Counted), at(4));
    assert_eq!(plan(&board, &LIMITS, at(4)).wake, Some(at(5)));
    go(&mut board, &LIMITS, at(5));
    for tag in ["1", "2"] {
        let status = said(&board, tag);
        assert_eq!(status.phase, ImagePullPhase::Failed);
        assert!(status.message.unwrap().starts_with(keys::DEADLINE_EXCEEDED));
    }
    assert_eq!(
        board.ended(&begun[1].0, begun[1].1, pulled(), at(5)),
        Outcome::Stale,
        "nothing changes after the end"
    );
}

#[test]
fn an_attempt_may_take_no_longer_than_the_deadline_leaves() {
    let limited = Ask {
        active_deadline: Some(SignedDuration::from_secs(10)),
        ..ask("a")
    };
    let (mut board, _) = board_of(&[("1", limited)]);
    let timeout = |board: &Board, now| match &plan(board, &LIMITS, now).steps[..] {
        [Step::Start { timeout, .. }] => timeout.as_secs(),
        other => panic!("{other:?}"),
    };
    assert_eq!(timeout(&board, at(0)), 10);
    let (key, run) = go(&mut board, &LIMITS, at(0)).remove(0);
    board.ended(&key, run, failed(Again::Counted), at(3));
    assert_eq!(timeout(&board, at(4)), 6);
}

#[test]
fn a_tag_that_is_removed_or_changes_version_is_stopped() {
    let (mut board, mut asks) = board_of(&[("1", ask("a")), ("2", ask("a"))]);
    let begun = go(&mut board, &LIMITS, at(0));
    assert_eq!(begun.len(), 2);
    asks.remove(&key("1"));
    asks.get_mut(&key("2")).unwrap().version = 2;
    assert_eq!(board.desire(&asks, &BTreeMap::new()), [key("1"), key("2")]);
    assert_eq!(
        board.ended(&begun[1].0, begun[1].1, pulled(), at(1)),
        Outcome::Stale
    );
    assert_eq!(said(&board, "2").version, 2);
    assert_eq!(go(&mut board, &LIMITS, at(1)).len(), 1);
}

#[test]
fn what_the_status_says_is_over_is_not_pulled_again() {
    let (mut board, asks) = board_of(&[("1", ask("a"))]);
    let (key, run) = go(&mut board, &LIMITS, at(0)).remove(0);
    board.ended(&key, run, pulled(), at(1));
    let stored = status::by_tag(&status::compose(&board, &LIMITS));

    let mut restarted = Board::default();
    restarted.desire(&asks, &stored);
    assert_eq!(plan(&restarted, &LIMITS, at(9)), Plan::default());
    assert_eq!(
        status::compose(&restarted, &LIMITS),
        status::compose(&board, &LIMITS)
    );

    let next: BTreeMap<_, _> = asks
        .into_iter()
        .map(|(k, a)| (k, Ask { version: 2, ..a }))
        .collect();
    restarted.desire(&next, &stored);
    assert_eq!(
        go(&mut restarted, &LIMITS, at(9)).len(),
        1,
        "another version is another pull"
    );
}

#[test]
fn after_a_restart_the_deadline_counts_from_the_first_start() {
    let limited = Ask {
        active_deadline: Some(SignedDuration::from_secs(60)),
        ..ask("a")
    };
    let (mut board, asks) = board_of(&[("1", limited)]);
    go(&mut board, &LIMITS, at(0));
    let stored = status::by_tag(&status::compose(&board, &LIMITS));
    let mut restarted = Board::default();
    restarted.desire(&asks, &stored);
    assert_eq!(restarted.get(&key("1")).unwrap().deadline(), Some(at(60)));
    go(&mut restarted, &LIMITS, at(61));
    assert_eq!(said(&restarted, "1").phase, ImagePullPhase::Failed);
}

#[test]
fn without_a_runtime_tags_wait_and_say_for_what() {
    let (board, _) = board_of(&[("1", ask("a"))]);
    let none = Limits {
        runtime: false,
        ..LIMITS
    };
    assert_eq!(plan(&board, &none, at(0)), Plan::default());
    let status = status::compose(&board, &none);
    let message = status.image_statuses["nginx"].tags[0].message.clone().unwrap();
    assert!(message.contains("container runtime"), "{message}");
    assert_eq!((status.desired, status.waiting), (1, 1));
}

#[test]
fn a_small_job_does_not_queue_behind_a_large_one() {
    let mut asks: Vec<(String, Ask)> = (0..20).map(|n| (format!("large{n:02}"), ask("large"))).collect();
    asks.push(("small".to_owned(), ask("small")));
    let (mut board, mut all) = board_of(&[]);
    for (tag, ask) in asks {
        all.insert(key(&tag), ask);
        board.desire(&all, &BTreeMap::new());
    }
    let tags: Vec<_> = go(&mut board, &LIMITS, at(0))
        .into_iter()
        .map(|(k, _)| k.tag)
        .collect();
    assert_eq!(tags, ["large00", "small"]);
}

/// A board with so many tags of each namespace, asked for in this order.
fn board_in(namespaces: &[(&str, usize)]) -> Board {
    let mut board = Board::default();
    let mut all = BTreeMap::new();
    for (namespace, tags) in namespaces {
        for n in 0..*tags {
            let ask = ask_in(namespace, &format!("{namespace}-{n}"));
            all.insert(key(&format!("{namespace}-{n}")), ask);
            board.desire(&all, &BTreeMap::new());
        }
    }
    board
}

/// Three slots, of which a namespace has two.
const SHARED: Limits = Limits {
    max_parallel: 3,
    max_per_namespace: 2,
    runtime: true,
};

fn tags(begun: Vec<(TagKey, u64)>) -> Vec<String> {
    begun.into_iter().map(|(key, _)| key.tag).collect()
}

#[test]
fn one_namespace_leaves_a_slot_to_the_others() {
    let mut board = board_in(&[("greedy", 9)]);
    assert_eq!(go(&mut board, &SHARED, at(0)).len(), 2);
    let mut board = board_in(&[("greedy", 9), ("plain", 1)]);
    assert_eq!(
        tags(go(&mut board, &SHARED, at(0))),
        ["greedy-0", "plain-0", "greedy-1"]
    );
}

#[test]
fn an_image_that_two_namespaces_want_waits_for_neither_alone() {
    let mut board = board_in(&[("greedy", 3)]);
    go(&mut board, &SHARED, at(0));
    let mut both = ask_in("greedy", "last");
    both.owners.extend(ask_in("plain", "p").owners);
    let mut asks: BTreeMap<_, _> = board
        .tasks()
        .iter()
        .map(|(k, t)| (k.clone(), t.ask.clone()))
        .collect();
    asks.insert(key("both"), both);
    board.desire(&asks, &BTreeMap::new());
    assert_eq!(tags(go(&mut board, &SHARED, at(1))), ["both"]);
    assert_eq!(board.get(&key("both")).unwrap().owner.namespace, "plain");
}

#[test]
fn pulls_without_progress_do_not_keep_their_slots_from_other_namespaces() {
    let mut board = board_in(&[("a", 9), ("b", 9)]);
    let begun = go(&mut board, &SHARED, at(0));
    assert_eq!(tags(begun.clone()), ["a-0", "b-0", "a-1"]);
    let (slow, unpacks) = (&begun[0], &begun[1]);
    let some = Progress { done: 5, total: 9 };
    board.advance(&slow.0, slow.1, some, at(100));
    board.advance(&slow.0, slow.1, some, at(500));
    let all = Progress { done: 9, total: 9 };
    board.advance(&unpacks.0, unpacks.1, all, at(100));
    let nothing_until = |seconds| Plan {
        steps: Vec::new(),
        wake: Some(at(seconds)),
    };
    assert_eq!(plan(&board, &SHARED, at(599)), nothing_until(600));
    assert_eq!(
        tags(go(&mut board, &SHARED, at(600))),
        ["b-1"],
        "the first attempt without bytes lends its slot"
    );
    assert_eq!(plan(&board, &SHARED, at(600)), nothing_until(700));
    assert_eq!(
        plan(&board, &SHARED, at(9999)).steps,
        [],
        "each namespace has its share"
    );
}

#[test]
fn pulls_that_last_do_not_keep_their_slots_from_a_namespace_that_has_none() {
    let mut board = board_in(&[("a", 9), ("b", 9)]);
    let begun = go(&mut board, &SHARED, at(0));
    let mut asks: BTreeMap<_, _> = board
        .tasks()
        .iter()
        .map(|(k, t)| (k.clone(), t.ask.clone()))
        .collect();
    for namespace in ["c", "d"] {
        asks.insert(key(&format!("{namespace}-0")), ask_in(namespace, namespace));
        asks.insert(key(&format!("{namespace}-1")), ask_in(namespace, namespace));
    }
    board.desire(&asks, &BTreeMap::new());
    for seconds in 1..600 {
        for (key, run) in &begun {
            let drip = Progress {
                done: u64::try_from(seconds).unwrap(),
                total: 1 << 40,
            };
            board.advance(key, *run, drip, at(seconds));
        }
        assert_eq!(go(&mut board, &SHARED, at(seconds)), [], "at {seconds} s");
    }
    assert_eq!(plan(&board, &SHARED, at(599)).wake, Some(at(600)));
    assert_eq!(tags(go(&mut board, &SHARED, at(600))), ["c-0", "d-0"]);
    assert_eq!(go(&mut board, &SHARED, at(601)), [], "one each");
}

#[test]
fn per_cents_come_from_bytes_and_never_say_100_before_the_end() {
    let (mut board, _) = board_of(&[("1", ask("a"))]);
    let (key, run) = go(&mut board, &LIMITS, at(0)).remove(0);
    for (done, total, per_cent) in [(0, 0, 0), (1, 3, 33), (3, 3, 99), (u64::MAX, u64::MAX, 99)] {
        board.advance(&key, run, Progress { done, total }, at(1));
        assert_eq!(said(&board, "1").progress, per_cent);
    }
    board.advance(&key, run + 1, Progress { done: 1, total: 2 }, at(1));
    assert_eq!(
        said(&board, "1").progress,
        99,
        "bytes of another attempt do not count"
    );
}
