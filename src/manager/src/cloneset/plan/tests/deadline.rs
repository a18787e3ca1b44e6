//! The progress deadline: to the letter OpenKruise's, which counts from the condition's last update, whatever that said.

use jiff::{SignedDuration, Timestamp, ToSpan};
use serde_json::json;

use super::cases::{condition, kubelets, reason, settle};
use super::histories::{container, rolling, spec};
use super::world::World;
use crate::cloneset::plan::{Observed, Plan, Template};
use kruise_api::cloneset::CloneSetStatus;

/// What every pass says of the rollout: the first that holds of OpenKruise's five.
pub(super) fn kept(now: Timestamp, observed: &Observed, planned: &Plan) {
    let spec = &observed.set.spec;
    let deadline = spec.progress_deadline_seconds.filter(|d| *d != i32::MAX);
    let Some(deadline) = deadline.filter(|_| observed.template == Template::Taken) else {
        return;
    };
    let find = |status: &CloneSetStatus| {
        let mut conditions = status.conditions.iter();
        conditions.find(|c| c.type_ == "Progressing").cloned()
    };
    let before = observed.set.status.as_ref().and_then(find);
    let status = planned.status.as_ref().or(observed.set.status.as_ref()).unwrap();
    let told = find(status).unwrap();
    let wanted = spec.wanted();
    let available = status.updated_available_replicas.unwrap_or_default();
    let expected = status.expected_updated_replicas.unwrap_or_default();
    let done = status.current_revision == status.update_revision
        && [status.replicas, status.updated_replicas, available] == [wanted; 3];
    let since = before
        .as_ref()
        .map_or(now, |c| c.last_update_time.as_ref().unwrap().0);
    let end = since.checked_add(i64::from(deadline).seconds()).unwrap();
    let late = before
        .as_ref()
        .is_some_and(|c| c.reason == "ProgressDeadlineExceeded" || end < now);
    let reason = match () {
        () if done => "CloneSetAvailable",
        () if spec.rolling_update().is_some_and(|r| r.paused) => "CloneSetPaused",
        () if expected < wanted && expected <= available => "ProgressPartitionAvailable",
        () if late => "ProgressDeadlineExceeded",
        () => "CloneSetUpdated",
    };
    assert_eq!(told.reason, reason, "after {before:?} at {now}: {status:?}");
    assert_eq!(
        told.status,
        if reason.ends_with("Exceeded") {
            "False"
        } else {
            "True"
        }
    );
    let same = before.filter(|before| before.reason == reason);
    assert!(
        same.is_none_or(|before| before == told),
        "what is said again is not written again"
    );
    let due = end.checked_add(1.second()).unwrap();
    assert!(
        reason != "CloneSetUpdated" || planned.wake.is_some_and(|wake| wake <= due),
        "nobody looks when the deadline passes: {:?}",
        planned.wake
    );
}

const HOUR: SignedDuration = SignedDuration::from_hours(1);

fn pass_after(world: &mut World, time: SignedDuration) -> Option<Timestamp> {
    world.now = world.now.checked_add(time).unwrap();
    world.reconcile().1.wake
}

fn with_a_minute() -> World {
    let mut world = World::new(spec(false, false));
    world.edit(&json!({ "progressDeadlineSeconds": 60 }));
    settle(&mut world);
    assert_eq!(reason(&world), "CloneSetAvailable");
    world
}

/// It is under way for the first time in less than a minute: for a minute it is not too late, and then it is.
fn a_minute_is_left(world: &mut World) {
    let wake = pass_after(world, SignedDuration::ZERO);
    assert_eq!(reason(world), "CloneSetUpdated");
    assert!(wake.is_some_and(|wake| wake > world.now), "{wake:?}");
    kubelets(world);
    pass_after(world, SignedDuration::from_secs(60));
    assert_eq!(reason(world), "CloneSetUpdated", "60 s");
    pass_after(world, SignedDuration::from_secs(1));
    too_late(world, "61 s");
}

fn too_late(world: &World, why: &str) {
    assert_eq!(reason(world), "ProgressDeadlineExceeded", "{why}");
    assert_eq!(condition(world, "Progressing").unwrap().status, "False", "{why}");
}

#[test]
fn a_rollout_that_begins_at_once_has_its_time() {
    let mut world = with_a_minute();
    container(&mut world, "image", json!("app:bad"));
    a_minute_is_left(&mut world);
    let before = condition(&world, "Progressing");
    pass_after(&mut world, HOUR);
    container(&mut world, "image", json!("app:3"));
    pass_after(&mut world, SignedDuration::ZERO);
    assert_eq!(
        condition(&world, "Progressing"),
        before,
        "another revision is too late as well, and its name is not said"
    );
    settle(&mut world);
    assert_eq!(reason(&world), "CloneSetAvailable");
}

#[test]
fn a_rollout_that_begins_an_hour_after_the_last_is_too_late() {
    let mut world = with_a_minute();
    pass_after(&mut world, HOUR);
    container(&mut world, "image", json!("app:2"));
    pass_after(&mut world, SignedDuration::ZERO);
    too_late(&world, "an hour after it was available");
    settle(&mut world);
    assert_eq!(reason(&world), "CloneSetAvailable");
}

#[test]
fn the_time_of_a_pause_counts() {
    let mut world = with_a_minute();
    container(&mut world, "image", json!("app:bad"));
    a_minute_is_left(&mut world);
    rolling(&mut world, json!({ "paused": true }));
    pass_after(&mut world, SignedDuration::ZERO);
    assert_eq!(reason(&world), "CloneSetPaused", "too late or not");
    rolling(&mut world, json!({ "paused": false }));
    a_minute_is_left(&mut world);
    rolling(&mut world, json!({ "paused": true }));
    pass_after(&mut world, SignedDuration::ZERO);
    pass_after(&mut world, HOUR);
    rolling(&mut world, json!({ "paused": false }));
    pass_after(&mut world, SignedDuration::ZERO);
    too_late(&world, "it was paused for an hour");
}

#[test]
fn the_time_at_a_partition_counts() {
    let mut world = with_a_minute();
    rolling(&mut world, json!({ "partition": 3 }));
    container(&mut world, "image", json!("app:2"));
    settle(&mut world);
    assert_eq!(reason(&world), "ProgressPartitionAvailable");
    pass_after(&mut world, HOUR);
    rolling(&mut world, json!({ "partition": 0 }));
    pass_after(&mut world, SignedDuration::ZERO);
    too_late(&world, "an hour after the partition was reached");
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
