//! State of a CloneSet that is kept between reconciles, in memory only; losing it is harmless.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::plan::{
    ActionFailure, ActionPurpose, CloneSetEvent, FailureSubject, TemplateStatus, UnfinishedCreations,
};
use super::revision_error::RevisionError;
use crate::status_pacer::StatusPacer;
use kruise_api::backoff::Backoff;
use kruise_api::time::MAX_CLOCK_CORRECTION;
use kruise_cluster::{Error, Key};
use kruise_workload::revision::DesiredRevision;

/// Maximum concurrent writes over all CloneSets: what the API server can take without queueing.
pub const MAX_CONCURRENT_WRITES: usize = 64;

/// Backoff after failures.
const RETRY_BACKOFF: Backoff = Backoff::new(Duration::from_millis(500), MAX_BACKOFF);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Nothing can be created in a terminating namespace: there is no retry unless the CloneSet changes.
const TERMINATING_BACKOFF: Duration = Duration::from_hours(24);
/// After this time the API server is asked again about a template that it refused: its rules may have changed.
const REJECTED_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// This many conflicts in a row are normal: other writers were first.
const SILENT_CONFLICTS: u32 = 5;
/// Retryable failures are reported after this many in a row.
const REPORT_AFTER_FAILURES: u32 = 3;

/// After this many refused in-place updates in a row, Pods are tried one at a time.
const SERIALIZE_AFTER_REJECTIONS: u32 = 3;

/// Concurrent writes of a CloneSet whose last write had no answer.
const MAX_UNANSWERED_WRITES: usize = 4;

/// Failed attempts are reported after this many, whatever the reason.
const REPORT_AFTER_ATTEMPTS: u32 = 6;

/// For each second of planning, this many seconds are left for everything else.
const PAUSE_PER_COST: u32 = 4;
/// After a second of actions there are changes to plan with.
const MIN_TIME_SLICE: Duration = Duration::from_secs(1);
/// If planning is slow and there is much to do, planning takes at most one part in this many of the time.
const TIME_SLICE_PER_COST: u32 = 40;
/// But a user does not expect an action of an outdated plan this long after a change of the spec.
const MAX_TIME_SLICE: Duration = Duration::from_secs(3);
/// Maximum pause between two reconciles.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// More busy reconciles in a row than a rollout needs, unless it is a large one.
const BUSY_RECONCILES: u32 = 100;
/// Minimum pause after that: a defect of ours must not keep the API server busy.
const BUSY_PAUSE: Duration = Duration::from_millis(200);

/// A template without a revision, and when to retry.
struct TemplateBackoff {
    /// Generation of the template.
    generation: i64,
    attempts: u32,
    /// Those of them that are not expected errors.
    failures: u32,
    retry_at: Instant,
    reported: TemplateStatus,
}

/// State of one CloneSet.
#[derive(Default)]
pub struct ReconcileState {
    /// UID of the CloneSet.
    pub uid: String,
    /// Whether the orphans that it selects were read from the API server.
    pub orphans_fetched: bool,
    /// The desired revision of its template, and the generation that it was resolved for.
    pub desired_revision: Option<(i64, DesiredRevision)>,
    /// Name of the last revision that corresponded to the template; the status may not contain it yet.
    pub accepted_revision: String,
    /// Why the template has no revision.
    template_backoff: Option<TemplateBackoff>,
    /// Number of name collisions, which the status may not contain yet.
    pub collisions: Option<i32>,
    /// Generation of the last reconcile.
    last_generation: i64,
    /// The API server's time at the last reconcile.
    last_time: Option<Timestamp>,
    /// Number of failures in a row, and the time of the last one.
    attempts: BTreeMap<FailureSubject, (u32, Timestamp)>,
    /// What must not be retried before a time.
    pub failures: BTreeMap<FailureSubject, ActionFailure>,
    /// Whether the last write had no answer.
    unanswered: bool,
    /// Refused in-place updates in a row.
    rejections: u32,
    /// Creations that failed actions left unfinished.
    pub unfinished: UnfinishedCreations,
    /// The claim templates that this state is about.
    claim_templates: Vec<Value>,
    /// How many Pods one reconcile may create; `None` while none fails.
    slow_start_batch: Option<usize>,
    /// Earliest time of the next plan.
    next_reconcile: Option<Instant>,
    /// Reconciles in a row that did something.
    busy_reconciles: u32,
    /// Events of the last plan, without waits.
    last_events: BTreeSet<String>,
    /// The wait that was published last: its reason and its start.
    last_wait: Option<(&'static str, Timestamp)>,
    /// Limits the rate of status writes.
    pub status_pacer: StatusPacer,
    /// When to retry the deletion of old revisions.
    revisions_retry_at: Option<Instant>,
    /// When to retry the adoption of orphaned revisions.
    adoption_retry_at: Option<Instant>,
    /// State of storing the template's missing defaults.
    defaults: DefaultsState,
}

/// State of storing missing defaults.
#[derive(Default)]
struct DefaultsState {
    /// The generation that lacks no defaults, or none that can be stored.
    done_generation: Option<i64>,
    /// Failures in a row.
    attempts: u32,
    /// Earliest time of the next write.
    retry_at: Option<Instant>,
    /// Fields in which the template differs from its revision otherwise.
    differing_fields: Vec<String>,
}

/// State of all CloneSets.
#[derive(Default)]
pub struct ReconcileStates(Mutex<HashMap<Key, ReconcileState>>);

impl ReconcileStates {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, ReconcileState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes and returns the state of a CloneSet.
    pub fn remove(&self, name: &Key) -> Option<ReconcileState> {
        self.lock().remove(name)
    }

    /// Checks out the state of the CloneSet with this UID for a reconcile.
    pub fn check_out<'a>(&'a self, name: &'a Key, uid: &str) -> StateGuard<'a> {
        let previous = self.remove(name).filter(|memory| memory.uid == uid);
        let state = previous.unwrap_or_else(|| ReconcileState {
            uid: uid.to_owned(),
            ..ReconcileState::default()
        });
        StateGuard {
            states: self,
            name,
            state,
        }
    }
}

/// The checked-out state of a CloneSet. It is returned however the reconcile ends, also after a panic or a timeout.
pub struct StateGuard<'a> {
    states: &'a ReconcileStates,
    name: &'a Key,
    state: ReconcileState,
}

impl Deref for StateGuard<'_> {
    type Target = ReconcileState;
    fn deref(&self) -> &ReconcileState {
        &self.state
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut ReconcileState {
        &mut self.state
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        let state = std::mem::take(&mut self.state);
        self.states.lock().insert(self.name.clone(), state);
    }
}

/// How long a plan that took `cost` may be executed.
pub fn time_slice(cost: Duration) -> Duration {
    (cost * TIME_SLICE_PER_COST).clamp(MIN_TIME_SLICE, MAX_TIME_SLICE)
}

impl ReconcileState {
    /// How long to wait before the next reconcile, if it is too early for one.
    pub fn requeue_after(&self, now: Instant) -> Option<Duration> {
        self.next_reconcile?
            .checked_duration_since(now)
            .filter(|left| !left.is_zero())
    }

    /// The planned events that the last reconcile did not publish, and the waits that none did.
    pub fn new_events(&mut self, mut planned: Vec<CloneSetEvent>) -> Vec<CloneSetEvent> {
        let others = planned.iter().filter(|event| event.wait_since.is_none());
        let messages: BTreeSet<String> = others.map(|event| event.message.clone()).collect();
        let before = std::mem::replace(&mut self.last_events, messages);
        planned.retain(|event| match event.wait_since {
            Some(since) => {
                let wait = Some((event.reason, since));
                std::mem::replace(&mut self.last_wait, wait) != wait
            }
            None => !before.contains(&event.message),
        });
        planned
    }

    /// Schedules the next reconcile after one whose planning took `cost` and ended at `planned_at`. The time since then
    /// counts as pause.
    pub fn schedule_next_reconcile(&mut self, cost: Duration, acted: bool, planned_at: Instant) {
        self.busy_reconciles = if acted {
            self.busy_reconciles.saturating_add(1)
        } else {
            0
        };
        let least = if self.busy_reconciles > BUSY_RECONCILES {
            BUSY_PAUSE
        } else {
            Duration::ZERO
        };
        self.next_reconcile = Some(planned_at + (cost * PAUSE_PER_COST).clamp(least, MAX_PAUSE));
    }

    /// How many Pods this reconcile may create.
    pub fn slow_start_batch(&self) -> usize {
        self.slow_start_batch.unwrap_or(usize::MAX)
    }

    /// Records the creations of a reconcile: after a failure they are limited to one, then the limit doubles each time.
    pub fn record_creations(&mut self, created: usize, failed: bool, limit: usize) {
        if failed {
            self.slow_start_batch = Some(1);
        } else if created > 0 {
            self.slow_start_batch = self
                .slow_start_batch
                .map(|width| width * 2)
                .filter(|width| *width < limit);
        }
    }

    /// Records a successful action.
    pub fn record_success(&mut self, subject: &FailureSubject) {
        self.attempts.remove(subject);
        self.failures.remove(subject);
    }

    /// Records a failed action; returns whether to report it.
    pub fn record_failure(
        &mut self,
        subject: FailureSubject,
        purpose: ActionPurpose,
        error: &Error,
        now: Timestamp,
    ) -> bool {
        let (attempts, last) = self.attempts.entry(subject.clone()).or_default();
        *attempts = attempts.saturating_add(1);
        *last = now;
        if error.conflict() && *attempts <= SILENT_CONFLICTS {
            return false;
        }
        let backoff = SignedDuration::try_from(backoff(*attempts, error)).unwrap_or(SignedDuration::ZERO);
        let failure = ActionFailure {
            purpose,
            permanent: !error.retryable(),
            resize_rejected: false,
            answered: error.answered(),
            retry_at: now.checked_add(backoff).unwrap_or(now),
            message: error.message().into_owned(),
        };
        self.failures.insert(subject, failure);
        true
    }

    /// Records a permanently refused in-place update. After a few of them in a row, the next update of any Pod waits.
    pub fn record_update_rejection(&mut self, error: &Error, now: Timestamp) {
        self.rejections = self.rejections.saturating_add(1);
        if self.rejections >= SERIALIZE_AFTER_REJECTIONS {
            self.record_failure(FailureSubject::InPlaceUpdates, ActionPurpose::Update, error, now);
        }
    }

    /// Records that an in-place update began.
    pub fn record_update_success(&mut self) {
        self.rejections = 0;
        self.record_success(&FailureSubject::InPlaceUpdates);
    }

    /// Records whether the API server answered a write.
    pub fn record_answer(&mut self, error: Option<&Error>) {
        self.unanswered = error.is_some_and(Error::outcome_unknown);
    }

    /// How many writes this CloneSet may have in flight. All CloneSets share the permits: one whose webhooks hang must
    /// not hold them all.
    pub fn write_limit(&self) -> usize {
        if self.unanswered {
            MAX_UNANSWERED_WRITES
        } else {
            MAX_CONCURRENT_WRITES
        }
    }

    /// Whether the API server refused to resize the Pod.
    pub fn is_resize_rejected(&self, subject: &FailureSubject) -> bool {
        self.failures
            .get(subject)
            .is_some_and(|failure| failure.resize_rejected)
    }

    /// Whether the API server refused to update the Pod.
    pub fn is_update_refused(&self, subject: &FailureSubject) -> bool {
        let failure = self.failures.get(subject);
        failure.is_some_and(|failure| failure.permanent && failure.purpose == ActionPurpose::Update)
    }

    /// Records that the API server refused to resize a Pod; a retry would be refused again.
    pub fn record_resize_rejection(&mut self, subject: &FailureSubject) {
        if let Some(failure) = self.failures.get_mut(subject) {
            failure.resize_rejected = true;
        }
    }

    /// The reported status of the template of this generation, and the time until its revision is retried; `None` if it
    /// may be now.
    pub fn template_backoff(&self, generation: i64, now: Instant) -> Option<(TemplateStatus, Duration)> {
        let current = self
            .template_backoff
            .as_ref()
            .filter(|u| u.generation == generation)?;
        let remaining = current
            .retry_at
            .checked_duration_since(now)
            .filter(|left| !left.is_zero())?;
        Some((current.reported.clone(), remaining))
    }

    /// Records that the template has its revision.
    pub fn template_resolved(&mut self) {
        self.template_backoff = None;
    }

    /// Records that the template got no revision; returns the status to report and the time until the retry.
    pub fn template_failed(
        &mut self,
        generation: i64,
        revision_error: &RevisionError,
        now: Instant,
    ) -> (TemplateStatus, Duration) {
        let before = self
            .template_backoff
            .take()
            .filter(|u| u.generation == generation);
        let (mut attempts, mut failures) = before.as_ref().map_or((0, 0), |u| (u.attempts, u.failures));
        attempts = attempts.saturating_add(1);
        let (why, wait, report) = match revision_error {
            RevisionError::InvalidTemplate(why) => (why.clone(), REJECTED_RETRY_INTERVAL, true),
            RevisionError::Api(error) if error.namespace_terminating() => {
                (error.to_string(), backoff(attempts, error), false)
            }
            RevisionError::Api(error) => {
                // Another writer was first, or the API server is busy.
                let transient = error.conflict() || error.not_found() || error.throttled();
                failures = failures.saturating_add(u32::from(!transient));
                let report = !transient && (!error.retryable() || failures >= REPORT_AFTER_FAILURES);
                (error.to_string(), backoff(attempts, error), report)
            }
        };
        let before = before.map_or(TemplateStatus::Unknown, |u| u.reported);
        let overdue = before == TemplateStatus::Unknown && attempts >= REPORT_AFTER_ATTEMPTS;
        let reported = if report || overdue {
            TemplateStatus::Rejected(why)
        } else {
            // The reported status is kept until there is a revision: a conflict in between is no improvement.
            before
        };
        let backoff = TemplateBackoff {
            generation,
            attempts,
            failures,
            retry_at: now + wait,
            reported: reported.clone(),
        };
        self.template_backoff = Some(backoff);
        (reported, wait)
    }

    pub fn may_delete_revisions(&self, now: Instant) -> bool {
        self.revisions_retry_at.is_none_or(|again| again <= now)
    }

    /// Records that an old revision could not be deleted. Nothing waits for that, so not every reconcile retries it.
    pub fn revision_deletion_failed(&mut self, now: Instant) {
        self.revisions_retry_at = Some(now + MAX_BACKOFF);
    }

    pub fn may_adopt_revisions(&self, now: Instant) -> bool {
        self.adoption_retry_at.is_none_or(|again| again <= now)
    }

    /// Records that a revision could not be adopted. It is used nevertheless, so not every reconcile retries it.
    pub fn revision_adoption_refused(&mut self, now: Instant) {
        self.adoption_retry_at = Some(now + MAX_BACKOFF);
    }

    /// The time until missing defaults of the template of this generation may be stored; `None` if nothing is left to
    /// do.
    pub fn defaults_due(&self, generation: i64, now: Instant) -> Option<Duration> {
        let open = self.defaults.done_generation != Some(generation);
        let pause = |then: Instant| then.saturating_duration_since(now);
        open.then(|| self.defaults.retry_at.map_or(Duration::ZERO, pause))
    }

    /// Records that the template of this generation lacks no defaults, or none that can be stored.
    pub fn defaults_done(&mut self, generation: i64) {
        self.defaults.done_generation = Some(generation);
        self.defaults.attempts = 0;
    }

    /// Records that defaults were stored, which led to this generation. A client that removes them again does not cause
    /// endless writes.
    pub fn defaults_stored(&mut self, generation: i64, now: Instant) {
        self.defaults_done(generation);
        self.defaults.retry_at = Some(now + REJECTED_RETRY_INTERVAL);
    }

    /// Records that defaults were refused; returns the time until the retry, for any generation.
    pub fn record_defaults_rejection(&mut self, now: Instant) -> Duration {
        self.defaults.retry_at = Some(now + REJECTED_RETRY_INTERVAL);
        REJECTED_RETRY_INTERVAL
    }

    /// Records that the template of this generation differs from its revision in these fields; returns whether that is
    /// new.
    pub fn defaults_differ(&mut self, generation: i64, fields: Vec<String>) -> bool {
        self.defaults_done(generation);
        let new = self.defaults.differing_fields != fields;
        self.defaults.differing_fields = fields;
        new
    }

    /// Records that defaults could not be stored; returns the time until the retry.
    pub fn record_defaults_failure(&mut self, error: &Error, now: Instant) -> Duration {
        self.defaults.attempts = self.defaults.attempts.saturating_add(1);
        let backoff = backoff(self.defaults.attempts, error);
        self.defaults.retry_at = Some(now + backoff);
        backoff
    }

    /// Moves recorded times along if the API server's clock was set back: waits would grow by as much.
    fn follow_clock(&mut self, now: Timestamp) {
        let step = self.last_time.map(|before| before.duration_since(now));
        self.last_time = Some(now);
        // Corrections would add up.
        let Some(step) = step.filter(|step| *step > MAX_CLOCK_CORRECTION) else {
            return;
        };
        let move_back = |at: &mut Timestamp| *at = at.checked_sub(step).unwrap_or(now);
        self.attempts.values_mut().for_each(|(_, last)| move_back(last));
        let failures = self.failures.values_mut();
        failures.for_each(|failure| move_back(&mut failure.retry_at));
        self.unfinished.pods.values_mut().flatten().for_each(move_back);
    }

    /// Removes expired failures: what they concerned is done or no longer requested. A new generation is tried at once,
    /// because it may fix them. Claims of other templates must not be used.
    pub fn expire_failures(&mut self, generation: i64, claim_templates: &[Value], now: Timestamp) {
        self.follow_clock(now);
        if self.last_generation != generation {
            self.last_generation = generation;
            if self.claim_templates != claim_templates {
                self.claim_templates = claim_templates.to_vec();
                self.unfinished.pods.clear();
            }
            self.unfinished.without_claims.clear();
            self.failures.clear();
            self.attempts.clear();
            self.rejections = 0;
        }
        let expiry = SignedDuration::try_from(MAX_BACKOFF * 4).unwrap_or(SignedDuration::ZERO);
        // A final failure is not removed, and so not retried, except for a new generation.
        let is_final = |subject: &FailureSubject, failure: &ActionFailure| {
            failure.resize_rejected
                || failure.permanent
                    && matches!(subject, FailureSubject::Job(_) | FailureSubject::Revision(_))
        };
        self.failures.retain(|subject, failure| {
            is_final(subject, failure) || now.duration_since(failure.retry_at) < expiry
        });
        self.attempts
            .retain(|_, (_, last)| now.duration_since(*last) < expiry);
    }
}

/// How long to wait after this many attempts.
fn backoff(attempts: u32, error: &Error) -> Duration {
    if error.namespace_terminating() {
        return TERMINATING_BACKOFF;
    }
    let doubled = RETRY_BACKOFF.delay(attempts.saturating_sub(1));
    error.retry_after().unwrap_or(doubled).min(MAX_BACKOFF)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn api_error(code: u16, reason: &str) -> Error {
        let status =
            serde_json::json!({ "status": "Failure", "message": "no", "reason": reason, "code": code });
        Error::Api(Box::new(serde_json::from_value(status).unwrap()))
    }

    #[test]
    fn wait_event_once_other_events_again_after_absence() {
        let mut state = ReconcileState::default();
        let event = |message: &str, since: Option<i64>| CloneSetEvent {
            warning: false,
            reason: "Paused",
            message: message.to_owned(),
            wait_since: since.map(|at| Timestamp::from_second(at).unwrap()),
        };
        let (wait, other) = (event("paused", Some(1)), event("limited", None));
        assert_eq!(
            state.new_events(vec![wait.clone(), other.clone()]),
            [wait.clone(), other.clone()]
        );
        assert_eq!(state.new_events(vec![wait.clone(), other.clone()]), []);
        assert_eq!(state.new_events(vec![]), []);
        assert_eq!(state.new_events(vec![wait, other.clone()]), [other]);
        let longer = event("paused, still", Some(1));
        assert_eq!(state.new_events(vec![longer]), [], "the same wait");
        let again = event("paused", Some(200));
        assert_eq!(state.new_events(vec![again.clone()]), [again], "another");
    }

    #[test]
    fn time_slice_grows_with_planning_cost() {
        let slices = [0, 1, 25, 50, 75, 5000].map(|ms| time_slice(Duration::from_millis(ms)).as_millis());
        assert_eq!(slices, [1000, 1000, 1000, 2000, 3000, 3000]);
    }

    #[test]
    fn conflicts_retry_at_once_and_failures_back_off() {
        let (mut state, now) = (ReconcileState::default(), Timestamp::UNIX_EPOCH);
        let pod = || FailureSubject::Pod("u".to_owned());
        for _ in 0..SILENT_CONFLICTS {
            assert!(!state.record_failure(pod(), ActionPurpose::Update, &api_error(409, "Conflict"), now));
        }
        assert!(state.failures.is_empty());
        assert!(state.record_failure(pod(), ActionPurpose::Update, &api_error(409, "Conflict"), now));
        state.record_success(&pod());
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert!(state.record_failure(
                FailureSubject::PodCreation,
                ActionPurpose::Scale,
                &api_error(403, "Forbidden"),
                now
            ));
            pauses.push(
                state.failures[&FailureSubject::PodCreation]
                    .retry_at
                    .duration_since(now)
                    .as_millis(),
            );
        }
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        state.expire_failures(0, &[], now);
        assert_eq!(state.failures.len(), 1);
        state.expire_failures(0, &[], now + SignedDuration::from_secs(300));
        assert!(state.failures.is_empty());
        assert!(state.record_failure(
            FailureSubject::PodCreation,
            ActionPurpose::Scale,
            &api_error(403, "Forbidden"),
            now
        ));
        state.expire_failures(1, &[], now);
        assert!(state.failures.is_empty(), "a new spec is tried at once");
    }

    #[test]
    fn clock_that_is_set_back_prolongs_no_wait() {
        let (mut state, before) = (ReconcileState::default(), Timestamp::UNIX_EPOCH);
        let second = SignedDuration::from_secs(1);
        state.expire_failures(0, &[], before);
        let subject = FailureSubject::PodCreation;
        let error = api_error(403, "Forbidden");
        state.record_failure(subject.clone(), ActionPurpose::Scale, &error, before);
        state
            .unfinished
            .pods
            .insert("web-a".to_owned(), Some(before + second * 30));
        let now = before - SignedDuration::from_hours(3);
        state.expire_failures(0, &[], now);
        assert!(state.failures[&subject].retry_at <= now + second);
        assert_eq!(state.unfinished.pods["web-a"], Some(now + second * 30));
        // Two API servers differ by 2 s.
        let retry_at = state.failures[&subject].retry_at;
        for correction in [2, 0, 2, 0, 2] {
            state.expire_failures(0, &[], now - second * correction);
        }
        assert_eq!(state.failures[&subject].retry_at, retry_at);
        state.expire_failures(0, &[], now + second * 300);
        assert!(state.failures.is_empty() && state.attempts.is_empty());
    }

    #[test]
    fn terminating_namespace_stops_creation_retries() {
        let (mut state, now) = (ReconcileState::default(), Timestamp::UNIX_EPOCH);
        let status = serde_json::json!({ "status": "Failure", "message": "no", "reason": "Forbidden", "code": 403,
            "details": { "causes": [{ "reason": "NamespaceTerminating", "message": "namespace a is being terminated" }] } });
        let error = Error::Api(Box::new(serde_json::from_value(status).unwrap()));
        state.record_failure(FailureSubject::PodCreation, ActionPurpose::Scale, &error, now);
        let later = now + SignedDuration::from_hours(23);
        state.expire_failures(0, &[], later);
        assert!(state.failures[&FailureSubject::PodCreation].retry_at > later);
        let (_, pause) = state.template_failed(1, &RevisionError::Api(error), Instant::now());
        assert_eq!(pause, TERMINATING_BACKOFF);
        state.expire_failures(1, &[], now);
        assert!(state.failures.is_empty(), "a new spec is tried at once");
    }

    #[test]
    fn rejected_job_is_not_retried_in_this_generation() {
        let (mut state, now) = (ReconcileState::default(), Timestamp::UNIX_EPOCH);
        let job = |name: &str| FailureSubject::Job(name.to_owned());
        state.record_failure(
            job("full"),
            ActionPurpose::PreDownload,
            &api_error(403, "Forbidden"),
            now,
        );
        state.record_failure(
            job("down"),
            ActionPurpose::PreDownload,
            &api_error(500, "InternalError"),
            now,
        );
        state.expire_failures(0, &[], now + SignedDuration::from_hours(9));
        let remaining: Vec<&FailureSubject> = state.failures.keys().collect();
        assert_eq!(remaining, [&job("full")]);
        assert!(state.failures[&job("full")].permanent);
        state.expire_failures(1, &[], now);
        assert!(state.failures.is_empty());
    }

    #[test]
    fn template_backoff_ends_with_another_generation() {
        let (mut state, mut now) = (ReconcileState::default(), Instant::now());
        let quota_error = || RevisionError::Api(api_error(403, "Forbidden"));
        assert_eq!(state.template_backoff(1, now), None);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let (reported, pause) = state.template_failed(1, &quota_error(), now);
            assert_eq!(state.template_backoff(1, now), Some((reported, pause)));
            assert_eq!(state.template_backoff(2, now), None, "another generation");
            now += pause;
            assert_eq!(state.template_backoff(1, now), None, "the retry is due");
            pauses.push(pause.as_millis());
        }
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        let mistake = RevisionError::InvalidTemplate("no such field".to_owned());
        assert_eq!(
            state.template_failed(2, &mistake, now),
            (
                TemplateStatus::Rejected("no such field".to_owned()),
                REJECTED_RETRY_INTERVAL
            )
        );
        state.template_resolved();
        assert_eq!(state.template_backoff(2, now), None);
    }

    #[test]
    fn lasting_outage_is_reported_and_stays_reported() {
        let (mut state, now) = (ReconcileState::default(), Instant::now());
        let mut fail_with = |code: u16, reason: &str| {
            let (reported, _) = state.template_failed(1, &RevisionError::Api(api_error(code, reason)), now);
            reported
        };
        assert_eq!(fail_with(409, "Conflict"), TemplateStatus::Unknown);
        assert_eq!(fail_with(429, "TooManyRequests"), TemplateStatus::Unknown);
        assert_eq!(fail_with(404, "NotFound"), TemplateStatus::Unknown);
        for _ in 1..REPORT_AFTER_FAILURES {
            assert_eq!(fail_with(500, "InternalError"), TemplateStatus::Unknown);
        }
        let reported = fail_with(500, "InternalError");
        assert!(
            matches!(&reported, TemplateStatus::Rejected(why) if why.contains("HTTP 500")),
            "{reported:?}"
        );
        assert_eq!(fail_with(409, "Conflict"), reported);
        let forbidden = fail_with(403, "Forbidden");
        assert!(
            matches!(&forbidden, TemplateStatus::Rejected(why) if why.contains("HTTP 403")),
            "{forbidden:?}"
        );
    }

    #[test]
    fn transient_failure_is_reported_after_many_attempts() {
        let (mut state, now) = (ReconcileState::default(), Instant::now());
        let error = RevisionError::Api(api_error(429, "TooManyRequests"));
        for _ in 1..REPORT_AFTER_ATTEMPTS {
            assert_eq!(state.template_failed(1, &error, now).0, TemplateStatus::Unknown);
        }
        let (reported, _) = state.template_failed(1, &error, now);
        assert!(
            matches!(&reported, TemplateStatus::Rejected(why) if why.contains("HTTP 429")),
            "{reported:?}"
        );
        // A new spec starts from the beginning.
        assert_eq!(state.template_failed(2, &error, now).0, TemplateStatus::Unknown);
    }

    #[test]
    fn rejected_updates_back_off_and_run_one_at_a_time() {
        let (mut state, now) = (ReconcileState::default(), Timestamp::UNIX_EPOCH);
        for _ in 1..SERIALIZE_AFTER_REJECTIONS {
            state.record_update_rejection(&api_error(403, "Forbidden"), now);
            assert!(state.failures.is_empty());
        }
        let mut pauses = Vec::new();
        for _ in 0..4 {
            state.record_update_rejection(&api_error(403, "Forbidden"), now);
            let until = state.failures[&FailureSubject::InPlaceUpdates].retry_at;
            pauses.push(until.duration_since(now).as_millis());
        }
        assert_eq!(pauses, [500, 1000, 2000, 4000]);
        state.record_update_success();
        assert!(state.failures.is_empty());
        state.record_update_rejection(&api_error(403, "Forbidden"), now);
        assert!(state.failures.is_empty(), "the count restarts");
    }

    #[test]
    fn defaults_stored_once_per_generation_and_minute() {
        let (mut state, now) = (ReconcileState::default(), Instant::now());
        assert_eq!(state.defaults_due(1, now), Some(Duration::ZERO));
        let pauses =
            [(); 3].map(|()| state.record_defaults_failure(&api_error(503, "ServiceUnavailable"), now));
        assert_eq!(pauses.map(|pause| pause.as_millis()), [500, 1000, 2000]);
        assert_eq!(state.defaults_due(1, now), Some(pauses[2]));
        state.defaults_stored(2, now + pauses[2]);
        assert_eq!(state.defaults_due(2, now), None, "whatever it lacks now");
        let due = state.defaults_due(3, now + pauses[2]);
        assert_eq!(
            due,
            Some(REJECTED_RETRY_INTERVAL),
            "a user removes them each time"
        );
        assert_eq!(
            state.defaults_due(3, now + REJECTED_RETRY_INTERVAL * 2),
            Some(Duration::ZERO)
        );
        state.defaults_done(3);
        assert_eq!(state.defaults_due(3, now + REJECTED_RETRY_INTERVAL * 2), None);
        let differs = ["a", "a", "b"].map(|field| state.defaults_differ(4, vec![field.to_owned()]));
        assert_eq!(
            differs,
            [true, false, true],
            "each generation of a scale is no news"
        );
        assert_eq!(state.defaults_due(4, now + REJECTED_RETRY_INTERVAL * 2), None);
        assert_eq!(state.record_defaults_rejection(now), REJECTED_RETRY_INTERVAL);
        for generation in [5, 6] {
            assert_eq!(state.defaults_due(generation, now), Some(REJECTED_RETRY_INTERVAL));
            assert_eq!(
                state.defaults_due(generation, now + REJECTED_RETRY_INTERVAL),
                Some(Duration::ZERO)
            );
        }
    }

    /// A reconcile that panics or times out keeps what it has recorded.
    #[tokio::test]
    async fn reconcile_state_survives_panic_and_timeout() {
        let (states, name) = (ReconcileStates::default(), Key::namespaced("ns", "web"));
        let count_up = |expected: i32| {
            let mut state = states.check_out(&name, "u");
            assert_eq!(state.collisions.unwrap_or_default(), expected);
            state.collisions = Some(expected + 1);
            state
        };
        let panics = kruise_ops::panics::catch_panic("test", &name, async {
            let _memory = count_up(0);
            assert!(states.lock().contains_key(&name), "it panics");
        });
        assert!(panics.await.is_err());
        let endless = async {
            let _memory = count_up(1);
            std::future::pending::<()>().await;
        };
        assert!(tokio::time::timeout(Duration::ZERO, endless).await.is_err());
        drop(count_up(2));
        let other = states.check_out(&name, "another");
        assert_eq!(
            other.collisions, None,
            "a new CloneSet of that name starts without state"
        );
        drop(other);
        assert_eq!(states.remove(&name).unwrap().uid, "another");
    }

    #[test]
    fn failed_revision_deletion_is_retried_later() {
        let (mut state, now) = (ReconcileState::default(), Instant::now());
        assert!(state.may_delete_revisions(now));
        state.revision_deletion_failed(now);
        assert!(!state.may_delete_revisions(now + MAX_BACKOFF / 2));
        assert!(state.may_delete_revisions(now + MAX_BACKOFF));
    }

    #[test]
    fn pod_creation_slow_starts_after_a_failure() {
        let mut state = ReconcileState::default();
        state.record_creations(64, true, 64);
        let mut batches = Vec::new();
        for _ in 0..7 {
            batches.push(state.slow_start_batch());
            state.record_creations(state.slow_start_batch(), false, 64);
        }
        assert_eq!(batches, [1, 2, 4, 8, 16, 32, usize::MAX]);
    }

    /// One CloneSet whose webhooks hang leaves the permits to the others.
    #[test]
    fn writes_without_an_answer_are_few() {
        let mut state = ReconcileState::default();
        let timeout = Error::Timeout {
            verb: "patch",
            kind: "Pod".to_owned(),
            after: Duration::from_secs(10),
        };
        assert_eq!(state.write_limit(), MAX_CONCURRENT_WRITES);
        state.record_answer(Some(&timeout));
        assert_eq!(state.write_limit(), MAX_UNANSWERED_WRITES);
        state.record_answer(None);
        assert_eq!(state.write_limit(), MAX_CONCURRENT_WRITES);
    }
}
