//! Single cases of the plan with exact numbers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::fake_node::{FakeNode, Fault, LogEvent, Ms};
use super::tests::{RUN_LIMIT, fake_container, not_ready, request, stops, writes};
use super::*;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestPhase as Phase, ContainerRecreateRequestStatus as Status,
};

fn run_to_end(world: &mut FakeNode) -> &Status {
    assert!(world.run(RUN_LIMIT), "{:#?}", world.log);
    &world.requests[0].status
}

fn container_message(status: &Status, container: usize) -> &str {
    status.container_recreate_states[container]
        .message
        .as_deref()
        .unwrap_or_default()
}

#[test]
fn recreate_of_one_container_costs_two_writes() {
    let mut world = FakeNode::new(
        vec![fake_container("a", 15, 1_600, 0, None)],
        vec![(0, request("one", &["a"]))],
    );
    let status = run_to_end(&mut world).clone();
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
fn force_recreate_costs_two_writes() {
    let mut forced = request("one", &["a"]);
    forced.strategy.force_recreate = true;
    let mut world = FakeNode::new(vec![fake_container("a", 15, 1_600, 0, None)], vec![(0, forced)]);
    let status = run_to_end(&mut world).clone();
    assert_eq!(writes(&world, "one"), 2, "{:#?}", world.log);
    assert_eq!(
        status.container_recreate_states[0].container_id.as_deref(),
        Some("containerd://a-0")
    );
}

#[test]
fn unordered_containers_stop_in_parallel() {
    let sims = ["a", "b", "c"]
        .map(|name| fake_container(name, 2_000, 1_000, 500, None))
        .to_vec();
    let mut world = FakeNode::new(sims, vec![(0, request("one", &["a", "b", "c"]))]);
    run_to_end(&mut world);
    assert_eq!(world.now, 3_500);
    assert_eq!(writes(&world, "one"), 2, "{:#?}", world.log);
}

#[test]
fn hook_and_stop_running_at_deadline_are_finished() {
    let with_deadline = RecreateRequest {
        deadline_seconds: Some(5),
        ..request("one", &["a", "b"])
    };
    let sims = vec![
        fake_container("a", 20_000, 0, 0, None),
        fake_container("b", 0, 0, 0, Some(9_000)),
    ];
    let mut world = FakeNode::new(sims, vec![(0, with_deadline)]);
    let status = run_to_end(&mut world).clone();
    let final_writes: Vec<_> = world
        .log
        .iter()
        .filter_map(|(at, event)| match event {
            LogEvent::StatusWritten { status, .. } if status.completion_time.is_some() => {
                Some((*at, status.clone()))
            }
            _ => None,
        })
        .collect();
    let moments: Vec<_> = final_writes.iter().map(|(at, _)| *at).collect();
    assert_eq!(
        moments,
        [5_000, 9_000, 20_000],
        "its end, and the end of each stop"
    );
    let first = &final_writes[0].1;
    assert_eq!(
        first.message.as_deref(),
        Some("recreating has exceeded the activeDeadlineSeconds")
    );
    assert!(
        container_message(first, 0).contains("TERM had been sent"),
        "{first:?}"
    );
    assert!(
        container_message(first, 1).contains("hook was running"),
        "{first:?}"
    );
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
fn waiting_for_a_slot_uses_no_grace_period() {
    let mut world = FakeNode::new(
        vec![fake_container("a", 60_000, 0, 0, Some(10_000))],
        vec![(0, request("one", &["a"]))],
    );
    world.slots_full = (0, 20_000);
    run_to_end(&mut world);
    assert_eq!(stops(&world, "one").collect::<Vec<_>>(), [(30_000, "a", "a-0")]);
    assert_eq!(grace_periods(&world), [20_000]);
}

#[test]
fn hook_that_ended_in_a_restart_does_not_run_again() {
    let sims = vec![fake_container("a", 0, 0, 0, Some(1_000))];
    let mut world = FakeNode::new(sims, vec![]);
    let mut request = request("one", &["a"]);
    request.created_at = super::fake_node::start_time();
    request.containers[0].recorded_id = Some("containerd://a-0".into());
    world.requests.push(request);
    let mut observed = world.observe();
    for hook_done in [false, true] {
        if let RuntimeObservation::Listed { containers, .. } = &mut observed.runtime {
            containers[0].hook_done = hook_done;
        }
        let actions = plan(&observed, world.clocks()).stops;
        assert_eq!(actions[0].run_hook, !hook_done);
    }
}

/// The time from TERM to KILL for each stop call.
fn grace_periods(world: &FakeNode) -> Vec<Ms> {
    let events = world.log.iter();
    events
        .filter_map(|(_, event)| match event {
            LogEvent::Stop { grace, .. } => Some(*grace),
            _ => None,
        })
        .collect()
}

#[test]
fn stop_that_missed_the_runtime_uses_no_grace_period() {
    let faults = [
        (Fault::Unreachable, 30_000),
        (Fault::Hangs(40_000), 30_000),
        (Fault::Fails(10_000), 20_000),
    ];
    for (fault, left) in faults {
        let mut world = FakeNode::new(
            vec![fake_container("a", 25_000, 0, 0, None)],
            vec![(0, request("one", &["a"]))],
        );
        world.faults = vec![(0, 1, fault)];
        run_to_end(&mut world);
        assert_eq!(grace_periods(&world), [30_000, left], "{fault:?}");
    }
}

#[test]
fn deadline_status_is_written_when_api_server_is_back() {
    let with_deadline = RecreateRequest {
        deadline_seconds: Some(5),
        ..request("one", &["a"])
    };
    let mut world = FakeNode::new(
        vec![fake_container("a", 60_000, 0, 0, None)],
        vec![(0, with_deadline)],
    );
    world.api_down = (4_000, 24_000);
    let status = run_to_end(&mut world).clone();
    let final_write = world.log.iter().find_map(|(at, event)| match event {
        LogEvent::StatusWritten { status, .. } if status.completion_time.is_some() => {
            Some((*at, container_message(status, 0).to_owned()))
        }
        _ => None,
    });
    let (at, message) = final_write.expect("it ended");
    assert_eq!(at, 24_000);
    assert!(message.contains("TERM had been sent"), "{message}");
    assert_eq!(world.now, 30_000);
    assert!(
        container_message(&status, 0).contains("was stopped after that"),
        "{status:?}"
    );
}

#[test]
fn replaced_container_is_accepted_unless_forced() {
    for (force, stopped) in [(false, 0), (true, 1)] {
        let mut request = request("one", &["a"]);
        request.strategy.force_recreate = force;
        let mut world = FakeNode::new(vec![fake_container("a", 0, 0, 0, None)], vec![(0, request)]);
        world.now = 1;
        world.arrivals[0].1.containers[0].recorded_id = None;
        world.arrivals[0].1.created_at = super::fake_node::start_time();
        let mut request = world.arrivals.remove(0).1;
        request.containers[0].recorded_id = Some("containerd://a-older".into());
        world.requests.push(request);
        run_to_end(&mut world);
        assert_eq!(stops(&world, "one").count(), stopped, "force {force}");
    }
}

#[test]
fn late_request_is_recorded_before_any_stop() {
    for (seen_at, stopped_at) in [(20_000, 20_000), (45_000, 60_000)] {
        let mut world = FakeNode::new(vec![fake_container("a", 100, 1_000, 0, None)], vec![]);
        world.now = seen_at;
        world.api_down = (0, 60_000);
        let mut request = request("one", &["a"]);
        request.created_at = super::fake_node::start_time();
        request.containers[0].recorded_id = Some("containerd://a-0".into());
        world.requests.push(request);
        run_to_end(&mut world);
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
fn min_started_seconds_are_waited_for() {
    let mut with_min_started = request("one", &["a"]);
    with_min_started.strategy.min_started_seconds = 7;
    let mut world = FakeNode::new(
        vec![fake_container("a", 100, 1_000, 500, None)],
        vec![(0, with_min_started)],
    );
    run_to_end(&mut world);
    assert_eq!(world.now, 8_100);
}

#[test]
fn failure_ends_an_ordered_request_unless_ignored() {
    for (ignore, stopped) in [(false, 0), (true, 1)] {
        let mut request = request("one", &["nowhere", "a"]);
        request.strategy.ordered_recreate = true;
        request.strategy.failure_policy = ignore.then_some(FailurePolicy::Ignore);
        let mut world = FakeNode::new(vec![fake_container("a", 0, 0, 0, None)], vec![(0, request)]);
        let status = run_to_end(&mut world).clone();
        assert_eq!(stops(&world, "one").count(), stopped);
        assert_eq!(
            status.message, None,
            "clients take a message for an end before its time"
        );
        assert!(
            container_message(&status, 0).contains("no container \"nowhere\"; it has a"),
            "{status:?}"
        );
        if !ignore {
            assert!(
                container_message(&status, 1).contains("not started, because"),
                "{status:?}"
            );
        }
    }
}

#[test]
fn unready_grace_period_is_waited_for() {
    let mut with_unready_grace = request("one", &["a"]);
    with_unready_grace.strategy.unready_grace_period_seconds = Some(5);
    let mut world = FakeNode::new(
        vec![fake_container("a", 0, 0, 0, None)],
        vec![(0, with_unready_grace)],
    );
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
    let clocks = world.clocks();
    world.requests[0].status.conditions = vec![not_ready(clocks.api)];
    world.state.unready_observed_at.insert("one".into(), clocks.mono);
    let unready_at = world.now;
    world.run(RUN_LIMIT);
    let (stopped, ..) = stops(&world, "one").next().unwrap();
    assert_eq!(stopped, unready_at + 5_000);
}

/// The Pod of that name is another one now.
fn replace_pod(observed: &mut Observed) {
    if let PodObservation::Present(pod) = &mut observed.pod {
        Arc::make_mut(pod).uid = "another".into();
    }
}

/// Otherwise requests for the new Pod would wait for it, for as long as the grace period.
#[test]
fn hook_is_cancelled_when_another_pod_has_the_name() {
    let with_deadline = RecreateRequest {
        deadline_seconds: Some(5),
        ..request("one", &["a"])
    };
    let mut world = FakeNode::new(
        vec![fake_container("a", 0, 0, 0, Some(20_000))],
        vec![(0, with_deadline)],
    );
    assert!(!world.run(6_000), "the hook runs");
    let mut observed = world.observe();
    assert!(plan(&observed, world.clocks()).cancel.is_empty());
    replace_pod(&mut observed);
    assert_eq!(plan(&observed, world.clocks()).cancel.len(), 1);
}

#[test]
fn container_of_another_pod_is_not_the_new_one() {
    let mut world = FakeNode::new(vec![fake_container("a", 0, 0, 0, None)], vec![]);
    let mut request = request("one", &["a"]);
    request.created_at = super::fake_node::start_time();
    world.requests.push(request);
    let mut observed = world.observe();
    replace_pod(&mut observed);
    let write = plan(&observed, world.clocks()).writes.remove(0);
    let state = &write.status.container_recreate_states[0];
    assert_eq!(
        (&write.status.phase, &state.phase),
        (&Phase::Completed, &Phase::Failed)
    );
}

#[test]
fn unknown_phase_of_a_container_is_not_written_back() {
    let mut request = request("one", &["a"]);
    request.status = serde_json::from_value(serde_json::json!({
        "phase": "Recreating",
        "containerRecreateStates": [{ "name": "a", "phase": "odd", "isKilled": true }],
    }))
    .unwrap();
    let write = status::waiting(&Arc::new(request), &WaitReason::Unready).unwrap();
    let state = &write.status.container_recreate_states[0];
    assert_eq!((&state.phase, state.is_killed), (&Phase::Pending, true));
}
