//! When a CloneSet has nothing left to do.

use kruise_api::cloneset::CloneSet;

/// Whether all of its Pods are there, updated and available.
pub fn settled(set: &CloneSet) -> bool {
    let (wanted, status) = (set.spec.wanted(), set.status.as_ref().unwrap());
    let counts = [
        status.replicas,
        status.updated_replicas,
        status.available_replicas,
    ];
    counts.iter().all(|count| *count == wanted) && status.updated_available_replicas == Some(wanted)
}
