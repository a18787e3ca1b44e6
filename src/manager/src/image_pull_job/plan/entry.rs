//! What a job asks of one node: the entry of its image in the NodeImage.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::job::Job;
use kruise_api::image_pull_job::ImagePullPolicy;
use kruise_api::keys;
use kruise_api::node_image::{ImageSpec, ImageTagPullPolicy, ImageTagSpec, ImageTagStatus, ReferenceObject};

/// Kind of the owners that are jobs.
const JOB: &str = "ImagePullJob";
/// The longest lifetime of a tag after its end, in seconds: 31 days.
const LONGEST_TTL: i64 = 31 * 24 * 3600;
/// Seconds after which a job without end pulls again.
const DAY: i64 = 24 * 3600;
/// How far that may be off, in seconds, so that nodes do not all come at once.
const DAY_SPREAD: i64 = 600;
/// Seconds that a tag of a job without end may take at least.
const NEVER_DEADLINE: i64 = 1800;
/// Seconds of one attempt, and repetitions, where a tag says nothing.
const TIMEOUT: i32 = 600;
const BACKOFF_LIMIT: i32 = 3;
/// By how much lifetimes of tags are spread, in seconds.
const TTL_SPREAD: i64 = 300;

/// One job that wants its image on a node.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The job; its image is the one that the entry is for.
    pub job: &'a Job,
    /// The copies of its pull secrets.
    pub secrets: &'a [ReferenceObject],
    /// UIDs of jobs that are over: what is pulled once more is not pulled for them.
    pub ended: &'a BTreeSet<String>,
}

/// What the numbers depend on besides the job.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Seconds that a finished tag stays listed at least (`--default-ttlseconds-for-always-nodeimage`).
    pub default_ttl: i64,
    /// A number that differs between nodes, for spreading.
    pub seed: u64,
    /// The API server's time.
    pub now: Timestamp,
}

/// The entry with what the jobs ask for added to `current`; `None` when it is all there already, or [`awaits`] something.
///
/// `statuses` are the states of the image's tags, whatever their versions.
#[must_use]
pub fn add(
    current: Option<&ImageSpec>,
    statuses: &[ImageTagStatus],
    tag: &str,
    asks: &[Ask<'_>],
    setting: Setting,
) -> Option<ImageSpec> {
    let mut spec = current.cloned().unwrap_or_default();
    for ask in asks {
        add_one(&mut spec, statuses, tag, *ask, setting);
    }
    (current != Some(&spec)).then_some(spec)
}

/// The version of the pull whose end a job has to wait for, where it has to: it wants its image fresh, and the pull was
/// asked for by another namespace's job before there was this one.
#[must_use]
pub fn awaits(
    current: Option<&ImageSpec>,
    statuses: &[ImageTagStatus],
    tag: &str,
    ask: Ask<'_>,
) -> Option<i64> {
    let entry = current?.tags.iter().find(|t| t.tag == tag && stays(t))?;
    let status = statuses.iter().find(|s| s.tag == tag);
    let shared = serves_others(entry, ask) && !ended(entry, status);
    let waits = !owned(entry, &ask.job.uid) && shared && must_wait(entry, status, ask.job);
    waits.then_some(entry.version)
}

fn add_one(spec: &mut ImageSpec, statuses: &[ImageTagStatus], tag: &str, ask: Ask<'_>, setting: Setting) {
    let status = statuses.iter().find(|s| s.tag == tag);
    let at = spec.tags.iter().position(|t| t.tag == tag);
    let entry = at.and_then(|at| spec.tags.get(at));
    let mine = entry.is_some_and(|t| owned(t, &ask.job.uid));
    let others = entry.is_some_and(|t| serves_others(t, ask));
    let shared = others && entry.is_some_and(|t| stays(t) && !ended(t, status));
    if awaits(Some(spec), statuses, tag, ask).is_some() {
        return;
    }
    if !mine && spec.tags.iter().all(|t| over(t, statuses)) {
        // Nothing needs the credentials of earlier jobs any more; their copies may have gone.
        spec.pull_secrets
            .retain(|s| s.mode.as_deref() != Some(keys::MODE_BATCH));
    }
    let more = add_secrets(spec, ask.secrets);
    if mine {
        return;
    }
    match at.and_then(|at| spec.tags.get_mut(at)) {
        None => {
            let version = status.map_or(0, |s| s.version.saturating_add(1));
            spec.tags.push(new_entry(tag, version, ask.job, setting));
            spec.tags.sort_by(|a, b| a.tag.cmp(&b.tag));
        }
        Some(entry) => {
            let before = entry.pull_policy.clone();
            if shared {
                join(entry, ask.job, setting);
            } else if more || !serves(entry, status, ask.job) {
                again(entry, ask.job, setting);
                let ended =
                    |owner: &ObjectReference| owner.uid.as_ref().is_some_and(|uid| ask.ended.contains(uid));
                entry.owner_references.retain(|owner| !ended(owner));
            }
            if others {
                widen(entry, before.unwrap_or_default());
            }
            entry.owner_references.push(owner(ask.job));
        }
    }
    sandbox(spec, ask.job);
}

/// Whether a tag is one to join: one without a time at which it was asked for, because there is none or it cannot be read, is
/// about to be removed. Whoever needs it asks anew.
fn stays(entry: &ImageTagSpec) -> bool {
    entry.created_at.is_some()
}

/// Whether a tag is there for anybody but jobs of this one's namespace and jobs that are over.
fn serves_others(entry: &ImageTagSpec, ask: Ask<'_>) -> bool {
    let over = |owner: &ObjectReference| owner.uid.as_ref().is_some_and(|uid| ask.ended.contains(uid));
    let mut live = entry.owner_references.iter().filter(|owner| !over(owner));
    live.any(|owner| owner.namespace != ask.job.key.namespace)
}

/// Whether a job that wants its image fresh has to wait for the end of a pull that was asked for before there was the job.
fn must_wait(entry: &ImageTagSpec, status: Option<&ImageTagStatus>, job: &Job) -> bool {
    let begun = status.is_some_and(|s| s.version == entry.version);
    let always = |p: &ImagePullPolicy| *p == ImagePullPolicy::Always;
    let asked = entry.created_at.as_ref().map(|at| at.0);
    let fresh = entry.image_pull_policy.as_ref().is_some_and(always) && asked >= job.created;
    always(&image_pull_policy(job)) && begun && !fresh
}

/// Has a pull that is asked for by others too serve this job: it is not broken off.
fn join(entry: &mut ImageTagSpec, job: &Job, setting: Setting) {
    if image_pull_policy(job) == ImagePullPolicy::Always {
        entry.image_pull_policy = Some(ImagePullPolicy::Always);
    }
    entry.pull_policy = Some(pull_policy(job, setting));
}

/// Gives a tag that jobs of several namespaces want the most generous limits of both.
fn widen(entry: &mut ImageTagSpec, before: ImageTagPullPolicy) {
    let ImageTagPullPolicy {
        timeout_seconds,
        backoff_limit,
        ttl_seconds_after_finished,
        active_deadline_seconds,
    } = entry.pull_policy.take().unwrap_or_default();
    let more = |one: Option<i32>, other: Option<i32>, none: i32| {
        one.or(other)
            .map(|_| one.unwrap_or(none).max(other.unwrap_or(none)))
    };
    entry.pull_policy = Some(ImageTagPullPolicy {
        timeout_seconds: more(timeout_seconds, before.timeout_seconds, TIMEOUT),
        backoff_limit: more(backoff_limit, before.backoff_limit, BACKOFF_LIMIT),
        ttl_seconds_after_finished: ttl_seconds_after_finished.max(before.ttl_seconds_after_finished),
        active_deadline_seconds: active_deadline_seconds
            .zip(before.active_deadline_seconds)
            .map(|(one, other)| one.max(other)),
    });
}

/// Adds what is missing; true when anything was.
fn add_secrets(spec: &mut ImageSpec, secrets: &[ReferenceObject]) -> bool {
    let before = spec.pull_secrets.len();
    for secret in secrets {
        let same = |s: &ReferenceObject| s.namespace == secret.namespace && s.name == secret.name;
        if !spec.pull_secrets.iter().any(same) {
            spec.pull_secrets.push(secret.clone());
        }
    }
    spec.pull_secrets.len() > before
}

/// Whether the pull of a tag has ended.
fn over(entry: &ImageTagSpec, statuses: &[ImageTagStatus]) -> bool {
    ended(entry, statuses.iter().find(|s| s.tag == entry.tag))
}

/// Whether the tag's status is that of a pull of this version that has ended.
fn ended(entry: &ImageTagSpec, status: Option<&ImageTagStatus>) -> bool {
    status.is_some_and(|s| s.version == entry.version && s.ended())
}

/// Whether a pull that is asked for, and not over, does for this job too. Upstream starts such a pull anew.
fn serves(entry: &ImageTagSpec, status: Option<&ImageTagStatus>, job: &Job) -> bool {
    let policy = |p: &Option<ImagePullPolicy>| p.clone().unwrap_or(ImagePullPolicy::IfNotPresent);
    let wanted = policy(&job.spec.image_pull_policy);
    let begun = status.is_some_and(|s| s.version == entry.version);
    let fresh = wanted != ImagePullPolicy::Always || !begun;
    stays(entry) && !ended(entry, status) && fresh && policy(&entry.image_pull_policy) == wanted
}

/// Asks for another pull of a tag that somebody wanted before.
fn again(entry: &mut ImageTagSpec, job: &Job, setting: Setting) {
    entry.version = entry.version.saturating_add(1);
    entry.unreadable = None;
    entry.created_at = Some(Time(setting.now));
    entry.image_pull_policy = Some(image_pull_policy(job));
    let mut policy = pull_policy(job, setting);
    let before = entry.pull_policy.as_ref();
    policy.ttl_seconds_after_finished = policy
        .ttl_seconds_after_finished
        .max(before.and_then(|p| p.ttl_seconds_after_finished));
    entry.pull_policy = Some(policy);
}

fn new_entry(tag: &str, version: i64, job: &Job, setting: Setting) -> ImageTagSpec {
    ImageTagSpec {
        tag: tag.to_owned(),
        created_at: Some(Time(setting.now)),
        pull_policy: Some(pull_policy(job, setting)),
        owner_references: vec![owner(job)],
        version,
        image_pull_policy: Some(image_pull_policy(job)),
        unreadable: None,
    }
}

fn sandbox(spec: &mut ImageSpec, job: &Job) {
    if let Some(sandbox) = &job.spec.sandbox_config {
        // A job may have been stored by another webhook than ours.
        spec.sandbox_config = Some(sandbox.fitting());
    }
}

fn image_pull_policy(job: &Job) -> ImagePullPolicy {
    job.spec
        .image_pull_policy
        .clone()
        .unwrap_or(ImagePullPolicy::IfNotPresent)
}

/// Whether the tag is there on behalf of the job with that UID.
#[must_use]
pub fn owned(entry: &ImageTagSpec, uid: &str) -> bool {
    entry
        .owner_references
        .iter()
        .any(|o| o.uid.as_deref() == Some(uid))
}

/// The namespaces of the jobs that an image is there for.
#[must_use]
pub fn namespaces(spec: &ImageSpec) -> BTreeSet<String> {
    let owners = spec.tags.iter().flat_map(|tag| &tag.owner_references);
    let jobs = owners.filter(|owner| owner.kind.as_deref() == Some(JOB));
    jobs.filter_map(|owner| owner.namespace.clone()).collect()
}

/// The reference to a job, as upstream writes it into a tag.
#[must_use]
pub fn owner(job: &Job) -> ObjectReference {
    ObjectReference {
        api_version: Some(format!("{}/{}", kruise_api::GROUP, kruise_api::V1BETA1)),
        kind: Some(JOB.to_owned()),
        namespace: job.key.namespace.clone(),
        name: Some(job.key.name.clone()),
        uid: Some(job.uid.clone()),
        ..ObjectReference::default()
    }
}

/// The limits of one node's pull.
fn pull_policy(job: &Job, setting: Setting) -> ImageTagPullPolicy {
    let asked = job.spec.pull_policy.clone().unwrap_or_default();
    let timeout = i64::from(asked.timeout_seconds.unwrap_or(TIMEOUT));
    let completion = &job.spec.completion_policy;
    let (ttl, deadline) = if job.never_ends() {
        let off = spread(setting.seed, 2 * DAY_SPREAD + 1) - DAY_SPREAD;
        (DAY + off, Some(timeout.max(NEVER_DEADLINE)))
    } else {
        let own = completion
            .ttl_seconds_after_finished
            .map(i64::from)
            .or(completion.active_deadline_seconds)
            .unwrap_or_else(|| {
                let tries = i64::from(asked.backoff_limit.unwrap_or(BACKOFF_LIMIT)).saturating_add(1);
                timeout.saturating_mul(tries)
            });
        let kept = own.max(0).saturating_add(setting.default_ttl);
        let ttl = kept.saturating_add(spread(setting.seed, TTL_SPREAD + 1));
        (ttl, completion.active_deadline_seconds)
    };
    ImageTagPullPolicy {
        timeout_seconds: asked.timeout_seconds,
        backoff_limit: asked.backoff_limit,
        ttl_seconds_after_finished: i32::try_from(ttl.min(LONGEST_TTL)).ok(),
        active_deadline_seconds: deadline,
    }
}

/// A number in `0..below` that looks random.
fn spread(seed: u64, below: i64) -> i64 {
    let below = u64::try_from(below).unwrap_or(1).max(1);
    // SplitMix64: neighbouring seeds give unrelated numbers.
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    i64::try_from((z ^ (z >> 31)) % below).unwrap_or(0)
}

#[cfg(test)]
mod tests;
