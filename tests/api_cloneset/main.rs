//! CloneSets: the manager's binary, as its service account, on a real API server. The tests play kubelet.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod api_server_overload;
mod deadlines;
mod deletion;
mod describe_output;
mod docs_examples;
mod errors;
mod events;
mod feature_gates;
mod fixture;
mod foreign_owners;
mod idempotence;
mod image_pre_download;
mod lifecycle;
mod manager_crash;
mod memory_limit;
mod network_faults;
mod on_delete;
mod persistent_failures;
mod resize;
mod resource_usage;
mod revision_history;
mod scale;
mod shared_claims;
mod spec_changes;
mod takeover;
mod template_rejected;
#[path = "../api_manager/test_cluster.rs"]
#[allow(dead_code, reason = "the controllers' other tests use the rest of it")]
mod test_cluster;
mod update;
mod update_order;
mod upstream_examples;
mod upstream_fragments;
mod version_skew;
mod write_denied;

use support::{
    clone_set_namespace, connect, denied_updates, fake_kubelet, manager, manager_requests, pods, proxy,
    waits, workloads,
};
