//! The claims of a workload's Pods.

/// A claim of a workload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Its name.
    pub name: String,
    /// Identity of the object.
    pub uid: String,
    /// Which Pod's it is, by [`kruise_api::keys::CLONESET_INSTANCE_ID`]; empty when it does not say.
    pub instance_id: String,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// Whether somebody else owns it, too.
    pub has_other_owner: bool,
    /// Whether somebody else is its controller, of which there is one at most.
    pub has_other_controller: bool,
    /// While it is bound to no volume: the storage class that is to provide one; empty when it names none.
    pub unbound_storage_class: Option<String>,
}
