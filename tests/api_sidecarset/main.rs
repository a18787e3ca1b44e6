//! SidecarSets on a real API server, with the manager as a process with its own account. Pods are created as a dry run,
//! or the tests play kubelet.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod denied_writes;
mod fixture;
mod injection_policies;
mod invalid_sets;
mod large_objects;
mod leader_change;
mod namespace;
mod pod_webhooks;
mod policy_and_webhook;
mod selection_changes;

use support::{
    clone_set_namespace, connect, conversion, denied_updates, fake_kubelet, manager, manager_requests, pods,
    proxy, waits,
};
