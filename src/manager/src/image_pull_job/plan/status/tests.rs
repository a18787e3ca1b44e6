#![allow(clippy::unwrap_used, clippy::panic)]

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use proptest::prelude::*;

use super::super::job::Parallelism;
use super::*;
use kruise_api::image_pull_job::{CompletionPolicyType, ImagePullJob, ImagePullJobSpec};
use kruise_workload::job_conditions::merge_conditions;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn job(deadline: Option<i64>, never: bool) -> PullJob {
    let mut object = ImagePullJob::new(
        "j",
        ImagePullJobSpec {
            image: "nginx".into(),
            ..ImagePullJobSpec::default()
        },
    );
    object.spec.completion_policy.active_deadline_seconds = deadline;
    object.spec.completion_policy.type_ = never.then_some(CompletionPolicyType::Never);
    let mut job = PullJob::from_object(&object);
    job.status.start_time = Some(Time(at(0)));
    job
}

fn names(from: usize, count: usize) -> BTreeSet<Arc<str>> {
    (from..from + count).map(|n| Arc::from(format!("n{n}"))).collect()
}

fn counters(succeeded: usize, failed: usize, active: usize, pending: usize) -> JobCounters {
    JobCounters {
        desired: succeeded + failed + active + pending,
        active,
        succeeded,
        failed: names(0, failed),
        unfinished: names(failed, active + pending),
        ..JobCounters::default()
    }
}

#[test]
fn bytes_are_shown_while_the_job_runs_and_cause_no_write() {
    let status = |counters: &JobCounters, mib: u64| {
        let mut counters = counters.clone();
        counters.pulled = Some(PulledBytes::new(mib << 20, 6 << 20));
        job_status(&job(None, false), &counters, at(5)).status
    };
    let running = counters(1, 0, 1, 1);
    let [before, after] = [3, 4].map(|mib| status(&running, mib));
    assert_eq!(before.progress.as_deref(), Some("50% of 6.0 MiB"));
    assert_eq!(after.progress.as_deref(), Some("66% of 6.0 MiB"));
    assert!(is_same(&before, &after));
    let unpacking = status(&running, 6).progress;
    assert_eq!(unpacking.as_deref(), Some("99% of 6.0 MiB"));
    assert_eq!(status(&counters(3, 0, 0, 0), 6).progress, None);
}

#[test]
fn messages_match_upstream() {
    let message = |tally: &JobCounters, now| {
        job_status(&job(Some(10), false), tally, at(now))
            .status
            .message
            .unwrap()
    };
    assert_eq!(
        message(&counters(2, 0, 1, 0), 5),
        "job is running, progress 66.7%"
    );
    assert_eq!(message(&counters(0, 0, 0, 0), 0), "job is running, no progress");
    assert_eq!(message(&counters(2, 1, 0, 0), 5), "job has completed");
    assert_eq!(
        message(&counters(2, 0, 1, 0), 10),
        "job exceeds activeDeadlineSeconds"
    );
}

#[test]
fn invalid_spec_ends_the_job_and_names_the_field() {
    let mut wrong = job(None, false);
    wrong.image = Err("spec.image: bad".into());
    let update = job_status(&wrong, &counters(0, 0, 0, 3), at(1));
    assert_eq!(update.status.message.as_deref(), Some("spec.image: bad"));
    assert!(update.status.completion_time.is_some() && update.warning.is_some());
    assert_eq!(
        only_condition(&wrong, &counters(0, 0, 0, 3), 1),
        condition("Failed", "InvalidSpec", "spec.image: bad")
    );
    wrong.spec.completion_policy.type_ = Some(CompletionPolicyType::Never);
    assert_eq!(only_condition(&wrong, &counters(0, 0, 0, 3), 1).0, "Waiting");
}

/// Type, reason and message of the only condition.
fn only_condition(job: &PullJob, tally: &JobCounters, now: i64) -> (String, String, String) {
    let mut conditions = job_status(job, tally, at(now)).status.conditions;
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

fn condition(type_: &str, reason: &str, message: &str) -> (String, String, String) {
    (type_.to_owned(), reason.to_owned(), message.to_owned())
}

#[test]
fn waiting_job_has_a_condition_with_the_reason() {
    let plain = job(Some(10), false);
    assert!(
        job_status(&plain, &counters(0, 0, 1, 2), at(1))
            .status
            .conditions
            .is_empty()
    );

    let mut blocked = counters(0, 0, 0, 3);
    blocked.blocked_reason = Some("job waits for its pull secrets".into());
    assert_eq!(
        only_condition(&plain, &blocked, 1),
        condition(
            "Waiting",
            "PullSecretsNotCopied",
            "job waits for its pull secrets"
        )
    );
    let message = job_status(&plain, &blocked, at(1)).status.message;
    assert_eq!(message.as_deref(), Some("job is running, progress 0.0%"));

    let mut paused = plain.clone();
    paused.parallelism = Ok(Parallelism::Nodes(0));
    assert_eq!(
        only_condition(&paused, &counters(1, 0, 0, 1), 1),
        condition("Waiting", "Paused", "paused: spec.parallelism is 0")
    );
    assert_eq!(only_condition(&paused, &counters(1, 0, 0, 0), 1).0, "Complete");

    let mut delayed = counters(0, 0, 1, 1);
    delayed.node_messages = [("n0".into(), "cannot update its NodeImage: HTTP 500".to_owned())].into();
    let expected = "n0: cannot update its NodeImage: HTTP 500";
    assert_eq!(
        only_condition(&plain, &delayed, 1),
        condition("Waiting", "NodeImageNotWritten", expected)
    );
}

#[test]
fn unresponsive_daemon_is_named_also_at_the_deadline() {
    let plain = job(Some(10), false);
    let mut unresponsive = counters(0, 0, 2, 0);
    unresponsive.not_ready = names(1, 1);
    assert_eq!(
        only_condition(&plain, &unresponsive, 1),
        condition(
            "Waiting",
            "NodeNotReady",
            "n1 has not started the pull: the node is not ready"
        )
    );
    unresponsive.unresponsive = names(0, 1);
    let expected = "n0 has not started the pull: is kruise-daemon running there?";
    assert_eq!(
        only_condition(&plain, &unresponsive, 1),
        condition("Waiting", "NoDaemon", expected)
    );
    let expected = format!("job exceeds activeDeadlineSeconds; {expected}; failed on 2 of 2 nodes");
    assert_eq!(
        only_condition(&plain, &unresponsive, 10),
        condition("Failed", "DeadlineExceeded", &expected)
    );
    unresponsive.unresponsive = names(0, 2);
    assert!(
        only_condition(&plain, &unresponsive, 1)
            .2
            .starts_with("n0, n1 have not started")
    );

    unresponsive = counters(0, 0, 1, 0);
    unresponsive.next_unresponsive_at = Some(at(7));
    assert_eq!(job_status(&plain, &unresponsive, at(1)).requeue_at, Some(at(7)));
}

/// A job that has put nodes aside always pulls on others.
#[test]
fn nodes_that_are_put_aside_are_named_at_the_deadline() {
    let plain = job(Some(10), false);
    let mut aside = counters(1, 0, 1, 14);
    let before = job_status(&plain, &aside, at(1)).status;
    aside.put_aside = names(1, 12);
    assert_eq!(job_status(&plain, &aside, at(1)).status, before);
    let first = "n1, n10, n11, n12, n2, n3, n4, n5, n6, n7 and 2 more";
    let expected = format!(
        "job exceeds activeDeadlineSeconds; 12 nodes were not ready, and others came first ({first}); \
         failed on 15 of 16 nodes"
    );
    assert_eq!(
        only_condition(&plain, &aside, 10),
        condition("Failed", "DeadlineExceeded", &expected)
    );
}

#[test]
fn failed_job_names_nodes_and_causes() {
    let mut failed = counters(1, 2, 0, 0);
    let cause = "the registry has no such image: nginx:no-such-tag";
    failed.node_messages = [("n0".into(), cause.to_owned()), ("n1".into(), "x".repeat(1000))].into();
    let (type_, reason, message) = only_condition(&job(None, false), &failed, 5);
    assert_eq!((&*type_, &*reason), ("Failed", "NodesFailed"));
    assert!(
        message.starts_with(&format!("failed on 2 of 3 nodes; n0: {cause}; n1: xxx")),
        "{message}"
    );
    assert!(message.ends_with('…') && message.len() < 500, "{message}");

    let done = only_condition(&job(None, false), &counters(3, 0, 0, 0), 5);
    assert_eq!(
        done,
        condition("Complete", "Completed", "nginx is on 3 of 3 nodes")
    );
    let mut unknown = counters(0, 0, 0, 0);
    unknown.unknown_nodes = vec!["n9".to_owned()];
    let update = job_status(&job(None, false), &unknown, at(5));
    assert_eq!(
        update.status.message.as_deref(),
        Some("job has completed"),
        "clients compare it"
    );
    let condition = &update.status.conditions[0];
    assert_eq!((&*condition.type_, &*condition.reason), ("Complete", "NoNode"));
    assert_eq!(
        condition.message,
        "there was no node to pull on; no NodeImage named n9: no such node, or it has none yet"
    );
    assert_eq!(update.warning.unwrap().reason, "UnknownNode");
}

#[test]
fn never_policy_reports_missing_and_unknown_nodes() {
    let endless = job(None, true);
    let none = counters(0, 0, 0, 0);
    assert_eq!(
        only_condition(&endless, &none, 5),
        condition("Waiting", "NoNode", "there is no NodeImage")
    );
    let mut unknown = counters(1, 0, 0, 0);
    unknown.unknown_nodes = vec!["n9".to_owned()];
    let expected = "no NodeImage named n9: no such node, or it has none yet";
    assert_eq!(
        only_condition(&endless, &unknown, 5),
        condition("Waiting", "UnknownNode", expected)
    );
    let conditions = |tally: &JobCounters, now| job_status(&endless, tally, at(now)).status.conditions;
    assert!(
        conditions(&none, 0).is_empty(),
        "its NodeImage may be about to come"
    );
    assert!(conditions(&counters(1, 0, 0, 0), 5).is_empty());
    unknown.pending_nodes = names(9, 1);
    assert_eq!(only_condition(&endless, &unknown, 5).1, "NoNodeImage");
}

#[test]
fn conditions_keep_time_and_foreign_ones_stay() {
    let at_time = |second, mut list: Vec<Condition>| {
        list.iter_mut()
            .for_each(|c| c.last_transition_time = Time(at(second)));
        list
    };
    let mut paused = job(None, false);
    paused.parallelism = Ok(Parallelism::Nodes(0));
    let now = job_status(&paused, &counters(0, 0, 0, 1), at(9))
        .status
        .conditions;
    let mut other = now[0].clone();
    other.type_ = "example.com/Seen".to_owned();
    let previous = at_time(5, [vec![other.clone()], now.clone()].concat());
    assert_eq!(merge_conditions(&previous, now), previous);
    assert_eq!(merge_conditions(&previous, Vec::new()), at_time(5, vec![other]));
}

#[test]
fn failed_node_names_are_capped_but_counted() {
    let update = job_status(&job(None, false), &counters(0, 3000, 0, 0), at(1));
    assert_eq!(
        (update.status.failed, update.status.failed_nodes.len()),
        (3000, MAX_FAILED_NODES)
    );
}

#[test]
fn invalid_parallelism_ends_the_job() {
    let mut object = ImagePullJob::new("j", ImagePullJobSpec::default());
    object.spec.image = "nginx".into();
    object.spec.parallelism = Some(IntOrString::String("150%".into()));
    let update = job_status(&PullJob::from_object(&object), &counters(0, 0, 0, 1), at(1));
    assert!(
        update
            .status
            .message
            .unwrap()
            .starts_with("spec.parallelism: \"150%\"")
    );
}

#[test]
fn job_with_an_invalid_schedule_waits_for_a_change() {
    let mut object = ImagePullJob::new("j", ImagePullJobSpec::default());
    object.spec.image = "nginx".into();
    object.spec.completion_policy.type_ = Some(CompletionPolicyType::Never);
    object.spec.schedule = Some("at night".into());
    let update = job_status(&PullJob::from_object(&object), &counters(0, 0, 0, 1), at(1));
    assert_eq!(update.status.completion_time, None);
    let condition = &update.status.conditions[0];
    assert_eq!(
        (&*condition.type_, &*condition.reason),
        ("Waiting", "InvalidSpec")
    );
    assert!(
        condition
            .message
            .starts_with("spec.schedule: expected five fields")
    );
}

proptest! {
    /// A job ends exactly when all nodes have an outcome or its deadline passes, never earlier, and then its counters
    /// add up; a job with policy `Never` does not end.
    #[test]
    fn job_ends_at_completion_or_deadline(s in 0_usize..5, f in 0_usize..5, a in 0_usize..5, p in 0_usize..5,
                                 deadline in prop::option::of(1_i64..100), never in any::<bool>(), now in 2_i64..200) {
        let (job, tally) = (job(deadline, never), counters(s, f, a, p));
        let update = job_status(&job, &tally, at(now));
        let status = &update.status;
        let late = deadline.is_some_and(|d| now >= d);
        let over = a + p == 0;
        prop_assert_eq!(status.completion_time.is_some(), !never && (over || late));
        prop_assert_eq!(super::is_past_deadline(&job, at(now)), late && !never);
        if status.completion_time.is_some() {
            prop_assert_eq!(status.desired, status.succeeded + status.failed);
            prop_assert_eq!(status.active, 0);
            prop_assert_eq!(usize::try_from(status.failed).unwrap(), status.failed_nodes.len());
            let failed = status.failed > 0;
            prop_assert_eq!(status.conditions[0].type_.as_str(), if failed { "Failed" } else { "Complete" });
        } else if let Some(wake) = update.requeue_at {
            prop_assert!(wake > at(now));
        } else {
            prop_assert!(never || deadline.is_none());
        }
    }
}
