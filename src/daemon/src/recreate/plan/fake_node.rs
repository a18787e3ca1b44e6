//! A fake node for the tests of the plan: containers, a kubelet that restarts them, an API server that may be
//! unavailable, and a daemon that acts on plans and may be killed. Time is a number.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::*;

mod daemon;
use crate::pods::{NodePod, PodContainer, PodContainerStatus};
use kruise_api::container_recreate_request::ContainerRecreateRequestStatus as Status;
use kruise_api::time::truncate_to_second;

/// Milliseconds since the start.
pub type Ms = u64;

/// A container and its behavior.
#[derive(Clone, Debug)]
pub struct FakeContainer {
    pub name: String,
    pub generation: u32,
    /// Time from TERM to its end.
    pub stop_takes: Ms,
    /// Time that kubelet takes to start the next one.
    pub start_takes: Ms,
    /// Time until the next one is ready.
    pub ready_takes: Ms,
    /// Duration of its preStop hook, if it has one.
    pub hook_takes: Option<Ms>,
    /// When the current one started; none while there is none.
    pub running_since: Option<Ms>,
    /// When the one that received TERM ends.
    pub ends_at: Option<Ms>,
    /// When the next one starts.
    pub starts_at: Option<Ms>,
    /// What the current one has received.
    pub stop_history: StopHistory,
}

/// What a container has received from one request.
#[derive(Clone, Debug, Default)]
pub struct StopHistory {
    pub request: String,
    /// Used grace period: by its hook, and by stops that the runtime tried.
    pub grace_used: Ms,
    /// Whether its hook has ended.
    pub hook_done: bool,
}

impl FakeContainer {
    pub fn id(&self) -> String {
        format!("{}-{}", self.name, self.generation)
    }

    fn ready_at(&self) -> Option<Ms> {
        Some(self.running_since? + if self.generation == 0 { 0 } else { self.ready_takes })
    }
}

/// What happened, for assertions.
#[derive(Clone, Debug, PartialEq)]
pub enum LogEvent {
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
    /// A hook or a stop was cancelled.
    Cancelled {
        request: String,
        container: String,
        /// Whether its container had ended already, because of an earlier stop.
        needless: bool,
    },
    /// No stop of the container is in progress any more.
    StopEnded {
        request: String,
    },
    StatusWritten {
        request: String,
        status: Status,
    },
    Crashed,
}

/// How the runtime fails a call to stop a container.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// It is unreachable.
    Unreachable,
    /// It does not answer for this long, and never sends TERM.
    Hangs(Ms),
    /// It sends TERM, and returns an error after this time.
    Fails(Ms),
}

/// An operation of the daemon that takes time.
#[derive(Clone, Debug)]
struct Operation {
    action: StopAction,
    stage: OperationStage,
    ends_at: Ms,
    /// Duration of its hook.
    hook_time: Ms,
}

#[derive(Clone, Debug)]
enum OperationStage {
    Queued,
    Hook { cancelled: bool },
    Stop { fault: Option<Fault>, since: Ms },
}

#[derive(Clone, Debug)]
pub struct FakeNode {
    pub now: Ms,
    /// Offset of the node's wall clock.
    pub skew: SignedDuration,
    pub requests: Vec<RecreateRequest>,
    pub containers: Vec<FakeContainer>,
    /// Requests to be created: when, and the request.
    pub arrivals: Vec<(Ms, RecreateRequest)>,
    /// Requests to be deleted: when, and UID.
    pub deletions: Vec<(Ms, String)>,
    /// When the daemon is killed and starts again.
    pub crashes: Vec<Ms>,
    /// When the API server rejects writes: from, to.
    pub api_down: (Ms, Ms),
    /// When other Pods occupy all slots: from, to.
    pub slots_full: (Ms, Ms),
    /// When calls to stop a container fail: from, to, and how.
    pub faults: Vec<(Ms, Ms, Fault)>,
    /// Whether the API server drops our own field.
    pub foreign_crds: bool,
    pub state: RecreateState,
    pub running_since: BTreeMap<String, Duration>,
    pub pending_writes: BTreeMap<String, Ms>,
    operations: Vec<Operation>,
    pub log: Vec<(Ms, LogEvent)>,
}

pub fn start_time() -> Timestamp {
    Timestamp::from_second(1_700_000_000).unwrap()
}

impl FakeNode {
    pub fn new(containers: Vec<FakeContainer>, arrivals: Vec<(Ms, RecreateRequest)>) -> Self {
        Self {
            now: 0,
            skew: SignedDuration::ZERO,
            requests: Vec::new(),
            containers,
            arrivals,
            deletions: Vec::new(),
            crashes: Vec::new(),
            api_down: (0, 0),
            slots_full: (0, 0),
            faults: Vec::new(),
            foreign_crds: false,
            state: RecreateState::default(),
            running_since: BTreeMap::new(),
            pending_writes: BTreeMap::new(),
            operations: Vec::new(),
            log: Vec::new(),
        }
    }

    pub fn clocks(&self) -> Clocks {
        let api = start_time() + SignedDuration::from_millis(self.now as i64);
        Clocks {
            api,
            wall: api + self.skew,
            mono: Duration::from_millis(self.now),
        }
    }

    /// Runs until every request has arrived and is completed and nothing is in progress, or `limit` has passed. Returns
    /// whether all are completed.
    pub fn run(&mut self, limit: Ms) -> bool {
        while self.now <= limit {
            self.apply_due_events();
            self.run_daemon();
            let finished = |r: &RecreateRequest| r.status.completion_time.is_some();
            let idle = self.operations.is_empty() && self.pending_writes.is_empty();
            if idle
                && self.arrivals.is_empty()
                && self.deletions.is_empty()
                && self.requests.iter().all(finished)
            {
                return true;
            }
            let Some(next) = self.next_event_at() else {
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

    /// Reconciles until nothing is left to do at this moment.
    fn run_daemon(&mut self) {
        for _ in 0..50 {
            let observed = self.observe();
            let first_plan = plan(&observed, self.clocks());
            assert_eq!(
                first_plan,
                plan(&observed, self.clocks()),
                "equal input must give equal plans"
            );
            if !self.apply(first_plan) {
                return;
            }
        }
        panic!("the plan never comes to rest at {}: {:#?}", self.now, self.log);
    }

    fn pod(&self) -> NodePod {
        let wall = |at: Ms| start_time() + SignedDuration::from_millis(at as i64) + self.skew;
        let containers = self.containers.iter().map(|sim| PodContainer {
            name: sim.name.clone(),
            pre_stop: sim.hook_takes.map(|_| Default::default()),
            status: Some(PodContainerStatus {
                container_id: format!("containerd://{}", sim.id()),
                ready: sim.ready_at().is_some_and(|at| at <= self.now),
                restart_count: sim.generation as i32,
                running: sim.running_since.is_some(),
                starting: false,
                started_at: sim.running_since.map(|since| truncate_to_second(wall(since))),
                waiting: None,
                last_termination: None,
            }),
            ..PodContainer::default()
        });
        NodePod {
            uid: "pod".into(),
            grace_period_seconds: 30,
            containers: containers.collect(),
            ..NodePod::default()
        }
    }

    pub fn observe(&mut self) -> Observed {
        let mut containers = Vec::new();
        for sim in &self.containers {
            let state = match sim.running_since {
                Some(_) => {
                    let mono = Duration::from_millis(self.now);
                    self.running_since.entry(sim.id()).or_insert(mono);
                    RunState::Running
                }
                None => RunState::Exited,
            };
            let running_since = self.running_since.get(&sim.id()).copied();
            containers.push(ObservedContainer {
                id: sim.id(),
                name: sim.name.clone(),
                state,
                running_since,
                restarting: false,
                hook_done: false,
            });
        }
        let has_attempt =
            |r: &RecreateRequest| self.state.attempts.keys().any(|key| key.request_uid == r.uid);
        let active = |r: &&RecreateRequest| r.status.completion_time.is_none() || has_attempt(r);
        Observed {
            requests: self
                .requests
                .iter()
                .filter(active)
                .cloned()
                .map(Arc::new)
                .collect(),
            pod: PodObservation::Present(Arc::new(self.pod())),
            runtime: RuntimeObservation::Listed {
                scheme: "containerd".into(),
                containers,
            },
            state: self.state.clone(),
        }
    }

    fn log(&mut self, event: LogEvent) {
        self.log.push((self.now, event));
    }

    /// Applies everything that is due now and not done by the daemon.
    fn apply_due_events(&mut self) {
        let now = self.now;
        let due_operations: Vec<Operation> = self.operations.extract_if(.., |op| op.ends_at <= now).collect();
        for op in due_operations {
            self.finish_stage(op);
        }
        let (due, later): (Vec<_>, Vec<_>) = self.arrivals.drain(..).partition(|(at, _)| *at <= now);
        self.arrivals = later;
        for (_, mut request) in due {
            request.created_at = self.clocks().api;
            for container in &mut request.containers {
                let sim = self.containers.iter().find(|sim| sim.name == container.name);
                let id = sim.map(|sim| format!("containerd://{}", sim.id()));
                container.recorded_id = container.recorded_id.take().and(id);
            }
            self.requests.push(request);
        }
        for (_, uid) in self.deletions.extract_if(.., |(at, _)| *at <= now) {
            self.requests.retain(|request| request.uid != uid);
        }
        for sim in &mut self.containers {
            if sim.ends_at.is_some_and(|at| at <= now) {
                sim.ends_at = None;
                sim.running_since = None;
                sim.starts_at = Some(now + sim.start_takes);
            }
            if sim.starts_at.is_some_and(|at| at <= now) {
                sim.starts_at = None;
                sim.generation += 1;
                sim.running_since = Some(now);
                sim.stop_history = Default::default();
            }
        }
        if self.crashes.iter().any(|at| *at <= now) {
            self.crashes.retain(|at| *at > now);
            self.operations.clear();
            self.state = RecreateState::default();
            self.pending_writes.clear();
            self.running_since.clear();
            // The next daemon starts without state.
            self.containers
                .iter_mut()
                .for_each(|sim| sim.stop_history = Default::default());
            self.log(LogEvent::Crashed);
        }
    }

    /// When the next event happens, independently or because the plan or a write waits for it.
    fn next_event_at(&mut self) -> Option<Ms> {
        let observed = self.observe();
        let next_plan = plan(&observed, self.clocks());
        let mut moments: Vec<Ms> = self.arrivals.iter().map(|(at, _)| *at).collect();
        moments.extend(self.deletions.iter().map(|(at, _)| *at));
        moments.extend(&self.crashes);
        moments.extend([self.api_down.0, self.api_down.1]);
        moments.extend(self.faults.iter().map(|(_, until, _)| *until));
        moments.extend(self.operations.iter().map(|op| op.ends_at));
        for sim in &self.containers {
            moments.extend([sim.ends_at, sim.starts_at, sim.ready_at()].into_iter().flatten());
        }
        moments.extend(
            next_plan
                .requeue
                .map(|at| at.as_nanos().div_ceil(1_000_000) as Ms),
        );
        for write in &next_plan.writes {
            moments.extend(
                self.pending_writes
                    .get(&write.request.uid)
                    .map(|since| since + write_delay(write.urgency)),
            );
        }
        moments.into_iter().filter(|at| *at > self.now).min()
    }
}

/// How long a write of that urgency waits for more changes.
fn write_delay(urgency: Urgency) -> Ms {
    urgency.delay().as_millis() as Ms
}
