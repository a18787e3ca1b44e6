//! In-place updates on a real node: etcd, API server, controllers, scheduler, containerd and kubelet, with our daemon
//! and our manager with their own service accounts. Nothing is faked.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod clone_set_ops;
mod env_update;
#[path = "../node_recreate/fixture/mod.rs"]
#[allow(dead_code, unused_imports)]
mod fixture;
mod image_update;
#[path = "../container_meta/pod_meta.rs"]
#[allow(dead_code)]
mod pod_meta;
mod pre_pull;
mod resize;
mod update_order;
mod update_policy;
mod without_daemon;

use support::{connect, manager, programs, settled, waits};
