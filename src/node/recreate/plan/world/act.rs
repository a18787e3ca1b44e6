//! What the daemon of the miniature node does with a plan, and what must never be asked of it.

use super::*;

impl World {
    /// Carries a plan out; returns whether that may have changed what the next plan says.
    pub(super) fn act(&mut self, plan: Plan) -> bool {
        let mut changed = false;
        for key in plan.cancel {
            self.ops.retain(|op| op.key != key);
            self.memory.attempts.get_mut(&key).unwrap().live = false;
            self.log(Event::BrokenOff {
                request: key.request,
                container: key.container,
            });
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
        let Begin { key, target, act, .. } = begin;
        let (stage, ends_at) = self.start(&key, &target, &act);
        let (request, container) = (key.request.clone(), key.container.clone());
        let named = target.clone();
        self.log(match act {
            Act::Hook { .. } => Event::Hook {
                request,
                container,
                target: named,
            },
            Act::Stop { .. } => Event::Stop {
                request,
                container,
                target: named,
            },
        });
        self.ops.push(Op {
            key: key.clone(),
            ends_at,
            hook: stage == Stage::Hook,
        });
        let old = self.memory.attempts.get(&key);
        let begun = old.map_or(Duration::from_millis(self.now), |attempt| attempt.begun);
        self.memory.attempts.insert(
            key,
            Attempt {
                target,
                begun,
                stage,
                live: true,
            },
        );
    }

    /// Nothing may be begun for a request that is over.
    fn assert_open(&self, uid: &str) {
        let request = self.requests.iter().find(|r| r.uid == uid);
        let request = request.expect("a request that exists");
        assert!(
            request.status.completed.is_none() && !request.deleting,
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

    /// What the act does to its container, and when the act ends.
    fn start(&mut self, key: &Key, target: &str, act: &Act) -> (Stage, Ms) {
        let now = self.now;
        let sim = self.sims.iter_mut().find(|sim| sim.name == key.container);
        let sim = sim.expect("a container that exists");
        assert!(
            target == sim.id() && sim.running_since.is_some(),
            "{target} does not run"
        );
        match act {
            Act::Hook { limit, .. } => {
                let takes = sim.hook_takes.expect("a hook").min(limit.as_millis() as Ms);
                (Stage::Hook, now + takes)
            }
            Act::Stop { grace } => {
                assert!(*grace >= Duration::from_secs(2), "kubelet's least grace");
                let ends = now + sim.stop_takes.min(grace.as_millis() as Ms);
                let ends = sim.ends_at.map_or(ends, |at| at.min(ends));
                // TERM is out: the container ends by itself even if nobody waits for it.
                sim.ends_at = Some(ends);
                (Stage::Stopping, ends)
            }
        }
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
        assert!(request.status.completed.is_none(), "written after completionTime");
        let mut status = write.status.clone();
        status.unready_since = request.status.unready_since;
        let idle = request.status == status && !self.foreign_crds;
        assert!(!idle, "a write that changes nothing");
        for state in &mut status.states {
            let key = Key {
                request: write.request.clone(),
                container: state.name.clone(),
            };
            if let Some(target) = &state.target {
                self.memory.targets.insert(key, target.clone());
            }
            if self.foreign_crds {
                state.target = None;
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
