//! One reconcile of an ImageListPullJob: which ImagePullJobs it lacks, which ones it has too many, its status, its end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use kruise_api::container_hash::deep_hash;
use kruise_api::image_list_pull_job::{FailedImageStatus, ImageListPullJob, ImageListPullJobStatus};
use kruise_api::image_pull_job::{COMPLETE, FAILED, ImagePullJob, WAITING};
use kruise_api::keys;
use kruise_api::names::MAX_SUBDOMAIN_LENGTH;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_api::time::add_seconds;
use kruise_api::validation::truncate;
use kruise_workload::job_conditions::merge_conditions;
use kruise_workload::names::join_first;

/// Maximum number of images in a message.
const MAX_NAMES_IN_MESSAGE: usize = 10;
/// Maximum characters of the reason why an ImagePullJob cannot be created.
const MAX_REASON_CHARS: usize = 300;
/// Most creations, and most deletions, of one reconcile: a list has 255 images, and others wait for the worker.
pub const MAX_WRITES: usize = 16;
/// Most bytes of all ImagePullJobs of one list. All of them have the list's node names, and the manager keeps them in
/// memory: 10,000 names for 100 images.
const MAX_JOBS_BYTES: usize = 32 << 20;

/// A job and its ImagePullJobs.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The job.
    pub list: Arc<ImageListPullJob>,
    /// The ImagePullJobs that it controls, by name.
    pub jobs: Vec<Arc<ImagePullJob>>,
    /// Names of those that are being deleted.
    pub terminating: BTreeSet<String>,
}

/// What to do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The desired status; `None` if it stays.
    pub status: Option<ImageListPullJobStatus>,
    /// ImagePullJobs to create; at most `MAX_WRITES`.
    pub create: Vec<ImagePullJob>,
    /// Images whose ImagePullJobs the next reconciles create.
    pub create_later: Vec<String>,
    /// ImagePullJobs to delete, by name and UID: their image was removed, or the job was changed.
    pub delete: Vec<(String, String)>,
    /// Whether the TTL has passed, so that the job is deleted.
    pub expired: bool,
    /// When to reconcile again, if nothing changes before.
    pub requeue_at: Option<Timestamp>,
}

/// An ImageListPullJob, as the owner of others.
pub fn owner(list: &ImageListPullJob) -> Owner {
    Owner {
        kind: OwnerKind::ImageListPullJob,
        name: list.metadata.name.clone().unwrap_or_default(),
        uid: list.metadata.uid.clone().unwrap_or_default(),
    }
}

/// Plans one reconcile. `refused` is why ImagePullJobs could not be created a moment ago, by image; they are not
/// planned again.
///
/// A job that has ended, or is being deleted, creates nothing more, whatever changes.
#[must_use]
pub fn plan(observed: &Observed, refused: &BTreeMap<String, String>, now: Timestamp) -> Plan {
    let list = &*observed.list;
    if list.metadata.deletion_timestamp.is_some() {
        return Plan::default();
    }
    let previous = list.status.clone().unwrap_or_default();
    if previous.completion_time.is_some() {
        let expiry = expiry(list, &previous);
        return Plan {
            expired: expiry.is_some_and(|at| now >= at),
            requeue_at: expiry.filter(|at| now < *at),
            ..Plan::default()
        };
    }
    let images: BTreeSet<&str> = list.spec.images.iter().map(String::as_str).collect();
    let template = JobTemplate::new(list);
    let (current, surplus) = assign(&template, &images, &observed.jobs);
    let missing = images.iter().filter(|image| !current.contains_key(**image));
    let missing: Vec<&str> = missing.copied().collect();
    let too_large = template.too_large(images.len());
    let refusal = |image: &str| too_large.as_ref().or_else(|| refused.get(image));
    let refused: BTreeMap<&str, &str> = missing
        .iter()
        .filter_map(|image| Some((*image, refusal(image)?.as_str())))
        .collect();
    let status = status(list, &previous, &images, &current, &refused, now);
    let (create, create_later) = missing_jobs(&template, observed, &missing, &refused, &current);
    Plan {
        status: (status != previous).then_some(status),
        requeue_at: (!create_later.is_empty()).then_some(now),
        create,
        create_later,
        delete: surplus,
        ..Plan::default()
    }
}

/// When a job that has ended is deleted.
fn expiry(list: &ImageListPullJob, status: &ImageListPullJobStatus) -> Option<Timestamp> {
    let ttl = list.spec.completion_policy.ttl()?;
    let completed = status.completion_time.as_ref()?.0;
    Some(add_seconds(completed, ttl))
}

/// The ImagePullJob of each image, and the ones that are too many: of removed images, of an earlier spec, and the newer
/// of two.
///
/// The spec decides, not a label with its hash: OpenKruise's hash changes with its version. If something changes the
/// spec of ImagePullJobs when they are created, the name shows what they were created for.
fn assign<'a>(
    template: &JobTemplate<'_>,
    images: &BTreeSet<&'a str>,
    jobs: &'a [Arc<ImagePullJob>],
) -> (BTreeMap<&'a str, &'a ImagePullJob>, Vec<(String, String)>) {
    let mut jobs: Vec<&ImagePullJob> = jobs.iter().map(|job| &**job).collect();
    jobs.sort_by_key(|job| job.metadata.creation_timestamp.clone());
    let (mut current, mut surplus) = (BTreeMap::new(), Vec::new());
    // It may name thousands of nodes: copied once, not for each image.
    let mut spec = template.list.spec.job_spec("").with_defaults();
    for job in jobs {
        let image = job.spec.image.as_str();
        let mut wanted = || {
            image.clone_into(&mut spec.image);
            job.spec == spec
                || job.spec.clone().with_defaults() == spec
                || job.metadata.name.as_deref() == Some(&template.name(image, 0))
        };
        if images.contains(image) && !current.contains_key(image) && wanted() {
            current.insert(image, job);
        } else {
            let (name, uid) = (job.metadata.name.clone(), job.metadata.uid.clone());
            surplus.push((name.unwrap_or_default(), uid.unwrap_or_default()));
        }
    }
    (current, surplus)
}

/// The ImagePullJobs to create now, and the images of those that are created later. One whose name is still taken by a
/// deleted one waits for its end.
fn missing_jobs(
    template: &JobTemplate<'_>,
    observed: &Observed,
    missing: &[&str],
    refused: &BTreeMap<&str, &str>,
    current: &BTreeMap<&str, &ImagePullJob>,
) -> (Vec<ImagePullJob>, Vec<String>) {
    // OpenKruise's hash of the present spec; with it, OpenKruise takes a job for its own.
    let labels = current.values().filter_map(|job| job.metadata.labels.as_ref());
    let mut hashes = labels.filter_map(|labels| labels.get_key_value(keys::CONTROLLER_REVISION_HASH));
    let hash = hashes
        .next()
        .map(|(key, hash)| BTreeMap::from([(key.clone(), hash.clone())]));
    let existing = observed.jobs.iter();
    let mut taken: BTreeSet<String> = existing.filter_map(|job| job.metadata.name.clone()).collect();
    let (mut create, mut later) = (Vec::new(), Vec::new());
    for image in missing.iter().filter(|image| !refused.contains_key(**image)) {
        let name = template.free_name(image, &taken);
        taken.insert(name.clone());
        if observed.terminating.contains(&name) {
            continue;
        }
        if create.len() == MAX_WRITES {
            later.push((*image).to_owned());
            continue;
        }
        let mut job = template.build(image, &name);
        job.metadata.labels.clone_from(&hash);
        create.push(job);
    }
    (create, later)
}

/// What the ImagePullJobs of a list have in common.
struct JobTemplate<'a> {
    list: &'a ImageListPullJob,
    owner: Owner,
    /// Hash and length of a spec without its image: computed once, because it may name thousands of nodes.
    spec_hash: u64,
    spec_bytes: usize,
}

impl<'a> JobTemplate<'a> {
    fn new(list: &'a ImageListPullJob) -> Self {
        let content = serde_json::to_string(&list.spec.job_spec("")).unwrap_or_default();
        Self {
            list,
            owner: owner(list),
            spec_hash: deep_hash(&content),
            spec_bytes: content.len(),
        }
    }

    /// Why the ImagePullJobs of so many images are not created.
    fn too_large(&self, images: usize) -> Option<String> {
        let bytes = self.spec_bytes.saturating_mul(images);
        (bytes > MAX_JOBS_BYTES).then(|| {
            format!(
                "the spec has {} KiB, for each of {images} images, and {} MiB are allowed in total; select nodes by \
                 labels, or use several jobs",
                self.spec_bytes >> 10,
                MAX_JOBS_BYTES >> 20
            )
        })
    }

    /// The name of an image's ImagePullJob. It depends on the image and the spec, so that none is created twice, and one
    /// of another spec need not be gone before.
    fn name(&self, image: &str, attempt: usize) -> String {
        let content = format!("{}/{attempt}/{:08x}/{image}", self.owner.uid, self.spec_hash);
        let hash = format!("-{:08x}", deep_hash(&content));
        let prefix = self.owner.name.chars().take(MAX_SUBDOMAIN_LENGTH - hash.len());
        let prefix: String = prefix.collect();
        format!("{}{hash}", prefix.trim_end_matches(['-', '.']))
    }

    /// A name that is not taken: two images may have the same hash, but not all of these.
    fn free_name(&self, image: &str, taken: &BTreeSet<String>) -> String {
        let mut names = (0..=taken.len()).map(|attempt| self.name(image, attempt));
        names.find(|name| !taken.contains(name)).unwrap_or_default()
    }

    fn build(&self, image: &str, name: &str) -> ImagePullJob {
        let mut job = ImagePullJob::new(name, self.list.spec.job_spec(image));
        job.metadata.namespace.clone_from(&self.list.metadata.namespace);
        let reference = serde_json::from_value(self.owner.controller_reference()).ok();
        job.metadata.owner_references = reference.map(|reference| vec![reference]);
        job
    }
}

/// How far one ImagePullJob is.
struct Progress {
    active: bool,
    completed: bool,
    /// Completed, with the image on all nodes.
    succeeded: bool,
    /// Failed on some node, or in whole.
    failed: bool,
}

impl Progress {
    fn of(job: &ImagePullJob) -> Self {
        let status = job.status.clone().unwrap_or_default();
        // One that never ends is complete while no node is left, as in OpenKruise.
        let never = job.spec.completion_policy.never_ends();
        let answered = status.desired == status.succeeded.saturating_add(status.failed);
        let completed = status.completion_time.is_some() || (never && status.desired > 0 && answered);
        let is_failed = |condition: &Condition| condition.type_ == FAILED && condition.status == "True";
        let failed = status.failed > 0 || status.conditions.iter().any(is_failed);
        Self {
            active: status.active > 0,
            completed,
            succeeded: completed && !failed && status.desired == status.succeeded,
            failed,
        }
    }
}

/// The status of a job that has not ended. It depends only on the ImagePullJobs of the present spec.
fn status(
    list: &ImageListPullJob,
    previous: &ImageListPullJobStatus,
    images: &BTreeSet<&str>,
    current: &BTreeMap<&str, &ImagePullJob>,
    refused: &BTreeMap<&str, &str>,
    now: Timestamp,
) -> ImageListPullJobStatus {
    let progress: BTreeMap<&str, Progress> = current
        .iter()
        .map(|(image, job)| (*image, Progress::of(job)))
        .collect();
    let count = |counts: fn(&Progress) -> bool| to_count(progress.values().filter(|p| counts(p)).count());
    let failed = progress.iter().filter(|(_, progress)| progress.failed);
    let failed: Vec<&str> = failed.map(|(image, _)| *image).collect();
    let failed_image_statuses = failed.iter().filter_map(|image| {
        let job = current.get(image)?.metadata.name.clone().unwrap_or_default();
        Some(FailedImageStatus {
            // OpenKruise's words.
            message: format!(
                "Please check for details which nodes failed by 'kubectl get ImagePullJob {job}'."
            ),
            name: (*image).to_owned(),
            image_pull_job: job,
        })
    });
    let (desired, completed) = (to_count(images.len()), count(|p| p.completed));
    let ended = !list.spec.completion_policy.never_ends() && desired > 0 && completed == desired;
    let condition = match (ended, refused.first_key_value()) {
        (true, _) if failed.is_empty() => Some((
            COMPLETE,
            "ImagesPulled",
            format!("pulled {}", images_text(desired)),
        )),
        (true, _) => {
            let names = join_first(MAX_NAMES_IN_MESSAGE, failed.iter());
            let message = format!("failed for {} of {}: {names}", failed.len(), images_text(desired));
            Some((FAILED, "ImagesFailed", message))
        }
        (false, Some((image, why))) => {
            let why = truncate(why, MAX_REASON_CHARS);
            let message = format!(
                "{} of {} have no ImagePullJob, because it cannot be created; {image}: {why}",
                refused.len(),
                images_text(desired)
            );
            Some((WAITING, "JobRefused", message))
        }
        (false, None) => None,
    };
    let condition = condition.map(|(type_, reason, message)| Condition {
        type_: type_.to_owned(),
        status: "True".to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(now),
        observed_generation: None,
    });
    ImageListPullJobStatus {
        start_time: previous.start_time.clone().or(Some(Time(now))),
        completion_time: ended.then_some(Time(now)),
        desired,
        active: count(|p| p.active),
        completed,
        succeeded: count(|p| p.succeeded),
        failed_image_statuses: failed_image_statuses.collect(),
        conditions: merge_conditions(&previous.conditions, condition.into_iter().collect()),
    }
}

fn to_count(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

fn images_text(number: i32) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} image{plural}")
}

#[cfg(test)]
mod tests;
