//! Injection: containers, volumes, pull secrets and annotations of SidecarSets for a new Pod.
//!
//! `candidates` selects the sets, `revision` the version of each, `build` makes one container, `assemble` puts
//! everything into the Pod and `annotations` records it. The result depends on nothing but the arguments.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde_json::{Value, json};

use kruise_api::cloneset::string_map;
use kruise_api::json::set;

use super::pod_metadata::patch_annotations;
use super::set::names_in_pod;

mod annotations;
mod assemble;
pub(in crate::sidecarset) mod build;
pub(in crate::sidecarset) mod candidates;
mod error;
pub(in crate::sidecarset) mod revision;

pub(crate) use build::is_injected;
pub use candidates::Cluster;
pub use error::InjectionError;
pub use revision::named_by;

/// How to inject.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Sorts the injected containers by name (gate `EnableSortSidecarContainerByName`). Init containers always are.
    pub sort_containers: bool,
    /// Time to record.
    pub now: Timestamp,
}

/// Injects SidecarSets into a new, active Pod (raw JSON) of `namespace`. Returns whether containers were injected.
///
/// Annotations of `patchPodMetadata` are added also if they were not. `random_percent` gives a random number below 100
/// for each set that injects an older revision into a percentage of its Pods.
///
/// # Errors
///
/// If something that a matching set refers to is missing or invalid. The Pod may be half-changed then.
pub fn inject(
    pod: &mut Value,
    namespace: &str,
    cluster: &Cluster<'_>,
    options: &Options,
    random_percent: &mut dyn FnMut() -> u32,
) -> Result<bool, InjectionError> {
    if !is_active(pod) {
        return Ok(false);
    }
    let labels = string_map(&pod["metadata"]["labels"]);
    let selected = candidates::select(&labels, namespace, cluster, random_percent)?;
    if selected.is_empty() {
        return Ok(false);
    }
    let own_annotations = string_map(&pod["metadata"]["annotations"]);
    let mut pod_annotations = own_annotations.clone();
    for set in &selected {
        let patches = set.spec.patch_pod_metadata.as_deref().unwrap_or_default();
        patch_annotations(&mut pod_annotations, patches).map_err(|why| InjectionError::Annotation {
            set: set.name.to_owned(),
            why,
        })?;
    }
    write_annotations(pod, &pod_annotations);

    let mut record = annotations::Record::parse(&pod_annotations, &own_annotations)?;
    let mut source = build::Source::new(pod, &labels, &pod_annotations, &selected);
    let mut parts = assemble::Parts::default();
    for set in &selected {
        check_names(pod, set)?;
        if source.add(set, &mut parts, &mut record)? {
            record.add_set(set, options.now);
        }
    }
    if parts.is_empty() {
        return Ok(false);
    }
    assemble::assemble(pod, parts, options.sort_containers);
    write_annotations(pod, &record.into_annotations());
    Ok(true)
}

/// The API server refuses a Pod with the same name in both lists.
fn check_names(pod: &Value, set: &revision::Selected<'_>) -> Result<(), InjectionError> {
    for (other_list, containers, is_init) in [
        ("initContainers", &set.spec.containers, false),
        ("containers", &set.spec.init_containers, true),
    ] {
        let names = containers
            .iter()
            .flatten()
            .flat_map(|container| names_in_pod(container, is_init));
        let other = pod["spec"][other_list].as_array();
        let is_taken = |name: &String| other.into_iter().flatten().any(|own| own["name"] == **name);
        if let Some(name) = names.into_iter().find(is_taken) {
            let set = set.name.to_owned();
            return Err(InjectionError::NameTaken { set, name });
        }
    }
    Ok(())
}

fn is_active(pod: &Value) -> bool {
    !pod["metadata"]["deletionTimestamp"].is_string()
        && !matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"))
}

fn write_annotations(pod: &mut Value, annotations: &BTreeMap<String, String>) {
    for (key, value) in annotations {
        set(pod, &["metadata", "annotations", key], json!(value));
    }
}

#[cfg(test)]
mod tests;
