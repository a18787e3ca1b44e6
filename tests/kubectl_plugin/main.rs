//! The kubectl plugin's binary on a real API server, with our manager. The tests play kubelet and the daemons.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../api_cloneset/fixture.rs"]
#[allow(dead_code, reason = "the tests of CloneSets use the rest of it")]
mod fixture;
mod node;
mod plugin;
mod pull;
mod real_node;
mod restart;
mod rollout;
mod status;
#[path = "../api_manager/test_cluster.rs"]
#[allow(dead_code, reason = "the controllers' other tests use the rest of it")]
mod test_cluster;

use support::{
    clone_set_namespace, connect, fake_kubelet, manager, manager_requests, pods, waits, workloads,
};
