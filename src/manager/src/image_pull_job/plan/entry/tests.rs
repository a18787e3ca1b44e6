#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use kruise_api::image_pull_job::{CompletionPolicyType, ImagePullJob, ImagePullJobSpec, PullPolicy};
use kruise_api::node_image::{ImagePullPhase, SandboxConfig};

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

/// A tag whose time cannot be read is about to be removed: it is asked for anew, once, and the others stay as they are.
#[test]
fn a_tag_whose_time_cannot_be_read_is_asked_for_anew() {
    const FAR: &str = "9999-12-31T23:59:59Z";
    let tag = |tag: &str, created: &str| {
        json!({ "tag": tag, "createdAt": created, "version": 4, "imagePullPolicy": "IfNotPresent",
            "ownerReferences": [{ "kind": "ImagePullJob", "namespace": "other", "uid": "theirs" }] })
    };
    let stored = json!({ "tags": [tag("0", FAR), tag("1", FAR), tag("2", "2026-01-01T00:00:00Z")] });
    let stored: ImageSpec = serde_json::from_value(stored).unwrap();
    for policy in [ImagePullPolicy::IfNotPresent, ImagePullPolicy::Always] {
        let mine = job(0, Some(policy), false);
        for statuses in [vec![], vec![status(4, false)], vec![status(4, true)]] {
            assert_eq!(awaits(Some(&stored), &statuses, "1", ask(&mine)), None);
            let added = add(Some(&stored), &statuses, "1", &[ask(&mine)], setting(0)).unwrap();
            let entry = &added.tags[1];
            assert_eq!(
                (entry.version, &entry.created_at),
                (5, &Some(Time(setting(0).now)))
            );
            assert!(owned(entry, "uid0") && owned(entry, "theirs"));
            assert_eq!(
                (&added.tags[0], &added.tags[2]),
                (&stored.tags[0], &stored.tags[2])
            );
            assert_eq!(add(Some(&added), &statuses, "1", &[ask(&mine)], setting(0)), None);
            // What is written is read as the same, so that it is not written again.
            let again: ImageSpec = serde_json::from_value(json!(added)).unwrap();
            assert_eq!(again, added);
        }
    }
    // One that is the job's own is removed first, and then added under a version that no status answers.
    let mut own = stored.clone();
    own.tags[1].owner_references = vec![owner(&job(0, None, false))];
    let mine = job(0, None, false);
    assert_eq!(
        add(Some(&own), &[status(4, true)], "1", &[ask(&mine)], setting(0)),
        None
    );
    own.tags.remove(1);
    let added = add(Some(&own), &[status(4, true)], "1", &[ask(&mine)], setting(0)).unwrap();
    assert_eq!((added.tags.len(), added.tags[1].version), (3, 5));
}

/// It may have a time that cannot be read; its pull has ended all the same.
#[test]
fn nobody_waits_for_an_outcome_without_a_time() {
    let mut spec = add(None, &[], "1", &[ask(&job(0, None, false))], setting(0)).unwrap();
    spec.tags[0].owner_references[0].namespace = Some("other".to_owned());
    let late = job(1, Some(ImagePullPolicy::Always), false);
    let mut state = status(0, false);
    assert_eq!(awaits(Some(&spec), &[state.clone()], "1", ask(&late)), Some(0));
    state.phase = ImagePullPhase::Succeeded;
    assert_eq!(awaits(Some(&spec), &[state.clone()], "1", ask(&late)), None);
    let anew = add(Some(&spec), &[state], "1", &[ask(&late)], setting(0)).unwrap();
    assert_eq!(anew.tags[0].version, 1);
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

/// A job of one of two namespaces, with these limits, made at that second.
fn tenant(n: u8, (evil, always, made): (bool, bool, i64), limits: Limits) -> Job {
    let mut job = job(n, always.then_some(ImagePullPolicy::Always), false);
    job.key.namespace = Some(if evil { "evil" } else { "ns" }.to_owned());
    job.created = Timestamp::from_second(made).ok();
    let (timeout_seconds, backoff_limit, deadline) = limits;
    job.spec.pull_policy = Some(PullPolicy {
        timeout_seconds,
        backoff_limit,
    });
    job.spec.completion_policy.active_deadline_seconds = deadline;
    job
}

/// Timeout, repetitions and deadline.
type Limits = (Option<i32>, Option<i32>, Option<i64>);

fn any_limits() -> impl Strategy<Value = Limits> {
    let some = || prop::option::of(0..1000_i32);
    (some(), some(), prop::option::of(1..1000_i64))
}

fn limits_of(entry: &ImageTagSpec) -> (i32, i32, i64) {
    let policy = entry.pull_policy.clone().unwrap();
    let deadline = policy.active_deadline_seconds.unwrap_or(i64::MAX);
    (
        policy.timeout_seconds.unwrap_or(600),
        policy.backoff_limit.unwrap_or(3),
        deadline,
    )
}

#[test]
fn a_job_that_wants_the_image_fresh_waits_for_the_pull_of_another_namespace() {
    let first = tenant(0, (false, false, 5), (None, None, None));
    let spec = add(
        None,
        &[],
        "1",
        &[ask(&first)],
        Setting {
            now: Timestamp::from_second(10).unwrap(),
            ..setting(0)
        },
    );
    let spec = spec.unwrap();
    let late = tenant(1, (true, true, 20), (Some(1), Some(0), Some(1)));
    assert_eq!(
        add(Some(&spec), &[status(0, false)], "1", &[ask(&late)], setting(0)),
        None
    );
    let version = |over| awaits(Some(&spec), &[status(0, over)], "1", ask(&late));
    assert_eq!((version(false), version(true)), (Some(0), None));
    let after = add(Some(&spec), &[status(0, true)], "1", &[ask(&late)], setting(0)).unwrap();
    assert_eq!(after.tags[0].version, 1);
    assert_eq!(limits_of(&after.tags[0]), (600, 3, i64::MAX));
    // One that was asked for since there is the job is fresh.
    let early = tenant(2, (true, true, 9), (Some(1), Some(0), Some(1)));
    let mut fresh = spec.clone();
    fresh.tags[0].image_pull_policy = Some(ImagePullPolicy::Always);
    let joined = add(Some(&fresh), &[status(0, false)], "1", &[ask(&early)], setting(0)).unwrap();
    assert_eq!(joined.tags[0].version, 0);
    assert!(owned(&joined.tags[0], "uid2"));
}

proptest! {
    /// Whatever jobs of another namespace ask for, a pull that runs for a job is not broken off, and its limits are not
    /// narrowed; a job of the own namespace starts it again as ever.
    #[test]
    fn another_namespace_s_jobs_do_not_narrow_or_break_off_a_pull(
        mine in any_limits(), always in any::<bool>(), over in any::<bool>(), begun in any::<bool>(),
        others in prop::collection::vec((any::<bool>(), 0..100_i64, any_limits(), any::<bool>()), 1..6),
    ) {
        let job = tenant(0, (false, always, 50), mine);
        let now = Setting { now: Timestamp::from_second(60).unwrap(), ..setting(0) };
        let mut spec = add(None, &[], "1", &[ask(&job)], now).unwrap();
        let secret = ReferenceObject { namespace: "d".into(), name: "s".into(), mode: Some(keys::MODE_BATCH.into()) };
        for (n, (fresh, made, limits, secrets)) in (1_u8..).zip(others) {
            let before = spec.tags[0].clone();
            let status: Vec<_> = begun.then(|| status(before.version, over)).into_iter().collect();
            let other = tenant(n, (true, fresh, made), limits);
            let secrets = if secrets { std::slice::from_ref(&secret) } else { &[] };
            let ask = Ask { job: &other, secrets, ended: &NONE };
            if let Some(new) = add(Some(&spec), &status, "1", &[ask], now) {
                spec = new;
            }
            let entry = &spec.tags[0];
            prop_assert!(owned(entry, "uid0"));
            if !(begun && over) {
                prop_assert_eq!(entry.version, before.version, "it is broken off");
                prop_assert!(owned(entry, &other.uid) || fresh, "only who wants it fresh waits");
            }
            let ((timeout, tries, deadline), was) = (limits_of(entry), limits_of(&before));
            prop_assert!(timeout >= was.0 && tries >= was.1 && deadline >= was.2);
        }
    }
}
