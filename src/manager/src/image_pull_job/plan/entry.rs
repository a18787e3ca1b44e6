//! What a job requests of one node: the entry of its image in the NodeImage.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::job::PullJob;
use crate::repull::{SCHEDULE_JITTER, jitter, repull_interval};
use kruise_api::image_pull_job::ImagePullPolicy;
use kruise_api::keys;
use kruise_api::node_image::{
    DEFAULT_BACKOFF_LIMIT, DEFAULT_TIMEOUT_SECONDS, ImageSpec, ImageTagPullPolicy, ImageTagSpec,
    ImageTagStatus, ReferenceObject, SandboxConfig, ServiceAccountReference,
};

/// Kind of the owners that are jobs.
const JOB_KIND: &str = "ImagePullJob";
/// Maximum TTL of a finished tag, in seconds: 31 days.
const MAX_TTL: i64 = 31 * 24 * 3600;
/// The same for a job with a schedule: the library looks four years ahead.
const MAX_SCHEDULED_TTL: i64 = 4 * 366 * 24 * 3600;
/// Minimum deadline of a tag of a job with completion policy `Never`, in seconds.
const MIN_NEVER_DEADLINE: i64 = 1800;
/// Maximum jitter of a tag's TTL, in seconds.
const TTL_JITTER: i64 = 300;

/// One job that requests its image on a node.
#[derive(Clone, Copy, Debug)]
pub struct JobRequest<'a> {
    /// The job; its image is that of the entry.
    pub job: &'a PullJob,
    /// The copies of its pull secrets.
    pub secrets: &'a [ReferenceObject],
    /// UIDs of finished jobs: they do not own the tag after a repeated pull.
    pub ended_jobs: &'a BTreeSet<String>,
    /// The copies that running jobs with this image need, if that is known: others are removed from the entry.
    pub needed_secrets: Option<&'a NeededSecrets>,
    /// The same for service accounts.
    pub needed_accounts: Option<&'a NeededAccounts>,
}

/// Namespaces and names of copies of pull secrets.
pub type NeededSecrets = BTreeSet<(String, String)>;

/// Service accounts of jobs.
pub type NeededAccounts = BTreeSet<ServiceAccountReference>;

/// How a copy is named in [`NeededSecrets`].
#[must_use]
pub fn secret_key(secret: &ReferenceObject) -> (String, String) {
    (secret.namespace.clone(), secret.name.clone())
}

/// What the entry depends on in addition to the job.
#[derive(Clone, Copy, Debug)]
pub struct EntryOptions {
    /// Minimum seconds that a finished tag stays listed (`--default-ttlseconds-for-always-nodeimage`).
    pub default_ttl: i64,
    /// A number that differs between nodes, for jitter.
    pub seed: u64,
    /// The API server's time.
    pub now: Timestamp,
}

/// The version of the pull that a job has to wait for, if any: the job has policy `Always`, and a job of another
/// namespace requested the pull before this job existed. A pull without end is waited for as long as one of the job's own
/// may take; then the job joins it, with its credentials.
fn awaited_pull(
    current: &ImageSpec,
    statuses: &[ImageTagStatus],
    tag: &str,
    request: JobRequest<'_>,
    now: Timestamp,
) -> Option<i64> {
    let entry = current
        .tags
        .iter()
        .find(|t| t.tag == tag && has_creation_time(t))?;
    let status = statuses.iter().find(|s| s.tag == tag);
    let shared = is_used_by_others(entry, request) && !pull_ended(entry, status);
    let requested_at = entry.created_at.as_ref().map(|at| at.0);
    let is_patient = requested_at
        .max(request.job.created)
        .is_none_or(|since| now.duration_since(since) < budget(request.job));
    let waits = !is_owned_by(entry, &request.job.uid)
        && shared
        && is_patient
        && needs_fresh_pull(entry, status, request.job);
    waits.then_some(entry.version)
}

/// The time that all attempts of a pull of this job can take, without the pauses between them.
fn budget(job: &PullJob) -> SignedDuration {
    let policy = job.spec.pull_policy.clone().unwrap_or_default();
    let timeout = i64::from(policy.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS)).max(1);
    let attempts = i64::from(policy.backoff_limit.unwrap_or(DEFAULT_BACKOFF_LIMIT)).max(0) + 1;
    SignedDuration::from_secs(timeout.saturating_mul(attempts))
}

/// Adds the request of a job to the entry of its image; if it has to wait for another pull, returns that one's version
/// instead.
///
/// `statuses` are the states of the image's tags, for any version.
pub fn add_request(
    spec: &mut ImageSpec,
    statuses: &[ImageTagStatus],
    tag: &str,
    request: JobRequest<'_>,
    options: EntryOptions,
) -> Option<i64> {
    let awaited = awaited_pull(spec, statuses, tag, request, options.now);
    if awaited.is_some() {
        return awaited;
    }
    let status = statuses.iter().find(|s| s.tag == tag);
    let position = spec.tags.iter().position(|t| t.tag == tag);
    let entry = position.and_then(|at| spec.tags.get(at));
    let already_owned = entry.is_some_and(|t| is_owned_by(t, &request.job.uid));
    let used_by_others = entry.is_some_and(|t| is_used_by_others(t, request));
    let shared = used_by_others && entry.is_some_and(|t| has_creation_time(t) && !pull_ended(t, status));
    let is_over = |t: &ImageTagSpec| tag_pull_ended(t, statuses) && live_owners(t, request).next().is_none();
    let is_copy = |secret: &ReferenceObject| secret.mode.as_deref() == Some(keys::MODE_BATCH);
    let has_credentials = !spec.service_accounts.is_empty() || spec.pull_secrets.iter().any(is_copy);
    if !already_owned && has_credentials && spec.tags.iter().all(is_over) {
        // No pull needs the credentials of earlier jobs any more; their copies may be deleted.
        spec.pull_secrets.retain(|secret| !is_copy(secret));
        spec.service_accounts.clear();
    }
    if let Some(needed) = request.needed_secrets {
        // Also while other jobs pull the image. Their daemons would ask for the copies of all earlier jobs first.
        spec.pull_secrets
            .retain(|secret| !is_copy(secret) || needed.contains(&secret_key(secret)));
    }
    let account_added = sync_accounts(spec, request);
    let credentials_added = add_secrets(spec, request) || account_added;
    if already_owned {
        let entry = position.and_then(|at| spec.tags.get_mut(at));
        if let Some(entry) = entry.filter(|entry| has_creation_time(entry) && !pull_ended(entry, status)) {
            edit_pull(entry, request, options);
        }
        return None;
    }
    match position.and_then(|at| spec.tags.get_mut(at)) {
        None => {
            let version = status.map_or(0, |s| s.version.saturating_add(1));
            spec.tags.push(new_entry(tag, version, request.job, options));
            spec.tags.sort_by(|a, b| a.tag.cmp(&b.tag));
        }
        Some(entry) => {
            let previous = entry.pull_policy.clone();
            let serves_others = !pull_ended(entry, status) && live_owners(entry, request).next().is_some();
            if shared {
                join_pull(entry, request.job, options);
            } else if credentials_added || !satisfies(entry, status, request.job) {
                request_repull(entry, request.job, options);
                entry.owner_references.retain(|owner| !has_ended(owner, request));
            } else {
                entry.pull_policy = Some(pull_policy(request.job, options));
            }
            if used_by_others || serves_others {
                widen_limits(entry, previous.unwrap_or_default());
            }
            entry.owner_references.push(owner_reference(request.job));
        }
    }
    set_sandbox_config(spec, request);
    None
}

/// Whether a request may join the tag: one without a creation time, because it is missing or cannot be read, is about
/// to be removed, and a request adds it again.
fn has_creation_time(entry: &ImageTagSpec) -> bool {
    entry.created_at.is_some()
}

/// Whether the owner is a job that has ended.
fn has_ended(owner: &ObjectReference, request: JobRequest<'_>) -> bool {
    let uid = owner.uid.as_ref();
    uid.is_some_and(|uid| request.ended_jobs.contains(uid))
}

/// The owners of a tag that are neither this request's job nor jobs that have ended.
fn live_owners<'a>(
    entry: &'a ImageTagSpec,
    request: JobRequest<'a>,
) -> impl Iterator<Item = &'a ObjectReference> {
    let is_own = move |owner: &ObjectReference| owner.uid.as_ref() == Some(&request.job.uid);
    let owners = entry.owner_references.iter();
    owners.filter(move |owner| !is_own(owner) && !has_ended(owner, request))
}

/// Whether a tag has a live owner that is no job of this request's namespace.
fn is_used_by_others(entry: &ImageTagSpec, request: JobRequest<'_>) -> bool {
    live_owners(entry, request).any(|owner| owner.namespace != request.job.key.namespace)
}

/// Whether a job with policy `Always` has to wait for the end of a pull that was requested before the job existed.
fn needs_fresh_pull(entry: &ImageTagSpec, status: Option<&ImageTagStatus>, job: &PullJob) -> bool {
    let started = status.is_some_and(|s| s.version == entry.version);
    let always = |p: &ImagePullPolicy| *p == ImagePullPolicy::Always;
    let requested_at = entry.created_at.as_ref().map(|at| at.0);
    let fresh = entry.image_pull_policy.as_ref().is_some_and(always) && requested_at >= job.created;
    always(&image_pull_policy(job)) && started && !fresh
}

/// Lets a pull that others requested serve this job too: it is not aborted.
fn join_pull(entry: &mut ImageTagSpec, job: &PullJob, options: EntryOptions) {
    if image_pull_policy(job) == ImagePullPolicy::Always {
        entry.image_pull_policy = Some(ImagePullPolicy::Always);
    }
    entry.pull_policy = Some(pull_policy(job, options));
}

/// Applies the present spec of a job to a pull that it requested before and that has not ended. The version stays: an
/// attempt that runs is not aborted.
fn edit_pull(entry: &mut ImageTagSpec, request: JobRequest<'_>, options: EntryOptions) {
    let required = image_pull_policy(request.job);
    let is_shared = live_owners(entry, request).next().is_some();
    let previous = entry.pull_policy.clone().unwrap_or_default();
    let ttl = previous.ttl_seconds_after_finished;
    let mut limits = pull_policy(request.job, options);
    limits.ttl_seconds_after_finished = ttl.or(limits.ttl_seconds_after_finished);
    entry.pull_policy = Some(limits);
    if is_shared {
        widen_limits(entry, previous);
    }
    if !is_shared || required == ImagePullPolicy::Always {
        entry.image_pull_policy = Some(required);
    }
}

/// Gives a pull that serves several jobs the larger one of each limit.
fn widen_limits(entry: &mut ImageTagSpec, previous: ImageTagPullPolicy) {
    let ImageTagPullPolicy {
        timeout_seconds,
        backoff_limit,
        ttl_seconds_after_finished,
        active_deadline_seconds,
        pin_seconds,
    } = entry.pull_policy.take().unwrap_or_default();
    let larger = |one: Option<i32>, other: Option<i32>, none: i32| {
        one.or(other)
            .map(|_| one.unwrap_or(none).max(other.unwrap_or(none)))
    };
    entry.pull_policy = Some(ImageTagPullPolicy {
        timeout_seconds: larger(timeout_seconds, previous.timeout_seconds, DEFAULT_TIMEOUT_SECONDS),
        backoff_limit: larger(backoff_limit, previous.backoff_limit, DEFAULT_BACKOFF_LIMIT),
        ttl_seconds_after_finished: ttl_seconds_after_finished.max(previous.ttl_seconds_after_finished),
        active_deadline_seconds: active_deadline_seconds
            .zip(previous.active_deadline_seconds)
            .map(|(one, other)| one.max(other)),
        pin_seconds: pin_seconds.max(previous.pin_seconds),
    });
}

/// Adds the job's missing secrets that are needed; true when there were any.
fn add_secrets(spec: &mut ImageSpec, request: JobRequest<'_>) -> bool {
    let before = spec.pull_secrets.len();
    let is_needed = |secret: &&ReferenceObject| {
        let needed = request.needed_secrets;
        needed.is_none_or(|needed| needed.contains(&secret_key(secret)))
    };
    for secret in request.secrets.iter().filter(is_needed) {
        let same = |s: &ReferenceObject| s.namespace == secret.namespace && s.name == secret.name;
        if !spec.pull_secrets.iter().any(same) {
            spec.pull_secrets.push(secret.clone());
        }
    }
    spec.pull_secrets.len() > before
}

/// Keeps the service accounts that are needed, and adds the job's own; true when that was missing.
fn sync_accounts(spec: &mut ImageSpec, request: JobRequest<'_>) -> bool {
    let is_needed = |account: &ServiceAccountReference| {
        let needed = request.needed_accounts;
        needed.is_none_or(|needed| needed.contains(account))
    };
    spec.service_accounts.retain(is_needed);
    let own = request.job.service_account().filter(is_needed);
    let missing = own.filter(|account| !spec.service_accounts.contains(account));
    let added = missing.is_some();
    spec.service_accounts.extend(missing);
    added
}

/// Whether the pull of a tag has ended.
fn tag_pull_ended(entry: &ImageTagSpec, statuses: &[ImageTagStatus]) -> bool {
    pull_ended(entry, statuses.iter().find(|s| s.tag == entry.tag))
}

/// Whether the tag's status is that of a finished pull of this version.
fn pull_ended(entry: &ImageTagSpec, status: Option<&ImageTagStatus>) -> bool {
    status.is_some_and(|s| s.version == entry.version && s.is_finished())
}

/// Whether a pull that is requested and not finished serves this job too. Upstream restarts such a pull.
fn satisfies(entry: &ImageTagSpec, status: Option<&ImageTagStatus>, job: &PullJob) -> bool {
    let policy = |p: &Option<ImagePullPolicy>| p.clone().unwrap_or(ImagePullPolicy::IfNotPresent);
    let required = policy(&job.spec.image_pull_policy);
    let started = status.is_some_and(|s| s.version == entry.version);
    let fresh = required != ImagePullPolicy::Always || !started;
    has_creation_time(entry)
        && !pull_ended(entry, status)
        && fresh
        && policy(&entry.image_pull_policy) == required
}

/// Requests a new pull of an existing tag.
fn request_repull(entry: &mut ImageTagSpec, job: &PullJob, options: EntryOptions) {
    entry.version = entry.version.saturating_add(1);
    entry.unreadable = None;
    entry.created_at = Some(Time(options.now));
    entry.image_pull_policy = Some(image_pull_policy(job));
    let mut policy = pull_policy(job, options);
    let previous = entry.pull_policy.as_ref();
    policy.ttl_seconds_after_finished = policy
        .ttl_seconds_after_finished
        .max(previous.and_then(|p| p.ttl_seconds_after_finished));
    entry.pull_policy = Some(policy);
}

fn new_entry(tag: &str, version: i64, job: &PullJob, options: EntryOptions) -> ImageTagSpec {
    ImageTagSpec {
        tag: tag.to_owned(),
        created_at: Some(Time(options.now)),
        pull_policy: Some(pull_policy(job, options)),
        owner_references: vec![owner_reference(job)],
        version,
        image_pull_policy: Some(image_pull_policy(job)),
        unreadable: None,
    }
}

/// The configuration is that of the latest job, as in OpenKruise, and is for all tags of the image. If another namespace
/// still pulls the image, there is none from then on: a runtime may fail because of it.
fn set_sandbox_config(spec: &mut ImageSpec, request: JobRequest<'_>) {
    let is_shared = spec.tags.iter().any(|tag| is_used_by_others(tag, request));
    let own = request.job.spec.sandbox_config.as_ref().filter(|_| !is_shared);
    // The job may have been stored through a different webhook.
    spec.sandbox_config = own.map(SandboxConfig::within_schema_limits);
}

fn image_pull_policy(job: &PullJob) -> ImagePullPolicy {
    job.spec
        .image_pull_policy
        .clone()
        .unwrap_or(ImagePullPolicy::IfNotPresent)
}

/// Whether the job with that UID owns the tag.
#[must_use]
pub fn is_owned_by(entry: &ImageTagSpec, uid: &str) -> bool {
    entry
        .owner_references
        .iter()
        .any(|o| o.uid.as_deref() == Some(uid))
}

/// The namespaces of the jobs that own tags of an image.
#[must_use]
pub fn owner_namespaces(spec: &ImageSpec) -> BTreeSet<String> {
    let owners = spec.tags.iter().flat_map(|tag| &tag.owner_references);
    let jobs = owners.filter(|owner| owner.kind.as_deref() == Some(JOB_KIND));
    // A thousand owners may have one namespace.
    let names = jobs.filter_map(|owner| owner.namespace.as_deref());
    let distinct: BTreeSet<&str> = names.collect();
    distinct.into_iter().map(str::to_owned).collect()
}

/// The owner reference of a job, in upstream's format.
#[must_use]
pub fn owner_reference(job: &PullJob) -> ObjectReference {
    ObjectReference {
        api_version: Some(format!("{}/{}", kruise_api::GROUP, kruise_api::V1BETA1)),
        kind: Some(JOB_KIND.to_owned()),
        namespace: job.key.namespace.clone(),
        name: Some(job.key.name.clone()),
        uid: Some(job.uid.clone()),
        ..ObjectReference::default()
    }
}

/// The limits of one node's pull.
fn pull_policy(job: &PullJob, options: EntryOptions) -> ImageTagPullPolicy {
    let policy = job.spec.pull_policy.clone().unwrap_or_default();
    let timeout = i64::from(policy.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS));
    let completion = &job.spec.completion_policy;
    let (ttl, deadline) = if job.never_ends() {
        let ttl = if let Ok(Some(schedule)) = &job.schedule {
            let next = schedule.next_after(options.now);
            let seconds = next.map_or(MAX_TTL, |next| next.duration_since(options.now).as_secs() + 1);
            seconds.min(MAX_SCHEDULED_TTL) + jitter(options.seed, SCHEDULE_JITTER + 1)
        } else {
            repull_interval(options.seed)
        };
        (ttl, Some(timeout.max(MIN_NEVER_DEADLINE)))
    } else {
        let own_ttl = completion
            .ttl_seconds_after_finished
            .map(i64::from)
            .or(completion.active_deadline_seconds)
            .unwrap_or_else(|| {
                let attempts =
                    i64::from(policy.backoff_limit.unwrap_or(DEFAULT_BACKOFF_LIMIT)).saturating_add(1);
                timeout.saturating_mul(attempts)
            });
        let min_ttl = own_ttl.max(0).saturating_add(options.default_ttl);
        let ttl = min_ttl.saturating_add(jitter(options.seed, TTL_JITTER + 1));
        (ttl.min(MAX_TTL), completion.active_deadline_seconds)
    };
    ImageTagPullPolicy {
        timeout_seconds: policy.timeout_seconds,
        backoff_limit: policy.backoff_limit,
        ttl_seconds_after_finished: i32::try_from(ttl).ok(),
        active_deadline_seconds: deadline,
        pin_seconds: policy.pin_seconds,
    }
}

#[cfg(test)]
mod tests;
