//! Why a Pod is refused.

use crate::sidecarset::pod_metadata::PatchError;
use crate::sidecarset::resources::aggregate::ResourcesError;

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
