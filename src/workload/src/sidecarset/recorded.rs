//! What a Pod's annotations record about the SidecarSets that were injected into it.
//!
//! Either program may have written them, and anyone may have changed them: what cannot be read counts as absent. What is
//! written has the bytes of Go.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::{Map, Value};

use kruise_api::{go_json, keys};

/// What was injected for one SidecarSet: an entry of annotations [`keys::SIDECAR_SET_HASH`] and
/// [`keys::SIDECAR_SET_HASH_WITHOUT_IMAGE`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HashRecord {
    /// When the Pod was injected or updated, RFC 3339.
    pub update_timestamp: Option<String>,
    /// Hash of the set's containers.
    pub hash: String,
    /// Name of the set.
    pub sidecar_set_name: String,
    /// Sorted names of the set's containers, without those of plain init containers. `None` and empty differ in bytes.
    pub sidecar_list: Option<Vec<String>>,
    /// Name of the ControllerRevision; empty beside the hash without images.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub controller_revision: String,
}

/// The entries of all sets, by name.
pub type HashRecords = BTreeMap<String, HashRecord>;

/// How an annotation with [`HashRecords`] is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashFormat {
    /// A map of records.
    Records,
    /// A map with plain hashes, as old releases wrote it.
    Legacy,
    /// Neither; an empty text, too.
    Invalid,
}

/// Parses an annotation with hashes. A plain hash, as old releases wrote it, is a record with only the hash and the
/// set's name; entries of other types are left out. Without a map there are no records.
#[must_use]
pub fn parse(text: &str) -> HashRecords {
    parse_with_format(text).0
}

/// The same, and how the annotation is written: admission refuses a Pod whose annotation is invalid.
#[must_use]
pub fn parse_with_format(text: &str) -> (HashRecords, HashFormat) {
    let Ok(entries) = serde_json::from_str::<Map<String, Value>>(text) else {
        return (HashRecords::new(), HashFormat::Invalid);
    };
    let mut format = HashFormat::Records;
    let mut records = HashRecords::new();
    for (name, entry) in entries {
        let record = match entry {
            Value::Object(fields) => HashRecord::from_json(&fields),
            Value::String(hash) => {
                format = HashFormat::Legacy;
                HashRecord {
                    hash,
                    sidecar_set_name: name.clone(),
                    ..HashRecord::default()
                }
            }
            _ => continue,
        };
        records.insert(name, record);
    }
    (records, format)
}

/// The annotation's text.
#[must_use]
pub fn to_text(records: &HashRecords) -> String {
    go_json::to_json(records)
}

impl HashRecord {
    fn from_json(fields: &Map<String, Value>) -> Self {
        let text = |field: &str| fields.get(field).and_then(Value::as_str).map(str::to_owned);
        let names = fields.get("sidecarList").and_then(Value::as_array);
        Self {
            update_timestamp: text("updateTimestamp"),
            hash: text("hash").unwrap_or_default(),
            sidecar_set_name: text("sidecarSetName").unwrap_or_default(),
            sidecar_list: names.map(|names| {
                names
                    .iter()
                    .filter_map(|name| Some(name.as_str()?.to_owned()))
                    .collect()
            }),
            controller_revision: text("controllerRevision").unwrap_or_default(),
        }
    }
}

/// Annotation [`keys::SIDECAR_SET_IN_PLACE_UPDATE_STATE`]: the last update for each set, by name.
pub type UpdateStates = BTreeMap<String, UpdateState>;

/// The last update for one set: the fields of [`kruise_api::in_place::InPlaceUpdateState`], raw, so that those of other
/// programs stay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UpdateState(Map<String, Value>);

const REVISION: &str = "revision";
const UPDATE_TIMESTAMP: &str = "updateTimestamp";
const LAST_CONTAINER_STATUSES: &str = "lastContainerStatuses";
const IMAGE_ID: &str = "imageID";

impl UpdateState {
    /// An update that begins now, to this hash.
    #[must_use]
    pub fn new(hash: &str, now: &str) -> Self {
        let fields = [
            (REVISION, hash.into()),
            (UPDATE_TIMESTAMP, now.into()),
            (LAST_CONTAINER_STATUSES, Map::new().into()),
        ];
        Self(
            fields
                .map(|(field, value)| (field.to_owned(), value))
                .into_iter()
                .collect(),
        )
    }

    /// ID of the image that a container had before its last update; `None` if it was never updated.
    #[must_use]
    pub fn old_image_id(&self, container: &str) -> Option<&str> {
        let status = self.0.get(LAST_CONTAINER_STATUSES)?.get(container)?;
        Some(status.get(IMAGE_ID).and_then(Value::as_str).unwrap_or_default())
    }

    /// Records the images that containers have before their update, as (name, image ID).
    pub fn record<'a>(&mut self, containers: impl IntoIterator<Item = (&'a str, &'a str)>) {
        set_default_object(&mut self.0, LAST_CONTAINER_STATUSES);
        for (name, image_id) in containers {
            let mut status = Map::new();
            if !image_id.is_empty() {
                status.insert(IMAGE_ID.to_owned(), image_id.into());
            }
            if let Some(Value::Object(statuses)) = self.0.get_mut(LAST_CONTAINER_STATUSES) {
                statuses.insert(name.to_owned(), status.into());
            }
        }
    }
}

fn set_default_object(fields: &mut Map<String, Value>, field: &str) {
    let value = fields.entry(field).or_insert(Value::Null);
    if !value.is_object() {
        *value = Map::new().into();
    }
}

/// The fields that Go always writes come first, then the others.
impl Serialize for UpdateState {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let first = [
            (REVISION, Value::from("")),
            (UPDATE_TIMESTAMP, Value::Null),
            (LAST_CONTAINER_STATUSES, Value::Null),
        ];
        let mut map = serializer.serialize_map(None)?;
        for (field, default) in &first {
            map.serialize_entry(field, self.0.get(*field).unwrap_or(default))?;
        }
        let is_other = |field: &str| first.iter().all(|(name, _)| *name != field);
        for (field, value) in self.0.iter().filter(|(field, _)| is_other(field)) {
            map.serialize_entry(field, value)?;
        }
        map.end()
    }
}

/// Parses the states; `None` if there is no map. Entries that are not objects are left out.
#[must_use]
pub fn parse_states(text: &str) -> Option<UpdateStates> {
    let entries: Map<String, Value> = serde_json::from_str(text).ok()?;
    let states = entries.into_iter().filter_map(|(name, entry)| match entry {
        Value::Object(fields) => Some((name, UpdateState(fields))),
        _ => None,
    });
    Some(states.collect())
}

/// The annotation's text.
#[must_use]
pub fn states_to_text(states: &UpdateStates) -> String {
    go_json::to_json(states)
}

/// Annotation [`keys::SIDECAR_SET_WORKING_CONTAINER`]: the container that works, by sidecar.
pub type WorkingContainers = BTreeMap<String, String>;

/// Parses the containers that work. Without a map there are none; values of other types are left out.
#[must_use]
pub fn parse_working(text: &str) -> WorkingContainers {
    let entries: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
    let texts = entries
        .into_iter()
        .filter_map(|(sidecar, container)| match container {
            Value::String(container) => Some((sidecar, container)),
            _ => None,
        });
    texts.collect()
}

/// The annotation's text.
#[must_use]
pub fn working_to_text(working: &WorkingContainers) -> String {
    go_json::to_json(working)
}

/// Pod annotation with the version of a container of a sidecar with hot upgrade.
#[must_use]
pub fn version_key(container: &str) -> String {
    format!("{}{container}", keys::SIDECAR_SET_VERSION_PREFIX)
}

/// Pod annotation with the version of the other container of the same sidecar.
#[must_use]
pub fn version_alt_key(container: &str) -> String {
    format!("{}{container}", keys::SIDECAR_SET_VERSION_ALT_PREFIX)
}

/// The two containers of a sidecar with hot upgrade.
#[must_use]
pub fn hot_upgrade_names(sidecar: &str) -> [String; 2] {
    [1, 2].map(|number| format!("{sidecar}-{number}"))
}

/// The versions of the two containers of a newly injected sidecar with hot upgrade, by annotation: the first one works.
#[must_use]
pub fn initial_versions([first, second]: &[String; 2]) -> [(String, &'static str); 4] {
    [
        (version_key(first), "1"),
        (version_alt_key(first), "0"),
        (version_key(second), "0"),
        (version_alt_key(second), "1"),
    ]
}

/// Parses annotation [`keys::SIDECAR_SET_INJECTED_LIST`]. An empty name between commas is kept, as in upstream.
#[must_use]
pub fn parse_injected_list(text: &str) -> BTreeSet<&str> {
    if text.is_empty() {
        return BTreeSet::new();
    }
    text.split(',').collect()
}

/// The annotation's text.
#[must_use]
pub fn injected_list_to_text(names: &BTreeSet<&str>) -> String {
    let names: Vec<&str> = names.iter().copied().collect();
    names.join(",")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hashes_have_the_bytes_of_go() {
        let text = r#"{"O":{"updateTimestamp":null,"hash":"o","sidecarSetName":"O","sidecarList":null},"S":{"updateTimestamp":"2026-01-01T00:00:00Z","hash":"a\u003cb","sidecarSetName":"S","sidecarList":["log","mesh"],"controllerRevision":"S-1"}}"#;
        let (records, format) = parse_with_format(text);
        assert_eq!(format, HashFormat::Records);
        assert_eq!(records["S"].hash, "a<b");
        assert_eq!(to_text(&records), text);
        assert_eq!(
            to_text(&parse(r#"{"S":{"hash":"h","sidecarList":[]}}"#)),
            r#"{"S":{"updateTimestamp":null,"hash":"h","sidecarSetName":"","sidecarList":[]}}"#
        );
    }

    #[test]
    fn legacy_hashes_become_records() {
        let (records, format) = parse_with_format(r#"{"S":"h1","O":{"hash":"o"},"X":1}"#);
        assert_eq!(format, HashFormat::Legacy);
        assert_eq!(
            to_text(&records),
            r#"{"O":{"updateTimestamp":null,"hash":"o","sidecarSetName":"","sidecarList":null},"S":{"updateTimestamp":null,"hash":"h1","sidecarSetName":"S","sidecarList":null}}"#
        );
        for text in ["", "broken", "[]", "null", "\"x\"", "{"] {
            assert_eq!(
                parse_with_format(text),
                (HashRecords::new(), HashFormat::Invalid),
                "{text}"
            );
        }
        assert_eq!(parse_with_format("{}").1, HashFormat::Records);
    }

    #[test]
    fn states_of_other_sets_are_kept() {
        let text = r#"{"A":[1],"O":{"lastContainerStatuses":{"x":{"imageID":"y"}},"x":"<"},"S":{"lastContainerStatuses":1}}"#;
        let mut states = parse_states(text).unwrap();
        let written = r#"{"O":{"revision":"","updateTimestamp":null,"lastContainerStatuses":{"x":{"imageID":"y"}},"x":"\u003c"},"S":{"revision":"","updateTimestamp":null,"lastContainerStatuses":1}}"#;
        assert_eq!(states_to_text(&states), written);
        assert_eq!(states["O"].old_image_id("x"), Some("y"));
        assert_eq!(states["S"].old_image_id("x"), None);
        states.get_mut("S").unwrap().record([("x", ""), ("y", "i")]);
        assert_eq!(states["S"].old_image_id("x"), Some(""));
        assert_eq!(states["S"].old_image_id("y"), Some("i"));
        let new = UpdateStates::from([("S".to_owned(), UpdateState::new("h", "T"))]);
        assert_eq!(
            states_to_text(&new),
            r#"{"S":{"revision":"h","updateTimestamp":"T","lastContainerStatuses":{}}}"#
        );
        assert_eq!(parse_states("broken"), None);
        assert_eq!(parse_states(""), None);
    }

    #[test]
    fn lists_are_sorted() {
        let mut names = parse_injected_list("zeta,alpha,,beta");
        names.insert("delta");
        assert_eq!(injected_list_to_text(&names), ",alpha,beta,delta,zeta");
        assert!(parse_injected_list("").is_empty());
        let working = parse_working(r#"{"old":"old-2","mesh":"mesh-1","x":1}"#);
        assert_eq!(working_to_text(&working), r#"{"mesh":"mesh-1","old":"old-2"}"#);
        assert_eq!(working_to_text(&parse_working("broken")), "{}");
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[<>&a\\PC]{0,4}".prop_map(Value::from),
        ];
        let key = prop_oneof![
            Just("hash".to_owned()),
            Just("sidecarList".to_owned()),
            Just("lastContainerStatuses".to_owned()),
            Just("revision".to_owned()),
            "[a-z<]{0,3}",
        ];
        leaf.prop_recursive(4, 32, 4, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(key.clone(), inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// What is written is read back as the same, whatever was there.
        #[test]
        fn what_is_written_is_stable(value in any_json()) {
            let text = value.to_string();
            let records = parse(&text);
            prop_assert_eq!(parse(&to_text(&records)), records);
            if let Some(states) = parse_states(&text) {
                let written = states_to_text(&states);
                let again = parse_states(&written).map(|states| states_to_text(&states));
                prop_assert_eq!(again, Some(written));
            }
            let working = parse_working(&text);
            prop_assert_eq!(parse_working(&working_to_text(&working)), working);
        }
    }
}
