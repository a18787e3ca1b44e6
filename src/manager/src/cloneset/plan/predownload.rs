//! Images of the new revision, pulled to the nodes before the Pods need them.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelectorRequirement, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::draft::Draft;
use super::limits;
use super::types::{Act, Revision, Subject};
use super::update::as_engine;
use super::view::View;
use kruise_api::cloneset::{PodUpdateStrategyType as Policy, RollingUpdateCloneSetStrategy, texts};
use kruise_api::image_pull_job::{
    CompletionPolicy, CompletionPolicyType, ImagePullJob, ImagePullJobPodSelector, ImagePullJobSpec,
    PullPolicy, SandboxConfig,
};
use kruise_api::keys;
use kruise_workload::in_place::{Options, spec};
use kruise_workload::revision::short;

/// Up to this many Pods, pulling ahead is not worth it.
const FEW: i64 = 3;
/// Seconds that one pull may take when the strategy does not say.
const TIMEOUT: i32 = 300;
/// Seconds that a job stays after its end.
const TTL: i32 = 600;

/// Plans the jobs for the update revision, or their end.
///
/// The revision is labelled when all its jobs exist, so that one that cannot be made is tried again. One that is refused
/// is given up, as with upstream: it is no more than a help.
pub(super) fn pre_download(view: &View<'_>, updated_ready: i32, draft: &mut Draft) {
    let observed = view.observed;
    if !observed.switches.pre_download || view.held() {
        return;
    }
    if observed.current == observed.update {
        for job in observed.jobs.iter().filter(|job| !refused(view, &job.name)) {
            draft.act(view, Act::DeleteJob(job.clone()));
        }
        return;
    }
    let revisions = view
        .revision(&observed.current)
        .zip(view.revision(&observed.update));
    let Some((current, update)) = revisions.filter(|(_, update)| !handled(view, update)) else {
        return;
    };
    let strategy = view.spec.rolling_update();
    let label = |label| Act::LabelRevision {
        name: update.name.clone(),
        label,
    };
    let Some(strategy) = strategy.filter(|s| worth_it(view, s, current, update)) else {
        draft.act(view, label(keys::IMAGE_PRE_DOWNLOAD_IGNORED));
        return;
    };
    if i64::from(updated_ready) < least(view) {
        return;
    }
    let jobs = jobs(view, strategy, current, update);
    let there = |job: &ImagePullJob| {
        let name = job.metadata.name.as_ref();
        let known = |name: &String| observed.jobs.iter().any(|job| job.name == *name);
        name.is_some_and(|name| known(name) || refused(view, name))
    };
    let missing: Vec<ImagePullJob> = jobs.into_iter().filter(|job| !there(job)).collect();
    if missing.is_empty() {
        draft.act(view, label(keys::IMAGE_PRE_DOWNLOAD_CREATED));
    }
    for job in missing {
        draft.act(view, Act::CreateJob(Box::new(job)));
    }
}

/// How many updated Pods must be ready first. No field of v1beta1 holds a percentage, so that one stays an annotation.
fn least(view: &View<'_>) -> i64 {
    let strategy = view.spec.rolling_update();
    let in_place = strategy.and_then(|s| s.in_place_update_strategy.as_ref());
    let number = in_place.and_then(|s| s.image_pre_download_min_updated_ready_pods);
    let share = || {
        let annotations = view.observed.set.metadata.annotations.as_ref()?;
        let text = annotations.get(keys::IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS)?;
        let percent: u32 = text.strip_suffix('%')?.parse().ok()?;
        Some(limits::share(f64::from(percent), view.limits.replicas, f64::ceil))
    };
    number.map(i64::from).or_else(share).unwrap_or_default()
}

/// Whether nothing is to be pulled ahead for a revision, any more or at all.
fn handled(view: &View<'_>, update: &Revision) -> bool {
    update.downloaded || view.given_up(&Subject::Revision(update.name.clone()))
}

/// Whether the API server does not let us make the job of this name, or delete it.
fn refused(view: &View<'_>, job: &str) -> bool {
    view.given_up(&Subject::Job(job.to_owned()))
}

/// Whether Pods will wait for images one after the other, and can be updated in place.
fn worth_it(
    view: &View<'_>,
    strategy: &RollingUpdateCloneSetStrategy,
    current: &Revision,
    update: &Revision,
) -> bool {
    let in_place = [Policy::InPlaceIfPossible, Policy::InPlaceOnly];
    let switches = &view.observed.switches;
    let limits = &view.limits;
    let options = Options {
        env_from_metadata: switches.env_from_metadata,
        vertical: switches.vertical,
        recreate_for_claims: switches.recreate_for_claims,
        grace_seconds: 0,
        stored: switches.stored,
    };
    strategy
        .pod_update_policy
        .as_ref()
        .is_some_and(|policy| in_place.contains(policy))
        && limits.replicas > FEW
        && !(limits.partition == 0 && limits.unavailable >= limits.replicas)
        && spec::spec(&as_engine(current), &as_engine(update), &options).is_ok()
}

fn containers(revision: &Revision) -> BTreeMap<&str, &str> {
    let list = revision.data["spec"]["template"]["spec"]["containers"].as_array();
    list.into_iter()
        .flatten()
        .filter_map(|container| Some((container["name"].as_str()?, container["image"].as_str()?)))
        .collect()
}

/// A job for each container whose image is another.
fn jobs(
    view: &View<'_>,
    strategy: &RollingUpdateCloneSetStrategy,
    current: &Revision,
    update: &Revision,
) -> Vec<ImagePullJob> {
    let old = containers(current);
    let changed = containers(update)
        .into_iter()
        .filter(|(name, image)| old.get(name) != Some(image));
    changed
        .map(|(name, image)| job(view, strategy, update, name, image))
        .collect()
}

fn job(
    view: &View<'_>,
    strategy: &RollingUpdateCloneSetStrategy,
    update: &Revision,
    container: &str,
    image: &str,
) -> ImagePullJob {
    let template = &update.data["spec"]["template"];
    let hash = short(&update.name);
    let mut labels = texts(&template["metadata"]["labels"]);
    labels.insert(keys::REVISION_HASH.to_owned(), hash.to_owned());
    let in_place = strategy.in_place_update_strategy.as_ref();
    let secrets = template["spec"]["imagePullSecrets"]
        .as_array()
        .into_iter()
        .flatten();
    let sandbox = SandboxConfig {
        labels: labels.clone(),
        annotations: texts(&template["metadata"]["annotations"]),
    };
    let spec = ImagePullJobSpec {
        image: image.to_owned(),
        pod_selector: Some(not_updated(view, &update.name, hash)),
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
                    .unwrap_or(TIMEOUT),
            ),
            backoff_limit: Some(1),
        }),
        completion_policy: CompletionPolicy {
            type_: Some(CompletionPolicyType::Always),
            active_deadline_seconds: None,
            ttl_seconds_after_finished: Some(TTL),
        },
        sandbox_config: Some(sandbox.fitting()),
        ..ImagePullJobSpec::default()
    };
    let mut job = ImagePullJob::new(&format!("{}-{container}", update.name), spec);
    job.metadata
        .namespace
        .clone_from(&view.observed.set.metadata.namespace);
    job.metadata.labels = Some(labels);
    let owner: Option<OwnerReference> = serde_json::from_value(view.owner_reference()).ok();
    job.metadata.owner_references = owner.map(|owner| vec![owner]);
    job
}

/// The CloneSet's Pods that have another revision.
fn not_updated(view: &View<'_>, name: &str, hash: &str) -> ImagePullJobPodSelector {
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
