//! Updates in place on a real node: etcd, API server, controllers, scheduler, containerd and kubelet, with our
//! daemon and our manager as their own service accounts. Nothing is played.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ahead;
mod batches;
#[path = "../node_recreate/bed/mod.rs"]
#[allow(dead_code, unused_imports)]
mod bed;
#[path = "../support/connect.rs"]
mod connect;
mod environment;
mod field;
mod image;
#[path = "../support/manager.rs"]
#[allow(dead_code, reason = "targets share it")]
mod manager;
#[path = "../container_meta/pod.rs"]
#[allow(dead_code)]
mod pod;
mod policy;
#[path = "../support/programs.rs"]
#[allow(dead_code, reason = "targets share it")]
mod programs;
#[path = "../support/readiness.rs"]
#[allow(dead_code, reason = "targets share it")]
mod readiness;
mod resources;
#[path = "../support/settled.rs"]
mod settled;
mod unproven;
#[path = "../support/waits.rs"]
#[allow(dead_code, reason = "targets share it")]
mod waits;
