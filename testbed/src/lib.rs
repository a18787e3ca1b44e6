//! The test bed: real Kubernetes nodes in their own namespaces, removed when the program that started them exits.

pub mod cluster;
pub mod peer;
pub mod port;
pub mod wait;

mod cgroup;
mod parts;
mod process;
mod sandbox;

/// Features that are off by default and that tests, benchmarks and side-by-side runs of our manager use.
pub const FEATURE_GATES: &str = "--feature-gates=CloneSetPartitionRollback=true,\
    InPlaceWorkloadVerticalScaling=true,PreDownloadImageForInPlaceUpdate=true,SidecarTerminator=true,EnhancedLivenessProbe=true";
