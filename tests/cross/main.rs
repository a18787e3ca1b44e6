//! Our programs together with those of the Go implementation: its manager with our daemon, its daemon with our manager,
//! and takeovers. `cargo xtask test --peer DIR` gives its folder (`KRUISE_PEER`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod charts;
mod common_checks;
mod container_meta;
mod events;
mod image_lists;
mod interop_cluster;
mod kubelet;
mod launch_priority;
mod mixed_programs;
mod partial_updates;
mod pod_probes;
mod rollout;
mod sidecar_injection;
mod sidecar_termination;
mod sidecarset;
mod takeover;

use support::{manager, programs, waits};
