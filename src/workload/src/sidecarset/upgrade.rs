//! What is written to a Pod: its update, and the end of a hot upgrade. Application containers are never changed.

use std::collections::BTreeMap;

use jiff::Timestamp;
use kruise_api::keys;

use super::hot_upgrade::{is_idle_container_running, pairs, rolled_back_container, upgrade_target};
use super::pod_metadata::{PatchError, patch_annotations};
use super::predicates::{image_in_pod, working_containers};
use super::recorded::{self, HashFormat, HashRecord, UpdateState, version_alt_key, version_key};
use super::set::{SetView, image, is_hot_upgrade, name};
use crate::in_place::Pod;
use crate::in_place::ready::format_seconds;

/// Changes of a Pod, to be written with its `resourceVersion` as a precondition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodChanges {
    /// New images, by container name.
    pub images: BTreeMap<String, String>,
    /// New or changed annotations.
    pub annotations: BTreeMap<String, String>,
}

/// Updates a Pod to the current containers of the set.
///
/// # Errors
/// If an annotation that is to be merged is no JSON.
pub fn upgrade(set: &SetView<'_>, pod: &Pod, now: Timestamp) -> Result<PodChanges, PatchError> {
    let now = format_seconds(now);
    let mut writer = Writer::new(pod);
    let mut working = working_containers(pod);
    for container in set.containers().filter(|container| !image(container).is_empty()) {
        if is_hot_upgrade(container) {
            let Some((target, other)) = upgrade_target(set, container, pod) else {
                if let Some(rolled_back) = rolled_back_container(container, pod) {
                    working.insert(name(container).to_owned(), rolled_back);
                    let text = recorded::working_to_text(&working);
                    writer.set(keys::SIDECAR_SET_WORKING_CONTAINER.to_owned(), text);
                }
                continue;
            };
            writer.set_image(&target, image(container));
            working.insert(name(container).to_owned(), target.clone());
            let previous = writer.annotation(&version_key(&other)).to_owned();
            writer.set(version_key(&target), set.resource_version.to_owned());
            writer.set(version_alt_key(&target), previous);
            writer.set(version_alt_key(&other), set.resource_version.to_owned());
            let text = recorded::working_to_text(&working);
            writer.set(keys::SIDECAR_SET_WORKING_CONTAINER.to_owned(), text);
        } else if image_in_pod(pod, name(container)).is_some_and(|current| current != image(container)) {
            writer.set_image(name(container), image(container));
        }
    }
    writer.record_hash(set, &now);
    writer.record_images(set, &now);
    let patches = set.spec.patch_pod_metadata.as_deref().unwrap_or_default();
    patch_annotations(&mut writer.annotations, patches)?;
    Ok(writer.finish())
}

/// Switches the containers off from which others have taken over.
#[must_use]
pub fn flip(set: &SetView<'_>, pod: &Pod, now: Timestamp) -> PodChanges {
    let mut writer = Writer::new(pod);
    for (container, pair) in pairs(set, pod) {
        if is_idle_container_running(container, &pair, pod) {
            writer.set_image(&pair.idle, &container.upgrade_strategy.hot_upgrade_empty_image);
            writer.set(version_key(&pair.idle), "0".to_owned());
            writer.set(version_alt_key(&pair.working), "0".to_owned());
        }
    }
    writer.record_images(set, &format_seconds(now));
    writer.finish()
}

struct Writer<'a> {
    pod: &'a Pod,
    images: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

impl<'a> Writer<'a> {
    fn new(pod: &'a Pod) -> Self {
        Self {
            pod,
            images: BTreeMap::new(),
            annotations: pod.annotations.clone(),
        }
    }

    fn annotation(&self, key: &str) -> &str {
        self.annotations.get(key).map(String::as_str).unwrap_or_default()
    }

    fn set(&mut self, key: String, value: String) {
        self.annotations.insert(key, value);
    }

    fn set_image(&mut self, container: &str, image: &str) {
        self.images.insert(container.to_owned(), image.to_owned());
    }

    /// Records the containers of the set as current. Hashes of an old release are rewritten.
    fn record_hash(&mut self, set: &SetView<'_>, now: &str) {
        let (mut records, format) = recorded::parse_with_format(self.annotation(keys::SIDECAR_SET_HASH));
        if format != HashFormat::Records {
            let text = self.annotation(keys::SIDECAR_SET_HASH_WITHOUT_IMAGE);
            let (without_image, format) = recorded::parse_with_format(text);
            if format == HashFormat::Legacy {
                let text = recorded::to_text(&without_image);
                self.set(keys::SIDECAR_SET_HASH_WITHOUT_IMAGE.to_owned(), text);
            }
        }
        let record = HashRecord {
            update_timestamp: Some(now.to_owned()),
            hash: set.hash().to_owned(),
            sidecar_set_name: set.name.to_owned(),
            sidecar_list: Some(set.recorded_names()),
            controller_revision: set.latest_revision.to_owned(),
        };
        records.insert(set.name.to_owned(), record);
        self.set(keys::SIDECAR_SET_HASH.to_owned(), recorded::to_text(&records));
    }

    /// Records what the changed containers run until now: the update is over when it differs. Revision and time of an
    /// earlier record stay, as in upstream.
    fn record_images(&mut self, set: &SetView<'_>, now: &str) {
        let text = self.annotation(keys::SIDECAR_SET_IN_PLACE_UPDATE_STATE);
        let mut states = recorded::parse_states(text).unwrap_or_default();
        let state = states.entry(set.name.to_owned());
        let state = state.or_insert_with(|| UpdateState::new(set.hash(), now));
        let image_id = |name: &str| {
            let status = self.pod.container_status(name);
            status.map(|status| status.image_id.as_str()).unwrap_or_default()
        };
        state.record(self.images.keys().map(|name| (name.as_str(), image_id(name))));
        let text = recorded::states_to_text(&states);
        self.set(keys::SIDECAR_SET_IN_PLACE_UPDATE_STATE.to_owned(), text);
    }

    fn finish(self) -> PodChanges {
        let Self {
            pod,
            images,
            mut annotations,
        } = self;
        annotations.retain(|key, value| pod.annotations.get(key) != Some(value));
        PodChanges { images, annotations }
    }
}
