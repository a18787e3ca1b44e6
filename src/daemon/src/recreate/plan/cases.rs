//! Single cases of the plan, with their figures.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::tests::{LONG, not_ready, request, sim, stops, writes};
use super::world::{Event, Fault, Ms, World};
use super::*;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestPhase as Phase, ContainerRecreateRequestStatus as Status,
};

fn run(world: &mut World) -> &Status {
    assert!(world.run(LONG), "{:#?}", world.log);
    &world.requests[0].status
}

fn said(status: &Status, container: usize) -> &str {
    status.container_recreate_states[container]
        .message
        .as_deref()
        .unwrap_or_default()
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
        (world.now, status.phase, status.message),
        (1_615, Phase::Completed, None)
    );
    assert_eq!(
        (
            &status.container_recreate_states[0].phase,
            status.container_recreate_states[0].is_killed
        ),
        (&Phase::Succeeded, true)
    );
    assert_eq!(
        status.container_status_snapshot[0].container_id.as_deref(),
        Some("containerd://a-1")
    );
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
    assert_eq!(
        status.container_recreate_states[0].container_id.as_deref(),
        Some("containerd://a-0")
    );
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
fn hook_and_stop_that_run_at_the_deadline_are_finished() {
    let hurried = Request {
        deadline_seconds: Some(5),
        ..request("one", &["a", "b"])
    };
    let sims = vec![sim("a", 20_000, 0, 0, None), sim("b", 0, 0, 0, Some(9_000))];
    let mut world = World::new(sims, vec![(0, hurried)]);
    let status = run(&mut world).clone();
    let told: Vec<_> = world
        .log
        .iter()
        .filter_map(|(at, event)| match event {
            Event::Wrote { status, .. } if status.completion_time.is_some() => Some((*at, status.clone())),
            _ => None,
        })
        .collect();
    let moments: Vec<_> = told.iter().map(|(at, _)| *at).collect();
    assert_eq!(
        moments,
        [5_000, 9_000, 20_000],
        "its end, and the end of each stop"
    );
    let first = &told[0].1;
    assert_eq!(
        first.message.as_deref(),
        Some("recreating has exceeded the activeDeadlineSeconds")
    );
    assert!(said(first, 0).contains("TERM had been sent"), "{first:?}");
    assert!(said(first, 1).contains("hook was running"), "{first:?}");
    for state in &status.container_recreate_states {
        assert_eq!(state.phase, Phase::Failed);
        assert!(
            state
                .message
                .as_deref()
                .unwrap_or_default()
                .contains("was stopped after that"),
            "{status:?}"
        );
    }
    assert_eq!(status.completion_time, first.completion_time);
    assert_eq!(stops(&world, "one").count(), 2, "the hook is followed by TERM");
}

/// A queue of 20 s and a hook of 10 s leave 20 s of 30 s between TERM and KILL.
#[test]
fn waiting_for_a_slot_uses_up_no_grace() {
    let mut world = World::new(
        vec![sim("a", 60_000, 0, 0, Some(10_000))],
        vec![(0, request("one", &["a"]))],
    );
    world.crowded = (0, 20_000);
    run(&mut world);
    assert_eq!(stops(&world, "one").collect::<Vec<_>>(), [(30_000, "a", "a-0")]);
    assert_eq!(graces(&world), [20_000]);
}

/// From TERM to KILL, for each call to stop a container.
fn graces(world: &World) -> Vec<Ms> {
    let events = world.log.iter();
    events
        .filter_map(|(_, event)| match event {
            Event::Stop { grace, .. } => Some(*grace),
            _ => None,
        })
        .collect()
}

#[test]
fn a_stop_that_did_not_reach_the_runtime_uses_up_no_grace() {
    let faults = [
        (Fault::Away, 30_000),
        (Fault::Hangs(40_000), 30_000),
        (Fault::Refuses(10_000), 20_000),
    ];
    for (fault, left) in faults {
        let mut world = World::new(
            vec![sim("a", 25_000, 0, 0, None)],
            vec![(0, request("one", &["a"]))],
        );
        world.faults = vec![(0, 1, fault)];
        run(&mut world);
        assert_eq!(graces(&world), [30_000, left], "{fault:?}");
    }
}

#[test]
fn what_ran_at_the_deadline_is_told_when_the_api_server_is_back() {
    let hurried = Request {
        deadline_seconds: Some(5),
        ..request("one", &["a"])
    };
    let mut world = World::new(vec![sim("a", 60_000, 0, 0, None)], vec![(0, hurried)]);
    world.api_down = (4_000, 24_000);
    let status = run(&mut world).clone();
    let ended = world.log.iter().find_map(|(at, event)| match event {
        Event::Wrote { status, .. } if status.completion_time.is_some() => {
            Some((*at, said(status, 0).to_owned()))
        }
        _ => None,
    });
    let (at, message) = ended.expect("it ended");
    assert_eq!(at, 24_000);
    assert!(message.contains("TERM had been sent"), "{message}");
    assert_eq!(world.now, 30_000);
    assert!(said(&status, 0).contains("was stopped after that"), "{status:?}");
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
fn a_request_that_is_seen_late_is_taken_up_before_anything_is_stopped() {
    for (seen_at, stopped_at) in [(20_000, 20_000), (45_000, 60_000)] {
        let mut world = World::new(vec![sim("a", 100, 1_000, 0, None)], vec![]);
        world.now = seen_at;
        world.api_down = (0, 60_000);
        let mut made = request("one", &["a"]);
        made.created = super::world::start();
        made.containers[0].recorded = Some("containerd://a-0".into());
        world.requests.push(made);
        run(&mut world);
        let (at, ..) = stops(&world, "one").next().unwrap();
        assert!(
            (stopped_at..stopped_at + 1_000).contains(&at),
            "{at}: {:#?}",
            world.log
        );
        assert_eq!(stops(&world, "one").count(), 1);
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
        assert_eq!(
            status.message, None,
            "clients take a message for an end before its time"
        );
        assert!(
            said(&status, 0).contains("no container \"nowhere\"; it has a"),
            "{status:?}"
        );
        if !ignore {
            assert!(said(&status, 1).contains("not started, because"), "{status:?}");
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
    assert!(
        status
            .message
            .as_deref()
            .unwrap_or_default()
            .contains("kruise-manager"),
        "{status:?}"
    );
    assert_eq!(writes(&world, "one"), 1);
    let seen = world.clock();
    world.requests[0].status.conditions = vec![not_ready(seen.api)];
    world.memory.unready_seen.insert("one".into(), seen.mono);
    let shown = world.now;
    world.run(LONG);
    let (stopped, ..) = stops(&world, "one").next().unwrap();
    assert_eq!(stopped, shown + 5_000);
}
