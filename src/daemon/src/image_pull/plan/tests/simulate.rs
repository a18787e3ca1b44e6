//! Whole lives of boards: whatever is asked and however attempts end.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
struct Job {
    namespace: u8,
    owner: u8,
    arrives: i64,
    retries: u32,
    deadline: Option<i64>,
    timeout: i64,
    /// How long each attempt takes, and how it ends.
    attempts: Vec<(i64, u8)>,
}

fn any_job() -> impl Strategy<Value = Job> {
    (
        (0..3u8, 0..4u8),
        0..40i64,
        0..4u32,
        prop::option::of(0..90i64),
        1..30i64,
        prop::collection::vec((0..40i64, 0..11u8), 1..6),
    )
        .prop_map(
            |((namespace, owner), arrives, retries, deadline, timeout, attempts)| Job {
                namespace,
                owner,
                arrives,
                retries,
                deadline,
                timeout,
                attempts,
            },
        )
}

/// More attempts than that are prevented of no tag.
const PREVENTED: u32 = 6;

struct World {
    board: Board,
    limits: Limits,
    jobs: Vec<Job>,
    now: i64,
    running: Vec<(TagKey, u64, i64, Ended)>,
    begun: BTreeMap<TagKey, u32>,
    counted: BTreeMap<TagKey, u32>,
}

impl World {
    fn new(jobs: Vec<Job>, max_parallel: usize) -> Self {
        let limits = Limits::of_node(max_parallel, true);
        Self {
            board: Board::default(),
            limits,
            jobs,
            now: 0,
            running: Vec::new(),
            begun: BTreeMap::new(),
            counted: BTreeMap::new(),
        }
    }

    fn asks(&self) -> BTreeMap<TagKey, Ask> {
        let arrived = self
            .jobs
            .iter()
            .enumerate()
            .filter(|(_, job)| job.arrives <= self.now);
        arrived
            .map(|(n, job)| (key(&n.to_string()), ask_of(job)))
            .collect()
    }

    fn job(&self, key: &TagKey) -> &Job {
        &self.jobs[key.tag.parse::<usize>().unwrap()]
    }

    /// Everything that happens in one second.
    fn second(&mut self) -> Result<(), TestCaseError> {
        let asks = self.asks();
        self.board.desire(&asks, &BTreeMap::new());
        let (over, still): (Vec<_>, Vec<_>) = std::mem::take(&mut self.running)
            .into_iter()
            .partition(|r| r.2 <= self.now);
        self.running = still;
        for (key, run, _, ended) in over {
            if matches!(
                ended,
                Ended::Failed {
                    again: Again::Counted,
                    ..
                }
            ) {
                *self.counted.entry(key.clone()).or_default() += 1;
            }
            self.board.ended(&key, run, ended, at(self.now));
        }
        self.act()?;
        let again = plan(&self.board, &self.limits, at(self.now));
        prop_assert!(
            again.steps.is_empty(),
            "a plan that was carried out leaves nothing to do: {:?}",
            again.steps
        );
        self.check(again.wake)?;
        self.now += 1;
        Ok(())
    }

    fn act(&mut self) -> Result<(), TestCaseError> {
        for step in plan(&self.board, &self.limits, at(self.now)).steps {
            if let Step::Start { key, timeout, owner } = &step {
                self.fair(key, owner)?;
                let job = self.job(key).clone();
                let n = self.begun.entry(key.clone()).or_default();
                let (takes, how) = job.attempts[(*n as usize).min(job.attempts.len() - 1)];
                *n += 1;
                let ended = match how {
                    0..=3 => pulled(),
                    4..=7 => failed(Again::Counted),
                    8 => failed(Again::Uncounted),
                    // What is away comes back.
                    9 if (*n as usize) <= job.attempts.len() => failed(Again::Prevented),
                    _ => failed(Again::Never),
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
            .retain(|(key, run, ..)| board.get(key).unwrap().stage == Stage::Running { run: *run });
        Ok(())
    }

    /// No namespace that waits has fewer slots than the one that is given one, and in it no owner.
    fn fair(&self, chosen: &TagKey, for_: &Owner) -> Result<(), TestCaseError> {
        let count = |of: &dyn Fn(&Owner) -> bool| {
            let running = |t: &&Task| matches!(t.stage, Stage::Running { .. }) && of(&t.owner);
            self.board.tasks().values().filter(running).count()
        };
        let share = |owner: &Owner| {
            let namespace = count(&|o| o.namespace == owner.namespace);
            (namespace, count(&|o| o == owner))
        };
        let mine = share(for_);
        prop_assert!(mine.0 < self.limits.max_per_namespace);
        for task in self
            .board
            .tasks()
            .values()
            .filter(|t| t.stage == Stage::Waiting && t.ask.image.is_ok())
        {
            prop_assert!(
                owners(&task.ask).iter().all(|o| {
                    let theirs = share(o);
                    mine.0 < theirs.0 || o.namespace != for_.namespace || mine <= theirs
                }),
                "{chosen:?} was preferred to one with fewer slots"
            );
        }
        Ok(())
    }

    fn check(&self, wake: Option<Timestamp>) -> Result<(), TestCaseError> {
        prop_assert!(
            self.running.len() <= self.limits.max_parallel,
            "{} at once",
            self.running.len()
        );
        let status = status::compose(&self.board, &self.limits);
        prop_assert_eq!(
            status.desired,
            status.succeeded + status.failed + status.pulling + status.waiting
        );
        prop_assert_eq!(usize::try_from(status.desired).unwrap(), self.board.tasks().len());
        let next = wake.map_or(i64::MAX, |w| w.as_second() - START);
        prop_assert!(next > self.now, "a wake in the past is a busy loop");
        for (key, task) in self.board.tasks() {
            if task.is_done() {
                continue;
            }
            if let Some(deadline) = task.deadline() {
                prop_assert!(at(self.now) < deadline, "{key:?} outlived its deadline");
                prop_assert!(
                    next <= deadline.as_second() - START,
                    "{key:?} would oversleep its deadline"
                );
            }
            let counted = self.counted.get(key).copied().unwrap_or(0);
            prop_assert!(
                counted <= task.ask.retries,
                "{key:?} was tried more often than allowed"
            );
            let begun = self.begun.get(key).copied().unwrap_or(0);
            prop_assert!(
                begun <= 4 * (task.ask.retries + 1) + PREVENTED,
                "{key:?} took the runtime down {begun} times"
            );
            let waits = status::waits_for(&task.stage, &self.limits).is_some();
            prop_assert!(
                waits || matches!(task.stage, Stage::Running { .. }),
                "{key:?} waits and does not say for what"
            );
        }
        Ok(())
    }
}

fn ask_of(job: &Job) -> Ask {
    Ask {
        retries: job.retries,
        timeout: SignedDuration::from_secs(job.timeout),
        active_deadline: job.deadline.map(SignedDuration::from_secs),
        ..ask_in(&format!("ns-{}", job.namespace), &job.owner.to_string())
    }
}

proptest! {
    /// Whatever is asked and however attempts end: never more than allowed at once, no owner is passed over, no tag
    /// is tried too often or outlives its deadline, every wait has a reason and an end, and every tag ends.
    #[test]
    fn every_tag_ends_within_its_limits(jobs in prop::collection::vec(any_job(), 0..12), max_parallel in 1..5usize) {
        let mut world = World::new(jobs, max_parallel);
        let enough = 12 * 25 * 70;
        while world.now < enough {
            world.second()?;
            if world.now > 40 && world.board.tasks().values().all(Task::is_done) {
                break;
            }
        }
        for (key, task) in world.board.tasks() {
            prop_assert!(task.is_done(), "{key:?} never ended: {task:?}");
        }
        prop_assert_eq!(world.board.tasks().len(), world.jobs.len());
    }

    /// However many namespaces have pulls that never end, and take some back and ask anew, one that has no pull gets its
    /// turn.
    #[test]
    fn a_namespace_without_a_pull_gets_a_slot(
        others in 1..12u8, max_parallel in 1..5usize, served in any::<bool>(),
        pauses in prop::collection::vec((1..100i64, any::<bool>()), 1..20),
    ) {
        let limits = Limits::of_node(max_parallel, true);
        let (mut board, mut asks) = (Board::default(), BTreeMap::new());
        if served {
            asks.insert(key("first"), ask_in("plain", "first"));
            board.desire(&asks, &BTreeMap::new());
            let (key, run) = go(&mut board, &limits, at(0)).remove(0);
            board.ended(&key, run, pulled(), at(0));
        }
        let other = |other: u8| ask_in(&format!("other-{other}"), "o");
        for (n, tag) in (0..others).flat_map(|n| (0..6).map(move |tag| (n, tag))) {
            asks.insert(key(&format!("other-{n}-{tag}")), other(n));
        }
        board.desire(&asks, &BTreeMap::new());
        go(&mut board, &limits, at(0));
        asks.insert(key("plain"), ask_in("plain", "p"));
        // What is due is seen a pause later.
        let turns = i64::from(others) / i64::try_from(max_parallel).unwrap() + 1;
        let (mut now, longest) = (0, turns * 700);
        for (n, (pause, again)) in (0..others).cycle().zip(pauses.iter().cycle()) {
            board.desire(&asks, &BTreeMap::new());
            if go(&mut board, &limits, at(now)).iter().any(|(begun, _)| *begun == key("plain")) {
                break;
            }
            prop_assert!(now < longest, "it still waits after {now} s");
            now += pause;
            let progress = Progress { done: u64::try_from(now).unwrap(), total: u64::MAX };
            for (key, task) in board.clone().tasks() {
                if let Stage::Running { run } = task.stage {
                    board.advance(key, run, progress, at(now));
                }
            }
            if *again {
                let rest = asks.iter().filter(|(_, ask)| ask.owners != other(n).owners);
                let rest = rest.map(|(key, ask)| (key.clone(), ask.clone())).collect();
                board.desire(&rest, &BTreeMap::new());
            }
        }
    }

    /// Removing everything at any moment leaves nothing, and stops exactly what ran.
    #[test]
    fn removal_stops_what_runs(jobs in prop::collection::vec(any_job(), 0..12), seconds in 0..60i64) {
        let mut world = World::new(jobs, 3);
        while world.now < seconds {
            world.second()?;
        }
        let mut running: Vec<TagKey> = world.running.iter().map(|r| r.0.clone()).collect();
        running.sort();
        prop_assert_eq!(world.board.clear(), running);
        prop_assert_eq!(plan(&world.board, &world.limits, at(world.now)), Plan::default());
        prop_assert!(world.board.tasks().is_empty());
    }

    /// A daemon that restarts at any moment repeats nothing that was over.
    #[test]
    fn a_restart_repeats_nothing_that_is_over(jobs in prop::collection::vec(any_job(), 1..12), seconds in 0..60i64) {
        let mut world = World::new(jobs, 3);
        while world.now < seconds {
            world.second()?;
        }
        let stored = status::by_tag(&status::compose(&world.board, &world.limits));
        let asks = world.board.tasks().iter().map(|(key, task)| (key.clone(), task.ask.clone())).collect();
        let mut restarted = Board::default();
        restarted.desire(&asks, &stored);
        for (key, task) in world.board.tasks().iter().filter(|(_, t)| t.is_done()) {
            prop_assert_eq!(&restarted.get(key).unwrap().stage, &task.stage);
        }
        for step in plan(&restarted, &world.limits, at(world.now)).steps {
            if let Step::Start { key, .. } = step {
                prop_assert!(!world.board.get(&key).unwrap().is_done());
            }
        }
    }
}
