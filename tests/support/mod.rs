//! What several test targets share.
#![allow(
    dead_code,
    unused_imports,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

pub mod fake_registry;
pub mod fault_cri;
