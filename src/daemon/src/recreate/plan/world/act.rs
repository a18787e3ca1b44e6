//! What the daemon of the miniature node does with a plan, and what must never be asked of it.

use super::*;

impl World {
    /// Carries a plan out; returns whether that may have changed what the next plan says.
    pub(super) fn act(&mut self, plan: Plan) -> bool {
        let mut changed = false;
        for key in plan.cancel {
            let ops: Vec<Op> = self.ops.extract_if(.., |op| op.begin.key == key).collect();
            self.memory.attempts.get_mut(&key).unwrap().live = false;
            for op in ops.iter().filter(|op| !matches!(op.stage, OpStage::Queued)) {
                let needless = !self.runs(&op.begin);
                self.log(Event::BrokenOff {
                    request: key.request.clone(),
                    container: key.container.clone(),
                    needless,
                });
            }
            changed = true;
        }
        for (key, settled) in plan.settle {
            assert!(
                self.memory.settled.insert(key, settled).is_none(),
                "settled twice"
            );
            changed = true;
        }
        for begin in plan.begin {
            self.begin(begin);
            changed = true;
        }
        let mut wanted = BTreeMap::new();
        for write in plan.writes {
            changed |= self.write(&write, &mut wanted);
        }
        self.dirty = wanted;
        changed
    }

    fn begin(&mut self, begin: Begin) {
        self.assert_open(&begin.key.request);
        let old = self.memory.attempts.get(&begin.key);
        let attempt = Attempt {
            request: begin.request.clone(),
            target: begin.target.clone(),
            begun: old.and_then(|attempt| attempt.begun),
            hooked: begin.act.hook.is_none(),
            spent: old.map(|attempt| attempt.spent).unwrap_or_default(),
            stage: Stage::Queued,
            live: true,
        };
        self.memory.attempts.insert(begin.key.clone(), attempt);
        let (from, until) = self.crowded;
        let op = Op {
            begin,
            stage: OpStage::Queued,
            ends_at: until,
            hook: 0,
        };
        if (from..until).contains(&self.now) {
            self.ops.push(op);
        } else {
            self.go_on(op);
        }
    }

    /// A stage of an operation is over.
    pub(super) fn go_on(&mut self, op: Op) {
        let key = op.begin.key.clone();
        match op.stage {
            OpStage::Queued => {
                let late = |until: Duration| self.now >= until.as_millis() as Ms;
                if !op.begin.until.is_some_and(late) {
                    self.start(op);
                }
            }
            OpStage::Hook { broken: false } => {
                let had = self.had(&key);
                had.grace += op.hook;
                had.hook = true;
                self.memory.attempts.get_mut(&key).unwrap().hooked = true;
                self.stop(op);
            }
            OpStage::Hook { broken: true } => {
                self.refused(&key, 0);
                self.log(Event::Ended { request: key.request });
            }
            OpStage::Stop { fault, since } => {
                let now = Duration::from_millis(self.now);
                let mut spent = op.hook;
                if let Some(Fault::Refuses(_)) = fault {
                    spent += self.now - since;
                    self.had(&key).grace += self.now - since;
                }
                if fault.is_some() {
                    self.refused(&key, spent);
                } else {
                    let attempt = self.memory.attempts.get_mut(&key).unwrap();
                    attempt.live = false;
                    attempt.stage = Stage::Stopped(now);
                }
                self.log(Event::Ended { request: key.request });
            }
        }
    }

    fn sim(&mut self, name: &str) -> &mut Sim {
        self.sims
            .iter_mut()
            .find(|sim| sim.name == name)
            .expect("a container that exists")
    }

    /// Whether the container to be stopped still runs.
    fn runs(&mut self, begin: &Begin) -> bool {
        let sim = self.sim(&begin.key.container);
        sim.id() == begin.target && sim.running_since.is_some()
    }

    fn had(&mut self, key: &Key) -> &mut Had {
        let had = &mut self.sim(&key.container).had;
        if had.request != key.request {
            *had = Had {
                request: key.request.clone(),
                ..Had::default()
            };
        }
        had
    }

    /// The runtime did not do it; it is asked again.
    fn refused(&mut self, key: &Key, spent: Ms) {
        let at = Duration::from_millis(self.now) + Duration::from_secs(1);
        let attempt = self.memory.attempts.get_mut(key).unwrap();
        attempt.live = false;
        attempt.spent += Duration::from_millis(spent);
        attempt.stage = Stage::Retry {
            at,
            error: "no luck".into(),
        };
    }

    fn act_on(&mut self, key: &Key, stage: Stage) {
        let now = Duration::from_millis(self.now);
        let attempt = self.memory.attempts.get_mut(key).unwrap();
        attempt.begun.get_or_insert(now);
        attempt.stage = stage;
    }

    /// A slot is free.
    fn start(&mut self, mut op: Op) {
        let (key, target) = (op.begin.key.clone(), op.begin.target.clone());
        let open = self.requests.iter().find(|r| r.uid == key.request);
        let open = open.is_some_and(|r| r.status.completion_time.is_none());
        assert!(open, "begun for a request that is over");
        // What waited for a slot may have ended by the stop of an earlier daemon.
        if op.begin.act.hook.is_none() || !self.runs(&op.begin) {
            return self.stop(op);
        }
        op.hook = self
            .sim(&key.container)
            .hook_takes
            .expect("a hook")
            .min(op.begin.act.grace.as_millis() as Ms);
        let ends = self.now + op.hook;
        let gone = self
            .faults
            .iter()
            .filter(|(.., fault)| matches!(fault, Fault::Away));
        let gone = gone.filter(|(from, until, _)| *from < ends && *until > self.now.max(*from));
        let broken = gone.map(|(from, ..)| self.now.max(*from)).min();
        op.ends_at = broken.unwrap_or(ends);
        op.stage = OpStage::Hook {
            broken: broken.is_some(),
        };
        let had = self.had(&key);
        assert!(!had.hook && had.grace == 0, "a hook that comes second");
        self.act_on(&key, Stage::Hook);
        self.log(Event::Hook {
            request: key.request,
            container: key.container,
            target,
        });
        self.ops.push(op);
    }

    /// The runtime is asked to stop the container.
    fn stop(&mut self, mut op: Op) {
        let (now, key, target) = (self.now, op.begin.key.clone(), op.begin.target.clone());
        let request = self.requests.iter().find(|r| r.uid == key.request);
        let grace = request.map(|request| time::seconds(request.grace_seconds.unwrap_or(30)));
        let asked = op.begin.act.term(Duration::from_millis(op.hook));
        let (had, gone) = (self.had(&key).clone(), !self.runs(&op.begin));
        let mut faults = self.faults.iter();
        let fault = faults.find(|(from, until, _)| (*from..*until).contains(&now));
        let fault = fault.map(|(.., fault)| *fault);
        let sim = self.sim(&key.container);
        if let (Some(grace), false) = (grace, gone) {
            // Fractions of a second of each part are the container's.
            let owed = grace
                .saturating_sub(Duration::from_millis(had.grace))
                .max(LEAST_GRACE);
            let more = asked.checked_sub(owed);
            assert!(
                more.is_some_and(|more| more < Duration::from_secs(1)),
                "asked for {asked:?} of {grace:?}, of which it has had {had:?}"
            );
            let hook = sim.hook_takes.is_some() && !grace.is_zero();
            assert_eq!(hook, had.hook, "a stop without the hook before it");
        }
        let ends = now + sim.stop_takes.min(asked.as_millis() as Ms);
        let ends = sim.ends_at.map_or(ends, |at| at.min(ends));
        op.ends_at = match fault {
            _ if gone => now,
            Some(Fault::Away) => now,
            Some(Fault::Hangs(span)) => now + span,
            Some(Fault::Refuses(span)) => (now + span).min(ends),
            None => ends,
        };
        if !gone && matches!(fault, None | Some(Fault::Refuses(_))) {
            // TERM is out: the container ends also if nothing waits for it.
            sim.ends_at = Some(ends);
        }
        op.stage = OpStage::Stop { fault, since: now };
        self.act_on(&key, Stage::Stopping);
        self.log(Event::Stop {
            request: key.request,
            container: key.container,
            target,
            grace: asked.as_millis() as Ms,
        });
        if op.ends_at <= now {
            self.go_on(op);
        } else {
            self.ops.push(op);
        }
    }

    /// Nothing may be begun for a request that is over.
    fn assert_open(&self, uid: &str) {
        let request = self.requests.iter().find(|r| r.uid == uid);
        let request = request.expect("a request that exists");
        assert!(
            request.status.completion_time.is_none() && !request.deleting,
            "acted for a request that is over"
        );
        let deadline = request
            .deadline_seconds
            .map(|s| request.created + SignedDuration::from_secs(s));
        assert!(
            deadline.is_none_or(|at| self.clock().api < at),
            "begun at or after the deadline"
        );
    }

    fn write(&mut self, write: &Write, wanted: &mut BTreeMap<String, Ms>) -> bool {
        let since = self.dirty.get(&write.request).copied().unwrap_or(self.now);
        wanted.insert(write.request.clone(), since);
        let away = self.api_down.0 <= self.now && self.now < self.api_down.1;
        let due = since + patience(write.urgency);
        if away || self.now < due {
            return false;
        }
        wanted.remove(&write.request);
        let request = self.requests.iter_mut().find(|r| r.uid == write.request).unwrap();
        let mut status = write.status.clone();
        if request.status.completion_time.is_some() {
            // What is told after the end is how a stop ended that ran then, and nothing else.
            let silent = |status: &Status| {
                let mut status = status.clone();
                status
                    .container_recreate_states
                    .iter_mut()
                    .for_each(|state| state.message = None);
                status
            };
            assert_eq!(
                silent(&request.status),
                silent(&status),
                "changed after completionTime"
            );
        }
        status.conditions.clone_from(&request.status.conditions);
        let idle = request.status == status && !self.foreign_crds;
        assert!(!idle, "a write that changes nothing");
        for state in &mut status.container_recreate_states {
            let key = Key {
                request: write.request.clone(),
                container: state.name.clone(),
            };
            if let Some(target) = &state.container_id {
                self.memory.targets.insert(key, target.clone());
            }
            if self.foreign_crds {
                state.container_id = None;
            }
        }
        request.status = status.clone();
        self.log(Event::Wrote {
            request: write.request.clone(),
            status,
        });
        true
    }
}
