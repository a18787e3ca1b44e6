//! The cluster side of kruise-rs: fans jobs out to nodes, and runs what needs a view of the whole cluster.
//!
//! In:  Nodes, NodeImages, ImagePullJobs, ImageListPullJobs, ContainerRecreateRequests, ContainerRecreateJobs and Pods
//!      (watches, reduced).
//! Out: NodeImages, status of jobs and requests, copies of pull secrets, Pod conditions, barriers, events.
//! Controllers run in the replica that holds the Lease; admission and conversion run in every replica, or in processes
//! of their own.

pub mod admission;
pub mod cloneset;
pub mod container_recreate;
pub mod container_recreate_job;
mod context;
pub mod enhanced_liveness;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod image_list_pull_job;
pub mod image_pull_job;
pub mod launch_priority;
mod namespace_limit;
pub mod node_image;
mod object_reference;
mod options;
pub mod pod_probe_marker;
pub mod pod_readiness;
mod repull;
mod restarts;
mod run;
pub mod sidecar_terminator;
pub mod sidecarset;
mod status_pacer;
mod stores;
pub mod view;

pub use context::Context;
pub use kruise_ops::{FeatureGate, FeatureGates};
pub use options::{LEASE, Options, Role};
pub use run::{Error, run};
pub use stores::Stores;
