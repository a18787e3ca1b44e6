//! The PersistentVolumeClaims of a workload's Pods.

use crate::in_place::Pod;
use kruise_api::keys;

/// A PersistentVolumeClaim of a workload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Name of the PersistentVolumeClaim.
    pub name: String,
    /// UID of the PersistentVolumeClaim.
    pub uid: String,
    /// Instance ID of the Pod that it belongs to (label [`kruise_api::keys::CLONESET_INSTANCE_ID`]); empty if it has no label.
    pub instance_id: String,
    /// Whether it has a `deletionTimestamp`.
    pub terminating: bool,
    /// Whether it also has another owner.
    pub has_other_owner: bool,
    /// Whether another owner is its controller; an object has at most one.
    pub has_other_controller: bool,
    /// Storage class that should provision the volume, while it is unbound; empty if it names none.
    pub unbound_storage_class: Option<String>,
}

/// The ID that a Pod of a CloneSet shares with its claims; `None` if it has none. Whatever was done to its label, its
/// volumes are those of the ID in its name.
#[must_use]
pub fn instance_id<'a>(clone_set: &str, pod: &'a Pod) -> Option<&'a str> {
    let named = pod.name.strip_prefix(clone_set);
    let named = named.and_then(|name| name.strip_prefix('-'));
    named.or_else(|| instance_label(pod))
}

/// The ID in a Pod's label, which others may have changed or copied.
#[must_use]
pub fn instance_label(pod: &Pod) -> Option<&str> {
    pod.labels.get(keys::CLONESET_INSTANCE_ID).map(String::as_str)
}
