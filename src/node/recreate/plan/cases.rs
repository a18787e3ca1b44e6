//! Single cases of the plan, with their figures.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::tests::{LONG, request, sim, stops, writes};
use super::world::{Event, World};
use super::*;

fn run(world: &mut World) -> &Status {
    assert!(world.run(LONG), "{:#?}", world.log);
    &world.requests[0].status
}

#[test]
fn one_container_costs_two_writes_and_no_waiting() {
    let mut world = World::new(
        vec![sim("a", 15, 1_600, 0, None)],
        vec![(0, request("one", &["a"]))],
    );
    let status = run(&mut world).clone();
    assert_eq!(stops(&world, "one").collect::<Vec<_>>(), [(0, "a", "a-0")]);
    assert_eq!(writes(&world, "one"), 2, "{:#?}", world.log);
    assert_eq!(
        (world.now, status.phase, status.message.as_str()),
        (1_615, Phase::Completed, "")
    );
    assert_eq!(
        (status.states[0].phase, status.states[0].killed),
        (Phase::Succeeded, true)
    );
    assert_eq!(status.snapshot[0].container_id, "containerd://a-1");
}

#[test]
fn force_costs_no_more() {
    let forced = Request {
        force: true,
        ..request("one", &["a"])
    };
    let mut world = World::new(vec![sim("a", 15, 1_600, 0, None)], vec![(0, forced)]);
    let status = run(&mut world).clone();
    assert_eq!(writes(&world, "one"), 2, "{:#?}", world.log);
    assert_eq!(status.states[0].target.as_deref(), Some("containerd://a-0"));
}

#[test]
fn three_slow_containers_stop_together() {
    let sims = ["a", "b", "c"]
        .map(|name| sim(name, 2_000, 1_000, 500, None))
        .to_vec();
    let mut world = World::new(sims, vec![(0, request("one", &["a", "b", "c"]))]);
    run(&mut world);
    assert_eq!(world.now, 3_500);
    assert_eq!(writes(&world, "one"), 2, "{:#?}", world.log);
}

#[test]
fn at_the_deadline_a_stop_is_broken_off_and_said_so() {
    let hurried = Request {
        deadline_seconds: Some(5),
        ..request("one", &["a", "b"])
    };
    let sims = vec![sim("a", 20_000, 0, 0, None), sim("b", 0, 0, 0, Some(9_000))];
    let mut world = World::new(sims, vec![(0, hurried)]);
    let status = run(&mut world).clone();
    assert_eq!((world.now, status.phase), (5_000, Phase::Completed));
    assert_eq!(
        status.message,
        "recreating has exceeded the activeDeadlineSeconds"
    );
    assert!(status.states.iter().all(|state| state.phase == Phase::Failed));
    assert!(
        status.states[0].message.contains("TERM had been sent"),
        "{status:?}"
    );
    assert!(
        status.states[1]
            .message
            .contains("hook was running and was broken off"),
        "{status:?}"
    );
    let off = world
        .log
        .iter()
        .filter(|(_, event)| matches!(event, Event::BrokenOff { .. }))
        .count();
    assert_eq!(off, 2);
}

#[test]
fn what_was_broken_off_is_remembered_while_the_api_server_is_away() {
    let hurried = Request {
        deadline_seconds: Some(5),
        ..request("one", &["a"])
    };
    let mut world = World::new(vec![sim("a", 60_000, 0, 0, None)], vec![(0, hurried)]);
    world.api_down = (4_000, 24_000);
    let status = run(&mut world).clone();
    assert_eq!(world.now, 24_000);
    assert!(
        status.states[0].message.contains("TERM had been sent"),
        "{status:?}"
    );
}

#[test]
fn a_replaced_container_is_accepted_unless_forced() {
    for (force, stopped) in [(false, 0), (true, 1)] {
        let request = Request {
            force,
            ..request("one", &["a"])
        };
        let mut world = World::new(vec![sim("a", 0, 0, 0, None)], vec![(0, request)]);
        world.now = 1;
        world.arrivals[0].1.containers[0].recorded = None;
        world.arrivals[0].1.created = super::world::start();
        let mut made = world.arrivals.remove(0).1;
        made.containers[0].recorded = Some("containerd://a-older".into());
        world.requests.push(made);
        run(&mut world);
        assert_eq!(stops(&world, "one").count(), stopped, "force {force}");
    }
}

#[test]
fn min_started_seconds_end_at_the_right_moment() {
    let patient = Request {
        min_started_seconds: 7,
        ..request("one", &["a"])
    };
    let mut world = World::new(vec![sim("a", 100, 1_000, 500, None)], vec![(0, patient)]);
    run(&mut world);
    assert_eq!(world.now, 8_100);
}

#[test]
fn failure_ends_an_ordered_request_unless_it_is_ignored() {
    for (ignore, stopped) in [(false, 0), (true, 1)] {
        let request = Request {
            ordered: true,
            ignore_failures: ignore,
            ..request("one", &["nowhere", "a"])
        };
        let mut world = World::new(vec![sim("a", 0, 0, 0, None)], vec![(0, request)]);
        let status = run(&mut world).clone();
        assert_eq!(stops(&world, "one").count(), stopped);
        assert!(
            status.states[0]
                .message
                .contains("no container \"nowhere\"; it has a"),
            "{status:?}"
        );
        if !ignore {
            assert!(
                status.states[1].message.contains("not begun, because"),
                "{status:?}"
            );
        }
    }
}

#[test]
fn the_unready_grace_is_waited_for() {
    let drained = Request {
        unready_seconds: Some(5),
        ..request("one", &["a"])
    };
    let mut world = World::new(vec![sim("a", 0, 0, 0, None)], vec![(0, drained)]);
    assert!(!world.run(60_000), "it waits for the manager");
    let status = world.requests[0].status.clone();
    assert_eq!(status.phase, Phase::Recreating);
    assert!(status.message.contains("kruise-manager"), "{status:?}");
    assert_eq!(writes(&world, "one"), 1);
    let seen = world.clock();
    world.requests[0].status.unready_since = Some(seen.api);
    world.memory.unready_seen.insert("one".into(), seen.mono);
    let shown = world.now;
    world.run(LONG);
    let (stopped, ..) = stops(&world, "one").next().unwrap();
    assert_eq!(stopped, shown + 5_000);
}
