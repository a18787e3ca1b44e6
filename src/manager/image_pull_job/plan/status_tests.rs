#![allow(clippy::unwrap_used, clippy::panic)]

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use proptest::prelude::*;

use super::*;
use crate::api::image_pull_job::{CompletionPolicyType, ImagePullJob, ImagePullJobSpec};

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
}

#[test]
fn what_is_in_the_way_is_said() {
    let mut hindered = tally(0, 0, 0, 3);
    hindered.hindrance = Some("job waits".into());
    let verdict = judge(&job(None, false), &hindered, at(1));
    assert_eq!(verdict.status.message.as_deref(), Some("job waits"));
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
        } else if let Some(wake) = verdict.wake {
            prop_assert!(wake > at(now));
        } else {
            prop_assert!(never || deadline.is_none());
        }
    }
}
