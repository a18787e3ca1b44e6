//! What SidecarSet decides, without a client: the admission of Pods, the controller and the policies share it.

pub mod changed_field;
pub mod defaults;
pub mod hash;
pub mod history;
pub mod hot_upgrade;
pub mod inject;
pub mod json_merge;
pub mod limits;
pub mod matching;
pub mod not_injected;
pub mod overlap;
pub mod plan;
pub mod pod_metadata;
pub mod policy;
pub mod predicates;
pub mod recorded;
pub mod resources;
pub mod select;
pub mod set;
pub mod status;
pub mod upgradable;
pub mod upgrade;
pub mod validate;
pub mod waiting;

#[cfg(test)]
mod tests;
