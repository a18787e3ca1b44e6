//! The patches of an in-place update. They are minimal, so that fields unknown to us are kept.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Map, Value, json};

use super::pod::Pod;
use super::spec::{Spec, decode_patch};
use super::template::Template;
use super::write::{PatchTarget, PodWrite, json_text};
use super::{annotations, completion, container_batches, ready, resize};
use kruise_api::in_place::{
    ContainerRefMetadata, InPlaceUpdateContainerBatch, InPlaceUpdateContainerStatus,
    InPlaceUpdatePreCheckBeforeNext, InPlaceUpdateState,
};
use kruise_api::json::set;
use kruise_api::keys;

/// Whether the update is complete with its patch, without waiting.
#[must_use]
pub fn completes_immediately(pod: &Pod, spec: &Spec, template: Template<'_>) -> bool {
    let (before, spec) = merge_unfinished(pod, spec, template);
    let resizes = before.update_resources || !spec.container_resources.is_empty();
    !(restarts_containers(pod, &spec) || has_unverified_containers(&before) || resizes)
}

/// Whether an earlier update left containers that must still be replaced.
fn has_unverified_containers(before: &InPlaceUpdateState) -> bool {
    before.update_env_from_metadata || !before.last_container_statuses.is_empty()
}

/// Whether `spec` restarts a container, so that the Pod must be out of its Services meanwhile. Metadata alone restarts
/// none, nor do resources that change while the container runs.
fn restarts_containers(pod: &Pod, spec: &Spec) -> bool {
    let restarts = |(name, resources): (&String, &k8s_openapi::api::core::v1::ResourceRequirements)| {
        let changed = resources
            .limits
            .iter()
            .chain(&resources.requests)
            .flat_map(|map| map.keys());
        let changed: Vec<&String> = changed.collect();
        let container = pod.containers.iter().find(|c| c.name == *name);
        container.is_some_and(|c| c.restart_resources.iter().any(|r| changed.contains(&r)))
    };
    spec.update_env_from_metadata
        || !spec.container_images.is_empty()
        || spec.container_resources.iter().any(restarts)
}

/// The same for `spec` together with the rest of an incomplete update.
pub(super) fn disrupts(pod: &Pod, spec: &Spec, template: Template<'_>) -> bool {
    let (before, spec) = merge_unfinished(pod, spec, template);
    restarts_containers(pod, &spec) || has_unverified_containers(&before)
}

/// Names of the containers that read a label or annotation which the update changes or removes.
#[must_use]
pub fn env_readers<'a>(pod: &'a Pod, spec: &'a Spec) -> BTreeSet<&'a str> {
    let mut readers = container_batches::readers_of_removed(pod, spec);
    readers.extend(spec.container_ref_metadata.keys().map(String::as_str));
    readers
}

/// Begins an update: takes the Pod out of its Services if needed, then changes it or writes what it waits for. If the
/// resize is refused, the fallback writes the rest of the update.
///
/// `template` is that of the revision to which `spec` leads. `labels` and `annotations` of the revision and the
/// lifecycle are written with the change.
#[must_use]
pub fn begin(
    pod: &Pod,
    spec: &Spec,
    template: Template<'_>,
    labels: &Map<String, Value>,
    annotations: &Map<String, Value>,
    now: Timestamp,
) -> Vec<PodWrite> {
    let (before, spec) = merge_unfinished(pod, spec, template);
    let disrupts = restarts_containers(pod, &spec) || has_unverified_containers(&before);
    let build = |spec: &Spec, deferred_sizes: Option<String>| {
        let mut state = InPlaceUpdateState {
            revision: spec.revision.clone(),
            update_timestamp: Some(whole_seconds(now)),
            update_env_from_metadata: spec.update_env_from_metadata || before.update_env_from_metadata,
            update_images: !spec.container_images.is_empty() || before.update_images,
            update_resources: !spec.container_resources.is_empty() || before.update_resources,
            last_container_statuses: before.last_container_statuses.clone(),
            ..InPlaceUpdateState::default()
        };
        let mut patch = json!({ "metadata": { "labels": labels, "annotations": annotations } });
        let mut resize = None;
        if disrupts && spec.grace_seconds > 0 {
            annotate(
                pod,
                &mut patch,
                keys::IN_PLACE_UPDATE_GRACE,
                Some(&json_text(spec)),
            );
        } else {
            remove_grace(pod, &mut patch);
            resize = apply_first_batch(pod, spec, template, &mut state, &mut patch, now);
        }
        if deferred_sizes.is_some() || resize.is_some() || resize::has_resize_annotation(pod) {
            set(
                &mut patch,
                &["metadata", "annotations", keys::IN_PLACE_UPDATE_RESIZING],
                json!(deferred_sizes),
            );
        }
        (resize, with_state_annotation(pod, patch, &state))
    };
    let (resize, mut last) = build(&spec, None);
    if disrupts && spec.grace_seconds > 0 {
        let (grace_seconds, spec) = (0, spec.clone());
        let (_, after_grace) = build(
            &Spec {
                grace_seconds,
                ..spec
            },
            None,
        );
        last.dry_run = Some(Box::new(after_grace.patch));
    }
    let resize = resize.map(|resize| {
        let revision = labels.get(keys::CONTROLLER_REVISION_HASH).and_then(Value::as_str);
        let (without_resize, deferred_sizes) = resize::defer_resize(pod, &spec, revision);
        resize.with_fallback(build(&without_resize, Some(deferred_sizes)).1)
    });
    let mut writes: Vec<PodWrite> = prepare_write(pod, disrupts, resize.as_ref(), now)
        .into_iter()
        .collect();
    writes.extend(resize);
    writes.push(last);
    writes
}

/// Writes before an update: take the Pod out of its Services if it is disrupted, and announce a resize.
fn prepare_write(pod: &Pod, disrupts: bool, resize: Option<&PodWrite>, now: Timestamp) -> Option<PodWrite> {
    let mut patch = json!({});
    let conditions = if disrupts {
        ready::not_ready_conditions(pod, now)
    } else {
        Vec::new()
    };
    if !conditions.is_empty() {
        set(&mut patch, &["status", "conditions"], Value::Array(conditions));
    }
    let annotation = resize.map(|resize| resize::resize_annotation(pod, resize));
    if annotation.is_some() && annotation.as_ref() != pod.annotations.get(keys::IN_PLACE_UPDATE_RESIZING) {
        set(
            &mut patch,
            &["metadata", "annotations", keys::IN_PLACE_UPDATE_RESIZING],
            json!(annotation),
        );
    }
    (patch != json!({})).then(|| PodWrite::new(PatchTarget::Status, pod, patch))
}

/// The change of the Pod together with the state of its update.
///
/// If an update supersedes another, its proof includes that kubelet has seen a generation after the recorded one. So
/// the recorded one must be the Pod's: the patch is refused if another writer changed the Pod first.
fn with_state_annotation(pod: &Pod, mut patch: Value, state: &InPlaceUpdateState) -> PodWrite {
    annotate(
        pod,
        &mut patch,
        keys::IN_PLACE_UPDATE_STATE,
        Some(&json_text(state)),
    );
    let write = PodWrite::new(PatchTarget::Pod, pod, patch);
    let mut records = state.last_container_statuses.values();
    if records.any(|record| record.superseded) {
        write.with_resource_version(pod)
    } else {
        write
    }
}

/// What an incomplete update leaves to the next one: the records of containers that must still be replaced, what is not
/// proven yet and, unless the new spec overrides them, the pending batches and the change that waits for its grace
/// period; also the size from before resizes that were not recorded. All values are those of `template`.
fn merge_unfinished(pod: &Pod, spec: &Spec, template: Template<'_>) -> (InPlaceUpdateState, Spec) {
    let mut spec = spec.clone();
    let mut unfinished = InPlaceUpdateState::default();
    let before = annotations::update_state(pod).ok().flatten();
    if let Some(before) = before
        .as_ref()
        .filter(|before| annotations::has_next_batches(before))
    {
        let next = next_batches(before);
        insert_missing(&mut spec.container_images, next.container_images);
        insert_missing(&mut spec.container_ref_metadata, next.container_ref_metadata);
        resize::merge_sizes(&mut spec.container_resources, next.container_resources);
    }
    if let Some(grace) = annotations::grace_spec(pod).ok().flatten() {
        insert_missing(&mut spec.container_images, grace.container_images);
        insert_missing(&mut spec.container_ref_metadata, grace.container_ref_metadata);
        resize::merge_sizes(&mut spec.container_resources, grace.container_resources);
        spec.update_env_from_metadata |= grace.update_env_from_metadata;
        spec.meta_data_patch = merge_metadata_patches(spec.meta_data_patch, grace.meta_data_patch);
    }
    resize::merge_sizes(
        &mut spec.container_resources,
        resize::sizes_to_restore(pod, template),
    );
    let mut spec = template.with_template_values(spec);
    spec.update_env_from_metadata |= !spec.container_ref_metadata.is_empty();
    let Some(before) = before else {
        return (unfinished, spec);
    };
    if completion::check_containers(pod, &before).is_err() {
        unfinished.update_env_from_metadata = before.update_env_from_metadata;
        unfinished.update_resources = before.update_resources;
    }
    unfinished.last_container_statuses = before.last_container_statuses;
    if let Ok(meta) = completion::runtime_meta(pod) {
        unfinished
            .last_container_statuses
            .retain(|name, last| completion::check_replaced(pod, name, last, meta.as_ref()).is_err());
    }
    unfinished.update_images = !unfinished.last_container_statuses.is_empty();
    (unfinished, spec)
}

/// Adds the entries that `new` lacks.
fn insert_missing<T>(new: &mut BTreeMap<String, T>, others: BTreeMap<String, T>) {
    for (name, value) in others {
        new.entry(name).or_insert(value);
    }
}

/// Merges two metadata patches. `new` wins; its lists are sets of names.
fn merge_metadata_patches(new: Option<String>, old: Option<String>) -> Option<String> {
    let (Some(new), Some(old)) = (&new, &old) else {
        return new.or(old);
    };
    let (mut patch, new) = (decode_patch(old), decode_patch(new));
    for (part, new) in new["metadata"].as_object().into_iter().flatten() {
        match new {
            Value::Object(new) => {
                for (key, value) in new {
                    set(&mut patch, &["metadata", part, key], value.clone());
                }
            }
            Value::Array(new) => {
                let old = patch["metadata"][part].as_array().into_iter().flatten();
                let names = old.chain(new).filter_map(Value::as_str);
                let names = json!(names.collect::<BTreeSet<_>>());
                set(&mut patch, &["metadata", part], names);
            }
            _ => {}
        }
    }
    Some(STANDARD.encode(patch.to_string()))
}

/// Continues an update whose grace period is over or whose next batch is due, to the revision of `template`.
#[must_use]
pub fn continue_update(
    pod: &Pod,
    spec: Spec,
    template: Template<'_>,
    state: &InPlaceUpdateState,
    now: Timestamp,
) -> Vec<PodWrite> {
    let spec = template.with_template_values(spec);
    let build = |spec: &Spec, deferred_sizes: Option<String>| {
        let mut state = state.clone();
        let mut patch = json!({});
        remove_grace(pod, &mut patch);
        let resize = apply_first_batch(pod, spec, template, &mut state, &mut patch, now);
        state.update_resources |= resize.is_some();
        if deferred_sizes.is_some() || resize::has_resize_annotation(pod) {
            // The announced sizes are of another update; this resize is of the Pod's own revision.
            let annotation = deferred_sizes.or_else(|| resize::annotation_without(pod, resize.as_ref()));
            set(
                &mut patch,
                &["metadata", "annotations", keys::IN_PLACE_UPDATE_RESIZING],
                json!(annotation),
            );
        }
        (resize, with_state_annotation(pod, patch, &state))
    };
    let (resize, last) = build(&spec, None);
    let resize = resize.map(|resize| {
        let (without_resize, deferred_sizes) = resize::defer_resize(pod, &spec, None);
        resize.with_fallback(build(&without_resize, Some(deferred_sizes)).1)
    });
    let mut writes: Vec<PodWrite> = resize.into_iter().collect();
    writes.push(last);
    writes
}

/// Stops waiting for sizes that kubelet does not apply: the update completes with the current ones.
#[must_use]
pub fn stop_waiting_for_resize(pod: &Pod) -> Option<PodWrite> {
    let mut state = annotations::update_state(pod).ok().flatten()?;
    state.update_resources = false;
    Some(with_state_annotation(pod, json!({}), &state))
}

/// Drops an update that waits for its grace period.
#[must_use]
pub fn clear_grace(pod: &Pod) -> PodWrite {
    let mut patch = json!({});
    remove_grace(pod, &mut patch);
    PodWrite::new(PatchTarget::Pod, pod, patch)
}

/// The pending batches of `state` as the spec of an update.
#[must_use]
pub fn next_batches(state: &InPlaceUpdateState) -> Spec {
    Spec {
        revision: state.revision.clone(),
        container_images: state.next_container_images.clone(),
        container_ref_metadata: state.next_container_ref_metadata.clone(),
        container_resources: state.next_container_resources.clone(),
        ..Spec::default()
    }
}

/// Puts the first batch of `spec` into `patch` and the others into `state`; returns the resize, which is sent first.
fn apply_first_batch(
    pod: &Pod,
    spec: &Spec,
    template: Template<'_>,
    state: &mut InPlaceUpdateState,
    patch: &mut Value,
    now: Timestamp,
) -> Option<PodWrite> {
    if let Some(encoded) = &spec.meta_data_patch {
        merge(patch, metadata_patch(encoded, template));
    }
    let batch = container_batches::first_batch(pod, spec);
    let (mut images, mut resources) = (Vec::new(), Vec::new());
    for container in pod.containers.iter().filter(|c| batch.contains(&c.name)) {
        let name = &container.name;
        if let Some(image) = spec.container_images.get(name) {
            images.push(json!({ "name": name, "image": image }));
            if *image != container.image {
                let last = &mut state.last_container_statuses;
                let superseded = last.contains_key(name);
                last.insert(name.clone(), container_record(pod, name, image, superseded));
            }
        }
        if let Some(new) = spec.container_resources.get(name) {
            resources.push(json!({ "name": name, "resources": new }));
        }
        if let Some(read) = spec.container_ref_metadata.get(name) {
            merge(
                patch,
                json!({ "metadata": { "labels": read.labels, "annotations": read.annotations } }),
            );
        }
    }
    if !images.is_empty() {
        set(patch, &["spec", "containers"], Value::Array(images));
    }
    store_next_batches(spec, &batch, state);
    if !batch.is_empty() {
        state.container_batches_record.push(InPlaceUpdateContainerBatch {
            timestamp: Some(whole_seconds(now)),
            containers: batch.into_iter().collect(),
        });
    }
    let resize = json!({ "spec": { "containers": resources } });
    (resize["spec"]["containers"] != json!([])).then(|| PodWrite::new(PatchTarget::Resize, pod, resize))
}

/// Converts an encoded metadata patch.
fn metadata_patch(encoded: &str, template: Template<'_>) -> Value {
    template.metadata_patch(&decode_patch(encoded))
}

/// Stores the containers outside the batch; they wait until the batch is ready.
fn store_next_batches(spec: &Spec, batch: &BTreeSet<String>, state: &mut InPlaceUpdateState) {
    state.next_container_images.clone_from(&spec.container_images);
    state
        .next_container_images
        .retain(|name, _| !batch.contains(name));
    state
        .next_container_resources
        .clone_from(&spec.container_resources);
    state
        .next_container_resources
        .retain(|name, _| !batch.contains(name));
    let references = spec.container_ref_metadata.iter();
    let references = references.filter(|(name, _)| !batch.contains(*name));
    state.next_container_ref_metadata = references
        .map(|(name, read): (&String, &ContainerRefMetadata)| (name.clone(), read.clone()))
        .collect();
    state.pre_check_before_next =
        annotations::has_next_batches(state).then(|| InPlaceUpdatePreCheckBeforeNext {
            containers_required_ready: batch.iter().cloned().collect(),
        });
}

/// Records what runs before the change.
///
/// The container ID is omitted if an incomplete update is rolled back and the running container has the image: the
/// container may be kept, so a different ID must not be required.
fn container_record(pod: &Pod, name: &str, image: &str, superseded: bool) -> InPlaceUpdateContainerStatus {
    let (mut image_id, mut id) = (String::new(), String::new());
    let mut may_keep_container = false;
    if let Some(status) = pod.container_status(name) {
        (image_id, id) = (status.image_id.clone(), status.id.clone());
        may_keep_container = superseded && status.running && completion::runs_image(image, status);
    }
    let old = pod.containers.iter().find(|c| c.name == name);
    InPlaceUpdateContainerStatus {
        image: old.map(|c| c.image.clone()).filter(|old| old != image),
        image_id,
        container_id: (!may_keep_container).then_some(id),
        generation: Some(pod.generation).filter(|g| *g > 0),
        superseded,
    }
}

fn remove_grace(pod: &Pod, patch: &mut Value) {
    annotate(pod, patch, keys::IN_PLACE_UPDATE_GRACE, None);
}

/// Sets or removes one of the two annotations, and removes its deprecated key.
fn annotate(pod: &Pod, patch: &mut Value, key: &str, value: Option<&str>) {
    let old = match key {
        keys::IN_PLACE_UPDATE_STATE => keys::IN_PLACE_UPDATE_STATE_OLD,
        _ => keys::IN_PLACE_UPDATE_GRACE_OLD,
    };
    if value.is_some() || pod.annotations.contains_key(key) {
        set(patch, &["metadata", "annotations", key], json!(value));
    }
    if pod.annotations.contains_key(old) {
        set(patch, &["metadata", "annotations", old], Value::Null);
    }
}

/// Merges `other` into `patch`, object by object.
fn merge(patch: &mut Value, other: Value) {
    match (patch, other) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (_, Value::Null) => {}
        (into, from) => *into = from,
    }
}

fn whole_seconds(time: Timestamp) -> Time {
    Time(Timestamp::from_second(time.as_second()).unwrap_or(time))
}
