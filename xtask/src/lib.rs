//! The commands people type while working on kruise-rs, and the test bed that its tests run on.

pub mod bench;
pub mod cluster;
pub mod codegen;
pub mod demo;
pub mod image;
pub mod peer;
pub mod port;
pub mod test;

/// Features that are off by default and that tests, benchmarks and side-by-side runs of our manager use.
pub const FEATURE_GATES: &str = "--feature-gates=CloneSetPartitionRollback=true,\
    InPlaceWorkloadVerticalScaling=true,PreDownloadImageForInPlaceUpdate=true";

mod parts;
mod process;
mod sandbox;
pub mod wait;
