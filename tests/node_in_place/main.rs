//! Updates in place on a real node: etcd, API server, controllers, scheduler, containerd and kubelet, with our
//! daemon and our manager as their own service accounts. Nothing is played.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ahead;
mod batches;
#[path = "../node_recreate/bed/mod.rs"]
#[allow(dead_code, unused_imports)]
mod bed;
mod environment;
mod field;
mod image;
#[path = "../container_meta/pod.rs"]
#[allow(dead_code)]
mod pod;
mod policy;
mod resources;
mod unproven;

use support::{connect, manager, programs, settled, waits};
