//! Tells what was done: the status of a CloneSet, and its events.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::{Value, json};

use super::memory::Memory;
use super::plan::{Act, ClaimPatch, Event, Job, WAITING, Why, cut};
use super::work::Work;
use kruise_api::cloneset::{CloneSet, CloneSetStatus};
use kruise_cluster::{Error, EventType, Key, write};
use kruise_ops::metrics::metrics;

/// What acts have come to: an event for each, as OpenKruise has them.
#[derive(Default)]
pub struct Tally {
    done: Vec<Event>,
    /// By reason and text: where the API server is away it is the same for many.
    failed: BTreeSet<(&'static str, String)>,
}

/// The reason and text of the event about an act that was done. Where OpenKruise has one, they are its, to the letter.
///
/// # Errors
/// What the log says where there is no event: what was done, before the name.
fn done(act: &Act) -> Result<(&'static str, String), &'static str> {
    let name = name(act);
    Ok(match act {
        Act::CreatePod { .. } => ("SuccessfulCreate", format!("succeed to create pod {name}")),
        Act::DeletePod { .. } => ("SuccessfulDelete", format!("succeed to delete pod {name}")),
        Act::PatchPod { why, .. } => match why {
            Why::UpdateInPlace => (
                "SuccessfulUpdatePodInPlace",
                format!("successfully update pod {name} in-place{}", revision(act)),
            ),
            Why::UpdateReCreate => (
                "SuccessfulUpdatePodReCreate",
                format!(
                    "successfully patch pod {name} specified-delete for update{}",
                    revision(act)
                ),
            ),
            Why::Adopt => ("SuccessfulAdopt", format!("adopted pod {name}")),
            Why::Release => (
                "SuccessfulRelease",
                format!("released pod {name}, which the selector does not match"),
            ),
            Why::PrepareUpdate => (
                "PreparingUpdate",
                format!("pod {name} waits for hook inPlaceUpdate"),
            ),
            Why::PrepareDelete => ("PreparingDelete", format!("pod {name} waits for hook preDelete")),
            Why::KeepAfterAll => (
                "DeletionCancelled",
                format!("cancelled the deletion of pod {name}"),
            ),
            Why::GoOn => return Err("continued the in-place update of pod"),
            Why::State => return Err("updated the state of pod"),
        },
        Act::CreateJob(job) => (
            "CreatedImagePullJob",
            format!("created ImagePullJob {name} for image: {}", job.spec.image),
        ),
        Act::PatchClaim(_) => return Err("updated PVC"),
        Act::DeleteClaim { .. } => return Err("deleted PVC"),
        Act::DeleteJob(_) => return Err("deleted ImagePullJob"),
        Act::LabelRevision { .. } => return Err("labelled ControllerRevision"),
        Act::PatchSet(_) => return Err("updated"),
    })
}

/// The reason and text of the event about an act that failed.
fn failed(act: &Act, error: &Error) -> (&'static str, String) {
    let of_claim = error.is_about("PersistentVolumeClaim", "persistentvolumeclaims");
    let (name, error) = (name(act), error.words());
    match act {
        // OpenKruise adds the object as JSON; its name alone would make each try another event.
        Act::CreatePod { .. } if of_claim => ("FailedCreate", format!("failed to create pvc: {error}")),
        Act::CreatePod { .. } => ("FailedCreate", format!("failed to create pod: {error}")),
        Act::DeletePod { .. } if of_claim => ("FailedDelete", format!("failed to delete pvc: {error}")),
        Act::DeletePod { .. } => ("FailedDelete", format!("failed to delete pod {name}: {error}")),
        Act::DeleteClaim { .. } => ("FailedDelete", format!("failed to clean up PVC {name}: {error}")),
        Act::PatchClaim(_) => ("FailedUpdate", format!("failed to update PVC {name}: {error}")),
        Act::PatchPod { why, .. } => match why {
            Why::UpdateInPlace | Why::GoOn => (
                "FailedUpdatePodInPlace",
                format!("failed to update pod {name} in-place{}: {error}", revision(act)),
            ),
            Why::UpdateReCreate => (
                "FailedUpdatePodReCreate",
                format!(
                    "failed to patch pod specified-delete {name} for update{}: {error}",
                    revision(act)
                ),
            ),
            Why::Adopt | Why::Release | Why::KeepAfterAll => ("FailedScale", format!("pod {name}: {error}")),
            Why::PrepareDelete => ("FailedDelete", format!("pod {name}: {error}")),
            Why::PrepareUpdate | Why::State => ("FailedUpdate", format!("pod {name}: {error}")),
        },
        Act::CreateJob(_) => (
            FAILED_JOB,
            format!("failed to create ImagePullJob {name}: {error}"),
        ),
        Act::DeleteJob(_) | Act::LabelRevision { .. } => ("FailedPreDownload", format!("{name}: {error}")),
        Act::PatchSet(_) => ("FailedScale", format!("{name}: {error}")),
    }
}

/// The revision that an act gives a Pod, as OpenKruise's events have it.
fn revision(act: &Act) -> String {
    match act {
        Act::PatchPod {
            revision: Some(revision),
            ..
        } => format!("(revision {revision})"),
        _ => String::new(),
    }
}

/// The name of what an act is about.
fn name(act: &Act) -> &str {
    match act {
        Act::CreatePod { name, .. }
        | Act::DeletePod { name, .. }
        | Act::PatchPod { name, .. }
        | Act::PatchClaim(ClaimPatch { name, .. })
        | Act::DeleteClaim { name, .. }
        | Act::LabelRevision { name, .. }
        | Act::DeleteJob(Job { name, .. }) => name,
        Act::CreateJob(job) => job.metadata.name.as_deref().unwrap_or_default(),
        Act::PatchSet(_) => "the CloneSet",
    }
}

/// The one failure that OpenKruise tells as `Normal`.
const FAILED_JOB: &str = "FailedCreateImagePullJob";

/// The act's kind in a word, as the metric has it.
fn kind(act: &Act) -> &'static str {
    match act {
        Act::CreatePod { .. } => "create_pod",
        Act::DeletePod { .. } => "delete_pod",
        Act::PatchPod { why, .. } => match why {
            Why::UpdateInPlace | Why::GoOn => "update_in_place",
            Why::UpdateReCreate => "replace_pod",
            Why::Adopt | Why::Release => "own_pod",
            Why::PrepareUpdate | Why::PrepareDelete | Why::KeepAfterAll | Why::State => "pod_state",
        },
        Act::PatchClaim(_) | Act::DeleteClaim { .. } => "claim",
        Act::CreateJob(_) | Act::DeleteJob(_) => "image_pull_job",
        Act::LabelRevision { .. } => "revision",
        Act::PatchSet(_) => "cloneset",
    }
}

fn count(act: &Act, result: &'static str) {
    let labels = [("act", kind(act).to_owned()), ("result", result.to_owned())];
    metrics().cloneset_acts.get_or_create(&labels).inc();
}

impl Tally {
    /// An act was done.
    pub fn succeeded(&mut self, set: &Key, act: &Act) {
        count(act, "ok");
        match done(act) {
            Ok((reason, message)) => self.done.push(Event {
                warning: false,
                reason,
                message,
                since: None,
            }),
            Err(what) => tracing::info!(%set, "{what} {}", name(act)),
        }
    }

    /// An act failed.
    pub fn failed(&mut self, act: &Act, error: &Error) {
        count(act, error.category());
        self.failed.insert(failed(act, error));
    }

    /// Whether something failed.
    pub fn failures(&self) -> bool {
        !self.failed.is_empty()
    }

    fn events(self) -> Vec<Event> {
        let failed = self.failed.into_iter().map(|(reason, message)| Event {
            warning: reason != FAILED_JOB,
            reason,
            message,
            since: None,
        });
        self.done.into_iter().chain(failed).collect()
    }
}

/// Event reason: the template has fields that the API server does not know.
const UNKNOWN_FIELD: &str = "UnknownField";

/// Publishes what was done, and what is planned to be told unless it was told before.
pub fn tell(work: &Work<'_>, tally: Tally, planned: Vec<Event>, memory: &mut Memory) {
    let events = &work.ctx.cluster.events;
    for event in tally.events().into_iter().chain(memory.news(planned)) {
        let (reason, message) = (event.reason, &event.message);
        match event.warning {
            true => tracing::warn!(set = %work.name, reason, "{message}"),
            false => tracing::info!(set = %work.name, reason, "{message}"),
        }
        let type_ = if event.warning {
            EventType::Warning
        } else {
            EventType::Normal
        };
        events.publish(about(work), type_, reason, "Reconcile", event.message);
    }
}

/// Fields that an event names, and bytes of each.
const FIELDS: usize = 8;
const LONGEST_FIELD: usize = 100;

/// Tells of fields that Pods go without, since the API server does not know them: the webhook would have warned.
pub fn unknown_fields(work: &Work<'_>, fields: &[String]) {
    if fields.is_empty() {
        return;
    }
    let fields: Vec<_> = fields
        .iter()
        .take(FIELDS)
        .map(|field| cut(field, LONGEST_FIELD))
        .collect();
    let message = format!(
        "unknown fields are left out; look for a misspelling: {}",
        fields.join(", ")
    );
    tracing::warn!(set = %work.name, reason = UNKNOWN_FIELD, "{message}");
    work.ctx.cluster.events.publish(
        about(work),
        EventType::Warning,
        UNKNOWN_FIELD,
        "Reconcile",
        message,
    );
}

fn about(work: &Work<'_>) -> ObjectReference {
    ObjectReference {
        api_version: Some("apps.kruise.io/v1beta1".to_owned()),
        kind: Some("CloneSet".to_owned()),
        namespace: work.name.namespace.clone(),
        name: Some(work.name.name.clone()),
        uid: Some(work.owner.uid.clone()),
        ..ObjectReference::default()
    }
}

/// Writes the status if it is another and its time has come; how long to wait if it has not.
///
/// # Errors
/// When it could not be written.
pub async fn status(
    work: &Work<'_>,
    status: Option<CloneSetStatus>,
    at_rest: bool,
    memory: &mut Memory,
) -> Result<Option<Duration>, Error> {
    let Some(status) = status else {
        memory.told.same();
        return Ok(None);
    };
    let now = Instant::now();
    let wait = memory.told.another(now, other_words(work.set, &status));
    if !(wait.is_zero() || at_rest && reached(work.set, &status)) {
        return Ok(Some(wait));
    }
    memory.told.written(now);
    let patch = body(&work.owner.uid, &status);
    match write::patch_status_merge::<CloneSet>(&work.api(), &work.name.name, &patch).await {
        Ok(stored) => work.keep_set(stored.object()?),
        // It is gone, or another has its name: the watch will say so.
        Err(error) if error.not_found() || error.conflict() => {}
        Err(error) => return Err(error),
    }
    Ok(None)
}

/// Whether the status says the same in other words: a container that crashes again and again has another state each time.
fn other_words(set: &CloneSet, status: &CloneSetStatus) -> bool {
    let wordless = |status: &CloneSetStatus| {
        let mut status = status.clone();
        let waiting = status.conditions.iter_mut().filter(|c| c.type_ == WAITING);
        waiting.for_each(|condition| condition.message.clear());
        status
    };
    set.status.as_ref().map(wordless) == Some(wordless(status))
}

/// Whether the CloneSet is what it should be: that is told at once.
fn reached(set: &CloneSet, status: &CloneSetStatus) -> bool {
    let wanted = set.spec.wanted();
    let all = [status.replicas, status.available_replicas];
    let updated = status.expected_updated_replicas.unwrap_or(wanted);
    all.iter().all(|count| *count == wanted) && status.updated_replicas >= updated
}

/// The whole status; what is empty is named as absent, for a merge patch keeps what it does not name.
fn body(uid: &str, status: &CloneSetStatus) -> Value {
    let optional = [
        "observedGeneration",
        "updatedAvailableReplicas",
        "expectedUpdatedReplicas",
        "updateRevision",
        "currentRevision",
        "collisionCount",
        "conditions",
        "labelSelector",
    ];
    let mut fields: BTreeMap<String, Value> = optional.map(|field| (field.to_owned(), Value::Null)).into();
    if let Value::Object(map) = json!(status) {
        fields.extend(map);
    }
    json!({ "metadata": { "uid": uid }, "status": fields })
}
