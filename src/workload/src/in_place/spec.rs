//! What changes in a Pod that is kept, or why it must be recreated.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Value, json};

use super::diff::{FieldChange, field_changes};
use super::normalize::{TemplateStorage, normalize};
use super::pod::Resources;
use super::quantity;
use kruise_api::cloneset::string_map;
use kruise_api::container_hash::{EnvOrigin, env_from_metadata};
use kruise_api::go_json;
pub use kruise_api::in_place::InPlaceUpdateGrace as Spec;
use kruise_api::keys;

/// A ControllerRevision as the engine reads it.
#[derive(Clone, Copy, Debug)]
pub struct RevisionData<'a> {
    /// Name of the ControllerRevision.
    pub name: &'a str,
    /// Its raw data, `{"spec":{"template":…}}`.
    pub data: &'a Value,
    /// Hash of the claim templates; `None` if it is not recorded.
    pub claim_hash: Option<&'a str>,
}

/// What the engine may do.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether environment taken from labels and annotations is updated (gate InPlaceUpdateEnvFromMetadata).
    pub env_from_metadata: bool,
    /// Whether CPU and memory are resized in place (gate InPlaceWorkloadVerticalScaling).
    pub vertical: bool,
    /// Whether a change of the claim templates requires a new Pod (gate RecreatePodWhenChangeVCTInCloneSetGate).
    pub recreate_for_claims: bool,
    /// Seconds between marking a Pod not ready and changing it.
    pub grace_seconds: i32,
    /// How templates are stored (gate TemplateNoDefaults).
    pub template_storage: TemplateStorage,
}

/// Why a Pod cannot be updated in place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MustRecreate {
    /// A field other than image, metadata and resources changes.
    #[error("{0} cannot be changed in place")]
    Field(String),
    /// The claim templates changed.
    #[error("the volume claim templates changed")]
    Claims,
    /// The quality of service class would change, which is immutable for a Pod.
    #[error("the quality of service class would change from {0} to {1}")]
    QualityOfService(&'static str, &'static str),
    /// Kubernetes does not resize such Pods.
    #[error("Pods with {0} cannot be resized")]
    NoResize(&'static str),
    /// The API server refuses to resize this Pod.
    #[error("its resize was refused: {0}")]
    ResizeRefused(String),
    /// The Pod's revision is no longer in the history.
    #[error("the Pod's revision is not in the history")]
    NoRevision,
    /// kubelet does not restart a container that is stopped for its environment.
    #[error("container {0} cannot get its new environment in place: its restartPolicy is {1}")]
    NeverRestarted(String, String),
    /// The Pod cannot be taken out of its Services for the update.
    #[error("the Pod lacks readiness gate InPlaceUpdateReady")]
    NoReadinessGate,
}

/// A map of a Pod's metadata.
#[derive(Clone, Copy)]
enum MetadataPart {
    Labels,
    Annotations,
}

impl MetadataPart {
    fn key(self) -> &'static str {
        match self {
            Self::Labels => "labels",
            Self::Annotations => "annotations",
        }
    }

    /// The entry of this key as the source of a variable's value.
    fn origin(self, key: &str) -> EnvOrigin {
        match self {
            Self::Labels => EnvOrigin::Label(key.to_owned()),
            Self::Annotations => EnvOrigin::Annotation(key.to_owned()),
        }
    }
}

/// Calculates the in-place change from `old` to `new`. They are compared in their [normal form](super::normalize): a
/// default that only one of them has is no change.
///
/// Beyond OpenKruise, a key that a container's environment reads is also found if it is removed or is the first of its
/// map; removing a map removes only the template's keys from the Pod; and if the template limits a resource without
/// requesting it, the request follows the limit.
///
/// # Errors
/// Why a new Pod is needed.
pub fn calculate_spec(
    old: &RevisionData<'_>,
    new: &RevisionData<'_>,
    options: &Options,
) -> Result<Spec, MustRecreate> {
    let changed = old
        .claim_hash
        .zip(new.claim_hash)
        .is_some_and(|(one, other)| one != other);
    if options.recreate_for_claims && changed {
        return Err(MustRecreate::Claims);
    }
    let mut spec = Spec {
        revision: new.name.to_owned(),
        grace_seconds: options.grace_seconds,
        ..Spec::default()
    };
    let (before, after) = (&old.data["spec"]["template"], &new.data["spec"]["template"]);
    let mut metadata = false;
    for change in field_changes(
        &normalize(before, options.template_storage),
        &normalize(after, options.template_storage),
    ) {
        match change.path.first().map(String::as_str) {
            Some("metadata") => metadata = true,
            _ => add_change(&change, before, after, options, &mut spec)?,
        }
    }
    add_implied_requests(before, &mut spec);
    if !spec.container_resources.is_empty() {
        let (one, other) = (qos_class(before), qos_class(after));
        if one != other {
            return Err(MustRecreate::QualityOfService(one, other));
        }
        // As the API server validates a resize.
        if before["spec"]["os"]["name"] == "windows" {
            return Err(MustRecreate::NoResize("os.name windows"));
        }
        if before["spec"]["resources"]
            .as_object()
            .is_some_and(|all| !all.is_empty())
        {
            return Err(MustRecreate::NoResize("resources of the whole Pod"));
        }
    }
    if metadata {
        add_metadata_changes(before, after, options, &mut spec)?;
    }
    Ok(spec)
}

/// Whether a field of a Pod's spec can have another value in a running Pod; `vertical` as in [`Options`].
#[must_use]
pub fn is_mutable(path: &[impl AsRef<str>], vertical: bool) -> bool {
    let path: Vec<&str> = path.iter().map(AsRef::as_ref).collect();
    match path.as_slice() {
        ["containers", _, "image"] => true,
        [
            "containers",
            _,
            "resources",
            "limits" | "requests",
            "cpu" | "memory",
        ] => vertical,
        _ => false,
    }
}

/// Adds the change of an image or a resource.
fn add_change(
    change: &FieldChange,
    before: &Value,
    after: &Value,
    options: &Options,
    spec: &mut Spec,
) -> Result<(), MustRecreate> {
    let refuse = || MustRecreate::Field(format!("template.{}", change.path.join(".")));
    let path: Vec<&str> = change.path.iter().map(String::as_str).collect();
    let Some((&"spec", field)) = path.split_first() else {
        return Err(refuse());
    };
    if !change.replaced || !is_mutable(field, options.vertical) {
        return Err(refuse());
    }
    let index = |list: &str| list.parse::<usize>().unwrap_or(usize::MAX);
    let container = |list: &str| {
        let name = &before["spec"]["containers"][index(list)]["name"];
        name.as_str().map(str::to_owned).ok_or_else(refuse)
    };
    match field {
        ["containers", nth, "image"] => {
            let image = after["spec"]["containers"][index(nth)]["image"].as_str();
            spec.container_images
                .insert(container(nth)?, image.ok_or_else(refuse)?.to_owned());
        }
        ["containers", nth, "resources", kind, name] => {
            let value = &after["spec"]["containers"][index(nth)]["resources"][*kind][*name];
            let quantity = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let resources = spec.container_resources.entry(container(nth)?).or_default();
            let part = match *kind {
                "limits" => &mut resources.limits,
                _ => &mut resources.requests,
            };
            part.get_or_insert_default()
                .insert((*name).to_owned(), Quantity(quantity));
        }
        _ => return Err(refuse()),
    }
    Ok(())
}

/// A resource that is limited but not requested has from the Pod's creation a request equal to its limit. It must stay
/// so, or the quality of service class would change.
fn add_implied_requests(before: &Value, spec: &mut Spec) {
    let containers = before["spec"]["containers"].as_array();
    for container in containers.into_iter().flatten() {
        let Some(new) = spec.container_resources.get_mut(container_name(container)) else {
            continue;
        };
        let requested = Resources::from_json(&container["resources"]).requests;
        for (resource, limit) in new.limits.iter().flatten() {
            if !requested.contains_key(resource) {
                let requests = new.requests.get_or_insert_default();
                requests.insert(resource.clone(), limit.clone());
            }
        }
    }
}

/// Adds the changes of the metadata: keys that containers read go with these containers, the rest into a patch.
fn add_metadata_changes(
    before: &Value,
    after: &Value,
    options: &Options,
    spec: &mut Spec,
) -> Result<(), MustRecreate> {
    let all_readers = match options.env_from_metadata {
        true => readers_by_origin(before),
        false => BTreeMap::new(),
    };
    let mut patch = Map::new();
    for part in [MetadataPart::Labels, MetadataPart::Annotations] {
        let map = |template: &Value| string_map(&template["metadata"][part.key()]);
        let mut plain = Map::new();
        let changed = changed_keys(&map(before), &map(after)).into_iter();
        for (key, value) in changed.filter(|(key, _)| !keys::OWN_POD_METADATA.contains(&key.as_str())) {
            let readers = all_readers.get(&part.origin(&key));
            let readers = readers.map_or(&[][..], Vec::as_slice);
            spec.update_env_from_metadata |= !readers.is_empty();
            for reader in readers {
                check_restart_policy(reader, spec)?;
            }
            match value {
                Some(value) if !readers.is_empty() => {
                    for reader in readers {
                        let name = container_name(reader).to_owned();
                        let read = spec.container_ref_metadata.entry(name).or_default();
                        let map = match part {
                            MetadataPart::Labels => &mut read.labels,
                            MetadataPart::Annotations => &mut read.annotations,
                        };
                        map.insert(key.clone(), value.clone());
                    }
                }
                value => {
                    plain.insert(key, json!(value));
                }
            }
        }
        if !plain.is_empty() {
            patch.insert(part.key().to_owned(), Value::Object(plain));
        }
    }
    add_finalizer_changes(before, after, &mut patch);
    let patch = match patch.is_empty() {
        true => json!({}),
        false => json!({ "metadata": patch }),
    };
    spec.meta_data_patch = Some(STANDARD.encode(go_json::to_sorted_json(&patch)));
    Ok(())
}

/// The containers of a template, by the labels and annotations that their environment reads.
fn readers_by_origin(template: &Value) -> BTreeMap<EnvOrigin, Vec<&Value>> {
    let mut readers: BTreeMap<EnvOrigin, Vec<&Value>> = BTreeMap::new();
    for container in template["spec"]["containers"].as_array().into_iter().flatten() {
        let variables = env_from_metadata(container).into_iter();
        let origins: BTreeSet<EnvOrigin> = variables.map(|(_, origin)| origin).collect();
        for origin in origins {
            readers.entry(origin).or_default().push(container);
        }
    }
    readers
}

fn container_name(container: &Value) -> &str {
    container["name"].as_str().unwrap_or_default()
}

/// Decodes `meta_data_patch`.
pub(super) fn decode_patch(patch: &str) -> Value {
    let text = STANDARD.decode(patch).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// A container that is not replaced for its image is stopped for its environment, and restarted according to its
/// policy.
fn check_restart_policy(container: &Value, spec: &Spec) -> Result<(), MustRecreate> {
    let name = container_name(container);
    match container["restartPolicy"].as_str() {
        Some(policy) if policy != "Always" && !spec.container_images.contains_key(name) => {
            Err(MustRecreate::NeverRestarted(name.to_owned(), policy.to_owned()))
        }
        _ => Ok(()),
    }
}

/// Keys whose values differ, with the new value.
fn changed_keys(
    before: &BTreeMap<String, String>,
    after: &BTreeMap<String, String>,
) -> Vec<(String, Option<String>)> {
    let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let differ = keys.into_iter().filter(|key| before.get(*key) != after.get(*key));
    differ.map(|key| (key.clone(), after.get(key).cloned())).collect()
}

/// Finalizers are a set in a strategic merge patch.
fn add_finalizer_changes(before: &Value, after: &Value, patch: &mut Map<String, Value>) {
    let set = |template: &Value| -> BTreeSet<String> {
        let names = template["metadata"]["finalizers"]
            .as_array()
            .into_iter()
            .flatten();
        names.filter_map(|n| n.as_str().map(str::to_owned)).collect()
    };
    let (one, other) = (set(before), set(after));
    let removed: Vec<_> = one.difference(&other).collect();
    let added: Vec<_> = other.difference(&one).collect();
    if !removed.is_empty() {
        patch.insert("$deleteFromPrimitiveList/finalizers".to_owned(), json!(removed));
    }
    if !added.is_empty() {
        patch.insert("finalizers".to_owned(), json!(added));
    }
}

/// The quality of service class of a Pod of this template, as Kubernetes determines it.
fn qos_class(template: &Value) -> &'static str {
    let spec = &template["spec"];
    let all = [&spec["containers"], &spec["initContainers"]];
    let containers = all
        .into_iter()
        .flat_map(|list| list.as_array().into_iter().flatten());
    let (mut limits, mut requests) = (BTreeMap::new(), BTreeMap::new());
    let mut guaranteed = true;
    for container in containers {
        let resources = Resources::from_json(&container["resources"]);
        let mut requested = resources.limits.clone();
        requested.extend(resources.requests);
        sum_resources(&requested, &mut requests);
        let limited = sum_resources(&resources.limits, &mut limits);
        guaranteed &= limited == 2;
    }
    if limits.is_empty() && requests.is_empty() {
        return "BestEffort";
    }
    if guaranteed && requests == limits {
        return "Guaranteed";
    }
    "Burstable"
}

/// Adds CPU and memory to `into`; returns how many of the two there were.
fn sum_resources(quantities: &BTreeMap<String, String>, into: &mut BTreeMap<String, i128>) -> usize {
    let counted = quantities
        .iter()
        .filter(|(name, _)| matches!(name.as_str(), "cpu" | "memory"))
        .filter_map(|(name, text)| Some((name, quantity::parse(text).filter(|v| *v > 0)?)));
    counted
        .map(|(name, value)| *into.entry(name.clone()).or_default() += value)
        .count()
}
