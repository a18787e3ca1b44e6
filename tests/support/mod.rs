//! What several test targets share: a container runtime and a registry that misbehave on demand, our programs as
//! processes of a bed, CloneSets and their Pods, and waits.
//!
//! Each target compiles it anew and uses a part of it, hence `dead_code`.
#![allow(
    dead_code,
    unused_imports,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

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
