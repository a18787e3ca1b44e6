//! What is remembered of a CloneSet from one pass to the next, and lost without harm.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::plan::{Concern, Event, Failure, LeftOver, Subject, Template};
use super::unfit::Unfit;
use crate::status_pace::StatusPace;
use kruise_api::backoff::Backoff;
use kruise_cluster::{Error, Key};
use kruise_workload::revision::Wanted;

/// After failures.
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), LONGEST_PAUSE);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// In a namespace that is being deleted nothing can be made any more: there is no other try, unless the CloneSet changes.
const TERMINATING: Duration = Duration::from_hours(24);
/// After so long the API server is asked again about a template that it refused: it may have other rules by then.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// So many conflicts in a row are ordinary life: somebody else was quicker.
const CONFLICTS: u32 = 5;
/// So many failures in a row that may pass by themselves are told.
const WORTH_A_WORD: u32 = 3;

/// After so many updates in place that were refused in a row, Pods are tried one at a time.
const ALIKE: u32 = 3;

/// So many tries in vain are told, whatever the reason.
const TOLD_ANYWAY: u32 = 6;

/// For each second that planning takes, so many are left for everything else.
const REST: u32 = 4;
/// For a second's worth of acts there is news to plan with.
const SLICE: Duration = Duration::from_secs(1);
/// Where there is much to do for Pods whose planning takes long, it is to take no more than this part of the time.
const SHARE: u32 = 40;
/// But so late nobody expects an act that was planned before they said something else.
const LONGEST_SLICE: Duration = Duration::from_secs(3);
/// The longest pause between two passes.
const LONGEST_REST: Duration = Duration::from_secs(1);
/// So many passes in a row that do something are more than a rollout needs, unless it is a large one.
const BUSY: u32 = 100;
/// The least pause after that: no defect of ours is to keep the API server busy.
const BUSY_REST: Duration = Duration::from_millis(200);

/// A template that has no revision, and when one is tried for again.
struct Unsettled {
    /// The generation that this is about.
    generation: i64,
    tries: u32,
    /// Those of them that are no ordinary life.
    failures: u32,
    until: Instant,
    said: Template,
}

/// What is remembered of one CloneSet.
#[derive(Default)]
pub struct Memory {
    /// UID of the CloneSet.
    pub uid: String,
    /// The API server was asked for the Pods of nobody that it selects.
    pub orphans_known: bool,
    /// What its template stands for, and for which generation that was found out.
    pub wanted: Option<(i64, Wanted)>,
    /// Why it has no revision.
    unsettled: Option<Unsettled>,
    /// How often the name of a revision was taken, which the status may not say yet.
    pub collisions: Option<i32>,
    /// The generation that the last pass looked at.
    generation: i64,
    /// How often what failed did so in a row, and when it did last.
    tries: BTreeMap<Subject, (u32, Timestamp)>,
    /// What is not to be tried again before a time.
    pub failures: BTreeMap<Subject, Failure>,
    /// Updates in place that were refused in a row.
    refusals: u32,
    /// What failed acts left to be done.
    pub left: LeftOver,
    /// The claim templates that this is about.
    templates: Vec<Value>,
    /// How many Pods may be made in a pass; `None` while none fails.
    width: Option<usize>,
    /// When it may be planned again.
    not_before: Option<Instant>,
    /// Passes in a row that did something.
    busy: u32,
    /// What the plan had to tell last time, but for waits.
    said: BTreeSet<String>,
    /// The wait that was told last: its reason, and since when it lasts.
    wait: Option<(&'static str, Timestamp)>,
    /// How statuses are paced.
    pub told: StatusPace,
    /// When old revisions that could not be deleted may be tried again.
    trim_again: Option<Instant>,
    /// The storing of defaults that the template lacks.
    defaults: Defaults,
}

/// What is remembered of the storing of defaults.
#[derive(Default)]
struct Defaults {
    /// The generation that lacks none, or none that can be stored.
    done: Option<i64>,
    /// Failures in a row.
    tries: u32,
    /// When they may be stored next.
    not_before: Option<Instant>,
    /// Where the template differs from its revision otherwise.
    differs: Vec<String>,
}

/// What is remembered of all CloneSets.
#[derive(Default)]
pub struct Memories(Mutex<HashMap<Key, Memory>>);

impl Memories {
    fn all(&self) -> MutexGuard<'_, HashMap<Key, Memory>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is remembered of a CloneSet, and not any more.
    pub fn take(&self, name: &Key) -> Option<Memory> {
        self.all().remove(name)
    }

    /// What is remembered of the CloneSet with this UID, for a pass.
    pub fn lend<'a>(&'a self, name: &'a Key, uid: &str) -> Lent<'a> {
        let known = self.take(name).filter(|memory| memory.uid == uid);
        let memory = known.unwrap_or_else(|| Memory {
            uid: uid.to_owned(),
            ..Memory::default()
        });
        Lent {
            to: self,
            name,
            memory,
        }
    }
}

/// The memory of a CloneSet in the hands of a pass. It is kept however the pass ends: after a panic or at its deadline, too.
pub struct Lent<'a> {
    to: &'a Memories,
    name: &'a Key,
    memory: Memory,
}

impl Deref for Lent<'_> {
    type Target = Memory;
    fn deref(&self) -> &Memory {
        &self.memory
    }
}

impl DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        self.to.all().insert(self.name.clone(), memory);
    }
}

/// How long a plan that took `cost` may be acted by.
pub fn slice(cost: Duration) -> Duration {
    (cost * SHARE).clamp(SLICE, LONGEST_SLICE)
}

impl Memory {
    /// How long to wait before the next pass, if it is too early for one.
    pub fn too_early(&self, now: Instant) -> Option<Duration> {
        self.not_before?
            .checked_duration_since(now)
            .filter(|left| !left.is_zero())
    }

    /// Of the events that are planned those that the last pass did not tell, and of waits those that none did.
    pub fn news(&mut self, mut planned: Vec<Event>) -> Vec<Event> {
        let others = planned.iter().filter(|event| event.since.is_none());
        let said: BTreeSet<String> = others.map(|event| event.message.clone()).collect();
        let before = std::mem::replace(&mut self.said, said);
        planned.retain(|event| match event.since {
            Some(since) => {
                let wait = Some((event.reason, since));
                std::mem::replace(&mut self.wait, wait) != wait
            }
            None => !before.contains(&event.message),
        });
        planned
    }

    /// A pass is over that took `cost` to plan, and had planned by `planned`. What it did since counts as rest.
    pub fn pause(&mut self, cost: Duration, acted: bool, planned: Instant) {
        self.busy = if acted { self.busy.saturating_add(1) } else { 0 };
        let least = if self.busy > BUSY {
            BUSY_REST
        } else {
            Duration::ZERO
        };
        self.not_before = Some(planned + (cost * REST).clamp(least, LONGEST_REST));
    }

    /// How many Pods may be made in this pass.
    pub fn width(&self) -> usize {
        self.width.unwrap_or(usize::MAX)
    }

    /// Takes note of the making of Pods in a pass: one by one after a failure, then twice as many each time.
    pub fn made(&mut self, pods: usize, failed: bool, most: usize) {
        if failed {
            self.width = Some(1);
        } else if pods > 0 {
            self.width = self.width.map(|width| width * 2).filter(|width| *width < most);
        }
    }

    /// An act succeeded.
    pub fn succeeded(&mut self, subject: &Subject) {
        self.tries.remove(subject);
        self.failures.remove(subject);
    }

    /// An act failed; whether somebody should hear of it.
    pub fn failed(&mut self, subject: Subject, of: Concern, error: &Error, now: Timestamp) -> bool {
        let (tries, last) = self.tries.entry(subject.clone()).or_default();
        *tries = tries.saturating_add(1);
        *last = now;
        if error.conflict() && *tries <= CONFLICTS {
            return false;
        }
        let pause = SignedDuration::try_from(pause(*tries, error)).unwrap_or(SignedDuration::ZERO);
        let failure = Failure {
            of,
            lasting: !error.retryable(),
            of_resize: false,
            answered: error.answered(),
            until: now.checked_add(pause).unwrap_or(now),
            message: error.words().into_owned(),
        };
        self.failures.insert(subject, failure);
        true
    }

    /// An update in place was refused, which would be so again. After a few of them in a row the next waits for all Pods.
    pub fn update_refused(&mut self, error: &Error, now: Timestamp) {
        self.refusals = self.refusals.saturating_add(1);
        if self.refusals >= ALIKE {
            self.failed(Subject::Updates, Concern::Update, error, now);
        }
    }

    /// An update in place began.
    pub fn update_began(&mut self) {
        self.refusals = 0;
        self.succeeded(&Subject::Updates);
    }

    /// The API server refused to resize a Pod, which it would do again.
    pub fn resize_refused(&mut self, subject: &Subject) {
        if let Some(failure) = self.failures.get_mut(subject) {
            failure.of_resize = true;
        }
    }

    /// What became of the template of this generation, and how long it is until its revision is to be tried for; nothing
    /// when it may be now.
    pub fn unsettled(&self, generation: i64, now: Instant) -> Option<(Template, Duration)> {
        let known = self.unsettled.as_ref().filter(|u| u.generation == generation)?;
        let pause = known
            .until
            .checked_duration_since(now)
            .filter(|left| !left.is_zero())?;
        Some((known.said.clone(), pause))
    }

    /// The template has its revision.
    pub fn settled(&mut self) {
        self.unsettled = None;
    }

    /// The template got no revision; what is to be told of that, and how long it is until the next try.
    pub fn not_settled(&mut self, generation: i64, unfit: &Unfit, now: Instant) -> (Template, Duration) {
        let before = self.unsettled.take().filter(|u| u.generation == generation);
        let (mut tries, mut failures) = before.as_ref().map_or((0, 0), |u| (u.tries, u.failures));
        tries = tries.saturating_add(1);
        let (why, wait, worth) = match unfit {
            Unfit::Mistake(why) => (why.clone(), ASK_AGAIN, true),
            Unfit::Failed(error) if error.namespace_terminating() => {
                (error.to_string(), pause(tries, error), false)
            }
            Unfit::Failed(error) => {
                // Somebody was quicker, or the API server is busy.
                let ordinary = error.conflict() || error.not_found() || error.throttled();
                failures = failures.saturating_add(u32::from(!ordinary));
                let worth = !ordinary && (!error.retryable() || failures >= WORTH_A_WORD);
                (error.to_string(), pause(tries, error), worth)
            }
        };
        let before = before.map_or(Template::Unknown, |u| u.said);
        let silent = before == Template::Unknown && tries >= TOLD_ANYWAY;
        let said = if worth || silent {
            Template::Refused(why)
        } else {
            // What was told stands until there is a revision: a conflict in between is no better news.
            before
        };
        let known = Unsettled {
            generation,
            tries,
            failures,
            until: now + wait,
            said: said.clone(),
        };
        self.unsettled = Some(known);
        (said, wait)
    }

    /// Whether old revisions may be deleted now.
    pub fn may_trim(&self, now: Instant) -> bool {
        self.trim_again.is_none_or(|again| again <= now)
    }

    /// An old revision could not be deleted: as nothing waits for that, it is not tried with each pass.
    pub fn not_trimmed(&mut self, now: Instant) {
        self.trim_again = Some(now + LONGEST_PAUSE);
    }

    /// How long it is until defaults that the template of this generation lacks may be stored; `None` when nothing is left
    /// to do about it.
    pub fn defaults_due(&self, generation: i64, now: Instant) -> Option<Duration> {
        let open = self.defaults.done != Some(generation);
        let pause = |then: Instant| then.saturating_duration_since(now);
        open.then(|| self.defaults.not_before.map_or(Duration::ZERO, pause))
    }

    /// The template of this generation lacks no defaults, or none that can be stored.
    pub fn defaults_done(&mut self, generation: i64) {
        self.defaults.done = Some(generation);
        self.defaults.tries = 0;
    }

    /// Defaults were stored, which led to this generation. Who takes them off again does not make us write without end.
    pub fn defaults_stored(&mut self, generation: i64, now: Instant) {
        self.defaults_done(generation);
        self.defaults.not_before = Some(now + ASK_AGAIN);
    }

    /// Defaults were refused; how long it is until the next try, whatever the generation is then.
    pub fn defaults_refused(&mut self, now: Instant) -> Duration {
        self.defaults.not_before = Some(now + ASK_AGAIN);
        ASK_AGAIN
    }

    /// The template of this generation differs from its revision in these fields; whether that is news.
    pub fn defaults_differ(&mut self, generation: i64, fields: Vec<String>) -> bool {
        self.defaults_done(generation);
        let new = self.defaults.differs != fields;
        self.defaults.differs = fields;
        new
    }

    /// Defaults could not be stored; how long it is until the next try.
    pub fn defaults_failed(&mut self, error: &Error, now: Instant) -> Duration {
        self.defaults.tries = self.defaults.tries.saturating_add(1);
        let pause = pause(self.defaults.tries, error);
        self.defaults.not_before = Some(now + pause);
        pause
    }

    /// Forgets failures whose time has long passed: what they were about is done, or not wanted any more. Another
    /// generation is tried at once: it may be what mends them. Claims made of other templates are not to be used.
    pub fn forget(&mut self, generation: i64, templates: &[Value], now: Timestamp) {
        if self.generation != generation {
            self.generation = generation;
            if self.templates != templates {
                self.templates = templates.to_vec();
                self.left.pods.clear();
            }
            self.failures.clear();
            self.tries.clear();
            self.refusals = 0;
        }
        let long = SignedDuration::try_from(LONGEST_PAUSE * 4).unwrap_or(SignedDuration::ZERO);
        // What was given up is not tried again when it is forgotten, but for another generation.
        let stays = |subject: &Subject, failure: &Failure| {
            failure.of_resize || failure.lasting && matches!(subject, Subject::Job(_) | Subject::Revision(_))
        };
        self.failures
            .retain(|subject, failure| stays(subject, failure) || now.duration_since(failure.until) < long);
        self.tries.retain(|_, (_, last)| now.duration_since(*last) < long);
    }
}

/// How long to wait after the last of so many tries.
fn pause(tries: u32, error: &Error) -> Duration {
    if error.namespace_terminating() {
        return TERMINATING;
    }
    let doubled = RETRY.pause(tries.saturating_sub(1));
    error.retry_after().unwrap_or(doubled).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn refused(code: u16, reason: &str) -> Error {
        let status =
            serde_json::json!({ "status": "Failure", "message": "no", "reason": reason, "code": code });
        Error::Api(Box::new(serde_json::from_value(status).unwrap()))
    }

    #[test]
    fn a_wait_is_told_once_and_other_events_again_after_a_pass_without_them() {
        let mut memory = Memory::default();
        let event = |message: &str, since: Option<i64>| Event {
            warning: false,
            reason: "Paused",
            message: message.to_owned(),
            since: since.map(|at| Timestamp::from_second(at).unwrap()),
        };
        let (wait, other) = (event("paused", Some(1)), event("limited", None));
        assert_eq!(
            memory.news(vec![wait.clone(), other.clone()]),
            [wait.clone(), other.clone()]
        );
        assert_eq!(memory.news(vec![wait.clone(), other.clone()]), []);
        assert_eq!(memory.news(vec![]), []);
        assert_eq!(memory.news(vec![wait, other.clone()]), [other]);
        let longer = event("paused, still", Some(1));
        assert_eq!(memory.news(vec![longer]), [], "the same wait");
        let again = event("paused", Some(200));
        assert_eq!(memory.news(vec![again.clone()]), [again], "another");
    }

    #[test]
    fn a_plan_that_took_long_is_acted_by_for_longer() {
        let slices = [0, 1, 25, 50, 75, 5000].map(|ms| slice(Duration::from_millis(ms)).as_millis());
        assert_eq!(slices, [1000, 1000, 1000, 2000, 3000, 3000]);
    }

    #[test]
    fn conflicts_are_tried_again_at_once_and_failures_ever_later() {
        let (mut memory, now) = (Memory::default(), Timestamp::UNIX_EPOCH);
        let pod = || Subject::Pod("u".to_owned());
        for _ in 0..CONFLICTS {
            assert!(!memory.failed(pod(), Concern::Update, &refused(409, "Conflict"), now));
        }
        assert!(memory.failures.is_empty());
        assert!(memory.failed(pod(), Concern::Update, &refused(409, "Conflict"), now));
        memory.succeeded(&pod());
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert!(memory.failed(Subject::Creation, Concern::Scale, &refused(403, "Forbidden"), now));
            pauses.push(
                memory.failures[&Subject::Creation]
                    .until
                    .duration_since(now)
                    .as_millis(),
            );
        }
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        memory.forget(0, &[], now);
        assert_eq!(memory.failures.len(), 1);
        memory.forget(0, &[], now + SignedDuration::from_secs(300));
        assert!(memory.failures.is_empty());
        assert!(memory.failed(Subject::Creation, Concern::Scale, &refused(403, "Forbidden"), now));
        memory.forget(1, &[], now);
        assert!(memory.failures.is_empty(), "another spec is tried at once");
    }

    #[test]
    fn what_cannot_be_made_in_a_terminating_namespace_is_not_tried_again() {
        let (mut memory, now) = (Memory::default(), Timestamp::UNIX_EPOCH);
        let status = serde_json::json!({ "status": "Failure", "message": "no", "reason": "Forbidden", "code": 403,
            "details": { "causes": [{ "reason": "NamespaceTerminating", "message": "namespace a is being terminated" }] } });
        let error = Error::Api(Box::new(serde_json::from_value(status).unwrap()));
        memory.failed(Subject::Creation, Concern::Scale, &error, now);
        let later = now + SignedDuration::from_hours(23);
        memory.forget(0, &[], later);
        assert!(memory.failures[&Subject::Creation].until > later);
        let (_, pause) = memory.not_settled(1, &Unfit::Failed(error), Instant::now());
        assert_eq!(pause, TERMINATING);
        memory.forget(1, &[], now);
        assert!(memory.failures.is_empty(), "another spec is tried at once");
    }

    #[test]
    fn a_job_that_is_refused_stays_so_for_this_generation() {
        let (mut memory, now) = (Memory::default(), Timestamp::UNIX_EPOCH);
        let job = |name: &str| Subject::Job(name.to_owned());
        memory.failed(job("full"), Concern::PreDownload, &refused(403, "Forbidden"), now);
        memory.failed(
            job("down"),
            Concern::PreDownload,
            &refused(500, "InternalError"),
            now,
        );
        memory.forget(0, &[], now + SignedDuration::from_hours(9));
        let left: Vec<&Subject> = memory.failures.keys().collect();
        assert_eq!(left, [&job("full")]);
        assert!(memory.failures[&job("full")].lasting);
        memory.forget(1, &[], now);
        assert!(memory.failures.is_empty());
    }

    #[test]
    fn a_template_is_tried_ever_later_and_another_at_once() {
        let (mut memory, mut now) = (Memory::default(), Instant::now());
        let full = || Unfit::Failed(refused(403, "Forbidden"));
        assert_eq!(memory.unsettled(1, now), None);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let (said, pause) = memory.not_settled(1, &full(), now);
            assert_eq!(memory.unsettled(1, now), Some((said, pause)));
            assert_eq!(memory.unsettled(2, now), None, "another generation");
            now += pause;
            assert_eq!(memory.unsettled(1, now), None, "its time has come");
            pauses.push(pause.as_millis());
        }
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        let mistake = Unfit::Mistake("no such field".to_owned());
        assert_eq!(
            memory.not_settled(2, &mistake, now),
            (Template::Refused("no such field".to_owned()), ASK_AGAIN)
        );
        memory.settled();
        assert_eq!(memory.unsettled(2, now), None);
    }

    #[test]
    fn an_outage_is_told_when_it_lasts_and_stays_told() {
        let (mut memory, now) = (Memory::default(), Instant::now());
        let mut say = |code: u16, reason: &str| {
            let (said, _) = memory.not_settled(1, &Unfit::Failed(refused(code, reason)), now);
            said
        };
        assert_eq!(say(409, "Conflict"), Template::Unknown);
        assert_eq!(say(429, "TooManyRequests"), Template::Unknown);
        assert_eq!(say(404, "NotFound"), Template::Unknown);
        for _ in 1..WORTH_A_WORD {
            assert_eq!(say(500, "InternalError"), Template::Unknown);
        }
        let told = say(500, "InternalError");
        assert!(
            matches!(&told, Template::Refused(why) if why.contains("HTTP 500")),
            "{told:?}"
        );
        assert_eq!(say(409, "Conflict"), told);
        let full = say(403, "Forbidden");
        assert!(
            matches!(&full, Template::Refused(why) if why.contains("HTTP 403")),
            "{full:?}"
        );
    }

    #[test]
    fn what_passes_by_itself_is_told_when_it_does_not() {
        let (mut memory, now) = (Memory::default(), Instant::now());
        let unfit = Unfit::Failed(refused(429, "TooManyRequests"));
        for _ in 1..TOLD_ANYWAY {
            assert_eq!(memory.not_settled(1, &unfit, now).0, Template::Unknown);
        }
        let (told, _) = memory.not_settled(1, &unfit, now);
        assert!(
            matches!(&told, Template::Refused(why) if why.contains("HTTP 429")),
            "{told:?}"
        );
        // Another spec is another story.
        assert_eq!(memory.not_settled(2, &unfit, now).0, Template::Unknown);
    }

    #[test]
    fn updates_that_are_refused_in_a_row_are_tried_ever_later_and_for_one_pod_at_a_time() {
        let (mut memory, now) = (Memory::default(), Timestamp::UNIX_EPOCH);
        for _ in 1..ALIKE {
            memory.update_refused(&refused(403, "Forbidden"), now);
            assert!(memory.failures.is_empty());
        }
        let mut pauses = Vec::new();
        for _ in 0..4 {
            memory.update_refused(&refused(403, "Forbidden"), now);
            let until = memory.failures[&Subject::Updates].until;
            pauses.push(until.duration_since(now).as_millis());
        }
        assert_eq!(pauses, [500, 1000, 2000, 4000]);
        memory.update_began();
        assert!(memory.failures.is_empty());
        memory.update_refused(&refused(403, "Forbidden"), now);
        assert!(memory.failures.is_empty(), "it counts anew");
    }

    #[test]
    fn defaults_are_stored_once_for_each_generation_and_once_a_minute() {
        let (mut memory, now) = (Memory::default(), Instant::now());
        assert_eq!(memory.defaults_due(1, now), Some(Duration::ZERO));
        let pauses = [(); 3].map(|()| memory.defaults_failed(&refused(503, "ServiceUnavailable"), now));
        assert_eq!(pauses.map(|pause| pause.as_millis()), [500, 1000, 2000]);
        assert_eq!(memory.defaults_due(1, now), Some(pauses[2]));
        memory.defaults_stored(2, now + pauses[2]);
        assert_eq!(memory.defaults_due(2, now), None, "whatever it lacks now");
        let due = memory.defaults_due(3, now + pauses[2]);
        assert_eq!(due, Some(ASK_AGAIN), "a user removes them each time");
        assert_eq!(memory.defaults_due(3, now + ASK_AGAIN * 2), Some(Duration::ZERO));
        memory.defaults_done(3);
        assert_eq!(memory.defaults_due(3, now + ASK_AGAIN * 2), None);
        let differs = ["a", "a", "b"].map(|field| memory.defaults_differ(4, vec![field.to_owned()]));
        assert_eq!(
            differs,
            [true, false, true],
            "each generation of a scale is no news"
        );
        assert_eq!(memory.defaults_due(4, now + ASK_AGAIN * 2), None);
        assert_eq!(memory.defaults_refused(now), ASK_AGAIN);
        for generation in [5, 6] {
            assert_eq!(memory.defaults_due(generation, now), Some(ASK_AGAIN));
            assert_eq!(
                memory.defaults_due(generation, now + ASK_AGAIN),
                Some(Duration::ZERO)
            );
        }
    }

    /// A pass that panics, or is broken off at its deadline, has learnt what it has learnt.
    #[tokio::test]
    async fn what_is_remembered_outlives_a_pass_that_does_not_end_well() {
        let (memories, name) = (Memories::default(), Key::namespaced("ns", "web"));
        let learn = |at: i32| {
            let mut memory = memories.lend(&name, "u");
            assert_eq!(memory.collisions.unwrap_or_default(), at);
            memory.collisions = Some(at + 1);
            memory
        };
        let panics = kruise_ops::panics::isolated("test", &name, async {
            let _memory = learn(0);
            assert!(memories.all().contains_key(&name), "it panics");
        });
        assert!(panics.await.is_err());
        let endless = async {
            let _memory = learn(1);
            std::future::pending::<()>().await;
        };
        assert!(tokio::time::timeout(Duration::ZERO, endless).await.is_err());
        drop(learn(2));
        let other = memories.lend(&name, "another");
        assert_eq!(other.collisions, None, "another CloneSet of that name");
        drop(other);
        assert_eq!(memories.take(&name).unwrap().uid, "another");
    }

    #[test]
    fn old_revisions_that_cannot_be_deleted_wait_for_a_while() {
        let (mut memory, now) = (Memory::default(), Instant::now());
        assert!(memory.may_trim(now));
        memory.not_trimmed(now);
        assert!(!memory.may_trim(now + LONGEST_PAUSE / 2));
        assert!(memory.may_trim(now + LONGEST_PAUSE));
    }

    #[test]
    fn after_a_failure_pods_are_made_slowly_at_first() {
        let mut memory = Memory::default();
        memory.made(64, true, 64);
        let mut widths = Vec::new();
        for _ in 0..7 {
            widths.push(memory.width());
            memory.made(memory.width(), false, 64);
        }
        assert_eq!(widths, [1, 2, 4, 8, 16, 32, usize::MAX]);
    }
}
