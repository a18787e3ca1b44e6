//! One container as it is injected: with what it takes over from the containers of the Pod.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use kruise_api::container_hash::{EnvOrigin, PodMetadata};
use kruise_api::json::{list_items, set as set_field};
use kruise_api::keys;
use kruise_api::sidecarset::{PodInjectPolicy, SidecarContainer, TransferEnvVar};

use super::annotations::Record;
use super::assemble::{Injected, Parts};
use super::error::InjectionError;
use super::revision::Selected;
use crate::sidecarset::recorded::{hot_upgrade_names, version_alt_key, version_key};
use crate::sidecarset::resources::resources;
use crate::sidecarset::set::{is_hot_upgrade, is_native_sidecar, name};

/// Value of a policy that shares.
const ENABLED: &str = "enabled";

/// What the sidecars of a Pod may take over together: a Pod of 1 MiB has some 10 000 mounts, and each sidecar copies
/// them. A policy of the API server has time for about as many.
const MAX_COPIES: usize = 15_000;

/// The Pod before the injection, as far as sidecars take something over from it.
#[derive(Debug)]
pub(super) struct Source {
    /// Mounts of containers that were not injected, and the variables in their paths.
    mounts: Vec<Value>,
    mount_env: Vec<Value>,
    /// Block devices of these containers.
    devices: Vec<Value>,
    /// Variables of all containers, by the names of container and variable.
    env: BTreeMap<(String, String), Value>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    /// Containers, and init containers that keep running, whose names no set uses.
    resource_targets: Vec<Value>,
    /// Number of mounts, devices and variables that were taken over.
    copied: usize,
}

impl Source {
    pub(super) fn new(
        pod: &Value,
        labels: &BTreeMap<String, String>,
        annotations: &BTreeMap<String, String>,
        sets: &[Selected<'_>],
    ) -> Self {
        let containers = items(&pod["spec"]["containers"]);
        let own: Vec<&Value> = containers.clone().filter(|c| !is_injected(c)).collect();
        let env = containers.clone().flat_map(|container| {
            let key = |variable| (text(container, "name"), text(variable, "name"));
            items(&container["env"]).map(move |variable| (key(variable), variable.clone()))
        });
        let used: BTreeSet<&str> = sets
            .iter()
            .flat_map(|set| [&set.spec.init_containers, &set.spec.containers])
            .flat_map(|containers| containers.iter().flatten().map(name))
            .collect();
        let native = items(&pod["spec"]["initContainers"]).filter(|c| c["restartPolicy"] == "Always");
        let unused = |container: &&Value| !used.contains(container["name"].as_str().unwrap_or_default());
        Self {
            mount_env: mount_env(&own),
            mounts: own
                .iter()
                .flat_map(|c| items(&c["volumeMounts"]))
                .cloned()
                .collect(),
            devices: own
                .iter()
                .flat_map(|c| items(&c["volumeDevices"]))
                .cloned()
                .collect(),
            env: env.collect(),
            labels: labels.clone(),
            annotations: annotations.clone(),
            resource_targets: containers.chain(native).filter(unused).cloned().collect(),
            copied: 0,
        }
    }

    /// Adds what a set injects. Returns whether there are containers.
    pub(super) fn add(
        &mut self,
        set: &Selected<'_>,
        parts: &mut Parts,
        record: &mut Record,
    ) -> Result<bool, InjectionError> {
        let (init, containers) = (set.spec.init_containers.iter(), set.spec.containers.iter());
        let volumes = set.spec.volumes.iter().flatten();
        let volumes: BTreeMap<String, &Value> =
            volumes.map(|volume| (text(volume, "name"), volume)).collect();
        for container in init.flatten() {
            parts.volumes.extend(used_volumes(container, &volumes));
            let hot = is_hot_upgrade(container) && is_native_sidecar(container);
            let built = self.build(set, container)?;
            parts
                .init_containers
                .extend(copies(container, built, hot, record));
        }
        for container in containers.flatten() {
            parts.volumes.extend(used_volumes(container, &volumes));
            let built = self.build(set, container)?;
            let hot = is_hot_upgrade(container);
            parts.containers.extend(copies(container, built, hot, record));
        }
        parts
            .image_pull_secrets
            .extend(set.spec.image_pull_secrets.iter().flatten().cloned());
        let lists = [&set.spec.init_containers, &set.spec.containers];
        Ok(lists
            .into_iter()
            .flatten()
            .any(|containers| !containers.is_empty()))
    }

    /// The container with what it takes over.
    fn build(
        &mut self,
        set: &Selected<'_>,
        container: &SidecarContainer,
    ) -> Result<Map<String, Value>, InjectionError> {
        let mut built = container.container.clone();
        if let Some(policy) = &container.resources_policy {
            let targets: Vec<&Value> = self.resource_targets.iter().collect();
            let computed = resources(policy, &targets).map_err(|why| InjectionError::Resources {
                set: set.name.to_owned(),
                container: name(container).to_owned(),
                why: Box::new(why),
            })?;
            built.insert("resources".to_owned(), computed);
        }
        let shares_mounts = container.share_volume_policy.type_ == ENABLED;
        let device_policy = container.share_volume_device_policy.as_ref();
        let shares_devices = device_policy.is_some_and(|policy| policy.type_ == ENABLED);

        let mut paths: BTreeSet<String> = list_items(&built, "volumeMounts")
            .iter()
            .map(|mount| text(mount, "mountPath"))
            .chain(
                list_items(&built, "volumeDevices")
                    .iter()
                    .map(|d| text(d, "devicePath")),
            )
            .collect();
        let mounts = self.mounts.iter().filter(|_| shares_mounts);
        let mut copied = extend(&mut built, "volumeMounts", mounts, |mount| {
            paths.insert(text(mount, "mountPath"))
        });
        let devices = self.devices.iter().filter(|_| shares_devices);
        copied += extend(&mut built, "volumeDevices", devices, |device| {
            paths.insert(text(device, "devicePath"))
        });

        let marker = json!({ "name": keys::ENV_IS_INJECTED, "value": keys::TRUE });
        extend(&mut built, "env", [&marker], |_| true);
        let mut names: BTreeSet<String> = list_items(&built, "env")
            .iter()
            .map(|variable| text(variable, "name"))
            .collect();
        let transferred = container
            .transfer_env
            .iter()
            .flat_map(|transfer| self.transferred(transfer));
        let mount_env = self.mount_env.iter().filter(|_| shares_mounts);
        copied += extend(&mut built, "env", transferred.chain(mount_env), |variable| {
            names.insert(text(variable, "name"))
        });
        self.copied += copied;
        if self.copied > MAX_COPIES {
            return Err(InjectionError::TooManyCopies {
                set: set.name.to_owned(),
            });
        }
        Ok(built)
    }

    /// The variables that one entry takes over.
    fn transferred(&self, transfer: &TransferEnvVar) -> Vec<&Value> {
        let from = transfer
            .source_container_name_from
            .as_ref()
            .and_then(|from| from.field_ref.as_ref());
        let metadata = PodMetadata {
            labels: &self.labels,
            annotations: &self.annotations,
        };
        let container = match from.map(|field| EnvOrigin::from_field_path(&field.field_path)) {
            None => transfer.source_container_name.as_str(),
            Some(Some(origin)) => origin.value(&metadata),
            Some(None) => return Vec::new(),
        };
        let one = Some(&transfer.env_name).filter(|name| !name.is_empty());
        let names: BTreeSet<&String> = one.into_iter().chain(&transfer.env_names).collect();
        names
            .into_iter()
            .filter_map(|name| self.env.get(&(container.to_owned(), name.clone())))
            .collect()
    }
}

/// The set's volumes that a container mounts, or uses as devices.
fn used_volumes(container: &SidecarContainer, volumes: &BTreeMap<String, &Value>) -> Vec<Value> {
    let lists = ["volumeMounts", "volumeDevices"].map(|list| list_items(&container.container, list));
    let used = lists.into_iter().flatten();
    used.filter_map(|used| Some((*volumes.get(&text(used, "name"))?).clone()))
        .collect()
}

/// The container, or two for hot upgrade: the first one works, the second has the empty image.
fn copies(
    container: &SidecarContainer,
    built: Map<String, Value>,
    hot: bool,
    record: &mut Record,
) -> Vec<Injected> {
    let in_front = container.pod_inject_policy == Some(PodInjectPolicy::BeforeAppContainer);
    let built = Value::Object(built);
    if !hot {
        return vec![Injected {
            container: built,
            in_front,
        }];
    }
    let names = hot_upgrade_names(name(container));
    record.add_hot_upgrade(name(container), &names);
    let copy = |(at, name): (usize, &String)| {
        let mut copy = built.clone();
        set_field(&mut copy, &["name"], json!(name));
        if at > 0 {
            set_image(&mut copy, &container.upgrade_strategy.hot_upgrade_empty_image);
        }
        let [version, alt] = keys::ENV_SIDECAR_SET_VERSIONS;
        for (variable, key) in [(version, version_key(name)), (alt, version_alt_key(name))] {
            let path = format!("metadata.annotations['{key}']");
            let variable = json!({ "name": variable, "valueFrom": { "fieldRef": { "fieldPath": path } } });
            kruise_api::json::append(&mut copy, &["env"], variable);
        }
        Injected {
            container: copy,
            in_front,
        }
    };
    names.iter().enumerate().map(copy).collect()
}

/// An empty image is absent, for the API server to refuse.
fn set_image(container: &mut Value, image: &str) {
    if let Some(fields) = container.as_object_mut() {
        fields.remove("image");
        if !image.is_empty() {
            fields.insert("image".to_owned(), json!(image));
        }
    }
}

/// Adds the items that are `new` to a list; returns their number. Without any, the list stays as it is, or absent.
fn extend<'a>(
    container: &mut Map<String, Value>,
    list: &str,
    items: impl IntoIterator<Item = &'a Value>,
    mut new: impl FnMut(&Value) -> bool,
) -> usize {
    let added: Vec<Value> = items.into_iter().filter(|item| new(item)).cloned().collect();
    let number = added.len();
    if number == 0 {
        return 0;
    }
    match container.get_mut(list) {
        Some(Value::Array(present)) => present.extend(added),
        _ => {
            container.insert(list.to_owned(), added.into());
        }
    }
    number
}

/// The variables in paths of mounts, each name once.
fn mount_env(containers: &[&Value]) -> Vec<Value> {
    let (mut found, mut names) = (Vec::new(), BTreeSet::new());
    for container in containers {
        let env = items(&container["env"]).rev();
        let env: BTreeMap<&str, &Value> = env
            .map(|variable| (variable["name"].as_str().unwrap_or_default(), variable))
            .collect();
        for mount in items(&container["volumeMounts"]) {
            for name in variables(mount["subPathExpr"].as_str().unwrap_or_default()) {
                if let Some(variable) = env.get(name).filter(|_| names.insert(name)) {
                    found.push((*variable).clone());
                }
            }
        }
    }
    found
}

/// Names of the variables that a `subPathExpr` refers to, as `$(NAME)`.
fn variables(expression: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut rest = expression;
    while let Some((_, after)) = rest.split_once("$(") {
        let end = after
            .find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_')))
            .unwrap_or(after.len());
        let (name, behind) = after.split_at(end);
        if behind.starts_with(')') && name.starts_with(|c: char| !c.is_ascii_digit()) {
            names.push(name);
        }
        rest = after;
    }
    names
}

pub(crate) fn is_injected(container: &Value) -> bool {
    items(&container["env"]).any(|v| v["name"] == keys::ENV_IS_INJECTED && v["value"] == keys::TRUE)
}

fn items(list: &Value) -> std::slice::Iter<'_, Value> {
    list.as_array().map_or(&[][..], Vec::as_slice).iter()
}

fn text(value: &Value, field: &str) -> String {
    value[field].as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_found_as_kubelet_finds_them() {
        for (expression, names) in [
            ("x/$(ODD_NAME)/$(POD_NAME)", &["ODD_NAME", "POD_NAME"][..]),
            ("$$(A)", &["A"]),
            ("$(1A)$(A)", &["A"]),
            ("$($(a.b-c)", &["a.b-c"]),
            ("$()$(A $(B", &[]),
            ("$(é)", &[]),
            ("", &[]),
        ] {
            assert_eq!(variables(expression), names, "{expression}");
        }
    }
}
