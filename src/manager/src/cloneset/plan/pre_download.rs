//! Pre-pulls the images of the update revision to the nodes before the Pods need them.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelectorRequirement, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::builder::PlanBuilder;
use super::types::{Action, FailureSubject, ParsedRevision};
use super::update::revision_data;
use super::view::PlanView;
use kruise_api::cloneset::{PodUpdateStrategyType as Policy, RollingUpdateCloneSetStrategy, string_map};
use kruise_api::image_pull_job::{
    CompletionPolicy, CompletionPolicyType, ImagePullJob, ImagePullJobPodSelector, ImagePullJobSpec,
    PullPolicy, SandboxConfig,
};
use kruise_api::keys;
use kruise_workload::in_place::spec;
use kruise_workload::limits::percent_of;
use kruise_workload::revision::short_hash;

/// With this many Pods or fewer, pre-pulling is not worth it.
const MAX_IGNORED_REPLICAS: i64 = 3;
/// Default timeout of one pull, in seconds.
const DEFAULT_PULL_TIMEOUT: i32 = 300;
/// Seconds after its end when a job is deleted.
const JOB_TTL: i32 = 600;

/// Plans the jobs for the update revision, or their deletion.
///
/// The revision is labelled when all its jobs exist, so that a job that cannot be created is retried. A refused one is
/// given up, as in upstream: jobs only help.
pub(super) fn pre_download(view: &PlanView<'_>, updated_ready: i32, builder: &mut PlanBuilder) {
    let observed = view.observed;
    if !observed.features.pre_download || view.template_rejected() {
        return;
    }
    if observed.current_revision == observed.update_revision {
        for job in observed.jobs.iter().filter(|job| !job_rejected(view, &job.name)) {
            builder.push(view, Action::DeleteJob(job.clone()));
        }
        return;
    }
    let revisions = view
        .revision(&observed.current_revision)
        .zip(view.revision(&observed.update_revision));
    let Some((current, update)) = revisions.filter(|(_, update)| !is_handled(view, update)) else {
        return;
    };
    let strategy = view.spec.rolling_update();
    let label = |label| Action::LabelRevision {
        name: update.name.clone(),
        label,
    };
    let Some(strategy) = strategy.filter(|s| should_pre_download(view, s, current, update)) else {
        builder.push(view, label(keys::IMAGE_PRE_DOWNLOAD_IGNORED));
        return;
    };
    if i64::from(updated_ready) < min_updated_ready(view) {
        return;
    }
    let exists =
        |name: &String| observed.jobs.iter().any(|job| job.name == *name) || job_rejected(view, name);
    let images = changed_images(current, update);
    let jobs = images.map(|(container, image)| (format!("{}-{container}", update.name), image));
    let missing: Vec<(String, &str)> = jobs.filter(|(name, _)| !exists(name)).collect();
    if missing.is_empty() {
        builder.push(view, label(keys::IMAGE_PRE_DOWNLOAD_CREATED));
    }
    // Each has the labels and annotations of the template.
    for (name, image) in missing.iter().take(view.pod_limit()) {
        let job = build_job(view, strategy, update, name, image);
        builder.push(view, Action::CreateJob(Box::new(job)));
    }
}

/// How many updated Pods must be ready first. No field of v1beta1 holds a percentage, so a percentage remains an
/// annotation.
fn min_updated_ready(view: &PlanView<'_>) -> i64 {
    let strategy = view.spec.rolling_update();
    let in_place = strategy.and_then(|s| s.in_place_update_strategy.as_ref());
    let number = in_place.and_then(|s| s.image_pre_download_min_updated_ready_pods);
    let share = || {
        let annotations = view.observed.set.metadata.annotations.as_ref()?;
        let text = annotations.get(keys::IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS)?;
        let percent: u32 = text.strip_suffix('%')?.parse().ok()?;
        Some(percent_of(f64::from(percent), view.limits.replicas, f64::ceil))
    };
    number.map(i64::from).or_else(share).unwrap_or_default()
}

/// Whether no images need to be pre-pulled for a revision, any more or at all.
fn is_handled(view: &PlanView<'_>, update: &ParsedRevision) -> bool {
    update.pre_downloaded || view.failed_permanently(&FailureSubject::Revision(update.name.clone()))
}

/// Whether the API server refused to create or delete the job of this name.
fn job_rejected(view: &PlanView<'_>, job: &str) -> bool {
    view.failed_permanently(&FailureSubject::Job(job.to_owned()))
}

/// Whether Pods are updated in place and one after another, so that pre-pulling helps.
fn should_pre_download(
    view: &PlanView<'_>,
    strategy: &RollingUpdateCloneSetStrategy,
    current: &ParsedRevision,
    update: &ParsedRevision,
) -> bool {
    let in_place = [Policy::InPlaceIfPossible, Policy::InPlaceOnly];
    let limits = &view.limits;
    let options = view.observed.features.in_place_options();
    strategy
        .pod_update_policy
        .as_ref()
        .is_some_and(|policy| in_place.contains(policy))
        && limits.replicas > MAX_IGNORED_REPLICAS
        && !(limits.partition == 0 && limits.max_unavailable >= limits.replicas)
        && spec::calculate_spec(&revision_data(current), &revision_data(update), &options).is_ok()
}

fn container_images(revision: &ParsedRevision) -> BTreeMap<&str, &str> {
    let list = revision.data["spec"]["template"]["spec"]["containers"].as_array();
    list.into_iter()
        .flatten()
        .filter_map(|container| Some((container["name"].as_str()?, container["image"].as_str()?)))
        .collect()
}

/// The containers whose image changes, with the new image.
fn changed_images<'a>(
    current: &'a ParsedRevision,
    update: &'a ParsedRevision,
) -> impl Iterator<Item = (&'a str, &'a str)> {
    let old = container_images(current);
    let new = container_images(update).into_iter();
    new.filter(move |(name, image)| old.get(name) != Some(image))
}

fn build_job(
    view: &PlanView<'_>,
    strategy: &RollingUpdateCloneSetStrategy,
    update: &ParsedRevision,
    name: &str,
    image: &str,
) -> ImagePullJob {
    let template = &update.data["spec"]["template"];
    let hash = short_hash(&update.name);
    let mut labels = string_map(&template["metadata"]["labels"]);
    labels.insert(keys::REVISION_HASH.to_owned(), hash.to_owned());
    let in_place = strategy.in_place_update_strategy.as_ref();
    let secrets = template["spec"]["imagePullSecrets"]
        .as_array()
        .into_iter()
        .flatten();
    let sandbox = SandboxConfig {
        labels: labels.clone(),
        annotations: string_map(&template["metadata"]["annotations"]),
    };
    let spec = ImagePullJobSpec {
        image: image.to_owned(),
        pod_selector: Some(not_updated_selector(view, &update.name, hash)),
        pull_secrets: secrets
            .filter_map(|s| s["name"].as_str().map(str::to_owned))
            .collect(),
        parallelism: Some(
            in_place
                .and_then(|s| s.image_pre_download_parallelism.clone())
                .unwrap_or(IntOrString::Int(1)),
        ),
        pull_policy: Some(PullPolicy {
            timeout_seconds: Some(
                in_place
                    .and_then(|s| s.image_pre_download_timeout_seconds)
                    .unwrap_or(DEFAULT_PULL_TIMEOUT),
            ),
            backoff_limit: Some(1),
            pin_seconds: None,
        }),
        completion_policy: CompletionPolicy {
            type_: Some(CompletionPolicyType::Always),
            active_deadline_seconds: None,
            ttl_seconds_after_finished: Some(JOB_TTL),
        },
        sandbox_config: Some(sandbox.within_schema_limits()),
        ..ImagePullJobSpec::default()
    };
    let mut job = ImagePullJob::new(name, spec);
    job.metadata
        .namespace
        .clone_from(&view.observed.set.metadata.namespace);
    job.metadata.labels = Some(labels);
    let owner: Option<OwnerReference> = serde_json::from_value(view.owner_reference()).ok();
    job.metadata.owner_references = owner.map(|owner| vec![owner]);
    job
}

/// Selects the CloneSet's Pods that have another revision.
fn not_updated_selector(view: &PlanView<'_>, name: &str, hash: &str) -> ImagePullJobPodSelector {
    let selector = &view.spec.selector;
    let mut expressions = selector.match_expressions.clone().unwrap_or_default();
    expressions.push(LabelSelectorRequirement {
        key: keys::CONTROLLER_REVISION_HASH.to_owned(),
        operator: "NotIn".to_owned(),
        values: Some(vec![name.to_owned(), hash.to_owned()]),
    });
    ImagePullJobPodSelector {
        match_labels: selector.match_labels.clone().unwrap_or_default(),
        match_expressions: expressions,
    }
}
