//! The manager's binary, as its service account, on a real API server. The tests play the daemons.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod barriers;
mod image_lists;
mod jobs;
mod leader_election;
mod network;
mod new_nodes;
mod node_images;
mod pod_probes;
mod pod_readiness;
mod pull_secrets;
mod recreate_jobs;
mod recreate_requests;
mod registry_limit;
mod scale;
mod tenants;
mod test_cluster;
mod unresponsive_daemons;
mod v1alpha1_compat;
mod v1alpha1_daemon;

use support::{connect, etcd, manager, manager_requests, waits};
