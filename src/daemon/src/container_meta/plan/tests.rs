//! Long random lives of a Pod: whatever happens, what is told is true, and only what must be is restarted.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::world::{Op, World};
use super::*;

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0_usize..3).prop_map(Op::Start),
        2 => (0_u8..3).prop_map(Op::Label),
        1 => (0_usize..3, 0_u8..3).prop_map(|(at, image)| Op::Image(at, image)),
        2 => any::<bool>().prop_map(Op::Updating),
        1 => any::<bool>().prop_map(Op::Answers),
        1 => any::<bool>().prop_map(Op::Takes),
        3 => Just(Op::Watch),
        1 => Just(Op::Crash),
        2 => (0_u64..40).prop_map(Op::Wait),
    ]
}

proptest! {
    /// Whatever happens, each step is sound; and once the world stops changing, everything is told and every
    /// environment is as the metadata says, with at most one writing for each start of a container (and one for each that the watch never showed).
    #[test]
    fn what_is_told_is_true_and_environments_come_right(
        follows in prop::collection::vec(any::<bool>(), 1..=3),
        ops in prop::collection::vec(any_op(), 0..60),
    ) {
        let mut world = World::new(&follows);
        for op in &ops {
            world.step(op);
        }
        world.settle();
        let told = world.told.clone().expect("told");
        world.check(&told);
        for c in &world.containers {
            let entry = told.containers.iter().find(|entry| entry.name == c.name).expect("an entry each");
            prop_assert_eq!(&entry.container_id, &c.id());
            prop_assert!(!c.follows || c.made_with.1 == world.label, "{} has an old environment", c.name);
        }
        let most = world.starts + world.lapses;
        prop_assert!(world.writes <= most, "{} writes, {} at most", world.writes, most);
        // At rest the runtime is not asked and nothing is written, also by a daemon that has just started.
        world.memory = Memory::default();
        prop_assert_eq!(world.plan(), Plan::default());
    }
}

/// A Pod with these containers made, told of, and being updated.
fn told_world(follows: &[bool]) -> World {
    let mut world = World::new(follows);
    (0..follows.len()).for_each(|at| world.start(at));
    world.pass();
    world.told = world.stored.clone();
    world.pass();
    world.now += SETTLE;
    world.updating = true;
    world.pass();
    world
}

#[test]
fn a_birth_is_one_writing() {
    let mut world = World::new(&[true, false, false]);
    for at in 0..3 {
        assert_eq!(world.writes, 0);
        world.start(at);
        world.pass();
    }
    assert_eq!(world.writes, 1);
    // A container that does not come holds the others up for a while only.
    let mut world = World::new(&[true, false]);
    world.start(0);
    assert_eq!(world.pass(), (false, Some(BIRTH)));
    world.now += BIRTH;
    world.pass();
    assert_eq!((world.writes, world.stored.unwrap().containers.len()), (1, 1));
}

#[test]
fn a_restart_waits_two_seconds_after_the_change_of_the_environment() {
    let mut world = told_world(&[true, false]);
    world.label = 1;
    let due = world.now + SETTLE;
    assert_eq!(world.pass(), (false, Some(due)));
    // What changes meanwhile makes no difference.
    world.note = 1;
    world.now += SETTLE / 2;
    assert_eq!(world.pass(), (false, Some(due)));
    world.now = due;
    world.pass();
    assert_eq!(world.stopped, ["rt://c-1"]);
    // Another change counts anew, and so does a daemon or a Pod that has just come.
    type Change = fn(&mut World);
    let changes: [Change; 3] = [
        |world| world.label = 2,
        |world| world.memory = Memory::default(),
        |world| world.memory.pod_uid = "other".to_owned(),
    ];
    for change in changes {
        let mut world = told_world(&[true, false]);
        world.label = 1;
        world.pass();
        world.now += SETTLE / 2;
        change(&mut world);
        assert_eq!(world.pass(), (false, Some(world.now + SETTLE)));
    }
}

#[test]
fn outside_an_update_nothing_is_restarted() {
    let mut world = told_world(&[true]);
    (world.label, world.updating) = (1, false);
    assert_eq!(world.plan(), Plan::default());
    world.now += SETTLE;
    assert_eq!(world.plan(), Plan::default());
    world.updating = true;
    assert_eq!(world.plan().restart.len(), 1);
}

#[test]
fn a_try_that_was_in_vain_waits_for_a_newer_environment_too() {
    let mut world = told_world(&[true]);
    world.label = 1;
    world.pass();
    world.now += SETTLE;
    world.memory.restarting("rt://c-1");
    world.memory.restarted("rt://c-1".to_owned(), false, world.now);
    world.label = 2;
    assert_eq!(world.pass(), (false, Some(world.now + SETTLE)));
}

/// Where the gate is not opened, the daemon's word may be what is waited for.
#[test]
fn what_is_new_of_an_updated_container_waits_a_moment_for_the_gate() {
    for opened in [false, true] {
        let mut world = told_world(&[false]);
        world.containers[0].image = 1;
        world.start(0);
        let due = world.now + GATE;
        assert_eq!(world.pass(), (false, Some(due)));
        world.now += GATE / 2;
        world.updating = !opened;
        assert_eq!(world.pass().0, opened);
        world.now = due;
        world.pass();
        assert_eq!(world.writes, 2);
    }
}

/// The pass that its notice asks for comes later.
#[test]
fn a_version_that_was_not_noticed_yet_restarts_nothing() {
    let mut world = told_world(&[true]);
    world.label = 1;
    let (pod, meta) = world.pod();
    world.memory.look(&pod, &meta, world.now);
    assert_eq!(
        super::plan(&pod, &meta, &world.memory, true, world.now + SETTLE),
        Plan::default()
    );
    assert_eq!(world.plan().wake, Some(world.now + SETTLE));
}

#[test]
fn a_container_that_kubelet_replaces_anyway_is_left_to_it_for_its_grace_period() {
    let mut world = told_world(&[true]);
    (world.label, world.containers[0].image) = (1, 1);
    let due = KUBELET + Duration::from_secs(5);
    assert_eq!(world.pass(), (false, Some(world.now + due)));
    world.now += due;
    assert_eq!(world.plan().restart.len(), 1);
}

#[test]
fn a_stop_that_fails_is_tried_again_later_and_later() {
    let mut world = told_world(&[true]);
    world.label = 1;
    world.pass();
    world.now += SETTLE;
    for pause in [1, 2, 4, 8, 16, 30, 30] {
        assert_eq!(world.plan().restart.len(), 1);
        world.memory.restarting("rt://c-1");
        assert_eq!(world.plan(), Plan::default(), "it is at it");
        world.memory.restarted("rt://c-1".to_owned(), false, world.now);
        let plan = world.plan();
        assert_eq!(
            (plan.restart.len(), plan.wake),
            (0, Some(world.now + Duration::from_secs(pause)))
        );
        world.now += Duration::from_secs(pause);
    }
}

#[test]
fn what_cannot_be_known_is_left_out_and_restarts_nothing() {
    let mut world = World::new(&[true]);
    world.start(0);
    world.updating = true;
    world.memory.pod_uid = "u".to_owned();
    world.memory.facts.insert(
        "rt://c-1".to_owned(),
        Facts {
            plain_hash: 7,
            env_hash: None,
        },
    );
    world.label = 1;
    let plan = world.plan();
    assert_eq!((plan.read.len(), plan.restart.len()), (0, 0));
    let hashes = plan.write.unwrap().containers[0].hashes;
    assert_eq!(
        (hashes.plain_hash, hashes.extracted_env_from_metadata_hash),
        (7, 0)
    );
    // Without the gate the environment is not told at all, and what was told of it stays.
    let (pod, meta) = told_world(&[true]).pod();
    assert_eq!(
        super::plan(&pod, &meta, &Memory::default(), false, Duration::ZERO),
        Plan::default()
    );
}

#[test]
fn a_pod_that_ends_is_left_alone() {
    let mut world = told_world(&[true]);
    world.label = 1;
    let (mut pod, meta) = world.pod();
    pod.deleting = true;
    assert_eq!(
        super::plan(&pod, &meta, &world.memory, true, world.now),
        Plan::default()
    );
}
