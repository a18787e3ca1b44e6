//! kruise-rs: OpenKruise's node plane and the workloads that live from it.

// A panic is one failed request or pass: it has to unwind in every profile.
#[cfg(panic = "abort")]
compile_error!("a panic must unwind: leave `panic` out of the profile");

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
