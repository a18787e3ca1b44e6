//! What several test targets share: a container runtime and a registry that misbehave on demand, our programs as
//! processes of a bed, CloneSets and their Pods, and waits.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::new_without_default
)]

pub mod binaries;
pub mod chance;
pub mod charts;
pub mod connect;
pub mod converted;
pub mod etcd;
pub mod fake_registry;
pub mod fault_cri;
pub mod manager;
pub mod pods;
pub mod programs;
pub mod readiness;
pub mod sets;
pub mod settled;
pub mod shapes;
pub mod untyped;
pub mod waits;
pub mod workloads;
