//! Matches items of the API server's response with the submitted items of the same name: it drops some, such as volumes
//! whose feature gate is off, and webhooks for PodTemplates insert others.

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Value, json};

use super::dropped::is_set;

/// Items of a list, by name. Those of one name keep their order: a volume may be mounted twice.
#[derive(Default)]
pub(super) struct ByName(BTreeMap<String, VecDeque<Value>>);

impl ByName {
    pub(super) fn from_items(items: Vec<Value>) -> Self {
        let mut all = Self::default();
        all.add(items);
        all
    }

    pub(super) fn add(&mut self, items: impl IntoIterator<Item = Value>) {
        for item in items {
            self.0.entry(name(&item).to_owned()).or_default().push_back(item);
        }
    }

    /// Takes the first remaining item with the same name.
    pub(super) fn take_matching(&mut self, like: &Value) -> Option<Value> {
        self.0.get_mut(name(like))?.pop_front()
    }

    /// The remaining items.
    pub(super) fn into_items(self) -> Vec<Value> {
        self.0.into_values().flatten().collect()
    }
}

fn name(item: &Value) -> &str {
    item["name"].as_str().unwrap_or_default()
}

/// Restores the submitted items of the response's lists, in their order; those that it lacks as they were submitted.
pub(super) fn restore_lists(submitted: &Value, answer: &mut Value, dropped: &mut Vec<String>) {
    const POD: &str = "spec.template.spec";
    let Some(answer) = answer.get_mut("spec") else {
        return;
    };
    let submitted = &submitted["spec"];
    restore_list(submitted, answer, "volumes", POD, dropped);
    if let Some(volumes) = answer.get_mut("volumes") {
        restore_projected_sources(&submitted["volumes"], volumes, POD, dropped);
    }
    for list in ["containers", "initContainers"] {
        restore_list(submitted, answer, list, POD, dropped);
        let containers = answer.get_mut(list).and_then(Value::as_array_mut);
        for (at, container) in containers.into_iter().flatten().enumerate() {
            for inner in ["volumeMounts", "env"] {
                let path = format!("{POD}.{list}[{at}]");
                restore_list(&submitted[list][at], container, inner, &path, dropped);
            }
        }
    }
}

/// Sources of projected volumes that a feature gate of the API server switches off.
const GATED_SOURCES: [&str; 2] = ["clusterTrustBundle", "podCertificate"];

/// Restores the submitted sources of projected volumes. The API server leaves an empty one if the feature gate of its
/// kind is off.
fn restore_projected_sources(submitted: &Value, answer: &mut Value, path: &str, dropped: &mut Vec<String>) {
    const SOURCES: &str = "/projected/sources";
    let volumes = submitted.as_array().into_iter().flatten();
    let volumes = volumes.zip(answer.as_array_mut().into_iter().flatten());
    for (volume, (submitted_volume, answer)) in volumes.enumerate() {
        let submitted_sources = submitted_volume.pointer(SOURCES).and_then(Value::as_array);
        let answer = answer.pointer_mut(SOURCES).and_then(Value::as_array_mut);
        let pairs = submitted_sources
            .into_iter()
            .flatten()
            .zip(answer.into_iter().flatten());
        for (source, (submitted_source, answer)) in pairs.enumerate() {
            let gated = GATED_SOURCES.iter().any(|kind| is_set(&submitted_source[*kind]));
            if *answer == json!({}) && gated {
                *answer = submitted_source.clone();
                dropped.push(format!("{path}.volumes[{volume}].projected.sources[{source}]"));
            }
        }
    }
}

fn restore_list(submitted: &Value, answer: &mut Value, list: &str, path: &str, dropped: &mut Vec<String>) {
    let Some(answer) = answer.as_object_mut() else {
        return;
    };
    let submitted = submitted[list].as_array().map_or(&[][..], Vec::as_slice);
    let answered = answer.get_mut(list).and_then(Value::as_array_mut);
    let answered = answered.map(std::mem::take).unwrap_or_default();
    if submitted.is_empty() && !answered.is_empty() {
        answer.remove(list);
    }
    let mut answered = ByName::from_items(answered);
    let items = submitted.iter().enumerate().map(|(at, item)| {
        answered.take_matching(item).unwrap_or_else(|| {
            dropped.push(format!("{path}.{list}[{at}]"));
            item.clone()
        })
    });
    let items: Vec<Value> = items.collect();
    if !items.is_empty() {
        answer.insert(list.to_owned(), items.into());
    }
}
