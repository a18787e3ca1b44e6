//! Our programs together with those of the Go implementation: its manager with our daemon, its daemon with our
//! manager, and taking over from it. `cargo xtask test --peer DIR` says where its folder is (`KRUISE_PEER`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bed;
#[path = "../support/manager.rs"]
#[allow(dead_code, reason = "targets share it")]
mod manager;
#[path = "../support/programs.rs"]
#[allow(dead_code, reason = "targets share it")]
mod programs;
#[path = "../support/readiness.rs"]
#[allow(dead_code, reason = "targets share it")]
mod readiness;
mod rollout;
mod take_over;
mod together;
mod told;
#[path = "../support/waits.rs"]
#[allow(dead_code, reason = "targets share it")]
mod waits;
mod work;
