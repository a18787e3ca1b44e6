//! Complete histories of boards: any specs and any results of attempts.

use std::time::Duration;

use proptest::prelude::*;

use super::super::task::pull_owners;
use super::*;

#[derive(Debug, Clone)]
struct SimulatedJob {
    namespace: u8,
    owner: u8,
    registry: u8,
    arrives: i64,
    retries: u32,
    deadline: Option<i64>,
    timeout: i64,
    /// Duration and result of each attempt.
    attempts: Vec<(i64, u8)>,
}

fn any_job() -> impl Strategy<Value = SimulatedJob> {
    (
        (0..3u8, 0..4u8, 0..3u8),
        0..40i64,
        0..4u32,
        prop::option::of(0..90i64),
        1..30i64,
        prop::collection::vec((0..40i64, 0..11u8), 1..6),
    )
        .prop_map(
            |((namespace, owner, registry), arrives, retries, deadline, timeout, attempts)| SimulatedJob {
                namespace,
                owner,
                registry,
                arrives,
                retries,
                deadline,
                timeout,
                attempts,
            },
        )
}

/// No tag has more prevented attempts than this.
const MAX_PREVENTED: u32 = 6;

struct Simulation {
    board: TaskBoard,
    limits: PullLimits,
    jobs: Vec<SimulatedJob>,
    now: i64,
    running: Vec<(TagKey, u64, i64, AttemptResult)>,
    attempts_started: BTreeMap<TagKey, u32>,
    attempts_counted: BTreeMap<TagKey, u32>,
}

impl Simulation {
    fn new(jobs: Vec<SimulatedJob>, max_parallel: usize) -> Self {
        let limits = PullLimits::for_node(max_parallel, true);
        Self {
            board: TaskBoard::default(),
            limits,
            jobs,
            now: 0,
            running: Vec::new(),
            attempts_started: BTreeMap::new(),
            attempts_counted: BTreeMap::new(),
        }
    }

    fn specs(&self) -> BTreeMap<TagKey, PullSpec> {
        let arrived = self
            .jobs
            .iter()
            .enumerate()
            .filter(|(_, job)| job.arrives <= self.now);
        arrived
            .map(|(n, job)| (key(&n.to_string()), spec_of(job)))
            .collect()
    }

    fn job(&self, key: &TagKey) -> &SimulatedJob {
        &self.jobs[key.tag.parse::<usize>().unwrap()]
    }

    /// All events of one second.
    fn tick(&mut self) -> Result<(), TestCaseError> {
        let specs = self.specs();
        self.board.sync_spec(&specs, &BTreeMap::new());
        let (ended, running): (Vec<_>, Vec<_>) = std::mem::take(&mut self.running)
            .into_iter()
            .partition(|r| r.2 <= self.now);
        self.running = running;
        for (key, run, _, ended) in ended {
            if matches!(
                ended,
                AttemptResult::Failed {
                    retry: AttemptRetry::Counted,
                    ..
                }
            ) {
                *self.attempts_counted.entry(key.clone()).or_default() += 1;
            }
            self.board.on_attempt_ended(&key, run, ended, at(self.now));
        }
        self.apply_plan()?;
        self.board.end_pauses(at(self.now));
        let next_plan = plan(&self.board, &self.limits, at(self.now));
        prop_assert!(
            next_plan.steps.is_empty(),
            "a plan that was carried out leaves nothing to do: {:?}",
            next_plan.steps
        );
        self.assert_invariants(next_plan.requeue_at)?;
        self.now += 1;
        Ok(())
    }

    fn apply_plan(&mut self) -> Result<(), TestCaseError> {
        for step in plan(&self.board, &self.limits, at(self.now)).steps {
            if let PullStep::Start { key, timeout, owner } = &step {
                self.assert_fair(key, owner)?;
                let job = self.job(key).clone();
                let n = self.attempts_started.entry(key.clone()).or_default();
                let (takes, ending) = job.attempts[(*n as usize).min(job.attempts.len() - 1)];
                *n += 1;
                let ended = match ending {
                    0..=3 => pulled_result(),
                    4..=7 => failed_attempt(AttemptRetry::Counted),
                    8 => failed_attempt(AttemptRetry::Uncounted),
                    // The runtime or API server comes back eventually.
                    9 if (*n as usize) <= job.attempts.len() => failed_attempt(AttemptRetry::Prevented),
                    _ => failed_attempt(AttemptRetry::Never),
                };
                let takes = takes.min(timeout.as_secs());
                let run = self.board.apply(&step, at(self.now)).unwrap();
                self.running.push((key.clone(), run, self.now + takes, ended));
            } else {
                self.board.apply(&step, at(self.now));
            }
        }
        let board = &self.board;
        self.running
            .retain(|(key, run, ..)| board.get(key).unwrap().stage == PullStage::Running { run: *run });
        Ok(())
    }

    /// No waiting namespace has fewer slots than the one that gets a slot, and no waiting owner in that namespace has
    /// fewer. If registries have fewer slots than the node, this holds at each of them, and the namespace with the fewest
    /// slots of the node waits for that registry.
    fn assert_fair(&self, chosen: &TagKey, for_: &PullOwner) -> Result<(), TestCaseError> {
        let count = |matches: &dyn Fn(&PullTask) -> bool| {
            let running = |&t: &&PullTask| matches!(t.stage, PullStage::Running { .. }) && matches(t);
            self.board.tasks().values().filter(running).count()
        };
        let of_namespace = |owner: &PullOwner| count(&|t| t.owner.namespace == owner.namespace);
        let of_owner = |owner: &PullOwner| count(&|t| t.owner == *owner);
        let chosen_spec = &self.board.get(chosen).unwrap().spec;
        let in_same_queue =
            |spec: &PullSpec| !self.limits.limits_registries() || spec.registry() == chosen_spec.registry();
        let in_queue =
            |owner: &PullOwner| count(&|t| in_same_queue(&t.spec) && t.owner.namespace == owner.namespace);
        prop_assert!(of_namespace(for_) < self.limits.max_per_namespace);
        let waiting = self
            .board
            .tasks()
            .values()
            .filter(|t| t.stage == PullStage::Waiting && t.spec.image.is_ok() && in_same_queue(&t.spec));
        for other in waiting.flat_map(|t| pull_owners(&t.spec)) {
            let is_fair = if other.namespace == for_.namespace {
                of_owner(for_) <= of_owner(&other)
            } else {
                of_namespace(&other) >= self.limits.max_per_namespace || in_queue(for_) <= in_queue(&other)
            };
            prop_assert!(
                is_fair,
                "{chosen:?} was preferred to {other:?}, which has fewer slots"
            );
        }
        let has_room = |spec: &PullSpec, owner: &PullOwner| {
            let at_registry = count(&|t| t.spec.registry() == spec.registry());
            of_namespace(owner) < self.limits.max_per_namespace && at_registry < self.limits.max_per_registry
        };
        let fewest_slots = |is_relevant: &dyn Fn(&PullSpec) -> bool| {
            let ready = self.board.tasks().values().filter(|t| {
                let is_active = matches!(t.stage, PullStage::Running { .. } | PullStage::Done(_));
                !is_active && !t.stage.is_pause(at(self.now)) && is_relevant(&t.spec)
            });
            let owners = ready.flat_map(|t| {
                let mut owners = pull_owners(&t.spec);
                owners.retain(|owner| has_room(&t.spec, owner));
                owners
            });
            owners.map(|owner| of_namespace(&owner)).min()
        };
        let at_chosen = fewest_slots(&|spec| spec.registry() == chosen_spec.registry());
        prop_assert_eq!(at_chosen, fewest_slots(&|_| true));
        Ok(())
    }

    fn assert_invariants(&self, wake: Option<Timestamp>) -> Result<(), TestCaseError> {
        prop_assert!(
            self.running.len() <= self.limits.max_parallel,
            "{} at once",
            self.running.len()
        );
        for registry in 0..3 {
            let at_registry = self
                .running
                .iter()
                .filter(|r| self.job(&r.0).registry == registry);
            prop_assert!(at_registry.count() <= self.limits.max_per_registry.min(self.limits.max_parallel));
        }
        let status = status::compose(&self.board, &self.limits);
        prop_assert_eq!(
            status.desired,
            status.succeeded + status.failed + status.pulling + status.waiting
        );
        prop_assert_eq!(usize::try_from(status.desired).unwrap(), self.board.tasks().len());
        let requeue_at = wake.unwrap_or(Timestamp::MAX);
        prop_assert!(requeue_at > at(self.now), "a wake in the past is a busy loop");
        for (key, task) in self.board.tasks() {
            if task.is_done() {
                continue;
            }
            if let Some(deadline) = task.deadline() {
                prop_assert!(at(self.now) < deadline, "{key:?} outlived its deadline");
                prop_assert!(requeue_at <= deadline, "{key:?} would oversleep its deadline");
            }
            let counted = self.attempts_counted.get(key).copied().unwrap_or(0);
            prop_assert!(
                counted <= task.spec.retries,
                "{key:?} was tried more often than allowed"
            );
            let started = self.attempts_started.get(key).copied().unwrap_or(0);
            prop_assert!(
                started <= 4 * (task.spec.retries + 1) + MAX_PREVENTED,
                "{key:?} took the runtime down {started} times"
            );
            let is_over = match task.stage {
                PullStage::Delayed { until } | PullStage::BackOff { until } => until <= at(self.now),
                _ => false,
            };
            prop_assert!(!is_over, "{key:?} waits for a time that has passed");
            let has_wait_reason = status::waits_for(&task.stage, &self.limits).is_some();
            prop_assert!(
                has_wait_reason || matches!(task.stage, PullStage::Running { .. }),
                "{key:?} waits and does not say for what"
            );
        }
        Ok(())
    }
}

fn spec_of(job: &SimulatedJob) -> PullSpec {
    PullSpec {
        image: Ok(format!("registry-{}.example/nginx:1", job.registry)),
        requested_at: Some(at(job.arrives)),
        retries: job.retries,
        timeout: SignedDuration::from_secs(job.timeout),
        active_deadline: job.deadline.map(SignedDuration::from_secs),
        ..spec_in(&format!("ns-{}", job.namespace), &job.owner.to_string())
    }
}

proptest! {
    /// For any specs and any results of attempts: the concurrency limits are never exceeded, no owner is passed over, no
    /// tag has too many attempts or outlives its deadline, every wait has a reason and an end, and every tag finishes.
    #[test]
    fn every_tag_ends_within_its_limits(
        jobs in prop::collection::vec(any_job(), 0..12), max_parallel in 1..5usize, max_per_registry in 1..5usize,
        jitter in 0..20u64,
    ) {
        let mut world = Simulation::new(jobs, max_parallel);
        world.limits.max_per_registry = max_per_registry;
        world.board = TaskBoard::with_start_jitter(StartJitter::new(Duration::from_secs(jitter), "node-1"));
        let enough = 12 * 25 * 70;
        while world.now < enough {
            world.tick()?;
            if world.now > 40 && world.board.tasks().values().all(PullTask::is_done) {
                break;
            }
        }
        for (key, task) in world.board.tasks() {
            prop_assert!(task.is_done(), "{key:?} never ended: {task:?}");
        }
        prop_assert_eq!(world.board.tasks().len(), world.jobs.len());
    }

    /// However many namespaces have pulls that never end, and remove some and add them again, a namespace without a
    /// pull gets its turn, on the node and at the registry.
    #[test]
    fn namespace_without_a_pull_gets_a_slot(
        others in 1..12u8, max_parallel in 1..5usize, max_per_registry in 1..5usize, served in any::<bool>(),
        pauses in prop::collection::vec((1..100i64, any::<bool>()), 1..20),
    ) {
        let limits = PullLimits { max_per_registry, ..PullLimits::for_node(max_parallel, true) };
        let (mut board, mut asks) = (TaskBoard::default(), BTreeMap::new());
        if served {
            asks.insert(key("first"), spec_in("plain", "first"));
            board.sync_spec(&asks, &BTreeMap::new());
            let (key, run) = start_planned(&mut board, &limits, at(0)).remove(0);
            board.on_attempt_ended(&key, run, pulled_result(), at(0));
        }
        let other = |other: u8| spec_in(&format!("other-{other}"), "o");
        for (n, tag) in (0..others).flat_map(|n| (0..6).map(move |tag| (n, tag))) {
            asks.insert(key(&format!("other-{n}-{tag}")), other(n));
        }
        board.sync_spec(&asks, &BTreeMap::new());
        start_planned(&mut board, &limits, at(0));
        asks.insert(key("plain"), spec_in("plain", "p"));
        // A due step is found one pause later.
        let slots = max_parallel.min(max_per_registry);
        let turns = i64::from(others) / i64::try_from(slots).unwrap() + 1;
        let (mut now, longest) = (0, turns * 700);
        for (n, (pause, again)) in (0..others).cycle().zip(pauses.iter().cycle()) {
            board.sync_spec(&asks, &BTreeMap::new());
            if start_planned(&mut board, &limits, at(now)).iter().any(|(begun, _)| *begun == key("plain")) {
                break;
            }
            prop_assert!(now < longest, "it still waits after {now} s");
            now += pause;
            let progress = PullProgress { done: u64::try_from(now).unwrap(), total: u64::MAX };
            for (key, task) in board.clone().tasks() {
                if let PullStage::Running { run } = task.stage {
                    board.set_progress(key, run, progress, at(now));
                }
            }
            if *again {
                let rest = asks.iter().filter(|(_, ask)| ask.owners != other(n).owners);
                let rest = rest.map(|(key, ask)| (key.clone(), ask.clone())).collect();
                board.sync_spec(&rest, &BTreeMap::new());
            }
        }
    }

    /// Clearing the board at any moment leaves nothing, and stops exactly the running attempts.
    #[test]
    fn clearing_the_board_stops_running_attempts(jobs in prop::collection::vec(any_job(), 0..12), seconds in 0..60i64) {
        let mut world = Simulation::new(jobs, 3);
        while world.now < seconds {
            world.tick()?;
        }
        let mut running: Vec<TagKey> = world.running.iter().map(|r| r.0.clone()).collect();
        running.sort();
        prop_assert_eq!(world.board.clear(), running);
        prop_assert_eq!(plan(&world.board, &world.limits, at(world.now)), Plan::default());
        prop_assert!(world.board.tasks().is_empty());
    }

    /// A daemon that restarts at any moment repeats no finished pull.
    #[test]
    fn restart_does_not_repeat_finished_pulls(jobs in prop::collection::vec(any_job(), 1..12), seconds in 0..60i64) {
        let mut world = Simulation::new(jobs, 3);
        while world.now < seconds {
            world.tick()?;
        }
        let stored = status::by_tag(&status::compose(&world.board, &world.limits));
        let specs = world.board.tasks().iter().map(|(key, task)| (key.clone(), task.spec.clone())).collect();
        let mut restarted = TaskBoard::default();
        restarted.sync_spec(&specs, &stored);
        for (key, task) in world.board.tasks().iter().filter(|(_, t)| t.is_done()) {
            prop_assert_eq!(&restarted.get(key).unwrap().stage, &task.stage);
        }
        for step in plan(&restarted, &world.limits, at(world.now)).steps {
            if let PullStep::Start { key, .. } = step {
                prop_assert!(!world.board.get(&key).unwrap().is_done());
            }
        }
    }
}
