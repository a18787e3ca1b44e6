use std::collections::BTreeMap;

use jiff::Timestamp;
use kruise_api::cloneset::string_map;
use kruise_api::keys;
use kruise_api::sidecarset::SidecarSetSpec;
use serde_json::{Value, json};

use super::cluster::{list, text};
use crate::in_place::Pod;
use crate::sidecarset::hot_upgrade::{is_flip_due, is_ready};
use crate::sidecarset::predicates::{
    has_all_containers, is_consistent, is_injected, is_previous_update_over, is_updated, is_upgradable,
};
use crate::sidecarset::recorded::parse_working;
use crate::sidecarset::select::select;
use crate::sidecarset::set::{SetView, image, name};
use crate::sidecarset::status::{Counters, PodState};
use crate::sidecarset::upgrade::{PodChanges, flip, upgrade};

/// A SidecarSet as vectors have it.
pub(super) struct SetParts {
    name: String,
    resource_version: String,
    annotations: BTreeMap<String, String>,
    latest_revision: String,
    spec: SidecarSetSpec,
}

impl SetParts {
    pub(super) fn new(set: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Self {
            name: text(&set["metadata"]["name"]),
            resource_version: text(&set["metadata"]["resourceVersion"]),
            annotations: string_map(&set["metadata"]["annotations"]),
            latest_revision: text(&set["status"]["latestRevision"]),
            spec: serde_json::from_value(set["spec"].clone()).unwrap(),
        }
    }

    pub(super) fn view(&self) -> SetView<'_> {
        SetView {
            name: &self.name,
            resource_version: &self.resource_version,
            annotations: &self.annotations,
            latest_revision: &self.latest_revision,
            spec: &self.spec,
        }
    }
}

/// Every `updateTimestamp` in an annotation reads `T`, as in the vectors.
pub(super) fn masked(annotations: &BTreeMap<String, String>) -> Value {
    let field = "\"updateTimestamp\":";
    let mask = |text: &String| {
        let mut parts = text.split(field);
        let mut out = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let end = part.find([',', '}']).unwrap_or(part.len());
            out += &format!("{field}\"T\"{}", &part[end..]);
        }
        out
    };
    annotations
        .iter()
        .map(|(key, text)| (key.clone(), json!(mask(text))))
        .collect()
}

fn changed(pod: &Pod, changes: &PodChanges) -> Value {
    let mut annotations = pod.annotations.clone();
    annotations.extend(changes.annotations.clone());
    let containers = pod.containers.iter();
    let images = containers.map(|c| json!([c.name, changes.images.get(&c.name).unwrap_or(&c.image)]));
    json!({ "annotations": masked(&annotations), "images": images.collect::<Vec<_>>() })
}

fn strategy(set: &SetView<'_>, vector: &Value) -> Value {
    let pods: Vec<Pod> = vector["pods"]
        .as_array()
        .unwrap()
        .iter()
        .map(Pod::from_json)
        .collect();
    let pods: Vec<&Pod> = pods.iter().collect();
    let states: Vec<PodState> = pods.iter().map(|pod| PodState::new(set, pod)).collect();
    let counters = Counters::new(&states);
    let none = std::collections::BTreeSet::new();
    let selection = select(set, &pods, &states, &none, &none);
    let names = |indexes: &[usize]| {
        indexes
            .iter()
            .map(|at| pods[*at].name.clone())
            .collect::<Vec<_>>()
    };
    json!({
        "upgrade": names(&selection.upgrade),
        "notUpgradable": names(&selection.not_upgradable),
        "matchedPods": counters.matched,
        "updatedPods": counters.updated,
        "readyPods": counters.ready,
        "updatedReadyPods": counters.updated_ready,
    })
}

fn one_pod(set: &SetView<'_>, vector: &Value) -> Value {
    let pod = Pod::from_json(&vector["pod"]);
    let upgradable = is_upgradable(set, &pod);
    let mut out = json!({
        "injected": is_injected(set, &pod),
        "hasAllContainers": has_all_containers(set, &pod),
        "updated": is_updated(set, &pod),
        "ready": is_ready(set, &pod),
        "stateConsistent": is_consistent(set, &pod, None),
        "canUpgrade": upgradable,
        "consistentForUpgrade": upgradable && is_previous_update_over(set, &pod),
        "flipQualifies": is_flip_due(set, &pod),
    });
    let now = Timestamp::UNIX_EPOCH;
    for (field, changes) in [
        ("afterUpgrade", upgrade(set, &pod, now).unwrap()),
        ("afterFlip", flip(set, &pod, now)),
    ] {
        if vector["out"].get(field).is_some() {
            out[field] = changed(&pod, &changes);
        }
    }
    out
}

/// Whether a Pod (raw JSON) differs from upstream's only by a rollback of an unfinished hot upgrade: the container that has
/// the image of the set works again, while upstream goes on recording the other one.
pub(super) fn is_rollback(ours: &Value, theirs: &Value, set: &SetView<'_>) -> bool {
    let key = keys::SIDECAR_SET_WORKING_CONTAINER;
    let working = |pod: &Value| {
        pod["annotations"][key]
            .as_str()
            .map_or_else(Default::default, parse_working)
    };
    let mut with_theirs = ours.clone();
    with_theirs["annotations"][key] = theirs["annotations"][key].clone();
    let image_of = |container: Option<&String>| {
        let mut images = list(&ours["images"])
            .filter(|image| Some(image[0].as_str()) == Some(container.map(String::as_str)));
        images.next().map_or_else(String::new, |image| text(&image[1]))
    };
    let (recorded, expected) = (working(ours), working(theirs));
    let mut differing = set
        .hot_upgrade_containers()
        .filter(|container| recorded.get(name(container)) != expected.get(name(container)))
        .peekable();
    with_theirs == *theirs
        && differing.peek().is_some()
        && differing.all(|container| {
            let [ours, theirs] = [&recorded, &expected].map(|working| image_of(working.get(name(container))));
            ours == image(container) && theirs != image(container)
        })
}

#[test]
fn updates_match_go() {
    let vectors = include_str!("../../../../../tests/data/go/sidecarset-update.jsonl");
    assert_eq!(vectors.lines().count(), 740);
    let (mut differences, mut rollbacks) = (Vec::new(), 0);
    for (at, line) in vectors.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let parts = SetParts::new(&vector["sidecarSet"]);
        let set = parts.view();
        let ours = match vector["kind"].as_str().unwrap() {
            "strategy" => strategy(&set, &vector),
            "pod" => one_pod(&set, &vector),
            other => panic!("kind {other}"),
        };
        let theirs = &vector["out"];
        for (field, theirs) in theirs.as_object().unwrap() {
            if field == "afterUpgrade" && is_rollback(&ours[field], theirs, &set) {
                rollbacks += 1;
            } else if ours[field] != *theirs {
                differences.push(format!(
                    "line {}: {field}\n  ours   {}\n  theirs {theirs}",
                    at + 1,
                    ours[field]
                ));
            }
        }
    }
    assert_eq!(rollbacks, 6);
    let first: Vec<&str> = differences.iter().take(8).map(String::as_str).collect();
    assert!(
        differences.is_empty(),
        "{} differences\n{}",
        differences.len(),
        first.join("\n")
    );
}
