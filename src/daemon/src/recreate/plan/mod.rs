//! Every decision about the containers of one Pod, as a function of what is known and of the time.
//!
//! * `types`: what goes in and what comes out.
//! * `queue`: which request has its turn, which ones are over.
//! * `judge`: where one container is.
//! * `status`: what to tell the API server.
//! * `time`: spans that hold although clocks do not.
//! * `words`: how all of it is said to people.

mod judge;
mod queue;
mod status;
mod time;
mod types;
mod words;

#[cfg(test)]
mod cases;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

pub use judge::bare;
pub use time::{deadline, mono};
pub use types::{
    Act, Attempt, Begin, Hook, Key, LEAST_GRACE, Memory, Now, Observed, Plan, PodSight, Request, RunState,
    RuntimeSight, Seen, Settled, Stage, Urgency, View, Wake, Wanted, Write,
};
pub use words::{Step, Wait};

use crate::pods::PodView;
use judge::{Case, Verdict};
use queue::{End, Turn};

/// How long the plan relies on events alone before it wants another look at the runtime.
const RECHECK: Duration = Duration::from_secs(10);

/// What to do about one Pod, given all that is known at `now`.
#[must_use]
pub fn plan(seen: &Observed, now: Now) -> Plan {
    let mut plan = Plan::default();
    let turns = queue::turns(seen, now);
    for (request, turn) in &turns {
        match turn {
            Turn::Over(why) => end(&mut plan, seen, request, why, now),
            Turn::Behind(first) => {
                wait(
                    &mut plan,
                    request,
                    Wait::Queued {
                        behind: first.clone(),
                    },
                    None,
                );
            }
            Turn::Next => next(&mut plan, seen, request, now),
        }
        if let Some(at) = time::deadline(request).filter(|at| *at > now.api) {
            wake(&mut plan, time::mono(at, now), Wait::Deadline);
        }
    }
    for request in &seen.requests {
        finish(&mut plan, seen, request);
    }
    cancel(&mut plan, seen, &turns);
    plan
}

/// What has begun is finished, also where its request is over: only what still waits for a slot is cancelled then, and
/// what a container no longer needs, and everything in a Pod that kubelet ends.
fn cancel(plan: &mut Plan, seen: &Observed, turns: &[(Arc<Request>, Turn)]) {
    let turn = |uid: &str| {
        turns
            .iter()
            .find(|(request, _)| request.uid == uid)
            .map(|(_, turn)| turn)
    };
    let leaving = match &seen.pod {
        PodSight::Gone => true,
        PodSight::Here(pod) => pod.deleting,
        PodSight::Unknown(_) => false,
    };
    let ended: BTreeSet<&Key> = plan.settle.iter().map(|(key, _)| key).collect();
    let needless = |key: &Key, attempt: &Attempt| match turn(&key.request) {
        Some(Turn::Next) => false,
        Some(Turn::Over(End::PodGone | End::NoRuntime(_))) => true,
        _ => leaving || attempt.stage == Stage::Queued,
    };
    let live = seen.memory.attempts.iter().filter(|(_, attempt)| attempt.live);
    plan.cancel = live
        .filter(|(key, attempt)| ended.contains(key) || needless(key, attempt))
        .map(|(key, _)| key.clone())
        .collect();
}

/// A request that is over and of which a container was still being stopped at its end.
fn finish(plan: &mut Plan, seen: &Observed, request: &Request) {
    if request.status.completion_time.is_none() && !request.deleting {
        return;
    }
    let attempts = seen.memory.attempts.iter();
    let ours = attempts.filter(|(key, attempt)| key.request == request.uid && attempt.live);
    let containers: Vec<_> = ours
        .map(|(key, attempt)| {
            let step = if attempt.stage == Stage::Hook {
                Step::Hook
            } else {
                Step::Stopping
            };
            (key.container.clone(), step)
        })
        .collect();
    if !containers.is_empty() {
        plan.steps.push(View {
            request: request.uid.clone(),
            wait: None,
            containers,
        });
    }
    plan.writes.extend(status::finished(request, seen));
}

/// The request whose turn it is.
fn next(plan: &mut Plan, seen: &Observed, request: &Arc<Request>, now: Now) {
    let pod = match &seen.pod {
        PodSight::Here(pod) => Arc::clone(pod),
        // `queue` has ended the request of a Pod that is gone.
        PodSight::Gone => return,
        PodSight::Unknown(why) => {
            return wait(plan, request, Wait::Pod(why.clone()), Some(now.mono + RECHECK));
        }
    };
    if let Some((why, at)) = queue::unready(request, &seen.memory, now) {
        return wait(plan, request, why, at);
    }
    let walk = Walk::new(seen, request, &pod, now, false);
    for (key, settled) in walk.newly_settled(seen) {
        plan.settle.push((key, settled));
    }
    if walk.complete() {
        plan.writes.extend(status::completed(request, &pod, &walk, now));
        plan.steps.push(walk.view(None));
        return;
    }
    let wait = match &seen.runtime {
        RuntimeSight::Unknown(why) => Some(Wait::Runtime(why.clone())),
        _ => None,
    };
    plan.writes
        .extend(status::running(request, &pod, &walk, wait.as_ref()));
    plan.steps.push(walk.view(wait));
    wake(plan, now.mono + RECHECK, Wait::Recheck);
    for (at, why) in walk.again {
        wake(plan, at, why);
    }
    plan.begin.extend(walk.begin);
}

/// A request that does nothing for now.
fn wait(plan: &mut Plan, request: &Arc<Request>, why: Wait, at: Option<Duration>) {
    plan.writes.extend(status::waiting(request, &why));
    let containers = request
        .containers
        .iter()
        .map(|wanted| (wanted.name.clone(), Step::Waiting))
        .collect();
    if let Some(at) = at {
        wake(plan, at, why.clone());
    }
    plan.steps.push(View {
        request: request.uid.clone(),
        wait: Some(why),
        containers,
    });
}

/// A request that ends before its containers do.
fn end(plan: &mut Plan, seen: &Observed, request: &Arc<Request>, why: &End, now: Now) {
    let steps = match &seen.pod {
        PodSight::Here(pod) => Walk::new(seen, request, pod, now, true).steps,
        _ => Vec::new(),
    };
    plan.writes.extend(status::ended(request, seen, &steps, why, now));
}

fn wake(plan: &mut Plan, at: Duration, why: Wait) {
    if plan.wake.as_ref().is_none_or(|wake| at < wake.at) {
        plan.wake = Some(Wake { at, why });
    }
}

/// A container to be replaced, to be written down before that.
struct Record {
    container: String,
    /// Its ID, with scheme.
    id: String,
    /// Whether it will be stopped.
    kill: bool,
}

/// One pass over a request's containers.
pub(crate) struct Walk {
    request: Arc<Request>,
    /// Where each container is, in the request's order.
    steps: Vec<(String, Step)>,
    /// What may be begun now.
    begin: Vec<Begin>,
    /// What must be written before anything is begun.
    record: Vec<Record>,
    /// Names of the containers whose stopping we have begun.
    touched: BTreeSet<String>,
    /// When a container can be expected to be further without an event.
    again: Vec<(Duration, Wait)>,
    /// The first container that failed, where that ends the request.
    halted: Option<String>,
    /// Whether a container is begun and not done.
    under_way: bool,
}

impl Walk {
    fn new(seen: &Observed, request: &Arc<Request>, pod: &PodView, now: Now, over: bool) -> Self {
        let mut walk = Self {
            request: Arc::clone(request),
            steps: Vec::new(),
            begin: Vec::new(),
            record: Vec::new(),
            touched: BTreeSet::new(),
            again: Vec::new(),
            halted: None,
            under_way: false,
        };
        let mut closed = false;
        for wanted in &request.containers {
            let case = Case {
                request,
                wanted,
                pod,
                seen,
                now,
                over,
            };
            let verdict = case.judge();
            let settled = matches!(verdict, Verdict::Settled(_));
            let step = walk.take(&case, verdict, closed);
            walk.steps.push((wanted.name.clone(), step));
            closed |= request.ordered && !settled;
        }
        walk
    }

    /// Adds one container; `closed` where one before it must be done first.
    fn take(&mut self, case: &Case<'_>, verdict: Verdict, closed: bool) -> Step {
        if case.attempt().is_some_and(|attempt| attempt.begun.is_some()) {
            self.touched.insert(case.wanted.name.clone());
        }
        let begun = case.attempt().is_some() || case.stored().is_some_and(|state| state.is_killed);
        let may_begin = begun || (!closed && self.halted.is_none());
        match verdict {
            Verdict::Settled(Settled { failed: None }) => Step::Succeeded,
            Verdict::Settled(Settled { failed: Some(why) }) => {
                if !self.request.ignore_failures && self.halted.is_none() {
                    self.halted = Some(case.wanted.name.clone());
                }
                Step::Failed(why)
            }
            _ if !may_begin => Step::Waiting,
            Verdict::Record { .. } if case.over => Step::Waiting,
            Verdict::Ready { .. } if case.over => case.left_at(),
            Verdict::Record { id, kill } => {
                self.under_way = true;
                self.record.push(Record {
                    container: case.wanted.name.clone(),
                    id,
                    kill,
                });
                Step::Recording
            }
            Verdict::Ready { target, act } => self.begin(case, target, *act),
            Verdict::Busy { step, again } => {
                self.under_way = true;
                let why = if matches!(step, Step::Young { .. }) {
                    Wait::MinStarted
                } else {
                    Wait::Retry
                };
                self.again.extend(again.map(|at| (at, why)));
                step
            }
        }
    }

    fn begin(&mut self, case: &Case<'_>, target: String, act: Act) -> Step {
        self.under_way = true;
        let step = if act.hook.is_some() {
            Step::Hook
        } else {
            Step::Stopping
        };
        let deadline = time::deadline(case.request);
        self.begin.push(Begin {
            key: case.key(),
            request: case.request.name.clone(),
            target,
            first: case.attempt().is_none_or(|attempt| attempt.begun.is_none()),
            until: deadline.map(|at| time::mono(at, case.now)),
            act,
        });
        step
    }

    /// Whether nothing is left to do or to wait for.
    fn complete(&self) -> bool {
        !self.under_way && (self.halted.is_some() || self.unsettled().next().is_none())
    }

    fn unsettled(&self) -> impl Iterator<Item = &(String, Step)> {
        self.steps
            .iter()
            .filter(|(_, step)| !matches!(step, Step::Succeeded | Step::Failed(_)))
    }

    /// Ends that neither our memory nor the API server has yet.
    fn newly_settled(&self, seen: &Observed) -> Vec<(Key, Settled)> {
        let mut new = Vec::new();
        for (name, step) in &self.steps {
            let failed = match step {
                Step::Succeeded => None,
                Step::Failed(why) => Some(why.clone()),
                _ => continue,
            };
            let key = Key {
                request: self.request.uid.clone(),
                container: name.clone(),
            };
            if !seen.memory.settled.contains_key(&key) {
                new.push((key, Settled { failed }));
            }
        }
        new
    }

    fn view(&self, wait: Option<Wait>) -> View {
        View {
            request: self.request.uid.clone(),
            wait,
            containers: self.steps.clone(),
        }
    }
}
