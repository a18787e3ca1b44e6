#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::repull::{REPULL_INTERVAL, node_seed, repull_at};
use kruise_api::image_pull_job::{
    CompletionPolicy, CompletionPolicyType, ImagePullJob, ImagePullJobSpec, PullPolicy,
};
use kruise_api::node_image::{ImagePullPhase, SandboxConfig};
use kruise_api::schedule::Schedule;

static NONE: BTreeSet<String> = BTreeSet::new();

fn job(n: u8, policy: Option<ImagePullPolicy>, never: bool) -> PullJob {
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
    PullJob::from_object(&object)
}

fn options(seed: u64) -> EntryOptions {
    EntryOptions {
        default_ttl: 300,
        seed,
        now: Timestamp::UNIX_EPOCH,
    }
}

fn status(version: i64, finished: bool) -> ImageTagStatus {
    ImageTagStatus {
        tag: "1".into(),
        phase: ImagePullPhase::Pulling,
        progress: 0,
        start_time: None,
        completion_time: finished.then_some(Time(Timestamp::UNIX_EPOCH)),
        version,
        image_id: None,
        message: None,
        bytes: None,
    }
}

fn request(job: &PullJob) -> JobRequest<'_> {
    JobRequest {
        job,
        secrets: &[],
        ended_jobs: &NONE,
        needed_secrets: None,
        needed_accounts: None,
    }
}

/// `current` with the requests of the jobs; `None` when it has all of them already, or each has an [`awaited_pull`].
fn add_requests(
    current: Option<&ImageSpec>,
    statuses: &[ImageTagStatus],
    tag: &str,
    requests: &[JobRequest<'_>],
    options: EntryOptions,
) -> Option<ImageSpec> {
    let mut spec = current.cloned().unwrap_or_default();
    for request in requests {
        add_request(&mut spec, statuses, tag, *request, options);
    }
    (current != Some(&spec)).then_some(spec)
}

#[test]
fn two_jobs_share_one_entry_and_version() {
    let (a, b) = (job(0, None, false), job(1, None, false));
    let spec = add_requests(None, &[], "1", &[request(&a), request(&b)], options(0)).unwrap();
    assert_eq!((spec.tags.len(), spec.tags[0].version), (1, 0));
    assert!(is_owned_by(&spec.tags[0], "uid0") && is_owned_by(&spec.tags[0], "uid1"));
}

#[test]
fn edit_of_a_job_reaches_its_pull() {
    let edited = |job: &PullJob, timeout, retries, policy| {
        let mut job = job.clone();
        job.spec.pull_policy = Some(PullPolicy {
            timeout_seconds: Some(timeout),
            backoff_limit: Some(retries),
            pin_seconds: Some(timeout),
        });
        job.spec.image_pull_policy = Some(policy);
        job
    };
    let limits = |spec: &ImageSpec| {
        let (entry, policy) = (&spec.tags[0], spec.tags[0].pull_policy.clone().unwrap());
        let always = entry.image_pull_policy == Some(ImagePullPolicy::Always);
        (
            entry.version,
            policy.timeout_seconds,
            policy.backoff_limit,
            policy.pin_seconds,
            always,
        )
    };
    let (a, b) = (job(0, None, false), job(1, None, false));
    let spec = add_requests(None, &[], "1", &[request(&a)], options(0)).unwrap();
    let ttl = spec.tags[0]
        .pull_policy
        .as_ref()
        .unwrap()
        .ttl_seconds_after_finished;
    let short = edited(&a, 7, 1, ImagePullPolicy::Always);
    let running = [status(0, false)];
    let spec = add_requests(Some(&spec), &running, "1", &[request(&short)], options(0)).unwrap();
    assert_eq!(limits(&spec), (0, Some(7), Some(1), Some(7), true));
    assert_eq!(
        spec.tags[0]
            .pull_policy
            .as_ref()
            .unwrap()
            .ttl_seconds_after_finished,
        ttl
    );
    assert_eq!(
        add_requests(Some(&spec), &running, "1", &[request(&short)], options(0)),
        None
    );
    // A finished pull is not changed, and limits that two jobs share only grow.
    assert_eq!(
        add_requests(Some(&spec), &[status(0, true)], "1", &[request(&a)], options(0)),
        None
    );
    let long = edited(&a, 90, 0, ImagePullPolicy::IfNotPresent);
    let mut shared = spec.clone();
    shared.tags[0].owner_references.push(owner_reference(&b));
    let spec = add_requests(Some(&shared), &running, "1", &[request(&long)], options(0)).unwrap();
    assert_eq!(limits(&spec), (0, Some(90), Some(1), Some(90), true));
    let ended = BTreeSet::from(["uid1".to_owned()]);
    let alone = JobRequest {
        ended_jobs: &ended,
        ..request(&long)
    };
    let spec = add_requests(Some(&shared), &running, "1", &[alone], options(0)).unwrap();
    assert_eq!(limits(&spec), (0, Some(90), Some(0), Some(90), false));
}

/// A tag whose time cannot be read is about to be removed: it is requested again, once, and the others are unchanged.
#[test]
fn tag_with_unreadable_time_is_requested_again() {
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
            assert_eq!(
                awaited_pull(&stored, &statuses, "1", request(&mine), Timestamp::UNIX_EPOCH),
                None
            );
            let added = add_requests(Some(&stored), &statuses, "1", &[request(&mine)], options(0)).unwrap();
            let entry = &added.tags[1];
            assert_eq!(
                (entry.version, &entry.created_at),
                (5, &Some(Time(options(0).now)))
            );
            assert!(is_owned_by(entry, "uid0") && is_owned_by(entry, "theirs"));
            assert_eq!(
                (&added.tags[0], &added.tags[2]),
                (&stored.tags[0], &stored.tags[2])
            );
            assert_eq!(
                add_requests(Some(&added), &statuses, "1", &[request(&mine)], options(0)),
                None
            );
            // What is written is parsed as the same value, so that it is not written again.
            let again: ImageSpec = serde_json::from_value(json!(added)).unwrap();
            assert_eq!(again, added);
        }
    }
    // A tag that the job owns is removed first, and then added with a version that no status has.
    let mut own = stored.clone();
    own.tags[1].owner_references = vec![owner_reference(&job(0, None, false))];
    let mine = job(0, None, false);
    assert_eq!(
        add_requests(Some(&own), &[status(4, true)], "1", &[request(&mine)], options(0)),
        None
    );
    own.tags.remove(1);
    let added = add_requests(Some(&own), &[status(4, true)], "1", &[request(&mine)], options(0)).unwrap();
    assert_eq!((added.tags.len(), added.tags[1].version), (3, 5));
}

/// A tag may have a time that cannot be read; its pull has ended all the same.
#[test]
fn ended_pull_without_time_is_not_awaited() {
    let mut spec = add_requests(None, &[], "1", &[request(&job(0, None, false))], options(0)).unwrap();
    spec.tags[0].owner_references[0].namespace = Some("other".to_owned());
    let late = job(1, Some(ImagePullPolicy::Always), false);
    let mut state = status(0, false);
    let awaited = |state: &ImageTagStatus| {
        let now = Timestamp::UNIX_EPOCH;
        awaited_pull(&spec, std::slice::from_ref(state), "1", request(&late), now)
    };
    assert_eq!(awaited(&state), Some(0));
    // A pull without end is joined, after the time that one of the job's own could take.
    let later = EntryOptions {
        now: Timestamp::from_second(4 * 600).unwrap(),
        ..options(0)
    };
    let joined = add_requests(Some(&spec), &[state.clone()], "1", &[request(&late)], later).unwrap();
    assert!(is_owned_by(&joined.tags[0], "uid1"));
    assert_eq!(joined.tags[0].version, 0, "it is not begun again");
    state.phase = ImagePullPhase::Succeeded;
    assert_eq!(awaited(&state), None);
    let repulled = add_requests(Some(&spec), &[state], "1", &[request(&late)], options(0)).unwrap();
    assert_eq!(repulled.tags[0].version, 1);
}

#[test]
fn version_increases_where_old_status_would_match() {
    let (a, b) = (job(0, None, false), job(1, None, false));
    let spec = add_requests(None, &[status(4, true)], "1", &[request(&a)], options(0)).unwrap();
    assert_eq!(spec.tags[0].version, 5);
    // A running pull serves the second job too; a finished one does not.
    let joined = add_requests(Some(&spec), &[status(5, false)], "1", &[request(&b)], options(0)).unwrap();
    assert_eq!(joined.tags[0].version, 5);
    let repulled = add_requests(Some(&spec), &[status(5, true)], "1", &[request(&b)], options(0)).unwrap();
    assert_eq!(repulled.tags[0].version, 6);
    let always = job(2, Some(ImagePullPolicy::Always), false);
    let repulled = add_requests(
        Some(&spec),
        &[status(5, false)],
        "1",
        &[request(&always)],
        options(0),
    )
    .unwrap();
    assert_eq!(repulled.tags[0].version, 6);
    assert_eq!(repulled.tags[0].image_pull_policy, Some(ImagePullPolicy::Always));
}

#[test]
fn ended_jobs_do_not_own_a_repull() {
    let (a, b) = (job(0, None, false), job(1, None, false));
    let ended = ["uid0".to_owned()].into();
    let for_b = JobRequest {
        ended_jobs: &ended,
        ..request(&b)
    };
    let first = add_requests(None, &[], "1", &[request(&a)], options(0)).unwrap();
    let repulled = add_requests(Some(&first), &[status(0, true)], "1", &[for_b], options(0)).unwrap();
    assert!(is_owned_by(&repulled.tags[0], "uid1") && !is_owned_by(&repulled.tags[0], "uid0"));
    let joined = add_requests(Some(&first), &[status(0, false)], "1", &[for_b], options(0)).unwrap();
    assert!(is_owned_by(&joined.tags[0], "uid0"), "it owns the pull");
}

#[test]
fn limits_match_upstream() {
    let mut plain = job(0, None, false);
    plain.spec.pull_policy = Some(PullPolicy {
        timeout_seconds: Some(100),
        backoff_limit: Some(2),
        pin_seconds: None,
    });
    let ttl = |job: &PullJob| pull_policy(job, options(7)).ttl_seconds_after_finished.unwrap();
    assert!((600..=900).contains(&ttl(&plain)), "{}", ttl(&plain));
    plain.spec.completion_policy.ttl_seconds_after_finished = Some(10);
    assert!((310..=610).contains(&ttl(&plain)));
    let forever = job(0, None, true);
    assert!((REPULL_INTERVAL - 600..=REPULL_INTERVAL + 600).contains(&i64::from(ttl(&forever))));
    assert_eq!(
        pull_policy(&forever, options(7)).active_deadline_seconds,
        Some(1800)
    );
}

/// The tag is removed at the next time of the schedule, and the job requests it again then.
#[test]
fn schedule_sets_when_a_node_pulls_again() {
    let mut scheduled = job(0, None, true);
    // It is midnight, on a Thursday.
    for (schedule, seconds) in [
        ("0 2 * * *", 7200),
        ("0 0 * * *", 86_400),
        ("0 0 * * THU", 7 * 86_400),
        ("0 0 1 7 *", 181 * 86_400),
    ] {
        scheduled.schedule = Schedule::parse(schedule).map(Some);
        let ttl = pull_policy(&scheduled, options(7))
            .ttl_seconds_after_finished
            .unwrap();
        assert!((seconds + 1..=seconds + 61).contains(&ttl), "{schedule}: {ttl}");
    }
    scheduled.spec.completion_policy.type_ = None;
    let ttl = pull_policy(&scheduled, options(7))
        .ttl_seconds_after_finished
        .unwrap();
    assert!(ttl < 7200, "a job that ends has no schedule");
}

#[test]
fn credentials_of_ended_jobs_are_removed() {
    let copy = |name: &str| ReferenceObject {
        namespace: "d".into(),
        name: name.into(),
        mode: Some(keys::MODE_BATCH.into()),
    };
    let (a, b) = (job(0, None, false), job(1, None, false));
    let (for_a, for_b) = ([copy("a")], [copy("b")]);
    let with = |job, secrets| JobRequest {
        job,
        secrets,
        ended_jobs: &NONE,
        needed_secrets: None,
        needed_accounts: None,
    };
    let ended = BTreeSet::from(["uid0".to_owned()]);
    let first = add_requests(None, &[], "1", &[with(&a, &for_a)], options(0)).unwrap();
    let joined = add_requests(Some(&first), &[], "1", &[with(&b, &for_b)], options(0)).unwrap();
    assert_eq!(joined.pull_secrets, [copy("a"), copy("b")]);
    let later = |ended_jobs| {
        let request = JobRequest {
            ended_jobs,
            ..with(&b, &for_b)
        };
        let later = add_requests(Some(&first), &[status(0, true)], "1", &[request], options(0));
        later.unwrap().pull_secrets
    };
    assert_eq!(later(&ended), [copy("b")]);
    // A job that never ends pulls again.
    assert_eq!(later(&NONE), [copy("a"), copy("b")]);
    // Its pull is not over, but the copies of others that have gone are of no use to it.
    let needed = BTreeSet::from([secret_key(&copy("b"))]);
    let request = JobRequest {
        needed_secrets: Some(&needed),
        ..with(&b, &for_b)
    };
    let joined = add_requests(Some(&first), &[], "1", &[request], options(0)).unwrap();
    assert_eq!(joined.pull_secrets, [copy("b")]);
}

#[test]
fn job_that_never_ends_pulls_again_by_its_own_schedule() {
    let spec = |schedule: Option<&str>| ImagePullJobSpec {
        schedule: schedule.map(str::to_owned),
        completion_policy: CompletionPolicy {
            type_: Some(CompletionPolicyType::Never),
            ..CompletionPolicy::default()
        },
        ..ImagePullJobSpec::default()
    };
    let completed = Timestamp::from_second(3_000).unwrap();
    let after = |schedule| {
        let due = repull_at(&spec(schedule), node_seed("node-1"), completed).unwrap();
        due.as_second() - completed.as_second()
    };
    assert!(
        (600..=660).contains(&after(Some("0 * * * *"))),
        "{}",
        after(Some("0 * * * *"))
    );
    let daily = after(None);
    assert!((86_400 - 600..=86_400 + 600).contains(&daily), "{daily}");
    assert_eq!(repull_at(&spec(Some("wrong")), 0, completed), None);
    assert_eq!(repull_at(&ImagePullJobSpec::default(), 0, completed), None);
}

proptest! {
    /// For any previous state: all jobs own the tag, no owner is lost, versions never decrease, and the same request
    /// again changes nothing.
    #[test]
    fn requests_are_idempotent(who in prop::collection::vec((0_u8..4, any::<bool>(), any::<bool>()), 1..6),
                            known in prop::option::of((0_i64..5, any::<bool>())), seed in any::<u64>()) {
        let jobs: Vec<PullJob> = who.iter()
            .map(|(n, always, never)| job(*n, always.then_some(ImagePullPolicy::Always), *never)).collect();
        let status = known.map(|(version, over)| status(version, over));
        let secret = ReferenceObject { namespace: "d".into(), name: "s".into(), mode: None };
        let mut spec: Option<ImageSpec> = None;
        for job in &jobs {
            let request = JobRequest { job, secrets: std::slice::from_ref(&secret), ended_jobs: &NONE, needed_secrets: None, needed_accounts: None };
            let before = spec.as_ref().map_or(-1, |s| s.tags[0].version);
            if let Some(new) = add_requests(spec.as_ref(), status.as_slice(), "1", &[request], options(seed)) {
                spec = Some(new);
            }
            let entry = &spec.as_ref().unwrap().tags[0];
            prop_assert!(entry.version >= before);
            prop_assert!(entry.pull_policy.as_ref().unwrap().ttl_seconds_after_finished.unwrap() > 0);
            prop_assert_eq!(add_requests(spec.as_ref(), status.as_slice(), "1", &[request], options(seed)), None);
        }
        let spec = spec.unwrap();
        prop_assert_eq!(spec.pull_secrets.len(), 1);
        for job in &jobs { prop_assert!(is_owned_by(&spec.tags[0], &job.uid)); }
    }
}

#[test]
fn oversized_annotations_are_dropped() {
    let text = |characters| "x".repeat(characters);
    let mut large = job(0, None, false);
    let mut annotations: BTreeMap<_, _> = (0..100).map(|n| (format!("k{n:02}"), text(5000))).collect();
    annotations.insert("a".to_owned(), text(70_000));
    annotations.insert(text(400), String::new());
    large.spec.sandbox_config = Some(SandboxConfig {
        labels: BTreeMap::new(),
        annotations,
    });
    let spec = add_requests(None, &[], "1", &[request(&large)], options(0)).unwrap();
    let accepted: Vec<_> = spec.sandbox_config.unwrap().annotations.into_keys().collect();
    let first: Vec<_> = (0..64).map(|n| format!("k{n:02}")).collect();
    assert_eq!(accepted, first);
}

/// A job of one of two namespaces, with these limits, created at that second.
fn tenant(n: u8, (evil, always, made): (bool, bool, i64), limits: Limits) -> PullJob {
    let mut job = job(n, always.then_some(ImagePullPolicy::Always), false);
    job.key.namespace = Some(if evil { "evil" } else { "ns" }.to_owned());
    job.created = Timestamp::from_second(made).ok();
    let (timeout_seconds, backoff_limit, deadline) = limits;
    job.spec.pull_policy = Some(PullPolicy {
        timeout_seconds,
        backoff_limit,
        pin_seconds: None,
    });
    job.spec.completion_policy.active_deadline_seconds = deadline;
    job
}

/// Timeout, retries and deadline.
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
fn always_policy_waits_for_another_namespaces_pull() {
    let first = tenant(0, (false, false, 5), (None, None, None));
    let spec = add_requests(
        None,
        &[],
        "1",
        &[request(&first)],
        EntryOptions {
            now: Timestamp::from_second(10).unwrap(),
            ..options(0)
        },
    );
    let spec = spec.unwrap();
    let late = tenant(1, (true, true, 20), (Some(1), Some(0), Some(1)));
    assert_eq!(
        add_requests(
            Some(&spec),
            &[status(0, false)],
            "1",
            &[request(&late)],
            options(0)
        ),
        None
    );
    let version = |over| {
        awaited_pull(
            &spec,
            &[status(0, over)],
            "1",
            request(&late),
            Timestamp::UNIX_EPOCH,
        )
    };
    assert_eq!((version(false), version(true)), (Some(0), None));
    let repulled = add_requests(
        Some(&spec),
        &[status(0, true)],
        "1",
        &[request(&late)],
        options(0),
    )
    .unwrap();
    assert_eq!(repulled.tags[0].version, 1);
    assert_eq!(limits_of(&repulled.tags[0]), (600, 3, i64::MAX));
    // A pull that was requested after the job's creation is fresh.
    let early = tenant(2, (true, true, 9), (Some(1), Some(0), Some(1)));
    let mut fresh = spec.clone();
    fresh.tags[0].image_pull_policy = Some(ImagePullPolicy::Always);
    let joined = add_requests(
        Some(&fresh),
        &[status(0, false)],
        "1",
        &[request(&early)],
        options(0),
    )
    .unwrap();
    assert_eq!(joined.tags[0].version, 0);
    assert!(is_owned_by(&joined.tags[0], "uid2"));
}

proptest! {
    /// A request from another namespace neither aborts a running pull nor narrows its limits; a job of the same
    /// namespace restarts it as usual.
    #[test]
    fn other_namespaces_do_not_narrow_or_abort_a_pull(
        mine in any_limits(), always in any::<bool>(), over in any::<bool>(), begun in any::<bool>(),
        others in prop::collection::vec((any::<bool>(), 0..100_i64, any_limits(), any::<bool>()), 1..6),
    ) {
        let job = tenant(0, (false, always, 50), mine);
        let now = EntryOptions { now: Timestamp::from_second(60).unwrap(), ..options(0) };
        let mut spec = add_requests(None, &[], "1", &[request(&job)], now).unwrap();
        let secret = ReferenceObject { namespace: "d".into(), name: "s".into(), mode: Some(keys::MODE_BATCH.into()) };
        for (n, (fresh, made, limits, secrets)) in (1_u8..).zip(others) {
            let previous = spec.tags[0].clone();
            let status: Vec<_> = begun.then(|| status(previous.version, over)).into_iter().collect();
            let other = tenant(n, (true, fresh, made), limits);
            let secrets = if secrets { std::slice::from_ref(&secret) } else { &[] };
            let request = JobRequest { job: &other, secrets, ended_jobs: &NONE, needed_secrets: None, needed_accounts: None };
            if let Some(new) = add_requests(Some(&spec), &status, "1", &[request], now) {
                spec = new;
            }
            let entry = &spec.tags[0];
            prop_assert!(is_owned_by(entry, "uid0"));
            if !(begun && over) {
                prop_assert_eq!(entry.version, previous.version, "the pull is aborted");
                prop_assert!(is_owned_by(entry, &other.uid) || fresh, "only a fresh pull is awaited");
            }
            let ((timeout, tries, deadline), was) = (limits_of(entry), limits_of(&previous));
            prop_assert!(timeout >= was.0 && tries >= was.1 && deadline >= was.2);
        }
    }
}

/// A configuration that a runtime refuses must harm the pulls of its own namespace only.
#[test]
fn sandbox_config_is_not_shared_between_namespaces() {
    let config = || SandboxConfig {
        labels: [("a".to_owned(), "b".to_owned())].into(),
        ..SandboxConfig::default()
    };
    let job_in = |namespace: &str, n: u8, config: Option<SandboxConfig>| {
        let mut job = job(n, None, false);
        job.key.namespace = Some(namespace.to_owned());
        job.spec.sandbox_config = config;
        job
    };
    let added = |current: Option<&ImageSpec>, tag: &str, job: &PullJob| {
        add_requests(current, &[], tag, &[request(job)], options(0)).unwrap()
    };
    let own = added(None, "1", &job_in("ns", 0, Some(config())));
    assert_eq!(own.sandbox_config, Some(config()));
    // The latest job of the namespace decides.
    assert_eq!(
        added(Some(&own), "2", &job_in("ns", 1, None)).sandbox_config,
        None
    );
    for other in [None, Some(config())] {
        let shared = added(Some(&own), "2", &job_in("other", 1, other));
        assert_eq!(shared.sandbox_config, None);
    }
    // The first job has ended.
    let ended = BTreeSet::from(["uid0".to_owned()]);
    let after = job_in("other", 1, Some(config()));
    let request = JobRequest {
        ended_jobs: &ended,
        ..request(&after)
    };
    let alone = add_requests(Some(&own), &[], "2", &[request], options(0)).unwrap();
    assert_eq!(alone.sandbox_config, Some(config()));
}

#[test]
fn secrets_beyond_the_limit_are_not_added() {
    let secret = |name: &str| ReferenceObject {
        namespace: "copies".to_owned(),
        name: name.to_owned(),
        mode: None,
    };
    let (a, secrets) = (job(0, None, false), [secret("a"), secret("b")]);
    let needed = BTreeSet::from([("copies".to_owned(), "b".to_owned())]);
    let request = JobRequest {
        secrets: &secrets,
        needed_secrets: Some(&needed),
        ..request(&a)
    };
    let spec = add_requests(None, &[], "1", &[request], options(0)).unwrap();
    assert_eq!(spec.pull_secrets, [secret("b")]);
}

#[test]
fn service_accounts_are_those_of_running_jobs() {
    let job_of = |n: u8, account: Option<&str>| {
        let mut job = job(n, None, false);
        job.spec.service_account_name = account.map(str::to_owned);
        job
    };
    let account = |name: &str| ServiceAccountReference {
        namespace: "ns".to_owned(),
        name: name.to_owned(),
    };
    let (a, b, none) = (job_of(0, Some("a")), job_of(1, Some("b")), job_of(2, None));
    let first = add_requests(None, &[], "1", &[request(&a)], options(0)).unwrap();
    assert_eq!(first.service_accounts, [account("a")]);
    assert_eq!(
        add_requests(Some(&first), &[], "1", &[request(&a)], options(0)),
        None
    );
    // A pull that has begun without the account is begun again.
    let joined = add_requests(Some(&first), &[status(0, false)], "1", &[request(&b)], options(0)).unwrap();
    assert_eq!(joined.service_accounts, [account("a"), account("b")]);
    assert_eq!(joined.tags[0].version, 1);
    let joined = add_requests(
        Some(&first),
        &[status(0, false)],
        "1",
        &[request(&none)],
        options(0),
    )
    .unwrap();
    assert_eq!(
        (joined.service_accounts.as_slice(), joined.tags[0].version),
        (&[account("a")][..], 0)
    );
    // Those of jobs that have gone are removed, and one beyond the limit of its namespace is not added.
    let needed = BTreeSet::from([account("b")]);
    let with = |job| JobRequest {
        needed_accounts: Some(&needed),
        ..request(job)
    };
    let replaced = add_requests(Some(&first), &[], "1", &[with(&b)], options(0)).unwrap();
    assert_eq!(replaced.service_accounts, [account("b")]);
    let limited = add_requests(None, &[], "1", &[with(&a)], options(0)).unwrap();
    assert!(limited.service_accounts.is_empty());
    // No pull needs them any more.
    let ended = BTreeSet::from(["uid0".to_owned()]);
    let later = JobRequest {
        ended_jobs: &ended,
        ..request(&none)
    };
    let later = add_requests(Some(&first), &[status(0, true)], "1", &[later], options(0)).unwrap();
    assert!(later.service_accounts.is_empty());
}
