//! Injection: containers, volumes, pull secrets and annotations of SidecarSets for a new Pod.
//!
//! `candidates` selects the sets, `revision` the version of each, `build` makes one container, `assemble` puts
//! everything into the Pod and `annotations` records it. The result depends on nothing but the arguments.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ControllerRevision;
use serde_json::{Value, json};

use kruise_api::cloneset::string_map;
use kruise_api::json::set;

use super::pod_metadata::{PatchError, patch_annotations};
use super::resources::aggregate::ResourcesError;
use super::set::{SetView, names_in_pod};

mod annotations;
mod assemble;
pub(in crate::sidecarset) mod build;
pub(in crate::sidecarset) mod candidates;
pub(in crate::sidecarset) mod revision;

pub(crate) use build::is_injected;
pub use revision::named_by;

/// What the cluster has, as far as it matters for one Pod.
#[derive(Clone, Copy, Debug)]
pub struct Cluster<'a> {
    /// All SidecarSets, in any order.
    pub sets: &'a [SetView<'a>],
    /// Labels of the Pod's Namespace; `None` if it is not known.
    pub namespace_labels: Option<&'a BTreeMap<String, String>>,
    /// The ControllerRevisions of SidecarSets, as far as sets name them.
    pub revisions: &'a [Arc<ControllerRevision>],
}

/// How to inject.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Sorts the injected containers by name (gate `EnableSortSidecarContainerByName`). Init containers always are.
    pub sort_containers: bool,
    /// Time to record.
    pub now: Timestamp,
}

/// Why a Pod is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InjectionError {
    /// The revision that a set names does not exist.
    #[error("ControllerRevision {revision:?} of SidecarSet {set:?} not found")]
    RevisionNotFound {
        /// Name of the set.
        set: String,
        /// Name of the revision, or its custom version.
        revision: String,
    },
    /// The data of a revision are not those of a SidecarSet.
    #[error("ControllerRevision {revision:?} of SidecarSet {set:?} is invalid: {why}")]
    InvalidRevision {
        /// Name of the set.
        set: String,
        /// Name of the revision.
        revision: String,
        /// What is wrong.
        why: String,
    },
    /// An annotation cannot be patched.
    #[error("SidecarSet {set:?}: {why}")]
    Annotation {
        /// Name of the set.
        set: String,
        /// What is wrong.
        why: PatchError,
    },
    /// The Pod already has an annotation of ours, and it is none.
    #[error("annotation {key} is invalid: {value:?}")]
    InvalidAnnotation {
        /// Key of the annotation.
        key: &'static str,
        /// The first characters of its value.
        value: String,
    },
    /// A set makes an annotation of ours one that is none.
    #[error("patchPodMetadata of a SidecarSet makes annotation {key} invalid: {value:?}")]
    InvalidPatch {
        /// Key of the annotation.
        key: &'static str,
        /// The first characters of its value.
        value: String,
    },
    /// The Pod has too much that sidecars take over.
    #[error(
        "SidecarSet {set:?}: sidecars would take over more than 15000 mounts, devices and variables of the Pod"
    )]
    TooManyCopies {
        /// Name of the set.
        set: String,
    },
    /// The Pod has a container with the name of an init container of a set, or the other way round.
    #[error(
        "SidecarSet {set:?} and the Pod have a container and an init container of the same name, {name:?}"
    )]
    NameTaken {
        /// Name of the set.
        set: String,
        /// Name of the container in the Pod.
        name: String,
    },
    /// Resources of a container have no result.
    #[error("resourcesPolicy of container {container:?} of SidecarSet {set:?}: {why}")]
    Resources {
        /// Name of the set.
        set: String,
        /// Name of the container.
        container: String,
        /// What is wrong.
        why: Box<ResourcesError>,
    },
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
fn check_names(pod: &Value, set: &candidates::Selected<'_>) -> Result<(), InjectionError> {
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
