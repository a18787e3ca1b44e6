//! CloneSet rollouts on a real node, undisturbed and disturbed: kubelet, containerd, runc, scheduler and
//! controller-manager, with our daemon and manager as processes, with their own accounts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod alone;
mod autoscaling;
mod drain;
mod hooks;
mod metrics_api;
mod migration;
mod partition;
mod volumes;

use support::{manager, pods, programs, untyped, workloads};
