//! Histories that once went wrong, or that say most.

use super::*;

fn limits(each: usize) -> BTreeMap<Uid, usize> {
    (0..3).map(|n| (Uid::from(format!("uid{n}")), each)).collect()
}

fn played(ops: impl IntoIterator<Item = Op>, each: usize, never: bool) -> World {
    let mut world = World::default();
    go_on(&mut world, ops, each, never);
    world
}

fn go_on(world: &mut World, ops: impl IntoIterator<Item = Op>, each: usize, never: bool) {
    for op in ops {
        play(world, op, &limits(each), never);
        world.check().unwrap();
    }
}

fn state(world: &World, job: &str, node: &str) -> Option<State> {
    world.index.states(&job.into()).get(node).copied()
}

#[test]
fn an_outcome_stays_when_its_entry_expires() {
    let mut world = World::default();
    let limits: BTreeMap<Uid, usize> = (0..3).map(|n| (Uid::from(format!("uid{n}")), 1)).collect();
    for op in [
        Op::Add(0),
        Op::Add(1),
        Op::Put(0),
        Op::HandOut,
        Op::Write,
        Op::Answer(0, true),
        Op::Expire(0),
    ] {
        play(&mut world, op, &limits, false);
    }
    let tally = world.index.tally(&"uid0".into(), false, at(0)).unwrap();
    assert_eq!((tally.desired, tally.succeeded), (2, 1));
}

#[test]
fn a_job_does_not_end_without_a_node_that_is_about_to_get_its_nodeimage() {
    let mut world = World::default();
    let limits: BTreeMap<Uid, usize> = (0..3).map(|n| (Uid::from(format!("uid{n}")), 9)).collect();
    let verdict = |world: &World| {
        let uid = Uid::from("uid0");
        let tally = world.index.tally(&uid, false, at(world.now)).unwrap();
        let judged = judge(&world.index.job(&uid).unwrap(), &tally, at(world.now));
        (
            judged.status.completion_time.is_some(),
            judged.status.conditions.first().map(|c| c.message.clone()),
            judged.wake,
        )
    };
    for op in [Op::Ready(0, true), Op::Put(0), Op::Pass(5)] {
        play(&mut world, op, &limits, false);
    }
    let words = Some("waiting for the NodeImage of n0".to_owned());
    assert_eq!(verdict(&world), (false, words, Some(at(30))));
    for op in [
        Op::Add(0),
        Op::HandOut,
        Op::Write,
        Op::Ready(1, true),
        Op::Answer(0, true),
    ] {
        play(&mut world, op, &limits, false);
    }
    let words = Some("waiting for the NodeImage of n1".to_owned());
    assert_eq!(verdict(&world), (false, words, Some(at(35))));
    play(&mut world, Op::Pass(30), &limits, false);
    let words = Some("nginx:1 is on 1 of 1 nodes".to_owned());
    assert_eq!(verdict(&world), (true, words, None), "not for ever");
}

#[test]
fn a_daemon_that_says_nothing_is_noticed_until_it_does() {
    let tally = |world: &World| world.index.tally(&"uid0".into(), false, at(world.now)).unwrap();
    let asked = [
        Op::Ready(0, true),
        Op::Add(0),
        Op::Put(0),
        Op::HandOut,
        Op::Write,
        Op::Pass(1),
    ];
    let mut world = played(asked, 1, false);
    let late = |world: &World| world.index.tally(&"uid0".into(), true, at(world.now)).unwrap();
    assert_eq!(late(&world).silent.len(), 0, "it was asked this very second");
    go_on(&mut world, [Op::Pass(8)], 1, false);
    assert_eq!(
        (tally(&world).silent.len(), tally(&world).silent_from),
        (0, Some(at(10)))
    );
    assert_eq!(
        (late(&world).silent.len(), late(&world).silent_from),
        (1, None),
        "at its deadline"
    );
    go_on(&mut world, [Op::Pass(1)], 1, false);
    assert_eq!((tally(&world).silent.len(), tally(&world).silent_from), (1, None));
    world.index.take_dirty();
    go_on(&mut world, [Op::Ready(0, false)], 1, false);
    assert_eq!((tally(&world).silent.len(), tally(&world).lost.len()), (0, 1));
    assert_eq!(
        world.index.take_dirty().len(),
        1,
        "its status says something else now"
    );
    go_on(&mut world, [Op::Answer(0, true)], 1, false);
    assert_eq!((tally(&world).silent.len(), tally(&world).lost.len()), (0, 0));
}

#[test]
fn nodes_that_are_not_ready_come_last() {
    let mut world = World::default();
    let limits: BTreeMap<Uid, usize> = (0..3).map(|n| (Uid::from(format!("uid{n}")), 1)).collect();
    for op in [
        Op::Ready(0, false),
        Op::Add(0),
        Op::Add(1),
        Op::Put(0),
        Op::HandOut,
    ] {
        play(&mut world, op, &limits, false);
    }
    assert_eq!(world.writes[0].0, 1);
}

#[test]
fn a_change_of_status_touches_only_the_jobs_of_its_tag() {
    let mut world = World::default();
    let limits: BTreeMap<Uid, usize> = (0..3).map(|n| (Uid::from(format!("uid{n}")), 9)).collect();
    for op in [
        Op::Add(0),
        Op::Put(0),
        Op::Put(2),
        Op::HandOut,
        Op::Write,
        Op::Write,
    ] {
        play(&mut world, op, &limits, false);
    }
    world.index.take_dirty();
    let view = world.views.get_mut(&0).unwrap();
    view.statuses.push(TagStatusView {
        image: "nginx".into(),
        tag: "2".into(),
        version: 0,
        phase: ImagePullPhase::Succeeded,
        completed: Some(at(0)),
        error: None,
        pulse: 0,
    });
    world.tell(0);
    assert_eq!(world.index.take_dirty(), vec![Uid::from("uid2")]);
}

/// Another job may ask for a tag again while a job without end already goes on elsewhere. More nodes are at work for
/// it then than it asks at a time; it asks no further one before there are fewer.
#[test]
fn pulls_that_others_ask_for_count_but_are_not_held_against_a_job() {
    let before = [
        Op::Add(0),
        Op::Add(1),
        Op::Add(2),
        Op::Put(0),
        Op::HandOut,
        Op::Write,
    ];
    let mut world = played(before, 1, true);
    let again = [
        Op::Answer(0, true),
        Op::HandOut,
        Op::Put(1),
        Op::HandOut,
        Op::Write,
        Op::Write,
    ];
    go_on(&mut world, again, 1, true);
    let active = |world: &World| {
        world
            .index
            .tally(&"uid0".into(), false, at(world.now))
            .unwrap()
            .active
    };
    assert_eq!(
        state(&world, "uid0", "n0"),
        Some(State::Pulling),
        "asked for again by the other job"
    );
    assert_eq!(active(&world), 2);
    go_on(&mut world, [Op::Answer(0, true), Op::HandOut], 1, true);
    assert_eq!(
        (active(&world), state(&world, "uid0", "n2")),
        (1, Some(State::Pending))
    );
}

/// What a leader knows beyond the objects, and what it costs that the next one does not: a refusal is met again, and
/// a node that had its image counts as pulling until the pull that another job asked for has ended.
#[test]
fn what_the_next_leader_does_not_know_is_a_write_or_a_wait() {
    let mut world = played(
        [Op::Add(0), Op::Add(2), Op::Put(0), Op::HandOut, Op::Refuse(0)],
        9,
        false,
    );
    assert_eq!(state(&world, "uid0", "n0"), Some(State::Failed));
    world.writes.clear();
    go_on(&mut world, [Op::NewLeader, Op::HandOut], 9, false);
    assert_eq!(world.writes.len(), 2, "both are asked again");
    go_on(
        &mut world,
        [Op::Refuse(0), Op::Write, Op::Write, Op::Answer(2, true)],
        9,
        false,
    );
    assert_eq!(
        state(&world, "uid0", "n0"),
        Some(State::Failed),
        "and refused again"
    );

    let raised = [Op::Put(1), Op::HandOut, Op::Write, Op::Write];
    go_on(&mut world, raised, 9, false);
    assert_eq!(
        state(&world, "uid0", "n2"),
        Some(State::Succeeded),
        "although the tag is pulled again"
    );
    go_on(&mut world, [Op::NewLeader], 9, false);
    assert_eq!(state(&world, "uid0", "n2"), Some(State::Pulling));
    go_on(&mut world, [Op::HandOut], 9, false);
    assert!(
        world.writes.is_empty(),
        "its entry is there, so nothing is asked again"
    );
    go_on(&mut world, [Op::Answer(2, true)], 9, false);
    assert_eq!(state(&world, "uid0", "n2"), Some(State::Succeeded));
}

#[test]
fn a_job_that_waits_for_an_earlier_pull_says_so_and_is_handed_out_at_its_end() {
    let (uid, node) = (Uid::from("uid0"), NodeName::from("n0"));
    let pulls = |world: &mut World| {
        world.views.get_mut(&0).unwrap().tags = vec![TagView {
            image: "nginx".to_owned(),
            tag: "1".to_owned(),
            version: 3,
            created: Some(at(0)),
            ..TagView::default()
        }];
        world.tell(0);
    };
    let condition = |world: &World| {
        let tally = world.index.tally(&uid, false, at(world.now)).unwrap();
        let status = judge(&world.index.job(&uid).unwrap(), &tally, at(world.now)).status;
        status
            .conditions
            .first()
            .map(|c| (c.reason.clone(), c.message.ends_with(" on n0")))
    };
    let assigned = [Op::Add(0), Op::Put(0), Op::HandOut];
    let mut world = played(assigned.clone(), 1, false);
    assert_eq!(world.writes.pop(), Some((0, Arc::clone(&uid))));
    pulls(&mut world);
    world.index.take_dirty();
    world.index.written(&uid, &node, Some(3));
    assert_eq!(condition(&world), Some(("PullInProgress".to_owned(), true)));
    assert_eq!(world.index.take_dirty(), [Arc::clone(&uid)]);
    go_on(&mut world, [Op::HandOut], 1, false);
    assert_eq!(world.writes, [], "it waits");
    go_on(&mut world, [Op::Answer(0, true), Op::HandOut], 1, false);
    assert_eq!(world.writes.pop(), Some((0, Arc::clone(&uid))), "it does no more");
    assert_eq!(condition(&world), None);

    // The end shows before the outcome of the write.
    let mut world = played(assigned, 1, false);
    world.writes.clear();
    pulls(&mut world);
    go_on(&mut world, [Op::Answer(0, true)], 1, false);
    world.index.written(&uid, &node, Some(3));
    go_on(&mut world, [Op::HandOut], 1, false);
    assert_eq!(world.writes.len(), 1);

    // What does not show is looked at again in time, and until then it says what it waits for.
    world.index.written(&uid, &node, Some(4));
    go_on(&mut world, [Op::Pass(29), Op::HandOut], 1, false);
    assert_eq!(world.writes.len(), 1);
    go_on(&mut world, [Op::Pass(1), Op::HandOut], 1, false);
    assert_eq!(world.writes.len(), 2);
    assert_eq!(condition(&world), Some(("PullInProgress".to_owned(), true)));
    world.index.written(&uid, &node, None);
    assert_eq!(condition(&world), None);
}
