//! Invariants of the plan, whatever the node does.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use proptest::prelude::*;

use super::fake_node::{FakeContainer, FakeNode, Fault, LogEvent, Ms};
use super::*;
use kruise_api::container_recreate_request::ContainerRecreateRequestStrategy;

/// Long enough for every request of `any_world` to end.
pub(super) const RUN_LIMIT: Ms = 2_000_000;

pub(super) fn fake_container(
    name: &str,
    stop_takes: Ms,
    start_takes: Ms,
    ready_takes: Ms,
    hook_takes: Option<Ms>,
) -> FakeContainer {
    FakeContainer {
        name: name.into(),
        generation: 0,
        stop_takes,
        start_takes,
        ready_takes,
        hook_takes,
        running_since: Some(0),
        ends_at: None,
        starts_at: None,
        stop_history: Default::default(),
    }
}

/// The condition that the manager sets when the Pod is no longer ready.
pub(super) fn not_ready(since: Timestamp) -> Condition {
    Condition {
        type_: kruise_api::keys::PRE_RECREATE_GRACE.to_owned(),
        status: "True".to_owned(),
        last_transition_time: Time(since),
        message: String::new(),
        reason: String::new(),
        observed_generation: None,
    }
}

pub(super) fn request(uid: &str, containers: &[&str]) -> RecreateRequest {
    RecreateRequest {
        uid: uid.into(),
        name: uid.into(),
        namespace: "ns".into(),
        pod_name: "web".into(),
        pod_uid: Some("pod".into()),
        containers: containers
            .iter()
            .map(|name| RequestedContainer {
                name: (*name).to_owned(),
                recorded_id: Some("set at creation".into()),
            })
            .collect(),
        ..RecreateRequest::default()
    }
}

fn any_fake_container(name: &'static str) -> impl Strategy<Value = FakeContainer> {
    (
        0_u64..40_000,
        0_u64..20_000,
        0_u64..5_000,
        prop::option::of(0_u64..40_000),
    )
        .prop_map(move |(stop, start, ready, hook)| fake_container(name, stop, start, ready, hook))
}

fn any_fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        Just(Fault::Unreachable),
        (1_u64..40_000).prop_map(Fault::Hangs),
        (1_u64..40_000).prop_map(Fault::Fails),
    ]
}

prop_compose! {
    fn any_request(uid: &'static str)(
        names in prop::sample::subsequence(vec!["a", "b", "c"], 1..=3).prop_shuffle(),
        (ordered, force, ignore, recorded) in any::<(bool, bool, bool, bool)>(),
        min_started_seconds in 0_i32..20,
        termination_grace_period_seconds in prop::option::of(0_i64..40),
        deadline_seconds in prop::option::of(3_i64..120),
    ) -> RecreateRequest {
        let mut request = request(uid, &names);
        if !recorded {
            request.containers.iter_mut().for_each(|wanted| wanted.recorded_id = None);
        }
        let strategy = ContainerRecreateRequestStrategy {
            failure_policy: ignore.then_some(FailurePolicy::Ignore),
            ordered_recreate: ordered,
            force_recreate: force,
            termination_grace_period_seconds,
            min_started_seconds,
            ..ContainerRecreateRequestStrategy::default()
        };
        RecreateRequest { strategy, deadline_seconds, ..request }
    }
}

prop_compose! {
    fn any_world()(
        a in any_fake_container("a"), b in any_fake_container("b"), c in any_fake_container("c"),
        one in any_request("one"), two in any_request("two"),
        second_at in 0_u64..60_000,
        crashes in prop::collection::vec(0_u64..120_000, 0..3),
        down in prop::option::of((0_u64..60_000, 0_u64..30_000)),
        crowded in prop::option::of((0_u64..60_000, 0_u64..60_000)),
        faults in prop::collection::vec((0_u64..60_000, 0_u64..30_000, any_fault()), 0..3),
        deletion in prop::option::of(0_u64..60_000),
        foreign_crds in any::<bool>(),
    ) -> FakeNode {
        let mut world = FakeNode::new(vec![a, b, c], vec![(0, one), (second_at, two)]);
        world.crashes = crashes;
        world.foreign_crds = foreign_crds;
        if foreign_crds {
            // OpenKruise's admission fails closed, so its requests always contain the running IDs.
            let containers = world.arrivals.iter_mut().flat_map(|(_, request)| &mut request.containers);
            containers.for_each(|wanted| wanted.recorded_id = Some("set at creation".into()));
        }
        let window = |(from, span)| (from, from + span);
        world.api_down = down.map_or((0, 0), window);
        world.slots_full = crowded.map_or((0, 0), window);
        world.faults = faults.into_iter().map(|(from, span, fault)| (from, from + span, fault)).collect();
        world.deletions = deletion.map(|at| (at, "one".to_owned())).into_iter().collect();
        world
    }
}

pub(super) fn stops<'a>(world: &'a FakeNode, uid: &'a str) -> impl Iterator<Item = (Ms, &'a str, &'a str)> {
    world.log.iter().filter_map(move |(at, event)| match event {
        LogEvent::Stop {
            request,
            container,
            target,
            ..
        } if request == uid => Some((*at, container.as_str(), target.as_str())),
        _ => None,
    })
}

fn find_request<'a>(world: &'a FakeNode, uid: &str) -> Option<&'a RecreateRequest> {
    world.requests.iter().find(|request| request.uid == uid)
}

pub(super) fn writes(world: &FakeNode, uid: &str) -> usize {
    world
        .log
        .iter()
        .filter(|(_, event)| matches!(event, LogEvent::StatusWritten { request, .. } if request == uid))
        .count()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.max(400)))]

    /// Every request ends, whatever is killed, unavailable or deleted. On the way the fake node asserts that nothing
    /// starts at or after a deadline, for a completed request or on a container that does not run; that each container
    /// gets the unused part of its grace period before KILL, however long the stop had to wait or was repeated; that
    /// only the result of a stop is written after completionTime; that equal input gives equal plans; and that acting
    /// on a plan comes to rest.
    #[test]
    fn every_request_ends(mut world in any_world()) {
        prop_assert!(world.run(RUN_LIMIT), "{:#?}", world.log);
        for request in &world.requests {
            for state in &request.status.container_recreate_states {
                prop_assert!(state.phase.is_finished(), "{state:?} at the end");
            }
            prop_assert_eq!(request.status.container_recreate_states.len(), request.containers.len());
        }
    }

    /// A request stops one container of each name and no other, also across restarts of the daemon; without force it
    /// stops only containers that were running at its creation.
    #[test]
    fn a_request_stops_one_container_of_each_name(mut world in any_world()) {
        world.run(RUN_LIMIT);
        for request in &world.requests {
            for wanted in &request.containers {
                let targets: BTreeSet<_> = stops(&world, &request.uid)
                    .filter(|(_, name, _)| *name == wanted.name)
                    .map(|(_, _, target)| target.to_owned())
                    .collect();
                prop_assert!(targets.len() <= 1, "{targets:?}");
                if let (Some(recorded), false) = (&wanted.recorded_id, request.strategy.force_recreate) {
                    prop_assert!(targets.iter().all(|t| t == strip_scheme(recorded)), "{targets:?} {recorded}");
                }
            }
        }
    }

    /// What has started is finished: without a crash of the daemon no hook and no stop of a running container is
    /// cancelled, and the last status of a stop that ran at the deadline is its result.
    #[test]
    fn no_hook_or_stop_is_cancelled(mut world in any_world()) {
        world.crashes.clear();
        prop_assert!(world.run(RUN_LIMIT), "{:#?}", world.log);
        let broken = world.log.iter().find(|(_, event)| matches!(event, LogEvent::Cancelled { needless: false, .. }));
        prop_assert!(broken.is_none(), "{:#?}", world.log);
        let running = [ContainerStep::Hook.at_deadline(), ContainerStep::Stopping.at_deadline()];
        for state in world.requests.iter().flat_map(|request| &request.status.container_recreate_states) {
            prop_assert!(state.message.as_ref().is_none_or(|message| !running.contains(message)), "{state:?} at the end");
        }
    }

    /// Without a crash each hook runs once and each container is stopped once.
    #[test]
    fn hooks_and_stops_run_once_without_a_crash(mut world in any_world()) {
        world.crashes.clear();
        world.faults.clear();
        world.run(RUN_LIMIT);
        let mut done = BTreeSet::new();
        for (_, event) in &world.log {
            let act = match event {
                LogEvent::Hook { request, container, .. } => ("hook", request, container),
                LogEvent::Stop { request, container, .. } => ("stop", request, container),
                _ => continue,
            };
            prop_assert!(done.insert(act), "{act:?} twice");
        }
    }

    /// In an ordered request a container starts only after the ones before it are done; in an unordered one everything
    /// that runs starts at the same moment.
    #[test]
    fn ordered_recreate_is_sequential_and_unordered_parallel(mut world in any_world()) {
        world.crashes.clear();
        world.faults.clear();
        world.api_down = (0, 0);
        world.slots_full = (0, 0);
        world.deletions.clear();
        world.run(RUN_LIMIT);
        for request in &world.requests {
            let mut started: Vec<(Ms, &str)> = Vec::new();
            for (at, event) in &world.log {
                let (uid, container) = match event {
                    LogEvent::Hook { request, container, .. } | LogEvent::Stop { request, container, .. } => (request, container),
                    _ => continue,
                };
                if *uid == request.uid && started.iter().all(|(_, name)| name != container) {
                    started.push((*at, container));
                }
            }
            if !request.strategy.ordered_recreate {
                let mut moments: Vec<_> = started.iter().map(|(at, _)| at).collect();
                moments.dedup();
                prop_assert!(moments.len() <= 1, "{started:?}");
                continue;
            }
            let order: Vec<_> = request.containers.iter().map(|w| w.name.as_str()).collect();
            let mut places: Vec<_> = started.iter().map(|(_, name)| order.iter().position(|n| n == name)).collect();
            prop_assert!(places.is_sorted(), "{started:?} against {order:?}");
            places.dedup();
            for window in started.windows(2) {
                let replaced = world.log.iter().any(|(at, event)| *at <= window[1].0 && matches!(event,
                    LogEvent::StatusWritten { request: uid, status } if *uid == request.uid
                    && status.container_recreate_states.iter().any(|s| s.name == window[0].1 && s.phase.is_finished())));
                let settled_late = window[1].0 > window[0].0;
                prop_assert!(replaced || settled_late, "{window:?}");
            }
        }
    }

    /// A wall clock that is wrong by an hour changes neither the actions, nor their times, nor the messages.
    #[test]
    fn wall_clock_skew_changes_nothing(world in any_world(), hours in prop::sample::select(vec![-1_i64, 1, 24])) {
        let mut right = world.clone();
        let mut wrong = world;
        wrong.skew = SignedDuration::from_hours(hours);
        right.run(RUN_LIMIT);
        wrong.run(RUN_LIMIT);
        prop_assert_eq!(&right.log, &wrong.log);
    }

    /// The next request starts at the moment at which the previous one ended, was deleted or expired, and everything
    /// that it had started has ended. (An ordered one may first have to wait for a container that kubelet has not
    /// started yet.)
    #[test]
    fn next_recreate_request_begins_when_the_first_ends(mut world in any_world()) {
        world.crashes.clear();
        world.faults.clear();
        world.api_down = (0, 0);
        world.slots_full = (0, 0);
        for (_, request) in &mut world.arrivals {
            request.strategy.force_recreate = true;
        }
        let deleted = world.deletions.first().map(|(at, _)| *at);
        world.run(RUN_LIMIT);
        let Some((first_stop, ..)) = stops(&world, "two").next() else { return Ok(()) };
        let started_at = world.log.iter().find_map(|(at, event)| match event {
            LogEvent::Hook { request, .. } if request == "two" => Some(*at),
            _ => None,
        }).unwrap_or(first_stop).min(first_stop);
        let ended = world.log.iter().find_map(|(at, event)| match event {
            LogEvent::StatusWritten { request, status } if request == "one" && status.completion_time.is_some() => Some(*at),
            _ => None,
        });
        let over = ended.or(deleted).expect("the first has ended, or the second would not have started");
        let stopped = world.log.iter().rev().find_map(|(at, event)| match event {
            LogEvent::StopEnded { request } if request == "one" => Some(*at),
            _ => None,
        });
        let over = over.max(stopped.unwrap_or_default());
        let two = find_request(&world, "two").unwrap();
        let made = two.created_at.duration_since(super::fake_node::start_time()).as_millis() as Ms;
        prop_assert!(started_at >= over || made < over, "started at {started_at}, the first ended at {over}");
        if !two.strategy.ordered_recreate {
            prop_assert_eq!(started_at, over.max(made));
        }
    }
}

fn any_time() -> impl Strategy<Value = Timestamp> {
    let (first, last) = (Timestamp::MIN.as_second(), Timestamp::MAX.as_second());
    let near = super::fake_node::start_time().as_second();
    prop_oneof![
        Just(Timestamp::MIN),
        Just(Timestamp::MAX),
        (first..=last).prop_map(|second| Timestamp::from_second(second).unwrap()),
        (near - 100..near + 100).prop_map(|second| Timestamp::from_second(second).unwrap()),
    ]
}

fn any_number() -> impl Strategy<Value = i64> {
    prop_oneof![
        Just(i64::MIN),
        Just(i64::MAX),
        Just(0),
        Just(-1),
        any::<i64>(),
        0..100_i64
    ]
}

prop_compose! {
    /// An observation in which every number and timestamp of an object may have any value of its type.
    fn any_numbers()(
        mut world in any_world(),
        numbers in prop::collection::vec(any_number(), 4),
        times in prop::collection::vec(any_time(), 4),
        (unready, running, min_started, restarts, code) in any::<(bool, bool, i32, i32, i32)>(),
        back_off in "[0-9]{1,25}[hms]{0,2}",
    ) -> Observed {
        world.now = 50_000;
        world.arrivals.truncate(1);
        let mut request = world.arrivals[0].1.clone();
        request.created_at = times[0];
        request.strategy.termination_grace_period_seconds = Some(numbers[0]);
        request.strategy.unready_grace_period_seconds = unready.then_some(numbers[1]);
        request.strategy.min_started_seconds = min_started;
        request.deadline_seconds = Some(numbers[2]);
        request.status.conditions = vec![not_ready(times[1])];
        world.requests = vec![request];
        world.containers.iter_mut().filter(|_| !running).for_each(|sim| sim.running_since = None);
        let mut seen = world.observe();
        if let PodObservation::Present(pod) = &mut seen.pod {
            let pod = Arc::make_mut(pod);
            pod.grace_period_seconds = numbers[3];
            for status in pod.containers.iter_mut().filter_map(|container| container.status.as_mut()) {
                status.restart_count = restarts;
                status.started_at = Some(times[2]);
                status.last_termination = Some(crate::pods::Termination { code, started_at: Some(times[2]), finished_at: Some(times[3]) });
                status.waiting = Some(("CrashLoopBackOff".into(), format!("back-off {back_off} restarting")));
            }
        }
        seen
    }
}

proptest! {
    /// Users choose the numbers and timestamps of objects.
    #[test]
    fn extreme_numbers_and_times_do_not_overflow(
        seen in any_numbers(), api in any_time(), wall in any_time(), mono in 0..u64::from(u32::MAX),
    ) {
        let now = Clocks { api, wall, mono: Duration::from_secs(mono) };
        let plan = plan(&seen, now);
        for begin in &plan.stops {
            prop_assert!(begin.termination_grace(Duration::ZERO) <= Duration::from_secs(366 * 86_400));
        }
        let messages: Vec<String> = plan.progress.values().flat_map(|view| &view.containers).map(|(_, step)| step.to_string()).collect();
        prop_assert!(plan.progress.is_empty() || !messages.is_empty());
    }
}
