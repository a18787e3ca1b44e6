//! kruise-rs: OpenKruise's node plane and the workloads that live from it.

pub use kruise_workload::in_place;
pub use {
    kruise_api as api, kruise_cluster as cluster, kruise_cri as cri, kruise_ops as ops,
    kruise_workload as workload,
};

pub mod admission;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod manager;
pub mod node;
