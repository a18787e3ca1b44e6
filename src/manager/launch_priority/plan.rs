//! Which barrier is to be lifted next.

use crate::manager::view::PodView;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::view::ContainerView;

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
}
