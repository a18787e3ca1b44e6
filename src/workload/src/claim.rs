//! The PersistentVolumeClaims of a workload's Pods.

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
