//! Which Pods get their condition here.

use crate::view::PodView;

/// Whether the Pod has the gate but no condition yet. A CloneSet sets it for its Pods itself.
#[must_use]
pub fn lacks_condition(pod: &PodView) -> bool {
    pod.has_readiness_gate && pod.kruise_ready.is_none() && pod.active() && !pod.controlled_by_clone_set()
}
