//! kruise-rs: OpenKruise's node plane and the workloads that live from it.

pub mod admission;
pub mod api;
pub mod cluster;
pub mod cri;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod in_place;
pub mod manager;
pub mod node;
pub mod ops;
