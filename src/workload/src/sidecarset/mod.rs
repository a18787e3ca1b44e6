//! What SidecarSet decides, without a client: the admission of Pods, the controller and the policies share it.

pub mod defaults;
pub mod hash;
pub mod hot_upgrade;
pub mod limits;
pub mod metadata;
pub mod predicates;
pub mod recorded;
pub mod select;
pub mod set;
pub mod status;
#[cfg(test)]
mod tests;
pub mod upgradable;
pub mod upgrade;
