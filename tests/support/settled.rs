//! When a CloneSet has nothing left to do.

use kruise_api::cloneset::CloneSet;

/// Whether all of its Pods exist, updated and available.
pub fn is_settled(set: &CloneSet) -> bool {
    let (desired, status) = (set.spec.desired_replicas(), set.status.as_ref().unwrap());
    let counts = [
        status.replicas,
        status.updated_replicas,
        status.available_replicas,
    ];
    counts.iter().all(|count| *count == desired) && status.updated_available_replicas == Some(desired)
}
