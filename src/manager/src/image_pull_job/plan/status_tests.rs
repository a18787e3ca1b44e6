#![allow(clippy::unwrap_used, clippy::panic)]

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use proptest::prelude::*;

use super::*;
use kruise_api::image_pull_job::{CompletionPolicyType, ImagePullJob, ImagePullJobSpec};

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn job(deadline: Option<i64>, never: bool) -> Job {
    let mut object = ImagePullJob::new(
        "j",
        ImagePullJobSpec {
            image: "nginx".into(),
            ..ImagePullJobSpec::default()
        },
    );
    object.spec.completion_policy.active_deadline_seconds = deadline;
    object.spec.completion_policy.type_ = never.then_some(CompletionPolicyType::Never);
    let mut job = Job::read(&object);
    job.status.start_time = Some(Time(at(0)));
    job
}

fn names(from: usize, count: usize) -> BTreeSet<Arc<str>> {
    (from..from + count).map(|n| Arc::from(format!("n{n}"))).collect()
}

fn tally(succeeded: usize, failed: usize, active: usize, pending: usize) -> Tally {
    Tally {
        desired: succeeded + failed + active + pending,
        active,
        succeeded,
        failed: names(0, failed),
        unfinished: names(failed, active + pending),
        ..Tally::default()
    }
}

#[test]
fn messages_are_upstreams() {
    let message = |tally: &Tally, now| {
        judge(&job(Some(10), false), tally, at(now))
            .status
            .message
            .unwrap()
    };
    assert_eq!(message(&tally(2, 0, 1, 0), 5), "job is running, progress 66.7%");
    assert_eq!(message(&tally(0, 0, 0, 0), 0), "job is running, no progress");
    assert_eq!(message(&tally(2, 1, 0, 0), 5), "job has completed");
    assert_eq!(
        message(&tally(2, 0, 1, 0), 10),
        "job exceeds activeDeadlineSeconds"
    );
}

#[test]
fn what_cannot_be_read_ends_the_job_and_names_the_field() {
    let mut wrong = job(None, false);
    wrong.image = Err("spec.image: bad".into());
    let verdict = judge(&wrong, &tally(0, 0, 0, 3), at(1));
    assert_eq!(verdict.status.message.as_deref(), Some("spec.image: bad"));
    assert!(verdict.status.completion_time.is_some() && verdict.warning.is_some());
    assert_eq!(
        told(&wrong, &tally(0, 0, 0, 3), 1),
        is("Failed", "InvalidSpec", "spec.image: bad")
    );
    wrong.spec.completion_policy.type_ = Some(CompletionPolicyType::Never);
    assert_eq!(told(&wrong, &tally(0, 0, 0, 3), 1).0, "Waiting");
}

/// Type, reason and message of the one condition.
fn told(job: &Job, tally: &Tally, now: i64) -> (String, String, String) {
    let mut conditions = judge(job, tally, at(now)).status.conditions;
    assert_eq!(conditions.len(), 1, "{conditions:?}");
    let Condition {
        type_,
        status,
        reason,
        message,
        ..
    } = conditions.remove(0);
    assert_eq!(status, "True");
    (type_, reason, message)
}

fn is(type_: &str, reason: &str, message: &str) -> (String, String, String) {
    (type_.to_owned(), reason.to_owned(), message.to_owned())
}

#[test]
fn a_job_that_waits_says_for_what_beside_upstreams_message() {
    let plain = job(Some(10), false);
    assert!(
        judge(&plain, &tally(0, 0, 1, 2), at(1))
            .status
            .conditions
            .is_empty()
    );

    let mut hindered = tally(0, 0, 0, 3);
    hindered.hindrance = Some("job waits for its pull secrets".into());
    assert_eq!(
        told(&plain, &hindered, 1),
        is(
            "Waiting",
            "PullSecretsNotCopied",
            "job waits for its pull secrets"
        )
    );
    let message = judge(&plain, &hindered, at(1)).status.message;
    assert_eq!(message.as_deref(), Some("job is running, progress 0.0%"));

    let mut paused = plain.clone();
    paused.parallelism = Ok(0);
    assert_eq!(
        told(&paused, &tally(1, 0, 0, 1), 1),
        is("Waiting", "Paused", "paused: spec.parallelism is 0")
    );
    assert_eq!(told(&paused, &tally(1, 0, 0, 0), 1).0, "Complete");

    let mut delayed = tally(0, 0, 1, 1);
    delayed.notes = [("n0".into(), "cannot update its NodeImage: HTTP 500".to_owned())].into();
    let want = "n0: cannot update its NodeImage: HTTP 500";
    assert_eq!(
        told(&plain, &delayed, 1),
        is("Waiting", "NodeImageNotWritten", want)
    );
}

#[test]
fn a_daemon_that_has_not_begun_is_named_and_the_deadline_remembers_it() {
    let plain = job(Some(10), false);
    let mut quiet = tally(0, 0, 2, 0);
    quiet.lost = names(1, 1);
    assert_eq!(
        told(&plain, &quiet, 1),
        is(
            "Waiting",
            "NodeNotReady",
            "n1 has not started the pull: the node is not ready"
        )
    );
    quiet.silent = names(0, 1);
    let want = "n0 has not started the pull: is kruise-daemon running there?";
    assert_eq!(told(&plain, &quiet, 1), is("Waiting", "NoDaemon", want));
    let want = format!("job exceeds activeDeadlineSeconds; {want}; failed on 2 of 2 nodes");
    assert_eq!(told(&plain, &quiet, 10), is("Failed", "DeadlineExceeded", &want));
    quiet.silent = names(0, 2);
    assert!(told(&plain, &quiet, 1).2.starts_with("n0, n1 have not started"));

    quiet = tally(0, 0, 1, 0);
    quiet.silent_from = Some(at(7));
    assert_eq!(judge(&plain, &quiet, at(1)).wake, Some(at(7)));
}

#[test]
fn a_job_that_failed_names_nodes_and_causes() {
    let mut failed = tally(1, 2, 0, 0);
    let cause = "the registry has no such image: nginx:no-such-tag";
    failed.notes = [("n0".into(), cause.to_owned()), ("n1".into(), "x".repeat(1000))].into();
    let (type_, reason, message) = told(&job(None, false), &failed, 5);
    assert_eq!((&*type_, &*reason), ("Failed", "NodesFailed"));
    assert!(
        message.starts_with(&format!("failed on 2 of 3 nodes; n0: {cause}; n1: xxx")),
        "{message}"
    );
    assert!(message.ends_with('…') && message.len() < 500, "{message}");

    let done = told(&job(None, false), &tally(3, 0, 0, 0), 5);
    assert_eq!(done, is("Complete", "Completed", "nginx is on 3 of 3 nodes"));
    let mut unknown = tally(0, 0, 0, 0);
    unknown.unknown = vec!["n9".to_owned()];
    let verdict = judge(&job(None, false), &unknown, at(5));
    assert_eq!(
        verdict.status.message.as_deref(),
        Some("job has completed"),
        "clients compare it"
    );
    let condition = &verdict.status.conditions[0];
    assert_eq!((&*condition.type_, &*condition.reason), ("Complete", "NoNode"));
    assert_eq!(
        condition.message,
        "there was no node to pull on; no NodeImage named n9: no such node, or it has none yet"
    );
    assert_eq!(verdict.warning.unwrap().reason, "UnknownNode");
}

#[test]
fn a_job_that_never_ends_says_that_it_has_no_node_or_names_an_unknown_one() {
    let endless = job(None, true);
    let none = tally(0, 0, 0, 0);
    assert_eq!(
        told(&endless, &none, 5),
        is("Waiting", "NoNode", "there is no NodeImage")
    );
    let mut unknown = tally(1, 0, 0, 0);
    unknown.unknown = vec!["n9".to_owned()];
    let want = "no NodeImage named n9: no such node, or it has none yet";
    assert_eq!(told(&endless, &unknown, 5), is("Waiting", "UnknownNode", want));
    let conditions = |tally: &Tally, now| judge(&endless, tally, at(now)).status.conditions;
    assert!(
        conditions(&none, 0).is_empty(),
        "its NodeImage may be about to come"
    );
    assert!(conditions(&tally(1, 0, 0, 0), 5).is_empty());
    unknown.awaited = names(9, 1);
    assert_eq!(told(&endless, &unknown, 5).1, "NoNodeImage");
}

#[test]
fn a_condition_keeps_the_time_since_which_it_holds_and_those_of_others_stay() {
    let at_time = |second, mut list: Vec<Condition>| {
        list.iter_mut()
            .for_each(|c| c.last_transition_time = Time(at(second)));
        list
    };
    let mut paused = job(None, false);
    paused.parallelism = Ok(0);
    let now = judge(&paused, &tally(0, 0, 0, 1), at(9)).status.conditions;
    let mut other = now[0].clone();
    other.type_ = "example.com/Seen".to_owned();
    let before = at_time(5, [vec![other.clone()], now.clone()].concat());
    assert_eq!(conditions(&before, now), before);
    assert_eq!(conditions(&before, Vec::new()), at_time(5, vec![other]));
}

#[test]
fn names_of_failed_nodes_are_capped_and_their_number_is_not() {
    let verdict = judge(&job(None, false), &tally(0, 3000, 0, 0), at(1));
    assert_eq!(
        (verdict.status.failed, verdict.status.failed_nodes.len()),
        (3000, FAILED_NODES)
    );
}

#[test]
fn a_percentage_is_refused_by_name() {
    let mut object = ImagePullJob::new("j", ImagePullJobSpec::default());
    object.spec.image = "nginx".into();
    object.spec.parallelism = Some(IntOrString::String("50%".into()));
    let verdict = judge(&Job::read(&object), &tally(0, 0, 0, 1), at(1));
    assert!(
        verdict
            .status
            .message
            .unwrap()
            .starts_with("spec.parallelism: \"50%\"")
    );
}

proptest! {
    /// A job ends exactly when all nodes have an outcome or its time is up, never before, and then its numbers
    /// add up; one that never ends does not.
    #[test]
    fn a_job_ends_when_it_should(s in 0_usize..5, f in 0_usize..5, a in 0_usize..5, p in 0_usize..5,
                                 deadline in prop::option::of(1_i64..100), never in any::<bool>(), now in 2_i64..200) {
        let (job, tally) = (job(deadline, never), tally(s, f, a, p));
        let verdict = judge(&job, &tally, at(now));
        let status = &verdict.status;
        let late = deadline.is_some_and(|d| now >= d);
        let over = a + p == 0;
        prop_assert_eq!(status.completion_time.is_some(), !never && (over || late));
        prop_assert_eq!(super::late(&job, at(now)), late && !never);
        if status.completion_time.is_some() {
            prop_assert_eq!(status.desired, status.succeeded + status.failed);
            prop_assert_eq!(status.active, 0);
            prop_assert_eq!(usize::try_from(status.failed).unwrap(), status.failed_nodes.len());
            let failed = status.failed > 0;
            prop_assert_eq!(status.conditions[0].type_.as_str(), if failed { "Failed" } else { "Complete" });
        } else if let Some(wake) = verdict.wake {
            prop_assert!(wake > at(now));
        } else {
            prop_assert!(never || deadline.is_none());
        }
    }
}
