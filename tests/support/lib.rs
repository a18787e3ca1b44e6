//! What several test targets share: a container runtime and a registry that misbehave on demand, our programs as
//! processes of a bed, CloneSets and their Pods, and waits.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::new_without_default
)]

pub mod binaries;
pub mod charts;
pub mod clone_set_namespace;
pub mod connect;
pub mod conversion;
pub mod denied_updates;
pub mod etcd;
pub mod fake_kubelet;
pub mod fake_registry;
pub mod fault_cri;
pub mod malformed_reviews;
pub mod manager;
pub mod manager_requests;
pub mod pods;
pub mod programs;
pub mod proxy;
pub mod readiness;
pub mod seeded_rng;
pub mod settled;
pub mod tls_listener;
pub mod untyped;
pub mod waits;
pub mod workloads;
