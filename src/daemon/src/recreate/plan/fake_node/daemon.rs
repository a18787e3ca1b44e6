//! How the daemon of the fake node executes a plan, and assertions on what a plan must never request.

use super::*;
use crate::pods::MIN_GRACE_PERIOD;

impl FakeNode {
    /// Executes a plan; returns whether that may change the next plan.
    pub(super) fn apply(&mut self, plan: Plan) -> bool {
        let mut changed = false;
        for key in plan.cancel {
            let cancelled: Vec<Operation> = self
                .operations
                .extract_if(.., |op| op.action.key == key)
                .collect();
            self.state.attempts.get_mut(&key).unwrap().in_progress = false;
            for op in cancelled
                .iter()
                .filter(|op| !matches!(op.stage, OperationStage::Queued))
            {
                let needless = !self.is_running(&op.action);
                self.log(LogEvent::Cancelled {
                    request: key.request_uid.clone(),
                    container: key.container.clone(),
                    needless,
                });
            }
            changed = true;
        }
        for begin in plan.stops {
            self.begin_stop(begin);
            changed = true;
        }
        let mut pending = BTreeMap::new();
        for write in plan.writes {
            changed |= self.apply_write(&write, &mut pending);
        }
        self.pending_writes = pending;
        changed
    }

    fn begin_stop(&mut self, action: StopAction) {
        self.assert_active(&action.key.request_uid);
        let previous = self.state.attempts.get(&action.key);
        let attempt = StopAttempt {
            request_name: action.request_name.clone(),
            started_at: previous.and_then(|attempt| attempt.started_at),
            hook_done: !action.run_hook,
            grace_spent: previous.map(|attempt| attempt.grace_spent).unwrap_or_default(),
            failures: 0,
            stage: StopStage::Queued,
            in_progress: true,
        };
        self.state.attempts.insert(action.key.clone(), attempt);
        let (from, until) = self.slots_full;
        let operation = Operation {
            action,
            stage: OperationStage::Queued,
            ends_at: until,
            hook_time: 0,
        };
        if (from..until).contains(&self.now) {
            self.operations.push(operation);
        } else {
            self.finish_stage(operation);
        }
    }

    /// Ends a stage of an operation.
    pub(super) fn finish_stage(&mut self, operation: Operation) {
        let key = operation.action.key.clone();
        match operation.stage {
            OperationStage::Queued => {
                let late = |until: Duration| self.now >= until.as_millis() as Ms;
                if !operation.action.deadline.is_some_and(late) {
                    self.start_operation(operation);
                }
            }
            OperationStage::Hook { cancelled: false } => {
                let had = self.stop_history(&key);
                had.grace_used += operation.hook_time;
                had.hook_done = true;
                self.state.attempts.get_mut(&key).unwrap().hook_done = true;
                self.stop_container(operation);
            }
            OperationStage::Hook { cancelled: true } => {
                self.stop_failed(&key, 0);
                self.log(LogEvent::StopEnded {
                    request: key.request_uid,
                });
            }
            OperationStage::Stop { fault, since } => {
                let now = Duration::from_millis(self.now);
                let mut spent = operation.hook_time;
                if let Some(Fault::Fails(_)) = fault {
                    spent += self.now - since;
                    self.stop_history(&key).grace_used += self.now - since;
                }
                if fault.is_some() {
                    self.stop_failed(&key, spent);
                } else {
                    let attempt = self.state.attempts.get_mut(&key).unwrap();
                    attempt.in_progress = false;
                    attempt.stage = StopStage::Stopped(now);
                }
                self.log(LogEvent::StopEnded {
                    request: key.request_uid,
                });
            }
        }
    }

    fn container(&mut self, name: &str) -> &mut FakeContainer {
        self.containers
            .iter_mut()
            .find(|sim| sim.name == name)
            .expect("a container that exists")
    }

    /// Whether the container to be stopped still runs.
    fn is_running(&mut self, action: &StopAction) -> bool {
        let sim = self.container(&action.key.container);
        sim.id() == action.target && sim.running_since.is_some()
    }

    fn stop_history(&mut self, key: &ContainerKey) -> &mut StopHistory {
        let history = &mut self.container(&key.container).stop_history;
        if history.request != key.request_uid {
            *history = StopHistory {
                request: key.request_uid.clone(),
                ..StopHistory::default()
            };
        }
        history
    }

    /// The runtime did not stop the container; the stop is retried.
    fn stop_failed(&mut self, key: &ContainerKey, grace_spent: Ms) {
        let retry_at = Duration::from_millis(self.now) + Duration::from_secs(1);
        let attempt = self.state.attempts.get_mut(key).unwrap();
        attempt.in_progress = false;
        attempt.grace_spent += Duration::from_millis(grace_spent);
        attempt.stage = StopStage::Retry {
            retry_at,
            error: "no luck".into(),
        };
    }

    fn set_stage(&mut self, key: &ContainerKey, stage: StopStage) {
        let now = Duration::from_millis(self.now);
        let attempt = self.state.attempts.get_mut(key).unwrap();
        attempt.started_at.get_or_insert(now);
        attempt.stage = stage;
    }

    /// Starts an operation that got a slot.
    fn start_operation(&mut self, mut operation: Operation) {
        let (key, target) = (operation.action.key.clone(), operation.action.target.clone());
        let request = self.requests.iter().find(|r| r.uid == key.request_uid);
        let active = request.is_some_and(|r| r.status.completion_time.is_none());
        assert!(active, "started for a request that is completed");
        // While it waited for a slot, the container may have ended because of an earlier daemon's stop.
        if !operation.action.run_hook || !self.is_running(&operation.action) {
            return self.stop_container(operation);
        }
        operation.hook_time = self
            .container(&key.container)
            .hook_takes
            .expect("a hook")
            .min(operation.action.grace_period.as_millis() as Ms);
        let hook_ends_at = self.now + operation.hook_time;
        let unreachable = self
            .faults
            .iter()
            .filter(|(.., fault)| matches!(fault, Fault::Unreachable));
        let unreachable =
            unreachable.filter(|(from, until, _)| *from < hook_ends_at && *until > self.now.max(*from));
        let broken = unreachable.map(|(from, ..)| self.now.max(*from)).min();
        operation.ends_at = broken.unwrap_or(hook_ends_at);
        operation.stage = OperationStage::Hook {
            cancelled: broken.is_some(),
        };
        let history = self.stop_history(&key);
        assert!(
            !history.hook_done && history.grace_used == 0,
            "a hook that runs twice"
        );
        self.set_stage(&key, StopStage::Hook);
        self.log(LogEvent::Hook {
            request: key.request_uid,
            container: key.container,
            target,
        });
        self.operations.push(operation);
    }

    /// Calls the runtime to stop the container.
    fn stop_container(&mut self, mut operation: Operation) {
        let (now, key, target) = (
            self.now,
            operation.action.key.clone(),
            operation.action.target.clone(),
        );
        let request = self.requests.iter().find(|r| r.uid == key.request_uid);
        let seconds = |request: &RecreateRequest| request.strategy.termination_grace_period_seconds;
        let grace = request.map(|request| time::bounded_seconds(seconds(request).unwrap_or(30)));
        let grace_given = operation
            .action
            .termination_grace(Duration::from_millis(operation.hook_time));
        let (history, already_stopped) = (
            self.stop_history(&key).clone(),
            !self.is_running(&operation.action),
        );
        let mut faults = self.faults.iter();
        let fault = faults.find(|(from, until, _)| (*from..*until).contains(&now));
        let fault = fault.map(|(.., fault)| *fault);
        let sim = self.container(&key.container);
        if let (Some(grace), false) = (grace, already_stopped) {
            // Fractions of a second of each part are added to the container's time.
            let owed = grace
                .saturating_sub(Duration::from_millis(history.grace_used))
                .max(MIN_GRACE_PERIOD);
            let excess = grace_given.checked_sub(owed);
            assert!(
                excess.is_some_and(|more| more < Duration::from_secs(1)),
                "gave {grace_given:?} of {grace:?}, of which {history:?} is used"
            );
            let hook = sim.hook_takes.is_some() && !grace.is_zero();
            assert_eq!(hook, history.hook_done, "a stop without the hook before it");
        }
        let ends_at = now + sim.stop_takes.min(grace_given.as_millis() as Ms);
        let ends_at = sim.ends_at.map_or(ends_at, |at| at.min(ends_at));
        operation.ends_at = match fault {
            _ if already_stopped => now,
            Some(Fault::Unreachable) => now,
            Some(Fault::Hangs(span)) => now + span,
            Some(Fault::Fails(span)) => (now + span).min(ends_at),
            None => ends_at,
        };
        if !already_stopped && matches!(fault, None | Some(Fault::Fails(_))) {
            // TERM is sent: the container ends even if no operation waits for it.
            sim.ends_at = Some(ends_at);
        }
        operation.stage = OperationStage::Stop { fault, since: now };
        self.set_stage(&key, StopStage::Stopping);
        self.log(LogEvent::Stop {
            request: key.request_uid,
            container: key.container,
            target,
            grace: grace_given.as_millis() as Ms,
        });
        if operation.ends_at <= now {
            self.finish_stage(operation);
        } else {
            self.operations.push(operation);
        }
    }

    /// Nothing may start for a request that is completed.
    fn assert_active(&self, uid: &str) {
        let request = self.requests.iter().find(|r| r.uid == uid);
        let request = request.expect("a request that exists");
        assert!(
            request.status.completion_time.is_none() && !request.terminating,
            "acted for a request that is completed"
        );
        let deadline = request
            .deadline_seconds
            .map(|s| request.created_at + SignedDuration::from_secs(s));
        assert!(
            deadline.is_none_or(|at| self.clocks().api < at),
            "started at or after the deadline"
        );
    }

    fn apply_write(&mut self, write: &StatusWrite, pending: &mut BTreeMap<String, Ms>) -> bool {
        let uid = &write.request.uid;
        let since = self.pending_writes.get(uid).copied().unwrap_or(self.now);
        pending.insert(uid.clone(), since);
        let api_down = self.api_down.0 <= self.now && self.now < self.api_down.1;
        let due = since + write_delay(write.urgency);
        if api_down || self.now < due {
            return false;
        }
        pending.remove(uid);
        let request = self.requests.iter_mut().find(|r| r.uid == *uid).unwrap();
        let mut status = write.status.clone();
        if request.status.completion_time.is_some() {
            // After the end only the result of a stop that was still running is written.
            let without_messages = |status: &Status| {
                let mut status = status.clone();
                status
                    .container_recreate_states
                    .iter_mut()
                    .for_each(|state| state.message = None);
                status
            };
            assert_eq!(
                without_messages(&request.status),
                without_messages(&status),
                "changed after completionTime"
            );
        }
        status.conditions.clone_from(&request.status.conditions);
        let unchanged = request.status == status && !self.foreign_crds;
        assert!(!unchanged, "a write that changes nothing");
        for state in &mut status.container_recreate_states {
            let key = write.request.container_key(&state.name);
            if let Some(target) = &state.container_id {
                self.state.targets.insert(key, target.clone());
            }
            if self.foreign_crds {
                state.container_id = None;
            }
        }
        request.status = status.clone();
        self.log(LogEvent::StatusWritten {
            request: uid.clone(),
            status,
        });
        true
    }
}
