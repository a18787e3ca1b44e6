//! Tells what was done: the status of a CloneSet, and its events.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::{Value, json};

use super::Work;
use super::act::keep_set;
use super::memory::Memory;
use super::plan::{Act, ClaimPatch, Event, Job, WAITING, Why, cut};
use crate::api::cloneset::{CloneSet, CloneSetStatus};
use crate::api::keys;
use crate::cluster::{Error, EventType, write};
use crate::manager::names::first_of;
use crate::ops::metrics::metrics;

/// Names that an event lists.
const NAMES: usize = 8;

/// What acts have come to, by reason: one event each, however many Pods it is about.
#[derive(Default)]
pub struct Tally {
    /// By reason and what was done, in words.
    done: BTreeMap<(&'static str, String), BTreeSet<String>>,
    failed: BTreeMap<&'static str, (String, BTreeSet<String>)>,
}

/// Upstream's reasons for an act that was done and for one that failed, and what was done, in words.
fn words(act: &Act) -> (Option<(&'static str, &'static str)>, &'static str) {
    match act {
        Act::CreatePod { .. } => (Some(("SuccessfulCreate", "created Pods")), "FailedCreate"),
        Act::DeletePod { .. } => (Some(("SuccessfulDelete", "deleted Pods")), "FailedDelete"),
        Act::DeleteClaim { .. } => (
            Some((
                "SuccessfulDelete",
                "deleted PersistentVolumeClaims of deleted Pods",
            )),
            "FailedDelete",
        ),
        Act::PatchPod { why, .. } => match why {
            Why::UpdateInPlace => (
                Some(("SuccessfulUpdatePodInPlace", "updating Pods in place")),
                "FailedUpdatePodInPlace",
            ),
            Why::GoOn => (None, "FailedUpdatePodInPlace"),
            Why::UpdateReCreate => (
                Some(("SuccessfulUpdatePodReCreate", "replacing Pods")),
                "FailedUpdatePodReCreate",
            ),
            Why::Adopt => (Some(("SuccessfulAdopt", "adopted Pods")), "FailedScale"),
            Why::Release => (
                Some((
                    "SuccessfulRelease",
                    "released Pods that the selector does not match",
                )),
                "FailedScale",
            ),
            Why::PrepareUpdate => (
                Some(("PreparingUpdate", "waiting for hook inPlaceUpdate on Pods")),
                "FailedUpdate",
            ),
            Why::PrepareDelete => (
                Some(("PreparingDelete", "waiting for hook preDelete on Pods")),
                "FailedDelete",
            ),
            Why::KeepAfterAll => (
                Some(("DeletionCancelled", "cancelled the deletion of Pods")),
                "FailedScale",
            ),
            Why::State => (None, "FailedUpdate"),
        },
        Act::CreateJob(_) => (
            Some(("CreatedImagePullJob", "pulling images ahead with jobs")),
            "FailedCreateImagePullJob",
        ),
        Act::DeleteJob(_) | Act::LabelRevision { .. } => (None, "FailedPreDownload"),
        Act::PatchClaim(_) | Act::PatchSet(_) => (None, "FailedScale"),
    }
}

/// The revision that an act gives a Pod, and the word that goes before it.
fn revision(act: &Act) -> Option<(&'static str, &str)> {
    const LABEL: [&str; 3] = ["metadata", "labels", keys::CONTROLLER_REVISION_HASH];
    fn label(object: &Value) -> Option<&str> {
        LABEL.iter().try_fold(object, |at, key| at.get(key))?.as_str()
    }
    match act {
        Act::CreatePod { pod, .. } => Some(("of", label(pod)?)),
        Act::PatchPod {
            why: Why::UpdateInPlace,
            writes,
            ..
        } => {
            let mut labels = writes.iter().filter_map(|w| label(&w.patch));
            Some(("to", labels.next()?))
        }
        _ => None,
    }
}

/// The name of what an act is about.
fn name(act: &Act) -> String {
    match act {
        Act::CreatePod { name, .. }
        | Act::DeletePod { name, .. }
        | Act::PatchPod { name, .. }
        | Act::PatchClaim(ClaimPatch { name, .. })
        | Act::DeleteClaim { name, .. }
        | Act::LabelRevision { name, .. }
        | Act::DeleteJob(Job { name, .. }) => name.clone(),
        Act::CreateJob(job) => job.metadata.name.clone().unwrap_or_default(),
        Act::PatchSet(_) => "the CloneSet".to_owned(),
    }
}

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
    pub fn succeeded(&mut self, act: &Act) {
        count(act, "ok");
        if let Some((reason, what)) = words(act).0 {
            let what = match revision(act) {
                Some((word, revision)) => format!("{what} {word} {revision}:"),
                None => what.to_owned(),
            };
            self.done.entry((reason, what)).or_default().insert(name(act));
        }
    }

    /// An act failed.
    pub fn failed(&mut self, act: &Act, error: &Error) {
        count(act, error.category());
        let new = || (error.to_string(), BTreeSet::new());
        let entry = self.failed.entry(words(act).1).or_insert_with(new);
        entry.1.insert(name(act));
    }

    /// Whether something failed.
    pub fn failures(&self) -> bool {
        !self.failed.is_empty()
    }

    fn events(self) -> Vec<Event> {
        let done = self.done.into_iter().map(|((reason, what), names)| Event {
            warning: false,
            reason,
            message: format!("{what} {}", list(&names)),
        });
        // Names of Pods that could not be made mean nothing, and would make each event another.
        let failed = self.failed.into_iter().map(|(reason, (error, names))| Event {
            warning: true,
            reason,
            message: match reason {
                "FailedCreate" => error,
                _ => format!("{}: {error}", list(&names)),
            },
        });
        done.chain(failed).collect()
    }
}

fn list(names: &BTreeSet<String>) -> String {
    first_of(NAMES, names.iter().map(String::as_str))
}

/// Event reason: the template has fields that the API server does not know.
const UNKNOWN_FIELD: &str = "UnknownField";

/// Publishes what was done, and what is planned to be told unless it was told before.
pub fn tell(work: &Work<'_>, tally: Tally, planned: Vec<Event>, memory: &mut Memory) {
    let new = planned
        .iter()
        .filter(|event| !memory.said.contains(&event.message));
    let new: Vec<Event> = new.cloned().collect();
    memory.said = planned.into_iter().map(|event| event.message).collect();
    let acts = tally.events();
    // One line for each reason: where the API server is away it is the same for every Pod.
    for event in acts.iter().chain(&new) {
        let (reason, message) = (event.reason, &event.message);
        match event.warning {
            true => tracing::warn!(set = %work.name, reason, "{message}"),
            false => tracing::info!(set = %work.name, reason, "{message}"),
        }
    }
    for event in acts.into_iter().chain(new) {
        let type_ = if event.warning {
            EventType::Warning
        } else {
            EventType::Normal
        };
        let events = &work.ctx.cluster.events;
        events.publish(about(work), type_, event.reason, "Reconcile", event.message);
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
    let events = &work.ctx.cluster.events;
    events.publish(
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
        Ok(stored) => keep_set(work, stored.object()?),
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
