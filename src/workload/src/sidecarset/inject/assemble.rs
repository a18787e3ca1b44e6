//! Puts what sets inject into the Pod.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

const VOLUMES: &str = "volumes";
const IMAGE_PULL_SECRETS: &str = "imagePullSecrets";

/// A container to inject.
#[derive(Clone, Debug)]
pub(super) struct Injected {
    pub(super) container: Value,
    /// In front of the Pod's own containers, or behind them.
    pub(super) in_front: bool,
}

/// What all sets inject, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Parts {
    pub(super) init_containers: Vec<Injected>,
    pub(super) containers: Vec<Injected>,
    pub(super) volumes: Vec<Value>,
    pub(super) image_pull_secrets: Vec<Value>,
}

impl Parts {
    /// Whether there are no containers.
    pub(super) fn is_empty(&self) -> bool {
        self.init_containers.is_empty() && self.containers.is_empty()
    }
}

/// Adds the parts to the Pod.
pub(super) fn assemble(pod: &mut Value, parts: Parts, sort_containers: bool) {
    let Parts {
        mut init_containers,
        mut containers,
        volumes,
        image_pull_secrets,
    } = parts;
    init_containers.sort_by_cached_key(|injected| name(&injected.container));
    if sort_containers {
        containers.sort_by_cached_key(|injected| name(&injected.container));
    }
    let Some(spec) = spec(pod) else { return };
    merge_containers(spec, "initContainers", init_containers);
    merge_containers(spec, "containers", containers);
    add_volumes(spec, volumes);
    add_pull_secrets(spec, image_pull_secrets);
}

fn spec(pod: &mut Value) -> Option<&mut Map<String, Value>> {
    let spec = pod.as_object_mut()?.entry("spec");
    let spec = spec.or_insert_with(|| Value::Object(Map::new()));
    spec.as_object_mut()
}

/// Replaces containers of the same name, and adds the others in front and behind.
fn merge_containers(spec: &mut Map<String, Value>, list: &str, injected: Vec<Injected>) {
    if injected.is_empty() {
        return;
    }
    let mut own = take_list(spec, list);
    let positions: BTreeMap<String, usize> = own.iter().map(name).zip(0..).collect();
    let (mut front, mut back) = (Vec::new(), Vec::new());
    for Injected { container, in_front } in injected {
        let same = positions.get(&name(&container)).and_then(|at| own.get_mut(*at));
        match same {
            Some(same) => *same = container,
            None if in_front => front.push(container),
            None => back.push(container),
        }
    }
    front.append(&mut own);
    front.append(&mut back);
    spec.insert(list.to_owned(), front.into());
}

/// Adds volumes whose names are new.
fn add_volumes(spec: &mut Map<String, Value>, added: Vec<Value>) {
    if added.is_empty() {
        return;
    }
    let mut volumes = take_list(spec, VOLUMES);
    let mut names: BTreeSet<String> = volumes.iter().map(name).collect();
    volumes.extend(added.into_iter().filter(|volume| names.insert(name(volume))));
    spec.insert(VOLUMES.to_owned(), volumes.into());
}

/// Adds pull secrets. Of those of the same name the first one stays, also among the Pod's own.
fn add_pull_secrets(spec: &mut Map<String, Value>, added: Vec<Value>) {
    let mut secrets = take_list(spec, IMAGE_PULL_SECRETS);
    secrets.extend(added);
    let mut names = BTreeSet::new();
    secrets.retain(|secret| names.insert(name(secret)));
    if !secrets.is_empty() {
        spec.insert(IMAGE_PULL_SECRETS.to_owned(), secrets.into());
    }
}

fn take_list(spec: &mut Map<String, Value>, list: &str) -> Vec<Value> {
    match spec.remove(list) {
        Some(Value::Array(items)) => items,
        _ => Vec::new(),
    }
}

fn name(item: &Value) -> String {
    item["name"].as_str().unwrap_or_default().to_owned()
}
