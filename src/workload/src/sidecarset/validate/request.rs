//! What a review is decided by.

use serde_json::Value;

/// A ControllerRevision in the namespace of the controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Revision<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its label `kruise.io/sidecarset-name`: the SidecarSet that it belongs to.
    pub sidecar_set: &'a str,
    /// Its label `apps.kruise.io/sidecarset-custom-version`.
    pub custom_version: Option<&'a str>,
}

/// What a review is decided by. Objects are in v1beta1.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The SidecarSet after its defaults.
    pub set: &'a Value,
    /// The stored one, for updates.
    pub old: Option<&'a Value>,
    /// The stored SidecarSets that are [`Concerned`](super::Concerned). One with the name of `set` is taken for
    /// its stored version.
    pub stored: &'a [&'a Value],
    /// All ControllerRevisions of SidecarSets.
    pub revisions: &'a [Revision<'a>],
    /// Value of the whitelist for `patchPodMetadata` in the ConfigMap; `None` if there is none.
    pub whitelist: Option<&'a str>,
    /// Whether `patchPodMetadata` is allowed without a whitelist (gate `SidecarSetPatchPodMetadataDefaultsAllowed`).
    pub patch_metadata_allowed: bool,
}
