//! How far a rollout is, which revisions there are, and the patches that control it.

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::cloneset::{CloneSet, CloneSetUpdateStrategyType};
use kruise_api::image_pull_job::WAITING;
use kruise_api::keys;
use kruise_api::owner::Owner;
use kruise_api::sidecarset::{SidecarSet, SidecarSetSpec, SidecarSetUpdateStrategyType};
use kruise_workload::revision::{Revision, decode_template, encode_template};
use kruise_workload::sidecarset::history::encode_spec;
use kruise_workload::sidecarset::limits::partition;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::conditions::{find_true, find_true_of_clone_set};

/// Annotation with the cause of a change, which kubectl shows.
const CHANGE_CAUSE: &str = "kubernetes.io/change-cause";
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
    /// With the result.
    Complete(String),
    /// With the reason.
    Failed(String),
}

/// How far the rollout of a CloneSet is.
pub fn clone_set_progress(set: &CloneSet) -> RolloutProgress {
    let name = set.metadata.name.as_deref().unwrap_or_default();
    let status = set.status.clone().unwrap_or_default();
    if status.observed_generation < set.metadata.generation {
        return RolloutProgress::InProgress(
            "Waiting for the spec of the CloneSet to be observed...".to_owned(),
        );
    }
    let desired = set.spec.desired_replicas();
    let expected = status.expected_updated_replicas.unwrap_or(desired);
    let available = status
        .updated_available_replicas
        .unwrap_or(status.updated_ready_replicas);
    let updated = status.updated_replicas;
    let paused = set.spec.rolling_update().is_some_and(|update| update.paused);
    let waiting = find_true_of_clone_set(&status.conditions, WAITING);
    let late = status
        .conditions
        .iter()
        .any(|condition| condition.type_ == "Progressing" && condition.reason == "ProgressDeadlineExceeded");
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
    if late {
        return RolloutProgress::Failed(format!(
            "cloneset {name:?} exceeded its progress deadline: {text}"
        ));
    }
    RolloutProgress::InProgress(match waiting {
        Some(waiting) => format!("{text} {}: {}", waiting.reason, waiting.message),
        None => text,
    })
}

/// How far the update of the Pods of a SidecarSet is.
pub fn sidecar_set_progress(set: &SidecarSet) -> RolloutProgress {
    let name = set.metadata.name.as_deref().unwrap_or_default();
    let status = set.status.clone().unwrap_or_default();
    if status.observed_generation < set.metadata.generation {
        return RolloutProgress::InProgress(
            "Waiting for the spec of the SidecarSet to be observed...".to_owned(),
        );
    }
    let strategy = set.spec.update_strategy.clone().unwrap_or_default();
    let (matched, updated, ready) = (
        status.matched_pods,
        status.updated_pods,
        status.updated_ready_pods,
    );
    let waiting = find_true(&status.conditions, WAITING);
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
    RolloutProgress::InProgress(match waiting {
        Some(waiting) => format!("{text} {}: {}", waiting.reason, waiting.message),
        None => text,
    })
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

/// What `undo` does, to that revision or to the one before the newest, if `to` is 0.
pub fn undo(entries: &[HistoryEntry], to: i64) -> Undo<'_> {
    let newest = entries
        .iter()
        .find(|entry| entry.update_revision)
        .or(entries.last());
    let Some(newest) = newest else {
        return Undo::Refuse("no rollout history found".to_owned());
    };
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
        Some(entry) if entry.name == newest.name => Undo::Skip(to),
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
        assert!(text(false, late.clone()).starts_with("FAILED cloneset \"web\" exceeded"));
        late["conditions"] =
            json!([{ "type": "Waiting", "status": "True", "reason": "PodNotReady", "message": "web-1" }]);
        assert!(text(false, late).ends_with("updated... PodNotReady: web-1"));
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

    #[test]
    fn undo_goes_to_the_revision_before_the_newest() {
        let entries = three();
        let restored = |to: i64| match undo(&entries, to) {
            Undo::Restore(entry) => entry.name.clone(),
            Undo::Skip(number) => format!("skip {number}"),
            Undo::Refuse(why) => why,
        };
        assert_eq!(restored(0), "web-b");
        assert_eq!(restored(1), "web-a");
        assert_eq!(restored(3), "skip 3");
        assert_eq!(restored(9), "unable to find specified revision 9 in history");
        assert!(matches!(undo(&entries[..1], 0), Undo::Refuse(_)));
        assert!(matches!(undo(&[], 0), Undo::Refuse(_)));
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
            if let Undo::Restore(entry) = undo(&entries, to) {
                prop_assert_ne!(&entry.name, &entries.last().unwrap().name);
                prop_assert!(to == 0 || entry.revision == to);
            }
        }
    }
}
