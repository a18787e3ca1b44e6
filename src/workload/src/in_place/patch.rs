//! The patches that update a Pod in place: the smallest that do it, so that what we do not know stays.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Map, Value, json};

use super::pod::Pod;
use super::spec::Spec;
use super::template::Template;
use super::write::{Target, Write, json_text};
use super::{batch, complete, ready, resize, state};
use kruise_api::in_place::{
    ContainerRefMetadata, InPlaceUpdateContainerBatch, InPlaceUpdateContainerStatus,
    InPlaceUpdatePreCheckBeforeNext, InPlaceUpdateState,
};
use kruise_api::json::set;
use kruise_api::keys;

/// Whether the update is over with its patch: nothing is to be waited for.
#[must_use]
pub fn at_once(pod: &Pod, spec: &Spec, template: Template<'_>) -> bool {
    let (before, spec) = unfinished(pod, spec, template);
    let resizes = before.update_resources || !spec.container_resources.is_empty();
    !(changes(pod, &spec) || unproven(&before) || resizes)
}

/// Whether an earlier update left containers that are to be replaced.
fn unproven(before: &InPlaceUpdateState) -> bool {
    before.update_env_from_metadata || !before.last_container_statuses.is_empty()
}

/// Whether a container is restarted for `spec`, so that the Pod must be out of its Services meanwhile: not for
/// metadata alone, nor for resources that change while their container runs.
fn changes(pod: &Pod, spec: &Spec) -> bool {
    let restarts = |(name, resources): (&String, &k8s_openapi::api::core::v1::ResourceRequirements)| {
        let changed = resources
            .limits
            .iter()
            .chain(&resources.requests)
            .flat_map(|map| map.keys());
        let changed: Vec<&String> = changed.collect();
        let container = pod.containers.iter().find(|c| c.name == *name);
        container.is_some_and(|c| c.restarted_by.iter().any(|r| changed.contains(&r)))
    };
    spec.update_env_from_metadata
        || !spec.container_images.is_empty()
        || spec.container_resources.iter().any(restarts)
}

/// The same for all that an update to `spec` comes to.
pub(super) fn disturbs(pod: &Pod, spec: &Spec, template: Template<'_>) -> bool {
    let (before, spec) = unfinished(pod, spec, template);
    changes(pod, &spec) || unproven(&before)
}

/// Begins an update: the Pod is taken out of its Services if need be, then changed, or told what to wait for. Where its
/// resize is refused, the fallback is the rest of the update.
///
/// `template` is that of the revision to which `spec` leads. `labels` and `annotations` go with the change: those of the
/// revision and of the lifecycle.
#[must_use]
pub fn begin(
    pod: &Pod,
    spec: &Spec,
    template: Template<'_>,
    labels: &Map<String, Value>,
    annotations: &Map<String, Value>,
    now: Timestamp,
) -> Vec<Write> {
    let (before, spec) = unfinished(pod, spec, template);
    let disturbs = changes(pod, &spec) || unproven(&before);
    let begun = |spec: &Spec, owed: Option<String>| {
        let mut fresh = InPlaceUpdateState {
            revision: spec.revision.clone(),
            update_timestamp: Some(whole(now)),
            update_env_from_metadata: spec.update_env_from_metadata || before.update_env_from_metadata,
            update_images: !spec.container_images.is_empty() || before.update_images,
            update_resources: !spec.container_resources.is_empty() || before.update_resources,
            last_container_statuses: before.last_container_statuses.clone(),
            ..InPlaceUpdateState::default()
        };
        let mut patch = json!({ "metadata": { "labels": labels, "annotations": annotations } });
        let mut resize = None;
        if disturbs && spec.grace_seconds > 0 {
            annotate(
                pod,
                &mut patch,
                keys::IN_PLACE_UPDATE_GRACE,
                Some(&json_text(spec)),
            );
        } else {
            no_grace(pod, &mut patch);
            resize = change(pod, spec, template, &mut fresh, &mut patch, now);
        }
        if owed.is_some() || resize.is_some() || resize::announced(pod) {
            set(
                &mut patch,
                &["metadata", "annotations", keys::IN_PLACE_UPDATE_RESIZING],
                json!(owed),
            );
        }
        (resize, stated(pod, patch, &fresh))
    };
    let (resize, mut last) = begun(&spec, None);
    if disturbs && spec.grace_seconds > 0 {
        let (grace_seconds, spec) = (0, spec.clone());
        let (_, due) = begun(
            &Spec {
                grace_seconds,
                ..spec
            },
            None,
        );
        last.trial = Some(Box::new(due.patch));
    }
    let resize = resize.map(|resize| {
        let revision = labels.get(keys::CONTROLLER_REVISION_HASH).and_then(Value::as_str);
        let (kept, owed) = resize::postponed(pod, &spec, revision);
        resize.or(begun(&kept, Some(owed)).1)
    });
    let mut writes: Vec<Write> = prepare(pod, disturbs, resize.as_ref(), now).into_iter().collect();
    writes.extend(resize);
    writes.push(last);
    writes
}

/// What comes before an update: the Pod is taken out of its Services if it is disturbed, and a resize is announced.
fn prepare(pod: &Pod, disturbs: bool, resize: Option<&Write>, now: Timestamp) -> Option<Write> {
    let mut patch = json!({});
    let conditions = if disturbs {
        ready::not_ready(pod, now)
    } else {
        Vec::new()
    };
    if !conditions.is_empty() {
        set(&mut patch, &["status", "conditions"], Value::Array(conditions));
    }
    let announcement = resize.map(|resize| resize::announcement(pod, resize));
    if announcement.is_some() && announcement.as_ref() != pod.annotations.get(keys::IN_PLACE_UPDATE_RESIZING)
    {
        set(
            &mut patch,
            &["metadata", "annotations", keys::IN_PLACE_UPDATE_RESIZING],
            json!(announcement),
        );
    }
    (patch != json!({})).then(|| Write::new(Target::Status, pod, patch))
}

/// The change of the Pod with the state of its update.
///
/// Where an update overtakes another, it is part of its proof that kubelet has seen a generation after the recorded one,
/// so that must be the Pod's: the change is refused where somebody was quicker.
fn stated(pod: &Pod, mut patch: Value, state: &InPlaceUpdateState) -> Write {
    annotate(
        pod,
        &mut patch,
        keys::IN_PLACE_UPDATE_STATE,
        Some(&json_text(state)),
    );
    let write = Write::new(Target::Pod, pod, patch);
    let mut records = state.last_container_statuses.values();
    if records.any(|record| record.superseded) {
        write.guarded(pod)
    } else {
        write
    }
}

/// What an update that did not end leaves to the next one: the records of containers that are yet to be replaced,
/// what is yet to be proven, and, under the new spec, the batches that were still to come and what waited for its grace
/// period; under both, the size from before resizes that were not recorded. All values are those of `template`.
fn unfinished(pod: &Pod, spec: &Spec, template: Template<'_>) -> (InPlaceUpdateState, Spec) {
    let mut spec = spec.clone();
    let mut left = InPlaceUpdateState::default();
    let before = state::state(pod).ok().flatten();
    if let Some(before) = before.as_ref().filter(|before| state::has_next(before)) {
        let rest = rest(before);
        overlay(&mut spec.container_images, rest.container_images);
        overlay(&mut spec.container_ref_metadata, rest.container_ref_metadata);
        resize::add_all(&mut spec.container_resources, rest.container_resources);
    }
    if let Some(grace) = state::grace(pod).ok().flatten() {
        overlay(&mut spec.container_images, grace.container_images);
        overlay(&mut spec.container_ref_metadata, grace.container_ref_metadata);
        resize::add_all(&mut spec.container_resources, grace.container_resources);
        spec.update_env_from_metadata |= grace.update_env_from_metadata;
        spec.meta_data_patch = both(spec.meta_data_patch, grace.meta_data_patch);
    }
    resize::add_all(&mut spec.container_resources, resize::other_sizes(pod, template));
    let mut spec = template.values(spec);
    spec.update_env_from_metadata |= !spec.container_ref_metadata.is_empty();
    let Some(before) = before else {
        return (left, spec);
    };
    if complete::containers(pod, &before).is_err() {
        left.update_env_from_metadata = before.update_env_from_metadata;
        left.update_resources = before.update_resources;
    }
    left.last_container_statuses = before.last_container_statuses;
    left.last_container_statuses
        .retain(|name, last| complete::replaced(pod, name, last).is_err());
    left.update_images = !left.last_container_statuses.is_empty();
    (left, spec)
}

/// Adds what `new` does not say.
fn overlay<T>(new: &mut BTreeMap<String, T>, rest: BTreeMap<String, T>) {
    for (name, value) in rest {
        new.entry(name).or_insert(value);
    }
}

/// One patch of metadata for two, of which `new` wins; its lists are sets of names.
fn both(new: Option<String>, old: Option<String>) -> Option<String> {
    let (Some(new), Some(old)) = (&new, &old) else {
        return new.or(old);
    };
    let (mut patch, new) = (decoded(old), decoded(new));
    for (part, new) in new["metadata"].as_object().into_iter().flatten() {
        match new {
            Value::Object(new) => {
                for (key, value) in new {
                    set(&mut patch, &["metadata", part, key], value.clone());
                }
            }
            Value::Array(new) => {
                let old = patch["metadata"][part].as_array().into_iter().flatten();
                let mut all: Vec<Value> = old.filter(|name| !new.contains(name)).cloned().collect();
                all.extend_from_slice(new);
                set(&mut patch, &["metadata", part], all.into());
            }
            _ => {}
        }
    }
    Some(STANDARD.encode(patch.to_string()))
}

/// Goes on with an update whose grace period is over, or whose next batch is due, to the revision of `template`.
#[must_use]
pub fn go_on(
    pod: &Pod,
    spec: Spec,
    template: Template<'_>,
    state: &InPlaceUpdateState,
    now: Timestamp,
) -> Vec<Write> {
    let spec = template.values(spec);
    let going = |spec: &Spec, owed: Option<String>| {
        let mut state = state.clone();
        let mut patch = json!({});
        no_grace(pod, &mut patch);
        let resize = change(pod, spec, template, &mut state, &mut patch, now);
        state.update_resources |= resize.is_some();
        if owed.is_some() || resize::announced(pod) {
            // What is announced is of another update; what is resized now is of the revision that the Pod has.
            let left = owed.or_else(|| resize::announcement_without(pod, resize.as_ref()));
            set(
                &mut patch,
                &["metadata", "annotations", keys::IN_PLACE_UPDATE_RESIZING],
                json!(left),
            );
        }
        (resize, stated(pod, patch, &state))
    };
    let (resize, last) = going(&spec, None);
    let resize = resize.map(|resize| {
        let (kept, owed) = resize::postponed(pod, &spec, None);
        resize.or(going(&kept, Some(owed)).1)
    });
    let mut writes: Vec<Write> = resize.into_iter().collect();
    writes.push(last);
    writes
}

/// Ends the wait for sizes that kubelet does not give to the Pod: its update is done with those that it has.
#[must_use]
pub fn without_sizes(pod: &Pod) -> Option<Write> {
    let mut state = state::state(pod).ok().flatten()?;
    state.update_resources = false;
    Some(stated(pod, json!({}), &state))
}

/// Forgets an update that waits for its grace period.
#[must_use]
pub fn forget_grace(pod: &Pod) -> Write {
    let mut patch = json!({});
    no_grace(pod, &mut patch);
    Write::new(Target::Pod, pod, patch)
}

/// The batches that `state` has still to come, as the spec of an update.
#[must_use]
pub fn rest(state: &InPlaceUpdateState) -> Spec {
    Spec {
        revision: state.revision.clone(),
        container_images: state.next_container_images.clone(),
        container_ref_metadata: state.next_container_ref_metadata.clone(),
        container_resources: state.next_container_resources.clone(),
        ..Spec::default()
    }
}

/// Puts the first batch of `spec` into `patch` and the others into `state`; returns the resize, which comes first.
fn change(
    pod: &Pod,
    spec: &Spec,
    template: Template<'_>,
    state: &mut InPlaceUpdateState,
    patch: &mut Value,
    now: Timestamp,
) -> Option<Write> {
    if let Some(encoded) = &spec.meta_data_patch {
        merge(patch, metadata_of(encoded, template));
    }
    let batch = batch::first(pod, spec);
    let (mut images, mut resources) = (Vec::new(), Vec::new());
    for container in pod.containers.iter().filter(|c| batch.contains(&c.name)) {
        let name = &container.name;
        if let Some(image) = spec.container_images.get(name) {
            images.push(json!({ "name": name, "image": image }));
            if *image != container.image {
                let last = &mut state.last_container_statuses;
                let superseded = last.contains_key(name);
                last.insert(name.clone(), record(pod, name, image, superseded));
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
    keep_rest(spec, &batch, state);
    if !batch.is_empty() {
        state.container_batches_record.push(InPlaceUpdateContainerBatch {
            timestamp: Some(whole(now)),
            containers: batch.into_iter().collect(),
        });
    }
    let resize = json!({ "spec": { "containers": resources } });
    (resize["spec"]["containers"] != json!([])).then(|| Write::new(Target::Resize, pod, resize))
}

/// What a patch of metadata changes.
fn metadata_of(encoded: &str, template: Template<'_>) -> Value {
    template.metadata_of(&decoded(encoded))
}

fn decoded(patch: &str) -> Value {
    let text = STANDARD.decode(patch).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// What is not in the batch waits until the batch is ready.
fn keep_rest(spec: &Spec, batch: &BTreeSet<String>, state: &mut InPlaceUpdateState) {
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
    state.pre_check_before_next = state::has_next(state).then(|| InPlaceUpdatePreCheckBeforeNext {
        containers_required_ready: batch.iter().cloned().collect(),
    });
}

/// Records what runs before the change.
///
/// The container's ID is left out where an update that did not end is taken back and the container that runs has
/// the image: it may stay, so another ID must not be asked for.
fn record(pod: &Pod, name: &str, image: &str, superseded: bool) -> InPlaceUpdateContainerStatus {
    let (mut image_id, mut id) = (String::new(), String::new());
    let mut may_stay = false;
    if let Some(status) = pod.status(name) {
        (image_id, id) = (status.image_id.clone(), status.id.clone());
        may_stay = superseded && status.running && complete::runs(image, status);
    }
    let old = pod.containers.iter().find(|c| c.name == name);
    InPlaceUpdateContainerStatus {
        image: old.map(|c| c.image.clone()).filter(|old| old != image),
        image_id,
        container_id: (!may_stay).then_some(id),
        generation: Some(pod.generation).filter(|g| *g > 0),
        superseded,
    }
}

fn no_grace(pod: &Pod, patch: &mut Value) {
    annotate(pod, patch, keys::IN_PLACE_UPDATE_GRACE, None);
}

/// Sets one of the two annotations, or takes it off, and what it was called once with it.
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

/// Lays `other` over `patch`; objects merge.
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

fn whole(time: Timestamp) -> Time {
    Time(Timestamp::from_second(time.as_second()).unwrap_or(time))
}
