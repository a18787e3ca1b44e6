//! Our programs together with those of the Go implementation: its manager with our daemon, its daemon with our
//! manager, and taking over from it. `cargo xtask test --peer DIR` says where its folder is (`KRUISE_PEER`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bed;
mod charts;
mod events;
mod halves;
mod kubelet;
mod rollout;
mod take_over;
mod together;
mod told;
mod work;

use support::{manager, programs, waits};
