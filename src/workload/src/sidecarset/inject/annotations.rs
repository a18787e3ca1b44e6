//! What the Pod records about the injection.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use kruise_api::keys;
use kruise_api::validation::{MAX_VALUE_CHARS, truncate};

use super::error::InjectionError;
use super::revision::Selected;
use crate::sidecarset::recorded::{
    HashFormat, HashRecords, WorkingContainers, initial_versions, injected_list_to_text, parse_injected_list,
    parse_with_format, parse_working, to_text, working_to_text,
};

/// The annotations to write: entries of other sets stay.
#[derive(Clone, Debug)]
pub(super) struct Record {
    hashes: HashRecords,
    hashes_without_image: HashRecords,
    injected: BTreeSet<String>,
    working: WorkingContainers,
    versions: BTreeMap<String, String>,
}

impl Record {
    /// The records in these annotations; `own` are those that the Pod had before sets patched them.
    pub(super) fn parse(
        annotations: &BTreeMap<String, String>,
        own: &BTreeMap<String, String>,
    ) -> Result<Self, InjectionError> {
        let text = |key: &str| annotations.get(key).map(String::as_str).unwrap_or_default();
        let hashes = |key: &'static str| match parse_with_format(text(key)) {
            (_, HashFormat::Invalid) if !text(key).is_empty() => {
                let value = truncate(text(key), MAX_VALUE_CHARS).into_owned();
                Err(if own.get(key) == annotations.get(key) {
                    InjectionError::InvalidAnnotation { key, value }
                } else {
                    InjectionError::InvalidPatch { key, value }
                })
            }
            (records, _) => Ok(records),
        };
        Ok(Self {
            hashes: hashes(keys::SIDECAR_SET_HASH)?,
            hashes_without_image: hashes(keys::SIDECAR_SET_HASH_WITHOUT_IMAGE)?,
            injected: parse_injected_list(text(keys::SIDECAR_SET_INJECTED_LIST))
                .into_iter()
                .map(str::to_owned)
                .collect(),
            working: parse_working(text(keys::SIDECAR_SET_WORKING_CONTAINER)),
            versions: BTreeMap::new(),
        })
    }

    /// Records a sidecar with hot upgrade: the first of its containers works.
    pub(super) fn add_hot_upgrade(&mut self, sidecar: &str, names: &[String; 2]) {
        let versions = initial_versions(names).map(|(key, version)| (key, version.to_owned()));
        self.versions.extend(versions);
        let [first, _] = names;
        self.working.insert(sidecar.to_owned(), first.clone());
    }

    /// Records a set.
    pub(super) fn add_set(&mut self, set: &Selected<'_>, now: Timestamp) {
        let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let [record, without_image] = set.records(Some(now));
        self.hashes.insert(set.name.to_owned(), record);
        self.hashes_without_image
            .insert(set.name.to_owned(), without_image);
        self.injected.insert(set.name.to_owned());
    }

    pub(super) fn into_annotations(self) -> BTreeMap<String, String> {
        let injected = self.injected.iter().map(String::as_str).collect();
        let has_hot_upgrade = !self.versions.is_empty();
        let mut annotations = self.versions;
        let mut add = |key: &str, text: String| annotations.insert(key.to_owned(), text);
        add(keys::SIDECAR_SET_HASH, to_text(&self.hashes));
        add(
            keys::SIDECAR_SET_HASH_WITHOUT_IMAGE,
            to_text(&self.hashes_without_image),
        );
        add(keys::SIDECAR_SET_INJECTED_LIST, injected_list_to_text(&injected));
        if has_hot_upgrade {
            add(
                keys::SIDECAR_SET_WORKING_CONTAINER,
                working_to_text(&self.working),
            );
        }
        annotations
    }
}
