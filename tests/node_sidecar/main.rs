//! SidecarSets on a real node: injection by the webhook, updates in place by kubelet, with our manager as a process with
//! its own account.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod hot_upgrade;
mod load;
mod manual;
mod sidecar_ops;
mod update;

use support::workloads;
