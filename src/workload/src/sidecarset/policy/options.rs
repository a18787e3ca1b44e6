//! What the policies of one installation have in common.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;

use crate::sidecarset::set::SetView;

/// What a policy depends on besides its set.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Namespace of the installation: its Pods are not injected.
    pub namespace: &'a str,
    /// Sorts the injected containers by name (gate `EnableSortSidecarContainerByName`). Init containers always are.
    pub sort_containers: bool,
    /// All SidecarSets, in any order: canaries, places and annotations of one depend on the others.
    pub sets: &'a [SetView<'a>],
    /// The ControllerRevisions of SidecarSets, as far as sets name them.
    pub revisions: &'a [Arc<ControllerRevision>],
}
