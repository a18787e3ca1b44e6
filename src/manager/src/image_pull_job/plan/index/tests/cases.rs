//! Regressions and important scenarios.

use super::*;
use kruise_api::node_image::PulledBytes;

fn limits(each: usize) -> BTreeMap<Uid, usize> {
    (0..3).map(|n| (Uid::from(format!("uid{n}")), each)).collect()
}

fn run_ops(ops: impl IntoIterator<Item = Op>, each: usize, never: bool) -> FakeCluster {
    let mut world = FakeCluster::default();
    continue_ops(&mut world, ops, each, never);
    world
}

fn continue_ops(world: &mut FakeCluster, ops: impl IntoIterator<Item = Op>, each: usize, never: bool) {
    for op in ops {
        apply_op(world, op, &limits(each), never);
        world.check_invariants().unwrap();
    }
}

fn state(world: &FakeCluster, job: &str, node: &str) -> Option<NodeState> {
    world.index.node_states(&job.into()).get(node).copied()
}

#[test]
fn outcome_survives_entry_expiry() {
    let mut world = FakeCluster::default();
    let limits: BTreeMap<Uid, usize> = (0..3).map(|n| (Uid::from(format!("uid{n}")), 1)).collect();
    for op in [
        Op::AddNode(0),
        Op::AddNode(1),
        Op::PutJob(0),
        Op::Assign,
        Op::Write,
        Op::ReportPulls(0, true),
        Op::ExpireTags(0),
    ] {
        apply_op(&mut world, op, &limits, false);
    }
    let tally = world.index.counters(&"uid0".into(), false, at(0)).unwrap();
    assert_eq!((tally.desired, tally.succeeded), (2, 1));
}

#[test]
fn bytes_of_nodes_that_pull_and_have_pulled_are_added() {
    let mut world = FakeCluster::default();
    let limits: BTreeMap<Uid, usize> = (0..3).map(|n| (Uid::from(format!("uid{n}")), 2)).collect();
    for op in [
        Op::AddNode(0),
        Op::AddNode(1),
        Op::AddNode(2),
        Op::PutJob(0),
        Op::Assign,
        Op::Write,
        Op::Write,
    ] {
        apply_op(&mut world, op, &limits, false);
    }
    let pulled = |world: &FakeCluster| {
        let counters = world.index.counters(&"uid0".into(), false, at(0)).unwrap();
        counters.pulled.map(|bytes| (bytes.done, bytes.total))
    };
    let report = |world: &mut FakeCluster, n: u8, bytes: Option<PulledBytes>| {
        world.views.get_mut(&n).unwrap().statuses = vec![TagStatusView {
            name: Arc::new(ImageTag {
                image: "nginx".to_owned(),
                tag: "1".to_owned(),
            }),
            version: 0,
            phase: ImagePullPhase::Pulling,
            completed: None,
            started: None,
            error: None,
            progress_hash: 0,
            bytes: bytes.map(Box::new),
        }];
        world.notify_index(n);
    };
    for n in [0, 1] {
        report(&mut world, n, None);
    }
    assert_eq!(pulled(&world), None);
    world.index.take_dirty();
    for (n, done) in [(0, 30), (1, 900)] {
        report(&mut world, n, Some(PulledBytes { done, total: 100 }));
    }
    assert!(world.index.take_dirty().is_empty(), "bytes cause no write");
    assert_eq!(pulled(&world), Some((30 + 100, 300)));
    apply_op(&mut world, Op::ReportPulls(0, false), &limits, false);
    assert_eq!(pulled(&world), Some((100, 200)));
    apply_op(&mut world, Op::ReportPulls(1, true), &limits, false);
    assert_eq!(pulled(&world), Some((100, 200)));
}

#[test]
fn job_waits_for_pending_node_images() {
    let mut world = FakeCluster::default();
    let limits: BTreeMap<Uid, usize> = (0..3).map(|n| (Uid::from(format!("uid{n}")), 9)).collect();
    let result = |world: &FakeCluster| {
        let uid = Uid::from("uid0");
        let tally = world.index.counters(&uid, false, at(world.now)).unwrap();
        let update = job_status(&world.index.job(&uid).unwrap(), &tally, at(world.now));
        (
            update.status.completion_time.is_some(),
            update.status.conditions.first().map(|c| c.message.clone()),
            update.requeue_at,
        )
    };
    for op in [Op::SetReady(0, true), Op::PutJob(0), Op::AdvanceTime(5)] {
        apply_op(&mut world, op, &limits, false);
    }
    let message = Some("waiting for the NodeImage of n0".to_owned());
    assert_eq!(result(&world), (false, message, Some(at(30))));
    for op in [
        Op::AddNode(0),
        Op::Assign,
        Op::Write,
        Op::SetReady(1, true),
        Op::ReportPulls(0, true),
    ] {
        apply_op(&mut world, op, &limits, false);
    }
    let message = Some("waiting for the NodeImage of n1".to_owned());
    assert_eq!(result(&world), (false, message, Some(at(35))));
    apply_op(&mut world, Op::AdvanceTime(30), &limits, false);
    let message = Some("nginx:1 is on 1 of 1 nodes".to_owned());
    assert_eq!(result(&world), (true, message, None), "not forever");
}

#[test]
fn unresponsive_daemon_is_reported_until_it_answers() {
    let tally = |world: &FakeCluster| {
        world
            .index
            .counters(&"uid0".into(), false, at(world.now))
            .unwrap()
    };
    let requested = [
        Op::SetReady(0, true),
        Op::AddNode(0),
        Op::PutJob(0),
        Op::Assign,
        Op::Write,
        Op::AdvanceTime(1),
    ];
    let mut world = run_ops(requested, 1, false);
    let late = |world: &FakeCluster| world.index.counters(&"uid0".into(), true, at(world.now)).unwrap();
    assert_eq!(
        late(&world).unresponsive.len(),
        0,
        "it was requested a moment ago"
    );
    continue_ops(&mut world, [Op::AdvanceTime(8)], 1, false);
    assert_eq!(
        (
            tally(&world).unresponsive.len(),
            tally(&world).next_unresponsive_at
        ),
        (0, Some(at(10)))
    );
    assert_eq!(
        (late(&world).unresponsive.len(), late(&world).next_unresponsive_at),
        (1, None),
        "at its deadline"
    );
    continue_ops(&mut world, [Op::AdvanceTime(1)], 1, false);
    assert_eq!(
        (
            tally(&world).unresponsive.len(),
            tally(&world).next_unresponsive_at
        ),
        (1, None)
    );
    world.index.take_dirty();
    continue_ops(&mut world, [Op::SetReady(0, false)], 1, false);
    assert_eq!(
        (tally(&world).unresponsive.len(), tally(&world).not_ready.len()),
        (0, 1)
    );
    assert_eq!(
        world.index.take_dirty().len(),
        1,
        "its status says something else now"
    );
    continue_ops(&mut world, [Op::ReportPulls(0, true)], 1, false);
    assert_eq!(
        (tally(&world).unresponsive.len(), tally(&world).not_ready.len()),
        (0, 0)
    );
}

#[test]
fn unready_nodes_come_last() {
    let mut world = FakeCluster::default();
    let limits: BTreeMap<Uid, usize> = (0..3).map(|n| (Uid::from(format!("uid{n}")), 1)).collect();
    for op in [
        Op::SetReady(0, false),
        Op::AddNode(0),
        Op::AddNode(1),
        Op::PutJob(0),
        Op::Assign,
    ] {
        apply_op(&mut world, op, &limits, false);
    }
    assert_eq!(world.writes[0].0, 1);
}

fn pulling(world: &FakeCluster) -> Vec<u8> {
    let is_active = |n: &u8| {
        let state = state_of(&world.index, &"uid0".into(), *n);
        matches!(state, Some(NodeState::Assigned | NodeState::Pulling))
    };
    (0..NODES).filter(is_active).collect()
}

/// A node takes no place while it is cordoned or not ready, and has its turn when that is over.
#[test]
fn cordoned_and_unready_nodes_step_aside_and_come_back() {
    let nodes = (0..4).flat_map(|n| [Op::SetReady(n, n != 0), Op::Cordon(n, n == 1), Op::AddNode(n)]);
    let mut world = run_ops(nodes.chain([Op::PutJob(0), Op::Assign]), 2, false);
    let mut step = |ops: &[Op]| {
        while world.apply_write() {}
        continue_ops(&mut world, ops.iter().cloned(), 2, false);
        world.assign_all();
        pulling(&world)
    };
    // Nodes 2 and 3 came first.
    assert_eq!(step(&[Op::ReportPulls(2, true)]), [1, 3]);
    assert_eq!(step(&[Op::ReportPulls(1, true), Op::SetReady(0, true)]), [0, 3]);

    // With free places, a cordoned node waits for no other.
    let nodes = (0..2).flat_map(|n| [Op::Cordon(n, n == 0), Op::AddNode(n)]);
    let world = run_ops(nodes.chain([Op::PutJob(0), Op::Assign]), 2, false);
    assert_eq!(pulling(&world), [0, 1]);
}

/// A zone that fails would cost a write of each job for each of its nodes.
#[test]
fn pending_node_that_is_not_ready_changes_no_status() {
    let nodes = (0..3).map(Op::AddNode).chain((0..3).map(Op::PutJob));
    let mut world = run_ops(nodes.chain([Op::Assign]), 1, false);
    world.index.take_dirty();
    let flips = [Op::SetReady(1, false), Op::Cordon(2, true), Op::SetReady(1, true)];
    continue_ops(&mut world, flips, 1, false);
    assert!(world.index.take_dirty().is_empty());
}

/// Their daemons may work; otherwise the pulls fail, so that the job ends.
#[test]
fn unready_nodes_are_requested_when_no_other_node_is_left() {
    let nodes = (0..4).flat_map(|n| [Op::SetReady(n, n > 1), Op::AddNode(n)]);
    let cordoned = [Op::Cordon(2, true), Op::PutJob(0), Op::Assign, Op::Write];
    let mut world = run_ops(nodes.chain(cordoned), 3, false);
    while world.apply_write() {}
    for (reported, next) in [(3, vec![2]), (2, vec![0, 1])] {
        continue_ops(
            &mut world,
            [Op::ReportPulls(reported, true), Op::Assign],
            3,
            false,
        );
        assert_eq!(pulling(&world), next);
        while world.apply_write() {}
    }
    continue_ops(
        &mut world,
        [Op::ReportPulls(0, false), Op::ReportPulls(1, true)],
        3,
        false,
    );
    assert!(world.index.is_finished(&"uid0".into()));

    // A node that is lost during its pull keeps no other one of its kind waiting.
    let nodes = (0..2).flat_map(|n| [Op::SetReady(n, n == 0), Op::AddNode(n)]);
    let mut world = run_ops(nodes.chain([Op::PutJob(0), Op::Assign, Op::Write]), 2, false);
    assert_eq!(pulling(&world), [0]);
    continue_ops(&mut world, [Op::SetReady(0, false), Op::Assign], 2, false);
    assert_eq!(pulling(&world), [0, 1]);
}

#[test]
fn status_change_touches_only_jobs_of_its_tag() {
    let mut world = FakeCluster::default();
    let limits: BTreeMap<Uid, usize> = (0..3).map(|n| (Uid::from(format!("uid{n}")), 9)).collect();
    for op in [
        Op::AddNode(0),
        Op::PutJob(0),
        Op::PutJob(2),
        Op::Assign,
        Op::Write,
        Op::Write,
    ] {
        apply_op(&mut world, op, &limits, false);
    }
    world.index.take_dirty();
    let view = world.views.get_mut(&0).unwrap();
    view.statuses.push(TagStatusView {
        name: Arc::new(ImageTag {
            image: "nginx".to_owned(),
            tag: "2".to_owned(),
        }),
        version: 0,
        phase: ImagePullPhase::Succeeded,
        completed: Some(at(0)),
        started: None,
        error: None,
        progress_hash: 0,
        bytes: None,
    });
    world.notify_index(0);
    assert_eq!(world.index.take_dirty(), vec![Uid::from("uid2")]);
}

fn edited(world: &FakeCluster) -> Vec<u8> {
    let is_outdated = |n: &u8| world.index.needs_write(&"uid0".into(), &format!("n{n}").into());
    (0..NODES).filter(is_outdated).collect()
}

/// What is finished is not requested again, and no further node is requested for it.
#[test]
fn edit_reaches_the_nodes_that_pull() {
    let nodes = (0..4).map(Op::AddNode);
    let before = [
        Op::PutJob(0),
        Op::Assign,
        Op::Write,
        Op::Write,
        Op::ReportPulls(0, true),
    ];
    let mut world = run_ops(nodes.chain(before), 2, false);
    continue_ops(
        &mut world,
        [Op::Assign, Op::Write, Op::EditJob(0, 7), Op::Assign],
        2,
        false,
    );
    let states = |world: &FakeCluster| ["n0", "n1", "n2", "n3"].map(|node| state(world, "uid0", node));
    let (done, pulls, waits) = (NodeState::Succeeded, NodeState::Pulling, NodeState::Pending);
    let expected = [done, pulls, pulls, waits].map(Some);
    assert_eq!((states(&world), edited(&world)), (expected, vec![1, 2]));
    assert_eq!(world.writes, [(1, "uid0".into()), (2, "uid0".into())]);
    // A node that answers before the write still gets it; one that ends does not.
    continue_ops(&mut world, [Op::ReportPulls(2, true), Op::Write], 2, false);
    assert_eq!(edited(&world), [] as [u8; 0]);
    continue_ops(&mut world, [Op::Write, Op::EditJob(0, 7), Op::Assign], 2, false);
    assert_eq!(edited(&world), [3], "n3 is new, and the same edit again is none");
}

/// The first write has the old spec: the API server is slow.
#[test]
fn edit_reaches_a_node_whose_request_is_being_written() {
    let mut world = run_ops([Op::AddNode(0), Op::PutJob(0), Op::Assign], 1, false);
    let before = world.jobs[&Uid::from("uid0")].clone();
    continue_ops(&mut world, [Op::EditJob(0, 7), Op::Assign, Op::Write], 1, false);
    assert_eq!(edited(&world), [] as [u8; 0]);
    continue_ops(&mut world, [Op::EditJob(0, 9), Op::Assign], 1, false);
    world.index.write_succeeded(&before, &"n0".into(), None);
    assert_eq!(edited(&world), [0], "only a write of the present spec counts");
    continue_ops(&mut world, [Op::NewLeader, Op::Assign], 1, false);
    assert_eq!(edited(&world), [0], "a new leader cannot know");
    world
        .index
        .write_refused(&world.jobs[&Uid::from("uid0")], &"n0".into(), "full");
    assert_eq!(
        (edited(&world), state(&world, "uid0", "n0")),
        (vec![], Some(NodeState::Pulling))
    );
}

/// Its NodeImage was full for a moment.
#[test]
fn node_that_refused_a_job_without_end_is_tried_again() {
    for never in [true, false] {
        let refused = [
            Op::AddNode(0),
            Op::PutJob(0),
            Op::Assign,
            Op::RefuseWrite(0),
            Op::Assign,
        ];
        let mut world = run_ops(refused, 1, never);
        assert_eq!(state(&world, "uid0", "n0"), Some(NodeState::Failed));
        continue_ops(&mut world, [Op::AdvanceTime(600), Op::Assign], 1, never);
        let is_tried = state(&world, "uid0", "n0") == Some(NodeState::Assigned);
        assert_eq!(is_tried, never);
    }
}

#[test]
fn clock_that_is_set_back_delays_no_job() {
    let mut index = JobIndex::new(SignedDuration::ZERO, RegistryLimit::default());
    let uid = Uid::from("uid0");
    index.upsert_job(job(0, 1, false), at(0));
    index.delay_job(&uid, at(1000));
    assert_eq!(index.next_requeue(), Some(at(1005)));
    assert_eq!(index.take_assignable(at(1004)), [] as [Uid; 0]);
    assert_eq!(index.take_assignable(at(10)), [uid]);
    assert_eq!(index.next_requeue(), None);
}

#[test]
fn clock_that_is_set_back_delays_no_retry() {
    let mut world = run_ops([Op::AddNode(0), Op::PutJob(0), Op::Assign], 1, true);
    world.writes.clear();
    continue_ops(&mut world, [Op::AdvanceTime(-1), Op::Assign], 1, true);
    assert!(world.writes.is_empty(), "it is still being written");
    continue_ops(&mut world, [Op::AdvanceTime(-3600), Op::Assign], 1, true);
    assert_eq!(world.writes, [(0, Uid::from("uid0"))]);
    continue_ops(&mut world, [Op::RefuseWrite(0), Op::Assign], 1, true);
    assert_eq!(state(&world, "uid0", "n0"), Some(NodeState::Failed));
    continue_ops(&mut world, [Op::AdvanceTime(-3600), Op::Assign], 1, true);
    assert_eq!(state(&world, "uid0", "n0"), Some(NodeState::Assigned));
}

/// A job may request a tag again that a job with policy `Never` already has elsewhere. Then more nodes pull for the
/// latter than its parallelism; it requests no further node before there are fewer.
#[test]
fn foreign_pulls_count_but_do_not_block_a_job() {
    let before = [
        Op::AddNode(0),
        Op::AddNode(1),
        Op::AddNode(2),
        Op::PutJob(0),
        Op::Assign,
        Op::Write,
    ];
    let mut world = run_ops(before, 1, true);
    let again = [
        Op::ReportPulls(0, true),
        Op::Assign,
        Op::PutJob(1),
        Op::Assign,
        Op::Write,
        Op::Write,
    ];
    continue_ops(&mut world, again, 1, true);
    let active = |world: &FakeCluster| {
        world
            .index
            .counters(&"uid0".into(), false, at(world.now))
            .unwrap()
            .active
    };
    assert_eq!(
        state(&world, "uid0", "n0"),
        Some(NodeState::Pulling),
        "asked for again by the other job"
    );
    assert_eq!(active(&world), 2);
    continue_ops(&mut world, [Op::ReportPulls(0, true), Op::Assign], 1, true);
    assert_eq!(
        (active(&world), state(&world, "uid0", "n2")),
        (1, Some(NodeState::Pending))
    );
}

/// What a leader knows in addition to the objects, and the cost of losing it: a refused request is repeated once, and a
/// node that had its image counts as pulling until the pull that another job requested has ended.
#[test]
fn new_leader_repeats_refused_writes_and_waits() {
    let mut world = run_ops(
        [
            Op::AddNode(0),
            Op::AddNode(2),
            Op::PutJob(0),
            Op::Assign,
            Op::RefuseWrite(0),
        ],
        9,
        false,
    );
    assert_eq!(state(&world, "uid0", "n0"), Some(NodeState::Failed));
    world.writes.clear();
    continue_ops(&mut world, [Op::NewLeader, Op::Assign], 9, false);
    assert_eq!(world.writes.len(), 2, "both are requested again");
    continue_ops(
        &mut world,
        [Op::RefuseWrite(0), Op::Write, Op::Write, Op::ReportPulls(2, true)],
        9,
        false,
    );
    assert_eq!(
        state(&world, "uid0", "n0"),
        Some(NodeState::Failed),
        "and refused again"
    );

    let raised = [Op::PutJob(1), Op::Assign, Op::Write, Op::Write];
    continue_ops(&mut world, raised, 9, false);
    assert_eq!(
        state(&world, "uid0", "n2"),
        Some(NodeState::Succeeded),
        "although the tag is pulled again"
    );
    continue_ops(&mut world, [Op::NewLeader], 9, false);
    assert_eq!(state(&world, "uid0", "n2"), Some(NodeState::Pulling));
    continue_ops(&mut world, [Op::Assign], 9, false);
    let pulls = |(n, uid): &(u8, Uid)| state_of(&world.index, uid, *n) == Some(NodeState::Pulling);
    assert!(
        world.writes.len() == 4 && world.writes.iter().all(pulls),
        "entries of nodes that pull are compared with the specs, and nothing else is requested"
    );
    continue_ops(&mut world, [Op::ReportPulls(2, true)], 9, false);
    assert_eq!(state(&world, "uid0", "n2"), Some(NodeState::Succeeded));
}

#[test]
fn job_waiting_for_a_pull_is_assigned_at_its_end() {
    let (uid, node, requested) = (Uid::from("uid0"), NodeName::from("n0"), job(0, 1, false));
    let start_pull = |world: &mut FakeCluster| {
        let request = TagRequest {
            image: "nginx".to_owned(),
            tag: "1".to_owned(),
            ..TagRequest::default()
        };
        world.views.get_mut(&0).unwrap().tags = vec![TagView {
            request: Arc::new(request),
            version: 3,
            created: Some(at(0)),
        }];
        world.notify_index(0);
    };
    let condition = |world: &FakeCluster| {
        let tally = world.index.counters(&uid, false, at(world.now)).unwrap();
        let status = job_status(&world.index.job(&uid).unwrap(), &tally, at(world.now)).status;
        status
            .conditions
            .first()
            .map(|c| (c.reason.clone(), c.message.ends_with(" on n0")))
    };
    let assigned = [Op::AddNode(0), Op::PutJob(0), Op::Assign];
    let mut world = run_ops(assigned.clone(), 1, false);
    assert_eq!(world.writes.pop(), Some((0, Arc::clone(&uid))));
    start_pull(&mut world);
    world.index.take_dirty();
    world.index.write_succeeded(&requested, &node, Some(3));
    assert_eq!(condition(&world), Some(("PullInProgress".to_owned(), true)));
    assert_eq!(world.index.take_dirty(), [Arc::clone(&uid)]);
    continue_ops(&mut world, [Op::Assign], 1, false);
    assert_eq!(world.writes, [], "the node waits");
    continue_ops(&mut world, [Op::ReportPulls(0, true), Op::Assign], 1, false);
    assert_eq!(world.writes.pop(), Some((0, Arc::clone(&uid))), "it is written");
    assert_eq!(condition(&world), None);

    // The watch shows the end before the result of the write is processed.
    let mut world = run_ops(assigned, 1, false);
    world.writes.clear();
    start_pull(&mut world);
    continue_ops(&mut world, [Op::ReportPulls(0, true)], 1, false);
    world.index.write_succeeded(&requested, &node, Some(3));
    continue_ops(&mut world, [Op::Assign], 1, false);
    assert_eq!(world.writes.len(), 1);

    // A tag that the watch does not show is checked again in time, and until then the job reports what it waits for.
    world.index.write_succeeded(&requested, &node, Some(4));
    continue_ops(&mut world, [Op::AdvanceTime(29), Op::Assign], 1, false);
    assert_eq!(world.writes.len(), 1);
    continue_ops(&mut world, [Op::AdvanceTime(1), Op::Assign], 1, false);
    assert_eq!(world.writes.len(), 2);
    assert_eq!(condition(&world), Some(("PullInProgress".to_owned(), true)));
    world.index.write_succeeded(&requested, &node, None);
    assert_eq!(condition(&world), None);
}

/// At a registry with a limit, a namespace with many jobs does not keep another one waiting, and a node that is lost
/// does not keep its place.
#[test]
fn jobs_take_turns_at_a_registry() {
    let mut world = FakeCluster {
        max_pulls: 2,
        ..FakeCluster::default()
    };
    world.new_leader();
    for n in 0..NODES {
        world.set_node(n, true);
        world.add_node(n);
    }
    let pulls = |world: &FakeCluster| {
        let active = |n: u8| {
            let uid = Uid::from(format!("uid{n}"));
            let counters = world.index.counters(&uid, false, at(world.now));
            counters.map_or(0, |counters| counters.active)
        };
        [active(0), active(1), active(2)]
    };
    let step = |world: &mut FakeCluster, op: Op| continue_ops(world, [op, Op::Assign], 3, false);
    step(&mut world, Op::PutJob(0));
    assert_eq!(pulls(&world), [2, 0, 0]);
    continue_ops(&mut world, [Op::PutJob(1), Op::PutJob(2), Op::Assign], 3, false);
    assert_eq!(pulls(&world), [2, 0, 0], "there is no room");
    let uid = Uid::from("uid2");
    let counters = world.index.counters(&uid, false, at(0)).unwrap();
    let status = job_status(&world.index.job(&uid).unwrap(), &counters, at(0)).status;
    let [waiting] = status.conditions.as_slice() else {
        panic!("{:?}", status.conditions)
    };
    assert_eq!(waiting.reason, "RegistryLimit");
    assert!(
        waiting.message.contains("2 nodes pull from docker.io"),
        "{}",
        waiting.message
    );

    while world.apply_write() {}
    // The other namespace is first, although its job came last.
    step(&mut world, Op::ReportPulls(0, true));
    assert_eq!(pulls(&world), [1, 0, 1]);
    let counters = world.index.counters(&uid, false, at(0)).unwrap();
    assert_eq!(counters.registry_full, None);
    step(&mut world, Op::SetReady(1, false));
    assert_eq!(
        pulls(&world),
        [2, 0, 1],
        "nothing is pulled on a node that is not ready"
    );
    step(&mut world, Op::SetReady(1, true));
    assert_eq!(pulls(&world), [2, 0, 1]);
    while world.apply_write() {}
    step(&mut world, Op::ReportPulls(1, true));
    assert_eq!(pulls(&world), [1, 0, 1], "it was over the limit");
    // A job that ends makes room for the one of two jobs of a namespace that has fewer pulls.
    step(&mut world, Op::RemoveJob(2));
    assert_eq!(pulls(&world), [1, 1, 0]);
}

/// Pulls that never end leave a place at the registry for other namespaces.
#[test]
fn one_namespace_does_not_take_all_of_a_registry() {
    let mut world = FakeCluster {
        max_pulls: 4,
        ..FakeCluster::default()
    };
    world.new_leader();
    for n in 0..NODES {
        world.set_node(n, true);
        world.add_node(n);
    }
    let active = |world: &FakeCluster, n: u8| {
        let uid = Uid::from(format!("uid{n}"));
        let counters = world.index.counters(&uid, false, at(world.now));
        counters.map_or(0, |counters| counters.active)
    };
    continue_ops(&mut world, [Op::PutJob(0), Op::PutJob(1), Op::Assign], 4, false);
    assert_eq!(
        active(&world, 0) + active(&world, 1),
        3,
        "both are of one namespace"
    );
    continue_ops(&mut world, [Op::PutJob(2), Op::Assign], 4, false);
    assert_eq!(active(&world, 2), 1, "the other namespace has the last place");

    let mut alone = FakeCluster {
        max_pulls: 4,
        ..FakeCluster::default()
    };
    alone.new_leader();
    for n in 0..NODES {
        alone.set_node(n, true);
        alone.add_node(n);
    }
    continue_ops(&mut alone, [Op::PutJob(0), Op::Assign], 9, false);
    continue_ops(&mut alone, [Op::PutJob(1), Op::Assign], 9, false);
    let uid = Uid::from("uid1");
    let counters = alone.index.counters(&uid, false, at(0)).unwrap();
    let status = job_status(&alone.index.job(&uid).unwrap(), &counters, at(0)).status;
    let [waiting] = status.conditions.as_slice() else {
        panic!("{:?}", status.conditions)
    };
    let why = "waiting for other jobs: 3 nodes pull from docker.io for this namespace, and the rest of 4 is kept for \
        other namespaces (--max-pulls-per-registry)";
    assert_eq!(waiting.message, why);
}

/// Each daemon reads them one by one.
#[test]
fn secrets_of_one_namespace_leave_time_for_those_of_others() {
    let mut index = JobIndex::new(SignedDuration::ZERO, RegistryLimit::default());
    let copy = |name: String| ReferenceObject {
        namespace: "d".to_owned(),
        name,
        mode: None,
    };
    // The first two are of one namespace.
    for (n, count) in [(0, 100), (1, 100), (2, 1)] {
        let mut job = job(n, 1, false);
        job.spec.pull_secrets = vec!["s".to_owned()];
        index.upsert_job(job, at(0));
        let copies = (0..count).map(|copied| copy(format!("{n}-{copied}"))).collect();
        index.set_secrets(&format!("uid{n}").as_str().into(), copies);
    }
    // One whose secrets are not known yet requests nothing.
    let mut waits = job(0, 1, false);
    waits.uid = "waits".to_owned();
    waits.spec.pull_secrets = vec!["s".to_owned()];
    index.upsert_job(waits, at(0));
    let needed = index.needed_secrets("nginx").unwrap();
    assert_eq!(needed.len(), MAX_SECRETS_OF_NAMESPACE + 1);
    assert!(needed.contains(&("d".to_owned(), "2-0".to_owned())));
    let mut excess = || ["uid0", "uid1", "uid2"].map(|uid| index.take_excess_secrets(&uid.into()));
    assert_eq!(excess(), [Some(100 - MAX_SECRETS_OF_NAMESPACE), Some(100), None]);
    assert_eq!(excess(), [None; 3], "each is reported once");
}

/// Its daemon could not report for a while.
#[test]
fn failed_node_succeeds_when_its_daemon_reports_so() {
    let mut world = run_ops([Op::AddNode(0), Op::PutJob(0), Op::Assign, Op::Write], 2, false);
    continue_ops(&mut world, [Op::Write, Op::ReportPulls(0, false)], 2, false);
    assert_eq!(state(&world, "uid0", "n0"), Some(NodeState::Failed));
    world.report_pulls(0, true);
    assert_eq!(state(&world, "uid0", "n0"), Some(NodeState::Succeeded));
}

/// Its daemons may need what the index does not know yet.
#[test]
fn secrets_are_unknown_while_a_job_of_an_earlier_leader_pulls() {
    let mut world = run_ops([Op::AddNode(0), Op::PutJob(0), Op::Assign, Op::Write], 2, false);
    assert_eq!(world.index.needed_secrets("nginx"), Some(NeededSecrets::new()));
    let job = world.jobs.get_mut(&Uid::from("uid0")).unwrap();
    job.spec.pull_secrets = vec!["s".to_owned()];
    world.new_leader();
    assert_eq!(state(&world, "uid0", "n0"), Some(NodeState::Pulling));
    assert_eq!(world.index.needed_secrets("nginx"), None);
}
