//! A node in miniature, for the tests of the plan: containers, a kubelet that restarts them, an API server
//! that may be away, and a daemon that acts on plans and may be killed. Time is a number.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::*;

mod act;
use crate::pods::{ContainerView, PodView, StatusView};
use kruise_api::container_recreate_request::ContainerRecreateRequestStatus as Status;

/// Milliseconds since the beginning.
pub type Ms = u64;

/// A container and how it behaves.
#[derive(Clone, Debug)]
pub struct Sim {
    pub name: String,
    pub generation: u32,
    /// How long it takes to end after TERM.
    pub stop_takes: Ms,
    /// How long kubelet takes to start the next.
    pub start_takes: Ms,
    /// How long the next takes to be ready.
    pub ready_takes: Ms,
    /// How long its preStop hook takes, if it has one.
    pub hook_takes: Option<Ms>,
    /// Since when the present one runs; none while there is none.
    pub running_since: Option<Ms>,
    /// When the one that was told to stop has ended.
    pub ends_at: Option<Ms>,
    /// When the next one is started.
    pub starts_at: Option<Ms>,
    /// What the present one has had.
    pub had: Had,
}

/// What a container has had by one request.
#[derive(Clone, Debug, Default)]
pub struct Had {
    pub request: String,
    /// How much of its grace period: its hook, and stops that the runtime tried.
    pub grace: Ms,
    /// Its hook, to its end.
    pub hook: bool,
}

impl Sim {
    pub fn id(&self) -> String {
        format!("{}-{}", self.name, self.generation)
    }

    fn ready_at(&self) -> Option<Ms> {
        Some(self.running_since? + if self.generation == 0 { 0 } else { self.ready_takes })
    }
}

/// What happened, for the tests to look at.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Hook {
        request: String,
        container: String,
        target: String,
    },
    Stop {
        request: String,
        container: String,
        target: String,
        /// From TERM to KILL.
        grace: Ms,
    },
    /// A hook or a stop was broken off.
    BrokenOff {
        request: String,
        container: String,
        /// Whether its container had ended already, by what an earlier stop had sent to it.
        needless: bool,
    },
    /// Nothing is being done to the container any more.
    Ended {
        request: String,
    },
    Wrote {
        request: String,
        status: Status,
    },
    Crashed,
}

/// What the runtime makes of a call to stop a container.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// It is away.
    Away,
    /// It does not answer for so long, and TERM is never sent.
    Hangs(Ms),
    /// It sends TERM, and answers with an error so much later.
    Refuses(Ms),
}

/// An operation of the daemon that takes time.
#[derive(Clone, Debug)]
struct Op {
    begin: Begin,
    stage: OpStage,
    ends_at: Ms,
    /// How long its hook took.
    hook: Ms,
}

#[derive(Clone, Debug)]
enum OpStage {
    Queued,
    Hook { broken: bool },
    Stop { fault: Option<Fault>, since: Ms },
}

#[derive(Clone, Debug)]
pub struct World {
    pub now: Ms,
    /// How far the node's wall clock is off.
    pub skew: SignedDuration,
    pub requests: Vec<Request>,
    pub sims: Vec<Sim>,
    /// Requests yet to be made: when, and what.
    pub arrivals: Vec<(Ms, Request)>,
    /// Requests to be deleted: when, and UID.
    pub deletions: Vec<(Ms, String)>,
    /// When the daemon is killed and starts again.
    pub crashes: Vec<Ms>,
    /// From when to when the API server takes no writes.
    pub api_down: (Ms, Ms),
    /// From when to when other Pods have all slots.
    pub crowded: (Ms, Ms),
    /// From when to when calls to stop a container fail, and how.
    pub faults: Vec<(Ms, Ms, Fault)>,
    /// Whether the API server drops the field that is ours.
    pub foreign_crds: bool,
    pub memory: Memory,
    pub seen_running: BTreeMap<String, Duration>,
    pub dirty: BTreeMap<String, Ms>,
    ops: Vec<Op>,
    pub log: Vec<(Ms, Event)>,
}

pub fn start() -> Timestamp {
    Timestamp::from_second(1_700_000_000).unwrap()
}

impl World {
    pub fn new(sims: Vec<Sim>, arrivals: Vec<(Ms, Request)>) -> Self {
        Self {
            now: 0,
            skew: SignedDuration::ZERO,
            requests: Vec::new(),
            sims,
            arrivals,
            deletions: Vec::new(),
            crashes: Vec::new(),
            api_down: (0, 0),
            crowded: (0, 0),
            faults: Vec::new(),
            foreign_crds: false,
            memory: Memory::default(),
            seen_running: BTreeMap::new(),
            dirty: BTreeMap::new(),
            ops: Vec::new(),
            log: Vec::new(),
        }
    }

    pub fn clock(&self) -> Now {
        let api = start() + SignedDuration::from_millis(self.now as i64);
        Now {
            api,
            wall: api + self.skew,
            mono: Duration::from_millis(self.now),
        }
    }

    /// Runs until every request has come and is over and nothing is in progress, or `limit` has passed. Returns whether
    /// all are over.
    pub fn run(&mut self, limit: Ms) -> bool {
        while self.now <= limit {
            self.happen();
            self.daemon();
            let over = |r: &Request| r.status.completion_time.is_some();
            let rests = self.ops.is_empty() && self.dirty.is_empty();
            if rests
                && self.arrivals.is_empty()
                && self.deletions.is_empty()
                && self.requests.iter().all(over)
            {
                return true;
            }
            let Some(next) = self.next_moment() else {
                return false;
            };
            assert!(
                next > self.now,
                "time stands still at {next}: {:?}",
                self.log.last()
            );
            self.now = next;
        }
        false
    }

    /// Lets the daemon look and act until nothing more is to be done at this moment.
    fn daemon(&mut self) {
        for _ in 0..50 {
            let seen = self.observe();
            let first = plan(&seen, self.clock());
            assert_eq!(
                first,
                plan(&seen, self.clock()),
                "the same facts give the same plan"
            );
            if !self.act(first) {
                return;
            }
        }
        panic!("the plan never rests at {}: {:#?}", self.now, self.log);
    }

    fn pod(&self) -> PodView {
        let containers = self.sims.iter().map(|sim| ContainerView {
            name: sim.name.clone(),
            pre_stop: sim.hook_takes.map(|_| Default::default()),
            status: Some(StatusView {
                container_id: format!("containerd://{}", sim.id()),
                ready: sim.ready_at().is_some_and(|at| at <= self.now),
                restart_count: sim.generation as i32,
                running: sim.running_since.is_some(),
                waiting: None,
                ended: None,
            }),
            ..ContainerView::default()
        });
        PodView {
            uid: "pod".into(),
            grace_seconds: 30,
            containers: containers.collect(),
            ..PodView::default()
        }
    }

    pub fn observe(&mut self) -> Observed {
        let wall = self.clock().wall;
        let mut containers = Vec::new();
        for sim in &self.sims {
            let (state, started) = match sim.running_since {
                Some(since) => {
                    let mono = Duration::from_millis(self.now);
                    self.seen_running.entry(sim.id()).or_insert(mono);
                    let age = SignedDuration::from_millis((self.now - since) as i64);
                    (RunState::Running, Some(wall - age))
                }
                None => (RunState::Exited, None),
            };
            let running_since = self.seen_running.get(&sim.id()).copied();
            containers.push(Seen {
                id: sim.id(),
                name: sim.name.clone(),
                state,
                started,
                running_since,
                restarting: false,
            });
        }
        let attempted = |r: &Request| self.memory.attempts.keys().any(|key| key.request == r.uid);
        let live = |r: &&Request| r.status.completion_time.is_none() || attempted(r);
        Observed {
            requests: self.requests.iter().filter(live).cloned().map(Arc::new).collect(),
            pod: PodSight::Here(Arc::new(self.pod())),
            runtime: RuntimeSight::Seen {
                scheme: "containerd".into(),
                containers,
            },
            memory: self.memory.clone(),
        }
    }

    fn log(&mut self, event: Event) {
        self.log.push((self.now, event));
    }

    /// Everything that is due at this moment and not the daemon's doing.
    fn happen(&mut self) {
        let now = self.now;
        let due: Vec<Op> = self.ops.extract_if(.., |op| op.ends_at <= now).collect();
        for op in due {
            self.go_on(op);
        }
        let (due, later): (Vec<_>, Vec<_>) = self.arrivals.drain(..).partition(|(at, _)| *at <= now);
        self.arrivals = later;
        for (_, mut request) in due {
            request.created = self.clock().api;
            for wanted in &mut request.containers {
                let sim = self.sims.iter().find(|sim| sim.name == wanted.name);
                let id = sim.map(|sim| format!("containerd://{}", sim.id()));
                wanted.recorded = wanted.recorded.take().and(id);
            }
            self.requests.push(request);
        }
        for (_, uid) in self.deletions.extract_if(.., |(at, _)| *at <= now) {
            self.requests.retain(|request| request.uid != uid);
        }
        for sim in &mut self.sims {
            if sim.ends_at.is_some_and(|at| at <= now) {
                sim.ends_at = None;
                sim.running_since = None;
                sim.starts_at = Some(now + sim.start_takes);
            }
            if sim.starts_at.is_some_and(|at| at <= now) {
                sim.starts_at = None;
                sim.generation += 1;
                sim.running_since = Some(now);
                sim.had = Default::default();
            }
        }
        if self.crashes.iter().any(|at| *at <= now) {
            self.crashes.retain(|at| *at > now);
            self.ops.clear();
            self.memory = Memory::default();
            self.dirty.clear();
            self.seen_running.clear();
            // The next daemon begins anew.
            self.sims.iter_mut().for_each(|sim| sim.had = Default::default());
            self.log(Event::Crashed);
        }
    }

    /// When the next thing happens, by itself or because the plan or a write waits for it.
    fn next_moment(&mut self) -> Option<Ms> {
        let seen = self.observe();
        let now = plan(&seen, self.clock());
        let mut moments: Vec<Ms> = self.arrivals.iter().map(|(at, _)| *at).collect();
        moments.extend(self.deletions.iter().map(|(at, _)| *at));
        moments.extend(&self.crashes);
        moments.extend([self.api_down.0, self.api_down.1]);
        moments.extend(self.faults.iter().map(|(_, until, _)| *until));
        moments.extend(self.ops.iter().map(|op| op.ends_at));
        for sim in &self.sims {
            moments.extend([sim.ends_at, sim.starts_at, sim.ready_at()].into_iter().flatten());
        }
        moments.extend(now.wake.map(|wake| wake.at.as_nanos().div_ceil(1_000_000) as Ms));
        for write in &now.writes {
            moments.extend(
                self.dirty
                    .get(&write.request)
                    .map(|since| since + patience(write.urgency)),
            );
        }
        moments.into_iter().filter(|at| *at > self.now).min()
    }
}

/// How long a write of that urgency waits for company.
fn patience(urgency: Urgency) -> Ms {
    match urgency {
        Urgency::Now => 0,
        Urgency::Soon => 100,
        Urgency::IfItLasts => 3_000,
    }
}
