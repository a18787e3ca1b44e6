//! The progress deadline: it counts from the beginning of a rollout, and anew where a rollout goes on.

use jiff::{SignedDuration, Timestamp, ToSpan};
use serde_json::json;

use super::cases::{condition, kubelets, reason, settle};
use super::histories::{container, rolling, spec};
use super::world::World;
use crate::manager::cloneset::plan::{Observed, Plan, Template};

/// What every pass says of the deadline, held against what the world was like since the rollout began or went on.
pub(super) fn kept(world: &mut World, observed: &Observed, planned: &Plan) {
    let status = planned.status.as_ref().or(observed.set.status.as_ref()).unwrap();
    let spec = &observed.set.spec;
    let (wanted, revision) = (spec.wanted(), &status.update_revision);
    let available = status.updated_available_replicas.unwrap_or_default();
    let expected = status.expected_updated_replicas.unwrap_or_default();
    let done = status.current_revision == *revision
        && [status.replicas, status.updated_replicas, available] == [wanted; 3];
    let rests = done
        || spec.rolling_update().is_some_and(|r| r.paused)
        || (expected < wanted && expected <= available)
        || observed.template != Template::Taken;
    if rests {
        world.under_way = None;
        return;
    }
    let before = world.under_way.take().filter(|(of, _)| of == revision);
    let (_, began) = world
        .under_way
        .insert(before.unwrap_or((revision.clone(), world.now)));
    let Some(deadline) = spec.progress_deadline_seconds.filter(|d| *d != i32::MAX) else {
        return;
    };
    let end = began.checked_add(i64::from(deadline).seconds()).unwrap();
    let told = status
        .conditions
        .iter()
        .find(|c| c.type_ == "Progressing")
        .unwrap();
    let (now, after) = (world.now, began.duration_until(world.now));
    let passed = if now > end {
        "ProgressDeadlineExceeded"
    } else {
        "CloneSetUpdated"
    };
    assert_eq!(
        told.reason, passed,
        "{after} after it began or went on, of {deadline} s"
    );
    let due = end.checked_add(1.second()).unwrap();
    assert!(
        now > end || planned.wake.is_some_and(|wake| wake <= due),
        "nobody looks when the deadline passes: {:?}",
        planned.wake
    );
}

const HOUR: SignedDuration = SignedDuration::from_hours(1);

fn pass_after(world: &mut World, time: SignedDuration) -> Option<Timestamp> {
    world.now = world.now.checked_add(time).unwrap();
    world.reconcile().1.wake
}

/// From now on it is under way: for a minute it is not too late, and then it is.
fn a_minute_is_left(world: &mut World, since: &str) {
    let wake = pass_after(world, SignedDuration::ZERO);
    assert_eq!(reason(world), "CloneSetUpdated", "{since}");
    assert!(wake.is_some_and(|wake| wake > world.now), "{since}: {wake:?}");
    kubelets(world);
    pass_after(world, SignedDuration::from_secs(60));
    assert_eq!(reason(world), "CloneSetUpdated", "{since}, and 60 s");
    pass_after(world, SignedDuration::from_secs(1));
    assert_eq!(reason(world), "ProgressDeadlineExceeded", "{since}, and 61 s");
    assert_eq!(condition(world, "Progressing").unwrap().status, "False");
}

fn with_a_minute() -> World {
    let mut world = World::new(spec(false, false));
    world.edit(&json!({ "progressDeadlineSeconds": 60 }));
    settle(&mut world);
    world
}

#[test]
fn it_counts_anew_after_a_pause() {
    let mut world = with_a_minute();
    container(&mut world, "image", json!("app:bad"));
    a_minute_is_left(&mut world, "the rollout began");
    rolling(&mut world, json!({ "paused": true }));
    pass_after(&mut world, HOUR);
    assert_eq!(reason(&world), "CloneSetPaused", "too late or not");
    pass_after(&mut world, HOUR);
    rolling(&mut world, json!({ "paused": false }));
    a_minute_is_left(&mut world, "it went on after an hour's pause");
}

#[test]
fn a_rollout_that_begins_paused_has_not_begun() {
    let mut world = with_a_minute();
    rolling(&mut world, json!({ "paused": true }));
    container(&mut world, "image", json!("app:bad"));
    pass_after(&mut world, HOUR);
    assert_eq!(reason(&world), "CloneSetPaused");
    pass_after(&mut world, HOUR);
    rolling(&mut world, json!({ "paused": false }));
    a_minute_is_left(&mut world, "nobody paused it any more");
}

#[test]
fn it_counts_anew_when_a_partition_lets_more_pods_go() {
    let mut world = with_a_minute();
    rolling(&mut world, json!({ "partition": 3 }));
    container(&mut world, "image", json!("app:2"));
    settle(&mut world);
    assert_eq!(reason(&world), "ProgressPartitionAvailable");
    pass_after(&mut world, HOUR);
    rolling(&mut world, json!({ "partition": 0 }));
    a_minute_is_left(&mut world, "an hour after the partition was reached");
}

/// What is late stays so for as long as it is under way, and not beyond that.
#[test]
fn what_was_too_late_and_came_to_its_end_has_its_time_anew() {
    let mut world = with_a_minute();
    rolling(&mut world, json!({ "partition": 3 }));
    container(&mut world, "image", json!("app:2"));
    a_minute_is_left(&mut world, "the rollout began");
    pass_after(&mut world, HOUR);
    assert_eq!(reason(&world), "ProgressDeadlineExceeded", "nothing has changed");
    settle(&mut world);
    assert_eq!(reason(&world), "ProgressPartitionAvailable");
    pass_after(&mut world, HOUR);
    rolling(&mut world, json!({ "partition": 0 }));
    a_minute_is_left(&mut world, "the rest");
}

#[test]
fn the_greatest_number_is_no_deadline() {
    let mut world = with_a_minute();
    world.edit(&json!({ "progressDeadlineSeconds": i32::MAX }));
    container(&mut world, "image", json!("app:bad"));
    world.reconcile();
    kubelets(&mut world);
    world.reconcile();
    assert_eq!(pass_after(&mut world, HOUR), None, "nothing is due");
    // That many seconds are 68 years.
    pass_after(&mut world, SignedDuration::from_secs(i64::from(i32::MAX) + 1));
    assert_eq!(condition(&world, "Progressing"), None);
}
