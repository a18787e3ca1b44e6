//! What SidecarSet decides, without a client: the admission of Pods, the controller and the policies share it.

pub mod defaults;
pub mod hash;
pub mod recorded;
