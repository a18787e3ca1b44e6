//! Which barrier is to be lifted next, and when.

use std::time::{Duration, Instant};

use crate::view::PodView;

/// Nobody watches ConfigMaps, so those of Pods that are not complete are looked at again after so long.
pub const LOOK_AGAIN: Duration = Duration::from_secs(300);

/// What is to be done for a Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing: it has no barriers, or all are lifted, or it ends.
    Nothing,
    /// The containers of this priority may start, and those of a higher one.
    Lift {
        /// The priority.
        priority: i64,
        /// Whether that is all: no other container waits.
        last: bool,
    },
    /// All run: there is nothing to lift.
    Complete,
}

/// The next step: of the containers that are not ready, those of the highest priority may start.
#[must_use]
pub fn step(pod: &PodView) -> Step {
    if !pod.active() || pod.barriers.is_empty() {
        return Step::Nothing;
    }
    let ready = |name: &str| pod.containers.iter().any(|c| c.name == name && c.ready);
    let waiting = pod.barriers.iter().filter(|(name, _)| !ready(name));
    let waiting = waiting.map(|(_, priority)| *priority);
    match (waiting.clone().max(), waiting.min()) {
        (Some(priority), lowest) => Step::Lift {
            priority,
            last: lowest == Some(priority),
        },
        _ => Step::Complete,
    }
}

/// What was done for a Pod that is not complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lifted {
    /// Of the Pod.
    pub uid: String,
    /// The lowest that may start.
    pub priority: i64,
    /// When it was done.
    pub at: Instant,
}

/// What is to be done now, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Have the containers of this priority start, and those of a higher one.
    pub lift: Option<i64>,
    /// Say that all may start.
    pub complete: bool,
    /// When to look again though nothing happens; never where there is nothing to wait for.
    pub again: Option<Duration>,
}

/// The next step, where it is not known to be done. What was done long ago may have been undone.
#[must_use]
pub fn turn(pod: &PodView, done: Option<&Lifted>, now: Instant) -> Turn {
    let (lift, complete, again) = match step(pod) {
        Step::Nothing => (None, false, None),
        Step::Complete => (None, true, None),
        Step::Lift { priority, last } => {
            let stands = |done: &Lifted| {
                let age = now.saturating_duration_since(done.at);
                done.uid == pod.uid && done.priority <= priority && age < LOOK_AGAIN
            };
            let lift = Some(priority).filter(|_| !done.is_some_and(stands));
            (lift, last, (!last).then_some(LOOK_AGAIN))
        }
    };
    Turn {
        lift,
        complete,
        again,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::ContainerView;

    fn pod(barriers: &[(&str, i64)], ready: &[&str]) -> PodView {
        let container = |name: &&str| ContainerView {
            name: (*name).to_owned(),
            ready: true,
            ..ContainerView::default()
        };
        PodView {
            barriers: barriers
                .iter()
                .map(|(name, p)| ((*name).to_owned(), *p))
                .collect(),
            containers: ready.iter().map(container).collect(),
            ..PodView::default()
        }
    }

    #[test]
    fn the_highest_priority_that_is_not_ready_is_next() {
        let three = [("a", 1), ("b", 5), ("c", 5), ("d", -2)];
        let lift = |priority, last| Step::Lift { priority, last };
        let cases: [(&[&str], Step); 6] = [
            (&[], lift(5, false)),
            (&["b"], lift(5, false)),
            (&["b", "c"], lift(1, false)),
            (&["a", "b", "c"], lift(-2, true)),
            (&["a", "b", "c", "d"], Step::Complete),
            // It ended before the last one was lifted.
            (&["a", "c"], lift(5, false)),
        ];
        for (ready, want) in cases {
            assert_eq!(step(&pod(&three, ready)), want, "{ready:?}");
        }
        assert_eq!(step(&pod(&[], &["a"])), Step::Nothing);
        let mut going = pod(&three, &[]);
        going.deleting = true;
        assert_eq!(step(&going), Step::Nothing);
    }

    #[test]
    fn what_was_lifted_is_lifted_again_only_when_it_may_have_been_lost() {
        let (three, now) = ([("a", 1), ("b", 5), ("c", -2)], Instant::now());
        let lifted = |uid: &str, priority| Lifted {
            uid: uid.to_owned(),
            priority,
            at: now,
        };
        type Case<'a> = (&'a [&'a str], Option<Lifted>, u64, Option<i64>, bool);
        let cases: [Case<'_>; 8] = [
            (&[], None, 0, Some(5), false),
            (&[], Some(lifted("", 5)), 299, None, false),
            (&[], Some(lifted("", 5)), 300, Some(5), false),
            (&["b"], Some(lifted("", 5)), 0, Some(1), false),
            // It was ready, and is no more: what it waits for is still there.
            (&[], Some(lifted("", 1)), 299, None, false),
            (&[], Some(lifted("of-another-time", 5)), 0, Some(5), false),
            (&["a", "b"], Some(lifted("", 1)), 0, Some(-2), true),
            (&["a", "b"], Some(lifted("", -2)), 0, None, true),
        ];
        for (ready, done, later, lift, complete) in cases {
            let then = now + Duration::from_secs(later);
            let again = (!complete).then_some(LOOK_AGAIN);
            let want = Turn {
                lift,
                complete,
                again,
            };
            assert_eq!(
                turn(&pod(&three, ready), done.as_ref(), then),
                want,
                "{ready:?} {done:?}"
            );
        }
        let rest = Turn {
            lift: None,
            complete: false,
            again: None,
        };
        assert_eq!(turn(&pod(&[], &[]), None, now), rest);
        let all = turn(&pod(&three, &["a", "b", "c"]), None, now);
        assert_eq!(
            all,
            Turn {
                complete: true,
                ..rest
            }
        );
    }
}
