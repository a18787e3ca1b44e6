//! Rollouts of CloneSets on a real node, undisturbed and disturbed: kubelet, containerd, runc, scheduler and
//! controller-manager, with our daemon and manager as processes, as their own accounts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod alone;
mod autoscaling;
#[path = "../support/connect.rs"]
mod connect;
mod drain;
mod hooks;
#[path = "../support/manager.rs"]
#[allow(dead_code, reason = "targets share it")]
mod manager;
mod metrics;
mod migration;
mod partition;
#[path = "../support/pods.rs"]
#[allow(dead_code, reason = "targets share it")]
mod pods;
#[path = "../support/programs.rs"]
#[allow(dead_code, reason = "targets share it")]
mod programs;
#[path = "../support/readiness.rs"]
#[allow(dead_code, reason = "targets share it")]
mod readiness;
#[path = "../support/sets.rs"]
#[allow(dead_code, reason = "targets share it")]
mod sets;
#[path = "../support/settled.rs"]
mod settled;
#[path = "../support/untyped.rs"]
mod untyped;
mod volumes;
#[path = "../support/waits.rs"]
#[allow(dead_code, reason = "targets share it")]
mod waits;
#[path = "../support/workloads/mod.rs"]
#[allow(dead_code, reason = "targets share it")]
mod workloads;
