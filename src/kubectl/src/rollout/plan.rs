//! How far a rollout is, which revisions there are, and the patches that control it.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::cloneset::{CloneSet, CloneSetStatus, CloneSetUpdateStrategyType};
use kruise_api::image_pull_job::WAITING;
use kruise_api::keys;
use kruise_api::owner::Owner;
use kruise_api::sidecarset::{SidecarSet, SidecarSetSpec, SidecarSetUpdateStrategyType};
use kruise_workload::revision::{Revision, decode_template, encode_template};
use kruise_workload::sidecarset::history::encode_spec;
use kruise_workload::sidecarset::limits::partition;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::conditions::{ConditionText, find_true, find_true_of_clone_set};

/// Annotation with the cause of a change, which kubectl shows.
const CHANGE_CAUSE: &str = "kubernetes.io/change-cause";
/// Reason of condition `Waiting` while kruise-manager refuses the template, and keeps the revision before.
const TEMPLATE_REFUSED: &str = "TemplateRefused";
/// Reason of condition `Progressing` while a rollout is within its deadline.
const IN_TIME: &str = "CloneSetUpdated";
/// Reason of condition `Progressing` after that; also from the first moment of a rollout that begins later than its
/// deadline after the last one.
const DEADLINE_EXCEEDED: &str = "ProgressDeadlineExceeded";
/// How long a template must be refused to count as that: the condition does not show of which spec, and kruise-manager
/// may not have read the newest one yet.
const REFUSAL_GRACE: Duration = Duration::from_secs(10);
/// Fields of a SidecarSet's spec that a revision holds.
const SIDECAR_SET_FIELDS: [&str; 5] = [
    "containers",
    "initContainers",
    "volumes",
    "imagePullSecrets",
    "patchPodMetadata",
];

/// How far a rollout is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RolloutProgress {
    /// With what it waits for.
    InProgress(String),
    /// The same, with a failure unless the rollout gets on until then.
    Failing {
        /// What it waits for.
        line: String,
        /// The failure.
        failure: String,
        /// When it counts, since the start of the command.
        at: Duration,
    },
    /// With the result.
    Complete(String),
    /// With the reason.
    Failed(String),
}

/// What a condition of a CloneSet reports as the failure of a rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Cause {
    /// The template of this generation is refused.
    TemplateRefused(Option<i64>),
    /// The rollout to this revision takes longer than that.
    DeadlineExceeded(String, Duration),
}

/// The rollout of a CloneSet as one command observes it.
#[derive(Debug, Default)]
pub struct CloneSetRollout {
    /// Whether the last observation showed it within its deadline.
    in_time: bool,
    /// The cause of the failure that a condition reports, and since when the command sees it.
    reported: Option<(Cause, Duration)>,
}

impl CloneSetRollout {
    /// How far it is at `now`, counted from the start of the command. A condition that was there at the start may be
    /// about an earlier rollout or spec.
    pub fn observe(&mut self, set: &CloneSet, now: Duration) -> RolloutProgress {
        let was_in_time = std::mem::replace(&mut self.in_time, is_in_time(set));
        let (line, cause, failure) = match (clone_set_line(set), reported_cause(set)) {
            (RolloutProgress::InProgress(line), Some(cause)) => {
                let failure = failure_text(set, &cause, &line);
                (line, cause, failure)
            }
            (progress, _) => {
                self.reported = None;
                return progress;
            }
        };
        let grace = match &cause {
            Cause::TemplateRefused(_) => REFUSAL_GRACE,
            // It has passed while the command observed the rollout.
            Cause::DeadlineExceeded(..) if was_in_time => return RolloutProgress::Failed(failure),
            Cause::DeadlineExceeded(_, deadline) => *deadline,
        };
        let since = match self.reported.take() {
            Some((known, since)) if known == cause => since,
            _ => now,
        };
        self.reported = Some((cause, since));
        let at = since.saturating_add(grace);
        if now >= at {
            return RolloutProgress::Failed(failure);
        }
        RolloutProgress::Failing { line, failure, at }
    }
}

/// How far the rollout of a CloneSet is, as a single observation shows it: it does not show when a deadline began.
pub fn clone_set_progress(set: &CloneSet) -> RolloutProgress {
    match (clone_set_line(set), reported_cause(set)) {
        (RolloutProgress::InProgress(line), Some(cause @ Cause::TemplateRefused(_))) => {
            RolloutProgress::Failed(failure_text(set, &cause, &line))
        }
        (progress, _) => progress,
    }
}

/// Whether kruise-manager has not observed the newest spec.
fn is_behind(set: &CloneSet, status: &CloneSetStatus) -> bool {
    status.observed_generation < set.metadata.generation
}

/// Whether kruise-manager refuses the template: `status.updateRevision` is the last one that it accepted.
pub fn is_template_refused(set: &CloneSet) -> bool {
    let Some(status) = &set.status else { return false };
    let waiting = find_true_of_clone_set(&status.conditions, WAITING);
    is_behind(set, status) && waiting.is_some_and(|waiting| waiting.reason == TEMPLATE_REFUSED)
}

fn progressing_reason(status: &CloneSetStatus) -> Option<&str> {
    let mut conditions = status.conditions.iter();
    let condition = conditions.find(|condition| condition.type_ == "Progressing")?;
    Some(&condition.reason)
}

fn is_in_time(set: &CloneSet) -> bool {
    let Some(status) = &set.status else { return false };
    !is_behind(set, status) && progressing_reason(status) == Some(IN_TIME)
}

fn reported_cause(set: &CloneSet) -> Option<Cause> {
    if is_template_refused(set) {
        return Some(Cause::TemplateRefused(set.metadata.generation));
    }
    let status = set.status.as_ref()?;
    let deadline = u64::try_from(set.spec.progress_deadline_seconds?).ok()?;
    let exceeded = !is_behind(set, status) && progressing_reason(status) == Some(DEADLINE_EXCEEDED);
    exceeded.then(|| Cause::DeadlineExceeded(status.update_revision.clone(), Duration::from_secs(deadline)))
}

fn failure_text(set: &CloneSet, cause: &Cause, line: &str) -> String {
    let name = set.metadata.name.as_deref().unwrap_or_default();
    match cause {
        Cause::TemplateRefused(_) => format!("cloneset {name:?} is not updated: {line}"),
        Cause::DeadlineExceeded(..) => format!("cloneset {name:?} exceeded its progress deadline: {line}"),
    }
}

/// What the rollout waits for, or its result.
fn clone_set_line(set: &CloneSet) -> RolloutProgress {
    let name = set.metadata.name.as_deref().unwrap_or_default();
    let status = set.status.clone().unwrap_or_default();
    let waiting = find_true_of_clone_set(&status.conditions, WAITING);
    if is_behind(set, &status) {
        return in_progress("Waiting for the spec of the CloneSet to be observed...", waiting);
    }
    let desired = set.spec.desired_replicas();
    let expected = status.expected_updated_replicas.unwrap_or(desired);
    let available = status
        .updated_available_replicas
        .unwrap_or(status.updated_ready_replicas);
    let updated = status.updated_replicas;
    let paused = set.spec.rolling_update().is_some_and(|update| update.paused);
    let strategy = set.spec.update_strategy.as_ref();
    let on_delete =
        strategy.is_some_and(|strategy| strategy.type_ == Some(CloneSetUpdateStrategyType::OnDelete));
    let text = if updated < expected && on_delete {
        return RolloutProgress::Complete(format!(
            "cloneset {name:?} updates only Pods that are deleted: {updated} of {expected} Pods have been updated"
        ));
    } else if updated < expected && paused {
        format!("The rollout is paused: {updated} of {expected} Pods have been updated.")
    } else if updated < expected {
        format!("Waiting for rollout to finish: {updated} out of {expected} new Pods have been updated...")
    } else if status.replicas > desired {
        let old = status.replicas - desired;
        format!("Waiting for rollout to finish: {old} old Pods are pending termination...")
    } else if available < expected {
        format!("Waiting for rollout to finish: {available} of {expected} updated Pods are available...")
    } else if expected < desired {
        return RolloutProgress::Complete(format!(
            "partitioned roll out complete: {updated} new Pods have been updated..."
        ));
    } else if status.replicas < desired {
        format!(
            "Waiting for rollout to finish: {} of {desired} Pods exist...",
            status.replicas
        )
    } else {
        return RolloutProgress::Complete(format!("cloneset {name:?} successfully rolled out"));
    };
    in_progress(&text, waiting)
}

fn in_progress(text: &str, waiting: Option<ConditionText<'_>>) -> RolloutProgress {
    RolloutProgress::InProgress(match waiting {
        Some(waiting) => format!("{text} {}: {}", waiting.reason, waiting.message),
        None => text.to_owned(),
    })
}

/// How far the update of the Pods of a SidecarSet is.
pub fn sidecar_set_progress(set: &SidecarSet) -> RolloutProgress {
    let name = set.metadata.name.as_deref().unwrap_or_default();
    let status = set.status.clone().unwrap_or_default();
    let waiting = find_true(&status.conditions, WAITING);
    if status.observed_generation < set.metadata.generation {
        return in_progress(
            "Waiting for the spec of the SidecarSet to be observed...",
            waiting,
        );
    }
    let strategy = set.spec.update_strategy.clone().unwrap_or_default();
    let (matched, updated, ready) = (
        status.matched_pods,
        status.updated_pods,
        status.updated_ready_pods,
    );
    // These reasons come last, so that the rollout waits for nothing else.
    let held_by_user = waiting.is_some_and(|waiting| ["Partition", "NotSelected"].contains(&waiting.reason));
    let total = usize::try_from(matched).unwrap_or_default();
    let kept = i32::try_from(partition(strategy.partition.as_ref(), total)).unwrap_or(i32::MAX);
    let expected = matched.saturating_sub(kept);
    let text = if updated >= matched && ready >= updated {
        return RolloutProgress::Complete(format!("sidecarset {name:?} successfully rolled out"));
    } else if updated >= matched {
        format!("Waiting for rollout to finish: {ready} of {updated} updated Pods are ready...")
    } else if strategy.type_ == Some(SidecarSetUpdateStrategyType::NotUpdate) {
        return RolloutProgress::Complete(format!(
            "sidecarset {name:?} does not update Pods: {updated} of {matched} Pods have its current containers"
        ));
    } else if strategy.paused {
        format!("The rollout is paused: {updated} of {matched} Pods have been updated.")
    } else if (held_by_user || updated >= expected) && ready >= updated {
        return RolloutProgress::Complete(format!(
            "partitioned roll out complete: {updated} of {matched} Pods have been updated..."
        ));
    } else {
        format!("Waiting for rollout to finish: {updated} out of {matched} Pods have been updated...")
    };
    in_progress(&text, waiting)
}

/// The revisions of a workload. Its JSON is the output of `rollout history -o json`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// Kind of the workload.
    pub kind: &'static str,
    /// Its namespace; empty if the kind has none.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The oldest first.
    pub revisions: Vec<HistoryEntry>,
}

/// A revision.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryEntry {
    /// Its number.
    pub revision: i64,
    /// Name of the ControllerRevision.
    pub name: String,
    /// When it was created.
    pub creation_timestamp: Option<Timestamp>,
    /// Images of its containers.
    pub images: Vec<String>,
    /// Whether new Pods get it.
    pub update_revision: bool,
    /// Whether all Pods had it when the last rollout completed.
    pub current_revision: bool,
    /// Annotation `kubernetes.io/change-cause`.
    pub change_cause: String,
    /// The content of the ControllerRevision.
    #[serde(skip)]
    pub data: String,
    /// Label with the version that a SidecarSet's author gave it.
    #[serde(skip)]
    pub custom_version: Option<String>,
}

/// The revisions that the workload controls, as the manager sees it, the oldest first.
pub fn history(
    objects: &[ControllerRevision],
    workload: &Owner,
    update: &str,
    current: &str,
) -> Vec<HistoryEntry> {
    let owned = objects
        .iter()
        .filter(|object| Owner::controller(&object.metadata).as_ref() == Some(workload));
    let mut entries: Vec<HistoryEntry> = owned.map(|object| entry(object, update, current)).collect();
    entries.sort_by(|one, other| {
        let key = |entry: &HistoryEntry| (entry.revision, entry.creation_timestamp, entry.name.clone());
        key(one).cmp(&key(other))
    });
    entries
}

fn entry(object: &ControllerRevision, update: &str, current: &str) -> HistoryEntry {
    let revision = Revision::from(object);
    let annotations = object.metadata.annotations.as_ref();
    let change_cause = annotations.and_then(|annotations| annotations.get(CHANGE_CAUSE).cloned());
    HistoryEntry {
        revision: revision.number,
        creation_timestamp: revision.created.map(|time| time.0),
        images: object
            .data
            .as_ref()
            .map(|data| images(&data.0))
            .unwrap_or_default(),
        update_revision: revision.name == update,
        current_revision: revision.name == current,
        change_cause: change_cause.unwrap_or_default(),
        custom_version: revision.labels.get(keys::SIDECAR_SET_CUSTOM_VERSION).cloned(),
        name: revision.name,
        data: revision.data,
    }
}

/// The images in the data of a revision, of a CloneSet or a SidecarSet.
fn images(data: &Value) -> Vec<String> {
    let places = [
        "/spec/template/spec/initContainers",
        "/spec/template/spec/containers",
        "/spec/initContainers",
        "/spec/containers",
    ];
    let containers = places
        .iter()
        .filter_map(|place| data.pointer(place)?.as_array())
        .flatten();
    containers
        .filter_map(|container| Some(container.get("image")?.as_str()?.to_owned()))
        .collect()
}

/// What `undo` does.
#[derive(Debug)]
pub enum Undo<'a> {
    /// Restore this revision.
    Restore(&'a HistoryEntry),
    /// It is the newest already.
    Skip(i64),
    /// With the reason.
    Refuse(String),
}

/// What `undo` does, to that revision or, if `to` is 0, to the one before the newest. That is the last accepted one if
/// the newest template `is_refused`: it is in no revision.
pub fn undo(entries: &[HistoryEntry], to: i64, is_refused: bool) -> Undo<'_> {
    let newest = entries
        .iter()
        .find(|entry| entry.update_revision)
        .or(entries.last());
    let Some(newest) = newest else {
        return Undo::Refuse("no rollout history found".to_owned());
    };
    if to == 0 && is_refused {
        return Undo::Restore(newest);
    }
    if to == 0 {
        let older = entries
            .iter()
            .rev()
            .find(|entry| entry.revision < newest.revision);
        return older.map_or_else(
            || Undo::Refuse("no previous revision found in the rollout history".to_owned()),
            Undo::Restore,
        );
    }
    match entries.iter().rev().find(|entry| entry.revision == to) {
        Some(entry) if entry.name == newest.name && !is_refused => Undo::Skip(to),
        Some(entry) => Undo::Restore(entry),
        None => Undo::Refuse(format!("unable to find specified revision {to} in history")),
    }
}

/// A patch applies only to the object that was read: another one is a conflict. The operation `test` would be refused as
/// an invalid request, without a reason.
fn preconditions(uid: &str, version: &str) -> Vec<Value> {
    vec![
        json!({ "op": "replace", "path": "/metadata/uid", "value": uid }),
        json!({ "op": "replace", "path": "/metadata/resourceVersion", "value": version }),
    ]
}

/// The JSON patch that restores the template of a revision; `None` if its data is no template.
pub fn restore_clone_set(entry: &HistoryEntry, uid: &str, version: &str) -> Option<Value> {
    let template = decode_template(&entry.data)?;
    let mut patch = preconditions(uid, version);
    patch.push(json!({ "op": "replace", "path": "/spec/template", "value": without_go_fields(template) }));
    Some(Value::Array(patch))
}

/// The template without nulls, which stand for fields that are absent and are written by Go alone, provided that it
/// has the same revision.
fn without_go_fields(template: Value) -> Value {
    let mut reduced = template.clone();
    remove_nulls(&mut reduced);
    if encode_template(&reduced) == encode_template(&template) {
        reduced
    } else {
        template
    }
}

/// The same for what a revision holds of a SidecarSet, whose webhook adds no empty `resources` either.
fn without_go_spec_fields(mut spec: Value) -> Value {
    remove_nulls(&mut spec);
    let encoded = |spec: &Value| {
        SidecarSetSpec::deserialize(spec)
            .ok()
            .map(|spec| encode_spec(&spec))
    };
    let mut reduced = spec.clone();
    for list in ["containers", "initContainers"] {
        let containers = reduced.get_mut(list).and_then(Value::as_array_mut);
        for fields in containers.into_iter().flatten().filter_map(Value::as_object_mut) {
            fields.retain(|name, field| name != "resources" || *field != json!({}));
        }
    }
    if encoded(&reduced) == encoded(&spec) {
        reduced
    } else {
        spec
    }
}

fn remove_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(remove_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

/// The JSON patch that restores what a revision holds of a SidecarSet; `None` if its data is no spec.
pub fn restore_sidecar_set(entry: &HistoryEntry, spec: &Value, uid: &str, version: &str) -> Option<Value> {
    let data: Value = serde_json::from_str(&entry.data).ok()?;
    let restored = without_go_spec_fields(data.get("spec").filter(|spec| spec.is_object())?.clone());
    let mut patch = preconditions(uid, version);
    let custom_version = entry.custom_version.as_ref().map(|version| json!(version));
    let fields = SIDECAR_SET_FIELDS.map(|field| (field, restored.get(field).cloned()));
    for (field, value) in fields.into_iter().chain([("customVersion", custom_version)]) {
        let path = format!("/spec/{field}");
        match value {
            Some(value) => patch.push(json!({ "op": "add", "path": path, "value": value })),
            None if spec.get(field).is_some() => patch.push(json!({ "op": "remove", "path": path })),
            None => {}
        }
    }
    Some(Value::Array(patch))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use kruise_api::owner::OwnerKind;
    use proptest::prelude::*;

    fn clone_set(paused: bool, status: Value) -> CloneSet {
        serde_json::from_value(json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
            "metadata": { "name": "web", "generation": 2 },
            "spec": { "replicas": 3, "selector": {}, "template": {},
                "updateStrategy": { "rollingUpdate": { "paused": paused } } },
            "status": status,
        }))
        .unwrap()
    }

    fn counts(replicas: i32, updated: i32, available: i32, expected: i32) -> Value {
        json!({ "observedGeneration": 2, "replicas": replicas, "readyReplicas": replicas,
            "availableReplicas": replicas, "updatedReplicas": updated, "updatedReadyReplicas": available,
            "updatedAvailableReplicas": available, "expectedUpdatedReplicas": expected })
    }

    #[test]
    fn rollout_of_a_clone_set_is_complete_when_its_pods_are_available() {
        let text = |paused, status| match clone_set_progress(&clone_set(paused, status)) {
            RolloutProgress::InProgress(text) => format!("... {text}"),
            RolloutProgress::Complete(text) => format!("done {text}"),
            RolloutProgress::Failed(text) => format!("FAILED {text}"),
            RolloutProgress::Failing { line, .. } => format!("failing {line}"),
        };
        assert_eq!(
            text(false, counts(3, 3, 3, 3)),
            "done cloneset \"web\" successfully rolled out"
        );
        assert!(text(false, counts(3, 1, 1, 1)).starts_with("done partitioned roll out complete: 1 "));
        assert!(text(false, counts(3, 1, 1, 3)).contains("1 out of 3 new Pods"));
        assert!(text(false, counts(4, 3, 3, 3)).contains("1 old Pods are pending termination"));
        assert!(text(false, counts(3, 3, 2, 3)).contains("2 of 3 updated Pods are available"));
        assert!(text(true, counts(3, 1, 1, 3)).contains("... The rollout is paused: 1 of 3"));
        assert!(text(false, Value::Null).contains("to be observed"));
        let mut late = counts(3, 1, 1, 3);
        late["conditions"] =
            json!([{ "type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded" }]);
        assert!(text(false, late.clone()).starts_with("... Waiting for rollout"));
        late["conditions"] = json!([waiting("PodNotReady", "web-1")]);
        assert!(text(false, late.clone()).ends_with("updated... PodNotReady: web-1"));
        late["observedGeneration"] = json!(1);
        assert!(text(false, late.clone()).ends_with("to be observed... PodNotReady: web-1"));
        late["conditions"] = json!([waiting("TemplateRefused", "no such field")]);
        assert_eq!(
            text(false, late),
            "FAILED cloneset \"web\" is not updated: Waiting for the spec of the CloneSet to be observed... \
             TemplateRefused: no such field"
        );
    }

    fn waiting(reason: &str, message: &str) -> Value {
        json!({ "type": "Waiting", "status": "True", "reason": reason, "message": message })
    }

    /// Observes a CloneSet with a deadline of 60 s at each second with such a reason of condition Progressing, update
    /// revision and `observedGeneration`; returns when it has failed.
    fn failed_at(observations: &[(u64, &str, &str, i64)]) -> Option<u64> {
        let mut rollout = CloneSetRollout::default();
        let mut fails_at = None;
        for (second, reason, revision, observed) in observations {
            let mut status = counts(3, 1, 1, 3);
            status["observedGeneration"] = json!(observed);
            status["updateRevision"] = json!(revision);
            let conditions = match *reason {
                "TemplateRefused" => json!([waiting(reason, "no such field")]),
                reason => json!([{ "type": "Progressing", "status": "False", "reason": reason }]),
            };
            status["conditions"] = conditions;
            let mut set = clone_set(false, status);
            set.spec.progress_deadline_seconds = Some(60);
            fails_at = match rollout.observe(&set, Duration::from_secs(*second)) {
                RolloutProgress::Failed(_) => return Some(*second),
                RolloutProgress::Failing { at, .. } => Some(at.as_secs()),
                _ => None,
            };
        }
        fails_at
    }

    /// It is set from the first moment of a rollout that begins long after the last one.
    #[test]
    fn exceeded_deadline_counts_from_the_first_observation() {
        const EXCEEDED: &str = DEADLINE_EXCEEDED;
        assert_eq!(failed_at(&[(0, EXCEEDED, "a", 2)]), Some(60));
        assert_eq!(
            failed_at(&[(5, "CloneSetAvailable", "a", 1), (6, EXCEEDED, "b", 2)]),
            Some(66)
        );
        assert_eq!(
            failed_at(&[(0, EXCEEDED, "a", 2), (40, EXCEEDED, "a", 2)]),
            Some(60)
        );
        assert_eq!(
            failed_at(&[(0, EXCEEDED, "a", 2), (70, EXCEEDED, "a", 2)]),
            Some(70)
        );
        // The next rollout has a deadline of its own.
        assert_eq!(
            failed_at(&[(0, EXCEEDED, "a", 2), (40, EXCEEDED, "b", 2)]),
            Some(100)
        );
        assert_eq!(
            failed_at(&[(0, EXCEEDED, "a", 2), (10, "CloneSetPaused", "a", 2)]),
            None
        );
    }

    #[test]
    fn deadline_that_is_exceeded_while_it_is_observed_is_a_failure() {
        let observed = [(0, IN_TIME, "a", 2), (9, DEADLINE_EXCEEDED, "a", 2)];
        assert_eq!(failed_at(&observed), Some(9));
        // While a template is refused, the condition is of the rollout before.
        let behind = [(0, IN_TIME, "a", 1), (9, DEADLINE_EXCEEDED, "a", 2)];
        assert_eq!(failed_at(&behind), Some(69));
    }

    /// The condition may be about the spec before the newest.
    #[test]
    fn refused_template_is_a_failure_after_a_moment() {
        assert_eq!(failed_at(&[(3, TEMPLATE_REFUSED, "a", 1)]), Some(13));
        assert_eq!(
            failed_at(&[(3, TEMPLATE_REFUSED, "a", 1), (20, TEMPLATE_REFUSED, "a", 1)]),
            Some(20)
        );
        assert_eq!(
            failed_at(&[(3, TEMPLATE_REFUSED, "a", 1), (4, IN_TIME, "b", 2)]),
            None
        );
    }

    /// The user decides when its Pods are updated.
    #[test]
    fn rollout_on_delete_does_not_wait_for_deletions() {
        let progress = |status: Value| {
            let mut set = clone_set(true, status);
            let strategy = set.spec.update_strategy.get_or_insert_default();
            strategy.type_ = Some(CloneSetUpdateStrategyType::OnDelete);
            clone_set_progress(&set)
        };
        let text = "cloneset \"web\" updates only Pods that are deleted: 1 of 3 Pods have been updated";
        assert_eq!(
            progress(counts(3, 1, 0, 3)),
            RolloutProgress::Complete(text.to_owned())
        );
        let waits = |progress| matches!(progress, RolloutProgress::InProgress(_));
        assert!(waits(progress(Value::Null)));
        assert!(waits(progress(counts(3, 3, 2, 3))));
        assert!(!waits(progress(counts(3, 3, 3, 3))));
    }

    #[test]
    fn rollout_of_a_sidecar_set_counts_matched_pods() {
        let set = |strategy: Value, updated: i32, ready: i32| {
            let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet",
                "metadata": { "name": "log" }, "spec": { "updateStrategy": strategy },
                "status": { "matchedPods": 3, "updatedPods": updated, "updatedReadyPods": ready, "readyPods": 3 } });
            sidecar_set_progress(&serde_json::from_value(object).unwrap())
        };
        let done = |progress: &RolloutProgress| matches!(progress, RolloutProgress::Complete(_));
        assert!(done(&set(json!({}), 3, 3)));
        assert!(!done(&set(json!({}), 3, 2)));
        assert!(!done(&set(json!({}), 1, 1)));
        assert!(done(&set(json!({ "partition": 2 }), 1, 1)));
        assert!(done(&set(json!({ "type": "NotUpdate" }), 1, 1)));
        assert!(!done(&set(json!({ "paused": true }), 1, 1)));
    }

    fn revision(name: &str, number: i64, uid: &str, template: &Value) -> ControllerRevision {
        serde_json::from_value(json!({
            "metadata": { "name": name, "creationTimestamp": "2026-01-01T00:00:00Z",
                "annotations": { CHANGE_CAUSE: "because" },
                "ownerReferences": [{ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "web",
                    "uid": uid, "controller": true }] },
            "revision": number,
            "data": serde_json::from_str::<Value>(&encode_template(template)).unwrap(),
        }))
        .unwrap()
    }

    fn template(image: &str) -> Value {
        json!({ "metadata": { "labels": { "app": "web" } },
            "spec": { "containers": [{ "name": "app", "image": image, "resources": {} }] } })
    }

    fn three() -> Vec<HistoryEntry> {
        let objects = [
            revision("web-c", 3, "u", &template("c")),
            revision("web-a", 1, "u", &template("a")),
            revision("other", 9, "v", &template("x")),
            revision("web-b", 2, "u", &template("b")),
        ];
        history(&objects, &web(), "web-c", "web-b")
    }

    fn web() -> Owner {
        Owner {
            kind: OwnerKind::CloneSet,
            name: "web".to_owned(),
            uid: "u".to_owned(),
        }
    }

    #[test]
    fn history_has_the_revisions_of_the_workload_in_order() {
        let entries = three();
        let found: Vec<_> = entries.iter().map(|e| (e.revision, &*e.images[0])).collect();
        assert_eq!(found, [(1, "a"), (2, "b"), (3, "c")]);
        assert!(entries[2].update_revision && entries[1].current_revision && !entries[0].current_revision);
        assert_eq!(entries[0].change_cause, "because");
    }

    /// A reference that the manager does not take for one to the CloneSet does not make a revision one of its own.
    #[test]
    fn forged_revision_is_not_in_the_history() {
        let forged = [
            ("apiVersion", "apps.kruise.io/v9"),
            ("apiVersion", "example.com/v1beta1"),
            ("kind", "SidecarSet"),
            ("name", "other"),
        ];
        for (field, value) in forged {
            let mut object = serde_json::to_value(revision("web-d", 4, "u", &template("d"))).unwrap();
            object["metadata"]["ownerReferences"][0][field] = json!(value);
            let objects = [
                revision("web-c", 3, "u", &template("c")),
                serde_json::from_value(object).unwrap(),
            ];
            let names: Vec<_> = history(&objects, &web(), "web-c", "")
                .into_iter()
                .map(|e| e.name)
                .collect();
            assert_eq!(names, ["web-c"], "{field} {value}");
        }
    }

    /// The names that the manual lists, for programs.
    #[test]
    fn document_has_the_names_of_the_manual() {
        let history = History {
            kind: "CloneSet",
            namespace: "n".into(),
            name: "web".into(),
            revisions: vec![three().remove(2)],
        };
        let revision = json!({ "revision": 3, "name": "web-c", "creationTimestamp": "2026-01-01T00:00:00Z",
            "images": ["c"], "updateRevision": true, "currentRevision": false, "changeCause": "because" });
        assert_eq!(
            serde_json::to_value(history).unwrap(),
            json!({ "kind": "CloneSet", "namespace": "n", "name": "web", "revisions": [revision] })
        );
    }

    #[test]
    fn undo_goes_to_the_revision_before_the_newest() {
        let entries = three();
        let restored = |to: i64| match undo(&entries, to, false) {
            Undo::Restore(entry) => entry.name.clone(),
            Undo::Skip(number) => format!("skip {number}"),
            Undo::Refuse(why) => why,
        };
        assert_eq!(restored(0), "web-b");
        assert_eq!(restored(1), "web-a");
        assert_eq!(restored(3), "skip 3");
        assert_eq!(restored(9), "unable to find specified revision 9 in history");
        assert!(matches!(undo(&entries[..1], 0, false), Undo::Refuse(_)));
        assert!(matches!(undo(&[], 0, false), Undo::Refuse(_)));
    }

    /// Its template is in no revision, so that the update revision is the one before.
    #[test]
    fn undo_of_a_refused_template_goes_to_the_last_accepted_one() {
        let entries = three();
        let restored = |to: i64| match undo(&entries, to, true) {
            Undo::Restore(entry) => entry.name.clone(),
            other => format!("{other:?}"),
        };
        assert_eq!(restored(0), "web-c");
        assert_eq!(restored(3), "web-c");
        assert_eq!(restored(2), "web-b");
    }

    #[test]
    fn restored_template_is_the_one_of_the_revision() {
        let patch = restore_clone_set(&three()[0], "u", "7").unwrap();
        assert_eq!(
            patch,
            json!([
                { "op": "replace", "path": "/metadata/uid", "value": "u" },
                { "op": "replace", "path": "/metadata/resourceVersion", "value": "7" },
                { "op": "replace", "path": "/spec/template", "value": template("a") },
            ])
        );
    }

    #[test]
    fn restored_sidecar_set_loses_what_the_revision_lacks() {
        let mut entry = three().remove(0);
        entry.data = json!({ "spec": { "$patch": "replace", "volumes": null,
            "containers": [{ "name": "c", "resources": {} }] } })
        .to_string();
        let spec = json!({ "containers": [], "volumes": [{}], "customVersion": "2", "selector": {} });
        let patch = restore_sidecar_set(&entry, &spec, "u", "7").unwrap();
        let changes: Vec<_> = patch.as_array().unwrap()[2..]
            .iter()
            .map(|step| (step["op"].as_str().unwrap(), step["path"].as_str().unwrap()))
            .collect();
        let expected = [
            ("add", "/spec/containers"),
            ("remove", "/spec/volumes"),
            ("remove", "/spec/customVersion"),
        ];
        assert_eq!(changes, expected);
        assert_eq!(patch[2]["value"], json!([{ "name": "c" }]));
        entry.data = "[]".into();
        assert_eq!(restore_sidecar_set(&entry, &spec, "u", "7"), None);
    }

    proptest! {
        /// Whatever the revisions: undo restores one of them, and never the newest.
        #[test]
        fn undo_never_restores_the_newest(numbers in prop::collection::vec(1_i64..6, 0..6), to in 0_i64..7) {
            let objects: Vec<ControllerRevision> = numbers
                .iter()
                .enumerate()
                .map(|(i, number)| revision(&format!("web-{i}"), *number, "u", &template("a")))
                .collect();
            let entries = history(&objects, &web(), "", "");
            if let Undo::Restore(entry) = undo(&entries, to, false) {
                prop_assert_ne!(&entry.name, &entries.last().unwrap().name);
                prop_assert!(to == 0 || entry.revision == to);
            }
        }
    }
}
