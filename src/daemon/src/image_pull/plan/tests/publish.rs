use super::super::publish::{Publisher, When, patch};
use super::*;
use kruise_api::node_image::NodeImageStatus;
use proptest::prelude::*;
use serde_json::json;

fn at_ms(ms: i64) -> Timestamp {
    Timestamp::from_millisecond(START * 1000 + ms).unwrap()
}

/// A board with one tag that runs, and its run.
fn running() -> (Board, TagKey, u64) {
    let (mut board, _) = board_of(&[("1", ask("a"))]);
    let (key, run) = go(&mut board, &LIMITS, at(0)).remove(0);
    (board, key, run)
}

fn now(board: &Board) -> NodeImageStatus {
    status::compose(board, &LIMITS)
}

#[test]
fn transitions_wait_for_others_and_ends_do_not() {
    let (mut board, key, run) = running();
    let mut publisher = Publisher::new(0);
    assert_eq!(publisher.when(&now(&board), at_ms(0)), When::At(at_ms(100)));
    assert_eq!(
        publisher.when(&now(&board), at_ms(50)),
        When::At(at_ms(100)),
        "the first of them sets the time"
    );
    assert_eq!(publisher.when(&now(&board), at_ms(100)), When::Now);
    board.ended(&key, run, pulled(), at_ms(60));
    assert_eq!(publisher.when(&now(&board), at_ms(60)), When::Now);
    publisher.wrote(now(&board), at_ms(60));
    assert_eq!(publisher.when(&now(&board), at_ms(61)), When::Never);
}

#[test]
fn bytes_are_told_once_in_ten_seconds() {
    let (mut board, key, run) = running();
    let mut publisher = Publisher::new(500);
    publisher.wrote(now(&board), at_ms(0));
    let mut writes = Vec::new();
    for ms in (0..60_000).step_by(500) {
        board.advance(
            &key,
            run,
            Progress {
                done: u64::try_from(ms).unwrap(),
                total: 60_000,
            },
            at_ms(ms),
        );
        if publisher.when(&now(&board), at_ms(ms)) == When::Now {
            publisher.wrote(now(&board), at_ms(ms));
            writes.push(ms);
        }
    }
    assert_eq!(writes, [11_000, 22_000, 33_000, 44_000, 55_000]);
}

#[test]
fn a_failed_write_is_repeated_with_growing_pauses_or_when_the_server_says() {
    let (board, ..) = running();
    let mut publisher = Publisher::new(0);
    publisher.failed(None, at_ms(0));
    assert_eq!(publisher.when(&now(&board), at_ms(0)), When::At(at_ms(500)));
    for _ in 0..10 {
        publisher.failed(None, at_ms(0));
    }
    assert_eq!(publisher.when(&now(&board), at_ms(0)), When::At(at_ms(30_000)));
    publisher.failed(Some(SignedDuration::from_secs(37)), at_ms(0));
    assert_eq!(publisher.when(&now(&board), at_ms(0)), When::At(at_ms(37_000)));
    publisher.failed(Some(SignedDuration::from_secs(1)), at_ms(0));
    assert_eq!(
        publisher.when(&now(&board), at_ms(0)),
        When::At(at_ms(30_000)),
        "it grows although the server asks for less"
    );
}

#[test]
fn a_failed_write_is_repeated_at_once_when_the_server_is_heard_of() {
    let (board, ..) = running();
    let mut publisher = Publisher::new(500);
    (0..20).for_each(|_| publisher.failed(None, at_ms(0)));
    publisher.heard();
    assert_ne!(publisher.when(&now(&board), at_ms(0)), When::At(at_ms(45_000)));
    assert_eq!(publisher.when(&now(&board), at_ms(100)), When::Now);
    publisher.failed(None, at_ms(100));
    assert_eq!(
        publisher.when(&now(&board), at_ms(100)),
        When::At(at_ms(45_100)),
        "it is as unwell as before"
    );

    publisher.failed(Some(SignedDuration::from_secs(7)), at_ms(200));
    publisher.heard();
    assert_eq!(
        publisher.when(&now(&board), at_ms(200)),
        When::At(at_ms(7700)),
        "it asked for that pause itself"
    );
    publisher.wrote(NodeImageStatus::default(), at_ms(300));
    publisher.heard();
    assert_eq!(
        publisher.when(&now(&board), at_ms(300)),
        When::At(at_ms(400)),
        "a write was taken since"
    );

    publisher.refused(at_ms(0));
    let again = publisher.when(&now(&board), at_ms(0));
    publisher.heard();
    assert_eq!(publisher.when(&now(&board), at_ms(0)), again, "it was heard of");
    for _ in 0..20 {
        publisher.refused(at_ms(0));
    }
    assert_eq!(publisher.when(&now(&board), at_ms(0)), When::At(at_ms(300_500)));
}

#[test]
fn a_refused_status_is_written_without_messages_and_seldom() {
    let (mut board, key, run) = running();
    board.ended(&key, run, failed(Again::Never), at(0));
    let (whole, mut publisher) = (now(&board), Publisher::new(0));
    let message = |publisher: &Publisher, ms| {
        let told = publisher.told(whole.clone(), at_ms(ms));
        status::by_tag(&told)[&key].message.clone()
    };
    assert_eq!(message(&publisher, 0).as_deref(), Some("no luck"));
    assert!(publisher.refused(at_ms(0)), "it is news");
    assert_eq!(message(&publisher, 1), None);
    let bare = publisher.told(whole.clone(), at_ms(1));
    assert_eq!(
        (bare.failed, &status::by_tag(&bare)[&key].phase),
        (1, &ImagePullPhase::Failed)
    );
    assert_eq!(publisher.when(&bare, at_ms(1)), When::At(at_ms(500)));

    for pause in [
        1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000, 256_000, 300_000, 300_000,
    ] {
        assert!(!publisher.refused(at_ms(500)), "it is known");
        assert_eq!(publisher.when(&bare, at_ms(500)), When::At(at_ms(500 + pause)));
    }
    publisher.wrote(bare.clone(), at_ms(1000));
    let again = 500 + 300_000 + 300_000;
    assert_eq!(publisher.when(&bare, at_ms(1001)), When::At(at_ms(again)));
    assert_eq!(message(&publisher, again - 1), None);
    assert_eq!(message(&publisher, again).as_deref(), Some("no luck"));
    assert_eq!(publisher.when(&whole, at_ms(again)), When::Now);
    assert!(
        !publisher.refused(at_ms(again)),
        "no status with messages was taken since"
    );
    assert_eq!(
        publisher.when(&bare, at_ms(again)),
        When::At(at_ms(again + 300_000 + 500))
    );

    publisher.wrote(whole.clone(), at_ms(2 * again));
    assert_eq!(publisher.when(&whole, at_ms(2 * again)), When::Never);
    assert!(publisher.refused(at_ms(2 * again)), "it is news again");
}

#[test]
fn nodes_that_are_turned_away_together_come_back_one_by_one() {
    let (board, ..) = running();
    let back = |spread| {
        let mut publisher = Publisher::new(spread);
        publisher.failed(Some(SignedDuration::from_secs(1)), at_ms(0));
        publisher.when(&now(&board), at_ms(0))
    };
    assert_eq!([back(0), back(300)], [1000, 1300].map(|ms| When::At(at_ms(ms))));
    let long_after = |spread| {
        let mut publisher = Publisher::new(spread);
        (0..20).for_each(|_| publisher.failed(None, at_ms(0)));
        publisher.when(&now(&board), at_ms(0))
    };
    let all = [long_after(0), long_after(500), long_after(999)];
    assert_eq!(all, [30_000, 45_000, 59_970].map(|ms| When::At(at_ms(ms))));
}

#[test]
fn the_patch_names_only_what_differs_and_removes_what_is_gone() {
    let status = |value: serde_json::Value| serde_json::from_value::<NodeImageStatus>(value).unwrap();
    let tag = |phase: &str| json!({"tags": [{"tag": "1", "phase": phase, "progress": 0, "version": 0}]});
    let stored = status(
        json!({"desired": 3, "imageStatuses": {"a": tag("Pulling"), "b": tag("Waiting"), "c": tag("Waiting")},
        "firstSyncStatus": {"message": "of somebody else"}}),
    );
    let current = status(json!({"desired": 2, "succeeded": 1, "waiting": 1,
        "imageStatuses": {"a": tag("Succeeded"), "b": tag("Waiting")}}));
    let patch = patch(&stored, &current);
    assert_eq!(
        patch,
        json!({"status": {"desired": 2, "succeeded": 1, "failed": 0, "pulling": 0, "waiting": 1,
        "imageStatuses": {"a": tag("Succeeded"), "c": null}}})
    );
}

/// Some status, from a board in some state.
fn any_status() -> impl Strategy<Value = NodeImageStatus> {
    prop::collection::btree_map(("[ab]", "[12]"), 0..4u8, 0..4).prop_map(|tags| {
        let asks: BTreeMap<_, _> = tags
            .keys()
            .map(|(name, tag)| {
                (
                    TagKey {
                        name: name.clone(),
                        tag: tag.clone(),
                    },
                    ask("a"),
                )
            })
            .collect();
        let mut board = Board::default();
        board.desire(&asks, &BTreeMap::new());
        let begun = go(
            &mut board,
            &Limits {
                max_parallel: 3,
                ..LIMITS
            },
            at(0),
        );
        for (key, run) in begun {
            match tags[&(key.name.clone(), key.tag.clone())] {
                0 => drop(board.ended(&key, run, pulled(), at(1))),
                1 => drop(board.ended(&key, run, failed(Again::Never), at(1))),
                2 => board.advance(&key, run, Progress { done: 1, total: 2 }, at(1)),
                _ => {}
            }
        }
        status::compose(&board, &LIMITS)
    })
}

proptest! {
    /// Applied to what is stored, the patch gives what is meant, and keeps what is not ours.
    #[test]
    fn the_patch_leads_to_the_status_that_is_meant(old in any_status(), new in any_status()) {
        let mut object = json!({ "status": old });
        object["status"]["firstSyncStatus"] = json!({"message": "of somebody else"});
        json_patch::merge(&mut object, &patch(&old, &new));
        let mut merged: NodeImageStatus = serde_json::from_value(object["status"].clone()).unwrap();
        prop_assert!(merged.first_sync_status.take().is_some());
        prop_assert_eq!(merged, new);
    }

    /// Whatever was told, once the present is told there is nothing to tell; and what is new is told within 12 s.
    #[test]
    fn telling_converges(old in any_status(), new in any_status(), spread in any::<i64>()) {
        let mut publisher = Publisher::new(spread);
        publisher.wrote(old.clone(), at(0));
        match publisher.when(&new, at(1)) {
            When::Never => prop_assert_eq!(&old, &new),
            When::At(t) => prop_assert!(t > at(1) && t <= at(12)),
            When::Now => {}
        }
        publisher.wrote(new.clone(), at(1));
        prop_assert_eq!(publisher.when(&new, at(2)), When::Never);
    }
}
