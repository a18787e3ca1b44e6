//! How far the update of a SidecarSet's Pods is.

use super::hot_upgrade::is_ready;
use super::predicates::{is_consistent, is_updated};
use super::set::SetView;
use crate::in_place::Pod;

/// What counts of a matched Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodState {
    /// Whether it has the current containers.
    pub updated: bool,
    /// Whether kubelet runs the images of its spec.
    pub consistent: bool,
    /// Whether it is ready and no container is about to be switched off.
    pub ready: bool,
}

impl PodState {
    /// The state of a Pod.
    #[must_use]
    pub fn new(set: &SetView<'_>, pod: &Pod) -> Self {
        Self {
            updated: is_updated(set, pod),
            consistent: is_consistent(set, pod, None),
            ready: is_ready(set, pod),
        }
    }

    /// Whether the containers run and serve.
    #[must_use]
    pub fn available(self) -> bool {
        self.consistent && self.ready
    }
}

/// Numbers of Pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// All of them.
    pub matched: i32,
    /// Those with the current containers.
    pub updated: i32,
    /// Those that are ready.
    pub ready: i32,
    /// Those with the current containers that are ready.
    pub updated_ready: i32,
}

impl Counters {
    /// Counts Pods.
    #[must_use]
    pub fn new(states: &[PodState]) -> Self {
        let count = |counts: fn(&PodState) -> bool| {
            let number = states.iter().filter(|state| counts(state)).count();
            i32::try_from(number).unwrap_or(i32::MAX)
        };
        Self {
            matched: count(|_| true),
            updated: count(|state| state.updated),
            ready: count(|state| state.available()),
            updated_ready: count(|state| state.updated && state.available()),
        }
    }
}
