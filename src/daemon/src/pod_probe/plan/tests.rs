#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn at(seconds: u64) -> Now {
    let wall = Timestamp::from_millisecond(1_000_700 + 1000 * i64::try_from(seconds).unwrap()).unwrap();
    Now {
        mono: Duration::from_secs(seconds),
        wall,
        node: wall,
    }
}

fn key(name: &str) -> ProbeKey {
    ProbeKey {
        pod: Key::namespaced("n", "p"),
        uid: "u".to_owned(),
        name: format!("m#{name}"),
    }
}

fn spec() -> ProbeSpec {
    ProbeSpec {
        container: "c".to_owned(),
        handler: Handler::Tcp { port: 1 },
        initial_delay: SECOND,
        period: SECOND,
        timeout: SECOND,
        success_threshold: 1,
        failure_threshold: 1,
    }
}

/// A board that has seen its first, empty, spec: what comes later is not spread.
fn board(probes: impl IntoIterator<Item = (ProbeKey, ProbeSpec)>) -> ProbeBoard {
    let mut board = ProbeBoard::default();
    board.sync(BTreeMap::new(), &NodePodProbeStatus::default(), at(0));
    board.sync(
        probes.into_iter().collect(),
        &NodePodProbeStatus::default(),
        at(0),
    );
    board
}

/// A container that was started at second `started`.
fn container(id: &str, running: bool, started: u64) -> Option<ObservedContainer> {
    Some(ObservedContainer {
        id: format!("containerd://{id}"),
        running,
        starting: false,
        // As kubelet: only of a container that runs.
        started_at: running.then(|| at(started).node),
    })
}

fn observe(board: &mut ProbeBoard, now: u64, seen: &Option<ObservedContainer>) -> Vec<Transition> {
    let container = |name: &str| seen.clone().filter(|_| name == "c");
    let keys = board.keys().into_iter();
    keys.filter_map(|key| board.observe(&key, at(now), container))
        .collect()
}

/// Runs the due probes, which all end with `outcome`.
fn run(board: &mut ProbeBoard, now: u64, outcome: &Outcome) -> Vec<(String, ProbeState)> {
    let starts = board.start_due(at(now));
    let ended = starts
        .into_iter()
        .filter_map(|start| board.on_ended(&start.key, start.run, outcome.clone(), at(now)));
    ended
        .map(|transition| (transition.key.name, transition.state))
        .collect()
}

/// State, message and the second of the transition of the only probe.
fn only_state(board: &ProbeBoard) -> Option<(ProbeState, String, i64)> {
    let status = board.status();
    let state = status.pod_probe_statuses.first()?.probe_states.first()?.clone();
    let changed = state
        .last_transition_time
        .map_or(0, |time| time.0.as_second() - 1_000);
    Some((state.state, state.message, changed))
}

fn success() -> Outcome {
    Outcome::Success("ok".to_owned())
}

fn failure() -> Outcome {
    Outcome::Failure("no".to_owned())
}

#[test]
fn state_changes_after_as_many_equal_results_as_the_threshold() {
    let spec = ProbeSpec {
        success_threshold: 2,
        failure_threshold: 3,
        ..spec()
    };
    let mut board = board([(key("a"), spec)]);
    assert!(observe(&mut board, 5, &container("1", true, 0)).is_empty());
    let outcomes = [
        success(),
        failure(),
        success(),
        success(),
        failure(),
        failure(),
        failure(),
        failure(),
    ];
    let changes: Vec<usize> = (5..)
        .zip(outcomes.iter().enumerate())
        .filter_map(|(now, (index, outcome))| (!run(&mut board, now, outcome).is_empty()).then_some(index))
        .collect();
    assert_eq!(changes, [3, 6]);
    assert_eq!(
        only_state(&board),
        Some((ProbeState::Failed, "no".to_owned(), 11))
    );
}

#[test]
fn first_probe_waits_for_the_initial_delay() {
    let spec = ProbeSpec {
        initial_delay: 10 * SECOND,
        ..spec()
    };
    let mut board = board([(key("a"), spec)]);
    observe(&mut board, 5, &container("1", true, 3));
    assert_eq!(board.next_due(at(0)), Some(13 * SECOND));
    assert!(board.start_due(at(12)).is_empty());
    assert_eq!(board.start_due(at(13)).len(), 1);
    // It is running, and does not overlap itself.
    assert_eq!((board.next_due(at(0)), board.start_due(at(20)).len()), (None, 0));
}

/// Kubelet has the start of a container by the node's clock, which may differ from the API server's.
#[test]
fn initial_delay_is_counted_by_the_clock_of_the_node() {
    let spec = ProbeSpec {
        initial_delay: 100 * SECOND,
        ..spec()
    };
    for skew in [-60, 0, 60].map(SignedDuration::from_secs) {
        let mut board = board([(key("a"), spec.clone())]);
        let now = Now {
            node: at(5).node + skew,
            ..at(5)
        };
        let seen = container("1", true, 3).map(|one| ObservedContainer {
            started_at: Some(at(3).node + skew),
            ..one
        });
        assert_eq!(board.observe(&key("a"), now, |_| seen.clone()), None);
        assert_eq!(board.next_due(now), Some(103 * SECOND), "{skew:?}");
    }
}

#[test]
fn stopped_container_is_failed_at_once_and_not_probed() {
    let mut board = board([(
        key("a"),
        ProbeSpec {
            failure_threshold: 5,
            ..spec()
        },
    )]);
    observe(&mut board, 5, &container("1", true, 0));
    run(&mut board, 5, &success());
    let start = board.start_due(at(6)).remove(0);
    let reached = observe(&mut board, 7, &container("1", false, 0));
    assert_eq!(reached.len(), 1);
    let message = "Container(c) is Non-running".to_owned();
    assert_eq!(only_state(&board), Some((ProbeState::Failed, message.clone(), 7)));
    // Whatever listened on its port.
    assert!(!board.is_in_progress(&start.key, start.run));
    assert_eq!(board.on_ended(&start.key, start.run, success(), at(8)), None);
    assert!(board.start_due(at(9)).is_empty() && board.next_due(at(0)).is_none());
    assert!(
        observe(&mut board, 9, &container("1", false, 0)).is_empty(),
        "one event for a transition"
    );
    assert_eq!(only_state(&board), Some((ProbeState::Failed, message, 7)));
}

#[test]
fn restarted_container_begins_with_unknown() {
    let mut board = board([(key("a"), spec())]);
    observe(&mut board, 5, &container("1", true, 0));
    assert_eq!(only_state(&board), None, "no result, no state");
    run(&mut board, 5, &success());
    assert!(
        observe(&mut board, 8, &container("2", true, 7)).is_empty(),
        "Unknown has no event"
    );
    assert_eq!(only_state(&board), Some((ProbeState::Unknown, String::new(), 8)));
    assert_eq!(
        run(&mut board, 8, &success()),
        [("m#a".to_owned(), ProbeState::Succeeded)]
    );
}

#[test]
fn result_of_an_earlier_daemon_stays_unless_the_container_restarted() {
    let mut first = board([(key("a"), spec())]);
    observe(&mut first, 5, &container("1", true, 0));
    run(&mut first, 5, &success());
    // Whatever the clocks say.
    for (id, started, state) in [("1", 100, ProbeState::Succeeded), ("2", 0, ProbeState::Unknown)] {
        let mut second = ProbeBoard::default();
        second.sync([(key("a"), spec())].into(), &first.status(), at(20));
        observe(&mut second, 20, &container(id, true, started));
        assert_eq!(only_state(&second).map(|(state, ..)| state), Some(state));
    }
    // OpenKruise's results do not say of which container they are.
    let mut stored = first.status();
    stored.pod_probe_statuses[0].probe_states[0].container_id = None;
    for (started, state) in [(0, ProbeState::Succeeded), (16, ProbeState::Unknown)] {
        let mut second = ProbeBoard::default();
        second.sync([(key("a"), spec())].into(), &stored, at(20));
        observe(&mut second, 20, &container("1", true, started));
        assert_eq!(only_state(&second).map(|(state, ..)| state), Some(state));
    }
}

#[test]
fn probe_that_comes_back_has_no_result() {
    let mut board = board([(key("a"), spec())]);
    observe(&mut board, 5, &container("1", true, 0));
    run(&mut board, 5, &success());
    let stored = board.status();
    board.sync(BTreeMap::new(), &stored, at(6));
    board.sync([(key("a"), spec())].into(), &stored, at(7));
    assert_eq!(only_state(&board), None);
}

#[test]
fn changed_initial_delay_counts_from_the_start_of_the_container() {
    let delayed = |seconds: u32| ProbeSpec {
        initial_delay: seconds * SECOND,
        ..spec()
    };
    let mut board = board([(key("a"), delayed(36_000))]);
    observe(&mut board, 5, &container("1", true, 0));
    for (seconds, due) in [(20, 20), (100, 100), (5, 6)] {
        let specs = [(key("a"), delayed(seconds))].into();
        board.sync(specs, &NodePodProbeStatus::default(), at(6));
        observe(&mut board, 6, &container("1", true, 0));
        assert_eq!(board.next_due(at(0)), Some(due * SECOND), "{seconds}");
    }
    assert_eq!(run(&mut board, 6, &success()).len(), 1);
}

#[test]
fn restarted_daemon_repeats_nothing_about_a_stopped_container() {
    let mut first = board([(key("a"), spec())]);
    observe(&mut first, 5, &container("1", false, 0));
    let mut second = ProbeBoard::default();
    second.sync([(key("a"), spec())].into(), &first.status(), at(10));
    assert!(
        observe(&mut second, 10, &container("1", false, 0)).is_empty(),
        "no event"
    );
    assert_eq!(second.status(), first.status());
}

fn liveness_key() -> ProbeKey {
    ProbeKey {
        name: "EnhancedLivenessProbe#c".to_owned(),
        ..key("")
    }
}

/// State and container of the only probe.
fn state_and_container(board: &ProbeBoard) -> Option<(ProbeState, String)> {
    let status = board.status();
    let state = status.pod_probe_statuses.first()?.probe_states.first()?.clone();
    Some((state.state, state.container_id.unwrap_or_default()))
}

#[test]
fn liveness_probe_begins_after_the_startup_probe() {
    let slow = ProbeSpec {
        failure_threshold: 2,
        ..spec()
    };
    let mut board = board([(liveness_key(), slow)]);
    let starting = container("1", true, 0).map(|one| ObservedContainer {
        starting: true,
        ..one
    });
    observe(&mut board, 5, &starting);
    assert!(board.start_due(at(6)).is_empty() && board.next_due(at(0)).is_none());
    observe(&mut board, 60, &container("1", true, 0));
    assert!(
        run(&mut board, 60, &failure()).is_empty(),
        "no earlier failure counts"
    );
    assert_eq!(run(&mut board, 61, &failure()).len(), 1);
    let failed = (ProbeState::Failed, "containerd://1".to_owned());
    assert_eq!(state_and_container(&board), Some(failed));
}

#[test]
fn failure_of_a_liveness_probe_belongs_to_one_container() {
    let mut first = board([(liveness_key(), spec())]);
    observe(&mut first, 5, &container("1", true, 0));
    run(&mut first, 5, &failure());
    let failed = (ProbeState::Failed, "containerd://1".to_owned());
    // Its end is none of its failures.
    assert!(observe(&mut first, 6, &container("1", false, 0)).is_empty());
    assert_eq!(state_and_container(&first), Some(failed.clone()));
    // A restarted daemon continues with the result of the same container only, whatever the clocks say.
    for (id, started, expected) in [
        ("1", 100, failed),
        ("2", 0, (ProbeState::Unknown, "containerd://2".to_owned())),
    ] {
        let mut second = ProbeBoard::default();
        second.sync([(liveness_key(), spec())].into(), &first.status(), at(20));
        observe(&mut second, 20, &container(id, true, started));
        assert_eq!(state_and_container(&second), Some(expected));
    }
    observe(&mut first, 8, &container("2", true, 7));
    let unknown = (ProbeState::Unknown, "containerd://2".to_owned());
    assert_eq!(state_and_container(&first), Some(unknown));
    run(&mut first, 8, &failure());
    let failed = (ProbeState::Failed, "containerd://2".to_owned());
    assert_eq!(state_and_container(&first), Some(failed));
    // A CRD of an older release drops the container.
    let mut stored = first.status();
    stored.pod_probe_statuses[0].probe_states[0].container_id = None;
    assert_eq!(status_change(&stored, &first.status()), None);
}

#[test]
fn changed_handler_begins_with_unknown_and_changed_numbers_apply_at_once() {
    let mut board = board([(
        key("a"),
        ProbeSpec {
            period: 100 * SECOND,
            ..spec()
        },
    )]);
    observe(&mut board, 5, &container("1", true, 0));
    run(&mut board, 5, &success());
    assert_eq!(board.next_due(at(0)), Some(105 * SECOND));
    board.sync([(key("a"), spec())].into(), &NodePodProbeStatus::default(), at(6));
    assert_eq!(
        only_state(&board).map(|(state, ..)| state),
        Some(ProbeState::Succeeded)
    );
    assert_eq!(board.next_due(at(0)), Some(6 * SECOND));
    let start = board.start_due(at(6)).remove(0);
    let changed = ProbeSpec {
        handler: Handler::Tcp { port: 2 },
        ..spec()
    };
    board.sync(
        [(key("a"), changed)].into(),
        &NodePodProbeStatus::default(),
        at(7),
    );
    assert_eq!(
        board.on_ended(&start.key, start.run, success(), at(7)),
        None,
        "of the old handler"
    );
    observe(&mut board, 7, &container("1", true, 0));
    assert_eq!(
        only_state(&board).map(|(state, ..)| state),
        Some(ProbeState::Unknown)
    );
    assert_eq!(run(&mut board, 7, &success()).len(), 1);
    board.sync(BTreeMap::new(), &NodePodProbeStatus::default(), at(8));
    assert_eq!(board.status(), NodePodProbeStatus::default());
}

#[test]
fn probe_that_cannot_be_run_says_so_and_changes_no_state() {
    let mut board = board([(key("a"), spec())]);
    observe(&mut board, 5, &container("1", true, 0));
    let error = |why: &str| Outcome::Error(why.to_owned());
    assert!(run(&mut board, 5, &error("no shell")).is_empty());
    assert_eq!(
        only_state(&board),
        Some((ProbeState::Unknown, "no shell".to_owned(), 5))
    );
    run(&mut board, 6, &success());
    run(&mut board, 7, &error("no shell"));
    assert_eq!(
        only_state(&board),
        Some((ProbeState::Succeeded, "ok".to_owned(), 6))
    );
}

#[test]
fn failures_before_and_after_an_unknown_result_do_not_add_up() {
    let spec = ProbeSpec {
        failure_threshold: 2,
        ..spec()
    };
    let mut board = board([(key("a"), spec)]);
    observe(&mut board, 5, &container("1", true, 0));
    run(&mut board, 5, &success());
    let unknown = Outcome::Unknown("too long".to_owned());
    for (now, outcome) in (6..).zip([failure(), unknown, failure()]) {
        assert!(run(&mut board, now, &outcome).is_empty(), "{outcome:?}");
    }
    // The state stays, and the reason is shown.
    let kept = (ProbeState::Succeeded, "too long".to_owned(), 5);
    assert_eq!(only_state(&board), Some(kept));
    let failed = ("m#a".to_owned(), ProbeState::Failed);
    assert_eq!(run(&mut board, 9, &failure()), [failed]);
}

#[test]
fn known_probes_of_a_starting_daemon_are_spread_over_their_period() {
    let spec = ProbeSpec {
        period: 1000 * SECOND,
        ..spec()
    };
    let probes = (0..100).map(|index| (key(&index.to_string()), spec.clone()));
    let probes: BTreeMap<ProbeKey, ProbeSpec> = probes.collect();
    let mut first = ProbeBoard::default();
    first.sync(probes.clone(), &NodePodProbeStatus::default(), at(0));
    observe(&mut first, 5, &container("1", true, 0));
    while !run(&mut first, 5, &success()).is_empty() {}
    assert_eq!(
        first.status().pod_probe_statuses[0].probe_states.len(),
        100,
        "no state, no delay"
    );
    let mut board = ProbeBoard::default();
    board.sync(probes, &first.status(), at(10));
    observe(&mut board, 10, &container("1", true, 0));
    let mut started_at = |second| {
        let starts = board.start_due(at(second));
        for start in &starts {
            board.on_ended(&start.key, start.run, success(), at(second));
        }
        starts.len()
    };
    // Of the longest period in a minute.
    let (early, first_half, second_half) = (started_at(10), started_at(40), started_at(70));
    assert!(
        early < 10 && first_half > 20 && second_half > 20,
        "{early} {first_half} {second_half}"
    );
}

#[test]
fn new_container_is_probed_before_the_period_has_passed() {
    let hourly = ProbeSpec {
        period: 3600 * SECOND,
        ..spec()
    };
    let mut first = board([(key("a"), hourly.clone())]);
    observe(&mut first, 5, &container("1", true, 0));
    run(&mut first, 5, &success());
    // Whether the daemon saw the restart, or begins after it.
    let mut second = ProbeBoard::default();
    second.sync([(key("a"), hourly)].into(), &first.status(), at(20));
    for mut board in [first, second] {
        observe(&mut board, 20, &container("2", true, 20));
        assert!(board.start_due(at(20)).is_empty(), "its initial delay");
        assert_eq!(run(&mut board, 21, &success()).len(), 1);
    }
}

#[test]
fn run_that_could_not_be_started_does_not_block_its_probe() {
    let mut board = board([(key("a"), spec())]);
    let running = container("a", true, 0);
    observe(&mut board, 0, &running);
    // The Pod went between the plan and the start, so this run has no end.
    assert_eq!(board.start_due(at(1)).len(), 1);
    observe(&mut board, 1, &None);
    observe(&mut board, 5, &running);
    assert_eq!(board.start_due(at(5)).len(), 1);
}

/// Probes of this namespace that ask for this period, in seconds.
fn probes_of(namespace: &str, number: usize, period: u32) -> Vec<(ProbeKey, ProbeSpec)> {
    let probe = |index| {
        let mut key = key(&format!("p{index}"));
        key.pod = Key::namespaced(namespace, "p");
        let period = period * SECOND;
        (key, ProbeSpec { period, ..spec() })
    };
    (0..number).map(probe).collect()
}

#[test]
fn one_namespace_leaves_slots_for_others() {
    let mut alone = board(probes_of("greedy", 200, 1));
    observe(&mut alone, 0, &container("a", true, 0));
    assert_eq!(alone.start_due(at(1)).len(), MAX_IN_PROGRESS_OF_NAMESPACE);
    assert_eq!(alone.waiting(), 200 - MAX_IN_PROGRESS_OF_NAMESPACE);
    // Nothing is due at another time, so that the loop waits for an end.
    assert_eq!(alone.next_due(at(1)), None);

    let probes = [
        probes_of("greedy", 200, 1),
        probes_of("other", 10, 30),
        probes_of("third", 10, 30),
    ];
    let mut board = board(probes.concat());
    observe(&mut board, 0, &container("a", true, 0));
    let starts = board.start_due(at(1));
    let greedy = starts.iter().filter(|start| start.key.namespace() == "greedy");
    assert_eq!(
        (greedy.count(), starts.len()),
        (MAX_IN_PROGRESS - 20, MAX_IN_PROGRESS)
    );
    for start in starts.iter().filter(|start| start.key.namespace() != "greedy") {
        board.on_ended(&start.key, start.run, success(), at(2));
    }
    let rest = board.start_due(at(2));
    assert_eq!(rest.len(), MAX_IN_PROGRESS_OF_NAMESPACE - (MAX_IN_PROGRESS - 20));
    assert!(board.next_due(at(2)).is_some_and(|due| due > 2 * SECOND));
}

/// Two namespaces of one tenant, whose probes take their slots again at each end, delay others until one end.
#[test]
fn slots_that_become_free_go_to_namespaces_that_have_none() {
    let mut board = board([probes_of("greedy-1", 100, 1), probes_of("greedy-2", 100, 1)].concat());
    observe(&mut board, 0, &container("a", true, 0));
    let hanging = board.start_due(at(1));
    assert_eq!(hanging.len(), MAX_IN_PROGRESS);
    let mut all: BTreeMap<_, _> = board
        .probes
        .iter()
        .map(|(key, probe)| (key.clone(), probe.spec.clone()))
        .collect();
    all.extend(probes_of("victim", 3, 1));
    board.sync(all, &NodePodProbeStatus::default(), at(10));
    observe(&mut board, 10, &container("a", true, 0));
    assert!(board.start_due(at(10)).is_empty());
    for start in hanging.iter().take(5) {
        board.on_ended(&start.key, start.run, failure(), at(60));
    }
    let next = board.start_due(at(60));
    let victims = next
        .iter()
        .filter(|start| start.key.namespace() == "victim")
        .count();
    assert_eq!((victims, next.len()), (3, 5));
}

#[test]
fn probe_that_waits_longest_is_next() {
    let mut board = board(probes_of("n", 3 * MAX_IN_PROGRESS_OF_NAMESPACE, 1));
    observe(&mut board, 0, &container("a", true, 0));
    let mut runs: BTreeMap<ProbeKey, u32> = BTreeMap::new();
    for second in 1..=30 {
        for start in board.start_due(at(second)) {
            *runs.entry(start.key.clone()).or_default() += 1;
            board.on_ended(&start.key, start.run, success(), at(second));
        }
    }
    assert_eq!(runs.len(), 3 * MAX_IN_PROGRESS_OF_NAMESPACE);
    assert!(runs.values().all(|runs| *runs == 10), "{runs:?}");
}

/// As after a pause of the machine: two failures in a row within a moment would say nothing.
#[test]
fn missed_probe_runs_once() {
    let slow = ProbeSpec {
        period: 10 * SECOND,
        ..spec()
    };
    let mut board = board([(key("a"), slow)]);
    observe(&mut board, 0, &container("a", true, 0));
    run(&mut board, 1, &success());
    for (second, starts) in [(25, 1), (25, 0), (34, 0), (35, 1), (46, 1), (54, 0), (55, 1)] {
        let due = board.start_due(at(second));
        assert_eq!(due.len(), starts, "at {second}");
        for start in due {
            board.on_ended(&start.key, start.run, success(), at(second));
        }
    }
}

#[test]
fn messages_are_bounded_for_each_pod() {
    let pod = |uid: usize, name: usize| ProbeKey {
        uid: format!("u{uid:03}"),
        ..key(&name.to_string())
    };
    // Control characters take six bytes each.
    let print = |board: &mut ProbeBoard, message: &str| {
        observe(board, 5, &container("1", true, 0));
        run(board, 5, &Outcome::Success(message.repeat(5000)));
        board.status().pod_probe_statuses
    };
    let probes = (0..200).flat_map(|uid| (0..64).map(move |name| (pod(uid, name), spec())));
    let status = print(&mut board(probes), "\u{1}");
    let messages = status
        .iter()
        .flat_map(|pod| &pod.probe_states)
        .map(|state| state.message.len() * 6);
    assert!(messages.sum::<usize>() <= MAX_NODE_MESSAGE_BYTES);
    let few = print(
        &mut board([(pod(0, 0), spec()), (pod(1, 0), spec()), (pod(1, 1), spec())]),
        "a",
    );
    let chars: Vec<usize> = few
        .iter()
        .flat_map(|pod| &pod.probe_states)
        .map(|state| state.message.len())
        .collect();
    assert_eq!(chars, [MAX_MESSAGE_CHARS; 3]);
    for (text, max, expected) in [
        ("aé<b", 3, "aé"),
        ("aé<b", 10, "aé<b"),
        ("aé<b", 9, "aé<"),
        ("", 0, ""),
    ] {
        assert_eq!(within_bytes(text, max), expected);
    }
}

/// OpenKruise's daemon lists results in another order.
#[test]
fn order_of_results_is_no_change() {
    let mut board = board(["a", "b"].map(|name| (key(name), spec())));
    observe(&mut board, 5, &container("1", true, 0));
    run(&mut board, 5, &success());
    let status = board.status();
    let mut other = status.clone();
    other.pod_probe_statuses[0].probe_states.reverse();
    assert_eq!(status_change(&other, &status), None);
    other.pod_probe_statuses[0].probe_states[0].message = "else".to_owned();
    assert_eq!(status_change(&other, &status), Some(StatusChange::Messages));
    other.pod_probe_statuses[0].probe_states[0].state = ProbeState::Failed;
    assert_eq!(status_change(&other, &status), Some(StatusChange::States));
}

/// What can happen to a probe.
#[derive(Clone, Debug)]
enum Step {
    Seconds(u64),
    Container(Option<(u8, bool)>),
    Probe(u8),
    Spec(u16),
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (1..5_u64).prop_map(Step::Seconds),
        proptest::option::of((0..3_u8, any::<bool>())).prop_map(Step::Container),
        (0..4_u8).prop_map(Step::Probe),
        (1..3_u16).prop_map(Step::Spec),
        Just(Step::Restart),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    /// In any history: an event is a change of the state; Succeeded is only said of a container that runs; a change of
    /// the state has a new time, anything else has not; an unchanged status stays equal, also once it is stored.
    #[test]
    fn states_follow_their_containers(steps in steps()) {
        let (mut board, mut now) = (board([(key("a"), spec())]), 5);
        let (mut seen, mut spec_now) = (None, spec());
        let mut before = only_state(&board);
        for step in steps {
            let mut transitions = Vec::new();
            match step {
                Step::Seconds(seconds) => now += seconds,
                Step::Container(container_) => {
                    seen = container_.and_then(|(id, running)| container(&id.to_string(), running, now));
                }
                Step::Probe(outcome) => {
                    let outcomes = [success(), failure(), Outcome::Error("e".to_owned()), Outcome::Unknown("u".to_owned())];
                    let outcome = outcomes[usize::from(outcome)].clone();
                    transitions.extend(run(&mut board, now, &outcome).into_iter().map(|(_, state)| state));
                }
                Step::Spec(port) => {
                    spec_now.handler = Handler::Tcp { port };
                    board.sync([(key("a"), spec_now.clone())].into(), &NodePodProbeStatus::default(), at(now));
                }
                Step::Restart => {
                    let stored = board.status();
                    board = ProbeBoard::default();
                    board.sync([(key("a"), spec_now.clone())].into(), &stored, at(now));
                    prop_assert_eq!(board.status(), stored, "a restart alone changes nothing");
                }
            }
            transitions.extend(observe(&mut board, now, &seen).into_iter().map(|reached| reached.state));
            let status = board.status();
            let stored = serde_json::to_string(&status).unwrap();
            prop_assert_eq!(serde_json::from_str::<NodePodProbeStatus>(&stored).unwrap(), status, "it would be written again");
            let after = only_state(&board);
            prop_assert!(observe(&mut board, now, &seen).is_empty());
            prop_assert_eq!(&only_state(&board), &after);
            if let (Some((old, ..)), Some((new, _, changed))) = (&before, &after) {
                prop_assert!(old == new || *changed == i64::try_from(now).unwrap(), "{old:?} to {new:?}");
            }
            let old = before.as_ref().map(|(state, ..)| state.clone());
            let new = after.as_ref().map(|(state, ..)| state.clone());
            match transitions.last() {
                Some(last) => prop_assert_eq!(Some(last), new.as_ref().filter(|new| **new != ProbeState::Unknown).or(Some(last))),
                None => prop_assert!(old == new || new == Some(ProbeState::Unknown), "{old:?} to {new:?} without an event"),
            }
            if seen.as_ref().is_some_and(|container| !container.running) {
                prop_assert_eq!(new, Some(ProbeState::Failed));
            }
            before = after;
        }
    }
}
