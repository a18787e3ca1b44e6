//! Several requests of one node together: those that its NodeImage has room for, and those that are refused.

use std::collections::{BTreeMap, BTreeSet};

use super::entry::{EntryOptions, JobRequest, add_request};
use super::quota::{NodeImageQuota, QuotaExceeded};
use kruise_api::node_image::{ImageSpec, ImageTagStatus, NodeImage};

/// Result of a request: the version of the pull that it waits for, if any.
pub type RequestResult = Result<Option<i64>, QuotaExceeded>;

/// What requests change in a NodeImage.
#[derive(Debug, PartialEq)]
pub struct Additions<'a> {
    /// The new entries of the images that change.
    pub images: BTreeMap<&'a str, ImageSpec>,
    /// The result of each request, in their order.
    pub results: Vec<RequestResult>,
}

/// Adds requests to a NodeImage: all together if they fit, otherwise each one that does, in their order.
#[must_use]
pub fn add_requests<'a>(
    object: &NodeImage,
    requests: &[JobRequest<'a>],
    options: EntryOptions,
) -> Additions<'a> {
    add_together(object, requests, options).unwrap_or_else(|| add_one_by_one(object, requests, options))
}

/// All requests; `None` if they exceed the quota.
fn add_together<'a>(
    object: &NodeImage,
    requests: &[JobRequest<'a>],
    options: EntryOptions,
) -> Option<Additions<'a>> {
    let mut namespaces: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let additions = add_each(object, requests, |entry, name, tag, request| {
        let awaited = add_request(entry, stored_statuses(object, name), tag, request, options);
        if awaited.is_none() {
            let namespace = namespace_of(&request);
            namespaces.entry(name).or_default().insert(namespace);
        }
        Ok(awaited)
    });
    if !additions.images.is_empty() {
        let mut quota = NodeImageQuota::from_images(&object.spec.images);
        for (name, entry) in &additions.images {
            let namespaces = namespaces.get(name).into_iter().flatten();
            quota.try_add(namespaces, name, entry).ok()?;
        }
    }
    Some(additions)
}

/// The requests that fit, one after the other. A thousand may be refused: for each, only what it changes is copied
/// and measured.
fn add_one_by_one<'a>(
    object: &NodeImage,
    requests: &[JobRequest<'a>],
    options: EntryOptions,
) -> Additions<'a> {
    let mut quota = NodeImageQuota::from_images(&object.spec.images);
    add_each(object, requests, |entry, name, tag, request| {
        let old = part_of(entry, tag);
        let awaited = add_request(entry, stored_statuses(object, name), tag, request, options);
        let new = part_of(entry, tag);
        let fits = if old == new {
            Ok(())
        } else {
            quota.try_change(namespace_of(&request), name, entry, [&old, &new])
        };
        if fits.is_err() {
            restore_part(entry, tag, old);
        }
        fits.map(|()| awaited)
    })
}

/// Calls `add` for each request, with the entry of its image as the requests before have left it, the image's name and
/// tag. A thousand jobs may request tags of one image: its entry is copied and compared once.
fn add_each<'a>(
    object: &NodeImage,
    requests: &[JobRequest<'a>],
    mut add: impl FnMut(&mut ImageSpec, &'a str, &'a str, JobRequest<'a>) -> RequestResult,
) -> Additions<'a> {
    let mut images: BTreeMap<&'a str, ImageSpec> = BTreeMap::new();
    let mut results = Vec::with_capacity(requests.len());
    for request in requests {
        let Ok((name, tag)) = &request.job.image else {
            results.push(Ok(None));
            continue;
        };
        let stored = || stored_entry(object, name);
        let entry = images.entry(name).or_insert_with(stored);
        results.push(add(entry, name, tag, *request));
    }
    images.retain(|name, entry| has_changed(object, name, entry));
    Additions { images, results }
}

fn stored_entry(object: &NodeImage, image: &str) -> ImageSpec {
    object.spec.images.get(image).cloned().unwrap_or_default()
}

fn stored_statuses<'a>(object: &'a NodeImage, image: &str) -> &'a [ImageTagStatus] {
    let status = object.status.as_ref();
    let image = status.and_then(|status| status.image_statuses.get(image));
    image.map(|image| image.tags.as_slice()).unwrap_or_default()
}

fn namespace_of<'a>(request: &JobRequest<'a>) -> &'a str {
    request.job.key.namespace.as_deref().unwrap_or_default()
}

/// Whether an entry has to be written.
fn has_changed(object: &NodeImage, image: &str, entry: &ImageSpec) -> bool {
    let current = object.spec.images.get(image);
    current != Some(entry) && (current.is_some() || *entry != ImageSpec::default())
}

/// What of an entry a request for a tag may change: that tag, and what all tags share.
fn part_of(entry: &ImageSpec, tag: &str) -> ImageSpec {
    let tags = entry.tags.iter().filter(|one| one.tag == tag);
    ImageSpec {
        pull_secrets: entry.pull_secrets.clone(),
        service_accounts: entry.service_accounts.clone(),
        sandbox_config: entry.sandbox_config.clone(),
        tags: tags.cloned().collect(),
    }
}

/// Undoes a request for a tag.
fn restore_part(entry: &mut ImageSpec, tag: &str, part: ImageSpec) {
    let ImageSpec {
        pull_secrets,
        service_accounts,
        sandbox_config,
        tags,
    } = part;
    entry.pull_secrets = pull_secrets;
    entry.service_accounts = service_accounts;
    entry.sandbox_config = sandbox_config;
    entry.tags.retain(|one| one.tag != tag);
    entry.tags.extend(tags);
    entry.tags.sort_by(|a, b| a.tag.cmp(&b.tag));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::image_pull_job::plan::job::PullJob;
    use crate::image_pull_job::plan::quota::MAX_IMAGES;
    use jiff::Timestamp;
    use kruise_api::image_pull_job::{ImagePullJob, ImagePullJobSpec};
    use kruise_api::node_image::{NodeImageSpec, SandboxConfig};

    static NONE: BTreeSet<String> = BTreeSet::new();
    const OPTIONS: EntryOptions = EntryOptions {
        default_ttl: 300,
        seed: 0,
        now: Timestamp::UNIX_EPOCH,
    };

    /// A job of a namespace, whose sandbox configuration has that many values of 60,000 bytes.
    fn job(number: usize, namespace: &str, image: &str, values: usize) -> PullJob {
        let annotations = (0..values).map(|value| (value.to_string(), "x".repeat(60_000)));
        let spec = ImagePullJobSpec {
            image: image.to_owned(),
            sandbox_config: (values > 0).then(|| SandboxConfig {
                annotations: annotations.collect(),
                ..SandboxConfig::default()
            }),
            ..ImagePullJobSpec::default()
        };
        let mut object = ImagePullJob::new(&format!("j{number}"), spec);
        object.metadata.namespace = Some(namespace.to_owned());
        object.metadata.uid = Some(format!("uid{number}"));
        PullJob::from_object(&object)
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

    /// A NodeImage with that many images.
    fn node_image(images: usize) -> NodeImage {
        let job = job(0, "other", "i:1", 0);
        let mut entry = ImageSpec::default();
        add_request(&mut entry, &[], "1", request(&job), OPTIONS);
        let images = (0..images).map(|number| (format!("other{number}"), entry.clone()));
        NodeImage::new(
            "node",
            NodeImageSpec {
                images: images.collect(),
            },
        )
    }

    #[test]
    fn requests_that_fit_are_added_and_others_are_refused() {
        let object = node_image(MAX_IMAGES - 1);
        let jobs = [
            job(1, "c", "z:1", 0),
            job(2, "a", "a:1", 0),
            job(3, "b", "other0:1", 0),
            job(4, "c", "z:2", 0),
            job(5, "d", "Invalid", 0),
        ];
        let requests: Vec<_> = jobs.iter().map(request).collect();
        let Additions { images, results } = add_requests(&object, &requests, OPTIONS);
        let refused: Vec<bool> = results.iter().map(Result::is_err).collect();
        assert_eq!(refused, [false, true, false, false, false]);
        assert_eq!(images.keys().copied().collect::<Vec<_>>(), ["other0", "z"]);
        assert_eq!(images["z"].tags.len(), 2);
        assert_eq!(images["other0"].tags[0].owner_references.len(), 2);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Only what a request changes is measured; the result is as if each entry was measured as a whole.
        #[test]
        fn parts_are_measured_as_whole_entries(
            images in prop::sample::select(vec![0, MAX_IMAGES - 3]),
            asks in prop::collection::vec((0..3_usize, 0..3_usize, 0..4_usize, 0..3_usize), 0..16),
        ) {
            let object = node_image(images);
            let jobs = asks.iter().enumerate().map(|(number, (image, tag, namespace, values))| {
                job(number, &format!("n{namespace}"), &format!("i{image}:{tag}"), *values)
            });
            let jobs: Vec<PullJob> = jobs.collect();
            let requests: Vec<_> = jobs.iter().map(request).collect();
            let found = add_one_by_one(&object, &requests, OPTIONS);
            let mut quota = NodeImageQuota::from_images(&object.spec.images);
            let mut entries = object.spec.images.clone();
            for (request, result) in requests.iter().zip(&found.results) {
                let (image, tag) = request.job.image.as_ref().unwrap();
                let mut entry = entries.get(image).cloned().unwrap_or_default();
                add_request(&mut entry, &[], tag, *request, OPTIONS);
                let expected = quota.try_add([&namespace_of(request)], image, &entry);
                prop_assert_eq!(result.clone().map(drop), expected.clone());
                if expected.is_ok() {
                    entries.insert(image.clone(), entry);
                }
            }
            entries.retain(|image, entry| object.spec.images.get(image) != Some(entry));
            let changed = found.images.into_iter();
            let changed: BTreeMap<_, _> = changed.map(|(image, entry)| (image.to_owned(), entry)).collect();
            prop_assert_eq!(changed, entries);
        }
    }
}
