//! Which barrier to lift next, and when.

use std::time::{Duration, Instant};

use crate::view::PodView;

/// ConfigMaps are not watched, so Pods with barriers left are reconciled again after this time.
pub const RESYNC_PERIOD: Duration = Duration::from_secs(300);

/// What to do for a Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchStep {
    /// Nothing: it has no barriers, all are lifted, or it is ending.
    Nothing,
    /// The containers of this priority and of higher ones may start.
    Lift {
        /// The priority.
        priority: i64,
        /// Whether it is the last: no other container waits.
        last: bool,
    },
    /// All containers run: there is nothing to lift.
    Complete,
}

/// The next step: of the containers that are not ready, those of the highest priority may start. After the launch all
/// may: one of a higher priority may lack something else, such as a Secret.
#[must_use]
pub fn next_step(pod: &PodView) -> LaunchStep {
    if !pod.active() || pod.barriers.is_empty() {
        return LaunchStep::Nothing;
    }
    let ready = |name: &str| pod.containers.iter().any(|c| c.name == name && c.ready);
    let waiting = pod.barriers.iter().filter(|(name, _)| !ready(name));
    let waiting = waiting.map(|(_, priority)| *priority);
    let (highest, lowest) = (waiting.clone().max(), waiting.min());
    let next = if pod.launched { lowest } else { highest };
    match next {
        Some(priority) => LaunchStep::Lift {
            priority,
            last: lowest == Some(priority),
        },
        None => LaunchStep::Complete,
    }
}

/// The last barrier lifted for a Pod that is not complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiftedBarrier {
    /// UID of the Pod.
    pub uid: String,
    /// The lowest priority that may start.
    pub priority: i64,
    /// When the barrier was lifted.
    pub lifted_at: Instant,
}

/// What to do now, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchPlan {
    /// Let the containers of this priority and of higher ones start.
    pub lift: Option<i64>,
    /// Record that all containers may start.
    pub complete: bool,
    /// When to reconcile again without an event; `None` when there is nothing to wait for.
    pub requeue_after: Option<Duration>,
}

/// The next step, unless it was done recently. The result of an old step may have been undone, also after the last one:
/// then the Pod keeps its record.
#[must_use]
pub fn plan_launch(pod: &PodView, lifted: Option<&LiftedBarrier>, now: Instant) -> LaunchPlan {
    let (lift, complete, again) = match next_step(pod) {
        LaunchStep::Nothing => (None, false, None),
        LaunchStep::Complete => (None, true, None),
        LaunchStep::Lift { priority, last } => {
            let is_current = |done: &LiftedBarrier| {
                let age = now.saturating_duration_since(done.lifted_at);
                done.uid == pod.uid && done.priority <= priority && age < RESYNC_PERIOD
            };
            let lift = Some(priority).filter(|_| !lifted.is_some_and(is_current));
            let complete = last && !pod.launched;
            (lift, complete, (!complete).then_some(RESYNC_PERIOD))
        }
    };
    LaunchPlan {
        lift,
        complete,
        requeue_after: again,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::view::{ContainerView, RawPod};
    use kruise_api::keys;

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

    /// A container of a Job that has ended is never ready again; the others must not wait for it.
    #[test]
    fn container_that_has_ended_for_good_is_passed() {
        let container = |name: &str, priority: i64| {
            let key = json!({ "configMapKeyRef": { "name": "p-barrier", "key": format!("p_{priority}") } });
            json!({ "name": name, "env": [{ "name": "KRUISE_CONTAINER_BARRIER", "valueFrom": key }] })
        };
        let step = |policy: &str, state: Value| {
            let statuses = json!([{ "name": "prepare", "ready": false, "state": state },
                { "name": "main", "ready": false, "state": { "waiting": {} } }]);
            let pod = json!({ "metadata": { "name": "p" },
                "spec": { "restartPolicy": policy, "containers": [container("prepare", 0), container("main", -1)] },
                "status": { "phase": "Running", "containerStatuses": statuses } });
            next_step(&PodView::from(&RawPod::from(pod)))
        };
        let ended = |code: i32| json!({ "terminated": { "exitCode": code } });
        let (first, second) = (
            LaunchStep::Lift {
                priority: 0,
                last: false,
            },
            LaunchStep::Lift {
                priority: -1,
                last: true,
            },
        );
        assert_eq!(step("Never", json!({ "running": {} })), first);
        assert_eq!(step("Never", ended(0)), second);
        assert_eq!(step("Never", ended(1)), second);
        assert_eq!(step("OnFailure", ended(0)), second);
        assert_eq!(step("OnFailure", ended(1)), first, "kubelet starts it again");
        assert_eq!(step("Always", ended(0)), first);
    }

    /// Kubelet reads the ConfigMap at each start of a container, and it may have been deleted.
    #[test]
    fn barriers_are_lifted_again_for_a_container_that_cannot_be_created() {
        let container = |name: &str, priority: i64| {
            let key = json!({ "configMapKeyRef": { "name": "p-barrier", "key": format!("p_{priority}") } });
            json!({ "name": name, "env": [{ "name": "KRUISE_CONTAINER_BARRIER", "valueFrom": key }] })
        };
        let planned = |states: [Value; 2]| {
            let [a, b] = states;
            let statuses = json!([{ "name": "a", "state": a }, { "name": "b", "state": b }]);
            let pod = json!({
                "metadata": { "name": "p", "annotations": { keys::CONTAINER_LAUNCH_COMPLETED: "true" } },
                "spec": { "containers": [container("a", 0), container("b", -1)] },
                "status": { "phase": "Running", "containerStatuses": statuses } });
            plan_launch(&PodView::from(&RawPod::from(pod)), None, Instant::now())
        };
        let waiting = |reason: &str| json!({ "waiting": { "reason": reason } });
        let lift = |priority| LaunchPlan {
            lift: Some(priority),
            complete: false,
            requeue_after: Some(RESYNC_PERIOD),
        };
        let idle = LaunchPlan {
            lift: None,
            complete: false,
            requeue_after: None,
        };
        let running = || json!({ "running": {} });
        let stuck = || waiting("CreateContainerConfigError");
        assert_eq!(planned([running(), stuck()]), lift(-1));
        // The first one may lack something else.
        assert_eq!(planned([stuck(), stuck()]), lift(-1));
        assert_eq!(planned([running(), waiting("CrashLoopBackOff")]), idle);
        assert_eq!(
            planned([running(), json!({ "terminated": { "exitCode": 1 } })]),
            idle
        );
    }

    #[test]
    fn highest_unready_priority_is_next() {
        let three = [("a", 1), ("b", 5), ("c", 5), ("d", -2)];
        let lift = |priority, last| LaunchStep::Lift { priority, last };
        let cases: [(&[&str], LaunchStep); 6] = [
            (&[], lift(5, false)),
            (&["b"], lift(5, false)),
            (&["b", "c"], lift(1, false)),
            (&["a", "b", "c"], lift(-2, true)),
            (&["a", "b", "c", "d"], LaunchStep::Complete),
            // Container b stopped before the last barrier was lifted.
            (&["a", "c"], lift(5, false)),
        ];
        for (ready, want) in cases {
            assert_eq!(next_step(&pod(&three, ready)), want, "{ready:?}");
        }
        assert_eq!(next_step(&pod(&[], &["a"])), LaunchStep::Nothing);
        let mut terminating = pod(&three, &[]);
        terminating.terminating = true;
        assert_eq!(next_step(&terminating), LaunchStep::Nothing);
    }

    #[test]
    fn barriers_are_lifted_again_after_the_resync_period() {
        let (three, now) = ([("a", 1), ("b", 5), ("c", -2)], Instant::now());
        let lifted = |uid: &str, priority| LiftedBarrier {
            uid: uid.to_owned(),
            priority,
            lifted_at: now,
        };
        type Case<'a> = (&'a [&'a str], Option<LiftedBarrier>, u64, Option<i64>, bool);
        let cases: [Case<'_>; 8] = [
            (&[], None, 0, Some(5), false),
            (&[], Some(lifted("", 5)), 299, None, false),
            (&[], Some(lifted("", 5)), 300, Some(5), false),
            (&["b"], Some(lifted("", 5)), 0, Some(1), false),
            // It was ready and is not any more: the key that it waited for still exists.
            (&[], Some(lifted("", 1)), 299, None, false),
            (&[], Some(lifted("of-another-time", 5)), 0, Some(5), false),
            (&["a", "b"], Some(lifted("", 1)), 0, Some(-2), true),
            (&["a", "b"], Some(lifted("", -2)), 0, None, true),
        ];
        for (ready, done, later, lift, complete) in cases {
            let then = now + Duration::from_secs(later);
            let again = (!complete).then_some(RESYNC_PERIOD);
            let expected = LaunchPlan {
                lift,
                complete,
                requeue_after: again,
            };
            assert_eq!(
                plan_launch(&pod(&three, ready), done.as_ref(), then),
                expected,
                "{ready:?} {done:?}"
            );
        }
        let idle = LaunchPlan {
            lift: None,
            complete: false,
            requeue_after: None,
        };
        assert_eq!(plan_launch(&pod(&[], &[]), None, now), idle);
        let all = plan_launch(&pod(&three, &["a", "b", "c"]), None, now);
        assert_eq!(
            all,
            LaunchPlan {
                complete: true,
                ..idle
            }
        );
    }
}
