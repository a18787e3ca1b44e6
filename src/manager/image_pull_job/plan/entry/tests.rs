#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::api::image_pull_job::{CompletionPolicyType, ImagePullJob, ImagePullJobSpec, PullPolicy};
use crate::api::node_image::{ImagePullPhase, SandboxConfig};

static NONE: BTreeSet<String> = BTreeSet::new();

fn job(n: u8, policy: Option<ImagePullPolicy>, never: bool) -> Job {
    let mut object = ImagePullJob::new(
        &format!("j{n}"),
        ImagePullJobSpec {
            image: "nginx:1".to_owned(),
            image_pull_policy: policy,
            ..ImagePullJobSpec::default()
        },
    );
    if never {
        object.spec.completion_policy.type_ = Some(CompletionPolicyType::Never);
    }
    object.metadata.uid = Some(format!("uid{n}"));
    object.metadata.namespace = Some("ns".to_owned());
    Job::read(&object)
}

fn setting(seed: u64) -> Setting {
    Setting {
        default_ttl: 300,
        seed,
        now: Timestamp::UNIX_EPOCH,
    }
}

fn status(version: i64, over: bool) -> ImageTagStatus {
    ImageTagStatus {
        tag: "1".into(),
        phase: ImagePullPhase::Pulling,
        progress: 0,
        start_time: None,
        completion_time: over.then_some(Time(Timestamp::UNIX_EPOCH)),
        version,
        image_id: None,
        message: None,
    }
}

fn ask(job: &Job) -> Ask<'_> {
    Ask {
        job,
        secrets: &[],
        ended: &NONE,
    }
}

#[test]
fn two_jobs_meet_in_one_entry_of_one_version() {
    let (a, b) = (job(0, None, false), job(1, None, false));
    let spec = add(None, &[], "1", &[ask(&a), ask(&b)], setting(0)).unwrap();
    assert_eq!((spec.tags.len(), spec.tags[0].version), (1, 0));
    assert!(owned(&spec.tags[0], "uid0") && owned(&spec.tags[0], "uid1"));
}

#[test]
fn a_version_is_new_where_an_old_answer_would_be_taken_for_ours() {
    let (a, b) = (job(0, None, false), job(1, None, false));
    let spec = add(None, &[status(4, true)], "1", &[ask(&a)], setting(0)).unwrap();
    assert_eq!(spec.tags[0].version, 5);
    // A pull that goes on serves the second job too; one that is over does not.
    let joined = add(Some(&spec), &[status(5, false)], "1", &[ask(&b)], setting(0)).unwrap();
    assert_eq!(joined.tags[0].version, 5);
    let anew = add(Some(&spec), &[status(5, true)], "1", &[ask(&b)], setting(0)).unwrap();
    assert_eq!(anew.tags[0].version, 6);
    let always = job(2, Some(ImagePullPolicy::Always), false);
    let anew = add(Some(&spec), &[status(5, false)], "1", &[ask(&always)], setting(0)).unwrap();
    assert_eq!(anew.tags[0].version, 6);
    assert_eq!(anew.tags[0].image_pull_policy, Some(ImagePullPolicy::Always));
}

#[test]
fn a_job_that_is_over_does_not_own_what_is_pulled_once_more() {
    let (a, b) = (job(0, None, false), job(1, None, false));
    let ended = ["uid0".to_owned()].into();
    let for_b = Ask {
        ended: &ended,
        ..ask(&b)
    };
    let first = add(None, &[], "1", &[ask(&a)], setting(0)).unwrap();
    let again = add(Some(&first), &[status(0, true)], "1", &[for_b], setting(0)).unwrap();
    assert!(owned(&again.tags[0], "uid1") && !owned(&again.tags[0], "uid0"));
    let joined = add(Some(&first), &[status(0, false)], "1", &[for_b], setting(0)).unwrap();
    assert!(owned(&joined.tags[0], "uid0"), "the pull is its own");
}

#[test]
fn limits_are_upstreams() {
    let mut plain = job(0, None, false);
    plain.spec.pull_policy = Some(PullPolicy {
        timeout_seconds: Some(100),
        backoff_limit: Some(2),
    });
    let ttl = |job: &Job| pull_policy(job, setting(7)).ttl_seconds_after_finished.unwrap();
    assert!((600..=900).contains(&ttl(&plain)), "{}", ttl(&plain));
    plain.spec.completion_policy.ttl_seconds_after_finished = Some(10);
    assert!((310..=610).contains(&ttl(&plain)));
    let forever = job(0, None, true);
    assert!((DAY - 600..=DAY + 600).contains(&i64::from(ttl(&forever))));
    assert_eq!(
        pull_policy(&forever, setting(7)).active_deadline_seconds,
        Some(1800)
    );
}

#[test]
fn credentials_of_jobs_that_are_done_do_not_stay() {
    let copy = |name: &str| ReferenceObject {
        namespace: "d".into(),
        name: name.into(),
        mode: Some(keys::MODE_BATCH.into()),
    };
    let (a, b) = (job(0, None, false), job(1, None, false));
    let (for_a, for_b) = ([copy("a")], [copy("b")]);
    let with = |job, secrets| Ask {
        job,
        secrets,
        ended: &NONE,
    };
    let first = add(None, &[], "1", &[with(&a, &for_a)], setting(0)).unwrap();
    let joined = add(Some(&first), &[], "1", &[with(&b, &for_b)], setting(0)).unwrap();
    assert_eq!(joined.pull_secrets, [copy("a"), copy("b")]);
    let later = add(
        Some(&first),
        &[status(0, true)],
        "1",
        &[with(&b, &for_b)],
        setting(0),
    )
    .unwrap();
    assert_eq!(later.pull_secrets, [copy("b")]);
}

proptest! {
    /// Whatever was there: all that asked own the tag, nobody is lost, versions never fall, and asking again
    /// changes nothing.
    #[test]
    fn asking_is_idempotent(who in prop::collection::vec((0_u8..4, any::<bool>(), any::<bool>()), 1..6),
                            known in prop::option::of((0_i64..5, any::<bool>())), seed in any::<u64>()) {
        let jobs: Vec<Job> = who.iter()
            .map(|(n, always, never)| job(*n, always.then_some(ImagePullPolicy::Always), *never)).collect();
        let status = known.map(|(version, over)| status(version, over));
        let secret = ReferenceObject { namespace: "d".into(), name: "s".into(), mode: None };
        let mut spec: Option<ImageSpec> = None;
        for job in &jobs {
            let ask = Ask { job, secrets: std::slice::from_ref(&secret), ended: &NONE };
            let before = spec.as_ref().map_or(-1, |s| s.tags[0].version);
            if let Some(new) = add(spec.as_ref(), status.as_slice(), "1", &[ask], setting(seed)) {
                spec = Some(new);
            }
            let entry = &spec.as_ref().unwrap().tags[0];
            prop_assert!(entry.version >= before);
            prop_assert!(entry.pull_policy.as_ref().unwrap().ttl_seconds_after_finished.unwrap() > 0);
            prop_assert_eq!(add(spec.as_ref(), status.as_slice(), "1", &[ask], setting(seed)), None);
        }
        let spec = spec.unwrap();
        prop_assert_eq!(spec.pull_secrets.len(), 1);
        for job in &jobs { prop_assert!(owned(&spec.tags[0], &job.uid)); }
    }
}

#[test]
fn annotations_that_no_node_image_takes_are_left_out() {
    let text = |characters| "x".repeat(characters);
    let mut large = job(0, None, false);
    let mut annotations: BTreeMap<_, _> = (0..100).map(|n| (format!("k{n:02}"), text(5000))).collect();
    annotations.insert("a".to_owned(), text(70_000));
    annotations.insert(text(400), String::new());
    large.spec.sandbox_config = Some(SandboxConfig {
        labels: BTreeMap::new(),
        annotations,
    });
    let spec = add(None, &[], "1", &[ask(&large)], setting(0)).unwrap();
    let kept: Vec<_> = spec.sandbox_config.unwrap().annotations.into_keys().collect();
    let first: Vec<_> = (0..64).map(|n| format!("k{n:02}")).collect();
    assert_eq!(kept, first);
}
