use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::super::conditions::{RuntimeState, next_conditions};
use super::*;
use kruise_api::node_image::{MAX_CONDITION_MESSAGE_CHARS, MAX_CONDITIONS, NO_RUNTIME_REASON, RUNTIME_READY};

pub(super) fn ready() -> RuntimeState {
    RuntimeState::Ready("containerd 2.1 answers at /run/c.sock".to_owned())
}

pub(super) fn not_ready(why: &str) -> RuntimeState {
    RuntimeState::NotReady(why.to_owned())
}

fn condition(status: &str, reason: &str, message: &str, since: Timestamp) -> Condition {
    Condition {
        type_: RUNTIME_READY.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: Time(since),
        observed_generation: None,
    }
}

#[test]
fn only_a_missing_runtime_adds_a_condition() {
    assert_eq!(next_conditions(&[], &RuntimeState::Unknown, at(0)), []);
    assert_eq!(next_conditions(&[], &ready(), at(0)), []);
    let half_a_second = Timestamp::from_millisecond(START * 1000 + 500).unwrap();
    assert_eq!(
        next_conditions(&[], &not_ready("no socket"), half_a_second),
        [condition("False", NO_RUNTIME_REASON, "no socket", at(0))]
    );
}

#[test]
fn condition_changes_with_its_status_or_reason() {
    let down = [condition("False", NO_RUNTIME_REASON, "no socket", at(0))];
    for runtime in [not_ready("no answer"), RuntimeState::Unknown] {
        assert_eq!(next_conditions(&down, &runtime, at(9)), down, "{runtime:?}");
    }
    let up = next_conditions(&down, &ready(), at(9));
    let message = "containerd 2.1 answers at /run/c.sock";
    assert_eq!(up, [condition("True", RUNTIME_READY, message, at(9))]);
    let restarted = RuntimeState::Ready("containerd 2.2 answers at /run/c.sock".to_owned());
    for runtime in [restarted, RuntimeState::Unknown] {
        assert_eq!(next_conditions(&up, &runtime, at(10)), up, "{runtime:?}");
    }
    assert_eq!(
        next_conditions(&up, &not_ready("no answer"), at(11)),
        [condition("False", NO_RUNTIME_REASON, "no answer", at(11))]
    );
    let other_reason = [condition("False", "RuntimeMissing", "no socket", at(0))];
    assert_eq!(
        next_conditions(&other_reason, &not_ready("no answer"), at(9)),
        [condition("False", NO_RUNTIME_REASON, "no answer", at(0))],
        "the status has not changed"
    );
}

#[test]
fn conditions_are_within_the_maxima_of_the_schema() {
    let other = |n: usize| Condition {
        type_: format!("Other{n}"),
        ..condition("True", "Other", "", at(0))
    };
    let stored: Vec<_> = (0..2).map(other).collect();
    let next = next_conditions(&stored, &not_ready(&"é".repeat(5000)), at(0));
    assert_eq!((next.len(), &next[..2]), (3, &stored[..]));
    assert_eq!(next[2].message, "é".repeat(MAX_CONDITION_MESSAGE_CHARS));
    let stored: Vec<_> = (0..MAX_CONDITIONS).map(other).collect();
    let next = next_conditions(&stored, &not_ready("no socket"), at(0));
    assert_eq!(next.len(), MAX_CONDITIONS);
    assert_eq!(next.last().unwrap().type_, RUNTIME_READY);
}
